"""Steps as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open: a process for each step, in it a
track for each resource, and on it what worked when, by the planner's names.

A resource that does two things at a time, as copies of two streams do, has as many tracks as that takes: slices of one
track never overlap. Times are in microseconds from the start of the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepstow.strategies.planner.simulate import TraceEvent
from deepstow.strategies.planner.tasks import Resource

MICRO = 1e6
Steps = Mapping[str, tuple[float, Sequence[TraceEvent]]]  # by name: seconds, and what worked when in them


def write(steps: Steps, path: Path) -> None:
    """Write the ``steps`` to ``path``. Raises OSError."""
    path.write_text(json.dumps({"traceEvents": list(_events(steps)), "displayTimeUnit": "ms"}), encoding="utf-8")


def _events(steps: Steps) -> Iterator[dict[str, Any]]:
    """First the names of processes and tracks, then the slices, by start."""
    for process, (step, (seconds, events)) in enumerate(steps.items(), 1):
        yield _named("process_name", process, 0, f"{step} step, {seconds:.4g} s")
        yield {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": {"sort_index": process}}
        slices, number = list[dict[str, Any]](), 0
        for resource in Resource:
            for index, track in enumerate(_tracks(within(events, seconds), resource)):
                number += 1
                name = f"{resource.value} {index + 1}" if index else resource.value
                yield _named("thread_name", process, number, name)
                slices += [_slice(event, process, number) for event in track]
        yield from sorted(slices, key=lambda one: (one["ts"], one["tid"]))


def within(events: Sequence[TraceEvent], seconds: float) -> list[TraceEvent]:
    """What is from 0 to ``seconds``: what began in the step before, or ends in the next one, is cut."""
    cut = (replace(event, start=max(event.start, 0.0), end=min(event.end, seconds)) for event in events)
    return [event for event in cut if event.end > event.start]


def _tracks(events: Sequence[TraceEvent], resource: Resource) -> list[list[TraceEvent]]:
    """What a resource does, by start, each on the first track that is free: slices of one track do not overlap."""
    tracks = list[list[TraceEvent]]()
    for event in sorted((one for one in events if one.resource is resource), key=lambda one: (one.start, one.end)):
        free = next((track for track in tracks if track[-1].end <= event.start), None)
        if free is None:
            tracks.append(free := [])
        free.append(event)
    return tracks


def _named(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}


def _slice(event: TraceEvent, process: int, track: int) -> dict[str, Any]:
    start, end = (round(seconds * MICRO, 3) for seconds in (event.start, event.end))  # nanoseconds, as Perfetto counts
    about = {"name": event.label, "cat": event.label.split()[0], "ph": "X", "pid": process, "tid": track}
    return about | {"ts": start, "dur": round(end - start, 3)}
