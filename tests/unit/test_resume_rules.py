"""What may differ on resume: every key of the config has a rule, and each kind of change does what its rule says."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerState

from deepstow.strategies.core.resume import CHANGES
from deepstow.strategies.state.sealed import seal
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.run.callbacks.reports import EarlyStopping
from deepstow.trainer.run.checkpoints import resume_rules, resuming
from deepstow.trainer.run.checkpoints.checkpoint import KIND, Manifest
from deepstow.trainer.run.checkpoints.resume_rules import compare, compare_contents, moved
from deepstow.trainer.run.checkpoints.same_rows import Known
from tests.helpers.checkpoints import about, make
from tests.helpers.tiny import GPT2, LLAMA, run_config


def changed(now: dict[str, Any], saved: dict[str, Any] | None = None, ranks: tuple[int, int] = (1, 1)) -> Any:
    """The changes from a plain run to one with ``now``, both options of ``run_config``."""
    configs = run_config(**(saved or {})), run_config(**now)
    trees = [config.tree() for config in configs]
    then, given = (resuming.resolved(*each) for each in zip(configs, (tree["training"] for tree in trees), strict=True))
    return compare(*trees, ranks, "checkpoint-8", resolved=(then, given))


def test_silent() -> None:
    elsewhere = {"logging_steps": 3, "output_dir": "elsewhere", "allow_change": ["data"]}
    unset = {"weight_decay": 0.0, "adam_beta1": 0.9, "lr_scheduler_type": "linear", "data_seed": 42}  # what that means
    assert changed(elsewhere | unset) == changed(elsewhere, unset) == ({}, [], [])
    now = run_config().tree()
    earlier = {**now, "training": now["training"] | {"live": True}}
    assert compare(earlier, now, (1, 1), "c") == ({}, [], []), "a key that is gone, in a checkpoint of before"


def test_a_default_that_another_release_has(tmp_path: Path) -> None:
    """It is as if the key had been changed; writing down what it was goes on."""
    config = run_config(output_dir=tmp_path, resume_from_checkpoint="auto")
    arguments = resuming.resolved(config, config.tree()["training"])
    assert (arguments["adam_beta2"], arguments["warmup_steps"], arguments["data_seed"]) == (0.999, 0, 42)
    del arguments["train_sampling_strategy"]  # of a release that did not have it
    other = {"adam_beta2": 0.95, "warmup_steps": 7, "what_is_no_more": 1}
    make(tmp_path, 8, run=about(config.tree(), arguments={**arguments, **other}))
    with pytest.raises(ConfigError) as caught:
        resuming.decide(config, Ranks())
    (line,) = caught.value.lines
    assert line == (
        f"training.adam_beta2 = 0.999: {tmp_path}/checkpoint-8 was saved with 0.95, the default then, and the result "
        f"would be another run's; write that, or allow it with training.allow_change: [betas]"
    )
    written = run_config(output_dir=tmp_path, resume_from_checkpoint="auto", adam_beta2=0.95)
    found = resuming.decide(written, Ranks())
    assert found is not None and found.changed == {"training.warmup_steps": "said"}
    assert "resumed with training.warmup_steps = 0 (was 7, the default then)" in found.said


def test_a_checkpoint_without_arguments_is_said_to_be_taken_by_the_defaults(tmp_path: Path) -> None:
    """Those that are installed; what its config sets is what it says."""
    saved = run_config(output_dir=tmp_path, adam_beta2=0.999)
    make(tmp_path, 8, run=about(saved.tree()))
    config = run_config(output_dir=tmp_path, resume_from_checkpoint="auto", weight_decay=0.0)
    found = resuming.decide(config, Ranks())
    assert found is not None and found.changed == {}
    (line,) = [line for line in found.said if "no resolved arguments" in line]
    assert line == (
        f"{tmp_path}/checkpoint-8 is of a release that kept no resolved arguments: for what its config leaves open, "
        f"the defaults of the installed Transformers are assumed; checkpoints from here on have them"
    )
    with pytest.raises(ConfigError, match=r"training.weight_decay = 0.1: .* was saved with 0.0, and the result"):
        resuming.decide(run_config(output_dir=tmp_path, resume_from_checkpoint="auto", weight_decay=0.1), Ranks())


def test_arguments_have_no_place_and_no_address() -> None:
    """A run that has moved, or is shown elsewhere, has the same ones; a preference's are those of its own Trainer."""
    elsewhere = {"output_dir": "/else", "push_to_hub": True, "hub_model_id": "me/mine", "logging_steps": 1}
    found = [resuming.resolved(each, each.tree()["training"]) for each in (run_config(), run_config(**elsewhere))]
    assert found[0] == found[1] and "learning_rate" in found[0]
    dpo = run_config().model_copy(update={"task": "dpo"})
    for written in ({}, {"loss_type": "sigmoid"}):
        given = resuming.resolved(dpo, written)
        assert (given["beta"], given["loss_type"], given["disable_dropout"]) == (0.1, ["sigmoid"], True)


