"""How fast ranks of this machine exchange, for plans over several of them: a part of ``launch/doctor.py --rates``.

As many ranks as there are devices, or two processes without an accelerator, gather a buffer of which each has a span,
and send each other the spans of another one: the two exchanges of the engine (``strategies/engine/ranks/shares.py``),
in the same group and with the same backend. Counted are the bytes that one rank sends while it receives as many. The
slower of the two kinds counts.

Between machines nothing is measured: one machine does not know the others. Write ``net_across_bytes_per_s`` into the
file of the rates by hand, or plan with ``--network``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from strategies.engine.memory import accelerator
from trainer.dist.ranks import Ranks
from trainer.dist.spawn import WorldError, run_world
from trainer.machine.probe import cores
from trainer.machine.timing import lower_quartile, seconds_per_call

ON_CPU = 2  # processes that stand for ranks where there is no accelerator


def measure_network(num_bytes: int, seconds: float, say: Callable[[str], None]) -> float | None:
    """Bytes per second that a rank sends while it receives as many; None if there is one device, or ranks do not start.

    Args:
        num_bytes: of each rank's buffers.
        seconds: for each of the two kinds of exchange.
    """
    count = torch.accelerator.device_count() if accelerator.kind() else min(ON_CPU, cores()[1])
    if count < 2 or not num_bytes:
        return None
    say(f"exchanges of {count} ranks, {num_bytes / (1 << 20):.4g} MiB each")
    try:
        gather, scatter = run_world(count, exchange, num_bytes, seconds, deepspeed=False)
    except WorldError as error:
        say(f"  not measured: {str(error).splitlines()[-1]}")
        return None
    say(f"  gathered {gather / 1e9:.3g} GB/s, sent to owners {scatter / 1e9:.3g}")
    return float(min(gather, scatter))


def exchange(ranks: Ranks, num_bytes: int, seconds: float) -> list[float]:
    """On each rank: the rates of gathering and of sending spans to their owners."""
    device = accelerator.current() or torch.device("cpu")
    share = num_bytes // 4 // ranks.world_size
    whole, other = (torch.ones(share * ranks.world_size, device=device) for _ in range(2))
    own = whole[ranks.rank * share : (ranks.rank + 1) * share]
    sent = 4 * share * (ranks.world_size - 1)
    gathering = seconds_of(lambda: dist.all_gather_into_tensor(whole, own), seconds, device)
    scattering = seconds_of(lambda: dist.all_to_all_single(other, whole), seconds, device)
    return [sent / gathering, sent / scattering]


def seconds_of(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """The lower quartile of the durations of ``work``, which all ranks do equally often."""
    seconds_per_call(work, device)
    times = torch.tensor(max(1.0, seconds / seconds_per_call(work, device)), device=device)
    dist.broadcast(times, 0)
    return lower_quartile([seconds_per_call(work, device) for _ in range(int(times))])
