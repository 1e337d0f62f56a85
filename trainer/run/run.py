"""A whole run: prepare, train, finish. Returns an exit code and closes every process group."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch.distributed

from strategies.core.applied import shown_by
from strategies.core.compose import requirements_of
from strategies.core.protocol import Requirement
from strategies.core.sizes import human
from strategies.engine.memory import accelerator
from trainer.dist import deepspeed_ops
from trainer.dist.ranks import GRACE_S, Ranks, collectives_of, process_group, quiet_libraries
from trainer.errors import ExitCode, UserError, report
from trainer.planning.from_config import check_installed
from trainer.run import oom, order
from trainer.run.callbacks import write_line
from trainer.run.export import export
from trainer.run.model_card import model_card

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainer.config.sections import RunConfig
    from trainer.run.order import Run
    from trainer.run.trainer import Trainer


def refuse_unbuildable(config: RunConfig, ranks: Ranks) -> None:
    """Check, before anything is prepared, what DeepSpeed and torch have to provide.

    Raises:
        ConfigError: an extension has to be compiled and cannot be, torch has no collectives for the device, or this
            Transformers does not work with the ZeRO stage.
    """
    has_engine = Requirement.DEEPSPEED in requirements_of(config.strategies)
    if (has_engine or ranks.world_size > 1) and not config.training.use_cpu:
        collectives_of(accelerator.kind() or "cpu")
    check_installed(config)
    if has_engine:
        deepspeed_ops.refuse_what_cannot_be_built()


def run(config: RunConfig, ranks: Ranks) -> int:
    """Train as ``config`` says, on this rank. All process groups are closed, whatever happens."""
    quiet_libraries()
    timeout_s = config.training.ddp_timeout or 1800
    on_cpu = bool(config.training.use_cpu)
    single = Requirement.DEEPSPEED in requirements_of(config.strategies)
    shown = shown_by(write_line) if ranks.is_first else nullcontext()
    with shown, process_group(ranks, timeout_s, single=single, on_cpu=on_cpu):
        return _guarded(config, ranks)


def _guarded(config: RunConfig, ranks: Ranks) -> int:
    """Run, and turn every error into lines and an exit code while the process group is open.

    A traceback refers to its frames, the frames to the engine, and the engine to its groups, so the frames are cleared
    before the groups are closed (see [Note: closing gloo] in ``trainer/dist/ranks.py``).
    """
    prepared: Run | None = None
    try:
        prepared = order.prepare(config, ranks)
        train(prepared)
        return ExitCode.FINISHED
    except UserError as error:
        if ranks.is_first:
            report(error)
        elif list(error.more()):  # a launcher ends all ranks when one has ended, and the first one still reports
            time.sleep(GRACE_S)
        traceback.clear_frames(error.__traceback__)
        return error.code
    except KeyboardInterrupt as stop:
        if ranks.is_first:
            print("interrupted; training.resume_from_checkpoint=auto goes on from the last checkpoint", file=sys.stderr)
        traceback.clear_frames(stop.__traceback__)
        return ExitCode.INTERRUPTED
    except Exception as error:
        code = ExitCode.FAILED
        if prepared is not None and oom.is_shortage(error):
            print("\n".join(oom.explain(config, prepared.plan, error)), file=sys.stderr, flush=True)
            code = ExitCode.OUT_OF_MEMORY
        if isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error):
            # The rank that failed first reports why, and the launcher ends this one, unless that rank was killed.
            time.sleep(GRACE_S)
            code = ExitCode.PEER_DIED
        traceback.print_exc()
        traceback.clear_frames(error.__traceback__)
        return code


def show_sample(config: RunConfig) -> None:
    """Print one tokenised row of the training data, with its trained and its masked tokens."""
    from trainer.data import sample

    words, prepared = order.read_data(config, Path(config.training.output_dir), quiet=True)
    print(sample.render(prepared, words, colour=sys.stdout.isatty()))


def train(run: Run) -> None:
    """Train and finish. The trainer is a local variable, so that it is freed with this frame."""
    trainer = order.make_trainer(run)
    if run.resume is not None:
        run.say(f"resuming from {run.resume}")
    try:
        trainer.train(resume_from_checkpoint=str(run.resume) if run.resume else None)
        finish(run, trainer)
    finally:
        trainer.accelerator.free_memory()  # ends DeepSpeed's engine
        del trainer
        gc.collect()


def finish(run: Run, trainer: Trainer) -> None:
    """Evaluate if the last step was not evaluated, export, check the export, and print where everything is."""
    history = [record for record in trainer.state.log_history if "eval_loss" in record]
    if run.prepared.eval is not None and (not history or history[-1]["step"] < trainer.state.global_step):
        trainer.evaluate()
        history = [record for record in trainer.state.log_history if "eval_loss" in record]
    folder, section, hf_config = run.folder, run.config.model, cast("PreTrainedModel", trainer.model).config
    receipt = export(
        trainer,
        run.tokenizer,
        folder / "export",
        merge=section.lora is not None and section.name_or_path is None,
        trust_remote_code=section.trust_remote_code,
        card=model_card(run.config, hf_config, trainer.state, sys.argv, run.ranks.world_size),
    )
    if not run.ranks.is_first:
        return
    if len(history) > 1:
        first, last = history[0], history[-1]
        write_line(
            f"perplexity {first['eval_perplexity']:.1f} at step {first['step']} -> {last['eval_perplexity']:.1f} "
            f"at step {last['step']}"
        )
    assert receipt is not None
    write_line(
        f"export: {folder / 'export'} ({human(receipt.num_bytes)}), reloaded: {receipt.num_tensors} tensors, names and "
        f"shapes equal, largest difference of a logit {receipt.largest_difference:.1e}"
    )
    write_line(f"run folder: {folder} (plan.txt, metrics.jsonl, config.yaml, checkpoints)")
    write_line(f"curves:     tensorboard --logdir {folder}")
    if folder == Path("runs/quickstart"):
        write_line("next:       make finetune")
