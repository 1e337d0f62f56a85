"""Other people's loops: clipping by torch's function, by Accelerate, by nobody; and what is refused in one line."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from strategies.engine import AdamW, NonFiniteError, stow
from tests.helpers.engine import DECAY, LR, adamw, plan_of
from tests.helpers.models import build, tokens
from tests.helpers.sides import LAYOUTS
from trainer.planning.plan_for import plan_for
from trainer.run.accelerator import StowAccelerator

pytestmark = pytest.mark.usefixtures("one_thread")
BATCHES, NORM = tokens("llama", 6), 0.05
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def stowed(layout: str, max_norm: float = NORM, **more: Any) -> tuple[nn.Module, Any]:
    model = build("llama")
    plan: Any = plan_of(model, **{**LAYOUTS[layout], "max_norm": max_norm, **more})
    return model, stow(model, plan, rule=AdamW(lr=LR, weight_decay=DECAY), device="cpu")


def loop(model: nn.Module, optimizer: Any, clip: Callable[[Iterable[Tensor]], Any], accumulation: int = 1) -> list[Any]:
    """What the loop sees, and the weights that it leaves."""
    seen: list[Any] = []
    for start in range(0, len(BATCHES), accumulation):
        for batch in BATCHES[start : start + accumulation]:
            loss = model(**batch).loss / accumulation
            loss.backward()
            seen.append(loss.item())
        seen.append(clip(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
    return seen + [value.tolist() for value in model.state_dict().values()]


CLIPS: dict[str, Callable[[Iterable[Tensor]], Any]] = {
    "torch's": lambda params: float(clip_grad_norm_(params, NORM)),
    "torch's, one by one": lambda params: float(clip_grad_norm_(params, NORM, foreach=False)),
    "a norm alone": lambda params: float(get_total_norm([p.grad for p in params if p.grad is not None])),
    "norms and clipping": lambda params: _norms_and_clipping(list(params)),
}


def _norms_and_clipping(params: list[Tensor]) -> list[float]:
    return [*(float(p.grad.norm()) for p in params if p.grad is not None), float(clip_grad_norm_(params, NORM))]


@pytest.mark.parametrize("clip", ["torch's", "torch's, one by one", "norms and clipping"])
@pytest.mark.parametrize("accumulation", [1, 3])
@layouts
def test_torchs_clipping_clips(layout: str, accumulation: int, clip: str) -> None:
    model = build("llama")
    wanted = loop(model, adamw([{"params": list(model.parameters())}]), CLIPS[clip], accumulation)
    model, optimizer = stowed(layout, accumulation=accumulation)
    assert loop(model, optimizer, CLIPS[clip], accumulation) == wanted


@layouts
def test_who_only_looks_at_norms_is_clipped_as_planned(layout: str) -> None:
    model = build("llama")
    wanted = loop(model, adamw([{"params": list(model.parameters())}]), CLIPS["torch's"])
    model, optimizer = stowed(layout)
    assert loop(model, optimizer, CLIPS["a norm alone"]) == wanted


@layouts
def test_accelerates_clipping_clips_and_logs(layout: str) -> None:
    """A stock Accelerator, which wraps the optimizer and calls torch's function."""
    from accelerate import Accelerator

    model = build("llama")
    wanted = loop(model, adamw([{"params": list(model.parameters())}]), CLIPS["torch's"])
    accelerator = Accelerator(cpu=True)
    model, optimizer = stowed(layout)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert loop(model, optimizer, lambda params: float(accelerator.clip_grad_norm_(params, NORM))) == wanted


def test_our_accelerator_refuses_to_clip_some() -> None:
    """Plain training would clip these by their own norm; frozen ones and those without a gradient may be left out."""
    model, optimizer = stowed("streamed")
    accelerator = StowAccelerator(cpu=True)
    accelerator.prepare(optimizer)
    model(**BATCHES[0]).loss.backward()
    params = list(model.parameters())
    with pytest.raises(ValueError, match=f"leaves out 1 of {len(params)} parameters"):
        accelerator.clip_grad_norm_(iter(params[1:]), NORM)
    params[0].grad = None
    assert float(accelerator.clip_grad_norm_(iter(params[1:]), NORM)) > NORM


def test_gradients_can_be_read() -> None:
    """Copies, right after the last micro-batch, wherever they park."""
    model = build("llama")
    for batch in BATCHES[:3]:
        model(**batch).loss.backward()
    wanted = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    for layout in LAYOUTS:
        model, optimizer = stowed(layout, accumulation=3)
        assert all(param.grad is None for param in model.parameters())
        for batch in BATCHES[:3]:
            model(**batch).loss.backward()
        for name, param in model.named_parameters():
            assert param.grad is not None and param.grad.shape == param.shape
            assert torch.equal(param.grad + 0.0, wanted[name]), (layout, name)
            assert torch.equal(param.grad.abs().max(), wanted[name].abs().max())
        kept = next(model.parameters()).grad
        optimizer.step()
        for param in model.parameters():
            with pytest.raises(RuntimeError, match=r"step\(\) took the gradient of"):
                param.grad.norm()  # type: ignore[union-attr]
        model.zero_grad()
        assert all(param.grad is None for param in model.parameters())
        with pytest.raises(RuntimeError, match="belongs to an earlier step"):
            kept.norm()  # type: ignore[union-attr]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clips", [True, False], ids=["the loop clips", "the plan clips"])
