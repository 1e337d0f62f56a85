"""Which weights are pruned, when, and which configs are refused."""

from typing import Any

import pytest
import torch
from torch.nn.utils import prune as torch_prune
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.engine.updating.optim import zeros_stay
from deepstow.trainer.config.load import load_tree
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.planning.from_config import check_options, plan_of
from deepstow.trainer.recipes.prune import CHOICE_BYTES, ZEROS, PruneSection
from deepstow.trainer.recipes.prune.pruning import layers_of
from deepstow.trainer.recipes.prune.rounds import matches, rounds
from deepstow.trainer.recipes.prune.zeros import chosen, smallest
from tests.helpers.models import build
from tests.helpers.tiny import GPT2, run_config


def test_the_smallest_go_and_of_equal_ones_the_first() -> None:
    scores = torch.tensor([[2.0, 1.0, 1.0, 1.0], [0.0, 0.0, 3.0, 3.0]])
    assert smallest(scores, 2).int().tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]
    assert smallest(scores, 3).int().tolist() == [[0, 1, 1, 1], [1, 1, 1, 0]]
    assert not smallest(scores, 0).any()


def test_magnitude_is_that_of_torch() -> None:
    weight = torch.randn(12, 16)
    mask = torch_prune.L1Unstructured(amount=0.3).compute_mask(weight, torch.ones_like(weight))
    assert torch.equal(chosen(weight, "magnitude", 0.3), mask == 0)


def test_wanda_compares_the_weights_of_an_output() -> None:
    """The smallest weight stays where its input is large."""
    weight, norms = torch.tensor([[-1.0, 2.0, 3.0, 4.0], [10.0, 20.0, -30.0, 40.0]]), torch.tensor([9.0, 1.0, 1.0, 0.1])
    assert chosen(weight, "wanda", 0.5, norms).int().tolist() == [[0, 1, 0, 1], [0, 1, 0, 1]]


@pytest.mark.parametrize("conv", [False, True])
def test_two_of_four_is_the_format_of_torch(conv: bool) -> None:
    """Packed by torch's own conversion, which has room for two of four along the input, and unpacked to the same."""
    weight = torch.randn(64, 32).t() if conv else torch.randn(32, 64)
    pruned = weight.masked_fill(chosen(weight, "2:4", 0.5), 0.0).bfloat16().contiguous()
    assert int(pruned.count_nonzero()) == pruned.numel() // 2
    packed, meta = sparse_semi_structured_from_dense_cutlass(pruned)
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(packed, meta), pruned)


def test_layers_are_those_of_blocks_by_output() -> None:
    """GPT-2's have their inputs first; embeddings, norms and the head are none of them."""
    model = build("gpt2")
    found = layers_of(model, config_of({"method": "2:4"}, config=GPT2))
    assert {layer.group for layer in found} == {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    up = next(layer for layer in found if layer.group == "mlp.c_fc")
    assert up.by_output(up.weight).shape == (4 * up.weight.shape[0], up.weight.shape[0])
    odd = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(6, 4))])
    with pytest.raises(ConfigError, match=r'prune.method = "2:4": 0.0 has 6 inputs'):
        layers_of(odd, config_of({"method": "2:4"}))
    with pytest.raises(ConfigError, match=r'prune.modules = "c_fc": no linear layer .*: attn.c_attn, attn.c_proj'):
        layers_of(model, config_of({"modules": "c_fc"}, config=GPT2))


def test_zeros_stay_and_others_move() -> None:
    weight = torch.nn.Parameter(torch.tensor([0.0, -0.0, 1.0]))
    with zeros_stay([weight]), torch.no_grad():
        weight.sub_(torch.tensor([0.5, 0.5, 1.0]))
    assert weight.tolist() == [0.0, 0.0, 0.0]  # the last one, which was alive, is zero by its update


