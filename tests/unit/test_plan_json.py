"""plan.json holds all of a layout, reads back to it, and a corrupted file is seen."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepstow.launch.plan import main
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.report import full_report, plan_json
from tests.helpers.fakes import facts
from tests.helpers.layouts import transformer
from tests.unit.test_offload import plan_of

Content = dict[str, Any]


def written(plan: Plan) -> Content:
    found: Content = json.loads(json.dumps(full_report.to_json(plan, None)))
    return found


def moving() -> Plan:
    """Weights that travel and share addresses, gradients in slots, updates by the CPU."""
    return plan_of(transformer(), weights="streamed", site="host", gradients="host")


def test_a_plan_that_stows_nothing_has_nothing_to_carry_out() -> None:
    content = written(Plan.baseline(facts()))
    assert content["layout"] is None and plan_json.problems(json.dumps(content)) == []


def first(content: Content, where: str, key: str) -> list[Any]:
    """The first list under ``key`` that is not empty."""
    found: list[Any] = next(each[key] for each in content[where] if each[key])
    return found


CORRUPT: list[tuple[Callable[[Content], object], str]] = [
    (lambda content: content["layout"]["buckets"].pop(0), "in no bucket"),
    (lambda content: content["updates"].reverse(), "updates: do not follow"),
    (lambda content: first(content, "ticks", "fetch").clear(), "ticks: do not follow"),
    (lambda content: content["spots"].append(content["spots"][0]), "spots: two are of one bucket and item"),
    (lambda content: content["keeps"][0].update(hosted=["x"], hosted_bytes=4096), "saved tensors: has no address"),
    (
        lambda content: content.update(schema_version=4),
        "schema_version = 4: this release reads 5; write the plan anew",
    ),
    (lambda content: content["facts"]["params"][0].update(unit="x"), "is used by a unit that is not there"),
    (lambda content: content.pop("arenas"), "arenas: Field required"),
    (lambda content: content["layout"]["buckets"][0].update(site="moon"), "layout.buckets.0.site: Input should be "),
    (lambda content: content["layout"].update(speed=3), "layout.speed: Unexpected keyword argument"),
    (lambda content: content["layout"]["buckets"][0].pop("sizes"), "layout.buckets.0.sizes: Field required"),
]


@pytest.mark.parametrize(("corrupt", "says"), CORRUPT)
def test_a_corrupted_file_is_seen(corrupt: Callable[[Content], object], says: str) -> None:
    content = written(moving())
    assert plan_json.problems(json.dumps(content)) == []
    corrupt(content)
    found = plan_json.problems(json.dumps(content))
    assert any(says in line for line in found), found


def test_what_happens_when() -> None:
    """Fetches and evictions alternate for each travelling bucket, and every trained one is updated once."""
    plan = moving()
    assert plan.layout is not None
    ticks = plan_json.ticks(plan.layout)
    assert [tick.direction for tick in ticks] == ["forward"] * 6 + ["backward"] * 6
    for bucket in plan.layout.buckets:
        fetched = [index for index, tick in enumerate(ticks) if bucket.name in tick.fetch]
        evicted = [index for index, tick in enumerate(ticks) if bucket.name in tick.evict]
        stays = bucket.resident_ticks
        over_the_end = len(stays) > 1 and (stays[0][0], stays[-1][1]) == (0, 12)
        assert len(fetched) == len(evicted) == len(stays) - over_the_end
    assert sorted(plan_json.updates(plan.layout)) == sorted(bucket.name for bucket in plan.layout.buckets)
    assert sorted(name for tick in ticks for name in tick.gradients) == sorted(plan_json.updates(plan.layout))


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"]["schema_version"]["const"] == 5 and "Bucket" in schema["$defs"]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(content := written(moving())))
    assert main(["--check", str(file)]) == 0
    content["arenas"]["host"] = 0
    file.write_text(json.dumps(content))
    assert main(["--check", str(file)]) == 2
    assert all(line.startswith(f"{file}: ") for line in capsys.readouterr().err.splitlines())
    file.write_text("[" * 100_000)
    assert main(["--check", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"{file}: not JSON: ")
    assert main(["--check", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.endswith("none.json: No such file or directory\n")
