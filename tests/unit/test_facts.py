"""Facts: units found by structure, bytes and flop counted on a fake run, against real tiny models and hand formulas.

The same hooks count on the fake model and on a real one run on the CPU, so equality is exact: in fp32, with the same
attention kernel, on batches that need a mask (padded or packed) or do not.
"""

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensor

from deepstow.launch.plan import main
from deepstow.strategies.core.facts import Facts, Unit, UnitKind
from deepstow.strategies.engine.forward.blocks import find_blocks
from deepstow.strategies.engine.memory import accelerator
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.data.collate import Collator
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.model import build as model_module
from deepstow.trainer.model.count_cache import name_of
from deepstow.trainer.model.counting import Counter
from deepstow.trainer.planning import positions
from deepstow.trainer.planning.facts import ModelCount, count_model, machine_facts, saved_without_mask
from tests.helpers.fakes import GPU, run_facts
from tests.helpers.marks import slowly
from tests.helpers.tiny import BLOOM, ENDS, GPT2, LLAMA, MIXTRAL, MODELS, VOCAB, run_config

BATCH, LENGTH = 2, 16
OFFLOAD: Mapping[str, Any] = {"offload": {}}


def real_model(config: RunConfig) -> Any:
    hf_config = model_module.load_config(config.model)
    return model_module.build(config.model, hf_config, seed=0, partitioned=False).train()


def row(*lengths: int) -> dict[str, list[int]]:
    """A row of several documents."""
    ids = [1 + position % 7 for length in lengths for position in range(length)]
    positions = [position for length in lengths for position in range(length)]
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def count_real(config: RunConfig, rows: Sequence[Mapping[str, list[int]]]) -> tuple[Unit, ...]:
    model = real_model(config)
    counter = Counter(model)
    with counter:
        model(**Collator(0, config.data.packing)(rows))
    return bare(counter.units())


def config_of(name: str, attention: str | None = None, *, packing: bool = False, **training: Any) -> RunConfig:
    model = {"attn_implementation": attention} if attention else {}
    data = {"packing": packing, "max_length": LENGTH}
    return run_config(MODELS[name], model=model, data=data, per_device_train_batch_size=BATCH, **training)


def as_in_runs(name: str, **training: Any) -> RunConfig:
    """With a kernel that each has, and what several tests count."""
    return config_of(name, "eager" if name == "bloom" else "sdpa", packing=name != "bloom", **training)


counts: dict[object, ModelCount] = {}


def count_of(config: RunConfig, **how: bool) -> ModelCount:
    """A count that several tests look at."""
    key = (name_of(config), *how.items())
    if key not in counts:
        counts[key] = count_model(config, **how)
    return counts[key]


# Units


@pytest.mark.parametrize(("name", "tied"), [(name, name == "gpt2") for name in MODELS])
def test_units_hold_every_parameter_once(name: str, tied: bool) -> None:
    by_default = name in ("gpt2", "opt", "bloom")
    config = run_config({**MODELS[name], "tie_word_embeddings": tied}) if tied != by_default else as_in_runs(name)
    real, count = real_model(config), count_of(config)
    units = count.units
    assert {p.name: p.num_elements for p in count.params} == {n: p.numel() for n, p in real.named_parameters()}
    assert {p.dtype for p in count.params} == {"float32"}
    assert [p.users for p in count.params if p.users] == ([("head",)] if tied else [])
    Facts(units, run_facts(), GPU, count.params)  # they add up to the units
    assert sum(unit.num_params for unit in units) == sum(p.numel() for p in real.parameters())
    assert all(unit.num_trainable == unit.num_params for unit in units)
    assert count.largest_param == max(p.numel() for p in real.parameters())
    assert [unit.kind for unit in units] == [UnitKind.EMBEDDING, UnitKind.BLOCK, UnitKind.BLOCK, UnitKind.HEAD]
    assert [unit.name for unit in units] == ["embedding", *find_blocks(real), "head"]
    # A tied matrix stands with its first use, the embedding; an untied head brings its own.
    rows = VOCAB * 32
    assert units[0].num_params >= rows
    assert (units[-1].num_params >= rows) is not tied


