"""All micro-batches of a step pass a layer before the next: the bits of plain accumulation, whatever moves where.

Rows as in ``test_engine.py``.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.protocol import MemoryRefusal, Refusal
from deepstow.strategies.engine import AdamW, stow
from deepstow.strategies.engine.buckets.bucket_state import BucketState
from deepstow.strategies.engine.forward.checkpointing import recompute
from deepstow.strategies.engine.layers_first import LayersFirst
from deepstow.strategies.engine.residency import Residency
from deepstow.strategies.planner.step_cost import plan_cost, traffic
from deepstow.trainer.config.load import load_tree
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.distributed.stopping import Stop
from deepstow.trainer.errors import ExitCode
from deepstow.trainer.machine.block_timing import SPANS
from deepstow.trainer.planning.plan_for import plan_for
from deepstow.trainer.run import building
from deepstow.trainer.run import session as runs
from deepstow.trainer.run.callbacks.plan_check import PlanCheck
from deepstow.trainer.run.stowed_trainer import stowed as stowed_trainer
from tests.helpers import small_runs
from tests.helpers.doubles import Delayed
from tests.helpers.engine import LR, differences, plain, plan_of, planned, stowed
from tests.helpers.fakes import GPU
from tests.helpers.grid import FORBIDDEN, IN_LAYERS, run, title
from tests.helpers.models import build, causal, tokens
from tests.helpers.moves import OFFLOAD, Kind, common_ends, different
from tests.helpers.pairwise import Table
from tests.helpers.worlds import run_counted
from tests.unit.test_step_cost import FAST

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
COUNT = 4  # micro-batches of a step


def rows(strength: int) -> list[Any]:
    return [pytest.param(row, id=title(row)) for row in Table(IN_LAYERS.factors, FORBIDDEN, strength).rows()]


@pytest.mark.parametrize("row", rows(2))
def test_bits(row: Any) -> None:
    assert run(row, row["dtype"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(3))
def test_bits_any_three_levels(row: Any) -> None:
    assert run(row, row["dtype"]) == []


def batches(number: int = 2 * COUNT + 1) -> list[dict[str, Tensor]]:
    """Of different lengths, with labels that are left out: the number of tokens differs."""
    found = []
    for index, batch in enumerate(tokens("llama", number)):
        cut = {name: value[:, : value.shape[1] - index % 3] for name, value in batch.items()}
        cut["labels"] = cut["labels"].clone()
        cut["labels"][:, : index % 4] = -100
        found.append(cut)
    return found


def made(model: nn.Module, **options: Any) -> Any:
    """The plan of the planner, which has counted a batch."""
    largest = max(batches(), key=lambda batch: batch["labels"].numel())
    given = {"max_grad_norm": 0.5, "accumulation": COUNT, "order": "layers", "eval_rows": 0, "weights": "streamed"}
    return plan_for(model, batch=largest, debug=True, **(given | options))


def both(make: Callable[[], nn.Module], change: Callable[[nn.Module], Any] = lambda model: None, **options: Any) -> Any:
    """Plain training and ours of the planner's plan, and the plan."""
    wanted_of, found_of = make(), make()
    change(wanted_of)
    change(found_of)
    wanted = plain(wanted_of, batches(), accumulation=COUNT, max_norm=0.5)
    plan = made(found_of, **options)
    recompute(found_of, plan)
    how: dict[str, Any] = {"layers": True, "draws": plan.facts.run.draws}
    return wanted, stowed(found_of, plan, batches(), accumulation=COUNT, max_norm=0.5, **how), plan


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": {"policy": "full", "activation_offloading": True}, "gradients": "host"},
        {"recompute": {"policy": "selective", "activation_offloading": True}, "site": "streamed"},
        {"recompute": {"policy": "full", "every": 2}, "cross_entropy": {}, "site": "host"},
    ],
    ids=["inputs on the host", "outputs on the host", "loss by chunks"],
)
def test_what_forward_keeps(options: dict[str, Any]) -> None:
    wanted, found, plan = both(partial(build, "llama"), **options)
    assert differences(wanted, found) == []
    sends = options["recompute"].get("activation_offloading", False)
    assert (plan.hosted_bytes() > 0) is sends


