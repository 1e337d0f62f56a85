"""The wheel, installed into a fresh environment, works from a folder that has nothing of the checkout."""

import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.commands import REPO, Result, run, write_config, write_jsonl

FOLDERS = ("trainer", "strategies", "launch", "benchmarks")
PROGRAM = """
import sys, deepstow, torch
from deepstow import stowed
from deepstow.launch.cli import main
from transformers import LlamaConfig, LlamaForCausalLM, Trainer
sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
plan = deepstow.plan_for(model, gpu_memory="16MiB", batch=(2, 8), max_grad_norm=0.0)
optimizer = deepstow.stow(model, plan, rule=deepstow.AdamW(lr=1e-2))
tokens, losses = torch.arange(16).reshape(2, 8), []
for _ in range(3):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[2] < losses[0], losses
assert stowed(Trainer, gpu_memory="16MiB").__name__ == "StowedTrainer"
print(deepstow.__file__)
config = ["--config", sys.argv[1]]
assert main(["search", *config, "--world-size", "2", "--profile", "rtx4090-pcie4"]) == 0
assert main(["doctor"]) in (0, 1)
assert main(["train", *config, "training.lr=1"]) == 2  # by foreign.yaml
assert main(["train", *config]) == 0
import benchmarks, launch, strategies, trainer
assert {each.MINE for each in (benchmarks, launch, strategies, trainer)} == {True}
"""

SAVE = """
from transformers import LlamaConfig, LlamaForCausalLM
from deepstow.trainer.data.tokenizer import trained
from pathlib import Path
words = trained(300, Path("tokens"), ["What is 1 plus 2? 1 plus 2 is 3."])
words.save_pretrained("small")
sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2)
LlamaForCausalLM(LlamaConfig(vocab_size=len(words), max_position_embeddings=128, **sizes)).save_pretrained("small")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what the checkout has: a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    for name in ("deepstow", *FOLDERS, "docs", "configs", ".ci"):
        shutil.copytree(
            REPO / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("records", "__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(folder), str(copy)], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Run a program of the fresh environment; it finds the packages that we depend on, and not the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "env", with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env"), "platbase": str(folder / "env")}))
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # a .pth in that folder is not read again
    python = folder / "env" / "bin" / "python"
    command = [sys.executable, "-m", "pip", "-q", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*command, "--ignore-installed", str(wheel)], check=True, capture_output=True)

    def start(where: Path, program: str, *arguments: str) -> Result:
        command = ["env", "-C", str(where), str(python.with_name(program)), *arguments]
        return run(command, where, PYTHONPATH="")

    return start


def test_the_wheel_has_every_module_and_no_other_name(wheel: Path) -> None:
    modules = [path.relative_to(REPO) for name in (*FOLDERS, "docs") for path in (REPO / name).rglob("*.py")]
    there = {f"deepstow/{path}" for path in modules}
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if name.endswith(".py")} == there | {"deepstow/__init__.py"}
    (metadata,) = {name.partition("/")[0] for name in names} - {"deepstow"}
    assert metadata.endswith(".dist-info")


def test_the_wheel_has_every_page_and_config(wheel: Path) -> None:
    there = set(zipfile.ZipFile(wheel).namelist())
    pages = [path for path in (REPO / "docs").rglob("*.md") if "examples" not in path.parts]
    wanted = [*pages, *(REPO / "configs").rglob("*.yaml"), *(REPO / "configs").rglob("*.json")]
    assert {f"deepstow/{path.relative_to(REPO)}" for path in wanted} | {"deepstow/mkdocs.yml"} <= there


@pytest.mark.slow
def test_all_that_a_program_can_call(elsewhere: Callable[..., Result], tmp_path: Path) -> None:
    """From a folder whose modules have the names of our folders, and are found before what is installed."""
    config = write_config(tmp_path, training={"max_steps": 1})
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for name in FOLDERS:
        mine = tmp_path / name / "__init__.py" if name == "strategies" else tmp_path / f"{name}.py"
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("MINE = True\n")
    found = elsewhere(tmp_path, "python", str(program), str(config)).check().quiet()
    assert "/env/" in found.out and "that is PyTorch's name" in found.err
    assert found.lines("ok   python") and found.lines("ok   torch")
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert elsewhere(tmp_path, "deepstow", "--version").check().out.startswith("deepstow 0.")
    elsewhere(tmp_path, "python", "-m", "deepstow.launch.train", "--schema").check().quiet()


@pytest.mark.slow
def test_a_fresh_user_is_led_from_init_to_a_chat(elsewhere: Callable[..., Result], tmp_path: Path) -> None:
    """200 rows of his own and a small saved model; each command is the one that the one before has printed last."""
    chats = [(f"What is {i} plus {i}?", f"{i} plus {i} is {2 * i}.") for i in range(200)]
    turns = ("user", "assistant")
    rows = [
        {"messages": [{"role": who, "content": said} for who, said in zip(turns, chat, strict=True)]} for chat in chats
    ]
    write_jsonl(tmp_path / "my.jsonl", rows)
    (tmp_path / "save.py").write_text(SAVE)
    elsewhere(tmp_path, "python", "save.py").check()

    def following(result: Result) -> list[str]:
        (line,) = result.check().quiet().lines("next: ")
        assert line == result.out.splitlines()[-1]
        return shlex.split(line.removeprefix("next:"))

    init = elsewhere(tmp_path, "deepstow", "init", "--model", "small", "--data", "my.jsonl", "--out", "own.yaml")
    train = following(init)
    assert train == ["deepstow", "train", "--config", "own.yaml"]
    chat = following(elsewhere(tmp_path, *train))
    assert chat == ["deepstow", "chat", "runs/own"]
    answer = elsewhere(tmp_path, *chat, "--prompt", "What is 2 plus 2?", "--max-new-tokens", "8").check().quiet()
    assert answer.out.strip() and not answer.err
    two = [*train, "--ranks", "2", "training.output_dir=runs/two", "training.max_steps=2", "training.save_strategy=no"]
    assert following(elsewhere(tmp_path, *two)) == ["deepstow", "chat", "runs/two"]
    assert "2 ranks" in (tmp_path / "runs/two/plan.txt").read_text().splitlines()[0]
