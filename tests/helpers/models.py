"""Models for tests of the engine: Hugging Face's of a few thousand parameters, and modules written by hand.

Those written by hand have what the others lack: experts whose gradient is None, modules that are called twice, odd
sizes, parameters of the root. They are called as the others are, with ids and labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.helpers.tiny import MODELS

VOCAB, LAYERS, WIDTH = 64, 4, 32
WORDS = 2048  # of "words", a Llama whose embedding and head are larger than its blocks
BERT: Mapping[str, Any] = {
    "model_type": "bert", "hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip
WIDE: Mapping[str, Any] = {  # blocks of a 1.3 B model, for GPUs (benchmarks/gpu_engine.py)
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16,
    "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
}  # fmt: skip
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "n_layer": LAYERS},
    "bloom": {"n_layer": LAYERS},
    "opt": {"dropout": 0.1},
    "mixtral": {"router_jitter_noise": 0.0, "output_router_logits": False},
}


def build(kind: str | Callable[[], nn.Module], *, tied: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of ``kind``, or what that makes, with the same random weights each time, in training mode."""
    torch.manual_seed(0)
    if not isinstance(kind, str):
        model = kind()
    elif kind in ODD:
        model = Odd(ODD[kind])
    else:
        model = Mixture(tied) if kind == "experts" else _from_hub(kind, tied, dtype)
    return model.to(dtype).train()


def on(device: torch.device | str, model: nn.Module) -> nn.Module:
    """``model`` moved to ``device``, tied weights as they were.

    For kinds of device that register with torch, ``to`` makes new parameters, and of a tied one two, unless asked.
    """
    was = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(was)


def _from_hub(kind: str, tied: bool, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    if kind == "wide":
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**WIDE), dtype=dtype)
    given = {**(BERT if kind == "bert" else MODELS["llama" if kind == "words" else kind]), "vocab_size": VOCAB}
    given |= {"vocab_size": WORDS} if kind == "words" else {}
    given |= {} if "n_layer" in given else {"num_hidden_layers": LAYERS}
    config = AutoConfig.for_model(**given | CHANGES.get(kind, {}) | {"tie_word_embeddings": tied})
    maker = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    model: nn.Module = maker.from_config(config, dtype=dtype)
    return model


def causal(kind: str, attention: str | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A causal language model of Hugging Face's with the same random weights each time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    kernel = {"attn_implementation": attention} if attention else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options), dtype=dtype, **kernel).train()


def padded(words: int, length: int = 64) -> dict[str, Tensor]:
    """Two rows, one with padding: without any Transformers makes no mask, which a fake run cannot know."""
    ids = torch.randint(0, words, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, -length // 4 :] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def tokens(kind: str, count: int) -> list[dict[str, Tensor]]:
    """The same random batches each time; so few tokens for a mixture that some expert gets none."""
    if kind in ODD:
        return odd_batches(count)
    generator = torch.Generator().manual_seed(1)
    shape = {"mixtral": (1, 3), "experts": (1, 3), "wide": (1, 256)}.get(kind, (2, 8))
    ids = [torch.randint(2, VOCAB, shape, generator=generator) for _ in range(count)]
    return [{"input_ids": one, "labels": one} for one in ids]


class Block(nn.Module):
    """Of ``Net``. ``spare`` is used if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.uses_spare = True

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x + self.spare(x) if self.uses_spare else x


class Net(nn.Module):
    """Blocks in a row; each call is counted, and a class may add ``more`` to its loss."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))
        self.calls = 0

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        self.calls += 1
        logits = self.head(self.hidden(self.embed(input_ids)))
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) + self.more())

    def more(self) -> Tensor | float:
        return 0.0


class Mixture(nn.Module):
    """Blocks of experts, of which each token takes one: whoever gets no token has no gradient at all."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Experts(4) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.recompute: dict[str, Any] | None = None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        """As Hugging Face's."""
        self.recompute = gradient_checkpointing_kwargs

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x) if self.recompute is None else checkpoint(layer, x, **self.recompute)
        logits = self.head(self.norm(x))
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class Experts(nn.Module):
    """A block of ``Mixture``."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).flatten(0, 1)
        weights = self.router(y).softmax(-1)
        best = weights.argmax(-1)
        out = torch.zeros_like(y)
        for index, expert in enumerate(self.experts):
            rows = (best == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(y[rows]) * weights[rows, index, None])
        return x + out.view_as(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What ``Odd`` is made of; blocks are numbered as they are registered.

    Args:
        calls: blocks in order of use; some perhaps twice, some never.
        shares: (block, earlier block) whose inner layer is one module.
        frozen: how many of ten parameters are frozen, spread evenly.
    """

    width: int
    hidden: tuple[int, ...]
    calls: tuple[int, ...]
    bias: bool = True
    shares: tuple[int, int] | None = None
    on_root: bool = False
    tied: bool = False
    frozen: int = 0
    dropout: float = 0.0
    recompute: int = 0  # so many blocks at a time
    reentrant: bool = False


ODD: Mapping[str, Spec] = {
    "few": Spec(width=16, hidden=(24, 16), calls=(0, 1)),
    "blocks": Spec(width=16, hidden=(24, 16, 32, 24, 16, 8), calls=(0, 1, 2, 3, 4, 5)),
    "shared": Spec(width=12, hidden=(8, 10, 12, 16), calls=(0, 1, 2, 1, 3, 0), shares=(2, 1), on_root=True, frozen=2),
}


class Odd(nn.Module):
    """Residual layers of odd sizes."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        if spec.on_root:
            self.scale = nn.Parameter(torch.randn(spec.width))
        self.embed = nn.Embedding(7, spec.width)
        self.layers = nn.ModuleList(Residual(spec, size) for size in spec.hidden)
        if spec.shares is not None:
            later, earlier = spec.shares
            self.layers[later].inner = self.layers[earlier].inner
        self.head = nn.Linear(spec.width, 7, bias=spec.bias)
        if spec.tied:
            self.head.weight = self.embed.weight
        for index, param in enumerate(self.parameters()):
            param.requires_grad_((index * spec.frozen) % 10 + spec.frozen < 10)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        """As Hugging Face's."""
        self.spec = replace(self.spec, recompute=1, reentrant=gradient_checkpointing_kwargs["use_reentrant"])

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x, spec = self.embed(input_ids), self.spec
        for start in range(0, len(spec.calls), spec.recompute or 1):
            calls = spec.calls[start : start + (spec.recompute or 1)]
            if spec.recompute and x.requires_grad:  # reentrant checkpoints give no gradients otherwise
                x = checkpoint(self._several, x, calls, use_reentrant=spec.reentrant)
            else:
                x = self._several(x, calls)
        if spec.on_root:
            x = x * self.scale
        return SimpleNamespace(loss=F.cross_entropy(self.head(x), labels))

    def _several(self, x: Tensor, calls: tuple[int, ...]) -> Tensor:
        for index in calls:
            x = self.layers[index](x)
        return x


class Residual(nn.Module):
    """A block of ``Odd``. ``inner`` maps the width to itself, so that two blocks may share it."""

    def __init__(self, spec: Spec, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(spec.width, spec.width, bias=spec.bias)
        self.up = nn.Linear(spec.width, hidden, bias=spec.bias)
        self.down = nn.Linear(hidden, spec.width, bias=spec.bias)
        self.drop = nn.Dropout(spec.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.inner(x)))))


def odd_batches(count: int) -> list[dict[str, Tensor]]:
    """Batches for ``Odd``."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 7, (5,), generator=generator) for _ in range(count)]
    return [{"input_ids": one, "labels": one.flip(0)} for one in ids]
