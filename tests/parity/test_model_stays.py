"""The model stays a model: what libraries read from it and write to it is right at any moment, stowed or not."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deepstow.strategies.engine import SGD, stow
from tests.helpers.engine import plan_of
from tests.helpers.models import build, on
from tests.helpers.sides import (
    BATCHES,
    CPU,
    LAYOUTS,
    TWO,
    Plain,
    both_sides,
    copies,
    everything,
    ground,
    refused,
    same,
    stowed,
    train,
    training,
    unequal,
)

llama, tied = partial(build, "llama"), partial(build, "llama", tied=True)
ONE_STEP = training(steps=1)

# --- reading ---------------------------------------------------------------------------------------------------------


def reads_at_borders(model: Any, optimizer: Any) -> list[Any]:
    """By functions and by ``data``; what travels is copied for that, no home is taken."""
    seen: list[Any] = []

    @torch.no_grad()
    def look(*_: object) -> None:
        for param in model.parameters():
            seen.extend([param.to(CPU, copy=True), param.data[None].to(CPU, copy=True)])

    for block in model.model.layers:
        block.register_forward_hook(look)
        block.register_full_backward_hook(look)
    return [train(model, optimizer, BATCHES[:2], after=look), seen]


def regularized(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Gradients flow through what is read outside of modules, and add up with those of the model."""
    loss: Tensor = model(**batch).loss + 1e-2 * sum((param**2).sum() for param in model.parameters())
    return loss


def state_dicts(model: Any, optimizer: Any) -> list[Any]:
    block, seen = model.model.layers[1], list[Any]()

    def loss_of(model: Any, batch: Any) -> Tensor:
        loss: Tensor = model(**batch).loss
        seen.append(copies(model))
        return loss

    def look(*_: object) -> list[Any]:
        return [copies(block), copies(model)]

    return [copies(model), train(model, optimizer, BATCHES[:3], look, look, loss_of=loss_of), seen]


def evaluated(model: Any, optimizer: Any) -> list[Any]:
    model.eval()
    with torch.no_grad():
        seen = [model(**BATCHES[7]).loss.item()]
    with torch.inference_mode():
        seen.append(model(**BATCHES[6]).loss.item())
    model.train()
    return seen


def evaluates(model: Any, optimizer: Any) -> list[Any]:
    return [evaluated(model, optimizer), train(model, optimizer, BATCHES[:3], evaluated, evaluated)]


def generates(model: Any, optimizer: Any) -> Any:
    """Before the gradients are set to None."""
    return model.generate(BATCHES[0]["input_ids"][:1], max_new_tokens=8, do_sample=False, pad_token_id=0).tolist()


# --- writing ---------------------------------------------------------------------------------------------------------


def present_and_pending(model: Any, optimizer: Any) -> list[Any]:
    """Updates are pending where weights are shown and written to."""
    params, seen = list(model.parameters()), list[Any]()
    for batch in BATCHES[:3]:
        train(model, optimizer, [batch])
        with optimizer.present(params):
            seen += [param.detach().clone() for param in params]
        with optimizer.present(params[3:6]), torch.no_grad():
            params[4].mul_(1.5)
            params[5].data[0] = 7.0
        with optimizer.present([params[4]]):
            seen.append(params[4].detach().clone())
    return seen


def loads(model: Any, optimizer: Any) -> list[Any]:
    """Other weights into the whole model, and into a part of it."""
    other = copies(llama().apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None))
    part = {name.removeprefix("model.layers.0."): value for name, value in other.items() if "layers.0." in name}
    seen: list[Any] = train(model, optimizer, BATCHES[:2])
    keys = model.load_state_dict(other)
    seen += train(model, optimizer, BATCHES[2:4])
    model.model.layers[3].load_state_dict(part)
    return [*seen, list(keys.missing_keys), *train(model, optimizer, BATCHES[4:6])]


