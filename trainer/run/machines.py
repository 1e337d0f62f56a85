"""The machines of a job, as its launcher has described them to each rank; what cannot work on them is refused."""

from trainer.config.sections import RunConfig
from trainer.dist.agreement import agreement
from trainer.dist.ranks import Ranks

TIMEOUT_S = 1800


def refuse(config: RunConfig, ranks: Ranks) -> None:
    """Raise ConfigError, on all ranks, for a strategy that cannot work on these machines; a collective."""
    if ranks.is_local:
        return
    with agreement(ranks, TIMEOUT_S) as together:
        firsts = together.gathered(ranks.rank - ranks.local_rank)
    for strategy in config.strategies.values():
        for refused in strategy.refuses_machines(firsts):
            raise config.error(refused.key, refused.value, refused.cure)
