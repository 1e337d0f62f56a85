"""What a checkpoint holds besides the model's files, for every strategy; written and read in place of Hugging Face's.

    checkpoint-100/
        model.safetensors, config.json, trainer_state.json, ...       Hugging Face's
        optimizer/                                                    counts, moments, masters (state/saved_state.py)
        scheduler.json                                                how far the learning rate's schedule is
        random_state-00000-of-00002.json                              the generators of rank 0 of 2
        compressed-00000-of-00002.safetensors                         what it owes, or has alone (compressed.py)

Hugging Face and DeepSpeed write pickles that fit one strategy and one number of ranks. Here every rank writes spans of
named parameters, and every rank reads those that it needs, whatever wrote them. Exact weights are masters where there
are any, otherwise the model's files. ``save_pretrained`` may rename or convert weights (experts of a mixture); those
that are not in the files under their own names are written as spans, too. Hyperparameters are those of this run.

A schedule that is a function of the step has one number of state: rates are computed anew from the config. One that
follows the evaluation loss has history, which is saved and taken over whole.

Refused, in one line and before anything is changed: state of another model or rule, damaged or missing files.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from deepstow.strategies.engine.memory import accelerator
from deepstow.strategies.engine.saving import state_file
from deepstow.strategies.parallel.tensor_shards import whole_shape
from deepstow.strategies.state import saved_state
from deepstow.strategies.state.saved_state import Holder, Saved, Weights
from deepstow.strategies.state.spans import WEIGHT, Span, Store
from deepstow.trainer.errors import ConfigError, write_line

OPTIMIZER, SCHEDULE = "optimizer", "scheduler.json"
VERSION = 1  # of files in JSON
UNREADABLE = (OSError, ValueError, LookupError, TypeError, RuntimeError, OverflowError)
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class Misfit(ConfigError, ValueError):
    """What is in a checkpoint is damaged, or does not fit this run."""


@contextmanager
def _misfits() -> Iterator[None]:
    """Whatever says with a ``ValueError`` that a checkpoint cannot be loaded says it with a ``Misfit``."""
    try:
        yield
    except ValueError as error:
        raise Misfit(str(error).splitlines()) from None


# --- saving ----------------------------------------------------------------------------------------------------------


def save(trainer: Any, checkpoint: Path) -> None:
    """Write what this rank holds, after the model's files have been written. Ranks do not wait for each other. Raise
    OSError if it cannot be written, ValueError if something has no place in the format.
    """
    args = trainer.args
    holder = trainer.execution.holder(trainer)
    folder = checkpoint / OPTIMIZER
    folder.mkdir(parents=True, exist_ok=True)
    is_first = args.process_index == 0
    not_in_files = list(_not_in_files(trainer, checkpoint, holder, writes=is_first))
    saved_state.write_part(folder, holder, not_in_files, rank=args.process_index, ranks=args.world_size, hashed=False)
    if is_first:
        saved_state.write_index(folder, holder, args.world_size, _extra(trainer, holder))
        save_schedule(checkpoint / SCHEDULE, trainer.lr_scheduler)


def opened(trainer: Any, checkpoint: Path, holder: Any = None) -> tuple[Saved, Weights]:
    """What was saved, and the weights in it. Raise ValueError if anything is missing, damaged, or of another model."""
    saved = saved_state.opened(checkpoint / OPTIMIZER)
    weights = Weights(saved.store, Store.of(_model_files(checkpoint), kind=WEIGHT), _aliases(trainer.whole))
    complaints = [] if holder is None else list(holder.misfits(saved))
    complaints += [line for name, shape in _needed(trainer.whole).items() for line in weights.faults(name, shape)]
    if complaints:
        remaining = f" (and {len(complaints) - 1} more like it)" if len(complaints) > 1 else ""
        raise ValueError(f"{checkpoint}: {complaints[0]}{remaining}")
    return saved, weights


def save_stowed(trainer: Any, checkpoint: Path) -> None:
    """The same for a trainer that does not seal its checkpoints: files have hashes of their own."""
    if trainer.args.should_save:
        holder = trainer.execution.holder(trainer)
        not_in_files = list(_not_in_files(trainer, checkpoint, holder, writes=True))
        state_file.save(holder, checkpoint / OPTIMIZER, not_in_files, _extra(trainer, holder))
        save_schedule(checkpoint / SCHEDULE, trainer.lr_scheduler)


def _extra(trainer: Any, holder: Any) -> dict[str, Any]:
    scaler = getattr(trainer.accelerator, "scaler", None)
    if hasattr(holder, "loss_scale"):
        scale = holder.loss_scale()
    else:
        scale = None if scaler is None else {"scale": scaler.get_scale(), "held": scaler._get_growth_tracker()}
    return {"steps": trainer.state.global_step, "ranks": trainer.args.world_size, "loss_scale": scale}


def _not_in_files(trainer: Any, checkpoint: Path, holder: Any, *, writes: bool) -> Iterator[Span]:
    """Weights and buffers that the model's files do not have, which only the rank that ``writes`` them knows.

    Where each rank writes its share of the weights, all have to know without them.
    """
    model = trainer.whole
    names = _absent(checkpoint, model) if writes else set()
    if getattr(holder, "divides_weights", False):
        converted = _conversions(model) or hasattr(model, "peft_config")
        names = set(_needed(model)) if converted else names & {name for name, _ in _buffers(model)}
    yield from holder.weight_spans(names)
    for name, buffer in _buffers(trainer.model) if writes else ():
        if name in names:
            yield Span(name, WEIGHT, tuple(buffer.shape), 0, buffer)


def _absent(checkpoint: Path, model: nn.Module) -> set[str]:
    """Names of weights and buffers that the model's files do not have as they are in the model."""
    from transformers.core_model_loading import WeightConverter

    shapes = _needed(model)
    if any(isinstance(conversion, WeightConverter) for conversion in _conversions(model)):
        return set(shapes)  # other tensors are computed from the model's, possibly under the same names
    files, aliases = Store.of(_model_files(checkpoint), kind=WEIGHT), _aliases(model)
    return {
        name
        for name, shape in shapes.items()
        if all(files.shape(alias, WEIGHT) != shape for alias in (name, *aliases.get(name, ())))
    }