SAME: dict[str, Callable[[], None]] = {
    "read at every border": same(llama, reads_at_borders),
    "a regularizer": same(llama, training(loss_of=regularized), LAYOUTS),
    "state dicts at any time": same(tied, state_dicts, LAYOUTS),
    "evaluated": same(llama, evaluates, max_norm=0.5),
    "generates": same(llama, training(after=generates), max_norm=1.0),
    "present, updates pending": same(llama, present_and_pending, LAYOUTS),
    "load_state_dict": same(llama, loads, LAYOUTS),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same(case: str) -> None:
    SAME[case]()


@pytest.mark.parametrize(("layout", "where"), [(TWO[1], "forward"), (TWO[0], "between")])
def test_a_write_into_what_is_here_is_found(layout: str, where: str) -> None:
    """Torch's count of writes shows it; the host's copy or the master would not know of it."""
    name = "model.layers.1.mlp" if where == "forward" else "model.norm"

    def script(model: nn.Module, optimizer: Any) -> None:
        inner = model.get_submodule(name)

        def write(*_: object) -> None:
            with torch.no_grad():
                next(inner.parameters()).mul_(2.0)

        if where == "forward":
            inner.register_forward_hook(write)
        train(model, optimizer, BATCHES[1:2], write)

    refused(llama, script, rf"{name}.*was written to in place; write under `with", layout)


# --- copying and saving ----------------------------------------------------------------------------------------------


def test_copies_and_pickles(tmp_path: Path) -> None:
    model: Any = llama()
    optimizer = stowed(model, "streamed")
    for copied in (model, model.model, model.model.layers[1], model.model.layers[1].mlp, model.lm_head.weight):
        with pytest.raises(TypeError, match=r"this model is stowed.*save_pretrained"):
            copy.deepcopy(copied)
        with pytest.raises(TypeError, match=r"this model is stowed.*save_pretrained"):
            torch.save(copied, tmp_path / "file")
    with pytest.raises(TypeError, match="this model is stowed"):
        torch.optim.swa_utils.AveragedModel(model)
    optimizer.close()
    copy.deepcopy(model)


@pytest.mark.parametrize(("layout", "make"), [(TWO[0], llama), (TWO[1], tied)], ids=["llama", "tied"])
def test_save_pretrained(layout: str, make: Any, tmp_path: Path) -> None:
    plain, model = ground.put(make()), make()
    optimizer = stowed(model, layout)
    for side, its, name in ((plain, Plain(plain, 0.0), "plain"), (model, optimizer, "ours")):
        train(side, its, BATCHES[:2])
        side.save_pretrained(tmp_path / name)
    found = [load_file(tmp_path / name / "model.safetensors") for name in ("plain", "ours")]
    assert unequal(*found) == []
    again = type(model).from_pretrained(tmp_path / "ours")
    assert unequal(copies(plain), copies(again)) == []
    train(model, optimizer, BATCHES[2:3])  # and it goes on


def test_state_dict_copies_nothing() -> None:
    for layout in TWO:
        model = llama()
        optimizer = stowed(model, layout)
        ONE_STEP(model, optimizer)
        for name, value in model.state_dict().items():
            (bucket,) = (bucket for bucket in optimizer.engine.buckets if name in bucket.spec.params)
            assert value.data_ptr() == bucket.weight_of(bucket.spec.params.index(name)).data_ptr()
            assert value.untyped_storage().nbytes() == value.nbytes, "a storage of its own, or it looks tied"


def test_a_state_dict_that_does_not_fit() -> None:
    model = llama()
    optimizer = stowed(model, "streamed")
    ONE_STEP(model, optimizer)
    before, wrong = everything(model, optimizer), copies(model)
    wrong["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(wrong)
    assert unequal(before, everything(model, optimizer)) == []
    train(model, optimizer, BATCHES[1:2])


# --- leaving ---------------------------------------------------------------------------------------------------------


def test_close_gives_a_plain_model_back() -> None:
    for layout in LAYOUTS:
        model, untouched = llama(), ground.feed(llama())
        optimizer = stowed(model, layout)
        train(model, optimizer, BATCHES[:2])
        expected = copies(model)
        model(**BATCHES[2]).loss.backward()
        optimizer.step()
        model.load_state_dict(expected)
        optimizer.close()
        assert unequal(expected, copies(model)) == []
        memory = optimizer.engine.arena._host.memory
        start, end = memory.data_ptr(), memory.numel()
        for param in model.parameters():
            assert param.grad is None and not param._post_accumulate_grad_hooks
            assert not start <= param.data_ptr() < start + max(end, 1)
        for ours, theirs in zip(model.modules(), untouched.modules(), strict=True):
            for name, value in vars(theirs).items():
                if "hooks" in name and isinstance(value, dict):
                    assert len(vars(ours)[name]) == len(value), name
        assert not hasattr(model, "_stowed")
        on(ground.device, model)
        ONE_STEP(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        stowed(on(CPU, model), layout).close()


def test_a_plan_for_another_model() -> None:
    plan: Any = plan_of(llama())
    frozen = llama()
    frozen.get_parameter("lm_head.weight").requires_grad_(False)
    for other, said in (
        (build("gpt2"), "the model has no such parameter"),
        (build("llama", dtype=torch.bfloat16), "the model .* x bfloat16"),
        (tied(), "lm_head.weight: the model has no such parameter"),
        (frozen, "lm_head.weight: the plan has .* in group 0, the model .* in group None"),
    ):
        before = copies(other)
        with pytest.raises(ValueError, match=f"made for something else(.|\n)*{said}"):
            stow(other, plan, device="cpu")
        assert unequal(before, copies(other)) == [] and not hasattr(other, "_stowed")
    with pytest.raises(ValueError, match="2 moments per parameter, the update rule keeps 0"):
        stow(llama(), plan, rule=SGD(), device="cpu")
    stow(model := llama(), plan, device="cpu")
    with pytest.raises(ValueError, match="stowed already"):
        stow(model, plan, device="cpu")


@pytest.mark.parametrize("what", ["to", "load_state_dict"])
def test_parameters_that_torch_would_swap(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch can be told to move other tensors into parameters, which would not lie where the plan says."""
    said = "swap" if what == "to" else "makes load_state_dict replace what a plan has given its memory"

    def script(model: nn.Module, optimizer: Any) -> list[Any]:
        losses = train(model, optimizer, BATCHES[:1])
        if not isinstance(optimizer, Plain):
            with monkeypatch.context() as patched, pytest.raises(RuntimeError, match=said):
                patched.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
                model.to(torch.bfloat16) if what == "to" else model.load_state_dict(model.state_dict())
        return losses + train(model, optimizer, BATCHES[1:3])

    both_sides(llama, script, ["streamed"])
