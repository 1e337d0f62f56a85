"""Models whose backward or whose readers do not keep to the borders of blocks train with the bits of plain training.

Every home is NaN from the moment it is left (``tests/helpers/doubles.py``), so that whoever reads too late cannot be
lucky. Each model also goes through the real planner at the smallest budget that it finds a plan for.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from strategies.core.facts import Home
from strategies.core.protocol import MemoryRefusal
from strategies.engine import AdamW, stow
from strategies.engine.module_hooks import ModuleHooks
from strategies.planner.weight_schedule import only_while_used
from tests.helpers.doubles import Delayed, RaceDetector, Vacant
from tests.helpers.engine import DECAY, LR, Made, adamw, differences, plain, plan_of, stowed
from tests.helpers.zoo import FORMS, LORA, branches, hub, text
from trainer.machine.probe import probe
from trainer.planning.plan_for import plan_for

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning"),
]
STEPS, NORM = 3, 0.1
MACHINE = probe()
TRAVEL: dict[str, dict[str, Any]] = {
    "host": {"site": "host", "weights": "streamed", "prefetch": 0},
    "streamed, ahead": {"site": "streamed", "weights": "streamed", "prefetch": 1},
}
HUB = [("t5", "none"), ("t5", "later"), ("t5 tied", "reentrant"), ("mt5", "none"), ("mt5", "later"), ("switch", "none")]
HUB += [
    ("wav2vec2", "none"),
    ("wav2vec2, layerdrop", "later"),
    ("deberta", "none"),
    ("deberta", "later"),
    *((kind, "none") for kind in LORA),
]
HAND = [(form, "none") for form in FORMS] + [
    (form, recompute)
    for recompute in ("later", "reentrant")
    for form in ("plain", "handed on", "in pairs", "early")
    if (form, recompute) not in (("in pairs", "reentrant"), ("early", "reentrant"))  # no gradients in plain training
] + [("late", "later"), ("dataclass", "later"), ("sealed", "later")]  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"{kind}, {recompute}": lambda kind=kind, recompute=recompute: hub(kind, recompute) for kind, recompute in HUB},
    **{
        f"{form}, {recompute}": lambda form=form, recompute=recompute: branches(form, recompute)
        for form, recompute in HAND
    },
}


def smallest(model: nn.Module, **loop: Any) -> Any:
    """The real planner's plan at the smallest budget that it does not refuse."""
    given: dict[str, Any] = {"max_grad_norm": NORM, "machine": MACHINE, **loop}
    with pytest.raises(MemoryRefusal) as refused:
        plan_for(model, gpu_memory="1KiB", **given)
    plan: Any = plan_for(model, gpu_memory=refused.value.needed, **given)
    assert plan.place.addresses.num_bytes(Home.DEVICE) == refused.value.needed
    return plan


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_trains_with_the_bits_of_plain_training(make: Callable[[], nn.Module]) -> None:
    batches = text(STEPS)
    wanted = plain(make(), batches, max_norm=NORM)
    assert wanted.norms and max(wanted.norms) > NORM, "clipping triggers"
    for wishes, transfer, debug in zip(TRAVEL.values(), (Vacant(), RaceDetector()), (False, True), strict=True):
        plan = plan_for(make(), max_grad_norm=NORM, machine=MACHINE, debug=debug, **wishes)
        assert not all(bucket.resident for bucket in plan.layout.buckets)  # type: ignore[union-attr]
        found = stowed(make(), plan, batches, max_norm=NORM, transfer=transfer)
        assert differences(wanted, found) == [], type(transfer).__name__
    model = make()
    assert differences(wanted, stowed(model, smallest(model), batches, max_norm=NORM, transfer=Vacant())) == []


@pytest.mark.parametrize("kind", ["wav2vec2", "wav2vec2, layerdrop"])
def test_what_is_used_around_the_blocks_stays(kind: str) -> None:
    """Everything else may travel; a plan in which it travels, too, is refused before a step."""
    around, wanted = "inner.wav2vec2.masked_spec_embed", plain(hub(kind), text(STEPS), max_norm=NORM)
    for ahead in (0, 2):
        plan = plan_of(hub(kind), site="mixed", weights="some", prefetch=ahead, max_norm=NORM)
        found = stowed(hub(kind), plan, text(STEPS), max_norm=NORM, transfer=Vacant())
        assert differences(wanted, found) == []
    made = plan_for(hub(kind), max_grad_norm=NORM, machine=MACHINE)
    assert made.layout is not None
    stays = next(index for index, bucket in enumerate(made.layout.buckets) if around in bucket.params)
    wrong = Made.of(only_while_used(made.layout, [stays]), made.facts.params)
    with pytest.raises(
        ValueError, match=rf"{around}: leaves the device in the plan, and inner\.wav2vec2, which owns it"
    ):
        stow(hub(kind), wrong, device="cpu")


