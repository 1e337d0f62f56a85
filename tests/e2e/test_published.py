"""Every command that README, docs and configs publish is one that works.

Those that train run as they are written, but for the sizes in their config files; those that plan run on the files as
they are. Of the others the arguments are read here; what they do has tests of its own.
"""

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepstow.launch import cli
from tests.e2e.commands import REPO, Server
from tests.helpers.releases import HIGHEST_STAGE, is_refused

PLANS = {"plan", "fit", "search", "cost"}
PLACES = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", "docs/**/*.md", "configs/*.yaml"]
STARTS = r"(?:python |(?:deepspeed|torchrun) (?:[^\n]*?--(?:num_gpus|nproc_per_node) (\d) )?)"
FILE = re.compile(STARTS + r"launch/(\w+)\.py( [^`\n#|>]*)?")
COMMAND = re.compile(r"(?:^[# ]*|`)deepstow ([a-z]+)( [^`\n#|>]*)?(?=[`\n#|>]|$)", re.MULTILINE)
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


def written() -> Iterator[tuple[str, int, list[str]]]:
    """Command, ranks and arguments of each that is written somewhere, once; a command that is only named has none."""
    text = "\n".join(path.read_text() for place in PLACES for path in sorted(REPO.glob(place)))
    recipes = re.findall(r"^(train|finetune):.*\n\t(.*)$", (REPO / "Makefile").read_text(), re.MULTILINE)
    text = "\n".join(line.replace("$(RANKS)", "1") for _, line in recipes) + "\n" + text.replace("\\\n", " ")
    files = [(match[2], int(match[1] or 1), (match[3] or "").strip()) for match in FILE.finditer(text)]
    named = [(match[1], 1, (match[2] or "").strip()) for match in COMMAND.finditer(text)]
    for name, ranks, arguments in dict.fromkeys(files + named):
        words = ["2" if word == "N" else word for word in shlex.split(arguments.rstrip(".,;:)"))]
        if name == "train" and "--ranks" in words:
            at = words.index("--ranks")
            ranks, words = int(words[at + 1]), words[:at] + words[at + 2 :]
        yield name, ranks, words


def published() -> list[tuple[str, int, list[str]]]:
    """Those whose config comes with the package, by its path, or that name a model by its sizes: these run here."""
    found = []
    for name, ranks, words in written():
        if "--config" in words[:-1]:
            at = words.index("--config") + 1
            path = f"configs/{Path(words[at]).stem}.yaml"
            if not (REPO / path).exists() or (words[at] != path and words[at] != Path(path).stem):
                continue
            words = [*words[:at], path, *words[at + 1 :]]
        elif not any(word.startswith("model.config.") for word in words):
            continue
        if (name, ranks, words) not in found:
            found.append((name, ranks, words))
    return found


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
    looks = {"--show-sample", "--data-report"}
    commands = [(ranks, words) for name, ranks, words in published() if name == "train" and not looks & {*words}]
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
    found = dict.fromkeys((name, *map(small, words)) for name, _, words in published() if name in PLANS)
    drawn = [words[: words.index("--plot")] for words in found if "--plot" in words]
    return [words for words in found if words not in drawn]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", plans(), ids=" ".join)
def test_commands_that_plan(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepstow.launch.cli import main

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


def test_every_command_that_is_written_is_one_and_takes_its_arguments() -> None:
    found = [(name, words) for name, _, words in written() if name in cli.COMMANDS or words]
    assert {name for name, _ in found} == set(cli.COMMANDS)
    for name, words in found:
        module = importlib.import_module(f"deepstow.launch.{cli.FILES.get(name, name)}")
        if words and hasattr(module, "parse"):
            lacks = name in ("train", "plan", "search", "cost") and not {"--config", "--schema", "--check"} & {*words}
            config = ["--config", "my.yaml"] if lacks else []
            module.parse([*(str(REPO) if word == "FOLDER" else word for word in words), *config])
        elif name == "doctor":
            assert words in ([], ["--rates"], ["--build"], ["--rates", "--disk", "/fast/folder"])
