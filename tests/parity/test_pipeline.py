"""Pipelines on two real ranks against one process that accumulates: every schedule, by bits.

Micro-batches differ in length, the last has fewer rows, and some steps have fewer of them, as at the end of an epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from deepstow.strategies.core.grid import Grid
from deepstow.strategies.parallel.pipeline_gradients import StageGradients
from deepstow.strategies.parallel.pipelining import Pipeline
from deepstow.strategies.parallel.stages import CannotCut, Stage, form_of
from deepstow.strategies.planner.cuts import Schedule
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.execution.pipeline import own_numbers
from deepstow.trainer.run.stage_trial import form_of_stages
from tests.helpers.models import causal
from tests.helpers.releases import RETURNS
from tests.helpers.tiny import LLAMA, run_config

STEPS = (4, 4, 3, 1, 5)  # micro-batches of each step
NORM = 0.05
STAGES: dict[str, Any] = {"pipeline": {"stages": 2}}
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def model_of(kind: str, **config: Any) -> Any:
    return causal(kind, use_cache=False, **{**SMALL, **config})


def micro_batches(step: int, count: int) -> Iterator[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(step)
    for number in range(count):
        rows = 1 if number == count - 1 else 2
        ids = torch.randint(1, 128, (rows, 10 + int(torch.randint(0, 8, (1,), generator=draw))), generator=draw)
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_of(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = model(**inputs, num_items_in_batch=50).loss
    return loss


def expected(tied: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Losses and norms of each step, and the weights after them, of one process."""
    model = model_of("llama", tie_word_embeddings=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    for step, count in enumerate(STEPS):
        losses = [loss_of(model, each) for each in micro_batches(step, count)]
        for loss in losses:
            loss.backward()
        seen.append(([loss.item() for loss in losses], clip_grad_norm_(model.parameters(), NORM).item()))
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: param.detach() for name, param in model.named_parameters()}