def test_weights_cross_twice_and_gradients_once_whatever_the_accumulation() -> None:
    """And what is measured is what the plan says, where the next weights wait for the address of these."""
    model = build("llama")
    options: dict[str, Any] = {"site": "host", "gradients": "host", "recompute": {"policy": "full"}}
    with pytest.raises(MemoryRefusal) as refused:
        made(model, gpu_memory="1KiB", **options)
    plan = made(model, gpu_memory=refused.value.needed, **options)
    recompute(model, plan)
    optimizer = stow(model, plan, None, AdamW(lr=LR), beside=False)
    steps = []
    for _ in range(3):
        before = optimizer.engine.transfer.bytes_up, optimizer.engine.transfer.bytes_down
        optimizer.backward_all([lambda batch=batch: model(**batch).loss for batch in batches(COUNT)])
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        transfer = optimizer.engine.transfer
        steps.append((transfer.bytes_up - before[0], transfer.bytes_down - before[1]))
    optimizer.close()
    assert plan.layout is not None
    assert steps[-1] == traffic(plan.facts_as_kept(), plan.layout, FAST)
    moving = sum(bucket.weight_bytes for bucket in plan.layout.buckets if not bucket.resident)
    assert moving < steps[-1][0] <= 2 * sum(bucket.weight_bytes for bucket in plan.layout.buckets)


def frozen(model: nn.Module) -> None:
    """The first block and the embedding."""
    for name, param in model.named_parameters():
        param.requires_grad_("layers.0" not in name and "embed" not in name)


def test_what_is_not_trained() -> None:
    wanted, found, _ = both(partial(build, "llama"), frozen)
    assert differences(wanted, found) == []


@pytest.mark.parametrize(
    ("kind", "policy"), [("gpt2", "none"), ("gpt2", "full"), ("bert", "selective"), ("lora", "selective")]
)
def test_dropout(kind: str, policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of embeddings, hidden states, attention and adapters, in micro-batches of different lengths, counted once."""
    make = partial(build, "llama" if kind == "lora" else kind)
    change = dropped if kind == "lora" else lambda model: None
    wanted, found, plan = both(make, change, recompute={"policy": policy}, site="streamed")
    assert plan.facts.run.draws and "is run once more" not in caplog.text
    assert differences(wanted, found) == []


def dropped(model: nn.Module) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.2)
    get_peft_model(model, lora)  # type: ignore[arg-type]


def routed() -> nn.Module:
    """The auxiliary loss is half of all."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    kind = {"vocab_size": 64, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return causal("mixtral", output_router_logits=True, router_aux_loss_coef=0.5, **sizes, **kind)  # type: ignore[no-any-return]


@pytest.mark.parametrize("keeps", [True, False], ids=["known to the plan", "found in the first step"])
def test_a_loss_that_reads_more_of_the_blocks(keeps: bool) -> None:
    wanted = plain(routed(), batches(), accumulation=COUNT, max_norm=0.5)
    model = routed()
    plan = made(model)
    assert plan.facts.run.loss_reads_blocks
    found = stowed(model, plan, batches(), accumulation=COUNT, max_norm=0.5, layers=True, keeps_heads=keeps)
    assert differences(wanted, found) == []


def test_more_rows_of_an_evaluation_than_training_leaves_room_for() -> None:
    """The plan is made anew, in the order that was asked for."""
    model = build("llama")
    with pytest.raises(MemoryRefusal) as refused:
        made(model, gpu_memory="1KiB")
    budget = int(1.3 * refused.value.needed)
    plan = made(model, gpu_memory=budget, eval_rows=16)
    assert plan.facts.run.layerwise == COUNT
    assert plan.facts.run.evaluation_rows == 16 and plan.peak(Tier.DEVICE) <= budget


def test_a_tied_head_differs_by_the_order_of_sums_only() -> None:
    wanted, found, _ = both(partial(build, "llama", tied=True))
    names = differences(wanted, found)
    assert names, "the order is another one"
    for name in (each for each in wanted.tensors if " " not in each):
        # Where contributions cancel, Adam moves a weight by the learning rate in either direction.
        assert torch.allclose(found.tensors[name], wanted.tensors[name], atol=3 * LR, rtol=0)
    assert torch.tensor(found.losses).allclose(torch.tensor(wanted.losses), rtol=1e-3)


# --- runs and plans ---------------------------------------------------------------------------------------------------


def test_a_run_of_a_config(tmp_path: Path) -> None:
    """The export of plain training; the eight micro-batches of a pass make windows of three, three and two, and
    attention has dropout.
    """
    small_runs.make_rows_and_model(tmp_path)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.2}))
    given: dict[str, Any] = {"gradient_accumulation_steps": 3, "max_steps": 4}
    layers = {"offload": {"site": "host", "weights": "streamed", "accumulation": "layers"}}
    wanted = small_runs.ran(small_runs.tree_of(tmp_path, tmp_path / "plain", {}, **given))
    found = small_runs.ran(small_runs.tree_of(tmp_path, tmp_path / "layers", {}, layers, **given))
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    said = (tmp_path / "layers" / "plan.txt").read_text()
    assert "all 3 micro-batches of a step pass a layer before the next" in said


