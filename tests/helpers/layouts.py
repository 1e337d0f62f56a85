"""Facts with single parameters, layouts made by hand, and what hypothesis needs to draw them."""

from typing import Any

from hypothesis import strategies as st

from deepstow.strategies.core.facts import Facts, Param, Unit, UnitKind
from deepstow.strategies.core.layout import ITEM_BYTES, Bucket, Layout, Site
from tests.helpers.fakes import GPU, run_facts

KINDS = {"embedding": UnitKind.EMBEDDING, "head": UnitKind.HEAD}


def facts_of(*params: Param, saved: int = 0, machine: Any = GPU, **run: Any) -> Facts:
    """Facts whose units are those of ``params``, in order; each keeps ``saved`` bytes."""
    known = dict.fromkeys(unit for param in params for unit in (param.unit, *param.users))
    names = sorted(known, key=lambda unit: (unit != "embedding", unit == "head"))

    def unit(name: str) -> Unit:
        own = [param for param in params if param.unit == name]
        trained = sum(param.num_elements for param in own if param.group is not None)
        return Unit(name, KINDS.get(name, UnitKind.BLOCK), sum(p.num_elements for p in own), trained, saved)

    ordered = sorted(params, key=lambda param: names.index(param.unit))
    return Facts(tuple(map(unit, names)), run_facts(**run), machine, tuple(ordered))


def transformer(
    blocks: int = 4, width: int = 64, *, dtype: str = "float32", tied: bool = False, groups: bool = True,
    frozen: bool = False, words: int = 100, **more: Any,
) -> Facts:  # fmt: skip
    """A small transformer: two matrices and a norm per block; ``groups`` puts norms into one of their own."""
    norm = 1 if groups else 0
    base = None if frozen else 0

    def param(name: str, unit: str, size: int, group: int | None, users: tuple[str, ...] = ()) -> Param:
        return Param(f"{unit}.{name}", unit, size, dtype, group, users)

    params = [param("tokens", "embedding", words * width, base, ("head",) if tied else ())]
    for index in range(blocks):
        unit = f"layers.{index}"
        params += [
            param("norm", unit, width, norm),
            param("attention", unit, 4 * width * width, base),
            param("ffn", unit, 8 * width * width, base),
        ]
    params.append(param("norm", "head", width, norm))
    if not tied:
        params.append(param("output", "head", words * width, base))
    return facts_of(*params, **more)


def bucket(name: str, unit: str, *sizes: int, **changes: Any) -> Bucket:
    """A bucket of one unit with aligned parameters; trainable on the device unless changed."""
    dtype = changes.get("dtype", "float32")
    step = 512 // ITEM_BYTES[dtype]
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // step) * step
    plain: dict[str, Any] = {
        "name": name, "units": (unit,), "params": tuple(f"{name}.{index}" for index in range(len(sizes))),
        "sizes": sizes, "offsets": tuple(offsets), "num_elements": end, "dtype": dtype, "group": 0, "site": Site.DEVICE,
    }  # fmt: skip
    return Bucket(**plain | changes)


def layout(*buckets: Bucket, **changes: Any) -> Layout:
    """A layout of ``buckets`` with their units in order: no accumulation, no clipping, unless changed."""
    plain: dict[str, Any] = {
        "buckets": buckets,
        "units": tuple(dict.fromkeys(unit for bucket in buckets for unit in bucket.units)),
        "in_backward": False,
        "accumulation": 1,
        "max_grad_norm": 0.0,
    }
    return Layout(**plain | changes)


@st.composite
def random_facts(draw: st.DrawFn) -> Facts:
    """Any model: blocks of different sizes, several dtypes and groups, frozen and tied parameters, or no blocks."""
    dtypes = draw(st.sampled_from([("float32",), ("bfloat16",), ("float32", "bfloat16")]))
    units = [f"layers.{index}" for index in range(draw(st.integers(0, 6)))]
    units = ["embedding", *units, *draw(st.sampled_from([("head",), ()]))]
    params: list[Param] = []
    for unit in units:
        for index in range(draw(st.integers(1, 4))):
            others = [other for other in units if other != unit]
            users = (draw(st.sampled_from(others)),) if others and draw(st.integers(0, 9)) == 0 else ()
            size = draw(st.integers(1, 3000))
            group = draw(st.sampled_from([None, 0, 0, 0, 1]))
            params.append(Param(f"{unit}.{index}", unit, size, draw(st.sampled_from(dtypes)), group, users))
    return facts_of(
        *params,
        saved=draw(st.integers(0, 5000)),
        accumulation=draw(st.integers(1, 2)),
        max_grad_norm=draw(st.sampled_from([0.0, 1.0])),
        moments=draw(st.integers(0, 2)),
    )
