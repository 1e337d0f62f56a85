"""Which checkpoint a run goes on from, decided by one rank for all, and compared with the run's config.

Problem. Every rank would hash the same files, and two that do not see the same folder would go on from different steps.

The first rank (with ``training.save_on_each_node`` the first of each machine) puts away what a kill has left, compares
the checkpoint with its manifest and tells the others. Then every rank compares the manifest with its config, by the
table in ``trainer/run/resume_rules.py``: first the config alone, before any data is read; then what was opened.

Invariant. All ranks go on from the same checkpoint, or none does. A refusal names each key with its file and line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.core.protocol import Axis
from trainer.dist.agreement import agreement
from trainer.errors import ConfigError
from trainer.run import checkpoint, manifest, resume_rules
from trainer.run.checkpoint import Found

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trainer.config.sections import RunConfig
    from trainer.dist.ranks import Ranks
    from trainer.run.resume_rules import Changes

DAY_S = 24 * 3600  # how long the first rank may take to compare a checkpoint with its manifest


@dataclass(slots=True)
class Resumed:
    """The checkpoint that a run goes on from, the keys that it takes from its config instead, and what to log."""

    found: Found
    changed: frozenset[str]
    said: list[str]

    @property
    def path(self) -> Path:
        return self.found.path

    def compare_contents(self, config: RunConfig, contents: Mapping[str, str], hf_config: PretrainedConfig) -> None:
        """Compare what data, tokenizer and model are, once they are opened.

        Args:
            contents: ``sources``, ``tokenizer`` and ``fingerprint`` of the data.

        Raises:
            ConfigError: something differs that may not.
        """
        run = self.found.manifest.run
        saved = {**run.data.model_dump(include=set(contents)), "config": run.model.config}
        now = {**contents, "config": manifest.plain_config(hf_config)}
        allowed = config.training.allow_change
        self._take(config, resume_rules.compare_contents(saved, now, allowed, self.changed, str(self.path)))

    def compare_shapes(self, shapes: Mapping[str, Any]) -> None:
        """Compare the names and shapes of all parameters, once the model is built.

        Raises:
            ConfigError: they differ.
        """
        if manifest.digest_of_shapes(shapes) != self.found.manifest.run.model.shapes:
            raise ConfigError(
                f"model: its parameters have other names or shapes than those in {self.path}; train the same model, or "
                f"start anew in another training.output_dir"
            )

    def _take(self, config: RunConfig, changes: Changes) -> None:
        if changes.refused:
            tree = resume_rules.leaves(config.tree())
            values = [(key, tree.get(key) if value is None else value, what) for key, value, what in changes.refused]
            raise ConfigError([config.error(*each).lines[0] for each in values])
        self.changed |= changes.keys
        lines = [f"resumed with {line}" for line in changes.said]
        self.said += [line for line in lines if line not in self.said]


def decide(config: RunConfig, ranks: Ranks, say: Callable[[str], None]) -> Resumed | None:
    """The checkpoint to go on from; None starts from the beginning. A collective.

    Args:
        say: gets a line for each checkpoint that is damaged.

    Raises:
        ConfigError: there is none that could be resumed with this config.
    """
    looks = ranks.is_first or (bool(config.training.save_on_each_node) and ranks.is_first_local)
    with agreement(ranks, DAY_S) as together:
        results = together.by_some(looks, lambda: _look(config))
    steps = [each.step if each else None for each, _ in results]
    if len(set(steps)) > 1:
        what = f"the machines hold different checkpoints (steps {', '.join(map(str, steps))}); name one"
        raise ConfigError(f"{checkpoint.KEY}: {what}")
    found, said = results[0]
    if found is None:
        return None
    if ranks.is_first:
        for line in said:
            say(line)
    resumed = Resumed(found, frozenset(), _versions(found))
    run = found.manifest.run
    resumed._take(
        config,
        resume_rules.compare(
            run.config,
            config.tree(),
            (_copies(run.config, run.world_size), _copies(config.tree(), ranks.world_size)),
            str(found.path),
        ),
    )
    return resumed


def _copies(tree: Mapping[str, Any], world_size: int) -> int:
    """How many copies of the model the ranks of a run hold: what a step adds up over."""
    return world_size // math.prod(int(_value(tree, axis.value) or 1) for axis in Axis)


def _value(tree: Any, dotted: str) -> Any:
    """What the config has under ``dotted``; None if it has nothing there."""
    for name in dotted.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def set_aside(config: RunConfig, ranks: Ranks, resumed: Resumed | None) -> str:
    """Move checkpoints out of the way that the run would otherwise mix with its own; returns the line to log."""
    folder = Path(config.training.output_dir)
    if not (ranks.is_first or (config.training.save_on_each_node and ranks.is_first_local)):
        return ""
    if resumed is None:
        aside = checkpoint.set_aside(folder, overwrite=config.training.overwrite)
        return f"a fresh run: the checkpoints and the export of the earlier one are now in {aside}" if aside else ""
    inside = resumed.path.parent.resolve() == folder.resolve()
    aside = checkpoint.set_aside(folder, after=resumed.found.step if inside else -1)
    return f"checkpoints after {resumed.path.name} are now in {aside}" if aside else ""


def _look(config: RunConfig) -> tuple[Found | None, list[str]]:
    folder = Path(config.training.output_dir)
    try:
        checkpoint.clear(folder)
    except OSError as error:
        what = f"what an earlier run was saving when it ended cannot be put away: {error}"
        raise config.error("training.output_dir", str(folder), what) from None
    return checkpoint.to_resume(config)


def _versions(found: Found) -> list[str]:
    then, now = found.manifest.run.versions, dict(manifest.versions())
    other = [f"{name} {now[name]} (was {then[name]})" for name in now if name in then and then[name] != now[name]]
    return [f"resumed with other versions than the checkpoint's: {', '.join(other)}"] if other else []