def bare(units: Iterable[Unit]) -> tuple[Unit, ...]:
    """Without operators, and what is counted in backward, which ``tests/memory/test_temporaries.py`` measures."""
    return tuple(replace(unit, temporaries=None, in_chunks=None, launches=0, launches_back=0) for unit in units)


# Saved bytes


@pytest.mark.parametrize(
    ("name", "attention", "packing"),
    [
        *((name, "sdpa", True) for name in ("gpt2", "qwen3", "mixtral")),
        ("opt", "sdpa", False),
        *((name, "eager", name == "llama") for name in ("llama", "bloom")),
    ],
)
def test_saved_bytes_are_those_of_the_real_model(name: str, attention: str, packing: bool) -> None:
    config = config_of(name, attention, packing=packing)
    rows = [row(9, 7), row(12, 1)]  # one full row of two documents, one with room left
    assert bare(count_of(config).units) == count_real(config, rows)


def test_no_layer_is_taken_for_dropped() -> None:
    """OPT compares a random number with ``layerdrop``; a fake one has no value."""
    whole, dropping = (
        run_config({**MODELS["opt"], "layerdrop": rate}, per_device_train_batch_size=BATCH) for rate in (0.0, 0.9)
    )
    assert bare(count_of(dropping).units) == bare(count_of(whole).units)  # the numbers themselves are temporary


def test_temporaries_of_every_unit_are_counted() -> None:
    units = count_of(as_in_runs("mixtral")).units
    assert all(unit.temporaries is not None and unit.temporaries.backward > 0 for unit in units)
    assert units[-1].in_chunks is not None and units[-1].in_chunks.logits == BATCH * LENGTH * VOCAB


def test_smoothed_labels_are_counted_outside_of_the_model() -> None:
    """Transformers' Trainer takes the labels from the model; its own loss saves the probabilities of all words."""
    head = count_of(config_of("llama", label_smoothing_factor=0.1)).units[-1]
    assert head.in_chunks is None and head.temporaries is not None
    assert head.saved_bytes >= 4 * BATCH * (LENGTH - 1) * VOCAB


def test_full_rows_keep_less_where_heads_are_grouped() -> None:
    """Transformers makes no mask for them, and fused attention then does not repeat keys and values."""
    config = config_of("qwen3", "sdpa", packing=True)
    without = count_of(config, masked=False).units
    assert bare(without) == count_real(config, [row(16), row(16)])
    assert saved_without_mask(config) == {unit.name: unit.saved_bytes for unit in without}
    flash = config_of("qwen3", "flash_attention_2", packing=True)  # never makes one
    assert bare(count_of(flash).units) == bare(without)
    more, less = (sum(unit.saved_bytes for unit in units) for units in (count_of(config).units, without))
    assert more > 1.03 * less


def test_documents_one_by_one_keep_no_mask() -> None:
    """As a run has it, of two documents in a row or of more."""
    config = config_of("qwen3", "sdpa_varlen", packing=True)
    masked = count_of(config_of("qwen3", "sdpa", packing=True)).units
    found = count_of(config).units
    assert bare(found) == count_real(config, [row(8, 8), row(8, 8)])
    more = count_real(config, [row(1, 3, 12), row(16)])
    assert [unit.saved_bytes for unit in more] == [unit.saved_bytes for unit in found]
    of_block = [(unit.choices.operators, unit.choices.running_bytes) for unit in (found[1], more[1]) if unit.choices]
    names, sizes = ([[getattr(each, key) for each in one[0]] for one in of_block] for key in ("name", "num_bytes"))
    assert names[0] == names[1] and sizes[0] == sizes[1] and names[0].count("attention 0") == 1
    assert sum(unit.saved_bytes for unit in found) < sum(unit.saved_bytes for unit in masked)


