"""DeepStow for Python programs: train a model that is larger than the GPU, with the same bits as without.

An ordinary PyTorch loop::

    from deepstow import AdamW, plan_for, recompute, stow

    plan = plan_for(model, gpu_memory="20GiB", batch=(2, 2048), max_grad_norm=1.0, recompute={"policy": "auto"})
    recompute(model, plan)                             # only if the plan was asked for it
    optimizer = stow(model, plan, rule=AdamW(lr=1e-5))
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

Any Hugging Face Trainer, TRL's as well::

    from deepstow import stowed

    trainer = stowed(SFTTrainer, gpu_memory="20GiB")(model, args=args, train_dataset=rows)
    trainer.train()

``NonFiniteError`` is raised by training whose gradients are not finite three steps in a row.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepstow.strategies.engine import SGD, AdamW, NonFiniteError, StowOptimizer, UpdateRule, stow
    from deepstow.strategies.engine.forward.checkpointing import recompute
    from deepstow.trainer.planning.plan_for import plan_for
    from deepstow.trainer.run.stowed_trainer import StowedTrainer, stowed

__all__ = [
    "SGD",
    "AdamW",
    "NonFiniteError",
    "StowOptimizer",
    "StowedTrainer",
    "UpdateRule",
    "plan_for",
    "recompute",
    "stow",
    "stowed",
]
# Where a name is defined. Each is imported when it is asked for: commands import this package, and start without torch.
_MODULES = dict.fromkeys(__all__, "deepstow.strategies.engine") | {
    "StowedTrainer": "deepstow.trainer.run.stowed_trainer",
    "plan_for": "deepstow.trainer.planning.plan_for",
    "recompute": "deepstow.strategies.engine.forward.checkpointing",
    "stowed": "deepstow.trainer.run.stowed_trainer",
}


def __getattr__(name: str) -> Any:
    """One of the names above."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """For completion."""
    return sorted({*globals(), *__all__})
