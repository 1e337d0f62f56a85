"""The model stays a model: what libraries read from it and write to it is right at any moment, stowed or not."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from strategies.engine.buckets.bucket_state import BucketState
from strategies.engine.tensors.parameters import AbsentParameter
from tests.helpers.engine import plan_of
from tests.helpers.models import build, on, tokens
from tests.helpers.sides import CPU, LAYOUTS, TWO, Plain, both_sides, everything, ground, stowed, train, unequal

BATCHES = tokens("llama", 8)
layouts = pytest.mark.parametrize("layout", TWO)


def llama() -> nn.Module:
    return build("llama")


def tied() -> nn.Module:
    return build("llama", tied=True)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().to(CPU, copy=True) for name, value in model.state_dict().items()}


def bucket_of(optimizer: Any, name: str) -> BucketState:
    (bucket,) = (bucket for bucket in optimizer.engine.buckets if name in bucket.spec.params)
    assert isinstance(bucket, BucketState)
    return bucket


# --- absent and present ----------------------------------------------------------------------------------------------


@layouts
def test_whoever_reads_gets_the_newest_weight(layout: str) -> None:
    """At every border of a step, by functions and by ``data``; what travels is copied for that, no home is taken."""
    model = llama()
    optimizer = stowed(model, layout)
    absent = 0

    def look(*_: object) -> None:
        nonlocal absent
        for name, param in model.named_parameters():
            assert param.shape == expected[name].shape and param.dtype == torch.float32
            absent += isinstance(param, AbsentParameter)
            with torch.no_grad():
                value = expected[name].to(ground.device)
                assert torch.equal(param.to(ground.device), value), name
                assert torch.equal(param.data[None].to(ground.device), value[None]), name

    for block in model.model.layers:  # type: ignore[union-attr]
        block.register_forward_hook(look)
        block.register_full_backward_hook(look)
    for batch in BATCHES[:2]:
        expected = weights_of(model)
        train(model, optimizer, [batch])
    expected = weights_of(model)
    look()
    assert absent > 0


def test_a_regularizer_reads_every_parameter() -> None:
    """Gradients flow through what is read outside of modules, and add up with those of the model."""

    def script(model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for batch in BATCHES[:3]:
            loss = model(**batch).loss + 1e-2 * sum((param**2).sum() for param in model.parameters())
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    both_sides(llama, script, LAYOUTS)
    both_sides(lambda: build("llama", tied=True), script, TWO, max_norm=0.5)


WRITES: Mapping[str, Callable[[nn.Parameter], Any]] = {
    "mul_": lambda param: param.mul_(2.0),
    "zero_": nn.Parameter.zero_,
    "index": lambda param: param.__setitem__(0, 1.0),
    "+=": lambda param: param.__iadd__(1.0),
    "out": lambda param: torch.add(param, 1.0, out=param),
    "init": nn.init.normal_,
    "foreach": lambda param: torch._foreach_add_([param], 1.0),
    "data": lambda param: param.data.mul_(2.0),
    "view of data": lambda param: param.data.view(-1)[:2].fill_(1.0),
    "data =": lambda param: setattr(param, "data", torch.zeros_like(param)),
    "detach": lambda param: param.detach().mul_(2.0),
    "grad =": lambda param: setattr(param, "grad", torch.zeros_like(param)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_are_refused(write: Callable[[nn.Parameter], Any]) -> None:
    """On what is away at once, with a line that says how to write; and nothing has changed."""
    model = llama()
    optimizer = stowed(model, "host, one ahead")
    train(model, optimizer, BATCHES[:1])
    before = everything(model, optimizer)
    param = next(p for p in model.parameters() if isinstance(p, AbsentParameter))
    with pytest.raises(RuntimeError, match=r"optimizer\.present|come from backward only") as refused, torch.no_grad():
        write(param)
    assert "\n" not in str(refused.value)
    assert unequal(before, everything(model, optimizer)) == []
    train(model, optimizer, BATCHES[1:2])


@pytest.mark.parametrize("where", ["forward", "between"])
@layouts
def test_a_write_into_what_is_here_is_found(layout: str, where: str) -> None:
    """Torch's count of writes shows it; the host's copy or the master would not know of it."""
    model = llama()
    optimizer = stowed(model, layout)
    train(model, optimizer, BATCHES[:1])
    inner = model.get_submodule("model.layers.1.mlp" if where == "forward" else "model.norm")
    param = next(inner.parameters())

    def write(*_: object) -> None:
        with torch.no_grad():
            param.mul_(2.0)

    inner.register_forward_hook(write if where == "forward" else lambda *_: None)
    with pytest.raises(RuntimeError, match=r"(layers.1.mlp|norm).*was written to in place; write under `with"):
        model(**BATCHES[1]).loss.backward()
        write()
        optimizer.step()


@layouts
def test_a_graph_from_before_the_step(layout: str) -> None:
    """As in plain training: what it saved has been replaced."""
    model = llama()
    optimizer = stowed(model, layout)
    loss = model(**BATCHES[0]).loss
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"was updated since the forward|modified by an inplace operation"):
        loss.backward()


@layouts
def test_copies_and_pickles(layout: str, tmp_path: Path) -> None:
    model = llama()
    optimizer = stowed(model, layout)
    for copied in (model, model.model, model.model.layers[1], model.model.layers[1].mlp, model.lm_head.weight):  # type: ignore[union-attr, index]
        with pytest.raises(TypeError, match=r"this model is stowed.*save_pretrained"):
            copy.deepcopy(copied)
        with pytest.raises(TypeError, match=r"this model is stowed.*save_pretrained"):
            torch.save(copied, tmp_path / "file")
    with pytest.raises(TypeError, match="this model is stowed"):
        torch.optim.swa_utils.AveragedModel(model)
    optimizer.close()
    copy.deepcopy(model)


def test_moving_a_stowed_model() -> None:
    model = llama()
    optimizer = stowed(model, "host, one ahead")
    train(model, optimizer, BATCHES[:1])
    model.to(ground.device)
    model.float()
    with pytest.raises(RuntimeError, match="the memory of a stowed model is planned"):
        model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="planned"):
        model.resize_token_embeddings(80)  # type: ignore[operator]


def test_present_shows_and_keeps() -> None:
    def script(model: nn.Module, optimizer: Any) -> list[Tensor]:
        seen: list[Tensor] = []
        params = list(model.parameters())
        for batch in BATCHES[:3]:
            train(model, optimizer, [batch])  # updates are pending now
            with optimizer.present(params):
                seen += [param.detach().clone() for param in params]
            with optimizer.present(params[3:6]), torch.no_grad():
                params[4].mul_(1.5)
                params[5].data[0] = 7.0
            with optimizer.present([params[4]]):
                seen.append(params[4].detach().clone())
        return seen

    both_sides(llama, script, LAYOUTS)


# --- state dicts -----------------------------------------------------------------------------------------------------


def test_state_dict_at_any_time() -> None:
    def script(model: nn.Module, optimizer: Any) -> list[dict[str, Tensor]]:
        seen = [weights_of(model)]
        block = model.model.layers[1]  # type: ignore[union-attr, index]
        for batch in BATCHES[:3]:
            loss = model(**batch).loss
            seen.append(weights_of(model))
            loss.backward()
            seen.append(weights_of(model))
            seen.append(weights_of(block))  # type: ignore[arg-type]
            optimizer.step()
            seen.append(weights_of(block))  # type: ignore[arg-type]
            seen.append(weights_of(model))
            optimizer.zero_grad()
        return seen

    both_sides(tied, script, LAYOUTS)


@pytest.mark.parametrize("make", [llama, tied])
@layouts
def test_save_pretrained(layout: str, make: Any, tmp_path: Path) -> None:
    plain, model = ground.put(make()), make()
    optimizer = stowed(model, layout)
    for side in (plain, model):
        train(
            side,
            optimizer if side is model else torch.optim.AdamW(side.parameters(), lr=1e-2, weight_decay=0.1, fused=True),
            BATCHES[:2],
        )
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "ours")
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    assert unequal(expected, load_file(tmp_path / "ours" / "model.safetensors")) == []
    again = type(model).from_pretrained(tmp_path / "ours")
    assert unequal(weights_of(plain), weights_of(again)) == []
    train(model, optimizer, BATCHES[2:3])  # and it goes on


@layouts
def test_state_dict_copies_nothing(layout: str) -> None:
    model = llama()
    optimizer = stowed(model, layout)
    train(model, optimizer, BATCHES[:1])
    for name, value in model.state_dict().items():
        bucket = bucket_of(optimizer, name)
        index = bucket.spec.params.index(name)
        assert value.data_ptr() == bucket.weight_of(index).data_ptr()
        assert value.untyped_storage().nbytes() == value.nbytes, "a storage of its own, or it looks tied"


def test_load_state_dict() -> None:
    other = weights_of(build("llama").apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None))
    part = {name.removeprefix("model.layers.0."): value for name, value in other.items() if "layers.0." in name}

    def script(model: nn.Module, optimizer: Any) -> list[Any]:
        losses = train(model, optimizer, BATCHES[:2])
        keys: Any = model.load_state_dict(other)
        losses += train(model, optimizer, BATCHES[2:4])
        model.model.layers[3].load_state_dict(part)  # type: ignore[union-attr, index, operator]
        return [*losses, list(keys.missing_keys), *train(model, optimizer, BATCHES[4:6])]

    both_sides(llama, script, LAYOUTS)


@layouts
def test_a_state_dict_that_does_not_fit(layout: str) -> None:
    model = llama()
    optimizer = stowed(model, layout)
    train(model, optimizer, BATCHES[:1])
    before = everything(model, optimizer)
    wrong = weights_of(model)
    wrong["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(wrong)
    assert unequal(before, everything(model, optimizer)) == []
    train(model, optimizer, BATCHES[1:2])


# --- forwards in between ---------------------------------------------------------------------------------------------


def test_eval_and_forwards_without_gradient() -> None:
    def script(model: nn.Module, optimizer: Any) -> list[Any]:
        seen: list[Any] = []

        def evaluate() -> None:
            model.eval()
            with torch.no_grad():
                seen.append(model(**BATCHES[7]).loss.item())
            with torch.inference_mode():
                seen.append(model(**BATCHES[6]).loss.item())
            model.train()

        evaluate()
        for batch in BATCHES[:3]:
            loss = model(**batch).loss
            loss.backward()
            evaluate()
            optimizer.step()
            evaluate()
            optimizer.zero_grad()
        return seen

    both_sides(llama, script, LAYOUTS, max_norm=0.5)
    both_sides(lambda: build("gpt2"), script, TWO)


def test_generate() -> None:
    def script(model: nn.Module, optimizer: Any) -> list[Any]:
        seen = []
        for batch in BATCHES[:2]:
            train(model, optimizer, [batch], zero=False)
            made = model.generate(batch["input_ids"][:1], max_new_tokens=8, do_sample=False, pad_token_id=0)  # type: ignore[operator]
            seen.append(made.tolist())
            optimizer.zero_grad()
        return seen

    both_sides(llama, script, TWO, max_norm=1.0)


# --- leaving ---------------------------------------------------------------------------------------------------------


def test_close_gives_a_plain_model_back() -> None:
    for layout in LAYOUTS:
        model, untouched = llama(), ground.feed(llama())
        optimizer = stowed(model, layout)
        train(model, optimizer, BATCHES[:2])
        expected = weights_of(model)
        model(**BATCHES[2]).loss.backward()
        optimizer.step()
        model.load_state_dict(expected)
        optimizer.close()
        assert unequal(expected, weights_of(model)) == []
        memory = optimizer.engine.arena._host.memory
        start, end = memory.data_ptr(), memory.numel()
        for param in model.parameters():
            assert param.grad is None and not param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            assert not start <= param.data_ptr() < start + max(end, 1)
        for ours, theirs in zip(model.modules(), untouched.modules(), strict=True):
            for name, value in vars(theirs).items():
                if "hooks" in name and isinstance(value, dict):
                    assert len(vars(ours)[name]) == len(value), name
        assert not hasattr(model, "_stowed")
        on(ground.device, model)
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), BATCHES[:1])
        stowed(on(CPU, model), layout).close()


def test_stowing_twice() -> None:
    model = llama()
    stowed(model, "streamed")
    with pytest.raises(ValueError, match="stowed already"):
        stowed(model, "streamed")


def test_a_plan_for_another_model() -> None:
    from strategies.engine import SGD, stow

    plan: Any = plan_of(llama())
    for other, said in (
        (build("gpt2"), "the model has no such parameter"),
        (build("llama", dtype=torch.bfloat16), "the model .* x bfloat16"),
        (tied(), "lm_head.weight: the model has no such parameter"),
    ):
        before = weights_of(other)
        with pytest.raises(ValueError, match=f"made for something else(.|\n)*{said}"):
            stow(other, plan, device="cpu")
        assert unequal(before, weights_of(other)) == [] and not hasattr(other, "_stowed")
    frozen = llama()
    frozen.get_parameter("lm_head.weight").requires_grad_(False)
    with pytest.raises(ValueError, match=r"lm_head.weight: the plan has .* in group 0, the model .* in group None"):
        stow(frozen, plan, device="cpu")
    with pytest.raises(ValueError, match="2 moments per parameter, the update rule keeps 0"):
        stow(llama(), plan, rule=SGD(), device="cpu")


@pytest.mark.parametrize("what", ["to", "load_state_dict"])
def test_parameters_that_torch_would_swap(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch can be told to move other tensors into parameters, which would not lie where the plan says."""
    model = llama()
    optimizer = stowed(model, "streamed")
    losses = train(model, optimizer, BATCHES[:1])
    said = "swap" if what == "to" else "makes load_state_dict replace what a plan has given its memory"
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match=said):
        patched.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        model.to(torch.bfloat16) if what == "to" else model.load_state_dict(model.state_dict())
    plain = ground.put(llama())
    assert losses + train(model, optimizer, BATCHES[1:3]) == train(plain, Plain(plain, 0.0), BATCHES[:3])
