"""One script, two sides: a plain model with torch's optimizer, and the same model stowed. Compared by bits, or refused.

A script is a loop of a user: it takes a model and its optimizer and returns what it saw. ``both_sides`` runs it on both
and compares that, and all weights and state that it leaves; ``refused`` expects one line. Tests are tables of scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from deepstow.strategies.engine import AdamW, stow
from deepstow.strategies.engine.transfer.transfer import Transfer
from tests.helpers.doubles import Delayed
from tests.helpers.engine import DECAY, LR, masters_of, plan_of
from tests.helpers.models import on, tokens

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "host, one ahead": {"site": "host", "weights": "travelling", "prefetch": 1, "park": "host"},
    "streamed": {"site": "streamed", "weights": "travelling", "prefetch": 2, "bucket": "half"},
    "device, resident": {"site": "device"},
    "mixed": {"site": "mixed", "weights": "some", "prefetch": 1},
}
TWO = ("host, one ahead", "streamed")
BATCHES = tokens("llama", 8)


class Plain(torch.optim.AdamW):
    """Torch's AdamW with the few methods that the engine's optimizer has beyond torch's.

    Weights in bf16 have fp32 masters, to which their gradients are copied, clipped and applied. A step whose gradients
    are not finite changes nothing.
    """

    def __init__(self, model: nn.Module, max_norm: float, fused: bool = True) -> None:
        self.masters = masters_of(model)
        super().__init__(self.masters.values(), lr=LR, weight_decay=DECAY, fused=fused)
        self._max_norm, self._norm, self.skipped = max_norm, None, 0
        self._mixed = [(param, master) for param, master in self.masters.items() if param is not master]
        model.register_load_state_dict_post_hook(lambda *_: self._follow())

    @torch.no_grad()
    def _follow(self) -> None:
        for param, master in self._mixed:
            master.copy_(param)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        for param, master in self._mixed:
            master.grad = None if param.grad is None else param.grad.float()
        self._norm = nn.utils.clip_grad_norm_(self.masters.values(), max_norm)
        return self._norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = self.clip_grad_norm_(self._max_norm or torch.inf) if self._norm is None else self._norm
        if norm.isfinite():
            super().step()
            for param, master in self._mixed:
                param.copy_(master)
        self._norm, self.skipped = None, self.skipped + int(not norm.isfinite())

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for param, _ in self._mixed:
            param.grad = None

    def present(self, params: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        return nullcontext()

    def drain(self) -> None: ...

    def state_of(self, param: nn.Parameter) -> dict[str, Tensor]:
        master = self.masters[param]
        zero = torch.zeros_like(master)
        state = self.state.get(master) or {"step": torch.zeros(()), "exp_avg": zero, "exp_avg_sq": zero}
        return state if master is param else {**state, "master": master}

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
Script = Callable[[Any, Any], object]
Maker = Callable[[], nn.Module]
# A name in ``LAYOUTS``, what ``plan_of`` takes, or a function that makes the plan.
Layout = str | Mapping[str, Any] | Callable[[nn.Module], Any]


def stowed(
    model: nn.Module,
    layout: Layout,
    fused: bool = True,
    transfer: Transfer | None = None,
    beside: bool | None = None,
    **wishes: Any,
) -> Any:
    """The model's optimizer under a layout of ``LAYOUTS`` with changes; copies are made as late as they may."""
    known = LAYOUTS[layout] if isinstance(layout, str) else layout
    plan: Any = known(model) if callable(known) else plan_of(model, **{**known, **wishes})
    rule, moves = AdamW(lr=LR, weight_decay=DECAY, fused=fused), transfer or ground.transfer()
    return stow(ground.feed(model), plan, rule=rule, device=ground.device, transfer=moves, beside=beside)