def test_a_rate_is_said_and_a_number_of_ranks_refused() -> None:
    assert changed({"learning_rate": 0.5}).said == ["training.learning_rate = 0.5 (was 5e-05)"]
    (line,) = changed({}, ranks=(2, 3)).refused
    assert (line.key, line.value) == ("ranks", 3) and "saved with 2" in line.what
    assert changed({"allow_change": ["ranks"]}, ranks=(2, 3)).said == ["ranks = 3 (was 2)"]


def test_removed_options() -> None:
    """Without state of their own a run goes on without them; else they are named."""

    def saved_with(**strategies: Any) -> Any:
        now = run_config().tree()
        return compare({**now, "strategies": strategies}, now, (1, 1), "checkpoint-8")

    assert saved_with(offload={"update_in_backward": "speculative"}).refused == []
    assert saved_with(linear={"transpose": "minimal", "budget_s": 20.0, "cache": None}).refused == []
    (line, *_) = saved_with(collectives={"compress": "onebit", "start": 9}).refused
    assert line.key == "strategies.collectives.compress" and "saved with onebit: 1-bit Adam's momentum" in line.what


def test_compressed_exchanges_of_other_ranks() -> None:
    now: dict[str, Any] = {"strategies": {"collectives": {"compress": "topk"}}}
    for saved in (now, {}):
        refused = changed({**now, "allow_change": ["ranks"]}, saved, (2, 4)).refused
        (what,) = [line.what for line in refused if line.key == "ranks"]
        assert "(each rank has state of its own)" in what and "training.allow_change: [compression]" in what
        assert changed({**now, "allow_change": ["ranks", "compression"]}, saved, (2, 4)).refused == []
    assert changed(now, now, (2, 2)).refused == []


FOUR_RANKS: tuple[tuple[int, int], int | None, dict[str, Any]] = (2, 4), 64, {}


