"""What a run leaves: its last evaluation, the export, what is made of that, the upload, and the lines that say so.

The first rank makes all of it, and the others wait for it with their watchdogs, in a group that is open since the
beginning: of a rank that dies, or ends with an error, they know at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from deepstow.strategies.core.sizes import human
from deepstow.trainer.config.recipe import Exact
from deepstow.trainer.errors import DiskFails, write_line
from deepstow.trainer.model import attention
from deepstow.trainer.planning.from_config import budget_of
from deepstow.trainer.run import checkpoint, disk, earlier, export, finished, further
from deepstow.trainer.run.callbacks import SAID, of_best, perplexity

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.distributed.agreement import Agreement
    from deepstow.trainer.run.session import Session
    from deepstow.trainer.run.trainer import Trainer


@contextmanager
def exporting(session: Session) -> Iterator[None]:
    """Inside, an error of the disk is a DiskFails."""
    try:
        yield
    except Exception as error:
        if (fails := disk.found(error, session.folder)) is None:
            raise
        raise DiskFails(disk.line(fails, session.config, doing="export: ", lost="no export was made: ")) from error


def finish(session: Session, trainer: Trainer, together: Agreement) -> None:
    """Evaluate if the last step was not evaluated, export, check the export, and print where everything is."""
    step, log = trainer.state.global_step, trainer.state.log_history
    if session.prepared.eval is not None and not any(
        "eval_loss" in record and record["step"] == step for record in log
    ):
        trainer.evaluate()
    with_exchange = trainer.loss_as_trained() if session.prepared.eval is not None else None
    folder = session.folder
    if session.over is not None:
        session.say(session.over)
        return

    def make_way() -> dict[str, Any]:
        with exporting(session):
            if trainer.mounted is not None:
                trainer.mounted.refuse_other()
            about = finished.about(session.config, step, *trainer.origin())
            overwrite = session.config.training.overwrite
            if aside := earlier.move_aside(earlier.exports(folder), folder, overwrite=overwrite):
                write_line(f"the export of before is now in {aside}")
            return about

    about = together.on_first(session.ranks.rank, make_way)
    for recipe in session.config.switched_on:
        recipe.after_training(trainer.model, session.config)
    with exporting(session):
        recipes = [each.sentence(session) for each in session.config.switched_on] if session.ranks.is_first else []
        callbacks = session.user_callbacks.sentence()
        receipt = export.export(trainer, session.tokenizer, session.config, about, recipes, callbacks)
    if not session.ranks.is_first:
        return
    if len(history := [record for record in log if "eval_loss" in record]) > 1:
        key = next((name for name in SAID if f"eval_{name}" in history[0]), "loss")
        ends, digits = (history[0], history[-1]), 1 if key == SAID[0] else 3
        first, last = (f"{each[f'eval_{key}']:.{digits}f} at step {each['step']}" for each in ends)
        write_line(f"{key} {first} -> {last}")
    if with_exchange is not None:
        of = checkpoint.step_of(best) if (best := trainer.origin()[1]) else step  # of these weights
        exact = next(record["eval_loss"] for record in reversed(log) if "eval_loss" in record and record["step"] == of)
        pairs = [f"{each:.4f} (perplexity {perplexity(each):.1f})" for each in (exact, with_exchange)]
        write_line(f"held-out loss {pairs[0]} with exact sums, {pairs[1]} with strategies.tensor.exchange")
    assert receipt is not None
    write_line(
        f"export: {folder / 'export'} ({human(receipt.num_bytes)}), {of_best(session.config, trainer.state, '{}, ')}"
        f"reloaded: {receipt.num_tensors} tensors, names and shapes equal, largest difference of a logit "
        f"{receipt.largest_difference:.1e}"
    )
    if said := attention.sentence(session.config.model):
        write_line(f"export: {said}")
    write_line(f"run folder: {folder} (plan.txt, metrics.jsonl, config.yaml, checkpoints)")
    if "tensorboard" in session.config.training.report_to:
        write_line(f"curves:     tensorboard --logdir {folder}")


def following(config: RunConfig) -> str:
    """What to type next: to talk to the export, or to read how else it is used."""
    folder = Path(config.training.output_dir)
    talks = config.chosen_task.generates and not config.model.trust_remote_code and not config.model.attention_mask
    command = f"deepstow chat {quote(str(folder))}" if talks else "deepstow docs use"
    return f"next:       {command}{', or deepstow train --config finetune' * (folder == Path('runs/quickstart'))}"


def export_further(session: Session, together: Agreement) -> None:
    """Make what else the config exports, on the first rank, once training has left the device."""
    config = session.config
    if not further.names(config):
        return
    exact = Exact(further.exact_of(config), session.tokenizer, session.prepared.eval, budget_of(config, session.plan))
    together.on_first(session.ranks.rank, partial(further.make, config, exact))
