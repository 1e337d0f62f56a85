"""Does training with these strategies equal plain training? Train a shrunk copy both ways and compare the bits.

The copy keeps what could break equality (architecture, grouped heads, tied weights, activation function, dropout,
optimizer, clipping, accumulation, precision) and shrinks what only costs time (layers, widths, vocabulary). Both runs
use the same code as ``deepstow train``, on real ranks, with the same seed, threads and random tokens. *Plain* training
means the same ranks and torch's own data parallelism. On an accelerator, where some sums are made in any order, both
ask for deterministic kernels, and plain training is compared with itself first.

With ``strategies.offload`` the copy gets less memory than it needs, so that it moves what the plan of the real run
moves (``trainer/model/shrink.py``). In bf16 plain training rounds at other places than the engine, so the engine is
also compared with itself, everything on the device against the copy that moves: equal to the last bit, with the
configured optimizer and its state. Copies run with ``strategies.buffers.debug``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from deepstow.strategies.core.cgroups import usable_cores
from deepstow.strategies.core.compose import degrees
from deepstow.strategies.core.layout import Site
from deepstow.strategies.core.plan import RUN, Place, Plan
from deepstow.strategies.core.protocol import Axis, CutsBlocks
from deepstow.strategies.core.registry import find
from deepstow.strategies.engine.memory import accelerator
from deepstow.strategies.planner.memory_rows import UPDATES
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.data.prepare import Contents, Prepared
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.errors import ConfigError, DataError, UserError
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.machine.repeated_sums import repeat_sums
from deepstow.trainer.model import shrink as copies_of
from deepstow.trainer.model.build import load_config
from deepstow.trainer.model.shrink import LAYERS, LENGTH, MOVING_LAYERS, VOCAB, CopyRun, features, leaves
from deepstow.trainer.planning import facts
from deepstow.trainer.planning.fit import explained
from deepstow.trainer.planning.from_config import check_options, narrowed, plan_of
from deepstow.trainer.run import building
from deepstow.trainer.run.callbacks.user_callbacks import UserCallbacks
from deepstow.trainer.run.session import Session
from deepstow.trainer.tasks.task import only_language

ROWS = 64
_KEPT = """
    learning_rate gradient_accumulation_steps max_grad_norm optim optim_args weight_decay adam_beta1 adam_beta2
    adam_epsilon lr_scheduler_type seed bf16 fp16 gradient_checkpointing activation_checkpointing label_smoothing_factor
    torch_compile torch_compile_backend torch_compile_mode
