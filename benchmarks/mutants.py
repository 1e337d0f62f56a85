"""Which test fails when one wait, event or settle of the engine is left out?

    export OMP_NUM_THREADS=1
    python -m deepstow.benchmarks.mutants --out FOLDER [--tests tests/parity/test_engine.py ...] [--survivors]
    python -m deepstow.benchmarks.mutants --list

Copies, kernels and the worker run concurrently, and only events order them. A wait that no test misses is unnecessary
or untested. Mutants are found in the syntax tree of ``strategies/engine``, by the names in ``WAITS`` and the others: an
event that is waited for, a result, a settle or a record becomes ``None``. A mutant's name has no line, so that results
stay valid while code moves. The transfers themselves are left out: they implement waiting.

A copy of the tree has a process that has imported the tests. For a mutant it writes the changed file, forks, gives the
functions that are there their new code, and runs the tests; ranks, which start anew, read the file. The tests are those
that come by the call, which a first run of all finds out, the most successful first, up to
``--seconds``. ``results.jsonl`` has a line for each mutant, and the next call goes on behind the last one;
``--survivors`` tries those again that survived, with ``--tests``. ``table.md`` shows all.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

REPO = Path(__file__).resolve().parents[1]
ENGINE = "strategies/engine"
LEFT_OUT = ("transfer.py", "worker.py")
WAITS = ("wait", "host_wait")  # whose arguments are events, if a transfer's
RECORDS = ("record",)
DONE = ("result", "join", "synchronize", "wait", "drain")  # without a value that somebody takes
SETTLES = ("settle", "_settle")  # and what begins with these and an underscore
TESTS = (
    "tests/parity/test_engine.py", "tests/parity/test_activations.py", "tests/parity/test_slots.py",
    "tests/parity/test_disk_weights.py", "tests/parity/test_disk_trained.py", "tests/parity/test_one_place.py",
)  # fmt: skip
# Seconds of CPU for one test; seconds after which a test is stuck.
TEST_S, WAIT_S = 20.0, 400
COPIED = ("strategies", "trainer", "launch", "tests", "benchmarks", "configs", "docs", "pyproject.toml", "deepstow")

SITE = "import builtins, pathlib\nbuiltins.reached = lambda number: pathlib.Path({!r}, str(number)).touch()\n"


@dataclass(frozen=True, slots=True)
class Mutant:
    """An expression of a file that becomes None: where it is in the text, in bytes."""

    file: str
    name: str
    start: int
    stop: int
    starred: bool = False

    def text(self, source: bytes, *, reached: int | None = None) -> bytes:
        """``source`` without it, or with a note that it is reached. Variables of the expression stay bound."""
        inner = source[self.start + self.starred : self.stop]
        replacement = b"(None if True else " + inner + b")"
        if reached is not None:
            star = b"*" if self.starred else b""
            replacement = star + b"(__import__('builtins').reached(%d), " % reached + inner + b")[1]"
        return source[: self.start] + replacement + source[self.stop :]


def mutants() -> list[Mutant]:
    """All, by file and place. Equal ones of a function have numbers."""
    every = list[Mutant]()
    for path in sorted((REPO / ENGINE).rglob("*.py")):
        if path.name not in LEFT_OUT:
            every += _of_file(path)
    return every


def _of_file(path: Path) -> Iterator[Mutant]:
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    counts: Counter[str] = Counter()
    for scope, node, prefix in sorted(_places(ast.parse(source), ""), key=lambda each: each[1].lineno):
        text = f"{path.relative_to(REPO / ENGINE)}: {scope}: {prefix}{' '.join(ast.unparse(node).split())}"
        counts[text] += 1
        name = text if counts[text] == 1 else f"{text} ({counts[text]})"
        first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        yield Mutant(str(path.relative_to(REPO)), name, first, last, isinstance(node, ast.Starred))


def _places(tree: ast.AST, scope: str, *, value: bool = True) -> Iterator[tuple[str, Any, str]]:
    """The function, the expression, and what it is. ``value``: somebody takes the value of ``tree``."""
    if isinstance(tree, ast.FunctionDef | ast.ClassDef):
        scope = f"{scope}.{tree.name}".lstrip(".")
    skipped = set[int]()
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute):
        called, owner = tree.func.attr, ast.unparse(tree.func.value)
        if called in WAITS and owner.endswith("transfer"):
            stream = ast.unparse(tree.args[0]).removeprefix("Stream.") if called == "wait" else "host"
            for event in tree.args[called == "wait" :]:
                skipped.add(id(event))
                yield scope, event, f"{stream} does not wait for "
        elif called in RECORDS and owner.endswith("transfer"):
            yield scope, tree, "no event "
        elif not value and (called in DONE or any(called == name or called.startswith(f"{name}_") for name in SETTLES)):
            yield scope, tree, "without "
    for child in ast.iter_child_nodes(tree):
        if id(child) not in skipped:
            yield from _places(child, scope, value=not isinstance(tree, ast.Expr))


# --- one copy of the tree, and the process that has imported it -----------------------------------------------------


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def swap(file: Path, text: bytes) -> None:
    """Write ``text``, and give this process's functions of ``file`` the code of it."""
    file.write_bytes(text)
    fresh = {(code.co_qualname, code.co_varnames): code for code in _codes(compile(text, str(file), "exec"))}
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__code__.co_filename == str(file):
            code = function.__code__
            fresh_code = fresh.get((code.co_qualname, code.co_varnames))
            if fresh_code is not None and fresh_code.co_freevars == code.co_freevars:
                function.__code__ = fresh_code


