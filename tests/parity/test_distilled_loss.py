"""The loss of a student against its formula, written over whole probabilities in fp64, and its gradient by autograd."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from deepstow.strategies.engine.forward import chunked_loss
from deepstow.trainer.recipes.distill.loss import Distillation, answers, distil, student_loss, width_of

ROWS, LENGTH, WORDS, MORE = 3, 40, 37, 3  # both models have 37 words, and the student's head 3 more
ALL, FEW = None, 5


def formula(student: Tensor, teacher: Tensor, labels: Tensor, how: Distillation, items: int | None) -> Tensor:
    """Of logits [rows, length, words]; the loss of one token after the other."""
    losses = []
    for row in range(ROWS):
        for at in range(LENGTH - 1):
            target = labels[row, at + 1]
            if target == -100:
                continue
            p = (teacher[row, at, :WORDS].double() / how.temperature).softmax(0)
            q = (student[row, at, :WORDS] / how.temperature).softmax(0)
            if how.top_k is not None:
                top = p.sort(descending=True).indices[: how.top_k]
                p, q = (torch.cat([each[top], 1 - each[top].sum()[None]]) for each in (p, q))
            m = (p + q) / 2
            divergence = {
                "forward_kl": (p * (p / q).log()).sum(),
                "reverse_kl": (q * (q / p).log()).sum(),
                "jsd": ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2,
            }[how.divergence]
            by_data = cross_entropy(student[row, at][None], target[None])
            losses.append(how.alpha * how.temperature**2 * divergence + (1 - how.alpha) * by_data)
    return torch.stack(losses).sum() / (len(losses) if items is None else items)


def numbers(seed: int, more: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, LENGTH, WORDS + more, generator=generator) * 3


def labels_of() -> Tensor:
    labels = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
    labels[0, :9], labels[2, 30:] = -100, -100
    return labels


def loss_of(student: Tensor, labels: Tensor, how: Distillation, items: Any = None) -> Tensor:
    kept = answers([numbers(1).flatten(0, 1)], how).view(ROWS, LENGTH, -1)
    return student_loss(student, labels, WORDS + MORE, items, how=how, teacher=kept)


@pytest.mark.parametrize("items", [None, 31])
@pytest.mark.parametrize("top_k", [ALL, FEW, WORDS - 1])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_formula_and_gradient(
    divergence: str, top_k: int | None, items: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "LEAST_BYTES", 16 * 4 * WORDS)  # seven chunks and a half
    how, labels = Distillation(divergence, 0.7, 2.0, top_k, WORDS), labels_of()
    student = numbers(2, MORE).requires_grad_()
    exact = student.detach().double().requires_grad_()
    found, expected = loss_of(student, labels, how, items), formula(exact, numbers(1), labels, how, items)
    (found * 3).backward()  # as a loss scale does
    (expected * 3).backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(student.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)  # type: ignore[union-attr]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("logits", [False, True])
def test_hidden_states(logits: bool, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the divergence or in its place, by position; no gradient, and no NaN, where nothing is trained."""
    monkeypatch.setattr(chunked_loss, "LEAST_BYTES", 16 * 4 * 12)  # several chunks of states as well
    how = Distillation("jsd", 0.7, 2.0, FEW, WORDS, hidden=12, hidden_weight=0.3, half=half, logits=logits)
    labels, student = labels_of(), numbers(2, MORE)
    state, theirs = (torch.randn(ROWS, LENGTH, 12, generator=torch.Generator().manual_seed(seed)) for seed in (6, 7))
    theirs = theirs.bfloat16() if half else theirs
    kept = answers([numbers(1).flatten(0, 1)], how, hidden=theirs.flatten(0, 1)).view(ROWS, LENGTH, -1)
    assert kept.shape[2] == how.width == (2 * FEW + 1) * logits + (6 if half else 12)
    kept[:, :-1][labels[:, 1:] == -100] = 0  # as rows of the collator have it
    one, other = (state.clone().requires_grad_() for _ in range(2))
    found = student_loss(student, labels, WORDS + MORE, 31, how=how, states=[one], teacher=kept)
    trained = labels[:, 1:] != -100
    h, s = theirs[:, :-1][trained].double(), other[:, :-1][trained].double()
    apart = ((h - s).square().mean(1) / h.square().mean(1)).sum()
    rest = formula(student.double(), numbers(1), labels, Distillation("jsd", 0.7, 2.0, FEW, WORDS), 31)
    if not logits:
        rest = 0.3 * cross_entropy(student[:, :-1][trained].double(), labels[:, 1:][trained], reduction="sum") / 31
    expected = rest + 0.7 * 0.3 * apart / 31
    found.backward()
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-8)


