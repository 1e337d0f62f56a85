"""Other people's loops: clipping by torch's function, by Accelerate, by nobody; and what is refused in one line."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from deepstow.strategies.engine import NonFiniteError, stow
from deepstow.trainer.planning.plan_for import plan_for
from deepstow.trainer.run.accelerator import StowAccelerator
from tests.helpers.marks import slowly
from tests.helpers.models import Net, build
from tests.helpers.sides import BATCHES, LAYOUTS, TWO, Script, refused, same, stowed, train, training

NORM = 0.05
UNWANTED = ("model.layers.1.mlp.up_proj.weight", "model.norm.weight")
llama = partial(build, "llama")


def clips(model: Any, optimizer: Any) -> float:
    return float(clip_grad_norm_(model.parameters(), NORM))


def looks_at_the_norm(model: Any, optimizer: Any) -> float:
    return float(get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def by_accelerate(model: Any, optimizer: Any) -> list[Any]:
    """A stock Accelerator, which wraps the optimizer and calls torch's function."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    return train(
        model, optimizer, BATCHES[:3], lambda model, _: float(accelerator.clip_grad_norm_(model.parameters(), NORM))
    )


def unwanted(between: Script | None) -> Script:
    """``model.zero_grad()`` before the step discards gradients; one that is set to None has no update and no norm."""

    def without(model: Any, optimizer: Any) -> None:
        for name in UNWANTED:
            model.get_parameter(name).grad = None
        if between:
            between(model, optimizer)

    def script(model: Any, optimizer: Any) -> list[Any]:
        model(**BATCHES[0]).loss.backward()
        model.zero_grad()
        return train(model, optimizer, BATCHES[:6], without, passes=(3,) if between else (1,))

    return script


def in_fp16(model: Any, optimizer: Any, clips: bool = True) -> list[Any]:
    """As PyTorch's manual says: a loss scale that is too large at first, and grows."""
    scaler, seen = torch.amp.GradScaler("cpu", 2.0**22, growth_interval=2), list[Any]()
    for window in (BATCHES[start : start + 2] for start in (0, 2, 4, 6, 0, 2, 4, 6)):
        for batch in window:
            with torch.autocast("cpu", torch.float16):
                loss = model(**batch).loss / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        seen += [loss.item(), looks_at_the_norm(model, optimizer), *([clips_to(model)] if clips else [])]
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
        optimizer.zero_grad()
    scales = seen[3 if clips else 2 :: 4 if clips else 3]
    assert scales[3] == 2.0**18 and max(scales[4:]) > scales[3], "four steps in a row are skipped, then it grows"
    return seen


def clips_to(model: Any) -> float:
    return clips(model, None)


def compiles(model: Any, optimizer: Any) -> list[Any]:
    """With the backend that changes no kernel, though updates hide parameters between the steps."""
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager")
    return train(compiled, optimizer, BATCHES[:2])


SAME: dict[str, Callable[[], None]] = {
    "torch's function": same(
        llama, training(clips, steps=6, passes=(3,)), LAYOUTS, clips=True, accumulation=3, max_norm=NORM
    ),
    "who only looks is clipped as planned": same(llama, training(looks_at_the_norm), max_norm=NORM),
    "by Accelerate": same(llama, by_accelerate, LAYOUTS, clips=True, max_norm=NORM),
    "some unwanted, the loop clips": same(llama, unwanted(clips), LAYOUTS, clips=True, accumulation=3, max_norm=NORM),
    "some unwanted, the plan clips": same(llama, unwanted(None), max_norm=NORM),
    "fp16": same(llama, in_fp16, LAYOUTS, clips=True, accumulation=2, max_norm=NORM, fused=False),
    "compiled": same(partial(build, Net), compiles, [{"site": "host"}], max_norm=NORM),
}


@pytest.mark.parametrize("case", [slowly(case) if case == "compiled" else case for case in SAME])
def test_the_same(case: str) -> None:
    SAME[case]()


def test_our_accelerator_refuses_to_clip_some() -> None:
    """Plain training would clip these by their own norm; frozen ones and those without a gradient may be left out."""
    model = llama()
    optimizer = stowed(model, "streamed", max_norm=NORM)
    accelerator = StowAccelerator(cpu=True)
    accelerator.prepare(optimizer)
    model(**BATCHES[0]).loss.backward()
    params = list(model.parameters())
    with pytest.raises(ValueError, match=f"leaves out 1 of {len(params)} parameters"):
        accelerator.clip_grad_norm_(iter(params[1:]), NORM)
    params[0].grad = None
    assert float(accelerator.clip_grad_norm_(iter(params[1:]), NORM)) > NORM


