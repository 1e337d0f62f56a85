"""Weights that forward rounds while training: what the plan counts, what is refused, and when a run may go on."""

from typing import Any

import pytest
import torch

from deepstow.strategies.core.facts import UnitKind
from deepstow.strategies.engine.tensors import quantised
from deepstow.trainer.config.load import load_tree
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.model.count_cache import name_of
from deepstow.trainer.model.stubs import fake_tensors
from deepstow.trainer.model.temporaries import count
from deepstow.trainer.planning.facts import count_model
from deepstow.trainer.planning.from_config import check_options, measure
from deepstow.trainer.recipes.quantize import Quantize
from deepstow.trainer.run.checkpoints.resume_rules import compare
from tests.helpers.tiny import ENDS, GPT2, HEADS, LLAMA, run_config

GROUP, WEIGHTS = 16, 4 * 32 * 32 - 2 * 16 * 32 + 3 * 32 * 64  # of the linear layers of a block
EVALUATED = {"eval_fraction": 0.1}
TRAINED: dict[str, Any] = {"formats": ["int4_group"], "qat": "int4_group", "group_size": GROUP}


def config_of(quantize: Any, config: Any = LLAMA, data: Any = EVALUATED, **more: Any) -> Any:
    strategies, sections = more.pop("strategies", {}), more.pop("sections", {})
    tree = run_config(config, data=data, **more).tree()
    return load_tree({**tree, "quantize": quantize, "strategies": strategies, **sections})


def test_two_tensors_of_each_weight_wait_for_backward() -> None:
    """And two scales for each group. Embedding and head are as they were."""
    configs = [config_of({**TRAINED, **each}) for each in ({"qat": None}, {}, {"group_size": 32})]
    assert len({name_of(each) for each in configs}) == 3, "counts that are kept in a file"
    units, rounded = (count_model(each).units for each in configs[:2])
    assert len(units) == len(rounded) > 2
    for before, after in zip(units, rounded, strict=True):
        more = 4 * 2 * (WEIGHTS + WEIGHTS // GROUP) if before.kind is UnitKind.BLOCK else 0
        assert after.saved_bytes - before.saved_bytes == more, before.name
        assert after.num_params == before.num_params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_counted_is_what_torchao_saves(dtype: torch.dtype) -> None:
    pytest.importorskip("torchao", reason="needs torchao: pip install 'deepstow[torchao]'")
    import transformers

    config = config_of(TRAINED)

    def units(how: Any) -> Any:
        with torch.device("meta"):
            sizes = transformers.AutoConfig.for_model(**LLAMA)
            model = transformers.AutoModelForCausalLM.from_config(sizes, dtype=dtype)
        how(model, config)
        with fake_tensors(), quantised.counted_with(model, lambda meta: torch.empty_like(meta, device="cpu")):
            ids = torch.zeros(2, 16, dtype=torch.long)
            found = count(model, lambda: model(input_ids=ids, labels=ids)).units()
        assert all(getattr(each, "scale", None) is None for each in model.modules()), "of no use after forward"
        return found

    for ours, theirs in zip(units(Quantize().counted), units(Quantize().apply), strict=True):
        assert (ours.name, ours.num_params, ours.saved_bytes) == (theirs.name, theirs.num_params, theirs.saved_bytes)
        assert ours.temporaries.forward == pytest.approx(theirs.temporaries.forward, rel=0.05)
        assert ours.temporaries.backward == theirs.temporaries.backward


@pytest.mark.parametrize(
    ("quantize", "more", "line"),
    [
        ({"qat": "nf4"}, {}, 'quantize.qat = "nf4": must be one of int8_group, int4_group'),
        ({"group_size": 1}, {}, "quantize.group_size = 1: must be a whole number >= 2"),
        ({"formats": ["int8_group"]}, {}, 'quantize.qat = "int4_group": must be one of quantize.formats'),
        ({"llm_int8_skip_modules": ["lm_head"]}, {}, "quantize.llm_int8_skip_modules = ["),
        ({}, {"model": {"lora": {"r": 2}}}, "model.lora = "),
        ({}, {"sections": {"prune": {}}}, "prune = "),
        ({}, {"sections": {"distill": {"teacher": "one"}}}, "distill = "),
        ({}, {"torch_compile": True}, "training.torch_compile = true: has not been compared with quantize.qat"),
        ({}, {"use_liger_kernel": True}, "training.use_liger_kernel = true: has not been compared"),
        ({}, {"fp16": True}, "training.fp16 = true: has not been compared"),
        (
            {},
            {"strategies": {"linear": {}}},
            'quantize.qat = "int4_group": strategies.linear chooses products of layers',
        ),
    ],
)
def test_refused(quantize: Any, more: Any, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_of({**TRAINED, **quantize}, **more)
    (found,) = error.value.lines
    assert line in found


@pytest.mark.parametrize(("strategies", "ranks"), [({}, 2), ({"zero": {"stage": 1}}, 1)])
def test_one_rank_that_has_all_of_each_weight(strategies: Any, ranks: int) -> None:
    with pytest.raises(ConfigError, match=r'quantize\.qat = "int4_group": (is for one rank|DeepSpeed)'):
        check_options(config_of(TRAINED, strategies=strategies), ranks, installed=False)


def test_blocks_are_not_timed_without_it() -> None:
    with pytest.raises(ConfigError, match="--measure: blocks are timed without the rounding"):
        next(measure(config_of(TRAINED, strategies={"offload": {}}), Ranks(), probe(), print))


@pytest.mark.parametrize(
    ("config", "size", "line"),
    [
        (LLAMA, 48, "quantize.group_size = 48: does not divide the 32 inputs of model.layers.0.self_attn.q_proj; 16"),
        (LLAMA, 3, "quantize.group_size = 3: does not divide the 32 inputs of model.layers.0.self_attn.q_proj; 2 does"),
        (GPT2, GROUP, "a gpt2 model has none"),
    ],
)
def test_refused_by_the_plan(config: Any, size: int, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        count_model(config_of({**TRAINED, "group_size": size}, config))


def test_layers_with_a_forward_of_their_own() -> None:
    """torchao would replace them by layers that compute without it."""
    config = {**HEADS, **ENDS, "model_type": "falcon"}
    with pytest.raises(ConfigError, match=r'quantize\.qat = "int4_group": torchao trains .* is a FalconLinear, which'):
        count_model(config_of(TRAINED, config))
    count_model(config_of({**TRAINED, "qat": None}, config))


@pytest.mark.parametrize("now", [{"qat": None}, {"group_size": 32}, {"qat": "int8_group"}])
def test_a_run_goes_on_as_it_rounded(now: Any) -> None:
    formats = {"formats": ["int4_group", "int8_group"]}
    saved, other = (config_of({**TRAINED, **formats, **each}).tree() for each in ({}, now))
    (refused,) = compare(saved, other, (1, 1), "checkpoint-8").refused
    assert "training.allow_change: [qat]" in refused.what and refused.key == f"quantize.{next(iter(now))}"
    other["training"]["allow_change"] = ["qat"]
    assert compare(saved, other, (1, 1), "checkpoint-8").refused == []
    without = [{**tree, "quantize": {"group_size": size}} for tree, size in ((saved, 32), (other, 64))]
    assert compare(*without, (1, 1), "checkpoint-8").refused == []
