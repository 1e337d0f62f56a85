"""A mutation test of the runtime's order: is there a case that fails when one wait is forgotten?

    python -m benchmarks.mutations --out FOLDER [--only N,...] [--without N,...] [--pairs] [--rehearse] [--list]

Problem. Copies, kernels and the worker run side by side, and events alone put them in order. A wait that nobody misses
is either not needed, or not tested; and tests that cannot fail prove nothing about those that are.

Mutated, one at a time, by syntax tree, in the modules of ``strategies/engine`` but for the transfers themselves: each
event that is waited for is not (``None``); each result of the worker that is awaited for its event's sake is not, or is
without the event; each event that is recorded stays what it was, or is ``None``; each statement that settles an update
is left out. ``--pairs`` leaves out two at a time of those that nothing noticed alone. ``--without`` leaves out some all
the time: if what is left passes, none of them is needed, and whatever they covered for can be seen.

Judged on the simulated accelerator (``tests/helpers/simulated``), where copies, kernels or the worker are slow in turn:
a process is forked off, its functions get the mutated code, and it runs those cases that come by the place, until one
fails: other bits than plain training's, an error, a crash, or no end. Last come cases under the race detector
(``race_detector.py``); what only these notice is said apart. Each mutant is a line of JSON as it ends; a table comes
last.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import copy
import gc
import itertools
import json
import logging
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

from benchmarks.mutation_cases import library
from benchmarks.mutation_list import Case, cases, expected
from strategies.engine import engine

RUNTIME = Path(engine.__file__).parent
LEFT_OUT = ("transfer.py", "race_detector.py", "worker.py")  # who waits there is not a lane
REHEARSED = ("residency.py COMPUTE does not wait for bucket.arrived", "updates.py DOWN does not wait for bucket.used")
SETTLING = ("settle", "_settle")
JOBS, LIMIT_S = 2, 30  # processes at a time, and how long a case may take: a hundred times what it does


# --- mutants ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mutant:
    """One node of a module's syntax tree, and what comes in its place. ``where``: its lines and columns."""

    path: Path
    kind: type[ast.AST]
    where: tuple[int, ...]
    what: str
    instead: ast.AST

    @property
    def name(self) -> str:
        return f"{self.path.name}:{self.where[0]} {self.what}"

    @property
    def place(self) -> str:
        return ":".join(map(str, (self.path.name, *self.where)))


def mutants() -> list[Mutant]:
    """All of them, in the order of files and lines."""
    found = [each for path in sorted(RUNTIME.rglob("*.py")) if path.name not in LEFT_OUT for each in _in_file(path)]
    return sorted(found, key=lambda each: (each.path.name, each.where))


def _in_file(path: Path) -> Iterator[Mutant]:
    tree = ast.parse(path.read_text())
    becomes = dict(itertools.chain.from_iterable(map(_becomes, ast.walk(tree))))
    tuples = {
        node.targets[0].id: node.value.elts
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Tuple)
    }
    waited: set[int] = set()
    none = ast.Constant(None)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        called, who = node.func.attr, ast.unparse(node.func.value)
        if called in ("wait", "host_wait") and who.endswith("transfer"):
            lane = "host" if called == "host_wait" else ast.unparse(node.args[0]).removeprefix("Lane.")
            for event in node.args[called == "wait" :]:
                for one in tuples[ast.unparse(event.value)] if isinstance(event, ast.Starred) else [event]:
                    waited.add(id(one))
                    yield Mutant(path, type(one), _at(one), f"{lane} does not wait for {ast.unparse(one)}", none)
                    if isinstance(one, ast.Call) and ast.unparse(one).endswith(".result()"):
                        pair = ast.Tuple([copy.deepcopy(one), none], ast.Load())
                        last = ast.Subscript(pair, ast.Constant(1), ast.Load())
                        yield Mutant(
                            path, type(one), _at(one), f"{lane} does not wait for the event of {ast.unparse(one)}", last
                        )
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("transfer.record") and id(node) not in waited:
            target = becomes.get(id(node))
            instead: ast.AST = none if target is None else ast.parse(target, mode="eval").body
            what = f"no event of {ast.unparse(node.args[0]).removeprefix('Lane.')}"
            yield Mutant(
                path, type(node), _at(node), what if target is None else f"{target} stays what it was", instead
            )
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func).split(".")[-1]
            if called in SETTLING or called == "result":
                yield Mutant(path, type(node), _at(node), f"without {ast.unparse(node)}", ast.Pass())


