"""Models whose backward or whose readers do not keep to the borders of blocks train with the bits of plain training.

Every home is NaN from the moment it is left (``tests/helpers/doubles.py``), so that whoever reads too late cannot be
lucky. Every other model goes through the real planner at the smallest budget that it finds a plan for.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepstow.strategies.engine import stow
from deepstow.strategies.engine.module_hooks import ModuleHooks
from deepstow.strategies.planner.weight_schedule import only_while_used
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.doubles import RaceDetector, Vacant
from tests.helpers.engine import Made, least
from tests.helpers.sides import both_sides, refused, stowed, train
from tests.helpers.zoo import FORMS, LORA, branches, hub, text

pytestmark = pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")
STEPS, NORM = 3, 0.1
MACHINE = probe()
TRAVEL: dict[str, dict[str, Any]] = {
    "host": {"site": "host", "weights": "travelling", "prefetch": 0, "park": "auto"},
    "streamed, ahead": {"site": "streamed", "weights": "travelling", "prefetch": 1, "park": "auto"},
}
HUB = [("t5", "none"), ("t5 tied", "reentrant"), ("wav2vec2, layerdrop", "later"), ("deberta", "none")]
HUB += [(kind, "none") for kind in LORA]
HAND = [
    ("early", "none"), ("late", "none"), ("late", "later"), ("output unused", "none"), ("handed on", "reentrant"),
    ("dataclass", "none"), ("sealed", "later"), ("in place", "none"), ("shared", "none"), ("in pairs", "later"),
]  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"{kind}, {recompute}": partial(hub, kind, recompute) for kind, recompute in HUB},
    **{f"{form}, {recompute}": partial(branches, form, recompute) for form, recompute in HAND},
}


smallest = partial(least, max_grad_norm=NORM, machine=MACHINE)


def clipped(model: Any, optimizer: Any) -> list[Any]:
    norms: list[float] = []
    seen = train(model, optimizer, text(STEPS), lambda _, its: norms.append(float(its.clip_grad_norm_(NORM))))
    assert max(norms) > NORM, "clipping triggers"
    return [seen, norms]


HOW: dict[str, Any] = {"max_norm": NORM, "beside": True}
vacant: dict[str, Any] = {**HOW, "transfer": Vacant, "debug": False}


@pytest.mark.parametrize("model", MODELS)
def test_trains_with_the_bits_of_plain_training(model: str) -> None:
    make, planned = MODELS[model], list(MODELS).index(model) % 2
    both_sides(make, clipped, [smallest if planned else TRAVEL["host"]], **vacant)
    both_sides(make, clipped, [TRAVEL["streamed, ahead"]], transfer=RaceDetector, **HOW)


def test_what_is_used_around_the_blocks_stays() -> None:
    """Everything else may travel; a plan in which it travels, too, is refused before a step."""
    kind = "wav2vec2"
    layouts = [{"site": "mixed", "weights": "some", "prefetch": ahead} for ahead in (0, 2)]
    both_sides(partial(hub, kind), clipped, layouts, transfer=Vacant, **HOW)
    around, made = "inner.wav2vec2.masked_spec_embed", plan_for(hub(kind), max_grad_norm=NORM, machine=MACHINE)
    assert made.layout is not None
    stays = next(index for index, bucket in enumerate(made.layout.buckets) if around in bucket.params)
    wrong = Made.of(only_while_used(made.layout, [stays]), made.facts.params)
    with pytest.raises(
        ValueError, match=rf"{around}: leaves the device in the plan, and inner\.wav2vec2, which owns it"
    ):
        stow(hub(kind), wrong, device="cpu")


def travelling(model: nn.Module) -> Any:
    """Its optimizer, after a step."""
    optimizer = stowed(model, TRAVEL["host"], transfer=Vacant(), max_norm=NORM, debug=False)
    train(model, optimizer, text(1))
    return optimizer


@pytest.mark.parametrize("form", FORMS)
def test_nodes_that_run_unannounced_are_counted(form: str) -> None:
    odd = {"late", "sealed", "in place", "in pairs", "output unused"}
    optimizer = travelling(branches(form))
    assert (optimizer.engine.unannounced > 0) is (form in odd)
    if form == "plain":  # a block that was regular makes a late node
        for layer in optimizer._model.layers:
            layer.form = "late"
        optimizer._model(**text(1)[0]).loss.backward()
        assert optimizer.engine.unannounced > 0


def test_what_backward_reads_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second net alone: no guard anywhere, and torch's own count of writes."""
    monkeypatch.setattr(ModuleHooks, "_guarded", lambda self, scope: nullcontext())
    for form in ("late", "sealed", "in place"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            travelling(branches(form))


def test_a_graph_of_shown_copies_ends_with_them() -> None:
    """What ``present`` lends is gone afterwards."""
    model: Any = branches("plain")
    optimizer = travelling(model)
    weight = model.layers[0].up.weight
    with optimizer.present([weight]):
        loss = weight.pow(2).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def two_forwards(model: Any, optimizer: Any) -> list[Any]:
    """As DPO does: the model's own log probabilities, and those of a reference, without gradients or with."""
    first, second = text(2)
    seen = []
    for _ in range(STEPS):
        with torch.no_grad():
            reference = model(**second).loss
        loss = model(**first).loss + (model(**second).loss - reference).exp()
        with torch.no_grad():
            model(**first)
        loss.backward()
        seen += [loss.item(), float(optimizer.clip_grad_norm_(NORM))]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_two_forwards_before_backward() -> None:
    both_sides(MODELS["late, none"], two_forwards, [*TRAVEL.values(), smallest], **vacant)


def penalty(model: Any, batch: Any) -> Tensor:
    """The gradient of a gradient."""
    hidden = x = model.embed(batch["input_ids"])
    for layer in model.layers:
        x = layer(x)
    loss = model.head(x).pow(2).mean()
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    return loss + grad.pow(2).sum()


def test_double_backward() -> None:
    """Refused where weights travel; exact where they stay."""
    script, make = partial(train, batches=text(STEPS), loss_of=penalty), partial(branches, "plain")
    both_sides(make, script, [{"site": "host"}], beside=True)
    refused(make, script, "create_graph=True needs weights again that travel", TRAVEL["host"])


class Late(nn.Module):
    """Parameters that are first read in the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.steps = branches("plain"), 0

    def forward(self, **batch: Any) -> Any:
        self.steps += 1
        out, inner = self.inner(**batch), self.inner
        if self.steps > 2:
            out.loss = out.loss + inner.layers[1].up.weight.pow(2).mean()
            out.loss = out.loss + (inner.common.weight @ inner.common.bias).pow(2).mean()
        return out


def test_a_parameter_that_is_first_read_late() -> None:
    """Where it stays it is settled and used like any other; where it travels a copy is made, and that is said."""
    script = partial(train, batches=text(4))
    both_sides(Late, script, [*TRAVEL.values(), {"site": "host"}], transfer=Vacant, **HOW)
