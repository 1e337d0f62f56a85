"""Tensor parallelism without ranks: what is refused, one rank's part in numbers, masks of dropout."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepstow.strategies.core.grid import Grid
from deepstow.strategies.parallel import tensor_shards
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.planning import facts
from deepstow.trainer.planning.from_config import check_options, plan_of
from tests.helpers.refused import lines_of
from tests.helpers.tiny import GPT2, LLAMA, OPT, run_config

CONFIG = """\
model:
  config: {model_type: llama, hidden_size: 48, num_attention_heads: 6, num_key_value_heads: 6, intermediate_size: 96}
  tokenizer: none
data: {path: missing.jsonl}
training: {output_dir: run}
strategies:
  tensor: {degree: 2}
"""
KINDS = "architectures that can be divided: llama, mistral, opt, qwen2, qwen3; others with strategies.zero alone"
# Numbers and models; what does not go together is in docs/compatibility.md, which is written from the rules.
CASES: list[tuple[list[str], str]] = [
    (["strategies.linear={}"], "it replaces products of whole layers; leave strategies.linear out"),
    (["strategies.tensor.degree=4"], "= 4: must divide model.config.num_attention_heads, which is 6; write 2, 3 or 6"),
    (["model.config.intermediate_size=97"], "which is 97; no degree divides all of its sizes; leave it out"),
    (["model.config.model_type=mixtral"], f"three dimensions, which AutoTP does not divide; {KINDS}"),
    (["model.config.model_type=gemma"], f"gemma was not compared with plain training; {KINDS}"),
    (
        ["strategies.tensor.chunks=3", "training.per_device_train_batch_size=4"],
        "must divide the rows of a micro-batch, training.per_device_train_batch_size = 4; write 1, 2 or 4",
    ),
    (["strategies.tensor.exchange.codec=block"], "are sent as they are; write bits: 8 or bits: 4, or leave codec out"),
]


@pytest.mark.parametrize(("overrides", "line"), CASES, ids=[overrides[0] for overrides, _ in CASES])
def test_refused_before_data_is_read(
    overrides: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of(CONFIG, overrides, 4, tmp_path, monkeypatch)
    assert line in lines[0], lines
    keys = ("x.yaml:7: strategies.tensor.degree = 2", f"command line: {overrides[0].split('=')[0]} = ")
    assert lines[0].startswith(keys), lines


def test_gpt2_and_a_world_of_other_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="GPT-2 has queries, keys and values in one Conv1D, which AutoTP does not"):
        counted(GPT2, tensor={"degree": 2})
    with pytest.raises(ConfigError, match="sequence_parallel = true: opt was not compared with plain training"):
        counted(OPT, tensor={"degree": 2, "sequence_parallel": True})
    for more, words in (({"chunks": 2}, "chunks = 2: opt"), ({"exchange": {"bits": 8}}, "exchange = .*: opt")):
        with pytest.raises(ConfigError, match=f"{words} was not compared with plain training"):
            counted(OPT, tensor={"degree": 2, **more})
    for ranks, instead in ((3, "start 2 or 4 ranks, not 3"), (1, "start 2 ranks, not 1$")):
        with pytest.raises(ConfigError, match=f"one replica takes tensor 2 = 2 ranks: {instead}"):
            check_options(run_config(strategies={"tensor": {"degree": 2}}), ranks)


def counted(config: dict[str, Any], **strategies: Any) -> facts.ModelCount:
    return facts.count_model(run_config(config, strategies=strategies))


@cache
def whole_llama() -> facts.ModelCount:
    return counted(LLAMA, zero={"stage": 1})


@pytest.mark.parametrize("model", [LLAMA, OPT], ids=["llama", "opt"])
def test_one_ranks_part(model: dict[str, Any]) -> None:
    """Weights by formula; what forward saves and computes is between a half and all of it."""
    whole = whole_llama() if model is LLAMA else counted(model, zero={"stage": 1})
    part = counted(model, tensor={"degree": 2})
    assert (part.model_params, part.model_flops) == (sum(u.num_params for u in whole.units), whole.forward_flops)
    width, inner, block = 32, 64, (whole.units[1].num_params, part.units[1].num_params)
    if model is LLAMA:
        attention = 2 * width * width + 2 * width * width // 2  # two heads of keys and of values
        assert block[0] - block[1] == (attention + 3 * width * inner) // 2
        head = whole.units[-1].num_params - width  # the norm is whole
        assert part.units[-1].num_params - width == head // 2
    else:
        divided = 4 * width * width + 3 * width + 2 * width * inner + inner  # two biases are whole
        assert block[0] - block[1] == divided // 2
        assert part.units[-1] == whole.units[-1] and part.tied, "a tied head is whole"
    assert 0.5 < part.units[1].saved_bytes / whole.units[1].saved_bytes < 1
    assert 0.5 <= part.forward_flops / whole.forward_flops < 0.6


def test_a_slice_of_the_tokens() -> None:
    """Between layers a half as well is saved, and what ranks send each other is not."""
    counts = [whole_llama(), counted(LLAMA, tensor={"degree": 2, "sequence_parallel": True})]
    whole, part = (count.units[1].saved_bytes for count in counts)
    assert 0.48 < part / whole < 0.5  # keys and values of groups of heads are repeated, of which a rank has fewer
    operators = counts[1].units[1].choices.operators
    tokens, width, inner = 8 * 16, 32, 64
    sizes = {"q": width // 2, "k": width // 4, "v": width // 4, "o": width // 2, "gate": inner // 2, "up": inner // 2}
    assert [each.num_bytes for each in operators if "linear" in each.name] == [4 * tokens * n for n in sizes.values()]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.drop(hidden)


class Model(nn.Module):
    """Dropout before, inside and after attention; the outputs of each one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"attention_dropout": 0.5})()
        self.self_attn, self.drop = Attention(), nn.Dropout(0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.drop(hidden), self.self_attn(hidden), self.self_attn(hidden), self.drop(hidden)])


