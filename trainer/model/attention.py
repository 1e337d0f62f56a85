"""Which attention a model is built with, and what this machine lacks for it.

Names are Transformers' (``attn_implementation``), and ``sdpa_varlen``, which it is told of
(``strategies/parallel/varlen.py``). Liger's kernels are among what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deepstow.strategies.core.protocol import Axis, Phase, Refusal
from deepstow.trainer.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from deepstow.trainer.config.sections import ModelSection, RunConfig

ELSE = "write sdpa, or sdpa_varlen, which needs no mask for packed rows"
FLASH = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"}  # their packages
AUTO = "auto"
SDPA = "sdpa"
VARLEN = "sdpa_varlen"
KEY = "model.attn_implementation"
NO_MASK = "model.attention_mask: {} models take no masks of others; leave it out"
LIGER = ("llama", "mistral", "qwen2", "qwen3")  # families of which all that Liger replaces was read, and compared
HERE = ("eager", SDPA, VARLEN)  # small copies and counts, which are on a CPU, take them


def options(section: ModelSection) -> dict[str, str]:
    """What Transformers is given for the configured attention; nothing: the model's own."""
    if section.attention_mask is not None:
        return _masked(section, section.attn_implementation or SDPA)
    if section.attn_implementation == VARLEN:
        from deepstow.strategies.parallel import varlen

        varlen.register()
    return {"attn_implementation": section.attn_implementation} if section.attn_implementation else {}


def prepare(section: ModelSection, model: PreTrainedModel) -> None:
    """Let ``model`` ask for no mask of packed rows, where its attention needs none."""
    if section.attn_implementation == VARLEN:
        from deepstow.strategies.parallel import varlen

        varlen.prepare(model)


def takes_documents(config: RunConfig) -> bool:
    """Whether attention computes documents of packed rows one by one, and so has to know how long they are."""
    divided = any(Axis.SEQUENCE in strategy.divides() for strategy in config.strategies.values())
    return divided or config.model.attn_implementation == VARLEN


def of_copy(section: ModelSection) -> dict[str, str]:
    """The same for a small copy on a CPU: the model's own for those that a CPU does not have."""
    return options(section) if (section.attn_implementation or SDPA) in HERE else {}


def of_export(section: ModelSection) -> dict[str, str]:
    """The same for an export that is compared on the CPU: a mask that it was trained with belongs to the model."""
    return _masked(section, SDPA) if section.attention_mask is not None else {}


def write_down(section: ModelSection, hf_config: PretrainedConfig) -> None:
    """Let the config of the model, and so of its export, say what mask it is trained with; no library reads it."""
    trained = section.attention_mask and section.attention_mask.named
    if trained or hasattr(hf_config, "trained_attention_mask"):
        hf_config.trained_attention_mask = trained


def trained_otherwise(section: ModelSection, hf_config: PretrainedConfig) -> str | None:
    """A line about a model that was trained with another mask than the configured one."""
    now = section.attention_mask and section.attention_mask.named
    if (before := getattr(hf_config, "trained_attention_mask", None)) in (None, now):
        return None
    return f"model.attention_mask = {json.dumps(now)}: {section.name_or_path} was trained with {json.dumps(before)}"


def sentence(section: ModelSection) -> str:
    """What the model's card says of its mask; empty if it has none."""
    if (mask := section.attention_mask) is None:
        return ""
    sees = f"the last {mask.window} tokens" + f" and the first {mask.sink} of its document" * (mask.sink > 0)
    for name in ("strided", "random"):
        sees += f", and {name} blocks {json.dumps(mask.named[name])}" if name in mask.named else ""
    return f"Each token saw {sees} (attention_mask); loaded by Transformers it sees all before it."


def _masked(section: ModelSection, kernel: str) -> dict[str, str]:
    from deepstow.trainer.model import sparse_mask

    assert section.attention_mask is not None
    return {"attn_implementation": sparse_mask.register(kernel, section.attention_mask.named)}


def check(config: RunConfig, model: PreTrainedModel) -> None:
    """Raise ConfigError for a model whose masks may say more than the configured attention knows."""
    name, mask = config.model.attn_implementation, config.model.attention_mask
    if name == VARLEN and not model._supports_flash_attn:
        what = f"{model.config.model_type} models may need more than where documents begin; leave it out"
        raise config.error(KEY, VARLEN, what)
    if mask is not None and not (
        model._supports_sdpa and model._supports_flex_attn and model._supports_attention_backend
    ):
        raise ConfigError(NO_MASK.format(model.config.model_type))


def refuses_model(config: RunConfig, hf_config: PretrainedConfig) -> Iterator[Refusal]:
    """Liger's kernels in a model whose memory is planned, of a family that has not been compared."""
    beside = [name for name, strategy in config.strategies.items() if strategy.phase in (Phase.KEEP, Phase.WHERE)]
    if config.training.use_liger_kernel and beside and hf_config.model_type not in LIGER:
        what = f"strategies.{beside[0]} was compared with it for {', '.join(LIGER)}, not for {hf_config.model_type}"
        yield Refusal("training.use_liger_kernel", True, f"{what}; leave it out")


def installed_flash() -> Iterator[str]:
    """FlashAttention's kernels that have a package here, the newer one first."""
    from transformers.utils import import_utils

    for name in sorted(FLASH, reverse=True):
        if getattr(import_utils, f"is_flash_attn_{name[-1]}_available")():
            yield name


def refusals(config: RunConfig, *, on_cpu: bool) -> Iterator[Refusal]:
    """Kernels that cannot train here, known before anything is read: attention, and Liger's."""
    name, training = config.model.attn_implementation, config.training
    if name in FLASH:
        from transformers.utils import import_utils

        present = getattr(import_utils, f"is_flash_attn_{name[-1]}_available")() or import_utils.is_kernels_available()
        rounds = training.bf16 or training.fp16 or config.model.dtype != "float32"
        if on_cpu:
            yield Refusal(KEY, name, f"runs on a GPU only, and there is none; {ELSE}")
        elif not present:
            what = f"needs the package {FLASH[name]} or kernels; install one with: pip install kernels; or {ELSE}"
            yield Refusal(KEY, name, what)
        elif not rounds:
            yield Refusal(KEY, name, "computes in 16 bits only; write training.bf16: true")
    if name == "flex_attention" and on_cpu:
        yield Refusal(KEY, name, f"torch has no backward of it on a CPU; {ELSE}")
    if training.use_liger_kernel:
        from transformers.utils.import_utils import is_liger_kernel_available

        if on_cpu:
            what = "Liger's kernels are written in Triton, which has no device here; leave it out"
            yield Refusal("training.use_liger_kernel", True, what)
        elif not is_liger_kernel_available():
            what = "needs the package liger-kernel; install it with: pip install liger-kernel"
            yield Refusal("training.use_liger_kernel", True, what)
