"""What a run exports in 8 or 4 bits beside the exact model, and what that costs in perplexity.

After the exact export has its name, and training has freed its memory, each of ``quantize.formats`` is made of it: its
linear layers are quantised by bitsandbytes or torchao as Transformers loads it, as anyone could. The result is saved,
opened again with ``from_pretrained`` and compared: every tensor by its bits, and the logits of a probe. Perplexity of
the exact model and of each format is over all evaluation rows, by the same code, and is in the last lines and on the
card.

Refused, before anything is loaded: a run without evaluation data, adapters that are exported without their base, a
machine without the library, and widths that groups do not divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCard
from torch.nn.functional import cross_entropy

from deepstow.strategies.core.applied import log_applied
from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine.memory.accelerator import device_of
from deepstow.strategies.engine.tensors.quantised import keep_packing
from deepstow.strategies.report.table import table
from deepstow.trainer.config.recipe import Writer
from deepstow.trainer.data.collate import Collator
from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.errors import write_line
from deepstow.trainer.model.build import config_of
from deepstow.trainer.planning import evaluation
from deepstow.trainer.planning.streamed import placed, plan_within
from deepstow.trainer.recipes.quantize.qat import layers_of
from deepstow.trainer.run.callbacks.reports import perplexity
from deepstow.trainer.run.exporting import export
from deepstow.trainer.tasks.task import PROBE_TOKENS, loaded, scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from deepstow.strategies.core.plan import Plan
    from deepstow.trainer.config.recipe import Exact
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.recipes.quantize import QuantizeSection

BITS = {"int8": 8, "nf4": 4, "fp4": 4, "int8_group": 8, "int4_group": 4}


class Report(Writer):
    """Makes exports in few bits, and says what each costs over the held-out rows."""

    def __init__(self, config: RunConfig, section: QuantizeSection, given: Exact) -> None:
        pad = given.tokenizer.pad_token_id
        exact = given.folder
        budget = given.budget
        assert isinstance(pad, int) and given.rows is not None
        self._config = config
        self._asked = section
        self._exact = exact
        self._rows = given.rows
        self._size = size_of(exact)
        self._collate = Collator(pad, config.data.packing)
        device = device_of("cpu" if config.training.use_cpu else None)
        self._device = device if self._size <= budget else torch.device("cpu")  # few bits are no more than all
        model = _load(config, exact)
        with placed(model, _plan(model, budget), device) as call:
            self._before = self._cost(call)
        self._lines = [("exact", human(self._size), f"{self._before:.1f}")]

    def _cost(self, call: Callable[..., Any]) -> float:
        size = self._config.training.per_device_eval_batch_size or evaluation.DEFAULT
        starts = range(0, len(self._rows), size)
        batches = ([self._rows[at] for at in range(start, min(start + size, len(self._rows)))] for start in starts)
        return perplexity(mean_loss(call, map(self._collate, batches)))

    def write(self, name: str, draft: Path) -> Mapping[str, Any]:
        """Quantise, save, reload and compare; returns perplexity before and after."""
        task, where = self._config.chosen_task, self._device
        options = {"quantization_config": config_for(self._config, self._asked, name), "device_map": {"": str(where)}}
        model = _load(self._config, self._exact, **options)
        words = model.get_input_embeddings().num_embeddings
        probe = task.probe((torch.arange(PROBE_TOKENS) * 7919 % words)[None])

        def call(**batch: torch.Tensor) -> Any:
            with torch.no_grad():
                return model(**{key: tensor.to(where) for key, tensor in batch.items()})

        use_cache, model.config.use_cache = model.config.use_cache, False
        after, logits = self._cost(call), scores(call(**probe)).float().cpu()
        model.config.use_cache = use_cache
        model.save_pretrained(draft)
        reloaded = export.reload(draft, task, trust_remote_code=self._config.model.trust_remote_code)
        tolerance = export.EIGHT_TOLERANCE if name == "int8" else export.HALF_TOLERANCE
        export.compare(reloaded, dict(model.state_dict()), probe, logits, tolerance, names=True)
        is_for = self._asked.qat == name
        self._lines.append((f"{name}{', trained for' * is_for}", human(size_of(draft)), f"{after:.1f}"))
        _card(self._exact, name, is_for, (self._size, size_of(draft)), (self._before, after)).save(draft / "README.md")
        return {"perplexity": (self._before, after)}

    def end(self) -> None:
        """Print the table."""
        write_line("\n".join(table(("export", "weights", "perplexity"), self._lines, {"weights", "perplexity"})))


def refuse(config: RunConfig, section: QuantizeSection) -> None:
    """Raise ConfigError if groups of weights do not divide the inputs of a linear layer, or torchao knows none."""
    with torch.device("meta"):
        model = loaded(config.chosen_task.model_class).from_config(
            config_of(config), trust_remote_code=config.model.trust_remote_code
        )
    layers_of(model, config, section)


def round_in_forward(model: PreTrainedModel, config: RunConfig, section: QuantizeSection) -> None:
    """Let torchao replace linear layers of ``model`` by such as round their weights."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    assert section.qat is not None
    layers = layers_of(model, config, section)
    how: Any = config_for(config, section, section.qat).quant_type
    quantize_(model, QATConfig(how, step="prepare"), filter_fn=lambda module, name: name in layers)
    for name in layers:
        model.get_submodule(f"{name}.weight_fake_quantizer").register_forward_hook(_forget)
    done = f"weights are rounded in forward as {section.qat}, by groups of {section.group_size}"
    log_applied("quantize", ((name, done) for name in layers))


