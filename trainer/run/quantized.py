"""What a run exports in 8 or 4 bits beside the exact model, and what that costs in perplexity.

After the exact export has its name, and training has freed its memory, each of ``quantize.formats`` is made of it: its
linear layers are quantised by bitsandbytes as Transformers loads it, as anyone could. The result is saved, opened again
with ``from_pretrained`` and compared: every tensor by its bits, and the logits of a probe. Perplexity of the exact
model and of each format is over all evaluation rows, by the same code, and is in the last lines and on the card.

Invariant. ``<output_dir>/export-FORMAT`` is sealed under the manifest of the export that it was made of. A run that is
started again makes what is missing, of the export that is there, without a step of training.

Refused, before anything is loaded: a run without evaluation data, adapters that are exported without their base, and a
machine without bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCard
from torch.nn.functional import cross_entropy

from strategies.core.commit import replaced_folder, same_modes
from strategies.core.protocol import Refusal
from strategies.core.sealed import MANIFEST, Damaged, damage, read, seal, size_and_hash
from strategies.core.sizes import human
from strategies.engine.memory.accelerator import device_of
from strategies.engine.tensors.quantised import keep_packing
from strategies.report.table import table
from trainer.data.collate import Collator
from trainer.data.packing import MASKED
from trainer.errors import write_line
from trainer.planning.streamed import placed, plan_within
from trainer.run import export
from trainer.run.callbacks import perplexity
from trainer.tasks.table import TASKS
from trainer.tasks.task import loaded, scores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from strategies.core.plan import Plan
    from trainer.config.sections import RunConfig

KIND = "quantized"
EVAL_ROWS = 8  # Hugging Face's default of per_device_eval_batch_size
BITS = {"int8": 8, "nf4": 4, "fp4": 4}


def folder_of(config: RunConfig, name: str) -> Path:
    """Where a format is exported to."""
    return Path(config.training.output_dir) / f"export-{name}"


def missing(config: RunConfig) -> list[str]:
    """The formats that are not there, whole and made of the export that is there."""
    formats = config.quantize.formats if config.quantize else []
    return [name for name in formats if not _is_whole(config, name)]


def _exact(config: RunConfig) -> Path:
    return Path(config.training.output_dir) / "export"


def _about(config: RunConfig, name: str) -> dict[str, Any]:
    """What decides the bits of a format."""
    assert config.quantize is not None
    options = config.quantize.model_dump(exclude={"formats"})
    return {"format": name, "of": size_and_hash(_exact(config) / MANIFEST)[1], **options}


def _is_whole(config: RunConfig, name: str) -> bool:
    folder = folder_of(config, name)
    try:
        sealed = read(folder, KIND)
        return sealed.about["decided by"] == _about(config, name) and not damage(folder, sealed)
    except (Damaged, OSError):
        return False


def make(config: RunConfig, tokenizer: PreTrainedTokenizerBase, rows: Iterable[Any], budget: int) -> None:
    """Make the formats that are missing, and say what they cost; on the first rank. ``budget``: bytes of the device.
    Raise ExportError if one is not what was made, after reloading.
    """
    names = missing(config)
    if not names:
        return
    device = device_of("cpu" if config.training.use_cpu else None)
    pad, size = tokenizer.pad_token_id, config.training.per_device_eval_batch_size or EVAL_ROWS
    assert isinstance(pad, int)
    collate = Collator(pad, config.data.packing)

    def cost(call: Callable[..., Any]) -> float:
        return mean_loss(call, (collate(batch) for batch in _batches(rows, size)))

    model = _load(config, _exact(config))
    exact_bytes = _size_of(_exact(config))
    with placed(model, _plan(model, budget), device) as call:
        before = perplexity(cost(call))
    del model
    lines = [("exact", human(exact_bytes), f"{before:.1f}")]
    for name in names:
        after = _made(config, name, tokenizer, device, budget, cost, before)
        lines.append((name, human(_size_of(folder_of(config, name))), f"{after:.1f}"))
    write_line("\n".join(table(("export", "weights", "perplexity"), lines, {"weights", "perplexity"})))


def _plan(model: Any, budget: int) -> Plan | None:
    """The plan that streams the exact model, or None where it fits; what is too large for that runs as it is."""
    try:
        return plan_within(model, budget)
    except (Refusal, ValueError):
        return None


def _made(
    config: RunConfig,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    budget: int,
    cost: Callable[[Callable[..., Any]], float],
    before: float,
) -> float:
    """Quantise, save, reload and compare; returns the perplexity."""
    exact, task, trusts = _exact(config), TASKS[config.task], config.model.trust_remote_code
    fits = _size_of(exact) <= budget  # the largest that it can be
    where = device if fits else torch.device("cpu")
    options = {"quantization_config": config_for(config, name), "device_map": {"": str(where)}}
    model = _load(config, exact, **options)
    probe = task.probe((torch.arange(export.PROBE_TOKENS) * 7919 % model.get_input_embeddings().num_embeddings)[None])

    def call(**batch: torch.Tensor) -> Any:
        with torch.no_grad():
            return model(**{key: each.to(where) for key, each in batch.items()})

    model.config.use_cache, own = False, model.config.use_cache
    after, logits = perplexity(cost(call)), scores(call(**probe)).float().cpu()
    model.config.use_cache = own
    tolerance = export.EIGHT_TOLERANCE if name == "int8" else export.HALF_TOLERANCE
    with replaced_folder(folder_of(config, name)) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        state = dict(model.state_dict())
        again = export.reload(draft, task, trust_remote_code=trusts)
        export.compare(again, state, probe, logits, tolerance, names=True)
        sizes = _size_of(exact), _size_of(draft)
        _card(exact, name, sizes, (before, after)).save(draft / "README.md")
        same_modes(draft)
        seal(draft, KIND, {"decided by": _about(config, name), "perplexity": [before, after]})
    return after


def config_for(config: RunConfig, name: str) -> Any:
    """Hugging Face's ``BitsAndBytesConfig`` of a format."""
    from transformers import BitsAndBytesConfig

    assert config.quantize is not None
    skip = {"llm_int8_skip_modules": config.quantize.llm_int8_skip_modules}
    if BITS[name] == 8:
        return BitsAndBytesConfig(load_in_8bit=True, **skip)
    computes = torch.bfloat16 if config.training.bf16 or config.model.dtype == "bfloat16" else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=name,
        bnb_4bit_compute_dtype=computes,
        bnb_4bit_use_double_quant=config.quantize.bnb_4bit_use_double_quant,
        **skip,
    )