@pytest.mark.parametrize(
    ("accumulation", "now", "ranks", "rows", "model", "why"),
    [
        (2, {}, *FOUR_RANKS, ""),
        (1, {}, (2, 8), 32, {"attention_dropout": 0.0, "scale": 1.0}, ""),
        (2, {"max_steps": 4}, (2, 4), 67, {}, ""),  # all of them in the first epoch
        (2, {"max_steps": 5}, (2, 4), 67, {}, "67 rows do not divide evenly"),
        (1, {}, (2, 8), 40, {}, "40 rows do not divide evenly"),
        (8, {}, (2, 1), 66, {}, "66 rows do not divide evenly"),
        (2, {}, (2, 4), None, {}, "how many rows an epoch has is not known"),
        (2, {"data": {"path": "other"}, "allow_change": ["data"]}, *FOUR_RANKS, "how many rows"),
        (2, {}, (2, 4), 64, {"text": {"attn_pdrop": 0.1}}, "attn_pdrop = 0.1 draws"),
        (None, {}, *FOUR_RANKS, "gradient_accumulation_steps = 2 would keep them"),
        (None, {}, (2, 3), 64, {}, "an update has other rows)"),
        (1, {"per_device_train_batch_size": 4}, *FOUR_RANKS, "other rows)"),
        (2, {"per_device_train_batch_size": 4, "allow_change": ["batch_size"]}, *FOUR_RANKS, "other rows)"),
        (2, {"train_sampling_strategy": "group_by_length"}, *FOUR_RANKS, "order"),
        (2, {"average_tokens_across_devices": False}, *FOUR_RANKS, "own tokens"),
    ],
    ids=str,
)
def test_updates_keep_their_rows(
    accumulation: int | None, now: Any, ranks: tuple[int, int], rows: int | None, model: dict[str, Any], why: str
) -> None:
    """From a run with 4 micro-batches of 2 rows on each copy of the model; ``None``: with as many now."""
    saved = {"per_device_train_batch_size": 2, "max_steps": now.get("max_steps", -1)}
    then, given = (
        run_config(**{**saved, **more, "gradient_accumulation_steps": count}).tree()
        for more, count in (({}, 4), (now, accumulation or 4))
    )
    found = compare(then, given, ranks, "c", Known(rows, model))
    refused = {line.key: line.what for line in found.refused}
    if why:
        changed = {"ranks", *(["training.gradient_accumulation_steps"] if accumulation else [])}
        assert refused.keys() >= changed and all(why in refused[key] for key in changed)
    else:
        assert refused == {} and len(found.said) == 1 and "8 micro-batches" in found.said[0]


def test_a_schedule_that_follows_the_loss_needs_the_same_evaluations() -> None:
    given = {"lr_scheduler_type": "greedy", "eval_strategy": "epoch", "data": {"eval_fraction": 0.1}}
    trees = [run_config(gradient_accumulation_steps=count, **given).tree() for count in (2, 1)]
    line, _ = compare(*trees, (1, 2), "c", Known(16)).refused
    assert "lr_scheduler_type = greedy follows evaluations, whose batches are others on other ranks" in line.what


def test_two_micro_batches_are_added_in_one_order() -> None:
    saved, now = ({"gradient_accumulation_steps": count} for count in (2, 1))
    assert compare(run_config(**saved).tree(), run_config(**now).tree(), (1, 2), "c", Known(16)) == ({}, [], [])


@pytest.mark.parametrize(("tied", "count", "lines"), [(True, 2, 1), (True, 1, 0), (False, 2, 0)])
def test_another_order_of_micro_batches_is_said_where_the_head_is_tied(tied: bool, count: int, lines: int) -> None:
    strategies = [{"offload": {"accumulation": order}} for order in ("layers", "auto")]
    trees = [run_config(gradient_accumulation_steps=count, strategies=each).tree() for each in strategies]
    known = Known(16, {"text_config": {"tie_word_embeddings": tied}})
    for saved, now in (trees, trees[::-1]):
        found = compare(saved, now, (1, 1), "c", known)
        assert [line for line in found.said if "tied head" in line] == found.said[:lines] and not found.refused


def test_from_a_config_to_a_folder_is_one_line() -> None:
    saved, now = run_config(GPT2).tree(), run_config(None, model={"name_or_path": "runs/x/export"}).tree()
    assert [line.key for line in resume_rules.compare(saved, now, (1, 1), "c").refused] == ["model.name_or_path"]


SAVED: dict[str, Any] = {
    "sources": "s", "evaluation": "e", "tokenizer": "t", "template": "c", "fingerprint": "f", "code": "p",
    "config": {"hidden_size": 8, "rope": {"theta": 1.0}, "attn_pdrop": 0},
}  # fmt: skip
Places = dict[str, tuple[object, object]]


def contents(
    now: dict[str, Any],
    allowed: Sequence[str] = (),
    changed: tuple[str, ...] = (),
    *,
    places: Places | None = None,
    lacks: tuple[str, ...] = (),
) -> Any:
    saved = SAVED | dict.fromkeys(lacks)
    return compare_contents(saved, {**SAVED, **now}, allowed, changed, "c", places or {})


