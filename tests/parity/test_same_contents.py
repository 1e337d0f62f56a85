"""What a resumed run reads is what the run that saved has read, by contents: else it is refused, and nothing is moved.

Runs of two steps are saved after the first, and go on from there after something was exchanged, or is elsewhere.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file

from deepstow.strategies.state.sealed import read, seal
from deepstow.trainer.config.load import load_tree
from deepstow.trainer.data.prepare import Contents
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.stopping import Stop
from deepstow.trainer.run import inputs
from deepstow.trainer.run import session as runs
from deepstow.trainer.run.checkpoints.checkpoint import KIND
from deepstow.trainer.run.data import read_data
from tests.e2e.commands import write_jsonl
from tests.e2e.test_exports import with_its_own_code
from tests.helpers.marks import slowly
from tests.helpers.small_runs import make_rows_and_model, tree_of

MODEL = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 24,
}  # fmt: skip
LORA: dict[str, Any] = {"lora": {"r": 2, "target_modules": "all-linear"}}
PAIRS = [{"prompt": f"Is it {n}?", "chosen": f" It is {n}.", "rejected": " I do not know."} for n in range(8)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("made")
    make_rows_and_model(home)
    write_jsonl(home / "pairs.jsonl", PAIRS)
    return home


@pytest.fixture
def home(made: Path, tmp_path: Path) -> Path:
    """A copy of the rows and the model, which a test may change."""
    return Path(shutil.copytree(made, tmp_path / "home"))


def run_of(home: Path, *, model: Any = None, **sections: Any) -> Any:
    """The tree of a run of two steps that saves each; ``sections`` besides ``training``."""
    steps = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 1}
    tree = tree_of(home, home / "run", sections, **steps)
    return {**tree, "model": {**tree["model"], **(model or {})}}


def ended(tree: dict[str, Any]) -> int:
    return runs.run(load_tree(tree), Ranks(), Stop())


def weights(home: Path) -> Any:
    """What the run has exported."""
    (file,) = (home / "run/export").glob("*.safetensors")
    return load_file(file)


def begun(tree: dict[str, Any], home: Path) -> Any:
    """What a run exports that nothing happens to; then it is as if it had been killed after its first step."""
    assert ended(tree) == 0
    found = weights(home)
    for name in ("export", "checkpoint-2"):
        shutil.rmtree(home / "run" / name)
    return found


def goes_on(tree: dict[str, Any], **training: Any) -> int:
    return ended({**tree, "training": {**tree["training"], "resume_from_checkpoint": "auto", **training}})


def left(home: Path) -> dict[str, bytes]:
    """All files of the run, but what a run writes about itself while it begins."""
    passing = ("exit.json", "run.lock")
    files = [path for path in (home / "run").rglob("*") if path.is_file() and path.name not in passing]
    return {str(path.relative_to(home)): path.read_bytes() for path in files}


def refused(tree: dict[str, Any], home: Path, capsys: pytest.CaptureFixture[str], **training: Any) -> str:
    """The one line of a refusal that has moved and changed nothing, not even what a run sets aside that goes back."""
    (home / "run/checkpoint-9").mkdir(exist_ok=True)
    (home / "run/checkpoint-9/model.safetensors").write_text("half of it")
    before = left(home)
    capsys.readouterr()
    assert goes_on(tree, **training) == 2
    assert left(home) == before
    (line,) = capsys.readouterr().err.splitlines()
    return line


def exchange(file: Path) -> None:
    """Other numbers of the same names and shapes."""
    torch.manual_seed(2)
    save_file({name: torch.randn_like(each) for name, each in load_file(file).items()}, file, {"format": "pt"})


def manifest(folder: Path) -> Any:
    return read(folder, KIND).about["run"]


def same(ours: Any, theirs: Any) -> bool:
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in theirs)


def rows_again(home: Path, name: str) -> str:
    """A file of the rows of the run, in another order."""
    rows = (home / "rows.jsonl").read_text().splitlines()
    (home / name).write_text("".join(f"{row}\n" for row in reversed(rows)))
    return str(home / name)


def chats(home: Path) -> dict[str, Any]:
    """Data with evaluation rows and a chat template of its own."""
    said = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]}
        for n in range(8)
    ]
    write_jsonl(home / "chats.jsonl", said)
    write_jsonl(home / "held.jsonl", said[:2])
    (home / "t.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    names = {"path": "chats.jsonl", "eval_path": "held.jsonl", "chat_template_path": "t.jinja"}
    return {key: str(home / name) for key, name in names.items()}


def shards(home: Path, order: int) -> str:
    """Rows as ``save_to_disk`` leaves them, two files listed in one of two orders."""
    if not (home / "saved").is_dir():
        Dataset.from_json(str(home / "rows.jsonl")).save_to_disk(str(home / "saved"), num_shards=2)
    state = json.loads((home / "saved/state.json").read_text())
    state["_data_files"].sort(key=lambda each: each["filename"], reverse=order == 2)
    (home / "saved/state.json").write_text(json.dumps(state))
    return str(home / "saved")


def other_base(home: Path) -> None:
    exchange(home / "model/model.safetensors")


def other_file(name: str, content: str) -> Callable[[Path], None]:
    return lambda home: ((home / name).write_text((home / name).read_text() + content), None)[1]


def own_code(home: Path) -> dict[str, Any]:
    """A model with a vocabulary that is large enough, and its own code."""
    names = {"name_or_path": str(with_its_own_code(home / "own")), "tokenizer": str(home / "model")}
    return {"model": names | {"trust_remote_code": True}}


HELD = json.dumps({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}) + "\n"
LONGER = {"allow_change": ["max_length"]}  # makes other rows of the same contents
Options = Callable[[Path], dict[str, Any]]
EXCHANGED: list[Any] = [
    pytest.param(lambda home: {"model": LORA}, other_base, "model.name_or_path", "weights", {}, id="base of adapters"),
    pytest.param(
        lambda home: {"task": "dpo", "data": {"path": str(home / "pairs.jsonl")}},
        other_base, "model.name_or_path", "weights", {}, id="reference",
    ),
    slowly(
        lambda home: {"prune": {"method": "structured", "sparsity": 0.4, "parts": ["channels"], "calibration_rows": 2}},
        other_base, "model.name_or_path", "weights", {}, id="what parts are taken out of",
    ),
    pytest.param(
        lambda home: {"data": {"path": shards(home, 1)}}, lambda home: shards(home, 2), "data.path", "rows", {},
        id="order of shards",
    ),
    pytest.param(
        lambda home: {"data": chats(home)}, other_file("held.jsonl", HELD), "data.eval_path", "evaluated", LONGER,
        id="evaluation rows",
    ),
    pytest.param(
        lambda home: {"data": chats(home)}, other_file("t.jinja", "."), "data.chat_template", "text", LONGER,
        id="template",
    ),
    pytest.param(
        lambda home: {"distill": {"teacher": str(shutil.copytree(home / "model", home / "teacher"))}},
        lambda home: exchange(home / "teacher/model.safetensors"), "distill.teacher", "files", {}, id="teacher",
    ),
    pytest.param(
        own_code, other_file("own/mixing.py", "# other\n"), "model.name_or_path", "Python code", {}, id="code",
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("options", "change", "key", "what", "training"), EXCHANGED)
def test_other_contents_at_the_same_place(
    options: Options, change: Callable[[Path], Any], key: str, what: str, training: Any, home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The original contents resume with the bits of the run that nothing happened to."""
    tree = run_of(home, **options(home))
    expected = begun(tree, home)
    kept = shutil.copytree(home, home.parent / "kept", ignore=shutil.ignore_patterns("run"))
    change(home)
    longer = {**tree, "data": {**tree["data"], "max_length": tree["data"]["max_length"] + 8}} if training else tree
    line = refused(longer, home, capsys, **training)
    assert f" {key}" in line and what in line and f"{home}/run/checkpoint-1 was " in line
    assert "or allow it with training.allow_change: [" in line
    shutil.copytree(kept, home, dirs_exist_ok=True)
    assert goes_on(tree) == 0 and same(weights(home), expected)


