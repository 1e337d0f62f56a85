"""Recomputation changes no bit: gradients, losses and the numbers drawn, for each policy, architecture and kernel.

A case trains two micro-batches and compares every gradient with plain training's after each. The first forward of a
block only looks at what may be kept; from the second on it is kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from deepstow.strategies.core.compose import compose
from deepstow.strategies.core.facts import Facts
from deepstow.strategies.core.plan import Plan, Tier
from deepstow.strategies.core.registry import find
from deepstow.strategies.engine.forward.checkpointing import checkpoint_blocks, checkpointed, recompute
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.planning.plan_for import plan_for
from deepstow.trainer.verify.verify import compare, shrink, train
from tests.helpers.doubles import Delayed
from tests.helpers.engine import STEPS, differences, plain, plan_of, stowed
from tests.helpers.models import Odd, Spec, build, causal, odd_batches, tokens
from tests.helpers.releases import needs_stage_3
from tests.helpers.sides import both_sides
from tests.helpers.sides import train as train_steps
from tests.helpers.tiny import LLAMA, MODELS
from tests.helpers.worlds import run_counted
from tests.helpers.zoo import branches, hub, text

DROPOUT: Mapping[str, Mapping[str, float]] = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "bloom": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "opt": {"dropout": 0.1, "attention_dropout": 0.1},
}
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "selective": {"policy": "selective"},
    "full": {"policy": "full"},
    "full, every 2nd": {"policy": "full", "every": 2},
    "auto": {"policy": "auto"},
    "selective, on the host": {"policy": "selective", "activation_offloading": True},
    "full, on the host": {"policy": "full", "activation_offloading": True},
}
ENDS = ("none", "full")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MACHINE = probe()
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")


def made(name: str, dropout: bool, attention: str, dtype: torch.dtype) -> Any:
    """Three blocks with the same random weights each time. Dropout is 0 but where it is asked for."""
    given = {**MODELS[name], **dict.fromkeys(("n_layer", "num_hidden_layers"), 3)}
    given.pop("num_hidden_layers" if "n_layer" in MODELS[name] else "n_layer")
    zeros = dict.fromkeys(DROPOUT.get(name, {"attention_dropout": 0.0}), 0.0)
    given |= DROPOUT.get(name, {"attention_dropout": 0.1}) if dropout else zeros
    return causal(given.pop("model_type"), None if name == "bloom" else attention, dtype, **given)


def micro_batches() -> list[dict[str, Tensor]]:
    """Two, with padding, so that there is a mask."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 64, (2, 2, 8), generator=generator)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    return [{"input_ids": one, "labels": one, "attention_mask": mask} for one in ids]


@cache
def facts_of(name: str, dropout: bool, attention: str, dtype: torch.dtype) -> Facts:
    return plan_for(
        made(name, dropout, attention, dtype),
        eval_rows=0,
        batch=micro_batches()[0],
        max_grad_norm=None,
        machine=MACHINE,
    ).facts


