"""A recipe from outside, in one file: what it does before training, its callback and its memory."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from deepstow.strategies.core.plan import Tier, When
from deepstow.trainer.config.load import load_tree
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.machine.probe import probe
from deepstow.trainer.planning.from_config import plan_of
from tests.helpers import small_runs

FEWER = """
from dataclasses import replace

import torch
from transformers import TrainerCallback

from deepstow.strategies.core.facts import Held
from deepstow.trainer.config.arguments import Count, Section, option
from deepstow.trainer.config.recipe import Recipe


class Options(Section):
    rows: Count = option("How many are trained on, from the first on.", 8)


class Shrink(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        for each in model.parameters():
            each.detach().mul_(0.9)


class Fewer(Recipe):
    section = Options

    def memory(self, config, model, run):
        largest = max(each.num_elements for each in model.params)
        yield Held(owner="fewer: a copy", reason="the largest weight", num_bytes=4 * largest, in_step=not run.stowed)

    def announce(self, session):
        count = self.options(session.config).rows
        if count > len(session.prepared.train):
            raise session.config.error(f"recipes.{self.name}.rows", count, "there are fewer")
        session.say(f"fewer: {count} rows")
        return count

    def before_training(self, session):
        train = session.prepared.train.select(range(session.recipes[self.name]))
        return replace(session, prepared=replace(session.prepared, train=train))

    def callbacks(self, session, trainer):
        return [Shrink()]

    def sentence(self, session):
        return f"It has seen {session.recipes[self.name]} rows."
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    small_runs.make_rows_and_model(folder)
    (folder / "fewer.py").write_text(FEWER)
    return folder


def tree_of(home: Path, run: Path, rows: int = 8, strategies: Any = None) -> dict[str, Any]:
    return small_runs.tree_of(home, run, {"recipes": {f"{home}/fewer.py:Fewer": {"rows": rows}}}, strategies)


def test_trained_as_by_hugging_face(home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The bits of its Trainer with the same rows and callback."""
    tree, theirs = tree_of(home, tmp_path / "run"), dict[str, Any]()
    found, rows = small_runs.ran(tree), small_runs.rows_of(tree).select(range(8))
    exec(FEWER, theirs)
    model = AutoModelForCausalLM.from_pretrained(home / "model")
    plain = small_runs.by_the_trainer(model, tmp_path / "plain", rows, [theirs["Shrink"]()])
    assert {name for name, each in found.items() if not each.equal(plain[name])} == set()
    assert "fewer: 8 rows" in capfd.readouterr().out
    assert "It has seen 8 rows." in (tmp_path / "run" / "export" / "README.md").read_text()


@pytest.mark.parametrize("strategies", [{}, small_runs.TRAVEL], ids=["plain", "travels"])
def test_its_memory_is_in_the_plan(home: Path, tmp_path: Path, strategies: Any) -> None:
    plan = plan_of(load_tree(tree_of(home, tmp_path, strategies=strategies)), Ranks(), probe())
    (held,) = (each for each in plan.reserves(Tier.DEVICE) if each.owner == "fewer: a copy")
    assert held.num_bytes == 4 * small_runs.WORDS * 32
    assert held.when is (When.ALWAYS if strategies else When.STEP)


def test_what_it_refuses(home: Path, tmp_path: Path) -> None:
    """Once the plan is shown, and before anything is made."""
    with pytest.raises(ConfigError, match=r"fewer.py:Fewer.rows = 100: there are fewer"):
        small_runs.runs.prepare(load_tree(tree_of(home, tmp_path / "run", 100)), Ranks())
    assert not (tmp_path / "run").exists()
