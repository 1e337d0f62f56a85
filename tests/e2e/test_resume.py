"""A run that is killed and resumed ends with the bits of the run that nobody killed.

Dropout, shuffling over several epochs, accumulation and a schedule with warm-up are on. One is killed for real, by
SIGKILL for every process of the job at once, as when a machine goes down. The others go on in a folder from which all
that came after a checkpoint has been taken. Plain training is resumed in ``test_interrupted.py``.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from deepstow.trainer.run.checkpoints.checkpoint import read
from tests.e2e.commands import MODEL, Server, digest, metrics
from tests.e2e.interrupted import config_in, start, until
from tests.helpers.releases import HIGHEST_STAGE, needs

pytestmark = pytest.mark.ranks

STEPS, SAVE = 8, 4
STREAMED = {"offload": {"site": "host", "weights": "streamed", "prefetch": 0}}  # its two blocks share one place
SENT = {"recompute": {"policy": "selective", "activation_offloading": True}}
STAGES: dict[str, Any] = {"pipeline": {"stages": 2, "schedule": "gpipe"}}
ON_HOST: dict[str, Any] = {"offload": {"site": "host"}, "zero": {"stage": 1}}
NO_DROPOUT = MODEL | {"attention_dropout": 0.0}
QLORA = (
    "model.lora={r: 4, lora_dropout: 0.1, target_modules: all-linear}",
    "model.quantization_config={load_in_4bit: true}",
    "training.optim=lion_32bit",
)
MIXTURE = NO_DROPOUT | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def case(
    name: str,
    num_ranks: int,
    strategies: dict[str, Any],
    *,
    slow: bool = False,
    model: Any = MODEL,
    killed: bool = False,
    more: tuple[str, ...] = (),
) -> Any:
    marks = [*([pytest.mark.slow] if slow else []), *map(needs, strategies.keys() & {"sequence", "experts"})]
    return pytest.param(num_ranks, strategies, model, killed, more, id=name, marks=marks)


CASES = [
    case("highest stage", 2, {"zero": {"stage": HIGHEST_STAGE}}),
    case("offload, recompute", 1, {**STREAMED, **SENT}),
    case("offload shared by two ranks, weights too", 2, {**STREAMED, "zero": {"stage": 3}}, killed=True),
    case("adapters on four bits, by Lion", 1, STREAMED, slow=True, killed=True, more=QLORA),
    case("pipeline 2 x data 2, offload shared by copies", 4, {**STAGES, **ON_HOST}, slow=True),
    case("sequence 2 x data 2", 4, {"sequence": {"degree": 2}, "zero": {"stage": 2}}, slow=True, model=NO_DROPOUT),
    case("experts 2 x data 2", 4, {"experts": {"degree": 2}}, slow=True, model=MIXTURE),
]


def config_of(folder: Path, strategies: dict[str, Any], model: Any) -> Path:
    return config_in(
        folder, strategies, model, max_steps=STEPS, save_steps=SAVE, lr_scheduler_type="cosine", max_grad_norm=0.5,
        learning_rate=1e-2,
    )  # fmt: skip


@pytest.mark.parametrize(("num_ranks", "strategies", "model", "killed", "more"), CASES)
def test_killed_and_resumed(
    num_ranks: int,
    strategies: dict[str, Any],
    model: Any,
    killed: bool,
    more: tuple[str, ...],
    server: Server,
    tmp_path: Path,
) -> None:
    config, folder = config_of(tmp_path / "whole", strategies, model), tmp_path / "whole" / "run"
    server.run(num_ranks, config, *more).check().quiet()
    history, expected = history_of(folder), digest(folder / "export")
    assert [step for step, *_ in history] == list(range(1, STEPS + 1))
    assert read(folder / f"checkpoint-{STEPS}")[1].run.threads == 1
    if "offload" in strategies and "pipeline" not in strategies:  # of stages neither tensors nor blocks are measured
        predicted_is_measured(folder)
    if killed:
        config, folder = config_of(tmp_path / "killed", strategies, model), tmp_path / "killed" / "run"
        job = start(server, num_ranks, config, *more)
        until((folder / f"checkpoint-{SAVE}" / "manifest.json").exists, job, "saved", 120.0)
        job.kill()
        assert not (folder / "export").exists(), "the run was over before it was killed"
    else:
        for path in (folder / "export", folder / f"checkpoint-{STEPS}"):
            shutil.rmtree(path)
    found = server.run(num_ranks, config, *more, "training.resume_from_checkpoint=auto").check().quiet()
    assert len(found.lines("resuming from ")) == 1 and (killed or len(found.lines("step ")) == STEPS - SAVE)
    assert history_of(folder) == history
    if "offload" in strategies:
        text = (folder / "plan.txt").read_text()
        applied = [line for line in text.splitlines() if line.startswith("stow: ")]
        assert applied and len(applied) == len(set(applied)), "every effect is logged once, by the first rank"
    assert digest(folder / "export") == expected


def predicted_is_measured(folder: Path) -> None:
    """The plan check of step 2: bytes over the link are those of the plan; blocks have been timed for the next run."""
    plan = json.loads((folder / "plan.json").read_text())
    rows = {row["owner"]: row for row in plan["measured"]}
    assert rows.keys() >= {"saved for backward", "process, peak", "link up, step 2", "link down, step 2"}
    sent = sum(
        row["num_bytes"] for row in plan["rows"] if (row["tensors"], row["tier"]) == ("saved for backward", "host")
    )
    for name in ("link up, step 2", "link down, step 2"):
        predicted, measured = rows[name]["predicted"], rows[name]["measured"]
        # What is saved is predicted for rows of full length, twice per step; these are shorter.
        assert predicted - 2 * sent <= measured <= predicted, rows[name]
        assert (measured == predicted) is (sent == 0), rows[name]
    facts = json.loads((folder / "facts.json").read_text())
    assert facts["unit_times"] is None, "the plan of a run does not change inside it"
    assert min(facts["measured"]["block"]) > 0


def history_of(folder: Path) -> list[tuple[Any, ...]]:
    names = ("step", "epoch", "loss", "learning_rate", "grad_norm", "tokens")
    return [tuple(record[name] for name in names) for record in metrics(folder) if "loss" in record]


def test_a_run_that_stops_early_stops_there_again(server: Server, tmp_path: Path) -> None:
    """Killed before its last evaluations, and before its export alone. Prompts that are continued change no bit."""
    early = {
        "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 40, "learning_rate": 0.5,
        "early_stopping_patience": 3, "metric_for_best_model": "perplexity",
    }  # fmt: skip
    whole = config_in(tmp_path / "whole", STREAMED, **early)
    found = config_in(tmp_path / "found", STREAMED, **early, sample_prompts=["The first", "One more"])
    for config in (whole, found):
        data = ["data.eval_path=" + str(config.parent / "few.jsonl")]
        said = server.run(1, config, *data).check().lines("3 evaluations without a better eval_perplexity")
        assert len(said) == 1
    folder = found.parent / "run"
    steps = sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))
    assert 3 < len(steps) < 40
    assert len([record for record in metrics(folder) if "prompt" in record]) == 2 * len(steps)
    expected = digest(whole.parent / "run" / "export")
    assert digest(folder / "export") == expected
    for gone in ([], steps[-2:]):
        for path in [folder / "export", *(folder / f"checkpoint-{step}" for step in gone)]:
            shutil.rmtree(path)
        again = server.run(1, found, *data).check()
        assert len(again.lines("step ")) == len(gone)
        assert digest(folder / "export") == expected
    assert [record["step"] for record in metrics(folder) if "eval_loss" in record] == steps