def _conversions(model: Any) -> list[Any]:
    """What ``save_pretrained`` does with the model's tensors: gives them other names, or computes others from them."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not hasattr(model, "config") or hasattr(model, "peft_config"):
        return []
    conversions = getattr(model, "_weight_conversions", None)
    return list(get_model_conversion_mapping(model, add_legacy=False) if conversions is None else conversions)


def _needed(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of all that a checkpoint restores; of a model with adapters only what is trained."""
    adapters = hasattr(model, "peft_config")
    named: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.requires_grad or not adapters}
    named |= {} if adapters else dict(_buffers(model))
    return {name: whole_shape(tensor) for name, tensor in named.items()}


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that are in the state dict, by name."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """All names of each tied weight, by each of them."""
    by_id: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(param), []).append(name)
    return {name: names for names in by_id.values() if len(names) > 1 for name in names}


def _model_files(checkpoint: Path) -> list[Path]:
    """The files of the model's weights; none where a trainer writes others. ValueError: their list is damaged."""
    single, index = checkpoint / "model.safetensors", checkpoint / "model.safetensors.index.json"
    if single.is_file() or not index.is_file():
        return [single] if single.is_file() else []
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        sound = all(SHARD.fullmatch(name) for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise ValueError(f"{index}: damaged, not a list of the model's files")
    return [checkpoint / name for name in sorted(names)]


# --- loading ---------------------------------------------------------------------------------------------------------


@_misfits()
def load(trainer: Any, checkpoint: Path) -> None:
    """Take over weights, optimizer, loss scale and schedule. A Misfit, if they do not fit, has changed nothing."""
    holder: Any = trainer.execution.holder(trainer)
    saved, weights = opened(trainer, checkpoint, holder)
    line = trainer.execution.load(checkpoint, trainer.args.process_index)
    if line and trainer.args.process_index == 0:
        write_line(line)
    holder.fill(saved)
    _fill_weights(holder, trainer.model, weights)
    scale, steps = saved.extra.get("loss_scale"), int(saved.extra.get("steps", 0))
    scaler = getattr(trainer.accelerator, "scaler", None)
    if hasattr(holder, "set_loss_scale"):
        holder.set_steps(steps)
        if scale is not None:
            holder.set_loss_scale(scale)
    elif scaler is not None and scale is not None:
        scaler_state = scaler.state_dict()
        scaler.load_state_dict({**scaler_state, "scale": scale["scale"], "_growth_tracker": int(scale["held"])})
    load_schedule(checkpoint / SCHEDULE, trainer.lr_scheduler, saved.param_groups)
    trainer.execution.resumed()


@_misfits()
def load_weights(trainer: Any, checkpoint: Path) -> None:
    """Take over weights and masters alone, as of the best evaluation. Raise Misfit if they do not fit."""
    _fill_weights(trainer.execution.holder(trainer), trainer.model, opened(trainer, checkpoint)[1])


@torch.no_grad()
def _fill_weights(holder: Holder, model: nn.Module, weights: Weights) -> None:
    holder.fill_weights(weights)
    for name, buffer in _buffers(model):
        if weights.find(name) is not None:
            weights.read(name, 0, buffer)


# --- the schedule, and random numbers, as JSON -----------------------------------------------------------------------


@contextmanager
def _content_of(path: Path, what: str) -> Iterator[dict[str, Any]]:
    """What was written into ``path``. ValueError, in one line, if it cannot be read, or not be taken over inside."""
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != VERSION:
            raise ValueError(f"{path}: format {content['version']}, this release reads {VERSION}")
        yield content
    except UNREADABLE as error:
        is_told = str(error).startswith(f"{path}: ")
        raise ValueError(str(error) if is_told else f"{path}: damaged, not the state of {what}") from None


def save_schedule(path: Path, scheduler: Any) -> None:
    """Write how far the schedule is; ValueError if it has state that JSON cannot hold."""
    if _is_function_of_step(scheduler):
        state = {"last_epoch": scheduler.last_epoch, "_step_count": scheduler._step_count}
    else:
        state = scheduler.state_dict()
    try:
        text = json.dumps({"version": VERSION, "kind": type(scheduler).__name__, "state": state})
    except (TypeError, ValueError):
        raise ValueError(f"the schedule {type(scheduler).__name__} has state that JSON cannot hold") from None
    path.write_text(text)


def load_schedule(path: Path, scheduler: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Go on with the schedule, and set the rates of its optimizer; those of the saved ``groups`` if it has history.
    Raise ValueError if the file cannot be read, or is of another kind of schedule.
    """
    with _content_of(path, "a schedule") as content:
        kind, state = content["kind"], dict(content["state"])
        if _is_function_of_step(scheduler):
            count = int(state["last_epoch"])
            scheduler.last_epoch, scheduler._step_count = count, int(state.get("_step_count", count + 1))
            rates = [base * rule(count) for base, rule in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        elif kind != type(scheduler).__name__:
            raise ValueError(f"{path}: of the schedule {kind}, and this run has {type(scheduler).__name__}")
        else:
            scheduler.load_state_dict(state)
            rates = [group["lr"] for group in groups]
        current = scheduler.optimizer.param_groups
        if len(rates) != len(current):
            raise ValueError(f"{path}: of {len(rates)} groups of parameters, and this run has {len(current)}")
    for group, rate in zip(current, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = list(rates)


def _is_function_of_step(scheduler: Any) -> bool:
    """Whether every rate is the first one times a function of the step."""
    return hasattr(scheduler, "lr_lambdas") and hasattr(scheduler, "base_lrs")


def _stream_of(trainer: Any) -> tuple[int, int, bool]:
    """Which of how many sequences of random numbers this rank draws from, and whether it writes its state. Ranks of one
    copy of the model draw the same numbers.
    """
    grid, rank = trainer.execution.grid, trainer.args.process_index
    if grid.is_plain:
        return rank, trainer.args.world_size, True
    cell = grid.cell(rank)
    return cell.replica, grid.replicas, cell.tensor == cell.slice == cell.stage == 0


def save_random_state(trainer: Any, checkpoint: Path) -> None:
    """Write the states of this rank's generators; one rank writes for those that draw the same numbers."""
    number, streams, writes = _stream_of(trainer)
    if writes:
        save_generators(checkpoint / f"random_state-{number:05}-of-{streams:05}.json")


def random_states(checkpoint: Path) -> list[Path]:
    """The files with generators' states. May raise OSError."""
    return sorted(path for path in checkpoint.iterdir() if path.name.startswith("random_state-"))


@_misfits()
def load_random_state(trainer: Any, checkpoint: Path) -> str | None:
    """Take over this rank's; a line if there is none, since fewer ranks have saved. Raise Misfit if it is damaged."""
    rank, _, _ = _stream_of(trainer)
    path = next((path for path in random_states(checkpoint) if path.name.startswith(f"random_state-{rank:05}-")), None)
    if path is None:
        return f"{checkpoint}: no random state of rank {rank}; it goes on from training.seed"
    load_generators(path)
    return None


def save_generators(path: Path) -> None:
    """Write the present states."""
    kind = accelerator.kind()
    name, keys, *counters = np.random.get_state(legacy=True)
    content = {
        "version": VERSION,
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *counters],
        "torch": _hex(torch.random.get_rng_state()),
        "device": None if kind is None else [kind, _hex(torch.get_device_module(kind).get_rng_state())],
    }
    path.write_text(json.dumps(content))


def load_generators(path: Path) -> None:
    """Take over the states in ``path``; the device's only on a device of that kind. ValueError has changed nothing."""
    former_states = random.getstate(), np.random.get_state(legacy=True), torch.random.get_rng_state()
    with _content_of(path, "generators") as content:
        version, numbers, gauss = content["python"]
        name, keys, *counters = content["numpy"]
        on_cpu, on_device = _tensor(content["torch"]), content["device"]
        try:
            random.setstate((version, tuple(numbers), gauss))
            np.random.set_state((name, np.array(keys, np.uint32), *counters))
            torch.random.set_rng_state(on_cpu)
            if on_device is not None and on_device[0] == accelerator.kind():
                torch.get_device_module(on_device[0]).set_rng_state(_tensor(on_device[1]))
        except BaseException:
            random.setstate(former_states[0])
            np.random.set_state(former_states[1])
            torch.random.set_rng_state(former_states[2])
            raise


def _hex(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