def travelling(model: nn.Module, **more: Any) -> Any:
    """Its optimizer, after a step."""
    plan = plan_for(model, max_grad_norm=NORM, machine=MACHINE, **{**TRAVEL["host"], **more})
    optimizer = stow(model, plan, device="cpu", transfer=Vacant())
    model(**text(1)[0]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
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
    model = branches("plain")
    optimizer = travelling(model)
    weight = model.layers[0].up.weight  # type: ignore[union-attr, index]
    with optimizer.present([weight]):
        loss = weight.pow(2).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_two_forwards_before_backward() -> None:
    """As DPO does: the model's own log probabilities, and those of a reference, without gradients or with."""
    first, second = text(2)

    def both(model: nn.Module, optimizer: Any, clip: Callable[[], Any]) -> list[float]:
        seen = []
        for _ in range(STEPS):
            with torch.no_grad():
                reference = model(**second).loss
            loss = model(**first).loss + (model(**second).loss - reference).exp()
            with torch.no_grad():
                model(**first)
            loss.backward()
            seen += [loss.item(), float(clip())]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    for make in (lambda: hub("t5"), lambda: hub("deberta"), lambda: branches("late")):
        model = make()
        params = list(model.parameters())
        torch.manual_seed(3)
        wanted = both(model, adamw([{"params": params}]), lambda params=params: nn.utils.clip_grad_norm_(params, NORM))
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        plans = [plan_for(make(), max_grad_norm=NORM, machine=MACHINE, **wishes) for wishes in TRAVEL.values()]
        for plan in (*plans, smallest(make())):
            model = make()
            optimizer = stow(model, plan, rule=AdamW(lr=LR, weight_decay=DECAY), device="cpu", transfer=Vacant())
            torch.manual_seed(3)
            assert both(model, optimizer, lambda optimizer=optimizer: optimizer.clip_grad_norm_(NORM)) == wanted
            assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_double_backward() -> None:
    """Refused where weights travel; exact where they stay."""

    def penalty(model: nn.Module) -> torch.Tensor:
        batch = text(1)[0]
        hidden = model.embed(batch["input_ids"])  # type: ignore[operator]
        x = hidden
        for layer in model.layers:  # type: ignore[union-attr]
            x = layer(x)
        loss = model.head(x).pow(2).mean()  # type: ignore[operator]
        (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
        return loss + grad.pow(2).sum()

    model = branches("plain")
    params = [p for n, p in model.named_parameters() if not n.startswith(("common", "probe"))]
    optimizer: Any = adamw([{"params": params}])
    for _ in range(STEPS):
        penalty(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    for resident in (True, False):
        model = branches("plain")
        wishes = {"site": "host", "weights": "resident"} if resident else TRAVEL["host"]
        plan = plan_for(model, max_grad_norm=None, machine=MACHINE, update_in_backward=False, **wishes)
        optimizer = stow(model, plan, rule=AdamW(lr=LR, weight_decay=DECAY), device="cpu", transfer=Delayed())
        if not resident:
            with pytest.raises(RuntimeError, match="create_graph=True needs weights again that travel"):
                penalty(model)
            return
        for _ in range(STEPS):
            penalty(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_a_parameter_that_is_first_read_late() -> None:
    """Where it stays it is settled and used like any other; where it travels a copy is made, and that is said."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.steps = branches("plain"), 0

        def forward(self, **batch: Any) -> Any:
            self.steps += 1
            out = self.inner(**batch)
            if self.steps > 2:
                out.loss = out.loss + self.inner.layers[1].up.weight.pow(2).mean()  # type: ignore[union-attr, index]
                out.loss = out.loss + (self.inner.common.weight @ self.inner.common.bias).pow(2).mean()  # type: ignore[operator, union-attr]
            return out

    wanted = plain(Late(), text(4), max_norm=NORM)
    for wishes in (*TRAVEL.values(), {"site": "host", "weights": "resident"}):
        plan = plan_for(Late(), max_grad_norm=NORM, machine=MACHINE, debug=True, **wishes)
        assert differences(wanted, stowed(Late(), plan, text(4), max_norm=NORM, transfer=Vacant())) == []
