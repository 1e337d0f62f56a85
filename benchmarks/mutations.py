"""A mutation test of the engine's ordering: does some case fail when one wait is left out?

    export OMP_NUM_THREADS=1
    python -m benchmarks.mutations --out FOLDER [--only N,...] [--without N,...] [--pairs] [--rehearse]
    python -m benchmarks.mutations --list

Problem. Copies, kernels and the worker run concurrently, and only events order them. A wait whose removal no test
notices is either unnecessary or untested, and a suite that has never failed says nothing about its own strength.

Mutants, found in the syntax trees of ``strategies/engine`` except for the transfers and the worker themselves: an event
that is waited for is replaced by ``None``; a result of the worker that is awaited for its event is not awaited, or is
awaited without its event; an event that is recorded keeps its former value, or is ``None``; a statement that settles
an update is removed. ``--only`` chooses mutants by their numbers in ``--list``. ``--pairs`` then removes two at a time
of those that no case noticed alone. ``--without`` removes some in every run: if all cases pass, those are not needed,
and mutants that they hid become visible.

Method. Each mutant runs in a forked process whose engine functions get the mutated code. It runs the cases of
``mutation_cases`` that reach the place until one fails: by other bits than plain training, by an error, a crash, or by
taking too long. The cases train on the simulated accelerator (``tests/helpers/simulated``) with one lane slowed down at
a time. Cases under the race detector run last; mutants that only these notice are counted apart. ``results.jsonl``
gets a line as each mutant ends, ``table.md`` all of them.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import gc
import itertools
import json
import logging
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

from benchmarks.mutation_cases import cases, expected
from benchmarks.slow_lanes import library
from strategies.engine import engine

ENGINE = Path(engine.__file__).parent
LEFT_OUT = ("transfer.py", "race_detector.py", "worker.py")  # they implement waiting
REHEARSED = (r"residency\.py:\d+ COMPUTE does not wait for \w+\.arrived", r"DOWN does not wait for \w+\.used")
JOBS, LIMIT_S = 2, 30  # processes at a time; seconds for one case, about a hundred times what it takes


# --- mutants ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Mutant:
    """A node of a module's syntax tree (``parsed``) and the source text that replaces it."""

    path: Path
    node: ast.expr | ast.stmt
    what: str
    instead: str

    @property
    def name(self) -> str:
        return f"{self.path.name}:{self.node.lineno} {self.what}"

    @property
    def place(self) -> int:
        """Identifies the node; two mutants of a node share it."""
        return id(self.node)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def mutants() -> list[Mutant]:
    """All mutants by file and line; their indices are the numbers of the options."""
    found = [one for path in sorted(ENGINE.rglob("*.py")) if path.name not in LEFT_OUT for one in _in_file(path)]
    return sorted(found, key=lambda one: (one.path.name, one.node.lineno, one.node.col_offset))


def _in_file(path: Path) -> Iterator[Mutant]:
    nodes = list(ast.walk(parsed(path)))
    assigns = [node for node in nodes if isinstance(node, ast.Assign)]
    pairs = [pair for one in assigns for pair in zip(_parts(one.targets[0]), _parts(one.value), strict=False)]
    attributes = {id(value): ast.unparse(target) for target, value in pairs if isinstance(target, ast.Attribute)}
    attributes |= {  # ``bucket.verb(used=event)`` is how others set an attribute of a bucket's state
        id(word.value): f"{ast.unparse(node.func.value)}.{word.arg}"
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        for word in node.keywords
    }
    tuples = {ast.unparse(one.targets[0]): one.value.elts for one in assigns if isinstance(one.value, ast.Tuple)}
    waited: set[int] = set()
    for lane, event in _waits(nodes, tuples):
        waited.add(id(event))
        text = ast.unparse(event)
        yield Mutant(path, event, f"{lane} does not wait for {text}", "None")
        if text.endswith(".result()"):
            yield Mutant(path, event, f"{lane} does not wait for the event of {text}", f"({text}, None)[1]")
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("transfer.record") and id(node) not in waited:
            kept = attributes.get(id(node))
            lane = ast.unparse(node.args[0]).removeprefix("Lane.")
            yield Mutant(path, node, f"{kept} stays what it was" if kept else f"no event of {lane}", kept or "None")
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func).split(".")[-1]
            if called == "result" or re.match("_?settle(_|$)", called):
                yield Mutant(path, node, f"without {ast.unparse(node)}", "pass")


def _waits(nodes: Iterable[ast.AST], tuples: Mapping[str, Sequence[ast.expr]]) -> Iterator[tuple[str, ast.expr]]:
    """Each lane, or "host", with an event that it waits for; ``tuples`` resolves starred names."""
    for node in nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        called = node.func.attr
        if called in ("wait", "host_wait") and ast.unparse(node.func.value).endswith("transfer"):
            lane = "host" if called == "host_wait" else ast.unparse(node.args[0]).removeprefix("Lane.")
            for event in node.args[called == "wait" :]:
                events = tuples[ast.unparse(event.value)] if isinstance(event, ast.Starred) else [event]
                yield from ((lane, one) for one in events)


