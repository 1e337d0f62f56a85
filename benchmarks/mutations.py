"""A mutation test of the engine's ordering: does some case fail when one wait is left out?

    export OMP_NUM_THREADS=1
    python -m benchmarks.mutations --out FOLDER [--only N,...] [--without N,...] [--rehearse]
    python -m benchmarks.mutations --list

Copies, kernels and the worker run concurrently, and only events order them. A wait whose removal no test notices is
unnecessary or untested.

Mutants, found in the source of ``strategies/engine`` except for the transfers and the worker themselves: an event that
is waited for is left out; a result of the worker that is awaited is not; an event is not recorded (None); an update is
not settled. ``--only`` chooses mutants by their numbers in ``--list``. ``--without`` applies some in every run: if all
cases pass, those waits are not needed, and mutants that they hid become visible.

Method. Each mutant runs in a forked process, in which the mutated call is recognised by its place in the source. It
runs the cases of ``mutation_cases`` that reach the place until one fails: by other bits than plain training, by an
error, a crash, or by taking too long. The cases train on the simulated accelerator (``tests/helpers/simulated``) with
one lane slowed down at a time. Cases under the race detector run last; mutants that only these notice are counted
apart. ``results.jsonl`` gets a line as each mutant ends, ``table.md`` all of them.
"""

from __future__ import annotations

import argparse
import ast
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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.mutation_cases import cases
from benchmarks.slow_lanes import library
from strategies.engine import engine
from strategies.engine.transfer.transfer import Transfer
from strategies.engine.updating.updates import Updates
from strategies.report.table import table as aligned

ENGINE = Path(engine.__file__).parent
LEFT_OUT = ("transfer.py", "worker.py")  # they implement waiting
REHEARSED = (r"residency\.py:\d+ COMPUTE does not wait for \w+\.arrived", r"DOWN does not wait for \w+\.used")
JOBS, LIMIT_S = 2, 30  # processes at a time; seconds for one case, about a hundred times what it takes

# --- mutants ---------------------------------------------------------------------------------------------------------