def test_checkpointing_keeps_the_input_of_each_block() -> None:
    plain = count_of(config_of("llama")).units
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        training: dict[str, Any] = {key: True}
        units = count_of(config_of("llama", **training)).units
        hidden = 4 * BATCH * LENGTH * 32
        small = 4096  # positions, rotary tables or a mask that a block is handed besides; no multiple of hidden
        for before, after in zip(plain[1:3], units[1:3], strict=True):
            assert hidden <= after.saved_bytes <= hidden + small < before.saved_bytes / 5
        assert units[-1].saved_bytes == plain[-1].saved_bytes


# Flop


def test_forward_flop_of_a_llama_by_hand() -> None:
    tokens, hidden, ffn, key_values = BATCH * LENGTH, 32, 64, 16
    matrices = 2 * (hidden * (2 * hidden + 2 * key_values) + 3 * hidden * ffn) + hidden * VOCAB
    # Scores and their product with the values, whole squares: masked ones are counted too.
    attention = 2 * 2 * (2 * BATCH * LENGTH * LENGTH * hidden)
    rotary = 2 * LENGTH * (hidden // 4 // 2)  # positions times frequencies, a product in Transformers 5.17 only
    for kernel in ("eager", "sdpa"):
        counted = count_of(config_of("llama", kernel)).forward_flops
        assert counted - (2 * tokens * matrices + attention) in (0, rotary)


def test_flop_of_a_mixture_count_the_experts_that_a_token_meets() -> None:
    """Routing two of four experts doubles the feed-forward of a dense block and adds the router."""
    dense = count_of(config_of("llama")).forward_flops
    mixture = count_of(config_of("mixtral")).forward_flops
    tokens, hidden, ffn, layers = BATCH * LENGTH, 32, 64, 2
    feed_forward, router = 2 * tokens * 3 * hidden * ffn, 2 * tokens * hidden * 4
    assert mixture - dense == layers * (feed_forward + router)
    half = count_of(run_config({**MIXTRAL, "num_experts_per_tok": 1}, per_device_train_batch_size=BATCH)).forward_flops
    assert mixture - half == layers * feed_forward


def test_a_fake_run_leaves_nothing_behind() -> None:
    """A graph that keeps its own outputs is a cycle through C++ that the garbage collector cannot see."""

    def alive() -> int:
        gc.collect()
        return sum(isinstance(thing, FakeTensor) for thing in gc.get_objects())

    before = alive()
    count_model(config_of("llama"))
    assert alive() <= before


# Adapters


def test_adapters_are_trainable_and_the_base_is_not() -> None:
    """``test_frozen.py`` has a Llama, whose layers are stored the other way."""
    lora = {"lora": {"r": 3, "target_modules": ["c_attn"]}}
    count = count_of(run_config(GPT2, strategies=OFFLOAD, model=lora, bf16=True))
    units = count.units
    assert [unit.num_trainable for unit in units] == [0, 3 * 32 + 96 * 3, 3 * 32 + 96 * 3, 0]
    real = real_model(run_config(GPT2, model=lora))
    assert sum(unit.num_params for unit in units) == sum(p.numel() for p in real.parameters())
    assert [unit.name for unit in units[1:3]] == list(find_blocks(real))
    assert {p.dtype for p in count.params} == {"bfloat16"}
    assert all((p.group is None) is ("lora" not in p.name) for p in count.params)


# What cannot be counted


def refused(config: Mapping[str, Any], **model: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        count_model(run_config(config, model=model))
    return str(caught.value)


def test_a_model_that_cannot_be_built_is_refused_in_one_line() -> None:
    heads = refused({**LLAMA, "num_attention_heads": 5})
    assert "hidden size (32) is not a multiple of the number of attention heads (5)" in heads
    assert "expected int, got str" in refused({**LLAMA, "hidden_size": "x"})
    assert refused({**LLAMA, "hidden_act": "nope"}) == "model.config: Transformers knows no 'nope'"
    assert refused(BLOOM, attn_implementation="sdpa") == (
        "model.attn_implementation = 'sdpa': bloom does not support it; leave it out"
    )
    assert refused({**LLAMA, "pad_token_id": 999}).startswith("model.config: cannot be built: AssertionError: ")
    assert refused({**LLAMA, "return_dict": False}).startswith("model: AttributeError: 'tuple' object")
    assert all("\n" not in line for line in (heads, refused({**LLAMA, "hidden_size": "x"})))


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
ROBERTA = {"model_type": "roberta", **SMALL, "max_position_embeddings": 66, "vocab_size": 300, "pad_token_id": 1}
GPTJ = {"model_type": "gptj", "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 8, "n_positions": 64, **ENDS}
BART = {
    "model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64,
    "vocab_size": 300,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "task", "key"),
    [
        (GPT2, "sft", "max_length"),
        (ROBERTA, "classification", "max_length"),  # two of its 66 are for padding
        (GPTJ, "sft", "max_length"),  # in a buffer
        slowly(BART, "seq2seq", "max_target_length"),
    ],
)
def test_rows_of_more_tokens_than_positions(model: Any, task: str, key: str) -> None:
    """Fake tensors let models look further, and real ones do not."""
    for length in (64, 65):
        config = run_config(model)
        section = config.model.model_copy(update={"labels": ["a", "b"]} if task == "classification" else {})
        data = config.data.model_copy(update={"max_length": 64, key: length})
        config = config.model_copy(update={"task": task, "model": section, "data": data})
        if length == 64:
            assert count_model(config).positions >= 64
            continue
        with pytest.raises(ConfigError, match=rf"data\.{key} = 65: the model has 64 positions; write 64 or less$"):
            count_model(config)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("more", "most"),
    [
        ({}, 64),
        ({"rope_scaling": YARN}, 256),
        slowly({"rope_scaling": {**YARN, "original_max_position_embeddings": 16}}, 64),
    ],
)
def test_rows_beyond_what_rotary_embeddings_were_made_for(more: dict[str, Any], most: int) -> None:
    """They are a warning, by the scaling of the embeddings."""
    config = run_config({**LLAMA, "max_position_embeddings": 64, **more}, data={"max_length": most})
    assert count_model(config).positions == most and positions.beyond(config, most) == []
    longer = config.model_copy(update={"data": config.data.model_copy(update={"max_length": most + 1})})
    (line,) = positions.beyond(longer, most)
    assert line.startswith(f"WARNING: data.max_length = {most + 1}: the model is made for {most} positions")


@pytest.mark.slow
def test_a_plan_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing of a model without positions."""
    assert count_model(run_config(BLOOM)).positions == 0 and positions.beyond(run_config(BLOOM), 0) == []
    file = tmp_path / "x.yaml"
    file.write_text(run_config(LLAMA, data={"max_length": 65}).dump())
    assert main(["--config", str(file)]) == 0
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "max_length" in text)
    assert f"{file}:{line}: data.max_length = 65: the model is made for 64 positions" in capsys.readouterr().err


# The run and the machine


def test_ranks_of_one_machine_share_its_memory() -> None:
    machine = replace(probe(), host_own_bytes=0)
    alone, shared = (machine_facts(machine, ranks) for ranks in (1, 2))
    assert shared.host_bytes == alone.host_bytes // 2
    if accelerator.kind() is not None:
        assert shared.device_bytes == alone.device_bytes
    else:
        assert shared.device_bytes == shared.host_bytes - shared.runtime_host_bytes


def test_the_memory_that_the_process_has_already_is_not_taken_by_others() -> None:
    """Else a tight machine had less room for the run than for its plan: the run has more libraries when it asks."""
    machine = replace(probe(), host_own_bytes=300 << 20)
    before = replace(machine, host_available_bytes=machine.host_available_bytes + (600 << 20), host_own_bytes=0)
    assert machine_facts(machine, 2).host_bytes == machine_facts(before, 2).host_bytes
    tensors = machine_facts(replace(machine, host_own_bytes=1 << 50), 1)  # not libraries, and not counted as such
    assert tensors.host_bytes == machine.host_available_bytes + tensors.runtime_host_bytes