@pytest.mark.parametrize(("more", "drop"), [(0, 0.2), (1, 0.0)], ids=["as planned", "one crossing more"])
def test_the_plan_against_the_run(
    more: int, drop: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes over the link are those of the plan, to the last one: weights that crossed once more in a step are said."""
    block = 0
    fetch = Residency.fetch

    def counted(self: Residency, bucket: BucketState) -> None:
        nonlocal block, more
        fetch(self, bucket)
        if check is not None and check._began is not None and more:
            block, more = bucket.spec.weight_bytes, 0
            fetch(self, bucket)

    class Noted(PlanCheck):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            nonlocal check
            check = self
            super().on_step_begin(*args, **kwargs)

    check: Any = None
    monkeypatch.setattr(Residency, "fetch", counted)
    monkeypatch.setattr(building, "PlanCheck", Noted)
    small_runs.make_rows_and_model(tmp_path)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": drop}))
    offload = {"site": "host", "weights": "streamed", "gradients": "host", "prefetch": 0, "accumulation": "layers"}
    how = {"offload": offload, "recompute": {"policy": "full", "activation_offloading": True}}
    small_runs.ran(small_runs.tree_of(tmp_path, tmp_path / "run", {}, how, max_steps=3))
    rows = json.loads((tmp_path / "run" / "plan.json").read_text())["measured"]
    found = {row["owner"]: (row["predicted"], row["measured"]) for row in rows}
    planned, measured = found["saved for backward"]
    assert measured == pytest.approx(planned, rel=0.02)  # one of the micro-batches; a mask is 0.013 of it
    assert found["link down, step 2"][0] == found["link down, step 2"][1] > 0
    planned, measured = found["link up, step 2"]
    assert measured - planned == block and planned > 0
    assert (len(re.findall("link (up|down) .*, as planned", capsys.readouterr().out)) == 2) is (block == 0)
    marks = check._clock.marks  # of the last step
    together, blocks = len(list(filter(lambda mark: mark[0] == "start", marks))), list(check._clock.blocks)
    taken = {way: [name for what, name, _ in marks if what == way] for way in ("in", "backward")}
    turns = {"in": blocks, "backward": blocks[::-1]}
    assert taken == {way: [name for name in names for _ in range(together)] for way, names in turns.items()}
    wrong = [pair for pair in pairwise(mark[0] for mark in marks) if pair[1] not in SPANS.get(pair[0], pair)]
    assert together > 1 and wrong == [], "a time that is measured has the turn of another in it"


def test_a_refusal_in_training_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = LlamaForCausalLM.forward

    @wraps(forward)
    def drawing(*args: Any, **kwargs: Any) -> Any:
        random.random()
        return forward(*args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", drawing)
    small_runs.make_rows_and_model(tmp_path)
    layers = {"offload": {"site": "host", "weights": "streamed", "accumulation": "layers"}}
    tree = small_runs.tree_of(tmp_path, tmp_path / "run", {}, layers)
    assert runs.run(load_tree(tree), Ranks(), Stop()) == ExitCode.CONFIG
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "accumulation" in each]
    assert "draws random numbers of Python" in line and "write strategies.offload.accumulation: micro_batches" in line


def test_losses_of_a_window_that_ended_early_are_not_those_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every window runs, after a callback has stopped training inside of one."""
    windows = list[int]()
    run_of = LayersFirst.run

    def noted(self: LayersFirst, works: Any) -> Any:
        windows.append(len(works))
        return run_of(self, works)

    class Stops(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = control.should_epoch_stop = len(windows) == 1

    monkeypatch.setattr(LayersFirst, "run", noted)
    rows = [{name: value[0] for name, value in batch.items()} for batch in tokens("llama", 4)]
    given = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=1, gradient_accumulation_steps=2, num_train_epochs=1, use_cpu=True,
        report_to="none", save_strategy="no", logging_steps=1,
    )  # fmt: skip
    kind: Any = stowed_trainer(
        Trainer, batch=(1, rows[0]["input_ids"].numel()), order="layers", site="host", weights="streamed"
    )
    trainer = kind(build("llama"), given, train_dataset=rows, callbacks=[Stops()])
    trainer.train()
    assert windows == [2]
    trainer.train()
    assert windows == [2, 2, 2]
    trainer.stowed.close()


def test_auto_takes_the_faster_order() -> None:
    """Where the link is slow: once per step is sooner than twice per micro-batch. With a tied head bits come first."""
    rates = replace(FAST, gemm_fp32_flops_per_s=1e9, up_bytes_per_s=1e6, down_bytes_per_s=1e6)
    chosen = {}
    for tied in (False, True):
        facts = plan_for(build("llama", tied=tied), eval_rows=0, batch=(2, 8), max_grad_norm=1.0).facts
        known = replace(facts, run=replace(facts.run, accumulation=COUNT), machine=replace(GPU, rates=rates))
        plans = {
            order: planned(known, site="host", weights="streamed", accumulation=order)
            for order in ("micro_batches", "layers", "auto")
        }
        took = {order: cost.seconds for order, plan in plans.items() if (cost := plan_cost(plan)) is not None}
        assert took["layers"] < took["micro_batches"]
        chosen[tied] = plans["auto"].facts.run.layerwise, took["auto"]
        assert chosen[tied] == ((1, took["micro_batches"]) if tied else (COUNT, took["layers"]))


# --- refused ----------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Its second block runs twice; ``skips`` it, it never does, or only for some batches."""

    def __init__(self, calls: tuple[int, ...] = (0, 1, 1), drop: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 6), nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(drop)) for _ in range(2))
        self.calls = calls
        self.generator = torch.Generator()

    def forward(
        self, input_ids: Tensor, labels: Tensor, calls: tuple[int, ...] | None = None, drop: float = 0.0, how: str = ""
    ) -> SimpleNamespace:
        x = nn.functional.dropout(self.embed(input_ids), drop)
        if how == "keeps":
            self.kept = x
        if how == "draws":
            x = x * random.random()
        if how == "draws by itself":
            x = x * torch.rand((), generator=self.generator)
        if how == "is stopped":
            raise KeyboardInterrupt
        for index in calls or self.calls:
            x = self.layers[index](x)
        if how == "overwrites":
            x += 1
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


