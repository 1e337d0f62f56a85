"""The loss of a student that learns from a teacher's answers as well as from the data, by chunks of rows.

Of each trained token: ``alpha * T^2 * D(teacher, student) + (1 - alpha) * cross-entropy``, where D compares the
distributions ``softmax(logits / T)`` (Hinton, Vinyals and Dean 2015) over the words that both have. With ``top_k`` the
outcomes are the teacher's k most likely words and one more, which is that the word is any other. D is then never
more than over all words, and 0 where both agree on these outcomes; with all words it is D itself.

An answer is what is kept of the teacher at one position, as int32 [2 k + 1]: k words, then the bits of k + 1 fp32
log-probabilities; with all words [words], the log-probabilities alone. As bits, since Transformers' Trainer casts
floating-point inputs to the dtype of DeepSpeed's engine. The model's forward hands it on to its loss, as it does with
``num_items_in_batch``; without one, as in an evaluation, the loss is that of ``chunked_loss.py``.

With ``hidden`` the teacher's last hidden state h, which its head reads, follows in the answer, in fp32 or as pairs of
bf16. In the place of ``T^2 * D``, or added to it, is ``hidden_weight * mean((h - s)^2) / mean(h^2)``. The student's
state s is kept by a hook on the head, for the loss of the same call.

Invariant. The logits are kept in the dtype of the head, and no fp32 tensor is larger than a chunk has rows: forward
computes the losses of a chunk, backward computes them once more with autograd. The answers are read as they are.

Refused: models that do not compute their loss by Transformers' loss of causal language models, or whose forward hands
nothing on to it; a second derivative.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, pad

from deepstow.strategies.engine.forward.chunked_loss import causal_lm_loss, chunks, is_free, owners, per_item, targets
from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.recipes.distill import TEACHER, asked_of

if TYPE_CHECKING:
    from deepstow.trainer.config.sections import RunConfig


@dataclass(frozen=True, slots=True)
class Distillation:
    """What is compared. ``words``: the first rows of both heads; ``top_k``: None compares all of them.

    ``hidden``: numbers of the last hidden state, 0 if it is not compared; ``half``: they are kept in bf16;
    ``logits``: those are compared.
    """

    divergence: str
    alpha: float
    temperature: float
    top_k: int | None
    words: int
    hidden: int = 0
    hidden_weight: float = 1.0
    half: bool = False
    logits: bool = True

    @property
    def _scores(self) -> int:
        return 0 if not self.logits else self.words if self.top_k is None else 2 * self.top_k + 1

    @property
    def width(self) -> int:
        """Numbers of an answer."""
        return self._scores + (self.hidden // 2 if self.half else self.hidden)

    def log_probabilities(self, answer: Tensor) -> Tensor:
        """Those of the outcomes, fp32."""
        return answer[:, (self.top_k or 0) * self.logits : self._scores].contiguous().view(torch.float32)

    def state(self, answer: Tensor) -> Tensor:
        """The hidden state, fp32."""
        return answer[:, self._scores :].contiguous().view(torch.bfloat16 if self.half else torch.float32).float()


def answers(
    logits: Sequence[Tensor], how: Distillation, shares: Sequence[float] = (1.0,), hidden: Tensor | None = None
) -> Tensor:
    """The answers of teachers with these logits: [rows, vocabulary] each -> int32 [rows, width]. Of several, they are
    those of the average of their probabilities by ``shares``. ``hidden``: the only one's state [rows, hidden].
    """
    packed = torch.empty(len(logits[0]), how.width, dtype=torch.int32, device=logits[0].device)
    if hidden is not None:
        state = hidden.to(torch.bfloat16 if how.half else torch.float32).contiguous()
        packed[:, how.width - state.shape[1] * state.element_size() // 4 :] = state.view(torch.int32)
    if not how.logits:
        return packed
    for chunk in chunks(len(logits[0]), max(teacher_logits.shape[1] for teacher_logits in logits) * len(logits)):
        scaled, *others = (teacher_logits[chunk, : how.words].float() / how.temperature for teacher_logits in logits)
        if others:
            weighted = zip((scaled, *others), shares, strict=True)
            scaled = torch.stack([log_softmax(scores, 1) + log(share) for scores, share in weighted]).logsumexp(0)
        if how.top_k is None:
            packed[chunk, : how.words] = log_softmax(scaled, 1).view(torch.int32)
            continue
        top = scaled.topk(how.top_k, 1).indices
        packed[chunk, : how.top_k] = top.int()
        packed[chunk, how.top_k : 2 * how.top_k + 1] = _outcomes(scaled, top).view(torch.int32)
    return packed


def _outcomes(scaled: Tensor, top: Tensor | None) -> Tensor:
    """Log-probabilities of the words ``top`` [rows, k] and of all others together; None: of each word."""
    if top is None:
        return log_softmax(scaled, 1)
    others = scaled.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([scaled.gather(1, top), others], 1) - scaled.logsumexp(1, keepdim=True)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(1)


def _jsd(teacher: Tensor, student: Tensor) -> Tensor:
    mean = torch.logaddexp(teacher, student) - log(2)
    return (_kl(teacher, mean) + _kl(student, mean)) / 2


DIVERGENCES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": _kl,
    "reverse_kl": lambda teacher, student: _kl(student, teacher),
    "jsd": _jsd,
}


Losses = Callable[[Tensor, Tensor, Tensor, Distillation, int], Tensor]


def row_losses(logits: Tensor, target: Tensor, answer: Tensor, how: Distillation, ignored: int) -> Tensor:
    """fp32 losses of rows: [rows, vocabulary], [rows], [rows, width] -> [rows]; 0 where the target is ``ignored``."""
    scores, k = logits.float(), how.top_k
    losses = (1 - how.alpha) * cross_entropy(scores, target, ignore_index=ignored, reduction="none")
    if how.logits:
        outcomes = _outcomes(scores[:, : how.words] / how.temperature, None if k is None else answer[:, :k].long())
        divergence = DIVERGENCES[how.divergence](how.log_probabilities(answer), outcomes) * how.temperature**2
        losses = how.alpha * divergence + losses
    return torch.where(target == ignored, 0.0, losses)


def state_losses(state: Tensor, target: Tensor, answer: Tensor, how: Distillation, ignored: int) -> Tensor:
    """As ``row_losses``, of hidden states [rows, hidden]."""
    theirs = how.state(answer)
    scale = theirs.square().mean(1)
    apart = (state.float() - theirs).square().mean(1) / scale.masked_fill(scale == 0, 1)  # 0 at rows without an answer
    return torch.where(target == ignored, 0.0, how.alpha * how.hidden_weight * apart)


class _ByChunks(torch.autograd.Function):
    """The sum of ``losses_of`` rows, which is ``row_losses`` or ``state_losses``."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, target: Tensor, answer: Tensor, how: Distillation, ignored: int, losses_of: Losses
    ) -> Tensor:
        losses = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        for chunk in chunks(*rows.shape):
            losses[chunk] = losses_of(rows[chunk], target[chunk], answer[chunk], how, ignored)
        ctx.save_for_backward(rows.detach(), target, answer)  # see [Note: memory of the logits] in chunked_loss.py
        ctx.how = how
        ctx.ignored = ignored
        ctx.losses_of = losses_of
        ctx.hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True: the loss of a student has no second derivative; leave distill out")
        rows, target, answer = ctx.saved_tensors
        into = rows if is_free(ctx, rows) else torch.empty_like(rows)
        for chunk in chunks(*rows.shape):
            chunk_rows = rows[chunk].clone().requires_grad_()
            with torch.enable_grad():
                losses = ctx.losses_of(chunk_rows, target[chunk], answer[chunk], ctx.how, ctx.ignored)
            (into[chunk],) = torch.autograd.grad(losses, chunk_rows, grad.expand_as(losses))
        return into, None, None, None, None, None