def test_contents() -> None:
    assert contents({"config": {**SAVED["config"], "new": 1}}) == ({}, [], [])
    other = {"sources": "x", "config": {"hidden_size": 9, "rope": {"theta": 2.0}, "attn_pdrop": 1}}
    assert {line.key for line in contents(other).refused} == {
        "data.path", "model.config.hidden_size", "model.config.rope.theta", "model.config.attn_pdrop",
    }  # fmt: skip
    found = contents(other, ("data", "model", "dropout"))
    assert {line.key for line in found.refused} == {"model.config.hidden_size"} and len(found.said) == 3
    assert [line.key for line in contents({"tokenizer": "x"}, CHANGES).refused] == ["model.tokenizer"]


@pytest.mark.parametrize(
    ("fact", "key", "group"),
    [
        ("sources", "data.path", "data"),
        ("evaluation", "data.eval_path", "data"),
        ("template", "data.chat_template", "data"),
        ("code", "model.name_or_path", "model"),
    ],
)
def test_each_content_alone(fact: str, key: str, group: str) -> None:
    """Also beside a change that is allowed and makes other rows, and with it another fingerprint."""
    for now, changed in (({}, ()), ({"fingerprint": "x"}, ("data.max_length",))):
        (line,) = contents({**now, fact: "x"}, changed=changed).refused
        assert line.key == key and f"training.allow_change: [{group}]" in line.what
        others = [name for name in CHANGES if name != group]
        assert contents({**now, fact: "x"}, others, changed).refused == [line]
        allowed = contents({**now, fact: "x"}, (group,), changed)
        assert (allowed.keys, allowed.said, allowed.refused) == (
            {key: group}, [f"{key}: other contents than the checkpoint's"], [],
        )  # fmt: skip


def test_rows_that_are_made_otherwise_of_the_same_files() -> None:
    """By another release; not because of a key that is allowed to change."""
    assert [line.key for line in contents({"fingerprint": "x"}).refused] == ["data.path"]
    assert contents({"fingerprint": "x"}, changed=("data.max_length",)).refused == []
    assert contents({"fingerprint": "x"}, changed=("training.seed",)).refused == []
    assert contents({"fingerprint": "x"}, ("data",)).keys == {"data.path": "data"}


def sets(*paths: str, **options: Any) -> dict[str, Any]:
    return {"data": {"path": None, "datasets": [{"path": path, **options} for path in paths]}}


@pytest.mark.parametrize(
    ("saved", "now", "keys"),
    [
        ({"data": {"eval_path": "a"}}, {"data": {"eval_path": "b"}}, {"data.eval_path"}),
        (
            {"data": {"chat_template": "chatml"}},
            {"data": {"chat_template_path": "b.jinja"}},
            {"data.chat_template", "data.chat_template_path"},
        ),
        (sets("a", "b"), sets("c", "b"), {"data.datasets"}),
    ],
)
def test_another_place_is_compared_when_it_is_open(saved: Any, now: Any, keys: set[str]) -> None:
    trees = run_config(**saved).tree(), run_config(**now).tree()
    assert compare(*trees, (1, 1), "c") == ({}, [], []) and moved(*trees).keys() == keys


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ({}, {"data": {"eval_path": "b"}}),
        (sets("a", "b"), sets("c", "b", weight=2.0)),
        (sets("a", "b"), sets("a")),
        ({"data": {"path": "a"}}, sets("a")),
    ],
)
def test_a_place_with_another_meaning_is_refused_at_once(saved: Any, now: Any) -> None:
    trees = run_config(**saved).tree(), run_config(**now).tree()
    assert compare(*trees, (1, 1), "c").refused and not moved(*trees)