class Watch:
    """A plugin of pytest: which mutants each test comes by, and its seconds of CPU; what failed first."""

    def __init__(self, marks: Path) -> None:
        self.marks = marks
        self.failed = ("", "")
        self.wrong = False
        self._began_s = 0.0

    def pytest_runtest_setup(self, item: Any) -> None:
        self._began_s, self.wrong = time.process_time(), False
        (self.marks / "running").write_text(item.nodeid)
        signal.alarm(WAIT_S)  # these end the process
        signal.setitimer(signal.ITIMER_PROF, TEST_S)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failed = (report.nodeid, str(crash.message if crash else report.longrepr)[:200])
            self.wrong = True
        if report.when == "teardown" and not self.wrong:
            reached = [int(mark.name) for mark in self.marks.iterdir() if mark.name.isdigit()]
            for number in reached:
                (self.marks / str(number)).unlink()
            test = {"test": report.nodeid, "reached": reached, "seconds": time.process_time() - self._began_s}
            with (self.marks / "tests.jsonl").open("a") as file:
                file.write(json.dumps(test) + "\n")


def serve(copy: Path) -> None:
    """Requests from stdin, a line of JSON each; a line for each answer. Runs in the copy."""
    sys.path.insert(0, str(copy))
    marks, origin = copy / "marks", Path((copy / "origin").read_text())
    import importlib

    import pytest

    import tests.conftest  # noqa: F401

    first = json.loads(sys.stdin.readline())
    for test in first["tests"]:
        importlib.import_module(test.removesuffix(".py").replace("/", "."))
    print("ready", file=sys.stderr, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.setpgid(0, 0)
            out = os.open(copy / "out.txt", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(out, 1)
            os.dup2(out, 2)
            for file, text in request["files"].items():
                swap(copy / "deepstow" / file, text.encode())
            watch = Watch(marks)
            code = pytest.main([*request["options"], *request["tests"]], plugins=[watch])
            answer = {"code": int(code), "failed": watch.failed}
            with os.fdopen(write, "w") as pipe:
                json.dump(answer, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            reply = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # ranks that wait for ever
        for file in request["files"]:
            shutil.copy2(origin / file, copy / file)
        running = (marks / "running").read_text() if (marks / "running").exists() else ""
        print(reply or json.dumps({"code": status, "failed": [running, f"ended by {status}"]}), flush=True)


class Copy:
    """A copy of the tree, and its server."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        for name in COPIED:
            from_, to = REPO / name, self.folder / name
            if from_.is_dir():
                shutil.copytree(from_, to, symlinks=True, ignore=shutil.ignore_patterns("records"))
            else:
                shutil.copy2(from_, to)
        (self.folder / "marks").mkdir()
        (self.folder / "origin").write_text(str(REPO))
        (self.folder / "sitecustomize.py").write_text(SITE.format(str(self.folder / "marks")))
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deepstow.benchmarks.mutants", "--serve", str(self.folder)], cwd=self.folder,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True,
        )  # fmt: skip
        self.ask({"tests": list(tests)}, answer=False)

    def ask(self, what: Mapping[str, Any], *, answer: bool = True) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline()) if answer else None

    def run(self, files: Mapping[str, bytes], tests: Sequence[str], *options: str) -> dict[str, Any]:
        arguments = ["-q", "-p", "no:cacheprovider", "--assert=plain", "-m", "not slow", *options]
        texts = {file: text.decode() for file, text in files.items()}
        return dict(self.ask({"files": texts, "tests": list(tests), "options": arguments}))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


# --- all of them -----------------------------------------------------------------------------------------------------


def instrumented(every: Sequence[Mutant]) -> dict[str, bytes]:
    """The files of all mutants, which note what is reached; from the last place of a file to its first."""
    files = {mutant.file: (REPO / mutant.file).read_bytes() for mutant in every}
    for number, mutant in sorted(enumerate(every), key=lambda each: -each[1].start):
        files[mutant.file] = mutant.text(files[mutant.file], reached=number)
    return files


def chosen(tests: Mapping[str, Any], number: int, kills: Mapping[str, int], limit_s: float) -> list[str]:
    """Tests that come by a mutant, of ``limit_s`` in all: first what killed most, delays copies, or is quick."""
    reaching = [name for name, test in tests.items() if number in test["reached"]]
    reaching.sort(key=lambda name: (-kills[name], "delayed" not in name, tests[name]["seconds"]))
    names, seconds = list[str](), 0.0
    for name in reaching:
        seconds += tests[name]["seconds"]
        names += [name] if seconds < limit_s or not names else []
    return names


def judged(copy: Copy, one: Mutant, tests: Sequence[str]) -> dict[str, Any]:
    """What becomes of a mutant."""
    began_s = time.monotonic()
    row = {"mutant": one.name, "verdict": "not reached", "test": "", "by": "", "seconds": 0.0}
    if tests:
        result = copy.run({one.file: one.text((REPO / one.file).read_bytes())}, tests, "-x")
        test, why = result["failed"]
        row |= {"verdict": "killed" if test or result["code"] else "survived", "test": test}
        cause = why.partition("\n")[0]
        row["by"] = f"{test.rpartition('/')[2]}: {cause}" if test else f"{len(tests)} tests"
    return row | {"seconds": round(time.monotonic() - began_s, 1)}


def known(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The last result of each mutant."""
    last_rows = {row["mutant"]: row for row in rows}
    counts = Counter(row["verdict"] for row in last_rows.values())
    lines = [", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()), ""]
    lines += ["| mutant | verdict | by | seconds |", "| --- | --- | --- | --- |"]
    for name, row in last_rows.items():
        lines.append(f"| `{name}` | {row['verdict']} | {row['by'].replace('|', '/')} | {row['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of CPU for the tests of one mutant")
    parser.add_argument("--survivors", action="store_true", help="those that survived so far, and no others")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return
    every = mutants()
    if given.list or not given.out:
        print("\n".join(f"{number} {mutant.name}" for number, mutant in enumerate(every)))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    results, map_of = given.out / "results.jsonl", given.out / "reached.json"
    copy = Copy(given.tests)
    if not map_of.exists() or given.survivors:
        copy.run(instrumented(every), given.tests)
        map_of.write_text(json.dumps({test["test"]: test for test in known(copy.folder / "marks" / "tests.jsonl")}))
    tests, last_rows = json.loads(map_of.read_text()), {row["mutant"]: row for row in known(results)}
    kills = Counter(row["test"] for row in last_rows.values())
    again = [name for name, row in last_rows.items() if row["verdict"] != "killed"]
    for number, mutant in enumerate(every):
        if mutant.name in again if given.survivors else mutant.name not in last_rows:
            row = judged(copy, mutant, chosen(tests, number, kills, given.seconds))
            kills[row["test"]] += 1
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    copy.close()
    (given.out / "table.md").write_text(table(known(results)))


if __name__ == "__main__":
    main()
