"""The report of ``deepstow search``: the best ways to use all ranks, what to write, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from deepstow.strategies.core.facts import Compression
from deepstow.strategies.core.sizes import human
from deepstow.strategies.planner.hybrid.degrees import Degrees, Stowed
from deepstow.strategies.planner.hybrid.search import Answer, Found
from deepstow.strategies.report.table import table

HEADER = (
    "stages x tensor x data", "ZeRO", "recompute", "offload", "micro-batch", "per step", "seconds", "from-to", "rates",
    "tokens/s/rank", "MFU", "device", "host", "what takes most",
)  # fmt: skip
RIGHT = {"micro-batch", "per step", "seconds", "from-to", "tokens/s/rank", "MFU", "device", "host"}
ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Scale:
    """What seconds are divided by: tokens per step, and the flop of one at the peak of all ranks (None: unknown).

    ``origin``: of the machine's rates, those of the network across machines excepted.
    """

    tokens: int
    ranks: int
    seconds_at_peak: float | None
    origin: str

    def mfu(self, seconds: float) -> float | None:
        return self.seconds_at_peak and self.seconds_at_peak / seconds

    def rates(self, row: Found) -> str:
        """Where the least certain rate is from on which the seconds of ``row`` depend."""
        return ASSUMED if row.assumed else self.origin


def lines(
    answer: Answer,
    scale: Scale,
    write: Sequence[str],
    not_tried: Sequence[str] = (),
    links: Mapping[Compression, str] = MappingProxyType({}),
) -> Iterator[str]:
    """The table, what was left out or not tried, and what to write for its first row."""
    yield from table(HEADER, [_cells(plan, scale) for plan in answer.best], RIGHT)
    yield ""
    yield f"{answer.tried:,} looked at; {answer.fitting:,} run here and fit; {answer.priced} of them simulated"
    yield from left_out(answer)
    yield from (f"nearest of the faster that do not fit: {line}" for line in _lacking(answer))
    yield from (f"not tried: {why}" for why in not_tried)
    if answer.firsts:
        ends = " and ".join(f"{shape(plan.degrees)} with ZeRO {plan.degrees.zero}" for plan in answer.firsts)
        yield "from-to: at either end of what is published of networks across machines (deepstow docs parallelism)"
        yield f"* changes places at one of these ends, measure before you choose by it; first at them: {ends}"
    if any(plan.degrees.offload is not Stowed.NOTHING for plan in answer.best):
        yield "rows with offload are estimates: strategies.offload places the bytes itself, as its own plan shows"
    yield from lossy(answer, links)
    yield ""
    yield "to set in the config for the first row:"
    yield from (f"  {line}" for line in write)


def _cells(row: Found, scale: Scale) -> tuple[str, ...]:
    degrees, seconds = row.degrees, row.price.seconds
    mfu = scale.mfu(seconds)
    return (
        shape(degrees),
        str(degrees.zero),
        degrees.recompute,
        degrees.offload.value,
        str(degrees.micro_batch),
        str(degrees.micro_batches),
        f"{seconds:.4g}",
        "-".join(f"{end:.3g}" for end in row.between),
        scale.rates(row) + " *" * (not row.settled),
        f"{scale.tokens / scale.ranks / seconds:,.0f}",
        "-" if mfu is None else f"{mfu:.0%}",
        human(row.bytes.device),
        human(row.bytes.host),
        row.price.binds,
    )


def to_json(answer: Answer, scale: Scale, write: Sequence[str]) -> dict[str, Any]:
    """The same for programs; seconds and bytes are not rounded."""
    plans = [
        asdict(plan.degrees)
        | {"offload": plan.degrees.offload.value, "seconds": plan.price.seconds, "seconds_between": plan.between}
        | {"rates": scale.rates(plan), "place_is_settled": plan.settled, "mfu": scale.mfu(plan.price.seconds)}
        | {"device_bytes": plan.bytes.device, "host_bytes": plan.bytes.host, "parts": dict(plan.price.parts)}
        for plan in answer.best
    ]
    rules = [{"rule": rule.refusal.key, "reason": str(rule.refusal), "seconds": rule.seconds} for rule in answer.left]
    return {"ranks": scale.ranks, "tokens_per_step": scale.tokens, "plans": plans, "left_out": rules, "write": [*write]}


def shape(degrees: Degrees) -> str:
    """``8 x 1 x 128``; ``1 x 1 x 2, sequence 4`` has four ranks for each set of rows; ``1 x 1 x 128, int8, lossy``."""
    how = degrees.exchange
    suffixes = [f", {name} {degree}" for name in ("sequence", "experts") if (degree := getattr(degrees, name)) > 1]
    if how is not None:
        suffixes.append(f", {f'local_steps {how.local_steps}' if how.local_steps else how.method}, lossy")
    return f"{degrees.stages} x {degrees.tensor} x {degrees.data}{''.join(suffixes)}"


def lossy(answer: Answer, links: Mapping[Compression, str]) -> Iterator[str]:
    """What the link gains by each lossy exchange, and the fastest step with it, be it in the table or not."""
    steps = {plan.degrees.exchange: plan.price.seconds for plan in answer.lossy}
    for how, line in links.items():
        if how in steps:
            line += f"; a step {steps[how]:.4g} s"
            if (exact := answer.exact) is not None:
                line += f", {exact.price.seconds / steps[how]:.3g} times as fast as the fastest exact way"
        yield line


def words(degrees: Degrees) -> str:
    """Degrees in one line."""
    stowed = {Stowed.STATE: ", state offloaded", Stowed.WEIGHTS: ", state and weights offloaded"}
    return (
        f"stages x tensor x data = {shape(degrees)}, ZeRO {degrees.zero}, recompute {degrees.recompute}"
        f"{stowed.get(degrees.offload, '')}, {degrees.micro_batches} micro-batches of {degrees.micro_batch}"
    )


def left_out(answer: Answer) -> Iterator[str]:
    """What would fit if it could be run."""
    for rule in answer.left:
        yield f"left out: {rule.refusal}; it would take {rule.seconds:.3g} s or more"


def nothing_fits(answer: Answer) -> Iterator[str]:
    """What is missing, for those that lack least, and what would fit if it could be run."""
    yield from (f"  {line}" for line in (*_lacking(answer), *left_out(answer)))


def _lacking(answer: Answer) -> Iterator[str]:
    for plan in answer.nearest:
        sizes = {"device": plan.device, "host": plan.host}
        lacks = " and ".join(f"{human(size)} of {name} memory" for name, size in sizes.items() if size)
        exact = plan.degrees.offload is Stowed.NOTHING
        about = "" if exact else " (estimated; deepstow plan with the config says exactly)"
        yield f"{words(plan.degrees)}: lacks {lacks} per rank{about}"
