"""Which way a run makes its steps: the plan says so."""

from __future__ import annotations

from typing import Any

from deepstow.strategies.core.plan import Plan
from deepstow.strategies.parallel import deepspeed, expert_parts
from deepstow.strategies.parallel.stages import Stage
from deepstow.strategies.plugins import two_level
from deepstow.strategies.plugins.local_steps import exchange_of
from deepstow.trainer.execution.base import Execution
from deepstow.trainer.execution.exchange import Exchanging, TwoLevel
from deepstow.trainer.execution.experts import Experts
from deepstow.trainer.execution.pipeline import Pipeline
from deepstow.trainer.execution.sequence import Sliced
from deepstow.trainer.execution.stowed import Stowed
from deepstow.trainer.execution.tensor import TensorParallel
from deepstow.trainer.execution.zero import Zero


def execution_of(plan: Plan, model: Any, stage: Stage | None) -> Execution:
    """What trains ``model``, or a ``stage`` of it; a collective."""
    run = plan.facts.run
    exchange = two_level.exchange_of(plan)
    execution: Execution
    if plan.layout is not None:
        execution = Stowed(run.grid)
    elif plan.engine():
        execution = Zero(run.grid, run.max_grad_norm if deepspeed.torch_clips(plan) else None, exchange)
    else:
        execution = Execution(run.grid)
        if exchange is not None:
            execution = TwoLevel(execution, exchange)
    if stage is not None:
        execution = Pipeline(execution, stage, plan)
    elif run.grid.tensor > 1:
        execution = TensorParallel(execution)
    if (parts := expert_parts.of(model)) is not None:
        execution = Experts(execution, parts)
    if (compressed := exchange_of(run.compression)) is not None:
        execution = Exchanging(execution, compressed)
    return Sliced(execution) if run.slices > 1 else execution