def test_gradients_whose_time_is_over() -> None:
    model = llama()
    optimizer = stowed(model, "streamed")
    assert all(param.grad is None for param in model.parameters())
    model(**BATCHES[0]).loss.backward()
    kept: Any = next(model.parameters()).grad
    optimizer.step()
    for param in model.parameters():
        with pytest.raises(RuntimeError, match=r"step\(\) took the gradient of"):
            param.grad.norm()
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    with pytest.raises(RuntimeError, match="belongs to an earlier step"):
        kept.norm()


@pytest.mark.parametrize("layout", TWO)
def test_a_graph_from_before_the_step(layout: str) -> None:
    """As in plain training: what it saved has been replaced."""
    model = llama()
    optimizer = stowed(model, layout)
    loss = model(**BATCHES[0]).loss
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"was updated since the forward|modified by an inplace operation"):
        loss.backward()


def test_clipping_where_updates_begin_in_backward() -> None:
    """Norms are there, a factor of 1 is nothing, anything else comes too late."""

    def script(model: Any, optimizer: Any) -> None:
        model(**BATCHES[0]).loss.backward()
        assert float(clip_grad_norm_(model.parameters(), float("inf"))) > 0
        clip_grad_norm_(model.parameters(), 1e-3)

    refused(llama, script, "updates in backward, before the norm is known", "streamed", in_backward=True)


def spoilt(model: Any) -> Tensor:
    """Only what comes before the output of block 1 gets gradients that are not finite."""
    handle = model.get_submodule("model.layers.1.mlp.down_proj").register_forward_hook(
        lambda module, inputs, out: out + (out * 0).sqrt().sum() * 0  # the root of zero has no slope
    )
    loss: Tensor = model(**BATCHES[0]).loss
    handle.remove()
    return loss


def infinite(model: Any) -> Tensor:
    """Everything, where updates begin before all is known."""
    loss: Tensor = model(**BATCHES[0]).loss * float("inf")
    return loss


@pytest.mark.parametrize(
    ("layout", "bad", "max_norm", "named"),
    [
        ("mixed", spoilt, NORM, r"model.layers.1.mlp.down_proj.weight"),
        ("streamed", infinite, 0.0, ".*"),
        ("device, resident", infinite, 0.0, ".*"),
    ],
)
def test_three_skipped_steps_in_a_row_are_an_error(
    layout: str, bad: Callable[[Any], Tensor], max_norm: float, named: str
) -> None:
    """The first gradient of backward that is not finite is named."""
    model = llama()
    optimizer = stowed(model, layout, max_norm=max_norm, in_backward=max_norm == 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step(bad(model))
    step(model(**BATCHES[0]).loss)
    assert optimizer.skipped == 2
    for _ in range(2):
        step(bad(model))
    with pytest.raises(NonFiniteError, match=rf"3 steps in a row were skipped: the gradient of {named} is not finite"):
        step(bad(model))
    after = model.state_dict()
    assert all(value.isfinite().all() for value in after.values())
    assert any(not torch.equal(before[name], value) for name, value in after.items())


# --- what changes a model after it was stowed, and plans that do not fit it -------------------------------------------


def unfrozen(model: Any, optimizer: Any) -> None:
    model.lm_head.weight.requires_grad_(True)
    model(**BATCHES[0])


def with_adapters(model: Any, optimizer: Any) -> None:
    from peft import LoraConfig, get_peft_model

    adapted: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted(**BATCHES[0])


def frozen_head() -> nn.Module:
    model: Any = llama()
    model.lm_head.weight.requires_grad_(False)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], Script, str]] = {
    "unfrozen": (frozen_head, unfrozen, r"lm_head.weight requires a gradient and is not in the optimizer: "),
    "adapters": (llama, with_adapters, r"lora_A.*requires a gradient and is not in the optimizer: what changes"),
    "data parallel": (
        llama, lambda model, _: model._replicate_for_data_parallel()(**BATCHES[0]),
        "replicated by DataParallel: start one process for each GPU",
    ),
    "compiled": (
        partial(build, Net), compiles, "whose weights travel cannot be compiled: plan with weights='resident'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    refused(*REFUSED[case])


def test_clipping_has_to_be_said() -> None:
    with pytest.raises(TypeError, match="max_grad_norm"):
        plan_for(llama())  # type: ignore[call-arg]


def test_a_plan_for_other_ranks() -> None:
    model = llama()
    with pytest.raises(ValueError, match="the plan is for 2 ranks, and 1 train together: give plan_for their number"):
        stow(model, plan_for(model, max_grad_norm=1.0, world_size=2), device="cpu")