def test_what_a_checkpoint_has_no_hash_of_has_not_moved() -> None:
    trees = [run_config(None, model={"name_or_path": name}).tree() for name in ("a", "b")]
    known = Known(3, {}, ["weights"])
    assert moved(*trees, known) == {}
    assert [line.key for line in compare(*trees, (1, 1), "c", known).refused] == ["model.name_or_path"]


MOVED: Places = {"data.path": ("a", "b"), "data.eval_path": ("c", "d")}


def test_other_places() -> None:
    assert contents({}, places=MOVED) == (
        {},
        ["data.path = b (was a): the same contents", "data.eval_path = d (was c): the same contents"],
        [],
    )
    (line,) = contents({"sources": "x", "fingerprint": "x"}, places=MOVED).refused
    assert (line.key, line.value) == ("data.path", "b") and "c was saved with a; " in line.what
    allowed = contents({"sources": "x", "fingerprint": "x"}, ("data",), places=MOVED)
    assert (
        allowed.keys == {"data.path": "data"}
        and allowed.said[0] == "data.path = b (was a): other contents than the checkpoint's"
    )


def test_a_checkpoint_with_fewer_hashes() -> None:
    """The fingerprint has evaluation data and template in it; where that differs for another reason, nobody knows."""
    lacks = ("evaluation", "template", "code")
    assert contents({"evaluation": "x", "template": "x", "code": "x"}, lacks=lacks) == ({}, [], [])
    assert contents({"evaluation": "x"}, lacks=lacks, places=MOVED).refused == []
    rows = contents({"fingerprint": "x"}, changed=("data.max_length",), lacks=lacks, places=MOVED)
    assert [line.key for line in rows.refused] == ["data.eval_path"]


def test_a_refusal_names_file_line_and_key(tmp_path: Path) -> None:
    from deepstow.trainer.config.load import load

    make(tmp_path / "run", 8)
    text = run_config(output_dir=tmp_path / "run", resume_from_checkpoint="auto", seed=7, learning_rate=0.5).dump()
    (tmp_path / "c.yaml").write_text(text)
    number = next(at for at, line in enumerate(text.splitlines(), start=1) if line.strip() == "seed: 7")
    with pytest.raises(ConfigError) as caught:
        resuming.decide(load(tmp_path / "c.yaml"), Ranks())
    assert caught.value.lines == (
        f"{tmp_path}/c.yaml:{number}: training.seed = 7: {tmp_path}/run/checkpoint-8 was saved with 42, and the result "
        f"would be another run's; write that, or allow it with training.allow_change: [seed]",
    )


def test_other_parameters_are_refused() -> None:
    found = SimpleNamespace(manifest=SimpleNamespace(run=about()), path=Path("c"))
    with pytest.raises(ConfigError, match="its parameters have other names or shapes than those in c"):
        resuming.Resumed(found, {}, []).compare_shapes("y")  # type: ignore[arg-type]


def test_a_model_config_with_infinity_can_be_written() -> None:
    """Mamba has one."""
    from transformers import PretrainedConfig

    from deepstow.trainer.run.checkpoints.checkpoint import plain_config

    found = plain_config(PretrainedConfig(limit=[0.0, float("inf")], hidden_size=8))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["hidden_size"] == 8 and "transformers_version" not in found


def test_a_schedule_that_follows_the_loss_keeps_its_rate_and_its_evaluations() -> None:
    expected = {"reduce_lr_on_plateau": ["training.eval_steps", "training.learning_rate"], "linear": []}
    for schedule, refused in expected.items():
        saved, now = (
            {"training": {"eval_steps": steps, "lr_scheduler_type": schedule, "learning_rate": 1.0 * steps}}
            for steps in (2, 3)
        )
        lines = resume_rules.compare(saved, now, (1, 1), "c").refused
        assert sorted(line.key for line in lines) == refused
        assert not lines or "the rate that it has reached" in lines[0].what
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "data": {"eval_fraction": 0.1}}
    found = changed({**plateau, "allow_change": list(CHANGES)})
    assert "training.lr_scheduler_type" in [line.key for line in found.refused]