def masks(monkeypatch: pytest.MonkeyPatch, rank: int, *, recomputed: bool = False) -> torch.Tensor:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    model, hidden = Model(), torch.ones(64, requires_grad=True)
    assert tensor_shards.apart(model, Grid(replicas=2, tensor=2)) == 1
    torch.manual_seed(7)
    found = checkpoint(model, hidden, use_reentrant=False) if recomputed else model(hidden)
    found.sum().backward()
    assert torch.equal(hidden.grad, found.detach().sum(0)), "backward has the masks of forward"
    return torch.cat([found.detach(), torch.rand(1, 64)])


def test_masks_of_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = masks(monkeypatch, 2), masks(monkeypatch, 3)
    for place, same in enumerate((True, False, False, True, True)):
        assert torch.equal(first[place], second[place]) is same, place
    assert not torch.equal(first[1], first[2]) and not torch.equal(first[1], first[0])
    assert torch.equal(masks(monkeypatch, 0), first), "the ranks of another copy are given other rows"
    assert torch.equal(masks(monkeypatch, 3, recomputed=True), second)
    model = Model()
    model.config.attention_dropout = 0.0
    assert tensor_shards.apart(model, Grid(tensor=2)) == 0 and not model.self_attn._forward_hooks


@pytest.mark.slow
def test_parts_of_one_size_beside_the_memory_engine() -> None:
    """The plan of the first rank is that of all: an odd head is refused, a tied one and one that divides are not."""
    made = {"tensor": {"degree": 2}, "offload": {}}
    ranks = Ranks(world_size=2, local_world_size=2)
    tied = {**LLAMA, "vocab_size": 129, "tie_word_embeddings": True}
    for model in (LLAMA, {**LLAMA, "vocab_size": 130}, tied):  # 130: parts of 65, which two would not divide again
        assert plan_of(run_config(model, strategies=made), ranks, probe()).layout is not None
    with pytest.raises(ConfigError, match=r"degree = 2: must divide the words of the head beside strategies\.offload"):
        plan_of(run_config({**LLAMA, "vocab_size": 129}, strategies=made), ranks, probe())


def test_ranks_of_a_copy_agree_on_a_step_before_the_memory_engine_updates() -> None:
    """One of them may have found what is not finite, so no update starts in backward."""
    ranks = Ranks(world_size=2, local_world_size=2)
    made: dict[str, Any] = {"tensor": {"degree": 2}, "offload": {}}
    layout = plan_of(run_config(LLAMA, strategies=made, max_grad_norm=0), ranks, probe()).layout
    assert layout is not None and not layout.in_backward