def _load(config: RunConfig, folder: Path, **options: Any) -> Any:
    auto, trusts = loaded(TASKS[config.task].model_class), config.model.trust_remote_code
    model = auto.from_pretrained(folder, trust_remote_code=trusts, **options).eval()
    keep_packing(model)  # else a CPU's forward packs weights anew, and what is saved after that is not what was loaded
    return model


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _batches(rows: Iterable[Any], size: int) -> Iterator[list[Any]]:
    batch = list[Any]()
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def mean_loss(call: Callable[..., Any], batches: Iterable[dict[str, torch.Tensor]]) -> float:
    """The mean over all tokens that are trained on, of the next one's cross-entropy."""
    total, count = 0.0, 0
    for batch in batches:
        wanted = batch.pop("labels")[:, 1:]
        logits = call(**batch).logits[:, :-1]
        trained = wanted != MASKED
        of_trained = logits[trained.to(logits.device)].float()
        total += float(cross_entropy(of_trained, wanted[trained].to(logits.device), reduction="sum"))
        count += int(trained.sum())
    return total / max(count, 1)


def _card(exact: Path, name: str, sizes: tuple[int, int], costs: tuple[float, float]) -> ModelCard:
    """The exact model's card, after what was done to it."""
    card = ModelCard.load(exact / "README.md")
    how = f"{BITS[name]} bits ({name}), by bitsandbytes, which loading it takes"
    rows = [("exact", human(sizes[0]), f"{costs[0]:.2f}"), (name, human(sizes[1]), f"{costs[1]:.2f}")]
    lines = [f"| {' | '.join(row)} |" for row in (("", "weights", "perplexity on held-out rows"), ("---",) * 3, *rows)]
    said = f"# In {BITS[name]} bits\n\nLinear layers of the model below have {how}.\n\n" + "\n".join(lines)
    return ModelCard(f"---\n{card.data.to_yaml()}\n---\n\n{said}\n\n{card.text.lstrip()}")