class Noisy(Twice):
    """Multiplies its loss by numbers that it draws, and by one more where a batch says so."""

    draw: Callable[..., Tensor] = staticmethod(torch.rand)

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> SimpleNamespace:  # type: ignore[override]
        noise = self.draw(3).sum()
        if input_ids[0, 0] % 2:
            noise = noise + torch.rand(())
        return SimpleNamespace(loss=super().forward(input_ids, labels, (0, 1)).loss * (1 + 0.1 * noise))


class Normal(Noisy):
    """Draws normal numbers, of which one is kept for later; so they are counted in no way."""

    draw = staticmethod(torch.randn)


class Flat(nn.Module):
    """A layer of rows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x.flatten(0, 1))
        return found.view_as(x)


def batch_of(**more: Any) -> dict[str, Any]:
    ids = torch.arange(8).reshape(2, 4)
    return {"input_ids": ids, "labels": ids} | more


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Twice(), "a block runs twice"),
        (Twice((0,)), "not every block runs"),
        (nn.Sequential(), r"writes to layers\.1\.1\.inner\.\w+, which the next"),
    ],
    ids=["twice", "never", "statistics"],
)
def test_a_model_whose_micro_batches_cannot_take_turns(model: nn.Module, words: str) -> None:
    """By the plan, which knows a forward; and under ``auto`` the plan has today's order."""
    if not isinstance(model, Twice):
        model = Twice((0, 1))
        model.layers[1] = nn.Sequential(nn.Linear(6, 6), Flat(nn.BatchNorm1d(6)))
    options: dict[str, Any] = {"max_grad_norm": 1.0, "accumulation": 2, "batch": batch_of(), "eval_rows": 0}
    with pytest.raises(Refusal, match=f"accumulation = 'layers': .*{words}.*write micro_batches"):
        plan_for(model, order="layers", **options)
    assert plan_for(model, order="auto", **options).facts.run.layerwise == 1