def _forget(rounding: Any, *_: object) -> None:
    """Drop the scales, which each forward computes anew; autograd has saved what backward needs of them."""
    rounding.scale = rounding.zero_point = None


def _plan(model: Any, budget: int) -> Plan | None:
    """The plan that streams the exact model, or None where it fits; what cannot be streamed runs as it is."""
    try:
        return plan_within(model, budget)[0]
    except ValueError:
        return None


def config_for(config: RunConfig, section: QuantizeSection, name: str) -> Any:
    """Hugging Face's ``BitsAndBytesConfig`` or ``TorchAoConfig`` of a format."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if name.endswith("_group"):
        from torchao.quantization import IntxWeightOnlyConfig
        from torchao.quantization.granularity import PerGroup

        dtype, group = getattr(torch, f"int{BITS[name]}"), PerGroup(section.group_size)
        leaves = section.llm_int8_skip_modules
        return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=dtype, granularity=group), modules_to_not_convert=leaves)
    skip = {"llm_int8_skip_modules": section.llm_int8_skip_modules}
    if BITS[name] == 8:
        return BitsAndBytesConfig(load_in_8bit=True, **skip)
    computes = torch.bfloat16 if config.training.bf16 or config.model.dtype == "bfloat16" else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=name,
        bnb_4bit_compute_dtype=computes,
        bnb_4bit_use_double_quant=section.bnb_4bit_use_double_quant,
        **skip,
    )


def _load(config: RunConfig, folder: Path, **options: Any) -> Any:
    auto, trusts = loaded(config.chosen_task.model_class), config.model.trust_remote_code
    model = auto.from_pretrained(folder, trust_remote_code=trusts, **options).eval()
    keep_packing(model)  # else a CPU's forward packs weights anew, and what is saved after that is not what was loaded
    return model


def size_of(folder: Path) -> int:
    """Bytes of weights in the files of a model."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def mean_loss(call: Callable[..., Any], batches: Iterable[dict[str, torch.Tensor]]) -> float:
    """The mean over all tokens that are trained on, of the next one's cross-entropy."""
    total, count = 0.0, 0
    for batch in batches:
        targets = batch.pop("labels")[:, 1:]
        logits = call(**batch).logits[:, :-1]
        trained = targets != MASKED
        of_trained = logits[trained.to(logits.device)].float()
        total += float(cross_entropy(of_trained, targets[trained].to(logits.device), reduction="sum"))
        count += int(trained.sum())
    return total / count if count else math.nan


def _card(exact: Path, name: str, is_for: bool, sizes: tuple[int, int], costs: tuple[float, float]) -> ModelCard:
    """The exact model's card, after what was done to it."""
    library = "torchao" if name.endswith("_group") else "bitsandbytes"
    how = (
        f"{BITS[name]} bits ({name}), by {library}, which loading it takes{', and were trained for it (QAT)' * is_for}"
    )
    rows = [("exact", human(sizes[0]), f"{costs[0]:.2f}"), (name, human(sizes[1]), f"{costs[1]:.2f}")]
    lines = [f"| {' | '.join(row)} |" for row in (("", "weights", "perplexity on held-out rows"), ("---",) * 3, *rows)]
    text = f"# In {BITS[name]} bits\n\nLinear layers of the model below have {how}.\n\n" + "\n".join(lines)
    return export.after(exact, text)