def _becomes(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Values by id, and the attribute that each becomes: ``a.b = value``, or ``a.verb(b=value)`` of a state."""
    if isinstance(node, ast.Assign):
        pair = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        targets, values = (node.targets[0].elts, node.value.elts) if pair else (node.targets[:1], [node.value])
        both = zip(targets, values, strict=True)
        yield from ((id(value), ast.unparse(target)) for target, value in both if isinstance(target, ast.Attribute))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield from ((id(word.value), f"{ast.unparse(node.func.value)}.{word.arg}") for word in node.keywords)


def _at(node: Any) -> tuple[int, ...]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


class Change(ast.NodeTransformer):
    """Puts something else in the place of some nodes."""

    def __init__(self, some: Iterable[Mutant]) -> None:
        self.left = {(one.kind, one.where): one.instead for one in some}

    def visit(self, node: ast.AST) -> Any:
        found = self.left.pop((type(node), _at(node)), None) if hasattr(node, "lineno") else None
        return self.generic_visit(node) if found is None else ast.copy_location(copy.deepcopy(found), node)


Functions = Mapping[tuple[str, str, int], FunctionType]


def functions() -> Functions:
    """All functions of the runtime, by file, name and line."""
    some = [each for each in gc.get_objects() if isinstance(each, FunctionType)]
    return {_key(each.__code__): each for each in some if each.__code__.co_filename.startswith(str(RUNTIME))}


def _key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def mutate(some: Sequence[Mutant], known: Functions) -> None:
    """Let this process's functions be the mutated ones."""
    for path in {one.path for one in some}:
        change = Change(one for one in some if one.path == path)
        tree = ast.fix_missing_locations(change.visit(ast.parse(path.read_text())))
        assert not change.left, change.left
        codes = [compile(tree, str(path), "exec")]
        while codes:
            code = codes.pop()
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            if _key(code) in known:
                known[_key(code)].__code__ = code


def noting(some: Sequence[Mutant]) -> list[Mutant]:
    """The same places, unchanged but that ``builtins.passed`` learns the number of each that is come by."""
    found = {}
    for one in some:
        node = next(n for n in ast.walk(ast.parse(one.path.read_text())) if type(n) is one.kind and _at(n) == one.where)
        value: Any = node.value if isinstance(node, ast.Expr) else node
        call = ast.parse(f"passed.add({one.place!r})", mode="eval").body
        both = ast.Subscript(ast.Tuple([call, value], ast.Load()), ast.Constant(1), ast.Load())
        instead = ast.Expr(both) if isinstance(node, ast.Expr) else both
        found[one.path, one.where] = Mutant(one.path, one.kind, one.where, one.place, instead)
    return list(found.values())


# --- processes -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Child:
    """A process of our own that runs cases, and what it says."""

    name: str
    pid: int
    pipe: int
    started_s: float
    heard_s: float
    said: bytes = b""
    case: str = ""  # the one that runs
    notes: list[dict[str, Any]] = field(default_factory=list)

    def listen(self) -> bool:
        """Read what there is; whether there may be more."""
        found = os.read(self.pipe, 1 << 16)
        *lines, self.said = (self.said + found).split(b"\n")
        for line in lines:
            self.heard_s = time.monotonic()
            note = json.loads(line)
            self.case = note.get("begin", self.case)
            if "begin" not in note:
                self.notes.append(note)
        return bool(found)

    def end(self) -> dict[str, Any]:
        """What became of it."""
        os.close(self.pipe)
        status = os.waitpid(self.pid, 0)[1]
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.waitstatus_to_exitcode(status)}"
        late = time.monotonic() - self.heard_s > LIMIT_S
        last = next(
            (note for note in self.notes if "how" in note), {"case": self.case, "how": "no end" if late else how}
        )
        return {"mutant": self.name, **last, "seconds": round(time.monotonic() - self.started_s, 1)}


Say = Callable[..., None]


def fork(name: str, work: Callable[[Say], None]) -> Child:
    """``work`` in a process of its own, which has no threads yet; so nor may this one."""
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads do not survive a fork"
    here, there = os.pipe()
    pid = os.fork()
    if pid:
        os.close(there)
        return Child(name, pid, here, time.monotonic(), time.monotonic())
    try:
        signal.alarm(600)  # should nobody be left to end it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        logging.disable()
        work(lambda **note: os.write(there, json.dumps(note).encode() + b"\n"))
        os._exit(0)
    except BaseException as error:
        os.write(there, json.dumps({"case": "outside", "how": repr(error)[:200]}).encode() + b"\n")
        os._exit(1)


def in_turn(work: Iterable[Callable[[], Child]], jobs: int = JOBS) -> Iterator[Child]:
    """Children as they are done."""
    left, running = iter(work), list[Child]()
    while True:
        running += [begin() for begin in itertools.islice(left, jobs - len(running))]
        if not running:
            return
        ready = select.select([child.pipe for child in running], [], [], 1.0)[0]
        for child in list(running):
            if child.pipe in ready and not child.listen():
                running.remove(child)
                yield child
            elif time.monotonic() - child.heard_s > LIMIT_S:
                os.kill(child.pid, signal.SIGKILL)


# --- the test --------------------------------------------------------------------------------------------------------


