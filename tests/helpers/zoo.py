"""Models whose backward or whose readers do not keep to the borders of blocks.

Each takes ``input_ids`` and ``labels`` and returns a loss. ``Branches`` is made by hand, of one block in many forms;
the others are Hugging Face's, with a few thousand parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.helpers.engine import checkpointing
from tests.helpers.models import LAYERS, VOCAB, WIDTH, Block, Net, build


@dataclass
class State:
    """What a block may be given and give back."""

    hidden: Tensor


class Sealed:
    """The same, but nobody can look into it."""

    __slots__ = ("_hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self._hidden = lambda: hidden

    @property
    def hidden(self) -> Tensor:
        return self._hidden()


class Branch(Block):
    """``form`` says what is odd about it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.kept = form, []

    def body(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Any, handed: Tensor | None = None) -> Any:
        hidden = x if isinstance(x, Tensor) else x.hidden
        if self.form == "early":  # an auxiliary loss that is made before the output and leaves by an attribute
            self.kept = [self.spare(hidden).pow(2).mean()]
        out = self.body(hidden)
        if self.form in ("late", "output unused"):
            self.kept = [self.up(self.spare(out)).pow(2).mean()]
        if self.form == "handed on":  # T5's position bias: made by the first block, given back by all
            handed = self.spare(hidden) if handed is None else handed
            return self.body(hidden + handed), handed
        if self.form == "dataclass":
            return State(out)
        if self.form == "sealed":
            return Sealed(out)
        if self.form == "in place":
            x.hidden = out
            return None
        return out


FORMS = ("plain", "early", "late", "output unused", "handed on", "dataclass", "sealed", "in place", "shared",
         "in pairs")  # fmt: skip


class Branches(Net):
    """Blocks of one form.

    Besides those of ``Branch``: "shared" (all blocks use one layer outside of them), "in pairs" (with ``recompute``:
    two blocks are recomputed as one segment, whose inner border nobody sees).
    """

    def __init__(self, form: str, recompute: str = "none") -> None:
        super().__init__(lambda: Branch("sealed" if form == "in pairs" else form))
        self.form, self.recompute = form, recompute
        self.common, self.probe = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x: Any = self.embed(input_ids)
        handed, losses = None, []
        if self.form == "in place":
            x = State(x)
        for start in range(0, LAYERS, 2 if self.form == "in pairs" else 1):
            if self.form == "in pairs":
                x = self.call(lambda x, start=start: self.layers[start + 1](self.layers[start](x)), x)
            elif self.form == "handed on":
                x, handed = self.call(self.layers[start], x, handed)
            elif self.form == "in place" or (self.form == "output unused" and start == LAYERS - 1):
                self.layers[start](x)
            else:
                x = self.call(self.layers[start], x)
            if self.form == "shared":
                x = x + F.linear(x, self.common.weight) * 0.1
            losses += self.layers[start].kept
        x = x if isinstance(x, Tensor) else x.hidden
        logits = F.linear(x, self.head.weight) + self.probe(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss + 0.1 * sum(losses))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.recompute == "none":
            return function(*args)
        return checkpoint(function, *args, use_reentrant=self.recompute == "reentrant")


def branches(form: str, recompute: str = "none") -> nn.Module:
    """The same weights each time."""
    return build(lambda: Branches(form, recompute))


def text(count: int) -> list[dict[str, Tensor]]:
    """The same batches each time."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, VOCAB, (2, 8), generator=generator) for _ in range(count)]
    return [{"input_ids": one, "labels": one} for one in ids]


T5: Mapping[str, Any] = {
    "vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 3,
    "num_heads": 4, "dropout_rate": 0.1, "decoder_start_token_id": 0,
}  # fmt: skip
DEBERTA: Mapping[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 48, "relative_attention": True, "position_buckets": 8, "max_relative_positions": 16,
    "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm",
}  # fmt: skip
M2M100: Mapping[str, Any] = {
    "vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32,
}  # fmt: skip
WAV2VEC2: Mapping[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "conv_dim": (16, 16), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16, "mask_time_prob": 0.2, "mask_time_length": 2,
}  # fmt: skip
LORA: Mapping[str, Mapping[str, Any]] = {
    "lora on embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "lora on tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
}


def hub(kind: str, recompute: str = "none") -> nn.Module:
    """One of Hugging Face's, with the same weights each time, in training mode."""
    import transformers as hf

    torch.manual_seed(0)
    if kind in LORA:
        return _with_lora(LORA[kind]).train()
    model: Any = {
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
        "t5 tied": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, tie_word_embeddings=True)),
        "switch": lambda: hf.SwitchTransformersForConditionalGeneration(
            hf.SwitchTransformersConfig(**T5, num_experts=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)
        ),
        "deberta": lambda: hf.DebertaV2ForMaskedLM(hf.DebertaV2Config(**DEBERTA)),
        "m2m100": lambda: hf.M2M100ForConditionalGeneration(hf.M2M100Config(**M2M100)),
        "wav2vec2": lambda: Heard(freezes=False, layerdrop=0.0),
        "wav2vec2, layerdrop": lambda: Heard(freezes=True, layerdrop=0.4),
    }[kind]()  # fmt: skip
    checkpointing(model, recompute)
    trained: nn.Module = model.train()
    return trained


class Heard(nn.Module):
    """A classifier of sound, made of ids. One parameter belongs to a module around two stacks of blocks."""

    def __init__(self, *, freezes: bool, layerdrop: float) -> None:
        import transformers as hf

        super().__init__()
        self.inner = hf.Wav2Vec2ForSequenceClassification(hf.Wav2Vec2Config(**WAV2VEC2, layerdrop=layerdrop))
        if freezes:
            self.inner.freeze_feature_encoder()
        self.gradient_checkpointing_enable = self.inner.gradient_checkpointing_enable

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        np.random.seed(int(input_ids.sum()))  # draws what is masked
        return self.inner(input_ids.sin().repeat_interleave(25, dim=1), labels=labels[:, 0] % 2)


def _with_lora(options: Mapping[str, Any]) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import PhiConfig, PhiForCausalLM

    base = PhiForCausalLM(
        PhiConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=3, num_attention_heads=4,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    model: Any = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", **options))
    return model