def decided(facts: Facts, options: Mapping[str, Any]) -> Plan:
    """The plan; ``auto`` gets a budget that asks for something between all and nothing."""
    if options["policy"] == "auto":
        facts = replace(facts, run=replace(facts.run, accumulation=2))  # gradients and saved tensors then add up
        peaks = [compose({"recompute": find("recompute")(policy=name)}, facts).peak(Tier.DEVICE) for name in ENDS]
        facts = replace(facts, machine=replace(facts.machine, device_bytes=sum(peaks) // 2))
    return compose({"recompute": find("recompute")(**options)}, facts)


def steps(model: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Loss and gradients after each micro-batch, which add up, and the next random number."""
    torch.manual_seed(7)
    found = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
        found.append({"loss": loss.detach(), "random": torch.rand(4), **grads})
    return found


def unequal(first: Sequence[Mapping[str, Tensor]], second: Sequence[Mapping[str, Tensor]]) -> list[str]:
    pairs = zip(first, second, strict=True)
    return [name for one, two in pairs for name in one.keys() | two.keys() if not torch.equal(one[name], two[name])]


@cache
def plainly(name: str, dropout: bool, attention: str, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    return steps(made(name, dropout, attention, dtype), micro_batches())


@pytest.mark.parametrize(
    ("name", "dropout", "attention", "dtype"),
    [
        ("llama", True, "sdpa", "bf16"), ("gpt2", True, "eager", "fp32"), ("gpt2", True, "sdpa", "bf16"),
        ("gpt2", False, "sdpa", "fp32"), ("opt", True, "sdpa", "fp32"), ("bloom", True, "eager", "bf16"),
        ("mixtral", True, "eager", "fp32"),
    ],
)  # fmt: skip
def test_alone(name: str, dropout: bool, attention: str, dtype: str) -> None:
    """Every other policy in turn."""
    how = (name, dropout, attention, DTYPES[dtype])
    for policy in list(POLICIES)[(dtype == "fp32") :: 2]:
        options, model = POLICIES[policy], made(*how)
        plan = decided(facts_of(*how), options)
        find("recompute")(**options).apply(model, plan)
        wrapped = [module for module in model.modules() if checkpointed(module)]
        assert wrapped, policy
        assert unequal(plainly(*how), steps(model, micro_batches())) == [], policy


# --- with what else may be on ----------------------------------------------------------------------------------------

LAYOUTS: tuple[Mapping[str, Any], ...] = (
    {"site": "host", "weights": "travelling", "park": "host"},
    {"site": "streamed", "weights": "some", "in_backward": True},
    {"site": "mixed", "weights": "travelling", "bucket": "half", "max_norm": 0.05, "accumulation": 2},
)


WITH_OFFLOAD = (("llama", 0), ("mixtral", 1), ("experts", 2))


@pytest.mark.parametrize(("name", "number"), WITH_OFFLOAD)
def test_with_offload(name: str, number: int) -> None:
    """Weights come and go around a block that runs again; policies and dtypes take turns with the layouts."""
    dtype = (torch.float32, torch.bfloat16)[(number + len(name)) % 2]
    where, make = LAYOUTS[number], partial(build, name, dtype=dtype)
    count = where.get("accumulation", 1)
    script = partial(train_steps, batches=tokens(name, STEPS * count), passes=(count,))

    def plan(model: nn.Module) -> Any:
        _recompute(model, name, ("full, every 2nd", "selective", "selective, on the host")[number])
        return plan_of(model, **where)

    both_sides(make, script, [plan], max_norm=where.get("max_norm", 0.0), beside=True)


def test_in_a_plain_loop() -> None:
    """One plan for what is kept and what rests where, and two functions that carry it out."""
    batches = tokens("gpt2", STEPS)
    wanted = plain(build("gpt2"), batches)
    model = build("gpt2")
    given: dict[str, Any] = {"batch": batches[0], "machine": MACHINE, "max_grad_norm": None}
    given |= {"site": "host", "weights": "resident"}
    least = plan_for(model, recompute={"policy": "full"}, **given).peak(Tier.DEVICE)
    plan = plan_for(model, gpu_memory=least + 10_000, recompute={"policy": "auto"}, **given)  # nothing else can leave
    assert {plan.answers["Keep", unit.name][1] for unit in plan.facts.units[1:3]} == {"offload"}, "decided together"
    recompute(model, plan)
    assert sum(checkpointed(module) is not None for module in model.modules()) > 0
    assert differences(wanted, stowed(model, plan, batches)) == []


def test_a_recomputed_model_is_counted_again() -> None:
    """On tensors without values, from which blocks learn nothing: with values they have the bits all the same."""
    batches = tokens("gpt2", STEPS)
    model = build("gpt2")
    given: dict[str, Any] = {"batch": batches[0], "machine": MACHINE, "max_grad_norm": None}
    plan = plan_for(model, recompute={"policy": "selective"}, **given)
    recompute(model, plan)
    again = plan_for(model, **given)
    assert 0 < again.facts.units[1].saved_bytes < plan.facts.units[1].saved_bytes
    assert differences(plain(build("gpt2"), batches), stowed(model, again, batches)) == []


def _recompute(model: nn.Module, name: str, policy: str) -> None:
    if name == "experts":  # data decide which of them run, so that no fake run can count
        kept = ["linear 0", "linear 1", "linear 2"] if policy.startswith("selective") else []
        every = POLICIES[policy].get("every", 1)
        checkpoint_blocks(model, {f"layers.{index}": kept for index in range(0, 4, every)})
    else:
        recompute(model, decided(_facts(name, next(model.parameters()).dtype), POLICIES[policy]), Delayed())


@cache
def _facts(name: str, dtype: torch.dtype) -> Facts:
    """Counted once for all policies."""
    return plan_for(
        build(name, dtype=dtype), eval_rows=0, batch=tokens(name, 1)[0], max_grad_norm=None, machine=MACHINE
    ).facts


def test_with_adapters_and_frozen_weights() -> None:
    """Adapters train, the base does not, and the embedding's output needs no gradient."""
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        torch.manual_seed(0)
        lora = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return get_peft_model(made("llama", True, "sdpa", torch.float32), lora)

    model, policy = adapted(), "selective, on the host"
    plan = decided(
        plan_for(model, eval_rows=0, batch=micro_batches()[0], max_grad_norm=None, machine=MACHINE).facts,
        POLICIES[policy],
    )
    find("recompute")(**POLICIES[policy]).apply(model, plan)
    assert sum(checkpointed(module) is not None for module in model.modules()) == 3
    assert unequal(steps(adapted(), micro_batches()), steps(model, micro_batches())) == []


def test_blocks_of_any_class() -> None:
    """A model that no library knows; two blocks share a layer, one is used twice, some weights are frozen."""
    spec = Spec(width=5, hidden=(3, 7, 4), calls=(0, 1, 0, 2), shares=(2, 0), frozen=3, dropout=0.2)

    def odd() -> Odd:
        torch.manual_seed(0)
        return Odd(spec)

    batches = odd_batches(2)
    for kept in ((), ("linear 0", "linear 1")):
        model = odd()
        checkpoint_blocks(model, {f"layers.{index}": kept for index in range(3)})
        assert unequal(steps(odd(), batches), steps(model, batches)) == []


@pytest.mark.slow
@pytest.mark.ranks
@needs_stage_3
def test_with_zero_on_two_ranks(tmp_path: Path) -> None:
    """With dropout, and with biases, which DeepSpeed's linear layer of stage 3 adds in place."""

    def config(strategies: Mapping[str, Any]) -> RunConfig:
        model = {"config": {"model_type": "opt", **DROPOUT["opt"]}, "tokenizer": "none"}
        training = {"output_dir": "unused", "learning_rate": 1e-2, "max_grad_norm": 0.0}
        data = {"path": "random tokens"}
        made = {name: find(name).model_validate(given) for name, given in strategies.items()}
        sections = {"model": model, "data": data, "training": training, "strategies": made}
        return shrink(RunConfig.model_validate(sections), tmp_path, 3)

    zero = {"zero": {"stage": 3}}
    wanted = run_counted(2, train, config(zero))["weights"]
    found = run_counted(2, train, config({**zero, "recompute": POLICIES["selective, on the host"]}))["weights"]
    assert compare(wanted, found) == []


# --- forwards that are no training -----------------------------------------------------------------------------------


def test_evaluation_and_generation_are_as_ever() -> None:
    model = made("llama", False, "sdpa", torch.float32)
    ids = micro_batches()[0]["input_ids"]
    model.eval()
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    text = model.generate(ids[:1], max_new_tokens=4, do_sample=False)
    checkpoint_blocks(model, {f"model.layers.{index}": ["linear 0"] for index in range(3)})
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, wanted)
        assert model(input_ids=ids).past_key_values.get_seq_length() == 8
    assert torch.equal(model.generate(ids[:1], max_new_tokens=4, do_sample=False), text)


def test_training_with_a_cache_that_holds_something() -> None:
    """As prefix tuning does it: the replay finds the cache as the first run did."""
    from transformers import DynamicCache

    def run(recomputes: bool) -> list[dict[str, Tensor]]:
        model = made("llama", False, "sdpa", torch.float32)
        if recomputes:
            checkpoint_blocks(model, {f"model.layers.{index}": ["linear 0"] for index in range(3)})
        generator = torch.Generator().manual_seed(2)
        batches = []
        for batch in micro_batches():
            past = DynamicCache()
            for layer in range(3):
                past.update(*torch.randn(2, 2, 2, 3, 8, generator=generator), layer)
            ids = batch["input_ids"]
            batches.append({"input_ids": ids, "labels": ids, "past_key_values": past})
        return steps(model, batches)

    assert unequal(run(False), run(True)) == []
    without = steps(made("llama", False, "sdpa", torch.float32), micro_batches())
    assert not torch.equal(run(True)[0]["loss"], without[0]["loss"])


STATES: dict[str, dict[str, Any]] = {  # states in a cache's dicts, in its list, and beside keys and values
    "lfm2": {"full_attn_idxs": [1], "block_multiple_of": 8},
    "minimax": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "bamba": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "attn_layer_indices": [1],
    },
}


@pytest.mark.parametrize(("kind", "filled"), [*((kind, True) for kind in STATES), ("lfm2", False)])
def test_a_cache_with_states_that_blocks_overwrite(kind: str, filled: bool) -> None:
    """``use_cache`` is on by default in a loop of one's own: a replay finds the states as the first run did."""

    def run(recomputes: bool) -> list[dict[str, Tensor]]:
        torch.manual_seed(3)
        options = {**LLAMA, **STATES[kind], "use_cache": True, "initializer_range": 0.3, "pad_token_id": 0}
        config = transformers.AutoConfig.for_model(**{**options, "model_type": kind})
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
        batches = []
        for batch in micro_batches():
            ids = batch["input_ids"] % options["vocab_size"]
            with torch.no_grad():
                past = model(input_ids=ids).past_key_values if filled else None
            batches.append({"input_ids": ids, "labels": ids, "past_key_values": past})
        if recomputes:
            checkpoint_blocks(model, {f"model.layers.{index}": ["linear 0"] for index in range(2)})
        return steps(model, batches)

    assert unequal(run(False), run(True)) == []


def test_the_cache_of_an_encoder_and_a_decoder() -> None:
    """A decoder's block notes in it that it has the encoder's keys; a replay makes them again."""
    models = [hub("m2m100") for _ in range(2)]
    checkpoint_blocks(models[1], {f"model.decoder.layers.{index}": ["linear 0"] for index in range(2)})
    assert unequal(*(steps(model, text(2)) for model in models)) == []


def test_names_stay() -> None:
    model = made("gpt2", False, "eager", torch.float32)
    before = [name for name, _ in model.named_modules()], list(model.state_dict())
    checkpoint_blocks(model, {"transformer.h.0": []})
    assert ([name for name, _ in model.named_modules()], list(model.state_dict())) == before
    with pytest.raises(ValueError, match=r"transformer\.h\.0 is recomputed already"):
        checkpoint_blocks(model, {"transformer.h.0": []})


def test_a_replay_does_not_see_the_engine_at_work() -> None:
    """Products are kept, and what the engine does when a replay begins is none of the operators that it looks for.

    Blocks leave a loss in an attribute: backward begins with nodes that no border announces.
    """
    options: dict[str, Any] = {"batch": text(1)[0], "max_grad_norm": None, "machine": MACHINE}
    options |= {"site": "host", "weights": "streamed", "prefetch": 0, "update_in_backward": False}

    def plan(model: nn.Module) -> Plan:
        made = plan_for(model, recompute={"policy": "selective"}, **options)
        recompute(model, made)
        assert all(checkpointed(layer) for layer in model.layers)
        return made

    both_sides(partial(branches, "late"), partial(train_steps, batches=text(4)), [plan])
