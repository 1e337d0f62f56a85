"""The order of a run: what is checked when, that each check can refuse, and what a refused run leaves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import pytest
from torch import nn
from transformers import BertConfig, LlamaConfig, OPTConfig

from deepstow.strategies.core.registry import find
from deepstow.trainer.config.load import load_tree
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.data import tokenizer as tokenizers
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.stopping import Stop
from deepstow.trainer.errors import ConfigError, ExitCode
from deepstow.trainer.planning.from_config import WRITTEN
from deepstow.trainer.run import building, data, inputs, lock, session
from deepstow.trainer.run.begin import Begin
from deepstow.trainer.run.building import apply_strategies
from deepstow.trainer.run.checkpoints import resuming
from deepstow.trainer.run.checks import CHECKS, Before
from deepstow.trainer.run.exporting import results, upload
from deepstow.trainer.run.trainer import Trainer
from tests.helpers import small_runs
from tests.helpers.tiny import BLOOM, LLAMA, OPT, VOCAB, run_config

# Checks in capitals, and between them what a run does, the first time that it does it.
ORDER = """
MEETING process_group LOCK held decide DATA files_now opened ROWS probe plans_of SHOWING show_plan SPENDING WEIGHTS
before_training make_arguments make_model create_optimizer _write training_step finish export_further upload
"""
DOES = {
    session: "process_group opened probe plans_of show_plan before_training", lock: "held",
    resuming: "decide", inputs: "files_now", building: "make_arguments make_model", Begin: "_write",
    Trainer: "create_optimizer training_step", results: "finish export_further", upload: "upload",
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    small_runs.make_rows_and_model(folder)
    return folder


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a run has done so far, of ``ORDER``."""
    done: list[str] = []

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name not in done:
                done.append(name)
            return work(*args, **kwargs)

        return call

    for where, names in DOES.items():
        for name in names.split():
            monkeypatch.setattr(where, name, noted(name, getattr(where, name)))
    for before, some in CHECKS.items():
        name, first = next(iter(some.items()))
        monkeypatch.setitem(some, name, noted(before.name, first))  # type: ignore[arg-type]
    return done


def ended(home: Path, folder: Path) -> int:
    """The exit code of a run."""
    tree = small_runs.tree_of(home, folder, {}, max_steps=1)
    try:
        return session.run(load_tree(tree), Ranks(), Stop())
    except ConfigError as error:  # before the ranks meet
        return error.code


def test_the_order(home: Path, tmp_path: Path, seen: list[str]) -> None:
    assert ended(home, tmp_path / "run") == ExitCode.FINISHED
    assert seen == ORDER.split()
    assert [name for name in seen if name.isupper()] == [before.name for before in Before] == [*map(name_of, CHECKS)]


def name_of(before: Before) -> str:
    return before.name