def _parts(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


class Replace(ast.NodeTransformer):
    """Replaces nodes, given by their ids, with source text."""

    def __init__(self, instead: Mapping[int, str]) -> None:
        self._instead = instead

    def visit(self, node: ast.AST) -> Any:
        if id(node) not in self._instead:
            return self.generic_visit(node)
        (statement,) = ast.parse(self._instead[id(node)]).body
        return ast.copy_location(statement if isinstance(node, ast.stmt) else statement.value, node)  # type: ignore[attr-defined]


Functions = Mapping[tuple[str, str, int], FunctionType]


def functions() -> Functions:
    """All functions of the engine, by file, name and line."""
    some = [each for each in gc.get_objects() if type(each) is FunctionType]
    return {_key(each.__code__): each for each in some if each.__code__.co_filename.startswith(str(ENGINE))}


def _key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def mutate(some: Iterable[Mutant], known: Functions) -> None:
    """Give this process's functions the mutated code. Changes the parsed trees, so call it once per process."""
    for path, of_path in itertools.groupby(sorted(some, key=lambda one: one.path), key=lambda one: one.path):
        change = Replace({one.place: one.instead for one in of_path})
        codes = [compile(ast.fix_missing_locations(change.visit(parsed(path))), str(path), "exec")]
        while codes:
            code = codes.pop()
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            if _key(code) in known:
                known[_key(code)].__code__ = code


def noted(one: Mutant) -> Mutant:
    """The original code, which also adds the place to ``builtins.passed`` when it is reached."""
    both = f"(passed.add({one.place}), {ast.unparse(one.node)})[1]"
    return replace(one, instead=both)


# --- processes -------------------------------------------------------------------------------------------------------

Note = dict[str, Any]
Say = Callable[..., None]
Work = Callable[[Say], None]


def fork(work: Work) -> tuple[int, Any]:
    """Start ``work`` in a process of its own, and the file of its notes. Threads do not survive a fork, so this
    process must have none."""
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "set OMP_NUM_THREADS=1"
    file = tempfile.TemporaryFile("w+")  # noqa: SIM115
    say = lambda **note: os.write(file.fileno(), json.dumps(note).encode() + b"\n")  # noqa: E731
    pid = os.fork()
    if pid:
        return pid, file
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        logging.disable()
        work(say)
        os._exit(0)
    except BaseException as error:
        say(case="outside", how=repr(error)[:200])
        os._exit(1)


def in_turn(todo: Iterable[tuple[str, Work]]) -> Iterator[tuple[Note, list[Note]]]:
    """Run ``JOBS`` at a time; how each ended, with its notes, as they end."""
    left, running = iter(todo), dict[int, tuple[str, Any, float]]()
    while True:
        for name, work in itertools.islice(left, JOBS - len(running)):
            pid, file = fork(work)
            running[pid] = name, file, time.monotonic()
        if not running:
            return
        pid, status = os.wait()
        name, file, began_s = running.pop(pid)
        with file:
            file.seek(0)
            notes = [json.loads(line) for line in file]
        code = os.waitstatus_to_exitcode(status)
        begun = next((note["begin"] for note in reversed(notes) if "begin" in note), "")
        how = {-signal.SIGALRM: "no end"}.get(code, f"signal {-code}" if code < 0 else f"exit {code}")
        end = next((note for note in notes if "how" in note), {"case": begun, "how": how})
        yield {"mutant": name, **end, "seconds": round(time.monotonic() - began_s, 1)}, notes


# --- the test --------------------------------------------------------------------------------------------------------


class Test:
    """Mutants, cases, and which cases reach which places."""

    def __init__(self, without: Sequence[int], *, quick: bool) -> None:
        torch.set_num_threads(1)
        library()
        self.mutants = mutants()
        self._without = [self.mutants[number] for number in without]
        self._cases = cases(quick)
        self._functions = functions()
        with tempfile.NamedTemporaryFile() as file:
            save = lambda say: torch.save(expected(self._cases.values()), file.name)  # noqa: E731
            ((end, _),) = in_turn([("plain training", save)])
            if end["how"] != "exit 0":
                raise RuntimeError(f"plain training failed: {end['how']}")
            self._known = torch.load(file.name, weights_only=False)
        self._reached: dict[str, set[int]] = {}  # places, by case
        self._kills: Counter[str] = Counter()

    def left(self, some: Iterable[Mutant]) -> list[Mutant]:
        """Those whose places ``--without`` leaves alone."""
        away = {one.place for one in self._without}
        return [one for one in some if one.place not in away]

    def unmutated(self) -> Note:
        """Run all cases on the original code, and learn which places each reaches."""
        marks = {one.place: noted(one) for one in self.left(self.mutants)}
        ((end, notes),) = in_turn([("unmutated", self._work(list(marks.values()), list(self._cases)))])
        self._reached = {note["case"]: set(note["passed"]) for note in notes if "passed" in note}
        return end

    def of(self, several: Iterable[Sequence[Mutant]]) -> Iterator[Note]:
        """What becomes of each mutant, or of several at once."""

        def todo() -> Iterator[tuple[str, Work]]:
            for some in several:
                places = {one.place for one in some}
                names = [name for name in self._cases if places & self._reached.get(name, set())]
                random.Random(0).shuffle(names)  # so that different kinds come early
                names.sort(key=lambda name: (name.startswith("order"), -self._kills[name]))
                yield " and ".join(one.name for one in some), self._work(some, names)

        for end, _ in in_turn(todo()):
            self._kills[end["case"]] += 1
            yield end

    def _work(self, some: Sequence[Mutant], names: Sequence[str]) -> Work:
        def run(say: Say) -> None:
            passed: set[int] = set()
            builtins.passed = passed  # type: ignore[attr-defined]
            mutate([*self._without, *some], self._functions)
            for name in names:
                signal.alarm(LIMIT_S)  # ends the process
                say(begin=name)
                passed.clear()
                try:
                    unequal = self._cases[name](self._known)
                except BaseException as error:
                    unequal = f"{type(error).__name__}: {error}"
                if unequal:
                    say(case=name, how=unequal[:300])
                    return
                say(case=name, passed=sorted(passed))
            say(case="", how="survived", cases=len(names))

        return run


def outcome(record: Note) -> str:
    """What became of a mutant, in the words of the table."""
    if record["how"] == "survived":
        return "survived" if record["cases"] else "no case comes by"
    return "only the race detector" if record["case"].startswith("order") else "killed"


def table(records: Sequence[Note]) -> str:
    """Markdown: a line for each mutant, then the counts."""
    lines = ["| mutant | outcome | by | how | seconds |", "| --- | --- | --- | --- | --- |"]
    for each in records:
        how = "" if each["how"] == "survived" else each["how"].replace("|", "\\|").replace("\n", " ")[:80]
        lines.append(f"| `{each['mutant']}` | {outcome(each)} | {each['case'][:60]} | {how} | {each['seconds']} |")
    counts = Counter(map(outcome, records))
    share = 100 * counts["killed"] / max(1, len(records))
    said = ", ".join(f"{name}: {number}" for name, number in counts.most_common())
    return "\n".join([*lines, "", f"{len(records)} mutants; {said}. Killed on the device: {share:.0f} %.", ""])


def main() -> int:
    """The whole command; 1 if a case fails on the original code, or a rehearsed mutant survives."""
    numbers = lambda text: [int(number) for number in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/mutations"), metavar="FOLDER")
    parser.add_argument("--only", type=numbers, default=[], help="numbers of mutants, separated by commas")
    parser.add_argument("--without", type=numbers, default=[], help="mutants that apply in every run")
    parser.add_argument("--pairs", action="store_true", help="then two at a time of those that survived")
    parser.add_argument("--rehearse", action="store_true", help="two mutants that must fail, and a few cases")
    parser.add_argument("--list", action="store_true", help="print the mutants and their numbers")
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{number} {one.name}" for number, one in enumerate(mutants())))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    test = Test(given.without, quick=given.rehearse)
    with (given.out / "results.jsonl").open("w") as file:

        def note(record: Note) -> Note:
            print(json.dumps(record), file=file, flush=True)
            print(outcome(record), json.dumps(record), flush=True)
            return record

        if outcome(note(test.unmutated())) != "survived":
            return 1
        chosen = test.left(test.mutants[number] for number in given.only or range(len(test.mutants)))
        if given.rehearse:
            chosen = [one for one in chosen if any(re.search(f"{each}$", one.name) for each in REHEARSED)]
        order = {one.name: number for number, one in enumerate(test.mutants)}
        ends = sorted((note(end) for end in test.of([one] for one in chosen)), key=lambda end: order[end["mutant"]])
        (given.out / "table.md").write_text(table(ends))
        print(table(ends))
        if given.pairs:
            survivors = [test.mutants[order[end["mutant"]]] for end in ends if outcome(end) != "killed"]
            pairs = test.of(list(itertools.combinations(survivors, 2)))
            (given.out / "pairs.md").write_text(table([note(end) for end in pairs]))
    return int(given.rehearse and (not ends or any(outcome(end) != "killed" for end in ends)))


if __name__ == "__main__":
    sys.exit(main())
