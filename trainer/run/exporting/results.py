"""What a run leaves: its last evaluation, the export, what is made of that, the upload, and the lines that say so.

The first rank makes all of it, and the others wait for it with their watchdogs, in a group that is open since the
beginning: of a rank that dies, or ends with an error, they know at once.

Invariant. What is made of the export, in ``<output_dir>/export-NAME``, is sealed under the manifest of that and what
else decides it. A run that is started again makes what is missing or damaged, of the export that is there, without a
step of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from deepstow.strategies.core.sizes import human
from deepstow.strategies.state.commit import replaced_folder, same_modes
from deepstow.strategies.state.sealed import MANIFEST, intact, seal, size_and_hash
from deepstow.trainer.config.recipe import Exact, Writer
from deepstow.trainer.errors import DiskFails, write_line
from deepstow.trainer.model import attention
from deepstow.trainer.model.hashes import changed, stamps
from deepstow.trainer.planning.from_config import budget_of
from deepstow.trainer.registry import Raised, blamed, codes
from deepstow.trainer.run.callbacks.reports import SAID, of_best, perplexity
from deepstow.trainer.run.checkpoints import checkpoint, disk, earlier, finished
from deepstow.trainer.run.checkpoints.earlier import FURTHER
from deepstow.trainer.run.exporting import export

if TYPE_CHECKING:
    from deepstow.trainer.config.recipe import Recipe
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

    about = together.on_first(make_way)
    for recipe in session.config.switched_on:
        recipe.after_training(trainer.model, session.config)
    with exporting(session):
        recipes = [recipe.sentence(session) for recipe in session.config.switched_on] if session.ranks.is_first else []
        callbacks = session.user_callbacks.sentence()
        receipt = export.export(trainer, session.tokenizer, session.config, about, recipes, callbacks)
    if not session.ranks.is_first:
        return
    if len(history := [record for record in log if "eval_loss" in record]) > 1:
        key = next((name for name in SAID if f"eval_{name}" in history[0]), "loss")
        ends, digits = (history[0], history[-1]), 1 if key == SAID[0] else 3
        first, last = (f"{record[f'eval_{key}']:.{digits}f} at step {record['step']}" for record in ends)
        write_line(f"{key} {first} -> {last}")
    if with_exchange is not None:
        at = checkpoint.step_of(best) if (best := trainer.origin()[1]) else step  # of these weights
        exact = next(record["eval_loss"] for record in reversed(log) if "eval_loss" in record and record["step"] == at)
        pairs = [f"{loss:.4f} (perplexity {perplexity(loss):.1f})" for loss in (exact, with_exchange)]
        write_line(f"held-out loss {pairs[0]} with exact sums, {pairs[1]} with strategies.tensor.exchange")
    assert receipt is not None
    write_line(
        f"export: {folder / 'export'} ({human(receipt.num_bytes)}), {of_best(session.config, trainer.state, '{}, ')}"
        f"reloaded: {receipt.num_tensors} tensors, names and shapes equal, largest difference of a logit "
        f"{receipt.largest_difference:.1e}"
    )
    if sentence := attention.sentence(session.config.model):
        write_line(f"export: {sentence}")
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
    if not names(config):
        return
    exact = Exact(exact_of(config), session.tokenizer, session.prepared.eval, budget_of(config, session.plan))
    together.on_first(partial(make, config, exact))


def folder_of(config: RunConfig, name: str) -> Path:
    """Where one is."""
    return Path(config.training.output_dir) / f"export-{name}"


def refuse(config: RunConfig) -> None:
    """Raise ConfigError for what cannot be made of the model."""
    for recipe in config.switched_on:
        recipe.refuse(config)


def names(config: RunConfig) -> list[str]:
    """Those that are asked for."""
    return [name for recipe in config.switched_on for name in recipe.exports(config)]


def missing(config: RunConfig) -> list[str]:
    """Those that are asked for and are not there, whole and made of the export that is there."""
    return [name for recipe in config.switched_on for name in _missing(config, recipe)]


def _missing(config: RunConfig, recipe: Recipe) -> dict[str, dict[str, Any]]:
    """What decides each that ``recipe`` has to make."""
    absent, code = dict[str, dict[str, Any]](), codes([recipe])
    for name, by_recipe in recipe.exports(config).items():
        deciding = dict(by_recipe) | ({"recipe": code} if code else {})
        with suppress(OSError):  # there is no exact one
            if intact(folder_of(config, name), FURTHER, {"decided by": _decided(config, deciding)}):
                continue
        absent[name] = deciding
    return absent


def exact_of(config: RunConfig) -> Path:
    """Where the exact export is."""
    return Path(config.training.output_dir) / "export"


def _decided(config: RunConfig, about: Mapping[str, Any]) -> dict[str, Any]:
    """What decides an export: the exact one, and what its recipe says."""
    return {"of": size_and_hash(exact_of(config) / MANIFEST)[1], **about}


def make(config: RunConfig, exact: Exact) -> None:
    """Make what is missing. Raise ExportError if one is not what was made, after reloading."""
    output, writers = Path(config.training.output_dir), list[Writer]()
    for recipe in config.switched_on:
        absent = _missing(config, recipe)
        if not absent:
            continue
        writer, is_outside = recipe.writer(config, exact), bool(codes([recipe]))
        writers.append(writer)
        for name, deciding in absent.items():
            folder = folder_of(config, name)
            if aside := earlier.move_aside([folder], output, overwrite=config.training.overwrite):
                write_line(f"the {folder.name} of before is now in {aside}")
            before = stamps(exact.folder)
            with replaced_folder(folder) as draft:
                with blamed(recipe.name, "write") if is_outside else nullcontext():
                    about = writer.write(name, draft)
                if altered := changed(before, exact.folder):
                    what = f"what made export-{name} has changed {exact.folder / altered[0]}, which is to be read only"
                    raise Raised(f"{what}; mend it, and start the run again: it makes the export anew")
                exact.tokenizer.save_pretrained(draft)
                same_modes(draft)
                seal(draft, FURTHER, {"decided by": _decided(config, deciding), **about})
            writer.wrote(name, folder)
    for writer in writers:
        writer.end()
