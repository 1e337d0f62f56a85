"""Files of somebody else, whatever is in them: a command shows what it can or ends with one line and a known code. No
control character of theirs reaches the terminal, nothing is waited for, and no small file becomes a large one.
"""

import json
import os
import random
import re
import signal
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepstow.launch import compare, import_config, plan, verify, watch
from deepstow.trainer.config.load import load
from deepstow.trainer.errors import UserError, report
from tests.unit.test_history import run
from tests.unit.test_plan_json import moving, written

ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{former}'] * 9)}]\n" for former, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """What waits for ever is ended, and fails."""
    signal.alarm(60)
    yield
    signal.alarm(0)


def record(**values: Any) -> str:
    return json.dumps({"step": 10, "loss": 1.5} | values) + "\n"


def every(value: str, steps: int = 3) -> str:
    """Records with ``value``, as JSON, for each number that is shown."""
    names = ("loss", "eval_loss", "tokens_per_s", "mfu", "grad_norm", "host_peak_bytes", "device_peak_bytes", "eta_s")
    fields = ", ".join(f'"{name}": {value}' for name in names)
    return "".join(f'{{"step": {step}, {fields}}}\n' for step in range(steps))


ANYTHING: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)) * 64,
    "cut": b'{"step": 1, "lo',
    "deep brackets": b"[" * 20_000,
    "a long line": b"x" * (3 << 20),
    "no line": b'"' + b"\\u0000" * 1000,
    "a byte order mark": b"\xef\xbb\xbf{}",
    "a number": b"7",
    "null": b"null",
    "a list": b'[{"step": 1}]\n',
    "duplicate keys": b'{"step": 1, "step": 2, "loss": 3, "loss": "x"}\n',
    "half a character": b'{"step": 1, "loss": "\\ud800"}\n',
    "escapes": f'{{"step": 3, "loss": "{ESCAPE}", "{ESCAPE}": 1}}\n'.encode(),
    "an alias bomb": BOMB.encode(),
    "tags": b"training: !!python/object/apply:os.system [echo owned]\n",
}
METRICS: dict[str, str] = {
    "nan": every("NaN"),
    "infinite": every("Infinity"),
    "huge": every("1e308") + every("-1e308") + every("1e308"),
    "beyond floats": every("1" + "0" * 400),
    "beyond digits": every("1" * 5000),
    "negative": every("-1"),
    "true": every("true"),
    "a list in it": every("[]"),
    "an object in it": every("{}"),
    "text": every('"x"'),
    "words for numbers": every('"nan"') + every('"-inf"'),
    "steps": "".join(
        record(step=step) for step in (-5, 1 << 53, 1 << 70, 10**300, 1.5, True, None, "x", [], {}, float("nan"))
    ),
    "one step, far": record(step=1 << 53),
    "both ends": record(loss=1e308) + record(step=20, loss=-1e308, eval_loss=5e-324),
}
CONFIGS: dict[str, str] = {
    "lists for sections": "training: [1, {a: 2}]\nstrategies: 7\nmodel: null\n",
    "escapes in keys": f'"{ESCAPE}": 1\n'.replace("\x1b", "\\e").replace("\x07", "\\a").replace("\x9b", "\\x9b"),
    "escapes in values": '{training: {run_name: "\\e]0;owned\\a\\e[2J\\u202e"}}',
    "numbers": "training: {seed: .nan, max_steps: .inf, learning_rate: 1e999}\n",
    "a huge number": f"training: {{seed: {'9' * 5000}}}\n",
    "duplicates": "training: {seed: 1, seed: 2}\n",
    "too large": "training: {seed: 1}\n# " + "x" * (2 << 20),
}
LINK = {"owner": "link up", "measured": 1, "predicted": 2}
PLANS: dict[str, Any] = {
    "no rows": {"measured": 7},
    "rows of none": {"measured": [None, 1, "x", [], {}]},
    "wrong types": {"measured": [LINK | {"measured": "x"}, LINK | {"owner": 7}, LINK | {"predicted": [1]}]},
    "numbers": {"measured": [LINK | {"measured": float("nan")}, LINK | {"measured": 10**400, "predicted": -(10**30)}]},
    "escapes": {"measured": [LINK | {"owner": f"link {ESCAPE}"}]},
}
FILES = [
    *(
        (name, file, content)
        for name, content in ANYTHING.items()
        for file in ("metrics.jsonl", "config.yaml", "plan.json")
    ),
    *((name, "metrics.jsonl", content.encode()) for name, content in METRICS.items()),
    *((name, "config.yaml", content.encode()) for name, content in CONFIGS.items()),
    *((name, "plan.json", json.dumps(content).encode()) for name, content in PLANS.items()),
]


def clean(capsys: pytest.CaptureFixture[str], code: int) -> tuple[str, str]:
    """What was said: nothing that moves a cursor, and one line, no traceback, if it could not be shown."""
    out, err = capsys.readouterr()
    assert not [char for char in out + err if char != "\n" and unicodedata.category(char) in ("Cc", "Cf", "Cs")]
    assert code in (0, 2, 3) and (err.count("\n") == 1 if code else not err), err
    assert len(out + err) < 100_000
    return out, err


