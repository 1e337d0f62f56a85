"""What the redesign is judged by: mutants of waits, records of plans, counts of statements."""

import ast
from pathlib import Path

from deepstow.benchmarks import mutants, size
from deepstow.benchmarks.plan_record import compared

SOURCE = b"""
class Streams:
    def fetch(self, bucket):
        self.transfer.wait(Stream.UP, bucket.used, *others)
        bucket.arrived = self.transfer.record(Stream.UP)
        self.settle(bucket)
        self.settled(bucket)
        left = bucket.future.result()
        bucket.future.result()
        self.transfer.host_wait(bucket.stored)
"""


def test_each_wait_event_and_settle_becomes_a_mutant(tmp_path: Path) -> None:
    """An event becomes None and its variables stay bound; a value that somebody takes is no mutant."""
    mutants.REPO, before = tmp_path, mutants.REPO
    try:
        file = tmp_path / mutants.ENGINE / "streams.py"
        file.parent.mkdir(parents=True)
        file.write_bytes(SOURCE)
        found = mutants.mutants()
    finally:
        mutants.REPO = before
    assert [one.name.split(": ", 2)[2] for one in found] == [
        "UP does not wait for bucket.used", "UP does not wait for *others", "no event self.transfer.record(Stream.UP)",
        "without self.settle(bucket)", "without bucket.future.result()", "host does not wait for bucket.stored",
    ]  # fmt: skip
    texts = [one.text(SOURCE).decode() for one in found]
    assert all(ast.parse(text) for text in texts) and len(set(texts)) == len(texts)
    assert "wait(Stream.UP, (None if True else bucket.used), *others)" in texts[0]
    assert "wait(Stream.UP, bucket.used, (None if True else others))" in texts[1]
    assert "*(__import__('builtins').reached(7), others)[1])" in found[1].text(SOURCE, reached=7).decode()


def test_the_engine_has_mutants() -> None:
    """After a rename of what waits they would be gone."""
    found = mutants.mutants()
    assert len({one.name for one in found}) == len(found) >= 60
    for file, text in mutants.instrumented(found).items():
        compile(text, file, "exec")


def test_functions_get_the_code_of_a_mutant(tmp_path: Path) -> None:
    """Closures, too, in this process, and in the file for others."""
    file, names = tmp_path / "made.py", dict[str, object]()
    text = "def outer(one):\n    def inner():\n        return one\n    return inner\n"
    exec(compile(text, str(file), "exec"), names)
    outer: object = names["outer"]
    inner = outer(3)  # type: ignore[operator]
    mutants.swap(file, text.replace("return one", "return (None if True else one)").encode())
    assert inner() is None and outer(3)() is None and "None" in file.read_text()  # type: ignore[operator]


def test_a_plan_that_is_slower_or_gone_is_seen() -> None:
    old = {"a": {"seconds": 1.0, "buckets": [1]}, "b": {"seconds": None}}
    assert not compared(old, {"a": {"seconds": 1.009, "buckets": [1]}, "b": {"seconds": None}})[1]
    assert compared(old, {"a": {"seconds": 1.011, "buckets": [1]}, "b": {"seconds": None}})[1]
    assert compared(old, {"b": {"seconds": None}})[1]
    lines, _ = compared(old, {"a": {"seconds": 0.9, "buckets": [2]}, "b": {"seconds": None}})
    assert "another" in lines[2] and "same" in lines[3]


def test_statements_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Doc."""\n\n\ndef f() -> int:\n    x = 1; y = 2\n    return x + y\n')
    assert size.counted([tmp_path / "a.py"]) == (5, 6, 1)
