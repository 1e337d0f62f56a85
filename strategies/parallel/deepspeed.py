"""DeepSpeed: its config, its bucket sizes and its leaf modules, as functions of the plan. Users never write them.

Each key of the config has one writer: a strategy, through the plan (``EngineSet``), or ``ds_config`` for what follows
from the run itself (micro-batch, accumulation, clipping, precision).
"""

from __future__ import annotations

from typing import Any

from deepstow.strategies.core.applied import log_applied
from deepstow.strategies.core.facts import Facts, Precision, UnitKind
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.core.protocol import is_older
from deepstow.strategies.parallel import autotp
from deepstow.strategies.planner.engine_bytes import bucket_elements, largest_block, live_elements

STAGE_3_FROM = (5, 23)  # releases of Transformers
TENSOR_DEGREE = "tensor_parallel.autotp_size"


def stage(plan: Plan) -> int | None:
    """The ZeRO stage in DeepSpeed's engine, or None without it."""
    value = plan.engine().get("zero_optimization.stage")
    return int(value) if value is not None else None


def torch_clips(plan: Plan) -> bool:
    """Stage 0 in fp32: gradients are whole on every rank, so torch clips them (``trainer/execution/zero.py``). In all
    other runs DeepSpeed does, in its step.
    """
    return stage(plan) == 0 and plan.facts.run.precision is Precision.FP32


def ds_config(plan: Plan) -> dict[str, Any]:
    """The dict for ``deepspeed.initialize``; empty when no strategy uses the engine."""
    if not plan.engine():
        return {}
    run = plan.facts.run
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": run.micro_batch // run.sequences,
        "gradient_accumulation_steps": run.accumulation,
        "gradient_clipping": 0.0 if torch_clips(plan) else run.max_grad_norm,
        "bf16": {"enabled": run.precision is Precision.BF16},
        "fp16": {"enabled": run.precision is Precision.FP16},
        "zero_allow_untested_optimizer": True,  # Hugging Face's choice of optimizer is kept
        "steps_per_print": 1 << 60,  # we print progress ourselves; an integer, since DeepSpeed takes a remainder
        "wall_clock_breakdown": False,
    }
    for dotted, value in plan.engine().items():
        node = config
        *parents, key = dotted.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        assert key not in node, f"two writers of DeepSpeed's {dotted}"
        node[key] = value
    if "tensor_parallel" in config:  # its degree is in the plan
        frozen = plan.facts.num_trainable < plan.facts.num_params
        config["tensor_parallel"] |= autotp.partition(tied=run.tied, frozen=frozen)
    return config


def zero_keys(facts: Facts, stage: int) -> dict[str, bool | int]:
    """The keys of ``zero_optimization`` for a ZeRO stage. Sizes are in elements."""
    keys: dict[str, bool | int] = {"stage": stage}
    if stage > 0:
        keys |= {
            "reduce_bucket_size": bucket_elements(facts),
            "allgather_bucket_size": bucket_elements(facts),
            "overlap_comm": facts.machine.has_accelerator,  # a CPU has no second stream
            "contiguous_gradients": True,
        }
    if stage == 3:
        keys |= {
            "stage3_prefetch_bucket_size": largest_block(facts),
            "stage3_max_live_parameters": live_elements(facts),
            "stage3_max_reuse_distance": largest_block(facts),
            # Vectors (norms, biases) stay whole: gathering each costs a message and saves next to nothing.
            "stage3_param_persistence_threshold": 10 * facts.run.hidden_size,
            "stage3_gather_16bit_weights_on_model_save": True,
            # Otherwise DeepSpeed replaces torch.nn.functional.linear for the whole process and does not restore it.
            "memory_efficient_linear": False,
        }
    return keys


def set_leaf_modules(model: Any, plan: Plan) -> None:
    """Under stage 3 let DeepSpeed gather each block as a whole, so that its hooks sit at the ends of blocks only.

    [Note: order of sums] Its hooks are autograd nodes around every module that holds weights. Around the norm of
    a residual block such a node adds the norm's two contributions to the gradient first and the residual's
    afterwards; plain autograd adds them in another order, and the last bits differ. With the block as the unit no
    node stands between contributions, and the bits are those of plain training.
    """
    from deepspeed.utils import set_z3_leaf_modules_by_name

    blocks = [unit.name for unit in plan.facts.units if unit.kind is UnitKind.BLOCK]
    set_z3_leaf_modules_by_name(model, blocks)
    log_applied("zero", ((block, "weights are gathered for the whole block") for block in blocks))
    # DeepSpeed reduces a block's gradients in torch's full backward hook. If a block's input needs no gradient, as
    # behind a frozen embedding, torch calls that hook before the block's backward instead of after it.
    if not any(parameter.requires_grad for parameter in model.get_input_embeddings().parameters()):
        model.enable_input_require_grads()


def builds_under_stage_3() -> bool:
    """Whether the installed release builds the same model under ``deepspeed.zero.Init``: those before 5.23 round rotary
    frequencies to bf16 there, and lose the draw of a module that initializes its children (GPT-2's projections).
    """
    return not is_older("transformers", STAGE_3_FROM)
