"""The facts that the search over degrees needs: one rank's share of the model for each micro-batch and tensor degree.

A tensor rank's share is counted as ``strategies.tensor`` has it (``trainer/model/tensor_share.py``), and stages as
``strategies.pipeline`` trains them, by building the config with these strategies. Blocks are alike, so a model of three
stands for one of many, which takes a tenth of the time, and leaves out a scalar or so per block; where they are not
alike, all are counted. Operations of the blocks that are left out are those of the whole model over the degree.

Not tried: tensor degrees that the strategy refuses for this model or beside what else is in the config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from strategies.core.compose import degrees
from strategies.core.facts import Facts, Param, Unit, UnitKind
from strategies.core.protocol import Axis
from strategies.planner.cuts import DEPTHS
from strategies.planner.hybrid import keys
from strategies.planner.hybrid.parts import Model
from trainer.config.load import build as build_config
from trainer.errors import ConfigError, first_line
from trainer.model.build import load_config
from trainer.model.count_cache import cached
from trainer.model.shrink import PER_LAYER
from trainer.planning.facts import ModelCount, count_model, gather, vocab_size_of

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig
    from trainer.dist.ranks import Ranks
    from trainer.machine.probe import Machine

FEW = 3  # blocks: the first, the last, and one that stands for all between
MICRO_BATCHES, TENSOR = (1, 2, 4), (2, 4, 8)
Known = dict[tuple[int, int], Facts]
Say = Callable[[str], None]


class Shares:
    """Counts the shares of one config's model.

    Args:
        say: told of each count before it is made.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, machine: Machine, say: Say) -> None:
        self._config, self._ranks, self._machine, self._say = config, ranks, machine, say
        self._tree = config.tree()
        self._whole = self._gathered(self._built(keys.without(self._tree)))

    def by_tensor(self, sequences: int) -> tuple[Known, list[str]]:
        """Facts by micro-batch and tensor degree, and why degrees are not tried.

        Raises:
            ConfigError: the model cannot be described.
        """
        found, refused = Known(), []
        own = self._whole.run.micro_batch
        sizes = [own, *(size for size in MICRO_BATCHES if sequences % size == 0 and size != own)]
        found[own, 1] = self._whole
        for degree in (1, *(each for each in TENSOR if self._ranks.local_world_size % each == 0)):
            try:
                tree = keys.without(self._tree, degree)
                found |= {(size, degree): self._share(tree, size) for size in sizes if (size, degree) != (own, 1)}
            except (ConfigError, ValueError) as error:
                if degree == 1:
                    raise
                refused.append(str(error).splitlines()[0] if isinstance(error, ConfigError) else first_line(error))
        return found, refused

    def in_stages(self, sizes: Sequence[int]) -> dict[int, Facts]:
        """Facts of a model in torch's pipeline, by micro-batch; none where it cannot be cut.

        Raises:
            ConfigError: the model cannot be described.
        """
        if sum(unit.kind is UnitKind.BLOCK for unit in self._whole.units) < 2:
            return {}
        return {size: self._share(keys.staged(self._tree), size) for size in sizes}

    def _built(self, tree: dict[str, Any]) -> RunConfig:
        return build_config(tree).like(self._config)

    def _gathered(self, config: RunConfig) -> Facts:
        found = gather(config, self._ranks.world_size, self._ranks.local_world_size, self._machine)
        run = replace(found.run, stages=1, tensor=1)
        return replace(found, run=run, params=_users(found.units, tied=run.tied), linears=())

    def _share(self, tree: dict[str, Any], micro_batch: int) -> Facts:
        """The facts of a rank's share of ``tree``'s model for another micro-batch."""
        tree = tree | {"training": tree["training"] | {"per_device_train_batch_size": micro_batch}}
        config = self._built(tree)
        whole = self._whole
        blocks = sum(unit.kind is UnitKind.BLOCK for unit in whole.units)
        if blocks <= FEW or not Model(whole).alike:
            return self._gathered(config)
        divided = degrees(config.strategies)
        degree = divided.get(Axis.TENSOR, 1)
        changed = _fewer(config)
        what = ", ".join(f"{name}={size}" for name, size in changed.items())
        where = "in stages" if Axis.STAGES in divided else f"on one of {degree} tensor rank{'s' * (degree > 1)}"
        self._say(f"counting a micro-batch of {micro_batch} {where}")
        count = cached(config, ModelCount, lambda: count_model(config, changed), what=what)
        few = count.model_flops or count.forward_flops
        left_out = whole.run.forward_flops * micro_batch // whole.run.micro_batch - few
        run = replace(
            whole.run,
            micro_batch=micro_batch,
            forward_flops=count.forward_flops + left_out // degree,
            largest_param=count.largest_param,
            trained_bytes=count.trained_bytes,
            frozen_bytes=count.frozen_bytes,
        )
        units = tuple(_lengthened(count.units, whole.units))
        return replace(whole, units=units, run=run, params=_users(units, tied=count.tied))


def _fewer(config: RunConfig) -> dict[str, Any]:
    """The changes of a model's config that leave ``FEW`` layers."""
    text = load_config(config.model, vocab_size_of(config)).get_text_config()
    depth = next(name for name in DEPTHS if getattr(text, name, None))
    lists = {name: list(getattr(text, name))[:FEW] for name in PER_LAYER if getattr(text, name, None)}
    return {depth: FEW} | lists


def _users(units: tuple[Unit, ...], *, tied: bool) -> tuple[Param, ...]:
    """The parameters unit by unit, to say that a tied head uses the embedding's."""
    head = next((unit.name for unit in units if unit.kind is UnitKind.HEAD), None)
    return tuple(
        Param(
            name=unit.name,
            unit=unit.name,
            num_elements=unit.num_params,
            dtype="float32",
            group=0 if unit.num_trainable else None,
            users=(head,) if tied and head is not None and unit.kind is UnitKind.EMBEDDING else (),
        )
        for unit in units
    )


def _lengthened(few: tuple[Unit, ...], whole: tuple[Unit, ...]) -> Iterator[Unit]:
    """``few`` with the block in the middle as often as ``whole`` has blocks, by the names of these."""
    at = [index for index, unit in enumerate(few) if unit.kind is UnitKind.BLOCK]
    blocks = [index for index, unit in enumerate(whole) if unit.kind is UnitKind.BLOCK]
    before, after = few[: at[1]], few[at[-1] :]
    middle = [few[at[1]]] * (len(whole) - len(before) - len(after))
    assert len(at) == FEW and len(blocks) == len(middle) + 2, "blocks follow one another"
    for unit, named in zip((*before, *middle, *after), whole, strict=True):
        yield replace(unit, name=named.name)