def test_gradients_that_are_not_wanted(accumulation: int, clips: bool) -> None:
    """``model.zero_grad()`` before the step discards them; one that is set to None has no update and no norm."""
    names = ("model.layers.1.mlp.up_proj.weight", "model.norm.weight")

    def script(model: nn.Module, optimizer: Any, *, clips: bool) -> list[Any]:
        model(**BATCHES[0]).loss.backward()
        model.zero_grad()
        for start in range(0, len(BATCHES), accumulation):
            for batch in BATCHES[start : start + accumulation]:
                model(**batch).loss.backward()
            for name in names:
                model.get_parameter(name).grad = None
            if clips:
                clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()
        return [value.tolist() for value in model.state_dict().values()]

    model = build("llama")
    wanted = script(model, adamw([{"params": list(model.parameters())}]), clips=True)
    for layout in LAYOUTS:
        assert script(*stowed(layout, accumulation=accumulation), clips=clips) == wanted, layout


def test_clipping_where_updates_begin_in_backward() -> None:
    """Norms are there, a factor of 1 is nothing, anything else comes too late."""
    model, optimizer = stowed("streamed", max_norm=0.0, in_backward=True)
    model(**BATCHES[0]).loss.backward()
    assert float(clip_grad_norm_(model.parameters(), float("inf"))) > 0
    with pytest.raises(RuntimeError, match="updates in backward, before the norm is known"):
        clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


# --- what is not finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [NORM, 0.0])
@layouts
def test_three_skipped_steps_in_a_row_are_an_error(layout: str, max_norm: float) -> None:
    model, optimizer = stowed(layout, max_norm, in_backward=max_norm == 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step(bad: bool) -> None:
        loss = model(**BATCHES[0]).loss
        hidden = model.get_parameter("model.layers.2.mlp.down_proj.weight")
        (loss * (float("nan") if bad else 1.0) + 0.0 * hidden.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(True)
    step(True)
    step(False)
    assert optimizer.skipped == 2
    step(True)
    step(True)
    with pytest.raises(NonFiniteError, match=r"3 steps in a row were skipped: the gradient of .* is not finite"):
        step(True)
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_first_gradient_of_backward_is_named() -> None:
    model, optimizer = stowed("mixed")
    for _ in range(2):
        _spoilt(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(NonFiniteError, match=r"the gradient of model.layers.1.mlp.down_proj.weight is not finite"):
        _spoilt(model).backward()
        optimizer.step()


def _spoilt(model: nn.Module) -> Tensor:
    """Only what comes before the output of block 1 gets gradients that are not finite."""
    handle = model.get_submodule("model.layers.1.mlp.down_proj").register_forward_hook(
        lambda module, inputs, out: out + (out * 0).sqrt().sum() * 0  # the root of zero has no slope
    )
    loss: Tensor = model(**BATCHES[0]).loss
    handle.remove()
    return loss


# --- what changes a model after it was stowed -------------------------------------------------------------------------


def test_a_parameter_that_nobody_holds() -> None:
    """Adapters that are added, and what is unfrozen, after the model was stowed."""
    from peft import LoraConfig, get_peft_model

    model: Any = build("llama")
    model.lm_head.weight.requires_grad_(False)
    optimizer = stow(model, plan_for(model, max_grad_norm=None), device="cpu")
    model.lm_head.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"lm_head.weight requires a gradient and is not in the optimizer: "):
        model(**BATCHES[0])
    optimizer.close()

    model = build("llama")
    stow(model, plan_for(model, max_grad_norm=None), device="cpu")
    adapted: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(RuntimeError, match=r"lora_A.*requires a gradient and is not in the optimizer: what changes"):
        adapted(**BATCHES[0])


def test_data_parallel_wrappers() -> None:
    model: Any = build("llama")
    optimizer = stow(model, plan_for(model, max_grad_norm=None), device="cpu")
    with pytest.raises(RuntimeError, match="replicated by DataParallel: start one process for each GPU"):
        model._replicate_for_data_parallel()(**BATCHES[0])
    optimizer.close()


def test_clipping_has_to_be_said() -> None:
    with pytest.raises(TypeError, match="max_grad_norm"):
        plan_for(build("llama"))  # type: ignore[call-arg]


def test_a_plan_for_other_ranks() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="the plan is for 2 ranks, and 1 train together: give plan_for their number"):
        stow(model, plan_for(model, max_grad_norm=1.0, world_size=2), device="cpu")


def test_a_compiled_model_whose_weights_travel() -> None:
    model = build("llama")
    plan = plan_for(model, max_grad_norm=1.0, site="host", weights="streamed")
    stow(model, plan, device="cpu")
    compiled: Any = torch.compile(model, backend="eager")
    with pytest.raises(RuntimeError, match="whose weights travel cannot be compiled: plan with weights='resident'"):
        compiled(**BATCHES[0])


def test_a_compiled_model_whose_weights_stay() -> None:
    """Bit for bit, with the backend that changes no kernel, though updates hide parameters between the steps."""

    def train(model: nn.Module, optimizer: Any) -> list[Any]:
        torch._dynamo.reset()
        compiled: Any = torch.compile(model, backend="eager")
        losses = []
        for batch in BATCHES[:3]:
            loss = compiled(**batch).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses + [value.tolist() for value in model.state_dict().values()]

    model = build("llama")
    wanted = train(model, adamw([{"params": list(model.parameters())}]))
    model = build("llama")
    plan = plan_for(model, max_grad_norm=None, site="host", weights="resident")
    assert train(model, stow(model, plan, rule=AdamW(lr=LR, weight_decay=DECAY), device="cpu")) == wanted