def test_what_is_kept_is_what_the_head_reads() -> None:
    """Also of an OPT, whose forward goes past the model below its head, and which projects its last state."""
    import transformers

    config = transformers.OPTConfig(
        vocab_size=WORDS, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2,
        word_embed_proj_dim=8, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = transformers.OPTForCausalLM(config).eval()
    distil(model, Distillation("jsd", 1.0, 1.0, None, WORDS, hidden=width_of(config), logits=False))
    ids = torch.randint(2, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(4))
    theirs = torch.randn(ROWS, LENGTH, 8, generator=torch.Generator().manual_seed(5))
    found = model(input_ids=ids, labels=ids, teacher=theirs.view(torch.int32)).loss
    head: Any = model.lm_head
    own: list[Tensor] = []
    head.register_forward_pre_hook(lambda module, args: own.append(args[0]))
    model(input_ids=ids)
    apart = (own[0] - theirs)[:, :-1].square().mean(-1) / theirs[:, :-1].square().mean(-1)
    assert found.item() == pytest.approx(apart.mean().item(), rel=1e-5)


def test_all_words_are_kept_as_the_teacher_says_them() -> None:
    """To the bit, and top_k's with them, but for the last, which is all others."""
    logits, every = numbers(1).flatten(0, 1), Distillation("jsd", 0.5, 2.0, None, WORDS)
    kept = answers([logits], every).view(torch.float32)
    assert torch.equal(kept, (logits[:, :WORDS] / 2).log_softmax(1))
    few = answers([logits], Distillation("jsd", 0.5, 2.0, FEW, WORDS))
    words, values = few[:, :FEW].long(), few[:, FEW:].contiguous().view(torch.float32)
    torch.testing.assert_close(values[:, :-1], kept.gather(1, words), rtol=0, atol=1e-6)
    torch.testing.assert_close(values.exp().sum(1), torch.ones(len(values)))


@pytest.mark.parametrize("top_k", [ALL, FEW])
def test_probabilities_of_several_teachers_are_averaged(top_k: int | None) -> None:
    """At the temperature, over the words that all have; the most likely words are those of the average."""
    first, second = numbers(1).flatten(0, 1), numbers(3, MORE).flatten(0, 1)
    how = Distillation("jsd", 0.5, 2.0, top_k, WORDS)
    mean = 0.75 * (first.double() / 2).softmax(1) + 0.25 * (second[:, :WORDS].double() / 2).softmax(1)
    found, expected = answers([first, second], how, (0.75, 0.25)), answers([2 * mean.log()], how)
    k = top_k or 0
    assert torch.equal(found[:, :k], expected[:, :k])
    values, wanted = (each[:, k:].contiguous().view(torch.float32) for each in (found, expected))
    torch.testing.assert_close(values, wanted, rtol=0, atol=1e-5)


def test_without_weight_it_is_the_loss_of_the_data() -> None:
    """To the bits of a gradient; and without answers, as in an evaluation, to all bits."""
    labels, how = labels_of(), Distillation("forward_kl", 0.0, 1.0, FEW, WORDS)
    one, other = numbers(2, MORE).requires_grad_(), numbers(2, MORE).requires_grad_()
    loss_of(one, labels, how, 31).backward()
    chunked_loss.causal_lm_loss(other, labels, WORDS + MORE, 31).backward()
    assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    plain = student_loss(other, labels, WORDS + MORE, how=how)
    assert torch.equal(plain, chunked_loss.causal_lm_loss(other, labels, WORDS + MORE))


def test_logits_that_are_needed_again_are_not_overwritten() -> None:
    labels, how = labels_of(), Distillation("jsd", 0.5, 1.0, FEW, WORDS)
    student = numbers(2, MORE).requires_grad_()
    logits = student * 1
    loss = loss_of(logits, labels, how)
    first = torch.autograd.grad(loss, student, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, student)[0])
    assert torch.equal(logits, student)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss_of(student, labels, how), student, create_graph=True)


def test_a_model_with_a_loss_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has a loss of its own"):
        distil(torch.nn.Linear(2, 2), Distillation("jsd", 0.5, 1.0, FEW, WORDS))
