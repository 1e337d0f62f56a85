"""DeepStow for Python programs: everything that a training loop or a Trainer needs, in one place.

from deepstow import AdamW, plan_for, stow                       # an ordinary PyTorch loop
plan = plan_for(model, gpu_memory="20GiB", batch=(2, 2048), max_grad_norm=1.0)
optimizer = stow(model, plan, rule=AdamW(lr=1e-5))

from deepstow import stowed                                      # any Hugging Face Trainer, TRL's too
trainer = stowed(SFTTrainer, gpu_memory="20GiB")(model, args=args, train_dataset=rows)
"""

from strategies.engine import SGD, AdamW, NonFiniteError, StowOptimizer, stow
from strategies.engine.checkpointing import recompute
from trainer.planning.plan_for import plan_for
from trainer.run.stowed_trainer import stowed

__all__ = ["SGD", "AdamW", "NonFiniteError", "StowOptimizer", "plan_for", "recompute", "stow", "stowed"]
