"""The model card in an export: what the model is, its data, losses, strategies, command and versions.

Invariant. Everything in it comes from the run's config, its log and the command line. Environment variables are not
read, and no licence is guessed: whoever publishes the model adds one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.run.callbacks import perplexity
from trainer.run.checkpoint import versions
from trainer.tasks.table import TASKS

if TYPE_CHECKING:
    from huggingface_hub import ModelCard
    from transformers import PretrainedConfig, TrainerState

    from trainer.config.sections import RunConfig


def model_card(
    config: RunConfig, hf_config: PretrainedConfig, state: TrainerState, argv: Sequence[str], num_ranks: int
) -> ModelCard:
    """The card of the trained model; ``argv`` is the command, and ``state`` has the log."""
    from huggingface_hub import ModelCard, ModelCardData

    base, brings_code = config.model.name_or_path, bool(getattr(hf_config, "auto_map", None))
    adapters = config.model.lora is not None and base is not None
    tags = ["deepstow", *(["lora"] if adapters else []), *(["custom_code"] if brings_code else [])]
    header = ModelCardData(
        base_model=base,
        library_name="peft" if adapters else "transformers",
        pipeline_tag=TASKS[config.task].pipeline_tag,
        tags=tags,
    )
    data, used = config.data, {name: number for name, number in versions().items() if number != "not installed"}
    if config.model.lora is None:
        used.pop("peft", None)
    source = ", ".join(f"`{one.path}` ({one.name})" if one.name else f"`{one.path}`" for one in data.parts())
    parts = [
        f"# {Path(config.training.output_dir).name}",
        _origin(config, hf_config.model_type),
        f"It was trained on {source} in sequences of up to {data.max_length} tokens, for {state.global_step} steps. "
        + " ".join(_results(state.log_history, odds=TASKS[config.task].language)),
        f"Strategies: {_strategies(config)}. The command, on {num_ranks} process{'es' if num_ranks > 1 else ''}:",
        f"```\n{shlex.join(argv)}\n```",
        f"Versions: {', '.join(f'{name} {number}' for name, number in used.items())}.",
    ]
    if brings_code:
        parts.append("The model brings its own Python code: read it, then load it with `trust_remote_code=True`.")
    return ModelCard(f"---\n{header.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def _origin(config: RunConfig, model_type: str) -> str:
    lora, base = config.model.lora, config.model.name_or_path
    if lora is not None and base is not None:
        return f"Low-rank adapters (rank {lora.r}) for `{base}`, trained with DeepStow. The base is not included."
    if base is not None:
        return f"`{base}`, a model of type {model_type}, trained further with DeepStow."
    merged = f"; what was trained are low-rank adapters (rank {lora.r}), merged into them" if lora is not None else ""
    return f"A model of type {model_type}, trained with DeepStow from random weights{merged}."


def _results(history: Sequence[Mapping[str, Any]], *, odds: bool) -> Iterator[str]:
    """A sentence for each of the last losses in the log; ``odds``: they are means over tokens."""
    for kind, key in (("training", "loss"), ("evaluation", "eval_loss")):
        last = next((record for record in reversed(history) if key in record), None)
        if last is not None:
            loss = float(last[key])
            shown = f" (perplexity {perplexity(loss):.1f})" if odds else ""
            yield f"The last {kind} loss, at step {last['step']}, was {loss:.4f}{shown}."


def _strategies(config: RunConfig) -> str:
    """Each strategy with the options that the config sets."""
    found = []
    for name, strategy in config.strategies.items():
        options = [f"{key} {value}" for key, value in strategy.model_dump(exclude_unset=True).items()]
        found.append(f"{name} ({', '.join(options)})" if options else name)
    return ", ".join(found) or "none"