@pytest.mark.parametrize("reads", ["compare", "recorded"])
def test_a_base_that_is_exchanged_while_it_is_read(
    reads: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After it was compared and before it is loaded; or after it was loaded and before its hash is taken."""
    tree, read = run_of(home, model=LORA), getattr(inputs, reads)
    if reads == "compare":
        begun(tree, home)

    def exchanged(*given: Any) -> Any:
        found = read(*given) if reads == "compare" else None
        other_base(home)
        return read(*given) if reads == "recorded" else found

    monkeypatch.setattr(inputs, reads, exchanged)
    before = left(home)
    assert goes_on(tree) == 2
    assert left(home) == before
    assert "its weights have changed while they were read" in capsys.readouterr().err
    if reads == "compare":  # with the other base, where that is allowed
        monkeypatch.undo()
        before_it = manifest(home / "run/checkpoint-1")["model"]["weights"]
        assert goes_on(tree, allow_change=["model"]) == 0
        assert "resumed with model.name_or_path: other contents than the checkpoint's" in capsys.readouterr().out
        assert manifest(home / "run/checkpoint-2")["model"]["weights"] not in (before_it, None)


def test_random_weights_under_adapters(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are drawn by the seed, which may change for the rows alone."""
    tree = run_of(home, model=LORA | {"name_or_path": None, "config": MODEL, "tokenizer": str(home / "model")})
    begun(tree, home)
    line = refused(tree, home, capsys, seed=1, allow_change=["seed"])
    assert "training.seed = 1: it draws other random weights" in line


def test_weights_that_are_in_the_checkpoint_are_not_read_again(home: Path) -> None:
    """Where all are trained: the run ends with the same bits, and names what it began with."""
    tree = run_of(home)
    expected = begun(tree, home)
    before = manifest(home / "run/checkpoint-1")["model"]["weights"]
    other_base(home)
    assert goes_on(tree) == 0 and same(weights(home), expected)
    assert manifest(home / "run/checkpoint-2")["model"]["weights"] == before


@pytest.mark.slow
def test_the_same_contents_at_other_places(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All at once, under other names: the bits of the run that nothing was moved of."""
    shutil.copytree(home / "model", home / "teacher")
    shutil.copytree(home / "model", home / "words")
    (home / "texts").mkdir()
    data = chats(home)
    Path(data["path"]).replace(home / "texts/a.jsonl")
    tree = run_of(
        home, model=LORA | {"tokenizer": str(home / "words")}, data=data | {"path": str(home / "texts")},
        distill={"teacher": str(home / "teacher")},
    )  # fmt: skip
    expected = begun(tree, home)
    moves = {"texts": "rows", "held.jsonl": "b.jsonl", "t.jinja": "u.jinja", "model": "m", "teacher": "t", "words": "w"}
    for old, new in moves.items():
        (home / old).replace(home / new)
    (home / "rows/a.jsonl").replace(home / "rows/z.jsonl")
    data = {"path": "rows", "eval_path": "b.jsonl", "chat_template_path": "u.jinja"}
    found = run_of(
        home, model=LORA | {"name_or_path": str(home / "m"), "tokenizer": str(home / "w")},
        data={key: str(home / name) for key, name in data.items()}, distill={"teacher": str(home / "t")},
    )  # fmt: skip
    capsys.readouterr()
    assert goes_on(found) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.endswith(": the same contents")]
    assert len(said) == len(moves) and all(line.startswith("resumed with ") for line in said)
    assert f"resumed with data.path = {home}/rows (was {home}/texts): the same contents" in said
    assert same(weights(home), expected)


def test_other_contents_at_another_place(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the run is over, and would have nothing left to read."""
    tree = run_of(home)
    assert ended(tree) == 0
    again = {**tree, "data": {**tree["data"], "path": rows_again(home, "again.jsonl")}}
    line = refused(again, home, capsys)
    assert " data.path = " in line and f" was saved with {home}/rows.jsonl; the rows made of it are not those " in line
    model = shutil.copytree(home / "model", home / "m")
    exchange(model / "model.safetensors")
    line = refused({**tree, "model": {"name_or_path": str(model)}}, home, capsys)
    assert f" was saved with {home}/model; its weights are not those that " in line


def as_before(home: Path, tree: dict[str, Any]) -> None:
    """The first checkpoint as a release wrote it that had names of files in its hashes, and fewer of these."""
    seen: list[Contents] = []
    reads: Any = SimpleNamespace(compare_contents=lambda *given: seen.append(given[-1]()))
    read_data(load_tree(tree), Ranks(), reads, quiet=True)
    folder, (hashes,) = home / "run/checkpoint-1", seen
    about = read(folder, KIND).about
    about["run"]["data"] |= {name: getattr(hashes, name) for name in ("sources", "fingerprint")}
    for part, names in {"data": ("evaluation", "template"), "model": ("weights", "code")}.items():
        for name in names:
            del about["run"][part][name]
    seal(folder, KIND, about)


def test_a_checkpoint_that_says_less(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it lacks is said in one line, and is in the next one, so that it is compared from then on."""
    tree = run_of(home, model=LORA, data={"path": shards(home, 1)})
    expected = begun(tree, home)
    known = manifest(home / "run/checkpoint-1")
    as_before(home, tree)
    capsys.readouterr()
    assert goes_on(tree) == 0 and same(weights(home), expected)
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if " is of a release that kept no hash of " in line
    ]
    assert "the weights that training began with and the order of shards in data of save_to_disk: not compared" in line
    again = manifest(home / "run/checkpoint-2")
    assert (again["data"], again["model"]) == (known["data"], known["model"])
    other_base(home)
    more = {**tree, "training": {**tree["training"], "max_steps": 3}}
    assert "its weights are not those" in refused(more, home, capsys)
