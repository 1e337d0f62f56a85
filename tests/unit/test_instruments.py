"""What the redesign is judged by: mutants of waits, records of plans, counts of statements."""

from deepstow.benchmarks import mutants
from deepstow.benchmarks.plan_record import compared


def test_the_engine_has_mutants() -> None:
    """After a rename of what waits they would be gone."""
    found = mutants.mutants()
    assert len({one.name for one in found}) == len(found) >= 60
    for file, text in mutants.instrumented(found).items():
        compile(text, file, "exec")


def test_a_plan_that_is_slower_or_gone_is_seen() -> None:
    old = {"a": {"seconds": 1.0, "buckets": [1]}, "b": {"seconds": None}}
    assert not compared(old, {"a": {"seconds": 1.009, "buckets": [1]}, "b": {"seconds": None}})[1]
    assert compared(old, {"a": {"seconds": 1.011, "buckets": [1]}, "b": {"seconds": None}})[1]
    assert compared(old, {"b": {"seconds": None}})[1]
    lines, _ = compared(old, {"a": {"seconds": 0.9, "buckets": [2]}, "b": {"seconds": None}})
    assert "another" in lines[2] and "same" in lines[3]
