"""Frozen weights and weights that are loaded in bf16: bytes, operations and advice, against a real model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from deepstow.strategies.core.facts import Facts, MachineFacts, Precision
from deepstow.strategies.core.plan import Kind, Plan
from deepstow.strategies.engine.tensors.quantised import scales_bytes
from deepstow.strategies.planner.step_cost import step_flops, unit_seconds
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.machine.profiles import profile as find_profile
from deepstow.trainer.model.build import build, load_config
from deepstow.trainer.planning.facts import count_model, run_facts
from tests.helpers.marks import slowly
from tests.helpers.tiny import run_config

MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
LORA = {"r": 4, "target_modules": "all-linear"}
GPU = MachineFacts("gpu", 1 << 40, 1 << 40)


def config_of(**model: Any) -> RunConfig:
    return run_config(MODEL, model=model, per_device_train_batch_size=2, bf16=True)


def facts_of(config: RunConfig, machine: MachineFacts = GPU) -> Facts:
    return count_model(config).facts(run_facts(config, 1), machine)


def real(config: RunConfig) -> Any:
    return build(config.model, load_config(config.model), seed=0, partitioned=False).train()


INT8 = {"load_in_8bit": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "lora", "quantised"),
    [
        ("float32", None, None), ("bfloat16", LORA, None), slowly("float32", LORA, INT8), ("bfloat16", LORA, NF4),
    ],
    ids=["all weights", "lora", "int8", "nf4"],
)  # fmt: skip
def test_bytes_are_those_of_plain_training(
    dtype: str, lora: dict[str, Any] | None, quantised: dict[str, Any] | None
) -> None:
    config = config_of(dtype=dtype, lora=lora, quantization_config=quantised)
    plan, model = Plan.baseline(facts_of(config)), real(config)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    tokens = torch.ones(2, 16, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert plan.total(Kind.PARAM) == sum(param.nbytes for param in model.parameters())
    assert plan.total(Kind.GRAD) == sum(param.grad.nbytes for param in model.parameters() if param.grad is not None)
    assert plan.total(Kind.MOMENT) == sum(moment.nbytes for moment in moments)
    assert plan.total(Kind.MASTER) == 0
    without = replace(plan.facts, run=replace(plan.facts.run, scales_bytes=0))
    assert plan.saved_peak() - Plan.baseline(without).saved_peak() == scales_bytes(model)
    assert plan.facts.loaded_bytes == plan.total(Kind.PARAM) + scales_bytes(model)
    assert (quantised is None) == (scales_bytes(model) == 0)


def test_a_quantised_base_counts_as_the_model_that_it_is_made_of() -> None:
    sides: tuple[dict[str, Any], ...] = ({"lora": LORA}, {"lora": LORA, "quantization_config": NF4})
    small = {**MODEL, "num_hidden_layers": 2}
    plain, packed = (count_model(run_config(small, model=model, data={"max_length": 16})) for model in sides)
    counted = [[(unit.num_params, unit.saved_bytes) for unit in each.units] for each in (plain, packed)]
    assert counted[0] == counted[1] and packed.forward_flops == plain.forward_flops
    assert {param.dtype for param in packed.params if param.group is None} == {"uint8", "float32"}


def test_operations_are_those_that_torch_counts_and_take_the_time_of_the_machine() -> None:
    """Within 3 %: the first block's input needs no gradient, which is a part of one of eight blocks."""
    config, rates = config_of(lora=LORA, attn_implementation="eager"), find_profile("rtx4090-pcie4").rates
    model, tokens, known = real(config), torch.ones(2, 16, dtype=torch.long), facts_of(config)
    with FlopCounterMode(display=False) as counted:
        model(input_ids=tokens, labels=tokens).loss.backward()
    predicted = step_flops(known)
    assert predicted == pytest.approx(counted.get_total_flops(), rel=0.03)
    assert predicted < 2.2 * known.run.forward_flops
    assert rates is not None
    # The machine computes operators so small faster than it is given them, and than their memory is read.
    rates = replace(rates, launch_s=0.0, device_bytes_per_s=1e18)
    seconds = sum(forward + backward for forward, backward in unit_seconds(known, rates))
    assert seconds == pytest.approx(predicted / rates.gemm_flops(Precision.BF16))