Place = tuple[int | None, ...]  # of a call in a file: its first and last line, its first and last column
MUTATED: tuple[tuple[type, tuple[str, ...]], ...] = (
    (Transfer, ("wait", "host_wait", "record")),
    (Future, ("result",)),
    (engine.Engine, ("settle", "_settle_after_backward")),
    (Updates, ("settle",)),
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A call that is not made; or, with ``event``, made without that argument."""

    file: str
    place: Place
    what: str
    event: int | None = None

    @property
    def name(self) -> str:
        return f"{Path(self.file).name}:{self.place[0]} {self.what}"


def mutants() -> list[Mutant]:
    """All mutants by file and line; their indices are the numbers of the options."""
    found = [one for path in ENGINE.rglob("*.py") if path.name not in LEFT_OUT for one in _in_file(path)]
    return sorted(found, key=lambda one: (one.name.split(":")[0], one.place, one.event or 0))


def _in_file(path: Path) -> Iterator[Mutant]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    tuples = {
        ast.unparse(node.targets[0]): node.value.elts
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
    }
    waited: set[int] = set()  # calls whose result is waited for at once
    for call, called in _calls(nodes):
        if called in ("wait", "host_wait"):
            lane = "host" if called == "host_wait" else ast.unparse(call.args[0]).removeprefix("Lane.")
            events = call.args[called == "wait" :]
            if isinstance(events[0], ast.Starred):
                events = tuples[ast.unparse(events[0].value)]
            waited |= {id(event) for event in events}
            for number, event in enumerate(events, start=2 if called == "wait" else 1):
                yield Mutant(str(path), _place(call), f"{lane} does not wait for {ast.unparse(event)}", number)
    for call, called in _calls(nodes):
        if called == "record" and id(call) not in waited:
            lane = ast.unparse(call.args[0]).removeprefix("Lane.")
            yield Mutant(str(path), _place(call), f"no event of {lane}")
        elif called == "result" and id(call) in waited:
            yield Mutant(str(path), _place(call), f"does not wait for {ast.unparse(call)}")
    for node in nodes:
        if isinstance(node, ast.Expr) and any(
            re.fullmatch("result|_?settle", called) for _, called in _calls([node.value])
        ):
            yield Mutant(str(path), _place(node.value), f"without {ast.unparse(node)}")


def _calls(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.Call, str]]:
    """The calls of methods, with their names; of a transfer's, only those that order lanes."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = node.func.attr
            if called not in ("wait", "record") or ast.unparse(node.func.value).endswith("transfer"):
                yield node, called


def _place(call: ast.expr) -> Place:
    return call.lineno, call.end_lineno, call.col_offset, call.end_col_offset


def mutate(some: Iterable[Mutant], passed: set[tuple[str, Place]]) -> None:
    """Let this process leave out what the mutants say; ``passed`` gets the file and place of each call."""
    left_out: dict[tuple[str, Place], set[int | None]] = defaultdict(set)
    for one in some:
        left_out[one.file, one.place].add(one.event)
    for owner, names in MUTATED:
        for name in names:
            setattr(owner, name, _watched(getattr(owner, name), dict(left_out), passed))


def _watched(
    method: Callable[..., Any], left_out: Mapping[tuple[str, Place], set[int | None]], passed: set[tuple[str, Place]]
) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        caller = sys._getframe(1)
        place = next(itertools.islice(caller.f_code.co_positions(), caller.f_lasti // 2, None))
        passed.add((caller.f_code.co_filename, place))
        gone = left_out.get((caller.f_code.co_filename, place), ())
        if None in gone:
            return None
        return method(*(value for number, value in enumerate(given) if number not in gone), **named)

    return call


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


class Test:
    """Mutants, cases, and which cases reach which mutants."""

    def __init__(self, without: Sequence[int], *, quick: bool) -> None:
        torch.set_num_threads(1)
        library()
        self.mutants = mutants()
        self._without = without
        self._cases = cases(quick)
        self._reached: dict[str, list[int]] = {}  # numbers of mutants, by case
        self._kills: Counter[str] = Counter()

    def unmutated(self) -> Note:
        """Run all cases on the original code, and learn which mutants each reaches."""
        ((end, notes),) = in_turn([("unmutated", self._work([], list(self._cases)))])
        self._reached = {note["case"]: note["reached"] for note in notes if "reached" in note}
        return end

    def of(self, numbers: Iterable[int]) -> Iterator[Note]:
        """What becomes of each mutant."""

        def todo() -> Iterator[tuple[str, Work]]:
            for number in numbers:
                names = [name for name, reached in self._reached.items() if number in reached]
                random.Random(0).shuffle(names)  # so that different kinds come early
                names.sort(key=lambda name: (name.startswith("order"), -self._kills[name]))
                yield self.mutants[number].name, self._work([number], names)

        for end, _ in in_turn(todo()):
            self._kills[end["case"]] += 1
            yield end

    def _work(self, numbers: Sequence[int], names: Sequence[str]) -> Work:
        def run(say: Say) -> None:
            passed: set[tuple[str, Place]] = set()
            mutate([self.mutants[number] for number in (*self._without, *numbers)], passed)
            for name in names:
                signal.alarm(LIMIT_S)  # ends the process
                say(begin=name)
                passed.clear()
                try:
                    self._cases[name]()
                except BaseException as error:
                    say(case=name, how=f"{type(error).__name__}: {error}"[:300])
                    return
                reached = [number for number, one in enumerate(self.mutants) if (one.file, one.place) in passed]
                say(case=name, reached=reached)
            say(case="", how="survived", cases=len(names))

        return run


def outcome(record: Note) -> str:
    """What became of a mutant, in the words of the table."""
    if record["how"] == "survived":
        return "survived" if record["cases"] else "no case comes by"
    return "only the race detector" if record["case"].startswith("order") else "killed"


def table(records: Sequence[Note]) -> str:
    """Markdown: a line for each mutant, then the counts."""
    rows = []
    for each in records:
        how = "" if each["how"] == "survived" else each["how"].replace("|", "\\|").replace("\n", " ")[:80]
        rows.append((f"`{each['mutant']}`", outcome(each), each["case"][:60], how, str(each["seconds"])))
    lines = aligned(("mutant", "outcome", "by", "how", "seconds"), rows, markdown=True)
    counts = Counter(map(outcome, records))
    share = 100 * counts["killed"] / max(1, len(records))
    said = ", ".join(f"{name}: {number}" for name, number in counts.most_common())
    return "\n".join([*lines, "", f"{len(records)} mutants; {said}. Killed on the device: {share:.0f} %.", ""])


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> int:
    """The whole command; 1 if a case fails on the original code, or a rehearsed mutant survives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/mutations"), metavar="FOLDER")
    parser.add_argument("--only", type=numbers, default=[], help="numbers that --list shows, as in 3,17")
    parser.add_argument("--without", type=numbers, default=[], help="mutants that apply in every run")
    parser.add_argument("--rehearse", action="store_true", help="two mutants that must fail, and a few cases")
    parser.add_argument("--list", action="store_true", help="print the mutants and their numbers")
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{number} {one.name}" for number, one in enumerate(mutants())))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    test = Test(given.without, quick=given.rehearse)
    names = [one.name for one in test.mutants]
    with (given.out / "results.jsonl").open("w") as file:

        def note(record: Note) -> Note:
            print(json.dumps(record), file=file, flush=True)
            print(outcome(record), json.dumps(record), flush=True)
            return record

        if outcome(note(test.unmutated())) != "survived":
            return 1
        chosen = [number for number in given.only or range(len(names)) if number not in given.without]
        if given.rehearse:
            chosen = [number for number in chosen if any(re.search(f"{each}$", names[number]) for each in REHEARSED)]
        ends = sorted(map(note, test.of(chosen)), key=lambda end: names.index(end["mutant"]))
    (given.out / "table.md").write_text(table(ends))
    print(table(ends))
    return int(given.rehearse and (not ends or any(outcome(end) != "killed" for end in ends)))


if __name__ == "__main__":
    sys.exit(main())
