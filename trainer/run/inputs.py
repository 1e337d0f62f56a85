"""What a run reads beside its data: where a resumed run reads it again, it has to be what the checkpoint was made of.

A checkpoint has the weights that are trained. It has not those that stay as they were: under adapters the base, and
for dpo and kto what the model says before training, which is asked again at each start. Recipes may read them again,
too. With any of these a run that is resumed compares the weights with the checkpoint's hash, before
anything of an earlier run is moved; one rank of each machine reads the files, since each may have a disk of its own.

All other runs have their weights from the checkpoint. They compare only where ``model.name_or_path`` is another one
than before, since the checkpoints to come name it as what training began with. What a run began with is hashed once,
by the first rank, when the model has been loaded, and is in all of its checkpoints.

What a checkpoint of an earlier release has no hash of is said, and not compared.

Files of weights are compared and hashed at other moments than they are loaded. So they have to be, before the first
step, the files that they were before all of that: one that was exchanged in between refuses the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deepstow.trainer.data.sources import is_saved
from deepstow.trainer.distributed.agreement import WEEK_S, agreement
from deepstow.trainer.model import build, contents

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.distributed.ranks import Ranks
    from deepstow.trainer.run.checkpoints.checkpoint import About
    from deepstow.trainer.run.checkpoints.resuming import Resumed

PLACE = "model.name_or_path"


def is_read_again(config: RunConfig) -> bool:
    """Whether the bits of a resumed run depend on the weights that training began with."""
    by_recipe = any(recipe.reads_weights_again(config) for recipe in config.switched_on)
    return config.model.lora is not None or config.chosen_task.has_reference or by_recipe


def compare(config: RunConfig, ranks: Ranks, resumed: Resumed) -> None:
    """Raise ConfigError if weights, or files of recipes, are not the checkpoint's, and have to be; a collective."""
    run = resumed.found.manifest.run
    resumed.said += _unknown(config, run, str(resumed.path))
    weights, moved = run.model.weights, PLACE in resumed.places
    with agreement(ranks, WEEK_S) as together:
        if weights is not None and (moved or is_read_again(config)):
            hashes = together.by_some(ranks.is_first_local, partial(_hash, config))
            resumed.weights = next((digest for digest in hashes if digest != weights), weights)
            fact = "seed" if config.model.name_or_path is None else "weights"
            resumed.compare_fact(config, fact, weights, resumed.weights)
        for recipe in config.switched_on:
            if recipe.files is not None and (saved := getattr(run.data, recipe.files.fact)):
                now = together.on_first(partial(recipe.hash_of_files, config))
                resumed.compare_fact(config, recipe.files.fact, saved, now)
    assert not resumed.places, f"{sorted(resumed.places)} have not been compared"


def _unknown(config: RunConfig, run: About, name: str) -> list[str]:
    """A line about what cannot be compared; none if all can."""
    saved = any(is_saved(Path(part.path).expanduser()) for part in config.data.parts() if part.path)
    lacks = {
        "the weights that training began with": run.model.weights is None and is_read_again(config),
        "the model's Python code": run.model.code is None and config.model.trust_remote_code,
        "the order of shards in data of save_to_disk": run.data.evaluation is None and saved,
    }
    if not any(lacks.values()):
        return []
    unknown = " and ".join(fact for fact, lacking in lacks.items() if lacking)
    return [f"{name} is of a release that kept no hash of {unknown}: not compared; checkpoints from here on have it"]


def recorded(config: RunConfig, ranks: Ranks, resumed: Resumed | None) -> str | None:
    """What checkpoints of this run say of the weights; the first rank writes them. None: nobody knows any more."""
    if resumed is not None and (resumed.weights is not None or not is_read_again(config)):
        return resumed.weights
    return _hash(config) if ranks.is_first else None


def files_now(config: RunConfig, resumed: Resumed | None) -> list[list[int]]:
    """What would differ if a file was exchanged whose weights the run reads. May raise OSError."""
    section = config.model
    if section.name_or_path is None or (resumed is not None and not is_read_again(config)):
        return []
    return contents.stamps(section, build.load_config(section))


def refuse_exchanged(config: RunConfig, resumed: Resumed | None, former: Sequence[list[int]]) -> None:
    """Raise ConfigError if a file of weights is another one than when it was looked at. May raise OSError."""
    if files_now(config, resumed) != [*former]:
        what = "its weights have changed while they were read; start again when nobody writes to them"
        raise config.error(PLACE, config.model.name_or_path, what)


def _hash(config: RunConfig) -> str:
    section = config.model
    hf_config = build.load_config(section) if section.name_or_path is not None else None
    return contents.weights(section, hf_config, config.training.seed)
