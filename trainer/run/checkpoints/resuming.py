"""Which checkpoint a run goes on from, decided by one rank for all; what it takes over, and what not.

The first rank completes what a kill has cut short, compares
the checkpoint with its manifest and tells the others: two ranks that do not see the same folder would go on from
different steps. Then every rank compares the manifest with its config, by ``resume_rules.py``: first the
config alone, before any data is read; then what was opened. A refusal names each key with its file and line. What a
checkpoint of an earlier release has no hash of is named in one line, and not compared. One that does not have what
Hugging Face's arguments were is taken to have had the defaults of the releases that are installed, which is said.

Hugging Face restores its whole state: how often is logged, evaluated and saved, and the path of the best checkpoint.
Here intervals are those of the config. What was best so far stays the bar if the run goes on in its own folder with the
same metric; the best checkpoint is the one of that name there, wherever the folder was when it was saved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, TrainerCallback, TrainerState

from deepstow.strategies.core.protocol import Axis
from deepstow.strategies.core.resume import rule_at
from deepstow.trainer.config.arguments import TrainingSection
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.config.yaml_file import leaves
from deepstow.trainer.data.prepare import Contents
from deepstow.trainer.distributed.agreement import DAY_S, agreement
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError, DiskFails, write_line
from deepstow.trainer.registry import codes
from deepstow.trainer.run.checkpoints import checkpoint, earlier, resume_rules
from deepstow.trainer.run.checkpoints.checkpoint import Found
from deepstow.trainer.run.checkpoints.resume_rules import FILES, Changes
from deepstow.trainer.run.checkpoints.same_rows import Known
from deepstow.trainer.tasks.task import loaded

METRIC = ("metric_for_best_model", "greater_is_better")


@dataclass(slots=True)
class Resumed:
    """The checkpoint that a run goes on from, the keys that it takes from its config instead, by their rules, and what
    to log.

    ``places``: keys that say another place than the checkpoint's, with both values, as long as what is there has not
    been compared. ``weights``: the hash of those that training began with; None where nobody knows.
    """

    found: Found
    changed: dict[str, str]
    said: list[str]
    places: dict[str, tuple[object, object]] = field(default_factory=dict)
    weights: str | None = None

    @property
    def path(self) -> Path:
        return self.found.path

    def compare_contents(
        self, config: RunConfig, hf_config: PretrainedConfig, code: str, now: Contents, former: Callable[[], Contents]
    ) -> None:
        """Raise ConfigError if data, tokenizer or model differ and may not, once they are opened. ``former``: the
        hashes as the releases have them that had fewer.
        """
        run = self.found.manifest.run
        saved = {**run.data.model_dump(), "config": run.model.config, "code": run.model.code}
        hashes = former() if run.data.evaluation is None else now
        opened = {**hashes._asdict(), "config": checkpoint.plain_config(hf_config), "code": code}
        allowed, name = config.training.allow_change, str(self.path)
        changes = resume_rules.compare_contents(saved, opened, allowed, self.changed, name, self.places)
        if mended := _other_code(config, run.code):
            why = f"{' and '.join(mended)}, which makes them, is another file than then; "
            refused = [
                line._replace(what=why + line.what) if line.key == "data.path" else line for line in changes.refused
            ]
            changes = changes._replace(refused=refused)
        self._take(config, changes)
        self._compared({*Contents._fields})

    def compare_fact(self, config: RunConfig, fact: str, saved: str, now: str) -> None:
        """Raise ConfigError if the content that is a ``fact`` of the manifest differs, and may not."""
        changes = Changes({}, [], [])
        allowed, name = config.training.allow_change, str(self.path)
        resume_rules.compare_fact(fact, saved, now, allowed, name, self.places, changes)
        self._take(config, changes)
        self._compared({fact})

    def _compared(self, facts: set[str]) -> None:
        self.places = {key: both for key, both in self.places.items() if resume_rules.PLACES[key] not in facts}

    def compare_shapes(self, shapes: str) -> None:
        """Raise ConfigError if the model, once it is built, has parameters of other names or shapes, by their hash."""
        if shapes != self.found.manifest.run.model.shapes:
            raise ConfigError(
                f"model: its parameters have other names or shapes than those in {self.path}; train the same model, or "
                f"start anew in another training.output_dir"
            )

    def _take(self, config: RunConfig, changes: Changes) -> None:
        if changes.refused:
            tree = {".".join(key): value for key, value in leaves((), config.tree())}
            faults = [(key, tree.get(key) if value is None else value, what) for key, value, what in changes.refused]
            raise ConfigError([config.error(*fault).lines[0] for fault in faults])
        self.changed |= changes.keys
        lines = [f"resumed with {line}" for line in changes.said]
        self.said += [line for line in lines if line not in self.said]


def decide(config: RunConfig, ranks: Ranks) -> Resumed | None:
    """The checkpoint to go on from, after a line for each newer one that is damaged; None starts from the beginning.
    A collective. Raise ConfigError if there is none that could be resumed with this config.
    """
    with agreement(ranks, DAY_S) as together:
        saved, lines = together.on_first(lambda: _look(config))
    if saved is None:
        return None
    if ranks.is_first:
        for line in lines:
            write_line(line)
    places = resume_rules.moved(saved.manifest.run.config, config.tree(), _known(saved))
    lines = _versions(saved) + _threads(saved) + _assumed(saved)
    resumed = Resumed(saved, {}, lines, places, saved.manifest.run.model.weights)
    resumed._take(config, compare(config, ranks.world_size, saved))
    return resumed


def compare(config: RunConfig, world_size: int, found: Found) -> Changes:
    """The run that saved a checkpoint and this one on so many ranks, by their configs."""
    run, tree = found.manifest.run, config.tree()
    copies = _copies(run.config, run.world_size), _copies(tree, world_size)
    # What the manifest of an earlier version does not have was the default that is installed.
    recorded = run.arguments or {}
    then = {key: recorded.get(key, value) for key, value in resolved(config, run.config.get("training", {})).items()}
    now = resolved(config, tree["training"])
    return resume_rules.compare(run.config, tree, copies, str(found.path), _known(found), (then, now))


def resolved(config: RunConfig, written: Mapping[str, Any]) -> dict[str, Any]:
    """What keys of ``training`` mean to Hugging Face's Trainer of this task, as JSON: as ``written`` in a section, else
    the installed defaults. Only those that two runs are compared by: no folder, name or address of anything. Without
    ``use_cpu``, which is the machine's if it is not written.
    """
    task = config.chosen_task
    values: dict[str, Any] = {
        argument.name: argument.default if argument.default_factory is MISSING else argument.default_factory()
        for argument in fields(loaded(task.arguments))
    }
    values |= {"data_seed": written.get("seed"), **task.complete(dict(written), config)}
    rules = {key: rule_at(field, "fixed") for key, field in TrainingSection.model_fields.items()}
    compared = [key for key, rule in rules.items() if rule != "free" and key != "use_cpu" and key in values]
    comparable: dict[str, Any] = json.loads(json.dumps({key: values[key] for key in compared}, default=str))
    return comparable


def _other_code(config: RunConfig, saved: Mapping[str, str]) -> list[str]:
    """What makes rows, is from outside, and is another file than a run has ``saved``, by its name in the config."""
    data = config.data.parts()
    formats_and_readers = (thing for part in data for thing in (part.asked_format(), part.asked_reader()))
    now = codes([config.chosen_task, *filter(None, formats_and_readers)])
    return [name for name, code in now.items() if saved.get(name, code) != code]


def _known(found: Found) -> Known:
    run = found.manifest.run
    hashed = {"weights": run.model.weights, **{files.fact: getattr(run.data, files.fact) for files in FILES}}
    return Known(run.data.rows, run.model.config, [fact for fact, value in hashed.items() if not value])


def _look(config: RunConfig) -> tuple[Found | None, list[str]]:
    folder = Path(config.training.output_dir)
    try:
        checkpoint.restore(folder)
        earlier.complete(folder)
    except (OSError, ValueError) as error:
        what = (
            f"{folder}: what an earlier run was moving when it ended cannot be put away, nothing was trained: {error}"
        )
        raise DiskFails(what) from None
    return checkpoint.to_resume(config)


def _copies(tree: Mapping[str, Any], world_size: int) -> int:
    """How many copies of the model the ranks of a run hold: what a step adds up over."""
    strategies = {f"strategies.{name}": options for name, options in tree.get("strategies", {}).items()}
    degrees = (axis.value.rpartition(".") for axis in Axis if axis not in (Axis.EXPERTS, Axis.TOKENS))
    return world_size // math.prod(int(strategies.get(name, {}).get(key) or 1) for name, _, key in degrees)


def _versions(found: Found) -> list[str]:
    then, now = found.manifest.run.versions, checkpoint.versions()
    changed = [f"{name} {now[name]} (was {then[name]})" for name in now if name in then and then[name] != now[name]]
    return [f"resumed with other versions than the checkpoint's: {', '.join(changed)}"] if changed else []


def _threads(found: Found) -> list[str]:
    """A line if each rank has another number of threads than the ranks that saved."""
    then, now = found.manifest.run.threads, torch.get_num_threads()
    if then is None or then == now:
        return []
    what = f"resumed with {now} thread{'s' if now > 1 else ''} in each rank (was {then})"
    return [f"{what}: a CPU may add up matrix products in another order; OMP_NUM_THREADS={then} keeps it"]


def _assumed(found: Found) -> list[str]:
    """A line about a checkpoint that does not say what the keys meant that its config does not set."""
    if found.manifest.run.arguments is not None:
        return []
    what = "is of a release that kept no resolved arguments: for what its config leaves open, the defaults of the"
    return [f"{found.path} {what} installed Transformers are assumed; checkpoints from here on have them"]


class TakenOver(TrainerCallback):
    """Mends the state that came with a checkpoint. ``other``: why what was best so far is not this run's, or empty."""

    def __init__(self, other: str) -> None:
        self._other = other

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        state.compute_steps(args, state.max_steps)
        if state.best_metric is not None and self._other:
            if args.process_index == 0:
                write_line(
                    f"the best evaluation so far, of step {state.best_global_step}, {self._other}: it is forgotten"
                )
            state.best_metric = None
            state.best_model_checkpoint = None
            state.best_global_step = None
        elif state.best_metric is not None:
            # Hugging Face has dropped the path already if there is no folder any more.
            name = Path(state.best_model_checkpoint or f"checkpoint-{state.best_global_step}").name
            best_folder = Path(str(args.output_dir)) / name
            state.best_model_checkpoint = str(best_folder) if best_folder.is_dir() else None


def other(resumed: Resumed | None, config: RunConfig) -> str:
    """Why what was best in the run that saved is not so in this one; empty if it is."""
    if resumed is None:
        return ""
    if not checkpoint.is_in(resumed.path, Path(config.training.output_dir)):
        return "is another run's"
    now, then = (tree.get("training", {}) for tree in (config.tree(), resumed.found.manifest.run.config))
    changed = [name for name in METRIC if now.get(name) != then.get(name)]
    if not changed and any(key.startswith("data.") for key in resumed.changed):
        return "was one of other data"
    return f"was chosen by another {changed[0]}" if changed else ""