@pytest.mark.parametrize("kind", [Noisy, Normal])
def test_as_many_random_numbers_as_a_batch_says(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    given = [batch_of(input_ids=torch.arange(8).reshape(2, 4).roll(index)) for index in range(9)]
    wanted = plain(build(kind), given, accumulation=COUNT)
    model = build(kind)
    found = stowed(model, plan_of(model), given, accumulation=COUNT, layers=True, draws=True)
    assert differences(wanted, found) == []
    assert len([line for line in caplog.messages if "each micro-batch is run once more" in line]) == 1


@pytest.fixture
def turns() -> Iterator[Any]:
    """A stowed model whose plan was made for another forward."""
    model = Twice((0, 1))
    plan = plan_for(model, max_grad_norm=1.0, accumulation=2, order="layers", batch=batch_of(), eval_rows=0)
    optimizer = stow(model, plan, None, AdamW(lr=LR))
    yield model, optimizer
    optimizer.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (({"calls": (0, 1, 1)}, {"calls": (0, 1, 1)}), "a block runs twice"),
        (({"calls": (0,)}, {"calls": (0,)}), "not every block runs"),
        (({"calls": (0, 1)}, {"calls": (1, 0)}), "different ways"),
        (({}, {"drop": 0.5}), "draws random numbers .*, and the plan"),
        (({}, {"how": "draws"}), "draws random numbers of Python"),
        (({}, {"how": "draws by itself"}), "writes to generator, which the next"),
        (({}, {"how": "overwrites"}), "writes in place to what the last block returns"),
        (({}, {"how": "keeps"}), "writes to kept, which the next micro-batch would read"),
    ],
    ids=["twice", "never", "different", "dropout", "python's", "a generator of its own", "in place", "an attribute"],
)
def test_a_forward_that_the_plan_has_not_seen(turns: Any, given: Any, words: str) -> None:
    """One line, no gradient has landed, and the next step trains."""
    model, optimizer = turns
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=f"accumulation: layers: .*{words}.*micro_batches"):
        optimizer.backward_all([lambda each=each: model(**batch_of(**each)).loss for each in given])
    assert optimizer.engine.gradients.empty
    optimizer.zero_grad()
    optimizer.backward_all([lambda: model(**batch_of()).loss / 2] * 2)
    optimizer.step()
    assert not torch.equal(model.state_dict()["head.weight"], before["head.weight"])


def test_a_key_that_stops_it_leaves_nothing_behind(turns: Any) -> None:
    """No hooks on saved tensors of the micro-batch that was inside of a block, and the next step trains."""
    model, optimizer = turns
    stopped = {"how": "is stopped"}
    with pytest.raises(KeyboardInterrupt):
        optimizer.backward_all([lambda: model(**batch_of(**stopped)).loss, lambda: model(**batch_of()).loss])
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    optimizer.zero_grad()
    optimizer.backward_all([lambda: model(**batch_of()).loss / 2] * 2)
    optimizer.step()


def test_an_error_in_one_micro_batch_is_the_callers(turns: Any) -> None:
    """And the modes of torch are those of before."""
    model, optimizer = turns

    def fails() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(**batch_of())
            raise ValueError("of the user's")

    with pytest.raises(ValueError, match="of the user's"):
        optimizer.backward_all([lambda: model(**batch_of()).loss, fails])
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    optimizer.zero_grad()
    optimizer.backward_all([lambda: model(**batch_of()).loss / 2] * 2)
    optimizer.step()