"""
KEPT = frozenset(_KEPT.split())


class Moved(NamedTuple):
    """What a run moved: all buckets, those whose weights left the device, the features shown, bytes over the link."""

    num_buckets: int
    num_left: int
    shows: list[str]
    up_bytes: int
    down_bytes: int


class Check(NamedTuple):
    """The comparison of a run under ``options`` of offload with ``against``, and the tolerance for it."""

    options: Mapping[str, Any]
    against: str
    moved: Moved
    differences: list[Difference]
    tolerance: float


def shrink(
    config: RunConfig, folder: Path, steps: int, *, layers: int = LAYERS, keep_optimizer: bool = False
) -> RunConfig:
    """The config of a run on the shrunk copy: ``steps`` optimizer steps, no evaluation, no checkpoints.

    The optimizer is SGD in 16 bits unless ``keep_optimizer`` says that both sides round alike.
    """
    tree = config.tree()
    same = ("dtype", "attn_implementation", "attention_mask", "lora", "quantization_config")
    model = {key: value for key, value in tree["model"].items() if key in same}
    cutting = (strategy.least_blocks() for strategy in config.strategies.values() if isinstance(strategy, CutsBlocks))
    num_blocks = max([layers, *cutting])
    hf_config = load_config(config.model, VOCAB)
    small = copies_of.shrink_model(hf_config, num_blocks)
    divided = degrees(config.strategies)
    copies_of.widen(small, max(divided.get(axis, 1) for axis in (Axis.TENSOR, Axis.SEQUENCE)))
    if divided:  # parts of a model draw their own numbers
        rates = hf_config.get_text_config().to_dict().items()
        small |= {key: 0.0 for key, value in rates if "drop" in key and isinstance(value, float)}
    training = {key: value for key, value in tree["training"].items() if key in KEPT}
    if rounds_to_16_bits(config) and not keep_optimizer:
        # Adam divides a gradient by its own size, which turns the rounding of a tiny gradient into a step of full
        # length: a comparison would show Adam and not the strategy. SGD keeps a small difference small.
        training |= {"optim": "sgd", "optim_args": None, "learning_rate": 1.0}
    training |= {"output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 2, "logging_steps": 1}
    training |= {"save_strategy": "no", "report_to": ["none"]}
    model |= {"config": small, "tokenizer": "none"}
    data = {"path": "random tokens", "max_length": LENGTH}
    sections = {"model": model, "data": data, "training": training, "strategies": config.strategies}
    return RunConfig.model_validate(sections)


def rounds_to_16_bits(config: RunConfig) -> bool:
    """Whether products and sums are rounded to 16 bits, by the weights if not by mixed precision."""
    return config.training.bf16 or config.training.fp16 or config.model.dtype != "float32"


def without_strategies(config: RunConfig) -> RunConfig:
    """The config of the same run, plain."""
    return config.model_copy(update={"strategies": {}})


def train(ranks: Ranks, config: RunConfig) -> dict[str, Any]:
    """Train on random tokens. Rank 0 returns ``weights``, every parameter, whole, as fp32 on the CPU; of an engine
    also its optimizer ``state`` and what it ``moved``.
    """
    if accelerator.kind() is not None:
        repeat_sums()
    run = random_run(config, ranks)
    trainer = building.make_trainer(run)
    try:
        trainer.train()
        report = _engine_report(trainer, run.plan) if trainer.stowed is not None else {}  # a collective if it is shared
        return {"weights": full_weights(trainer, ranks), **report}
    finally:
        trainer.accelerator.free_memory()


def _engine_report(trainer: Any, plan: Plan) -> dict[str, Any]:
    """Optimizer state by the names of parameter and state, and what was moved."""
    stowed, layout = trainer.stowed, plan.layout
    assert layout is not None
    stowed.drain()
    transfer, num_left = stowed.engine.transfer, sum(leaves(bucket, layout) for bucket in layout.buckets)
    moved = Moved(len(layout.buckets), num_left, sorted(features(layout)), transfer.bytes_up, transfer.bytes_down)
    state = {
        f"{name} {key}": value.detach().float().cpu().clone()
        for name, parameter in trainer.accelerator.unwrap_model(trainer.model_wrapped).named_parameters()
        if parameter.requires_grad and not stowed.is_shared  # then no rank has all of it
        for key, value in stowed.state_of(parameter).items()
    }
    return {"state": state, "moved": moved._asdict()}


def train_or_refuse(ranks: Ranks, config: RunConfig) -> dict[str, Any]:
    """Train; a ``UserError`` is returned as its ``lines`` and ``code``, so that no rank prints a traceback."""
    try:
        return train(ranks, config)
    except UserError as error:
        return {"lines": list(error.lines), "code": int(error.code)}


def random_run(config: RunConfig, ranks: Ranks) -> Session:
    """A prepared run whose data are random tokens, the same on every rank."""
    rows = load_config(config.model).get_text_config().vocab_size  # may be smaller than VOCAB
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, min(VOCAB, rows), (ROWS, LENGTH), generator=generator).tolist()
    return run_on(
        Prepared(
            Dataset.from_dict({"input_ids": ids, "labels": ids}), None, "input_ids", Contents(fingerprint="random")
        ),
        config,
        ranks,
    )


def run_on(prepared: Prepared, config: RunConfig, ranks: Ranks) -> Session:
    """A run on rows that are tokenised already."""
    machine = probe()
    plan = plan_of(config, ranks, machine)
    return Session(config, ranks, _tokenizer(), prepared, machine, plan, UserCallbacks(config))


def _tokenizer() -> Any:
    """The least tokenizer that training on ready-made ids needs."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>")), pad_token="<pad>"
    )