# What a resumed run takes over of the state in its checkpoint: its own best one, and never another run's


def after(folder: Path, best: str | None, said_other: str) -> tuple[TrainerState, list[str]]:
    state = TrainerState(max_steps=100, save_steps=50, best_metric=4.5, best_model_checkpoint=best, best_global_step=6)
    args: Any = SimpleNamespace(output_dir=str(folder), process_index=0, logging_steps=1, eval_steps=7, save_steps=0.1)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resuming, "write_line", said.append)
        resuming.TakenOver(said_other).on_train_begin(args, state, None)
    assert (state.save_steps, state.eval_steps) == (10, 7), (
        "the intervals are the config's, a share is one of all steps"
    )
    return state, said


def test_the_bar_stays_and_its_checkpoint_is_found_here(tmp_path: Path) -> None:
    """Hugging Face forgets the path if there is no such folder any more; a worse evaluation is not best for that."""
    for found in (None, str(tmp_path / "checkpoint-6")):
        for best in (None, "/elsewhere/run/checkpoint-6"):
            state, said = after(tmp_path, best, "")
            assert (state.best_metric, state.best_model_checkpoint, said) == (4.5, found, [])
        (tmp_path / "checkpoint-6").mkdir(exist_ok=True)


def test_what_is_not_this_runs_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-6").mkdir()
    state, said = after(tmp_path, str(tmp_path / "checkpoint-6"), "is another run's")
    assert (state.best_metric, state.best_model_checkpoint, state.best_global_step) == (None, None, None)
    assert said == ["the best evaluation so far, of step 6, is another run's: it is forgotten"]


def test_the_count_of_another_run_does_not_stop_this_one() -> None:
    state = TrainerState()
    state.stateful_callbacks = {"EarlyStopping": {"attributes": {"early_stopping_patience_counter": 2}}}
    assert EarlyStopping(2).over(state) and not EarlyStopping(2, another=True).over(state)


@pytest.mark.parametrize(
    ("inside", "saved", "why"),
    [
        (True, {"metric_for_best_model": "loss"}, ""),
        (False, {"metric_for_best_model": "loss"}, "is another run's"),
        (True, {"metric_for_best_model": "loss", "greater_is_better": True}, "was chosen by another greater_is_better"),
    ],
)
def test_whose_the_best_one_is(inside: bool, saved: dict[str, Any], why: str, tmp_path: Path) -> None:
    config = run_config(LLAMA, output_dir=tmp_path / "own", metric_for_best_model="loss")
    manifest = SimpleNamespace(run=SimpleNamespace(config={"training": saved}))
    folder = tmp_path / ("own" if inside else "other") / "checkpoint-6"
    resumed: Any = SimpleNamespace(path=folder, found=SimpleNamespace(manifest=manifest), changed=frozenset())
    assert resuming.other(resumed, config) == why
    resumed.changed = {"data.eval_path": "data"}
    assert resuming.other(resumed, config) == (why or "was one of other data")
    assert resuming.other(None, config) == ""


@pytest.mark.parametrize("more", [0, 1, None])
def test_another_number_of_threads_is_said(more: int | None, tmp_path: Path) -> None:
    """A checkpoint of a release that wrote no number is not said to have had another."""
    saved = None if more is None else torch.get_num_threads() + more
    run = about(run_config(LLAMA, output_dir=tmp_path).tree()).model_copy(update={"threads": saved})
    folder = make(tmp_path, 4, marked=False)
    seal(folder, KIND, Manifest(step=4, finite=True, run=run).model_dump(mode="json", exclude_none=saved is None))
    resumed = resuming.decide(run_config(LLAMA, output_dir=tmp_path, resume_from_checkpoint="auto"), Ranks())
    assert resumed is not None
    said = [line for line in resumed.said if "OMP_NUM_THREADS" in line]
    assert len(said) == bool(more) and all(line.endswith(f"OMP_NUM_THREADS={saved} keeps it") for line in said)