def test_autocast_casts_for_each_micro_batch() -> None:
    """A cast that two of them shared would sum their gradients in bf16."""

    def trained(ours: bool) -> dict[str, Tensor]:
        model = build("llama")
        given = [partial(_autocast_loss, model, batch) for batch in batches(COUNT)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plan = made(model, max_grad_norm=None, site="host", update_in_backward=False)
        if ours:
            optimizer: Any = stow(model, plan, None, AdamW(lr=LR), beside=False)
            optimizer.backward_all(given)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
            for loss_of in given:
                loss_of().backward()
        optimizer.step()
        found = {name: value.clone() for name, value in model.state_dict().items()}
        if ours:
            optimizer.close()
        return found

    wanted, found = trained(False), trained(True)
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []


def _autocast_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: Tensor = model(**batch).loss / COUNT
    return loss


# --- over ranks -------------------------------------------------------------------------------------------------------


def in_both_orders(ranks: Ranks) -> list[str]:
    """What differs between micro-batches one after the other and layers first, on any rank."""
    torch.set_num_threads(1)
    everyones: list[Any] = [None] * ranks.world_size
    found = [line for name, *case in OVER_RANKS for line in _in_both_orders(ranks, name, *case)]
    dist.all_gather_object(everyones, found)
    return [line for lines in everyones for line in lines]


# A model, whether ranks divide the state, and who updates. The last two draw numbers that only some ranks count.
OVER_RANKS = [
    ("llama", True, "host"), ("llama", True, "mixed"), ("llama", False, "mixed"), ("gpt2", True, "host"),
    ("noisy", True, "mixed"), ("normal", False, "host"),
]  # fmt: skip


def _in_both_orders(ranks: Ranks, name: str, divided: bool, site: str) -> list[str]:
    kind = {"noisy": Noisy, "normal": Normal}.get(name, name)
    mine = batches(5 * ranks.world_size)[ranks.rank :: ranks.world_size]
    if not isinstance(kind, str):  # the first rank's batches have no extra number to draw
        mine = [batch_of(input_ids=torch.arange(8).reshape(2, 4).roll(ranks.rank * each)) for each in range(5)]
    results = []
    for layers in (False, True):
        model = build(kind)
        how: dict[str, Any] = {"site": site, "weights": "travelling", "prefetch": 1, "max_norm": 0.05}
        plan = plan_of(model, ranks=ranks.world_size if divided else 1, accumulation=1 if layers else 3, **how)
        plan.facts.run.copies = plan.facts.run.adding_copies = ranks.world_size
        loop: dict[str, Any] = {"accumulation": 3, "max_norm": 0.05, "layers": layers, "scaled": True}
        given = {"process_group": dist.group.WORLD, "transfer": Delayed(), "draws": name != "llama"}
        results.append(stowed(model, plan, mine, seed=5 + ranks.rank, **given, **loop))
    return [f"{name}, {divided}, {site}, rank {ranks.rank}: {each}" for each in differences(*results)]


@pytest.mark.ranks
def test_over_ranks_with_the_bits_of_the_other_order() -> None:
    """Three, so that losses are divided. Each has numbers and lengths of its own; what one of them cannot count, or
    counts wrong, all begin again.
    """
    assert run_world(3, in_both_orders) == []


@pytest.mark.ranks
def test_a_run_with_dropout_over_ranks(tmp_path: Path) -> None:
    """The twelve micro-batches of a rank make windows of five, five and two; resumed before the last of them."""
    training = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 5, "max_grad_norm": 0.05}

    def config(order: str, folder: str) -> Any:
        strategies = {"offload": {**OFFLOAD["offload"], "accumulation": order}, "zero": {"stage": 3}}
        return Kind(2, strategies, training, {"attention_dropout": 0.2}).config(tmp_path / folder, 4)

    jobs = [
        ("one by one", config("micro_batches", "one"), None),
        ("layers", config("layers", "layers"), None),
        ("resumed", config("layers", "resumed"), str(tmp_path / "layers" / "checkpoint-2")),
    ]
    found = run_counted(2, common_ends, jobs)
    assert [different(found["one by one"], found[name]) for name in ("layers", "resumed")] == [[], []]