def full_weights(trainer: Any, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Parameters by name on rank 0, wherever their memory is. A collective."""
    state = trainer.whole_state()
    names = [name for name, _ in trainer.accelerator.unwrap_model(trainer.whole).named_parameters()]
    return {name: state[name].detach().float().cpu().clone() for name in names} if ranks.is_first else {}


def verify(config: RunConfig, num_ranks: int, steps: int) -> list[Difference]:
    """Train the shrunk copy plainly and with the strategies of ``config``, and return the tensors that differ. Ranks
    that hold one copy of the model together are compared with one rank of plain training.
    """
    with tempfile.TemporaryDirectory(prefix="deepstow-verify-") as name:
        small = shrink(config, Path(name), steps)
        copies = facts.run_facts(small, num_ranks).replicas  # of the model; plain training has one on each rank
        threads = threads_of_each(num_ranks)
        plain = repeatable(lambda: _trained(copies, without_strategies(small), threads))
        return compare(plain["weights"], _trained(num_ranks, small, threads)["weights"])


def threads_of_each(num_ranks: int) -> int:
    """Threads of each rank, on both sides of a comparison: another number adds up products in another order. A side
    with fewer ranks leaves cores idle.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    return int(threads) if threads else max(1, usable_cores() // num_ranks)


def _trained(num_ranks: int, config: RunConfig, threads: int) -> dict[str, Any]:
    """Train on real ranks with so many ``threads`` each; what rank 0 returns. UserError: it was refused."""
    result: dict[str, Any] = run_world(num_ranks, train_or_refuse, config, threads=threads)
    if "lines" in result:
        raise {kind.code: kind for kind in (ConfigError, DataError)}.get(result["code"], UserError)(result["lines"])
    return result


# --- offload ---------------------------------------------------------------------------------------------------------

RESIDENT = {"gpu_memory": "auto", "site": "device", "weights": "resident", "gradients": "device"}


def real_plan(config: RunConfig, num_ranks: int) -> Plan:
    """The plan of the config itself, not of the copy, on this machine. Raise ConfigError if it is refused."""
    only_language(config, "verifying")
    check_options(config, num_ranks)
    ranks, machine = Ranks(0, 0, num_ranks, num_ranks), probe()
    with explained(config, ranks, machine):
        return plan_of(config, ranks, machine)


class Offloaded:
    """Verification of a config, of which ``real`` is the plan, on copies that are given options under which they move.
    ``tolerance``: declared by the strategies for comparisons with plain training.
    """

    def __init__(self, config: RunConfig, real: Plan, num_ranks: int, steps: int, tolerance: float) -> None:
        self._config = config
        self._real = real
        self._tolerance = tolerance
        self._num_ranks, self._steps = num_ranks, steps
        self.copies = self._copies(keep_optimizer=True)

    def checks(self) -> Iterator[Check]:
        """Train and compare, one run after the other. Raise UserError if one was refused."""
        mixed = self._config.training.bf16
        copies = self.copies
        against = "plain training"
        if mixed:
            itself = f"the engine with all on the device, {self._config.training.optim}"
            expected = self._run(RESIDENT, keep_optimizer=True)
            yield from (self._check(copy, itself, expected, keep_optimizer=True) for copy in copies)
            copies, against = self._copies(keep_optimizer=False)[:1], "plain training, sgd"
        plain = repeatable(lambda: self._run(None, keep_optimizer=not mixed))
        yield from (self._check(copy, against, plain, keep_optimizer=not mixed) for copy in copies)

    def _check(self, copy: CopyRun, against: str, expected: dict[str, Any], *, keep_optimizer: bool) -> Check:
        result = self._run(copy.options, keep_optimizer=keep_optimizer)
        moved, tolerance = Moved(**result["moved"]), self._tolerance
        sides = [side["weights"] | (side["state"] if "state" in expected else {}) for side in (expected, result)]
        if "state" in expected:
            # Both sides are the engine's and use the same kernels, unless the CPU updates what an accelerator updates
            # on the other side. Which bucket an element is in, and where, decides how the library adds it.
            other_kernels = accelerator.kind() is not None and UPDATES[Site.HOST] in moved.shows
            layout = self._real.layout
            other_order = layout is not None and layout.reduction == "fast" and self._num_ranks > 2
            tolerance = tolerance if other_kernels or other_order else 0.0
        return Check(copy.options, against, moved, compare(*sides), tolerance)

    def _copies(self, *, keep_optimizer: bool) -> list[CopyRun]:
        small = self._small(Path("unused"), keep_optimizer=keep_optimizer)
        small_facts = facts.gather(small, self._num_ranks, self._num_ranks, probe())
        stages = [narrowed(small, small_facts, rank) for rank in small_facts.run.grid.groups("stage")[0]]
        return copies_of.moving(self._real, small.strategies, stages)

    def _small(self, folder: Path, *, keep_optimizer: bool) -> RunConfig:
        layers = MOVING_LAYERS * degrees(self._config.strategies).get(Axis.STAGES, 1)
        small = shrink(self._config, folder, self._steps, layers=layers, keep_optimizer=keep_optimizer)
        # The copy has other blocks than those that a pipeline may be told to cut.
        strategies = {
            name: strategy.model_copy(update={"blocks": None}) if Axis.STAGES in strategy.divides() else strategy
            for name, strategy in small.strategies.items()
        }
        return small.model_copy(update={"strategies": strategies})

    def _run(self, options: Mapping[str, Any] | None, *, keep_optimizer: bool) -> dict[str, Any]:
        """Train the copy with other ``options`` of offload; None: plainly."""
        with tempfile.TemporaryDirectory(prefix="deepstow-verify-") as name:
            small = self._small(Path(name), keep_optimizer=keep_optimizer)
            threads = threads_of_each(self._num_ranks)
            if options is None:
                return _trained(facts.run_facts(small, self._num_ranks).replicas, without_strategies(small), threads)
            name, addresses = copies_of.layout_strategy(self._real), self._real.decided_by((Place.__name__, RUN))
            strategy = small.strategies[name]
            changed = type(strategy).model_validate({**strategy.model_dump(), **options})
            checked = find(addresses).model_validate({"debug": True})
            strategies = {**small.strategies, name: changed, addresses: checked}
            return _trained(self._num_ranks, small.model_copy(update={"strategies": strategies}), threads)


# --- comparing -------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """A tensor that is not equal. ``relative``: its largest difference over its largest weight."""

    name: str
    relative: float
    num_different: int
    num_elements: int


def compare(plain: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[Difference]:
    """Tensors that differ in any bit, the worst first. Raise ValueError if the names do."""
    if plain.keys() != other.keys():
        raise ValueError(f"parameter names differ: {sorted(plain.keys() ^ other.keys())[:5]}")
    differences = []
    for name, expected in plain.items():
        actual = other[name]
        if not torch.equal(expected.view(torch.int32), actual.view(torch.int32)):
            relative = float((expected - actual).abs().max() / expected.abs().max().clamp_min(1e-12))
            differences.append(Difference(name, relative, int((expected != actual).sum()), expected.numel()))
    return sorted(differences, key=lambda difference: -difference.relative)


def repeatable(train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of plain training, which runs twice on an accelerator; UserError if it does not repeat itself."""
    result = train()
    noise = compare(result["weights"], train()["weights"]) if accelerator.kind() is not None else []
    if noise:
        raise UserError(
            f"plain training does not repeat itself here: {len(noise)} tensors differ between two runs, "
            f"{noise[0].name} by {noise[0].relative:.1e}; an operator has no deterministic kernel"
        )
    return result
