"""A run whose model loses parts before training: the smaller model is made once, as a folder, and trained as any other.

The first rows of the training data go through the saved model one at a time, without dropout and without gradients. All
scores are of that one pass: of channels and heads the squares of what they add to the residual stream, summed over all
tokens; of layers how far they turn it, 1 - cos(input, output), as a mean over tokens (arXiv 2403.03853). The smallest
go, of equal ones the first. If the model does not fit into what the run may use of the device, the memory engine
streams its weights, once for each row.

The smaller model is in ``<output_dir>/pruned``, or beside that of an earlier run, sealed under a hash of the contents
of model and rows and of all that decides what goes. A run that is resumed or started again finds it there. All ranks
load it as they load a saved model, so what follows, healing, checkpoints, the export, is an ordinary run of it. The
plan is of the smaller model.

Refused, before a weight is loaded: too little room in host memory or on the disk. After: activations that are not
finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine.forward.blocks import find_blocks
from deepstow.strategies.engine.memory.accelerator import device_of
from deepstow.strategies.state.commit import replaced_folder, same_modes
from deepstow.strategies.state.sealed import Damaged, digest_of, intact, read, seal
from deepstow.trainer.distributed.agreement import DAY_S, WEEK_S, agreement
from deepstow.trainer.errors import write_line
from deepstow.trainer.machine.probe import disk_free_bytes
from deepstow.trainer.model import build
from deepstow.trainer.model.contents import contents
from deepstow.trainer.planning.from_config import budget_of
from deepstow.trainer.planning.streamed import placed, plan_within, weights_of
from deepstow.trainer.recipes.prune import asked_of
from deepstow.trainer.recipes.prune.sizes import Kept, Sizes, cut, sizes_of
from deepstow.trainer.recipes.prune.zeros import smallest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from deepstow.strategies.core.plan import Plan
    from deepstow.trainer.config.sections import RunConfig
    from deepstow.trainer.data.prepare import Prepared
    from deepstow.trainer.run.session import Session

KIND = "pruned"


@dataclass(frozen=True)
class Smaller:
    """What will be made: ``folder``, the ``key`` of all that decides it, and bytes of the device that it may use."""

    folder: Path
    key: str
    budget: int


def check(session: Session) -> Smaller:
    """What the model will become, after a line about it. A collective. ConfigError: there is no room."""
    config, host = session.config, session.machine.host_available_bytes
    budget = budget_of(config, session.plan)
    with agreement(session.ranks, DAY_S) as together:
        return together.on_first(lambda: _check(config, session.prepared, budget, host))


def _check(config: RunConfig, prepared: Prepared, budget: int, host_bytes: int) -> Smaller:
    section, base = asked_of(config), config.model.name_or_path
    assert base is not None
    large, small = build.load_config(config.model), build.config_of(config)
    by = section.sparsity, section.parts, section.calibration_rows
    decide = [contents(base, large), prepared.fingerprint, config.model.dtype, *by]
    folder, key = Path(config.training.output_dir) / KIND, digest_of(decide)[:16]
    with suppress(Damaged):
        if read(folder, KIND).about["key"] != key:  # an earlier run's, which stays
            folder = folder.with_name(f"{KIND}-{key}")
    asked = Smaller(folder, key, budget)
    if _is_whole(asked):
        write_line(f"prune: {_said(folder)}: in {folder} already")
        return asked
    model = build.build(config.model, large, seed=0, partitioned=False, on_meta=True)
    loaded = weights_of(model)
    with torch.device("meta"):
        narrow: Any = type(model)(small)  # type: ignore[call-arg]
    kept = sum(param.numel() for param in narrow.parameters()) * next(model.parameters()).element_size()
    if loaded + kept > host_bytes:
        what = f"{human(loaded)} of weights and {human(kept)} that stay do not fit into {human(host_bytes)} of memory"
        raise config.error("prune.method", section.method, f"{what}; write model.dtype: bfloat16, or leave it out")
    free = disk_free_bytes(folder)
    if kept > free:
        what = f"the smaller model takes {human(kept)}, and {folder.parent} has {human(free)} free; make room"
        raise config.error("prune.method", section.method, what)
    how = _place(config, asked, model)[1]
    write_line(f"prune: {_change(large, small)}; {base}, {how}; the smaller model, {human(kept)}, will be in {folder}")
    return asked


def _change(large: PretrainedConfig, small: PretrainedConfig) -> str:
    names = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    pairs = ((name, getattr(large, name), getattr(small, name)) for name in names)
    return ", ".join(f"{name} {before} -> {after}" for name, before, after in pairs if before != after)


def _is_whole(smaller: Smaller) -> bool:
    return intact(smaller.folder, KIND, {"key": smaller.key})


def _said(folder: Path) -> str:
    return str(read(folder, KIND).about["said"])


def sentence(smaller: Smaller) -> str:
    """What the card says of the model that was made smaller."""
    return f"Before training parts of it were taken out: {_said(smaller.folder)}."


def _place(config: RunConfig, smaller: Smaller, model: PreTrainedModel) -> tuple[Plan | None, str]:
    """The plan that streams the large model, or None if it fits, and what is said of it. ConfigError: no room."""
    text = model.config.get_text_config()
    # Of a row: hidden states, keys, values, the MLP's products, and those that scores are of, in fp32.
    row = 8 * 4 * config.data.max_length * (text.hidden_size + text.intermediate_size)
    try:
        return plan_within(model, smaller.budget - row)
    except ValueError as error:
        weights = f"{human(weights_of(model))} of weights"
        what = f"{weights} and {human(row)} for a row do not fit into {human(smaller.budget)} ({error})"
        raise config.error("prune.method", asked_of(config).method, f"{what}; lower data.max_length") from None


def made(session: Session, smaller: Smaller) -> Session:
    """The run that loads the smaller model, after it was made, if it is not there. A collective. ConfigError: its
    activations are not finite.
    """
    config, ranks = session.config, session.ranks
    device = device_of("cpu" if config.training.use_cpu else None)
    with agreement(ranks, WEEK_S) as together:
        together.on_first(lambda: None if _is_whole(smaller) else _make(config, smaller, session.prepared, device))
    section = config.model.model_copy(update={"name_or_path": str(smaller.folder)})
    return replace(session, source=config.model_copy(update={"model": section, "prune": None}))


def _make(config: RunConfig, smaller: Smaller, prepared: Prepared, device: torch.device) -> None:
    model: Any = build.build(config.model, build.load_config(config.model), seed=0, partitioned=False)
    small, rows = build.config_of(config), prepared.train
    count = min(asked_of(config).calibration_rows, len(rows))  # type: ignore[arg-type]
    inputs = [{k: rows[i][k] for k in ("input_ids", "position_ids") if k in rows[i]} for i in range(count)]  # type: ignore[index]
    scores = scored(model, _place(config, smaller, model)[0], inputs, device)
    if bad := next((name for part in scores for name, score in part.items() if not score.isfinite().all()), None):
        what = f"its activations in layer {bad} are not finite; take another model, or another model.dtype"
        raise config.error("model.name_or_path", config.model.name_or_path, what)
    model.to("cpu")
    build.set_use_cache(small, model.own_use_cache)
    with torch.device("meta"):
        narrow: Any = type(model)(small)
    narrow.load_state_dict(cut(model.state_dict(), chosen(scores, sizes_of(small)), model.config), assign=True)
    narrow.tie_weights()
    narrow.generation_config = model.generation_config
    numbers = [sum(param.numel() for param in network.parameters()) for network in (model, narrow)]
    summary = f"{_change(model.config, small)}: {numbers[0]:,} -> {numbers[1]:,} parameters"
    with replaced_folder(smaller.folder) as draft:
        narrow.save_pretrained(draft)
        same_modes(draft)
        seal(draft, KIND, {"key": smaller.key, "said": summary})
    write_line(f"prune: {summary}, by {count} rows; in {smaller.folder}")


# --- what goes -------------------------------------------------------------------------------------------------------

Scores = tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]]  # of channels, groups and layers, by layer


def scored(model: Any, plan: Plan | None, rows: Sequence[Mapping[str, Any]], device: torch.device) -> Scores:
    """The scores of all parts over ``rows`` of token ids, and positions if they are packed."""
    scores: Scores = ({}, {}, {})
    with placed(model, plan, device) as call, _watched(model, scores):
        for row in rows:
            call(
                **{name: torch.as_tensor(value)[None] for name, value in row.items()}, logits_to_keep=torch.tensor([0])
            )
    return scores


@contextmanager
def _watched(model: Any, scores: Scores) -> Iterator[None]:
    """Inside, every forward adds to ``scores``."""
    groups = model.config.num_key_value_heads

    def add(kind: int, layer: int, score: Tensor) -> None:
        score = score.double().cpu()
        scores[kind][layer] = scores[kind][layer] + score if layer in scores[kind] else score

    def channels(layer: int, module: nn.Linear, inputs: Any) -> None:
        columns = module.weight.float().square().sum(0)
        add(0, layer, inputs[0].float().square().flatten(0, -2).sum(0) * columns)

    def heads(layer: int, module: nn.Linear, inputs: Any) -> None:
        pairs = zip(inputs[0].flatten(0, -2).chunk(groups, -1), module.weight.chunk(groups, 1), strict=True)
        add(1, layer, torch.stack([(group @ columns.t()).float().square().sum() for group, columns in pairs]))

    def layers(layer: int, module: nn.Module, inputs: Any, keywords: Any, outputs: Any) -> None:
        before = (inputs[0] if inputs else keywords["hidden_states"]).float()
        after = (outputs[0] if isinstance(outputs, tuple) else outputs).float()
        add(2, layer, (1 - nn.functional.cosine_similarity(before, after, dim=-1)).sum())

    with ExitStack() as hooks:
        for index, block in enumerate(find_blocks(model).values()):
            decoder: Any = block
            for hook in (
                decoder.mlp.down_proj.register_forward_pre_hook(partial(channels, index)),
                decoder.self_attn.o_proj.register_forward_pre_hook(partial(heads, index)),
                decoder.register_forward_hook(partial(layers, index), with_kwargs=True),
            ):
                hooks.callback(hook.remove)
        yield


def chosen(scores: Scores, stay: Sizes) -> Kept:
    """What stays of each layer, and which layers."""
    channels, groups, layers = scores

    def best(values: Tensor, count: int) -> Tensor:
        return (~smallest(values[None], len(values) - count)[0]).nonzero().flatten()

    kept_layers = best(torch.stack([layers[index] for index in sorted(layers)]), stay.layers).tolist()
    return Kept(
        kept_layers,
        {index: best(channels[index], stay.channels) for index in kept_layers},
        {index: best(groups[index], stay.groups) for index in kept_layers},
    )
