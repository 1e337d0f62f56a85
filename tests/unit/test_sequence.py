"""Sequence parallelism without ranks: what is refused, one rank's slice in numbers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepstow.strategies.core import protocol
from deepstow.strategies.core.grid import Cell, Grid
from deepstow.strategies.core.plan import Kind
from deepstow.strategies.experts import Experts
from deepstow.strategies.parallel import varlen
from deepstow.strategies.parallel.ulysses import Ulysses
from deepstow.strategies.sequence import Sequence
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.planning import facts
from deepstow.trainer.planning.from_config import check_options, plan_of
from deepstow.trainer.run.checkpoints.training_state import _stream_of
from tests.helpers.refused import lines_of
from tests.helpers.releases import needs
from tests.helpers.tiny import LLAMA, run_config

CONFIG = """\
model:
  config: {model_type: llama, hidden_size: 48, num_attention_heads: 6, num_key_value_heads: 2, intermediate_size: 96}
  tokenizer: none
data: {path: missing.jsonl}
training: {output_dir: run}
strategies:
  sequence: {degree: 2}
"""
# Numbers and models; what does not go together is in docs/compatibility.md, which is written from the rules.
CASES: list[tuple[list[str], str]] = [
    (["training.neftune_noise_alpha=5"], "its noise depends on the length of a row, of which a rank has a slice; keep"),
    (["strategies.sequence.degree=4"], "is 6: each rank computes whole heads; write 2, 3, 6; torch's ring attention"),
    (["model.config.model_type=gemma"], "gemma was not compared with plain training; architectures that were: llama,"),
    (["model.config.attention_dropout=0.1"], "ranks would drop the same places of other heads; write 0"),
    (["model.config.rope_parameters={rope_type: dynamic, factor: 2.0, rope_theta: 1e4}"], "rope_type dynamic: its rot"),
    (["task=classification", "model.labels=[a, b]"], "divides the layers of language models, and cannot train task"),
]


@needs("sequence")
@pytest.mark.parametrize(("overrides", "line"), CASES, ids=[overrides[0] for overrides, _ in CASES])
def test_refused_before_data_is_read(
    overrides: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of(CONFIG, overrides, 4, tmp_path, monkeypatch)
    assert line in lines[0], lines


def test_a_world_of_other_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="one replica takes sequence 2 = 2 ranks: start 2 or 4 ranks, not 3"):
        check_options(run_config(strategies={"sequence": {"degree": 2}}), 3)


def test_the_grid() -> None:
    grid = Grid(stages=2, replicas=2, tensor=2, slices=3)
    assert [grid.rank(grid.cell(rank)) for rank in range(24)] == list(range(24))
    assert grid.cell(21) == Cell(stage=1, replica=1, tensor=1, slice=1)
    assert Grid(replicas=2, slices=2).groups("slice") == [[0, 1], [2, 3]]
    assert str(Grid(replicas=2, slices=3)) == "data 2 x sequence 3"


def test_ranks_of_a_row_draw_the_same_numbers_and_one_writes_their_state() -> None:
    grid = Grid(replicas=2, slices=2)
    ranks = [
        SimpleNamespace(execution=SimpleNamespace(grid=grid), args=SimpleNamespace(process_index=n)) for n in range(4)
    ]
    assert [_stream_of(rank) for rank in ranks] == [(0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False)]


def test_one_ranks_slice() -> None:
    """Saved and computed as the rows divide, weights whole; ranks of a row share ZeRO's state with all others."""

    def counted(**strategies: Any) -> facts.ModelCount:
        return facts.count_model(run_config(LLAMA, data={"max_length": 64, "packing": True}, strategies=strategies))

    whole, part = counted(), counted(sequence={"degree": 4})
    assert [unit.num_params for unit in part.units] == [unit.num_params for unit in whole.units]
    assert part.model_flops == 4 * part.forward_flops and part.model_params == 0
    assert part.model_flops == pytest.approx(whole.forward_flops, rel=0.01)
    block = [each.units[1].saved_bytes for each in (whole, part)]
    assert 0.2 < block[1] / block[0] < 0.3
    strategies = {"sequence": {"degree": 2}, "zero": {"stage": 1}}
    plan = plan_of(run_config(strategies=strategies), Ranks(world_size=4, local_world_size=4), probe())
    run = plan.facts.run
    assert (run.replicas, run.copies, run.tokens_per_step) == (2, 4, 2 * run.micro_batch * run.sequence)
    assert {plan.share(unit.name, Kind.MOMENT).shards for unit in plan.facts.units} == {4}


def test_slices_cover_every_token_once() -> None:
    """Rows of 10 over three ranks: two more tokens are padding, each label is that of the next token, and documents are
    where positions start again.
    """
    ids = torch.arange(1, 21).view(2, 10)
    positions = torch.stack([torch.arange(10), torch.cat([torch.arange(4), torch.arange(6)])])
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    parts = [Ulysses(3, place, None).slice_of(batch) for place in range(3)]
    whole = {name: torch.cat([part[name] for part in parts], dim=1) for name in ("input_ids", "labels", "position_ids")}
    assert torch.equal(whole["input_ids"], torch.nn.functional.pad(ids, (0, 2)))
    assert torch.equal(whole["labels"], torch.nn.functional.pad(ids[:, 1:], (0, 3), value=-100))
    assert torch.equal(whole["position_ids"], torch.cat([positions, torch.tensor([[0, 1]]).expand(2, -1)], dim=1))
    assert all(part[varlen.DOCUMENTS].lengths == ((10, 2), (4, 6, 2)) for part in parts)
    one = Ulysses(2, 0, None).slice_of({"input_ids": ids, "labels": ids})
    assert one[varlen.DOCUMENTS].are_rows and one["position_ids"].shape == (2, 5)


@pytest.mark.parametrize("strategy", [Sequence(degree=2), Experts(degree=2)])
def test_releases_that_were_not_compared_are_refused(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "version", lambda package: "5.23.0")
    strategy.check_installed()
    monkeypatch.setattr(protocol, "version", lambda package: "5.22.1")
    with pytest.raises(protocol.Refusal, match=r"under transformers 5.23, not 5.22.1; install 5.23"):
        strategy.check_installed()