class Test:
    """Mutants, cases, and which of these come by which of those."""

    def __init__(self, without: Sequence[int], *, quick: bool) -> None:
        torch.set_num_threads(1)
        library()
        self.mutants = mutants()
        self._without = [self.mutants[number] for number in without]
        self.cases: dict[str, Case] = cases(quick)
        self._functions = functions()
        with tempfile.NamedTemporaryFile() as file:
            (child,) = in_turn([lambda: fork("plain training", lambda say: torch.save(expected(quick), file.name))])
            child.end()
            self.known = torch.load(file.name, weights_only=False)
        self.comes_by: dict[str, set[str]] = {}  # places, by case
        self._kills: Counter[str] = Counter()

    def unmutated(self) -> list[dict[str, Any]]:
        """Two runs of all cases, one of which also notes where they come by."""
        away = {one.place for one in self._without}
        marks = noting([one for one in self.mutants if one.place not in away])
        ends = []
        for child in in_turn([lambda: self._begin("unmutated", []), lambda: self._begin("unmutated, noted", marks)]):
            ends.append(child.end())
            if any("passed" in note for note in child.notes):
                self.comes_by = {note["case"]: set(note["passed"]) for note in child.notes if "passed" in note}
        return ends

    def of(self, several: Sequence[Sequence[Mutant]]) -> Iterator[dict[str, Any]]:
        """What becomes of these, each one mutant or more at a time."""
        for child in in_turn(
            (lambda some=some: self._begin(" and ".join(one.name for one in some), some)) for some in several
        ):
            found = child.end()
            self._kills[found["case"]] += 1
            yield found

    def _begin(self, name: str, some: Sequence[Mutant]) -> Child:
        places = {one.place for one in some}
        names = [case for case in self.cases if not self.comes_by or not places or places & self.comes_by[case]]
        random.Random(0).shuffle(names)  # one of each kind soon
        names.sort(key=lambda case: (case.startswith("order"), -self._kills[case]))
        return fork(name, lambda say: self._run(some, names, say))

    def _run(self, some: Sequence[Mutant], names: Sequence[str], say: Say) -> None:
        passed: set[str] = set()
        builtins.passed = passed  # type: ignore[attr-defined]
        mutate([*self._without, *some], self._functions)
        for name in names:
            say(begin=name)
            passed.clear()
            try:
                unequal = self.cases[name](self.known)
            except BaseException as error:
                unequal = [f"{type(error).__name__}: {error}"]
            if unequal:
                say(case=name, how=f"{len(unequal)} differ: {unequal[0]}"[:300])
                return
            if passed:
                say(case=name, passed=sorted(passed))
        say(case="", how="survived", cases=len(names))


def verdict(record: Mapping[str, Any]) -> str:
    """What became of a mutant."""
    if record["how"] == "survived":
        return "survived" if record["cases"] else "no case comes by"
    return "only the race detector" if record["case"].startswith("order") else "killed"


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """As markdown."""
    lines = ["| mutant | verdict | by | how | seconds |", "| --- | --- | --- | --- | --- |"]
    for each in records:
        how = "" if each["how"] == "survived" else each["how"].replace("|", "\\|").replace("\n", " ")[:80]
        lines.append(f"| `{each['mutant']}` | {verdict(each)} | {each['case'][:60]} | {how} | {each['seconds']} |")
    counts = Counter(map(verdict, records))
    share = 100 * counts["killed"] / max(1, len(records))
    said = ", ".join(f"{name}: {number}" for name, number in counts.most_common())
    return "\n".join([*lines, "", f"{len(records)} mutants; {said}. Killed on the device: {share:.0f} %.", ""])


def main() -> int:
    numbers = lambda text: [int(number) for number in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", type=numbers, default=[], help="numbers of mutants, with commas")
    parser.add_argument("--without", type=numbers, default=[], help="those that are left out all the time")
    parser.add_argument("--pairs", action="store_true", help="of those that survive, two at a time")
    parser.add_argument("--rehearse", action="store_true", help="two mutants that are known to fail, and a few cases")
    parser.add_argument("--list", action="store_true", help="say what the mutants are")
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{number} {one.name}" for number, one in enumerate(mutants())))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    test = Test(given.without, quick=given.rehearse)
    with (given.out / "results.jsonl").open("w") as file:

        def note(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
            for record in records:
                file.write(json.dumps(record) + "\n")
                file.flush()
                print(verdict(record), json.dumps(record), flush=True)
                yield record

        if any(verdict(record) != "survived" for record in note(test.unmutated())):
            return 1
        away = {test.mutants[number].place for number in given.without}
        chosen = [test.mutants[number] for number in given.only or range(len(test.mutants))]
        chosen = [one for one in chosen if one.place not in away]
        if given.rehearse:
            chosen = [one for one in chosen if f"{one.path.name} {one.what}" in REHEARSED]
        number_of = {one.name: number for number, one in enumerate(test.mutants)}
        records = sorted(note(test.of([[one] for one in chosen])), key=lambda record: number_of[record["mutant"]])
        (given.out / "table.md").write_text(table(records))
        print(table(records))
        if given.pairs:
            left = [test.mutants[number_of[each["mutant"]]] for each in records if verdict(each) != "killed"]
            (given.out / "pairs.md").write_text(table(list(note(test.of(list(itertools.combinations(left, 2)))))))
    return int(given.rehearse and any(verdict(record) != "killed" for record in records))


if __name__ == "__main__":
    sys.exit(main())
