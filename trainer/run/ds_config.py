"""DeepSpeed's config: a pure function of the plan and the run's numbers. Users never write it.

Each key has one writer: a strategy through the plan (``EngineSet``), or this file for what follows from ``training``.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from strategies.core.facts import Precision
from strategies.core.plan import Plan
from trainer.errors import ConfigError

STAGE_3_FROM = (5, 23)  # releases of Transformers


def uses_engine(plan: Plan) -> bool:
    """Whether any strategy runs in DeepSpeed's engine."""
    return bool(plan.engine())


def stage(plan: Plan) -> int | None:
    """The ZeRO stage in DeepSpeed's engine, or None without it."""
    value = plan.engine().get("zero_optimization.stage")
    return int(value) if value is not None else None


def builds_under_stage_3(transformers: str | None = None) -> bool:
    """Whether this release (else the installed one) builds the same model under ``deepspeed.zero.Init`` as without it.

    Those before 5.23 round rotary frequencies to bf16 there, and where a module draws the weights of its children
    (GPT-2's output projections), the draw is lost.
    """
    release = transformers or version("transformers")
    return tuple(int(part) for part in release.split(".")[:2]) >= STAGE_3_FROM


def refuse_transformers(stage: int | None, installed: str | None = None) -> None:
    """Nothing, unless stage 3 would train another model; see ``builds_under_stage_3``.

    Raises:
        ConfigError: the release is older.
    """
    if stage == 3 and not builds_under_stage_3(installed):
        raise ConfigError(
            f"strategies.zero.stage = 3: under it Transformers {installed or version('transformers')} gives some "
            f"weights and rotary frequencies other values; install 5.23, or write stage 2"
        )


def clips_itself(plan: Plan) -> bool:
    """Stage 0 in fp32: gradients are whole on every rank, so torch clips them (``trainer/run/accelerator.py``)."""
    return stage(plan) == 0 and plan.facts.run.precision is Precision.FP32


def ds_config(plan: Plan) -> dict[str, Any]:
    """The dict for ``deepspeed.initialize``; empty when no strategy uses the engine."""
    if not uses_engine(plan):
        return {}
    run = plan.facts.run
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": run.accumulation,
        "gradient_clipping": 0.0 if clips_itself(plan) else run.max_grad_norm,
        "bf16": {"enabled": run.precision is Precision.BF16},
        "fp16": {"enabled": run.precision is Precision.FP16},
        "zero_allow_untested_optimizer": True,  # Hugging Face's optimizer choice stands
        "steps_per_print": 1 << 60,  # our progress line speaks; an integer, for DeepSpeed takes a remainder
        "wall_clock_breakdown": False,
    }
    for dotted, value in plan.engine().items():
        node = config
        *parents, key = dotted.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        assert key not in node, f"two writers of DeepSpeed's {dotted}"
        node[key] = value
    return config
