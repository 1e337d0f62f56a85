"""``model.attn_implementation: auto``: which attention a run takes, settled before anything is planned.

Kernels are tried in a written order, and the first one is taken that nothing in this config, this model and this
machine refuses: FlashAttention where it is installed, on a GPU; ``sdpa_varlen`` where rows are packed or masked, since
Transformers' own choice has a mask for every pair of tokens there; else what is taken where nothing is written.

Invariant. All that comes later, the plan, checkpoints and cards, sees a config with that kernel's name, as if it had
been written. So ``auto`` is never refused where an unset key is not, and a run that is resumed where another kernel
would be taken is refused as any change of it is. For another machine (``--profile``) FlashAttention is not assumed; it
is counted like ``sdpa_varlen``. What still says ``auto`` later is refused (``check_options``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from deepstow.trainer.config.check import check
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model import attention
from deepstow.trainer.planning import facts
from deepstow.trainer.planning.from_config import check_options


def settled(config: RunConfig, world_size: int, *, here: bool, say: Callable[[str], None]) -> RunConfig:
    """``config``, with the name of a kernel in place of ``auto``; ``say`` is told. ``here``: for this machine."""
    if config.model.attn_implementation != attention.AUTO:
        return config
    for name, reason in _candidates(config, here=here):
        chosen = _with(config, name)
        if not _refuses(chosen, world_size, here=here):
            say(f"{attention.KEY} = auto: {name}, {reason}")
            return chosen
    say(f"{attention.KEY} = auto: the model's own, as if it were not set")
    return _with(config, None)


def _candidates(config: RunConfig, *, here: bool) -> Iterator[tuple[str, str]]:
    """Kernels that may be better than the model's own, and why; the best first."""
    for name in attention.installed_flash() if here else ():
        yield name, "which is installed"
    mask = config.model.attention_mask
    takes_mask = mask is None or (mask.strided is None and mask.random is None)
    if takes_mask and (config.data.packing or mask is not None):
        yield attention.VARLEN, "which needs no mask for every pair of tokens"


def _with(config: RunConfig, name: str | None) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"attn_implementation": name})})


def _refuses(config: RunConfig, world_size: int, *, here: bool) -> bool:
    """Whether the kernel of ``config`` is refused. What else is wrong with it is said later, as without ``auto``."""
    lines = [str(fault) for fault in check(config.tree())]
    try:
        check_options(config, world_size, installed=here)
        facts.counted(config)
    except ConfigError as error:
        lines += error.lines
    return any("attn_implementation" in line for line in lines)