@pytest.mark.parametrize("before", Before, ids=name_of)
def test_what_is_refused_has_begun_nothing(
    before: Before, home: Path, tmp_path: Path, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the last of the checks of a moment. Rows and tokenizers, which are kept by content, may be there."""

    def refuse(run: Any) -> None:
        raise ConfigError("no")

    monkeypatch.setitem(CHECKS[before], [*CHECKS[before]][-1], refuse)  # type: ignore[arg-type]
    assert ended(home, tmp_path / "run") == ExitCode.CONFIG
    assert seen == ORDER[: ORDER.index(before.name) + len(before.name)].split()
    assert {path.name for path in tmp_path.rglob("*")} & {*WRITTEN, "export", "runs"} <= {"exit.json"}


# --- each check ------------------------------------------------------------------------------------------------------

TWO = Ranks(world_size=2, local_world_size=1)


def told(*answers: Any) -> Callable[..., Any]:
    """In the place of ``agreement``: what the ranks say."""

    @contextmanager
    def meeting(*_: Any) -> Iterator[Any]:
        yield Some(gathered=lambda own: list(answers), by_some=lambda does, work: [work()])

    return meeting


def described(home: Path, **more: Any) -> RunConfig:
    """Of a saved model that could leave layers out, in stages."""
    OPTConfig(**{**OPT, "layerdrop": 0.1}).save_pretrained(home)
    return run_config(None, model={"name_or_path": str(home)}, **more)


def fails(*_: Any, **__: Any) -> Any:
    raise OSError("nobody is there")


def says_no(*_: Any) -> None:
    raise ConfigError("its code fills 1 buffers")


STAGES = {"pipeline": {"stages": 2}}
MIN_LR: dict[str, Any] = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}}
METRICS: dict[str, Any] = {
    "compute_metrics": "no:f",
    "preprocess_logits_for_metrics": "no:f",
    "data": {"eval_fraction": 0.1},
}
PLAN = Some(keep=None, layout=None, facts=Some(units=[], run=Some(replicas=2, untied=["lm_head.weight"])))
TOO_LARGE = Some(
    facts=Some(machine=Some(device_bytes=1, host_bytes=1)), hosted_bytes=int, states=lambda tier: 9, addresses=None
)


def no_export(*_: Any) -> None:
    raise ConfigError("export.format = x: knows no such model")


# What is known, what else is so, and what is said.
REFUSED: dict[str, tuple[Callable[[Path], dict[str, Any]], dict[str, Any], str]] = {
    "MEETING collectives": (
        lambda _: {"config": run_config(), "ranks": TWO},
        {"checks.accelerator.kind": lambda: "maia"}, "no collectives for maia",
    ),
    "MEETING trackers": (lambda _: {"config": run_config(report_to=["swanlab"])}, {}, "swanlab is not installed"),
    "MEETING schedule": (lambda _: {"config": run_config(lr_scheduler_kwargs={"n": 2})}, {}, "lr_scheduler_kwargs"),
    "MEETING folders": (
        lambda _: {"config": run_config(save_on_each_node=True), "ranks": TWO}, {}, "a checkpoint is one folder"
    ),
    "MEETING compiler": (
        lambda _: {"config": run_config(stage=2)},
        {"checks.deepspeed_ops.announcement": lambda: "", "checks.deepspeed_ops.compiler": lambda: None}, "no C.. comp",
    ),
    "MEETING options": (
        lambda _: {"config": run_config(model={"attn_implementation": "auto"}), "ranks": TWO}, {}, "write the kernel"
    ),
    "MEETING metrics": (lambda _: {"config": run_config(**METRICS)}, {}, "training.compute_metrics = "),
    "MEETING callbacks": (lambda _: {"config": run_config(callbacks=["no:F"])}, {}, "training.callbacks = "),
    "LOCK folder": (lambda _: {"config": run_config(output_dir=__file__)}, {}, "is a file"),
    "LOCK hub": (
        lambda _: {"config": run_config(push_to_hub=True)}, {"exporting.upload.unreachable": lambda: "dark"},
        "be reached .dark"
    ),
    "DATA model": (lambda _: {"config": run_config({**LLAMA, "hiden_size": 3})}, {}, "did you mean 'hidden_size'"),
    "DATA stages": (
        lambda _: {"config": run_config({**OPT, "layerdrop": 0.1}, strategies=STAGES)}, {}, "write layerdrop: 0.0"
    ),
    "DATA machines": (
        lambda _: {"config": run_config(strategies={"collectives": {"hierarchical": True}}), "ranks": TWO},
        {"machines.agreement": told(0, 1, 1)}, "machines have 1 and 2 ranks",
    ),
    "DATA weights": (lambda home: {"config": described(home)}, {}, "model.name_or_path = "),
    "ROWS model": (lambda _: {"config": run_config(), "model": BertConfig()}, {}, "see the words that follow"),
    "ROWS recipes": (
        lambda _: {"config": Some(switched_on=[Some(refuse_before_rows=no_export)])}, {}, "knows no such model"
    ),
    "ROWS buffers": (
        lambda _: {"config": run_config(), "model": None}, {"checks.build.refuse_lost_buffers": says_no}, "buffers"
    ),
    "SHOWING one plan": (
        lambda _: {"ranks": TWO, "plans": [PLAN]}, {"machines.agreement": told("a", "b")}, "rank 1 makes another plan"
    ),
    "SHOWING packing": (lambda _: {"config": run_config(BLOOM, data={"packing": True})}, {}, "data.packing = true: "),
    "SHOWING exports": (
        lambda _: {"config": Some(switched_on=[Some(refuse=no_export)])}, {}, "knows no such model"
    ),
    "SHOWING batch": (
        lambda _: {"config": run_config(dataloader_drop_last=True), "rows": [1], "plan": PLAN}, {}, "so all are dropped"
    ),
    "SHOWING stages": (lambda home: {"config": described(home, strategies=STAGES)}, {}, "write layerdrop: 0.0"),
    "SHOWING min_lr": (
        lambda _: {"config": run_config(**MIN_LR), "plan": PLAN}, {"checks.deepspeed.stage": lambda _: 2}, "min_lr_rate"
    ),
    "SHOWING lost weights": (
        lambda _: {"config": run_config(), "plan": PLAN},
        {"checks.deepspeed.stage": lambda _: 3, "checks.tying.config_says": lambda *_: False}, "write stage: 2",
    ),
    "SPENDING memory": (lambda _: {"plans": [TOO_LARGE]}, {}, "the training state needs 9 B on each rank's device"),
    "SPENDING disks": (
        lambda _: {"config": run_config(), "ranks": Ranks(), "plan": Some(layout=Some(disk=["/x"])), "say": print},
        {"machines.file_bytes": lambda _: 9, "machines.Striped": lambda *_: int("no room")}, "strategies.offload.disk",
    ),
    "WEIGHTS trackers": (
        lambda _: {"config": run_config(report_to=["trackio"])}, {}, "it does not start"
    ),
    "WEIGHTS repository": (
        lambda _: {"config": run_config(push_to_hub=True)}, {"huggingface_hub.HfApi.create_repo": fails}, "let it be"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_each_check_can_refuse(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, so, said = REFUSED[case]
    before, name = case.split(" ", 1)
    for place, value in so.items():
        monkeypatch.setattr(place if place.startswith("hugg") else f"deepstow.trainer.run.{place}", value)
    with pytest.raises(ConfigError, match=said):
        CHECKS[Before[before]][name](Some(**made(tmp_path)))


def test_every_check_is_tried() -> None:
    assert [*REFUSED] == [f"{before.name} {name}" for before, some in CHECKS.items() for name in some]


# --- effects ---------------------------------------------------------------------------------------------------------


def test_implied_strategies_are_applied_in_the_order_of_deciding(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for name in ("buffers", "cross_entropy", "offload", "linear"):
        monkeypatch.setattr(find(name), "apply", lambda self, model, plan, name=name: seen.append(name))
    strategies = {name: find(name)() for name in ("offload", "linear")}
    config: Any = Some(strategies=strategies, training=Some(compile_backend=None), switched_on=())
    model: Any = nn.Linear(2, 2)
    apply_strategies(model, config, None)  # type: ignore[arg-type]
    assert seen == ["linear", "cross_entropy", "offload", "buffers"]


def test_a_strategy_that_drops_a_parameter_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find("buffers"), "apply", lambda self, model, plan: setattr(model, "bias", None))
    monkeypatch.setattr(find("cross_entropy"), "apply", lambda self, model, plan: None)
    config: Any = Some(strategies={"offload": find("offload")()}, training=Some(compile_backend=None), switched_on=())
    model: Any = nn.Linear(2, 2)
    with pytest.raises(AssertionError, match=r"strategies\.buffers renamed, reordered or dropped"):
        apply_strategies(model, config, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("saved", [True, False])
def test_more_tokens_than_the_model_has(saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after ``add_tokens`` without ``resize_token_embeddings``; what to do is another thing for a saved model."""
    LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    monkeypatch.setattr(tokenizers, "load", lambda *args, **options: range(VOCAB + 1))
    config = run_config(None, model={"name_or_path": str(tmp_path)}) if saved else run_config()
    with pytest.raises(ConfigError, match="resize_token_embeddings" if saved else r"raise model\.config\.vocab_size"):
        data.read_data(config, Ranks(), quiet=True)
