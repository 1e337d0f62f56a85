"""One script, two sides: a plain model with torch's optimizer, and the same model stowed. Compared by bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from strategies.engine import AdamW, stow
from strategies.engine.transfer.transfer import Transfer
from tests.helpers.doubles import Delayed
from tests.helpers.engine import DECAY, LR, plan_of
from tests.helpers.models import on

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "host, one ahead": {"site": "host", "weights": "travelling", "prefetch": 1, "park": "host"},
    "streamed": {"site": "streamed", "weights": "travelling", "prefetch": 2, "bucket": "half"},
    "device, resident": {"site": "device"},
    "mixed": {"site": "mixed", "weights": "some", "prefetch": 1},
}
TWO = ("host, one ahead", "streamed")


class Plain(torch.optim.AdamW):
    """Torch's AdamW with the few methods that the engine's optimizer has beyond torch's."""

    def __init__(self, model: nn.Module, max_norm: float, fused: bool = True) -> None:
        super().__init__([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=DECAY, fused=fused)
        self._max_norm, self._clipped = max_norm, False

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        self._clipped = True
        return torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], max_norm)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self._max_norm and not self._clipped:
            self.clip_grad_norm_(self._max_norm)
        self._clipped = False
        super().step()

    def present(self, params: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        return nullcontext()

    def drain(self) -> None: ...

    def state_of(self, param: nn.Parameter) -> dict[str, Tensor]:
        zero = torch.zeros_like(param)
        return self.state.get(param) or {"step": torch.zeros(()), "exp_avg": zero, "exp_avg_sq": zero}

    def close(self) -> None: ...


@dataclass(slots=True)
class Ground:
    """Where both sides train, and who moves the bytes."""

    device: torch.device
    transfer: Callable[[], Transfer]
    layouts: Sequence[str]  # of ``LAYOUTS``

    def feed(self, model: nn.Module) -> nn.Module:
        """``model``, which takes its batches from the CPU."""
        if self.device.type != "cpu":
            model.register_forward_pre_hook(partial(_up, self.device), with_kwargs=True, prepend=True)
        return model

    def put(self, model: nn.Module) -> nn.Module:
        """The same, and the model is there."""
        return on(self.device, self.feed(model))


def _up(device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, lambda value: value.to(device), (args, kwargs))


CPU = torch.device("cpu")
ground = Ground(CPU, Delayed, tuple(LAYOUTS))  # tests/accelerator sets another one
Script = Callable[[nn.Module, Any], object]
Maker = Callable[[], nn.Module]
Layout = str | Mapping[str, Any]  # a name in ``LAYOUTS``, or what ``plan_of`` takes


def stowed(model: nn.Module, layout: Layout, fused: bool = True, **wishes: Any) -> Any:
    """The model's optimizer under a layout of ``LAYOUTS`` with changes; copies are made as late as they may."""
    known = LAYOUTS[layout] if isinstance(layout, str) else layout
    plan: Any = plan_of(model, **{**known, **wishes})
    rule = AdamW(lr=LR, weight_decay=DECAY, fused=fused)
    return stow(ground.feed(model), plan, rule=rule, device=ground.device, transfer=ground.transfer())


def train(
    model: nn.Module, optimizer: Any, batches: Iterable[Mapping[str, Tensor]], *, zero: bool = True
) -> list[float]:
    """Ordinary steps; the losses."""
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        if zero:
            optimizer.zero_grad()
    return losses


def everything(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Copies of all weights and all state."""
    found = {name: value.detach().to(CPU, copy=True) for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        if param.requires_grad:
            state = optimizer.state_of(param)
            found |= {f"{name} {key}": value.detach().to(CPU, copy=True) for key, value in state.items()}
    return found


def unequal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Names that only one of them has, or whose bits differ."""
    both = first.keys() & second.keys()
    return sorted(first.keys() ^ second.keys()) + [
        name for name in both if not torch.equal(first[name].cpu(), second[name].cpu())
    ]


def both_sides(
    make: Maker,
    script: Script,
    layouts: Iterable[Layout] = TWO,
    *,
    max_norm: float = 0.0,
    fused: bool = True,
    **wishes: Any,
) -> None:
    """Run ``script`` plainly and under each layout of this ground: what it returns and leaves must be equal by bits."""
    model = ground.put(make())
    optimizer = Plain(model, max_norm, fused)
    torch.manual_seed(3)
    expected = script(model, optimizer)
    weights = everything(model, optimizer)
    for layout in layouts:
        if isinstance(layout, str) and layout not in ground.layouts:
            continue
        model = make()
        engine = stowed(model, layout, fused, max_norm=max_norm, **wishes)
        torch.manual_seed(3)
        found = script(model, engine)
        where = first_difference(expected, found)
        assert where is None, f"{layout}: what the script saw differs at {where}"
        assert unequal(weights, everything(model, engine)) == [], layout
        engine.close()


def first_difference(first: object, second: object) -> str | None:
    """Where two nested results differ."""
    leaves, others = (dict(tree_flatten_with_path(each)[0]) for each in (first, second))
    assert leaves.keys() == others.keys()
    for place, one in leaves.items():
        other = others[place]
        if not (torch.equal(one.cpu(), other.cpu()) if isinstance(one, Tensor) else repr(one) == repr(other)):
            return keystr(place)
    return None
