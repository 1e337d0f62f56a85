"""The loss by chunks against Transformers' own: every bit of the loss and of all gradients."""

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.plan import CHUNKS
from deepstow.strategies.core.registry import find
from deepstow.strategies.engine import stow
from deepstow.strategies.engine.forward import chunked_loss
from deepstow.strategies.engine.tensors.nested import same_bits
from deepstow.trainer.config.sections import LoraSection
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.model.build import with_lora
from deepstow.trainer.planning.plan_for import plan_for
from tests.helpers.models import causal

MACHINE = probe()
SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 301,
}  # fmt: skip
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "untied": ("llama", {**SMALL, "tie_word_embeddings": False}),
    "tied": ("llama", {**SMALL, "tie_word_embeddings": True}),
    "capped logits": ("gemma2", {**SMALL, "head_dim": 8, "final_logit_softcapping": 2.0}),
}
CHUNKED = find("cross_entropy")(chunked=True)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 rows."""
    monkeypatch.setattr(chunked_loss, "LEAST_BYTES", 1)
    monkeypatch.setattr(chunked_loss, "MOST", 1000)


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    kind, options = MODELS[name]
    return causal(kind, "eager", dtype, **options).eval()  # no dropout


def batch(rows: int = 2, tokens: int = 37) -> dict[str, Tensor]:
    ids = torch.randint(0, 301, (rows, tokens), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :11] = -100
    return {"input_ids": ids, "labels": labels}


def results(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    loss = model(**inputs).loss
    loss.backward()
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return {**found, "loss": loss.detach()}


def assert_same(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert first.keys() == other.keys()
    assert [name for name in first if not same_bits(first[name], other[name])] == []


@pytest.mark.parametrize(("words", "dtype"), [(33, torch.float16), (1000, torch.float32), (1025, torch.bfloat16)])
def test_bits_for_any_number_of_rows(words: int, dtype: torch.dtype) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    def found(loss: Callable[..., Tensor], **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        head, states = weight.clone().requires_grad_(), hidden.clone().requires_grad_()
        value = loss(logits=(states @ head.t()) * 3, labels=labels, vocab_size=words, **options)
        value.backward(torch.tensor(1.37))
        assert head.grad is not None and states.grad is not None
        return value.detach(), head.grad, states.grad

    random = torch.Generator().manual_seed(words)
    for rows, tokens in ((1, 5), (2, 17), (1, 113)):
        weight = torch.randn(words, 16, generator=random).to(dtype)
        hidden = torch.randn(rows, tokens, 16, generator=random).to(dtype)
        for ignored in (0.0, 0.4, 1.0):
            labels = torch.randint(0, words, (rows, tokens), generator=random)
            labels[torch.rand(rows, tokens, generator=random) < ignored] = -100
            shifted = torch.cat([labels[:, 1:], torch.full((rows, 1), -100)], 1)
            for options in ({}, {"num_items_in_batch": 37}, {"num_items_in_batch": torch.tensor(41)}):
                for more in (options, {**options, "shift_labels": shifted}, {**options, "ignore_index": 0}):
                    if "ignore_index" in more and (labels == -100).any():
                        continue  # no word, and not ignored: torch's error
                    mine, theirs = found(chunked_loss.causal_lm_loss, **more), found(ForCausalLMLoss, **more)
                    case = (rows, tokens, ignored, more)
                    assert all(same_bits(*pair) for pair in zip(mine, theirs, strict=True)), case


def plan_of(model: nn.Module, **options: Any) -> Any:
    return plan_for(model, batch=batch(), max_grad_norm=None, machine=MACHINE, **options)


def in_chunks(model: nn.Module) -> None:
    plan = compose({"cross_entropy": CHUNKED}, plan_of(model).facts)
    assert plan.keep("head").policy == CHUNKS
    CHUNKED.apply(model, plan)


def lora() -> Any:
    return with_lora(model_of("untied"), LoraSection(r=2, target_modules=["q_proj"]))


CASES: Mapping[str, tuple[Callable[[], Any], AbstractContextManager[Any]]] = {
    **{name: (partial(model_of, name, dtype), nullcontext())
       for name, dtype in zip(MODELS, (torch.float32, torch.bfloat16, torch.bfloat16), strict=True)},
    "adapters": (lora, nullcontext()),
    "autocast": (partial(model_of, "tied"), torch.autocast("cpu", torch.bfloat16)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_models_have_the_same_loss_and_gradients(case: str) -> None:
    make, context = CASES[case]
    model = make()
    inputs = [batch(), {**batch(), "num_items_in_batch": torch.tensor(50)}]
    if case == "untied":
        inputs.append({**batch(), "logits_to_keep": 20, "labels": batch()["labels"][:, -20:]})
    with context:
        plain = [results(model, each) for each in inputs]
        in_chunks(model)
        inner = model.get_base_model() if case == "adapters" else model
        assert inner.loss_function is chunked_loss.causal_lm_loss
        for before, each in zip(plain, inputs, strict=True):
            assert_same(before, results(model, each))


# --- the memory of the logits ----------------------------------------------------------------------------------------


def logits_and_loss(make: Callable[[Tensor], Tensor] = lambda logits: logits) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(8, 50, generator=torch.Generator().manual_seed(1))
    logits = make(hidden @ weight)
    labels = torch.arange(40) % 50
    return hidden, logits, chunked_loss.causal_lm_loss(logits, labels, 50)


def gradient(hidden: Tensor, loss: Tensor, **options: Any) -> Tensor:
    (found,) = torch.autograd.grad(loss, hidden, **options)
    return found


@pytest.mark.parametrize(
    "hold", [lambda logits: logits, lambda logits: logits[3:], Tensor.detach, None], ids=["it", "view", "detached", "-"]
)
def test_logits_that_others_read_are_not_overwritten(hold: Callable[[Tensor], Tensor] | None) -> None:
    hidden, logits, loss = logits_and_loss()
    before, address, written = logits.detach().clone(), logits.data_ptr(), []
    logits.register_hook(lambda grad: written.append(grad.data_ptr() == address))
    own = hold(logits) if hold else None
    del logits
    gradient(hidden, loss)
    assert written == [hold is None]
    assert hold is None or own is None or same_bits(own.detach(), hold(before))


def test_a_node_that_saved_the_logits_reads_them_unchanged() -> None:
    """tanh saves its output, and its backward runs after that of the loss."""
    hidden, logits, loss = logits_and_loss(torch.tanh)
    del logits
    found = gradient(hidden, loss)
    hidden, logits, _ = logits_and_loss(torch.tanh)
    whole = torch.nn.functional.cross_entropy(logits[:-1], torch.arange(1, 40) % 50)
    assert torch.allclose(found, gradient(hidden, whole), atol=1e-6)


def test_backward_twice() -> None:
    hidden, logits, loss = logits_and_loss()
    del logits
    first = gradient(hidden, loss, retain_graph=True)
    assert same_bits(first, gradient(hidden, loss))
    with pytest.raises(RuntimeError, match="second time"):
        gradient(hidden, loss)


def test_hooks_on_saved_tensors_may_keep_the_logits() -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden, logits, loss = logits_and_loss()
    before = logits.detach().clone()
    kept = [tensor for tensor in kept if tensor.shape == logits.shape]
    del logits
    gc.collect()
    gradient(hidden, loss)
    assert kept and all(same_bits(tensor, before) for tensor in kept)


def test_second_derivatives_are_refused() -> None:
    hidden, _, loss = logits_and_loss()
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient(hidden, loss, create_graph=True)


def test_a_label_that_is_no_word_is_torchs_error() -> None:
    with pytest.raises(IndexError, match="Target 50 is out of bounds"):
        chunked_loss.causal_lm_loss(torch.zeros(3, 50), torch.tensor([1, 50, 2]), 50)


# --- what is left native ---------------------------------------------------------------------------------------------


def test_a_loss_of_its_own_is_left() -> None:
    from transformers import LlamaForCausalLM

    class Own(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            out = super().forward(input_ids)
            out.loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return out

    model = Own(model_of("untied").config).eval()
    facts = plan_of(model).facts
    assert facts.units[-1].in_chunks is None and facts.units[-1].temporaries is not None
    plan = compose({"cross_entropy": CHUNKED}, facts)
    assert "does not compute its loss" in plan.idle["cross_entropy"]
    theirs = model_of("untied")
    theirs.loss_function = lambda logits, labels, **_: logits.float().sum()
    with pytest.raises(ValueError, match="a loss of its own"):
        CHUNKED.apply(theirs, compose({"cross_entropy": CHUNKED}, plan_of(model_of("untied")).facts))


def test_another_release_with_another_loss_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.loss import loss_utils

    real = loss_utils.ForCausalLMLoss
    chunked_loss.is_same.cache_clear()
    monkeypatch.setattr(loss_utils, "ForCausalLMLoss", lambda *args, **kwargs: real(*args, **kwargs) * 1.5)
    assert not chunked_loss.is_same() and chunked_loss.owners(model_of("untied")) == []
    chunked_loss.is_same.cache_clear()


def test_stow_does_what_the_plan_decided_and_undoes_it() -> None:
    """``test_strategies.py`` has the bits of both together."""
    model = model_of("tied")
    optimizer = stow(model, plan_of(model, cross_entropy={"chunked": True}, site="host"))
    assert model.loss_function is chunked_loss.causal_lm_loss
    optimizer.close()
    assert model.loss_function is not chunked_loss.causal_lm_loss