def pipelined(ranks: Ranks, schedule: str, tied: bool) -> dict[str, Any]:
    """The same on two stages; each rank compares what it has."""
    kind = Schedule(schedule)
    model = model_of("llama", tie_word_embeddings=tied)
    form = form_of(model_of("llama", tie_word_embeddings=tied), next(micro_batches(0, 2)))
    blocks = [f"model.layers.{index}" for index in range(4)]
    parts = [blocks[:1], blocks[1:]] if kind.parts_per_stage == 1 else [[block] for block in blocks]
    mine = [part for part in range(len(parts)) if kind.stage_of(part, 2) == ranks.rank]
    stage = Stage(model, parts, mine, form)
    group = dist.group.WORLD
    assert group is not None
    pipeline = Pipeline(stage, kind, group, torch.device("cpu"))
    gradients = StageGradients(pipeline, alone(ranks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen, waiting = [], list[tuple[int, int]]()
    for step, count in enumerate(STEPS):
        losses = pipeline.step(list(micro_batches(step, count)), lambda inputs: loss_of(model, inputs))
        waiting += under_way(pipeline, kind, count)
        gradients.complete()
        seen.append((losses.tolist(), gradients.clip(NORM).item()))
        optimizer.step()
        optimizer.zero_grad()
    wanted, weights = expected(tied)
    there = stage.names()
    far = {name: float((there[name] - weights[name]).abs().max()) for name in there}
    everyones: list[Any] = [None, None]
    about = {"same": seen == wanted, "names": list(there), "far": max(far.values()), "waiting": waiting}
    dist.all_gather_object(everyones, about)
    return {"ranks": everyones, "whole": list(weights)}


def alone(ranks: Ranks) -> dist.ProcessGroup:
    """A group of this rank."""
    made: list[dist.ProcessGroup] = [dist.new_group([rank]) for rank in range(2)]
    return made[ranks.rank]


def under_way(pipeline: Pipeline, kind: Schedule, count: int) -> Iterator[tuple[int, int]]:
    """Of each part here: micro-batches between forward and backward in torch's schedule, and as planned."""
    assert pipeline._made is not None
    order = getattr(pipeline._made[1], "pipeline_order", None)
    if not kind.takes(count, pipeline.stages):  # what was left over went through one by one
        yield pipeline._made[0][0], 1
        return
    if order is None:
        return
    now, most = Counter[int](), Counter[int]()
    for action in filter(None, order[pipeline.position]):
        for each in action.sub_actions or (action,) if hasattr(action, "sub_actions") else (action,):
            what = each.computation_type.name
            now[each.stage_index] += {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_INPUT": -1}.get(what, 0)
            most[each.stage_index] = max(most[each.stage_index], now[each.stage_index])
    for part, seen in most.items():
        yield seen, kind.in_flight(part, 2, count)


def in_turn(ranks: Ranks, schedules: list[str], tied: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``pipelined`` by each schedule, with a head of its own and with a tied one."""
    return {each: pipelined(ranks, each, False) for each in schedules}, {e: pipelined(ranks, e, True) for e in tied}


@pytest.mark.ranks
def test_bits_of_one_process() -> None:
    """But with a tied head: its gradients are added in another order (1f1b), or one of them is computed apart (zbv)."""
    here = [each.value for each in Schedule if RETURNS or not each.returns]
    found, tied = run_world(2, in_turn, here, [each for each in ("1f1b", "zbv") if each in here], deepspeed=False)
    for schedule, each in found.items():
        ranks = each["ranks"]
        assert [one["same"] for one in ranks] == [True, True], f"{schedule}: losses and norms"
        assert max(one["far"] for one in ranks) == 0.0, schedule
        assert sorted(name for one in ranks for name in one["names"]) == sorted(each["whole"]), schedule
        waiting = [pair for one in ranks for pair in one["waiting"]]
        assert waiting and all(seen <= planned for seen, planned in waiting), schedule
    for schedule, each in tied.items():
        assert max(one["far"] for one in each["ranks"]) < 1e-5, f"{schedule}: five steps of AdamW with a rate of 1e-2"


KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "num_key_value_heads": 2},
    "gemma2": {"head_dim": 16, "num_key_value_heads": 2},
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 32},
    "gpt_neox": {},
    "bloom": {"n_layer": 4, "n_head": 4},
    "mamba": {"state_size": 8},
}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_this_architecture_run_apart(kind: str) -> None:
    """``form_of`` itself compares loss and gradients of parts with those of the whole, by bits."""
    form = form_of(model_of(kind, **KINDS[kind]), next(micro_batches(0, 2)))
    assert form.width == 64
    assert ("model.decoder.project_in" in form.front) == (kind == "opt"), (
        "called in front of the blocks, defined behind"
    )


def test_a_model_with_another_module_than_its_small_copy_is_refused() -> None:
    form = form_of(model_of("llama"), next(micro_batches(0, 2)))
    other = model_of("llama")
    other.model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(CannotCut, match=r"model.extra is not both in the model and in the small copy"):
        Stage(other, [[f"model.layers.{index}"] for index in range(4)], [0], form)


def out_of_memory(*given: object, **how: object) -> Any:
    raise torch.OutOfMemoryError("nothing left")


def short_of_memory(ranks: Ranks) -> list[str]:
    """What is raised if memory ends in the forward and in the backward of the only stage."""
    return [_short_of_memory(ranks, where) for where in ("forward", "backward")]


def _short_of_memory(ranks: Ranks, where: str) -> str:
    model = model_of("llama")
    batches = list(micro_batches(0, 2))
    layers = [f"model.layers.{index}" for index in range(4)]
    stage = Stage(model, [layers], [0], form_of(model_of("llama"), batches[0]))
    pipeline = Pipeline(stage, Schedule.GPIPE, alone(ranks), torch.device("cpu"))
    if where == "forward":
        model.model.layers[1].register_forward_hook(out_of_memory)
    else:
        model.model.layers[1].mlp.register_full_backward_hook(out_of_memory)
    with pytest.raises(Exception) as caught:
        pipeline.step(batches, lambda inputs: loss_of(model, dict(inputs)))
    dist.barrier()  # the first rank to end takes the store along
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.ranks
def test_a_shortage_of_memory_in_a_stage_is_one() -> None:
    assert run_world(2, short_of_memory, deepspeed=False) == ["OutOfMemoryError: nothing left"] * 2


def used_apart(ranks: Ranks) -> list[Any]:
    """Gradients on two copies of a model, each of which has used a weight of its own, and neither the third."""
    model = torch.nn.ParameterDict({name: torch.ones(2) for name in "abc"})
    stage = SimpleNamespace(names=lambda: dict(model.named_parameters()), whole=model)
    pipeline: Any = SimpleNamespace(group=alone(ranks), stage=stage, stages=1, position=0)
    name = "ab"[ranks.rank]
    model[name].grad = torch.full((2,), 2.0 + ranks.rank)
    assert dist.group.WORLD is not None
    StageGradients(pipeline, dist.group.WORLD).complete()
    everyones: list[Any] = [None, None]
    grads = {name: None if param.grad is None else param.grad.tolist() for name, param in model.named_parameters()}
    dist.all_gather_object(everyones, grads)
    return everyones


@pytest.mark.ranks
def test_copies_that_used_other_weights_agree() -> None:
    assert run_world(2, used_apart, deepspeed=False) == [{"a": [1.0, 1.0], "b": [1.5, 1.5], "c": None}] * 2


def test_parts_draw_numbers_of_their_own() -> None:
    """Others on each rank, at each step and in each forward; the generator that samplers use is as it was."""

    def drawn(rank: int, step: int, forwards: int, tensor: int = 1) -> list[float]:
        grid = Grid(stages=2, tensor=tensor)
        found = []
        for number in range(forwards):
            with own_numbers(grid, rank, seed=1, step=step, drawn=number, device=torch.device("cpu")):
                found.append(torch.rand(()).item())
        return found

    before = torch.get_rng_state()
    seen = [number for rank in range(2) for step in range(2) for number in drawn(rank, step, 2)]
    assert len({*seen}) == 8
    assert seen[:2] == drawn(0, 0, 2), "the same in a run that is resumed"
    first, second, *others = (drawn(rank, 0, 1, tensor=2) for rank in range(4))
    assert first == second != others[0] == others[1], "the same on ranks that divide the layers of a stage"
    assert torch.equal(torch.get_rng_state(), before)


OPT = {"model_type": "opt", "ffn_dim": 128, **{key: SMALL[key] for key in SMALL if key != "intermediate_size"}}
APART = {**OPT, "tie_word_embeddings": False}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # A stage whose first block is left out would go on with zeros, and a trial without dropout does not see it.
    "left out at random": ({**OPT, "layerdrop": 0.1}, {}, "opt cannot be cut into stages: model.config.layerdrop"),
    "tied head": ({**LLAMA, "tie_word_embeddings": True}, {"offload": {}}, "its head is tied to the embedding"),
    # OPT defines its last norm in front of its blocks.
    "planned in another stage than it runs in": (
        APART, {"offload": {}}, "model.decoder.final_layer_norm is defined on one side of the blocks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    model, others, line = REFUSED[case]
    with pytest.raises(ConfigError, match=line):
        form_of_stages(run_config(model, strategies={**STAGES, **others}))


def test_what_is_refused_beside_offload_goes_without() -> None:
    assert form_of_stages(run_config(APART, strategies=STAGES)) is not None
    assert form_of_stages(run_config(LLAMA, strategies={**STAGES, "offload": {}})) is not None


def test_blocks_that_need_more_than_hidden_states_are_refused() -> None:
    model, twice = model_of("llama"), model_of("llama")
    token = torch.ones(1, 1, dtype=torch.long)
    for changed, at, hook, line in (
        (model, 2, lambda module, given, kwargs, out: out + model.model.embed_tokens(token), "results differ"),
        (twice, 1, lambda module, given, kwargs, out: twice.model.layers[0](out, **kwargs), "not run each block once"),
    ):
        changed.model.layers[at].register_forward_hook(hook, with_kwargs=True)
        with pytest.raises(CannotCut, match=line):
            form_of(changed, next(micro_batches(0, 2)))