def train(
    model: nn.Module,
    optimizer: Any,
    batches: Iterable[Mapping[str, Tensor]],
    between: Script | None = None,
    after: Script | None = None,
    *,
    passes: Sequence[int] = (1,),
    loss_of: Callable[[Any, Mapping[str, Tensor]], Tensor] = lambda model, batch: model(**batch).loss,
) -> list[Any]:
    """Ordinary steps: the losses, and what scripts saw ``between`` backward and step and ``after`` the step.

    Args:
        passes: micro-batches of each step, in turn.
    """
    seen, left, counts = list[Any](), iter(batches), cycle(passes)
    while window := list(islice(left, next(counts))):
        for batch in window:
            loss = loss_of(model, batch)
            loss.backward()
            seen.append(loss.item())
        seen += [between(model, optimizer)] if between else []
        optimizer.step()
        seen += [after(model, optimizer)] if after else []
        optimizer.zero_grad()
    return seen


def training(between: Script | None = None, after: Script | None = None, steps: int = 3, **how: Any) -> Script:
    """Some of ``BATCHES``, as a script."""
    return lambda model, optimizer: train(model, optimizer, BATCHES[:steps], between, after, **how)


def everything(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Copies of all weights and all state."""
    found = copies(model)
    for name, param in model.named_parameters():
        if param.requires_grad:
            state = optimizer.state_of(param)
            found |= {f"{name} {key}": value.detach().to(CPU, copy=True) for key, value in state.items()}
    return found


def copies(module: nn.Module) -> dict[str, Tensor]:
    """The state dict, on the host."""
    return {name: value.detach().to(CPU, copy=True) for name, value in module.state_dict().items()}


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.data for name, param in module.named_parameters()}


def unequal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Names that only one of them has, or whose bits differ."""
    both = first.keys() & second.keys()
    return sorted(first.keys() ^ second.keys()) + [
        name for name in both if not torch.equal(first[name].cpu(), second[name].cpu())
    ]


@cache
def plainly(
    make: Maker, script: Script, max_norm: float, fused: bool, device: torch.device
) -> tuple[object, dict[str, Tensor], dict[str, Tensor]]:
    """What ``script`` sees and leaves without the engine, and the parameters; once for all layouts."""
    model = ground.put(make())
    optimizer = Plain(model, max_norm, fused)
    torch.manual_seed(3)
    return script(model, optimizer), everything(model, optimizer), parameters(model)


def both_sides(
    make: Maker,
    script: Script,
    layouts: Iterable[Layout] = TWO,
    *,
    max_norm: float = 0.0,
    fused: bool = True,
    clips: bool = False,
    transfer: Callable[[], Transfer] | None = None,
    **wishes: Any,
) -> None:
    """Run ``script`` plainly and under each layout of this ground: what it returns and leaves must be equal by bits.

    Args:
        clips: the script does so itself, to ``max_norm``.
    """
    expected, left, params = plainly(make, script, 0.0 if clips else max_norm, fused, ground.device)
    for layout in layouts:
        if isinstance(layout, str) and layout not in ground.layouts:
            continue
        model = make()
        moves = (transfer or ground.transfer)()
        engine = stowed(model, layout, fused, moves, max_norm=max_norm, **wishes)
        torch.manual_seed(3)
        found = script(model, engine)
        where = first_difference(expected, found)
        assert where is None, f"{layout}: what the script saw differs at {where}"
        assert unequal(left, everything(model, engine)) == [], layout
        engine.close()
        assert unequal(params, parameters(model)) == [], f"{layout}, closed"
        assert getattr(moves, "races", []) == [], layout


def same(*given: Any, **how: Any) -> Callable[[], None]:
    """What ``both_sides`` takes, as a case of a table."""
    return partial(both_sides, *given, **how)


def refused(make: Maker, script: Script, line: str, layout: Layout = TWO[0], **wishes: Any) -> None:
    """Running ``script`` on a stowed model ends with an error of one line."""
    model = make()
    optimizer = stowed(model, layout, **wishes)
    with pytest.raises((RuntimeError, ValueError, TypeError), match=line) as error:
        script(model, optimizer)
    assert "\n" not in str(error.value)


def first_difference(first: object, second: object) -> str | None:
    """Where two nested results differ."""
    leaves, others = (dict(tree_flatten_with_path(each)[0]) for each in (first, second))
    assert leaves.keys() == others.keys()
    for place, one in leaves.items():
        other = others[place]
        if not (torch.equal(one.cpu(), other.cpu()) if isinstance(one, Tensor) else repr(one) == repr(other)):
            return keystr(place)
    return None