def keep_state(model: Any) -> list[Tensor]:
    """A list that has what the head reads [batch, length, hidden] after a forward of ``model``, a causal language
    model; whoever reads it takes it out. ValueError: it has no head that Transformers knows of.
    """
    states: list[Tensor] = []
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} does not say what its head is, so its hidden states are not known")

    def keep(module: nn.Module, args: Any) -> None:
        states[:] = [args[0]]

    head.register_forward_pre_hook(keep)
    return states


def student_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    how: Distillation,
    states: list[Tensor] | None = None,
    teacher: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The loss of a model with the arguments of Transformers' ``ForCausalLMLoss``, and ``teacher``: the answers at each
    position [batch, length, width]. The mean over trained tokens, or their sum over ``num_items_in_batch``.
    ``states``: what ``keep_state`` has kept.
    """
    state = states.pop() if states else None
    if teacher is None:
        return causal_lm_loss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    target = targets(labels, shift_labels, ignore_index).to(logits.device)
    answer = teacher.flatten(0, -2).to(logits.device)
    total: Tensor = _ByChunks.apply(logits.reshape(-1, vocab_size), target, answer, how, ignore_index, row_losses)
    if how.hidden:
        assert state is not None
        total = total + _ByChunks.apply(state.flatten(0, -2), target, answer, how, ignore_index, state_losses)
    return per_item(total, target.ne(ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)


def distil(model: nn.Module, how: Distillation) -> None:
    """Let ``model`` learn from answers that its forward is given. ValueError if its forward cannot be."""
    modules: list[Any] = owners(model)
    signatures = [inspect.signature(module.forward).parameters.values() for module in modules]
    if not modules or not all(any(param.kind is param.VAR_KEYWORD for param in params) for params in signatures):
        raise ValueError(f"{type(model).__name__} has a loss of its own, which cannot be given a teacher's answers")
    for module in modules:
        states = keep_state(module) if how.hidden else None
        module.loss_function = partial(student_loss, how=how, states=states)


def width_of(text_config: Any) -> int:
    """Numbers of the hidden state that the head of a language model reads; a small OPT projects its states first."""
    return getattr(text_config, "word_embed_proj_dim", None) or int(text_config.hidden_size)


def comparison(config: RunConfig, words: int, hidden: int) -> Distillation:
    """What ``config`` compares of ``words`` words and ``hidden`` numbers of a state that student and teacher have."""
    section = asked_of(config)
    top_k = section.top_k if section.top_k != "all" and section.top_k < words else None
    half = config.training.bf16 and hidden % 2 == 0  # two of them are kept in 32 bits
    return Distillation(
        section.loss,
        section.alpha,
        section.temperature,
        top_k,
        words,
        0 if section.on == "logits" else hidden,
        section.hidden_weight,
        half,
        section.on != "hidden",
    )


def learn(model: nn.Module, config: RunConfig, how: Distillation) -> None:
    """Give ``model`` the loss of a student. ConfigError if it has one of its own."""
    try:
        distil(model, how)
    except ValueError as error:
        raise config.error("distill.teacher", asked_of(config).teacher, f"{error}; leave distill out") from None


def counted(model: Any, config: RunConfig, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Give ``model`` the loss of a student. Returns what forward is given of a teacher, taken to have as many words, of
    rows and tokens of this ``shape``.
    """
    text = model.config.get_text_config()
    how = comparison(config, text.vocab_size, width_of(text))
    learn(model, config, how)
    return {TEACHER: torch.zeros(*shape, how.width, dtype=torch.int32)}


def answers_of(rows: Sequence[Mapping[str, Any]], labels: Tensor) -> Tensor:
    """The teacher's answers at every position, int32 [rows, length, width]; 0 where the next token is not trained. Rows
    have them as bytes, those at positions whose next token is trained, in order.
    """
    predicts = pad(labels, (0, 1), value=MASKED)[:, 1:] != MASKED
    stored = np.frombuffer(b"".join(row[TEACHER] for row in rows), np.int32)
    by_position = torch.zeros(*labels.shape, len(stored) // int(predicts.sum()), dtype=torch.int32)
    by_position[predicts] = torch.from_numpy(stored.copy()).view(int(predicts.sum()), -1)
    return by_position
