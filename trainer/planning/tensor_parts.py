"""The facts that the search over degrees needs: one rank's share of the model for each micro-batch and tensor degree.

Each share is the model of a config with ``strategies.tensor`` (``trainer/model/tensor_share.py``) or
``strategies.pipeline``, counted as for a plan.

Not tried: tensor degrees that the strategy refuses for this model or beside what else is in the config.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from strategies.core.compose import degrees
from strategies.core.facts import Facts, Param, UnitKind
from strategies.core.protocol import Axis
from strategies.planner.hybrid import keys
from trainer.config.load import build
from trainer.errors import ConfigError, first_line
from trainer.planning.facts import gather

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig
    from trainer.dist.ranks import Ranks
    from trainer.machine.probe import Machine

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
        self._whole = self._gathered(build(keys.without(self._tree)).like(config))

    def by_tensor(self, sequences: int) -> tuple[Known, list[str]]:
        """Facts by micro-batch and tensor degree, and why degrees are not tried.

        Raises:
            ConfigError: the model cannot be described.
        """
        own = self._whole.run.micro_batch
        found, refused = Known({(own, 1): self._whole}), []
        sizes = [own, *(size for size in MICRO_BATCHES if sequences % size == 0 and size != own)]
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

    def _share(self, tree: dict[str, Any], micro_batch: int) -> Facts:
        """The facts of a rank's share of ``tree``'s model for another micro-batch."""
        tree = tree | {"training": tree["training"] | {"per_device_train_batch_size": micro_batch}}
        config = build(tree).like(self._config)
        divided = degrees(config.strategies)
        degree = divided.get(Axis.TENSOR, 1)
        where = "in stages" if Axis.STAGES in divided else f"on one of {degree} tensor rank{'s' * (degree > 1)}"
        self._say(f"counting a micro-batch of {micro_batch} {where}")
        return self._gathered(config)

    def _gathered(self, config: RunConfig) -> Facts:
        """Facts as of a whole model, with one parameter per unit, which says that a tied head uses the embedding's."""
        found = gather(config, self._ranks.world_size, self._ranks.local_world_size, self._machine)
        head = next((unit.name for unit in found.units if unit.kind is UnitKind.HEAD), None)
        params = tuple(
            Param(
                name=unit.name,
                unit=unit.name,
                num_elements=unit.num_params,
                dtype="float32",
                group=0 if unit.num_trainable else None,
                users=(head,) if found.run.tied and head is not None and unit.kind is UnitKind.EMBEDDING else (),
            )
            for unit in found.units
        )
        run = replace(found.run, stages=1, tensor=1, model_params=0, model_flops=0)
        return replace(found, run=run, params=params, linears=())