def test_rounds() -> None:
    cubic = rounds(PruneSection(sparsity=0.8, until=0.5, rounds=2), 8)
    assert cubic == {2: pytest.approx(0.8 * (1 - 0.5**3)), 4: 0.8}
    assert rounds(PruneSection(until=0.9, rounds=99), 4) == {
        1: pytest.approx(0.5 * 19 / 27),
        2: pytest.approx(0.5 * 26 / 27),
        3: 0.5,
    }
    for once in (PruneSection(schedule="once"), PruneSection(method="2:4")):
        assert rounds(once, 8) == {0: 0.5}
    assert rounds(PruneSection(), 1) == {0: 0.5}


def test_modules_as_peft_reads_them() -> None:
    names = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate_up_proj"]
    found = {
        str(modules): [matches(PruneSection(modules=modules), name) for name in names]
        for modules in (None, ["up_proj"], r".*1\.mlp.*", names[:1], "up_proj")
    }
    assert list(found.values()) == [
        [True, True, True], [True, True, False], [False, True, True], [True, False, False], [False, False, False],
    ]  # fmt: skip


EVALUATED = {"eval_fraction": 0.1}


def config_of(prune: Any, **more: Any) -> Any:
    strategies = more.pop("strategies", {})
    tree = run_config(**more).tree()
    return load_tree({**tree, "prune": prune, "strategies": strategies})


@pytest.mark.parametrize(
    ("prune", "more", "line"),
    [
        ({"sparsity": 1.0}, {}, "prune.sparsity = 1.0: must be a number > 0 and < 1"),
        ({"method": "2:4", "sparsity": 0.7}, {}, "prune.sparsity = 0.7: two of four are half"),
        ({"method": "2:4", "schedule": "cubic"}, {}, 'prune.schedule = "cubic": two of four go at once'),
        ({"modules": "("}, {}, 'prune.modules = "(": is no regular expression'),
        ({}, {"torch_compile": True}, "training.torch_compile = true"),
        ({"method": "wanda"}, {"data": {"streaming": True}, "max_steps": 3}, "data.streaming = true: cannot go"),
        (
            {},
            {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch", "data": EVALUATED},
            "training.load_best_model_at_end = true: the best weights may be of before",
        ),
    ],
)  # fmt: skip
def test_refused(prune: Any, more: Any, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(prune, **more)
    (found,) = error.value.lines
    assert line in found


@pytest.mark.parametrize(
    ("strategies", "ranks"),
    [({"zero": {"stage": 2}}, 1), ({"pipeline": {"stages": 2}}, 2), ({}, 2)],
)
def test_ranks_and_deepspeed_are_refused(strategies: Any, ranks: int) -> None:
    config = config_of({}, strategies=strategies, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError) as error:
        check_options(config, ranks, installed=False)
    assert any("prune = {" in line and ("one rank" in line or "DeepSpeed" in line) for line in error.value.lines)


def test_priced() -> None:
    """Zeros of all pruned weights, or of a stretch where the engine updates, and the largest matrix on the host."""
    plain, stowed = (
        plan_of(config_of({"modules": ["up_proj", "o_proj"]}, strategies=each), Ranks(), probe())
        for each in ({}, {"offload": {"site": "host"}})
    )
    device, engine = ({each.owner: each.num_bytes for each in one.reserves(Tier.DEVICE)} for one in (plain, stowed))
    assert device[ZEROS] == 2 * (32 * 64 + 32 * 32) and engine[ZEROS] == 32 * 64
    without = plan_of(run_config(strategies={"offload": {"site": "host"}}), Ranks(), probe())
    assert stowed.peak(Tier.DEVICE) == without.peak(Tier.DEVICE) + 32 * 64
    assert stowed.peak(Tier.HOST) == without.peak(Tier.HOST) + CHOICE_BYTES * 32 * 64
    with pytest.raises(ConfigError, match=r'prune.modules = \["up"\]: no layer of a block has such a name'):
        plan_of(config_of({"modules": ["up"]}), Ranks(), probe())
