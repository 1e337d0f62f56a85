"""Every command that README, docs and configs publish is one that works.

Those that train run as they are written, but for the sizes in their config files; those that plan run on the files as
they are. Of the others the arguments are read here, and what they do is tested where ``ELSEWHERE`` says.
"""

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.commands import REPO, Server
from tests.helpers.releases import HIGHEST_STAGE, is_refused

ELSEWHERE = {
    "bench": "test_bench.py, tests/unit/test_bench.py",
    "doctor": "tests/unit/test_doctor.py, tests/unit/test_rates.py",
    "verify": "test_verify.py",
    "watch": "tests/unit/test_history.py",
    "compare": "tests/unit/test_history.py",
}
RUN_HERE = {"train", "finetune"}
MAKE = RUN_HERE | {
    "test",
    "test-all",
    "test-rare",
    "test-torchao",
    "test-liger",
    "test-cuda",
    "faults",
    "lint",
    "setup",
    "docs",
    "bench",
    "gpu-check",
    "gpu-rehearsal",
}
PLACES = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", "docs/**/*.md", "configs/*.yaml"]
STARTS = r"(?:python |(?:deepspeed|torchrun) (?:[^\n]*?--(?:num_gpus|nproc_per_node) (\d) )?)?"
COMMAND = re.compile(STARTS + r"launch/(train|plan|verify|doctor|bench|watch|compare)\.py( [^`\n#|]*)?")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
BLOCKS = {"num_hidden_layers": 4}  # two in each of two stages
FEW = {"num_hidden_layers": 2, "vocab_size": 512, "model_type": "llama"}  # where a command names them
SMALL: dict[str, Any] = {
    "model": {"config": SIZES | BLOCKS, "tokenizer": {"vocab_size": 512}},
    "data": {"max_length": 64},
    "training": {
        "per_device_train_batch_size": 1, "max_steps": 2, "warmup_steps": 1, "save_steps": 2, "logging_steps": 1,
        "eval_strategy": "no", "eval_on_start": False,
    },
    "strategies": {"offload": {"gpu_memory": "1200KiB"}},
}  # fmt: skip

ROWS = 100
FEW_STEPS = {"training": {"max_steps": 2, "warmup_steps": 1, "eval_steps": 2}}


def published() -> Iterator[tuple[str, int, list[str]]]:
    """Script, ranks and arguments of each command, once."""
    text = "\n".join(path.read_text() for place in PLACES for path in sorted(REPO.glob(place)))
    recipes = re.findall(r"^(train|finetune):.*\n\t(.*)$", (REPO / "Makefile").read_text(), re.MULTILINE)
    text = "\n".join(line.replace("$(RANKS)", "1") for _, line in recipes) + "\n" + text
    found = [(match[2], int(match[1] or 1), (match[3] or "").strip()) for match in COMMAND.finditer(text)]
    for script, ranks, arguments in dict.fromkeys(found):
        asks = "--fit " in arguments and "model.config." in arguments
        if "--config " in arguments or asks or script in ELSEWHERE:  # else a file is mentioned and no command
            words = arguments.rstrip(".,;:)").replace("--config X", "--config configs/zero.yaml")
            yield script, ranks, shlex.split(words)


def shrunk(tree: Any, sizes: Any) -> Any:
    """``tree`` with those of ``sizes`` that it has."""
    if isinstance(tree, dict) and isinstance(sizes, dict):
        return {key: shrunk(value, sizes[key]) if key in sizes else value for key, value in tree.items()}
    return sizes if tree is not None else tree


@pytest.mark.slow
def test_commands_that_train(server: Server, tmp_path: Path) -> None:
    """In the order in which they are read: the second needs what the first exports."""
    for path in REPO.glob("configs/*.yaml"):
        text = path.read_text().replace("runs/", f"{tmp_path}/runs/")
        (tmp_path / "configs").mkdir(exist_ok=True)
        tree = yaml.safe_load(text)
        sizes = FEW_STEPS if "task" in tree else SMALL  # those of tasks are small as they are
        tree = shrunk(tree, sizes)
        tree.get("data", {})["limit"] = ROWS
        (tmp_path / "configs" / path.name).write_text(yaml.safe_dump(tree))
    commands = [(ranks, arguments) for script, ranks, arguments in published() if script == "train"]
    assert len(commands) >= 5
    for ranks, arguments in commands:
        strategies = yaml.safe_load((REPO / arguments[arguments.index("--config") + 1]).read_text()).get("strategies")
        if any(map(is_refused, strategies or ())):
            continue
        here = [re.sub("(configs|runs)/", rf"{tmp_path}/\1/", argument) for argument in arguments]
        if "strategies.zero.stage=3" in arguments and HIGHEST_STAGE < 3:
            continue  # refused with this release of Transformers
        found = server.start(ranks, here, tmp_path).wait().check().quiet()
        if "zero" not in "".join(arguments):
            assert "streamed" in found.text or "host" in found.text, found.text
        assert found.lines("export: "), found.text


def small(word: str) -> str:
    key, _, value = word.partition("=")
    name = key.removeprefix("model.config.")
    return f"{key}={(SIZES | FEW).get(name, value)}" if name != key else word


def plans() -> list[tuple[str, ...]]:
    """Those that plan, with small sizes where they name them; not twice, and not without the picture that one draws."""
    found = dict.fromkeys(tuple(map(small, arguments)) for script, _, arguments in published() if script == "plan")
    drawn = [words[: words.index("--plot")] for words in found if "--plot" in words]
    return [words for words in found if words not in drawn]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", plans(), ids=" ".join)
def test_commands_that_plan(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepstow.launch.plan import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(REPO / "configs")  # a teacher is there
    assert main([str(REPO / word) if word.startswith("configs/") else word for word in arguments]) == 0


@pytest.mark.parametrize("name", ["quickstart", "finetune"])
def test_budgets_are_enough_at_the_sizes_they_are_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Above the models are shrunk, and so are the budgets. What is fine-tuned is what the quickstart exports."""
    from deepstow.launch.plan import main

    model = yaml.safe_load((REPO / "configs" / "quickstart.yaml").read_text())["model"]
    same = [
        "model.name_or_path=null",
        *(f"model.{key}={yaml.safe_dump(model[key], default_flow_style=True)}" for key in model),
    ]
    given = ["--config", str(REPO / "configs" / f"{name}.yaml"), *same]
    assert main(given) == 0, capsys.readouterr().err


def test_commands_that_are_tested_elsewhere() -> None:
    others = [(script, arguments) for script, _, arguments in published() if script in ELSEWHERE]
    assert {script for script, _ in others} == set(ELSEWHERE)
    for script, arguments in others:
        if script == "doctor":
            assert arguments in ([], ["--rates"], ["--rates", "--disk", "/fast/folder"])
        elif arguments:
            words = [str(REPO) if word == "FOLDER" else word for word in arguments]
            importlib.import_module(f"deepstow.launch.{script}").parse(words)


def test_targets_of_make() -> None:
    text = "\n".join(path.read_text() for place in PLACES for path in sorted(REPO.glob(place)))
    targets = set(re.findall(r"(?:`|^|  )make ([a-z-]+)", text, re.MULTILINE))
    made = set(re.findall(r"^([a-z-]+):.*##", (REPO / "Makefile").read_text(), re.MULTILINE))
    assert targets == MAKE and targets <= made
