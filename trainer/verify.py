"""Does training with these strategies equal plain training? Trained twice on a shrunk copy, compared by bits.

The copy keeps what could break equality (architecture, grouped heads, tied weights, activation function, dropout,
optimizer, clipping, accumulation, precision) and shrinks what only costs time (layers, widths, vocabulary). Both runs
go through the same code as ``launch/train.py``, on real ranks, with the same seed and the same random tokens.

``plain`` means: the same ranks, no strategies, torch's own data parallelism.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.ranks import Ranks
from trainer.shrink import LENGTH, VOCAB, shrink_model

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig

ROWS = 64
KEPT = frozenset(
    [
        "learning_rate",
        "gradient_accumulation_steps",
        "max_grad_norm",
        "optim",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "lr_scheduler_type",
        "seed",
        "bf16",
        "fp16",
        "gradient_checkpointing",
        "activation_checkpointing",
        "label_smoothing_factor",
    ]
)


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that is not equal. ``relative``: largest difference over the largest weight of the tensor."""

    name: str
    relative: float
    num_different: int
    num_elements: int


def shrink(config: RunConfig, folder: Path, steps: int) -> RunConfig:
    """The run on the shrunk copy: ``steps`` optimizer steps, no evaluation, no checkpoints."""
    from trainer.config.sections import RunConfig as Config
    from trainer.model import load_config

    tree = config.tree()
    model = {key: tree["model"][key] for key in ("dtype", "attn_implementation", "lora") if key in tree["model"]}
    small = shrink_model(load_config(config.model, VOCAB))
    training = {key: value for key, value in tree["training"].items() if key in KEPT}
    if config.training.bf16 or config.training.fp16:
        # Adam divides a gradient by its own size, so that the rounding of a tiny gradient becomes a step of full
        # length, and a comparison would show Adam and not the strategy. SGD keeps a small difference small.
        training |= {"optim": "sgd", "learning_rate": 1.0}
    training |= {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "report_to": ["none"],
        "logging_steps": 1,
    }
    return Config.model_validate(
        {
            "model": {**model, "config": small, "tokenizer": "none"},
            "data": {"path": "random tokens", "max_length": LENGTH},
            "training": training,
            "strategies": config.strategies,
        }
    )


def without_strategies(config: RunConfig) -> RunConfig:
    """The same run, plain."""
    return config.model_copy(update={"strategies": {}})


def train_weights(ranks: Ranks, config: RunConfig) -> dict[str, torch.Tensor]:
    """Train on random tokens and return every parameter, whole, as fp32 on the CPU (rank 0; others return {})."""
    from trainer import build

    run = random_run(config, ranks)
    trainer = build.make_trainer(run)
    try:
        trainer.train()
        return full_weights(trainer, ranks)
    finally:
        trainer.accelerator.free_memory()


def random_run(config: RunConfig, ranks: Ranks) -> Any:
    """A prepared run whose data are random tokens, the same on every rank."""
    from datasets import Dataset

    from trainer import build
    from trainer.data import Prepared
    from trainer.machine import probe
    from trainer.model import load_config
    from trainer.planning import plan_of

    rows = load_config(config.model).get_text_config().vocab_size  # a small vocabulary is not shrunk further
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, min(VOCAB, rows), (ROWS, LENGTH), generator=generator).tolist()
    data = Dataset.from_dict({"input_ids": ids, "labels": ids})
    prepared = Prepared(data, None, "random", "input_ids", ROWS * LENGTH, ROWS * LENGTH)
    machine = probe()
    plan = plan_of(config, ranks, machine, tune=True)
    return build.Run(config, ranks, Path(config.training.output_dir), _tokenizer(), prepared, machine, plan, None)


def _tokenizer() -> Any:
    """As much of a tokenizer as training on ready-made ids needs."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>")), pad_token="<pad>"
    )


def full_weights(trainer: Any, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Parameters by name, gathered one by one where they are split. A collective."""
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    state = model.state_dict()  # has right values of weights that are away at the moment
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        with _gathered(parameter):
            if ranks.is_first:
                weight = parameter if hasattr(parameter, "ds_id") else state[name]
                found[name] = weight.detach().float().cpu().clone()
    return found


def _gathered(parameter: torch.nn.Parameter) -> Any:
    from contextlib import nullcontext

    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter])


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names and bytes: equal digests are equal bits."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def compare(plain: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[Difference]:
    """Tensors that differ in any bit, the worst first.

    Raises:
        ValueError: the names are not the same; a strategy renamed or dropped a parameter.
    """
    if plain.keys() != other.keys():
        raise ValueError(f"parameter names differ: {sorted(plain.keys() ^ other.keys())[:5]}")
    return sorted(_differences(plain, other), key=lambda found: -found.relative)


def _differences(plain: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> Iterable[Difference]:
    for name, expected in plain.items():
        found = other[name]
        if torch.equal(expected.view(torch.int32), found.view(torch.int32)):
            continue
        scale = expected.abs().max().clamp_min(1e-12)
        relative = float((expected - found).abs().max() / scale)
        yield Difference(name, relative, int((expected != found).sum()), expected.numel())


def verify(config: RunConfig, num_ranks: int, steps: int) -> list[Difference]:
    """Train the shrunk copy plainly and with the strategies of ``config``; the tensors that differ.

    Raises:
        WorldError: a run failed.
    """
    from trainer.worlds import run_world

    with tempfile.TemporaryDirectory(prefix="deepstow-verify-") as name:
        small = shrink(config, Path(name), steps)
        plain = run_world(num_ranks, train_weights, without_strategies(small))
        return compare(plain, run_world(num_ranks, train_weights, small))