def shown(folder: Path, other: Path, capsys: pytest.CaptureFixture[str], *, curves: bool = True) -> None:
    clean(capsys, watch.main([str(folder)]))
    drawn = ["--plot", str(other / "curves.png")] if curves else []
    clean(capsys, compare.main([str(folder), str(other), *drawn]))
    clean(capsys, compare.main([str(other), str(folder)]))


@pytest.mark.parametrize(("name", "file", "content"), FILES, ids=[f"{file}: {name}" for name, file, _ in FILES])
def test_a_run_of_anybody(
    name: str, file: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, other = run(tmp_path / "one", [8.0, 4.0]), run(tmp_path / "other", [8.0, 2.0])
    (folder / file).write_bytes(content)
    shown(folder, other, capsys, curves=name in METRICS)


def loop(path: Path) -> None:
    path.symlink_to(path)


PLACES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to itself": loop,
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("file", ["metrics.jsonl", "config.yaml", "plan.json"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file(place: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, other = run(tmp_path / "one", [8.0, 4.0]), run(tmp_path / "other", [8.0, 2.0])
    (folder / file).unlink(missing_ok=True)
    PLACES[place](folder / file)
    shown(folder, other, capsys, curves=False)


def test_a_folder_with_another_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = run(tmp_path / "other", [8.0])
    for name in (ESCAPE.replace("/", ""), os.fsdecode(b"\xff\xfe"), "\n\r\t"):
        shown(run(tmp_path / name, [8.0, 4.0]), other, capsys)


# --- other commands --------------------------------------------------------------------------------------------------

SAID = {
    "bomb": BOMB,
    "escapes": '{model: {"\\e[2J\\u202e": "\\e]0;owned\\a"}, "\\e[31m": 1, training: {seed: "\\e[2J"}}',
    "raw escapes": f"model: {ESCAPE}\n",
}


@pytest.mark.parametrize("text", SAID)
def test_a_config_of_anybody(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that is to be imported, and one of a run that is to be verified or planned."""
    (file := tmp_path / "config.yaml").write_text(SAID[text])
    with pytest.raises(UserError) as refused:
        load(file, [])
    report(refused.value)
    for command in (
        lambda: import_config.main([str(file), "--from", "axolotl"]),
        lambda: plan.main(["--config", str(file)]),
        lambda: verify.main(["--config", str(file)]),
    ):
        code = command()
        out, err = capsys.readouterr()
        assert code == 2 or (code == 0 and out)
        assert not [char for char in out + err if char != "\n" and unicodedata.category(char) in ("Cc", "Cf", "Cs")]
        assert "Traceback" not in err


# --- mutations -------------------------------------------------------------------------------------------------------

NASTY = [
    b"", b"null", b"-1", b"1e999", b"9" * 30, b"9" * 400, b"[]", b"{}", b'"x"', b"true", b"NaN", b"\x00", b"\xff",
    b"[" * 200, b"0", b'"\\u001b[2J"', b"\n", b": ", b"- ", b"*a", b"&a ", b"!!x ", b"4611686018427387904",
    b"0.5", b"-Infinity",
]  # fmt: skip


def mutated(content: bytes, draw: random.Random) -> bytes:
    """``content`` with one to four places changed: a word for another, a part gone, twice, or elsewhere."""
    for _ in range(draw.randint(1, 4)):
        words = [match.span() for match in re.finditer(rb"[\w.+-]+|\S", content)] or [(0, len(content))]
        start, stop = draw.choice(words)
        other, end = draw.choice(words)
        match draw.randrange(4):
            case 0:
                content = content[:start] + draw.choice(NASTY) + content[stop:]
            case 1:
                content = content[: min(start, other)] + content[max(start, other) :]
            case 2:
                content = content[:start] + content[other:end] + content[stop:]
            case _:
                content = content[:start] + content[other : other + 200] + content[start:]
    return content


@pytest.mark.parametrize("times", [15, pytest.param(300, marks=pytest.mark.slow)])
def test_mutated_runs(times: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    signal.alarm(900)
    folder, other = run(tmp_path / "one", [8.0, "nan", 4.0]), run(tmp_path / "other", [8.0, 2.0])
    (folder / "plan.json").write_text(json.dumps({"measured": [LINK, LINK]}))
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    for seed in range(times):
        draw = random.Random(seed)
        name = draw.choice(sorted(good))
        (folder / name).write_bytes(mutated(good[name], draw))
        try:
            shown(folder, other, capsys, curves=times > 15)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {name}") from error
        (folder / name).write_bytes(good[name])


@pytest.mark.parametrize("times", [15, pytest.param(300, marks=pytest.mark.slow)])
def test_mutated_plans(times: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``plan --check``: it says what is wrong, or that it can be carried out."""
    signal.alarm(900)
    content, file = json.dumps(written(moving())).encode(), tmp_path / "plan.json"
    file.write_bytes(content)
    assert plan.main(["--check", str(file)]) == 0
    capsys.readouterr()
    for seed in range(times):
        file.write_bytes(mutated(content, random.Random(seed)))
        try:
            code = plan.main(["--check", str(file)])
            out, err = capsys.readouterr()
            assert (code == 2 and err) or code == 0
            assert not [char for char in out + err if char != "\n" and unicodedata.category(char) in ("Cc", "Cf", "Cs")]
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
