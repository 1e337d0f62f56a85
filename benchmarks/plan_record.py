"""Simulated: what is planned for published degrees, our configs and large models, to compare after the planner changes.

    python -m deepstow.benchmarks.plan_record --out RECORD.json            what this code plans
    python -m deepstow.benchmarks.plan_record --out NEW.json --compare OLD.json
    python -m deepstow.benchmarks.plan_record --judge NEW.json --compare OLD.json       in the tree of an earlier commit

A record has a choice and its simulated seconds by name: degrees of ``published_choices``, or where each bucket is.
``--compare`` exits with 1 if a step is more than ``SLOWER`` times as long as in OLD. Two simulators cannot be compared
by their seconds; so ``--judge`` prices the choices of NEW by the simulator of the code that runs it, in its tree.
Buckets are found by their parameters there, so they have to be cut as that code cuts them for one of its capacities.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from deepstow.benchmarks import published_choices as published
from deepstow.launch import plan as command
from deepstow.strategies.core.layout import Bucket
from deepstow.strategies.core.plan import Plan
from deepstow.strategies.planner.buckets import PARTS, block_bytes, form
from deepstow.strategies.planner.hybrid.degrees import Degrees, Models, Size, Stowed
from deepstow.strategies.planner.hybrid.search import Options, hybrid
from deepstow.strategies.planner.hybrid.step_seconds import Pricing
from deepstow.strategies.planner.step_cost import plan_cost, seconds_of
from deepstow.strategies.report.table import table
from deepstow.trainer.errors import ConfigError

REPO = Path(command.__file__).resolve().parents[1]
SLOWER = 1.01
RANKS = {"pipeline": 2, "tensor": 2, "experts": 2, "zero": 2, "llama-70b": 64}
CONFIGS = ("finetune", "offload", "quickstart", "recompute", *RANKS)
LLAMA: Mapping[str, Mapping[str, int]] = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 32, "vocab_size": 32000},
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
            "num_key_value_heads": 40, "vocab_size": 32000},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 32000},
}  # fmt: skip
DEGREES = "degrees"  # of all papers
CLIPPED, NOT = {"training.max_grad_norm": 1.0}, {"training.max_grad_norm": 0.0}
# model, machine, ranks, budget on the device, free memory of the host, and what else differs
CASES: tuple[tuple[str, str, int, str, str, Mapping[str, object]], ...] = (
    ("7B", "rtx4090-pcie4", 1, "20GiB", "128GiB", CLIPPED),
    ("7B", "rtx4090-pcie4", 1, "20GiB", "128GiB", NOT),
    ("7B", "rtx4090-pcie4", 1, "12GiB", "128GiB", {**CLIPPED, "training.gradient_accumulation_steps": 4}),
    ("7B", "h100-pcie5", 1, "40GiB", "256GiB", CLIPPED),
    ("7B", "h100-pcie5", 1, "70GiB", "256GiB", NOT),
    ("7B", "h100-pcie5", 1, "24GiB", "128GiB", {**CLIPPED, "strategies.offload.moments": "int8"}),
    ("13B", "h100-pcie5", 1, "70GiB", "256GiB", CLIPPED),
    ("13B", "rtx4090-pcie4", 1, "20GiB", "256GiB", CLIPPED),
    ("13B", "a100-80g-sxm", 8, "40GiB", "1TiB", {**CLIPPED, "strategies.zero.stage": 3}),
    ("70B", "h100-sxm-pcie5", 8, "70GiB", "2TiB", {**CLIPPED, "strategies.zero.stage": 3}),
    ("70B", "h100-pcie5", 1, "70GiB", "2TiB", CLIPPED),
)  # fmt: skip
Choice = dict[str, Any]  # "seconds", None where nothing is simulated, and what was chosen


def degrees(price: Mapping[str, Choice] = {}) -> Iterator[tuple[str, Choice]]:
    """The first of the search for what each paper trained, or the price of those that are given."""
    settings = [(gpt, 8 * stages, sequences) for gpt, stages, sequences, _ in published.SECONDS]
    settings += [(gpt, 8 * stages * data, sequences) for gpt, stages, data, sequences, _ in published.TERAFLOPS]
    for gpt, ranks, sequences in settings:
        name = f"{gpt.name}, {gpt.year}, {ranks} ranks"
        machine, cluster = published.setting(gpt, ranks)
        facts = {Size(b, t): published.rank_facts(gpt, machine, b, t) for b in (1, 2, 4) for t in (1, 2, 4, 8)}
        policies = ("none", "full") if gpt.year == 2021 else ("none", "selective", "full")
        if name in price:
            chosen = TypeAdapter(Degrees).validate_python(price[name]["degrees"])
            rates = facts[chosen.size].machine.rates
            assert rates is not None
            yield name, {"seconds": Pricing(Models(facts), cluster, rates).price(chosen).seconds}
        else:
            options = Options(published.without_zero_2, policies, (Stowed.NOTHING,))
            best = hybrid(facts, cluster, sequences, options).best[0]
            yield name, {"seconds": best.price.seconds, "degrees": to_jsonable_python(best.degrees)}


def plans() -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Names, and what plans."""
    for name in CONFIGS:
        arguments = ["--config", str(REPO / f"configs/{name}.yaml"), "--profile", "h100-sxm-pcie5"]
        yield f"configs/{name}.yaml", _planner(arguments, RANKS.get(name, 1))
    for model, machine, ranks, device, host, options in CASES:
        keys = {
            "model.config": {"model_type": "llama", "max_position_embeddings": 4096, **LLAMA[model]},
            "model.tokenizer": "none", "data.path": "random tokens", "data.max_length": 2048, "training.bf16": True,
            "training.gradient_checkpointing": True, "training.per_device_train_batch_size": 1,
            "strategies.offload.gpu_memory": device, **options,
        }  # fmt: skip
        arguments = ["--config", str(REPO / "configs/base.yaml"), "--profile", machine, "--host-memory", host]
        arguments += [f"{key}={json.dumps(value)}" for key, value in keys.items()]
        words = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in options.items())
        yield f"{model}, {ranks} x {machine}, {device}, {words}", _planner(arguments, ranks)


def _planner(asked: list[str], ranks: int) -> Callable[[], Plan]:
    def make() -> Plan:
        from deepstow.trainer.planning.from_config import plan_of

        given = command.parse([*asked, "--world-size", str(ranks)])
        return plan_of(command.config_of(given), command.ranks_of(given), command.machine_of(given))

    return make


RENAMED = {"ways": "shards", "grad_home": "grad_tier"}  # fields of buckets in older records
OF_A_BUCKET = {field.name for field in fields(Bucket)} - {"units", "sizes", "offsets", "num_elements", "params"}


def chosen(plan: Plan) -> Choice:
    """What a plan decides, and its seconds."""
    cost, layout = plan_cost(plan), plan.layout
    keeps = [to_jsonable_python(plan.keep(unit.name)) for unit in plan.facts.units]
    choice: Choice = {"seconds": cost.seconds if cost else None, "keeps": _runs(keeps)}
    if layout is not None:
        every = to_jsonable_python(layout)
        choice["layout"] = {key: value for key, value in every.items() if key not in ("buckets", "units")}
        with_default = [field for field in fields(Bucket) if field.default is not MISSING]
        default = {field.name: to_jsonable_python(field.default) for field in with_default}
        choice["buckets"] = [
            {"first": row["params"][0], "params": len(row["params"])}
            | {key: row[key] for key in sorted(OF_A_BUCKET) if key != "name" and row[key] != default.get(key, MISSING)}
            for row in every["buckets"]
        ]
    return choice


def _runs(keeps: list[Any]) -> list[Any]:
    """Equal neighbours once, with their number."""
    runs: list[Any] = []
    for keep in keeps:
        plain = {key: value for key, value in keep.items() if key not in ("unit", "name")}
        if runs and runs[-1][1] == plain:
            runs[-1][0] += 1
        else:
            runs.append([1, plain])
    return runs


def priced(plan: Plan, choice: Choice) -> float | None:
    """The seconds of ``choice`` by this code's simulator, on the facts and for the keeps of its own ``plan``."""
    if "buckets" not in choice or plan.layout is None or plan.facts.machine.rates is None:
        return None
    rows, shards = choice["buckets"], plan.layout.buckets[0].shards
    block = block_bytes(plan.facts)
    bucketings = [plan.layout.buckets, *(form(plan.facts, -(-block // parts), shards) for parts in (1, *PARTS))]
    for buckets in bucketings:
        if [(b.params[0], len(b.params)) for b in buckets] == [(row["first"], row["params"]) for row in rows]:
            renamed = [{RENAMED.get(key, key): value for key, value in row.items()} for row in rows]
            bare = [{key: value for key, value in row.items() if key not in ("first", "params")} for row in renamed]
            plain = [_bare(bucket) | row for bucket, row in zip(buckets, bare, strict=True)]
            layout = replace(plan.layout, buckets=tuple(map(TypeAdapter(Bucket).validate_python, plain)))
            return seconds_of(plan.facts_as_kept(), layout, plan.facts.machine.rates)
    return None


def _bare(bucket: Bucket) -> dict[str, Any]:
    values: dict[str, Any] = to_jsonable_python(bucket)
    keep = {"name", "units", "params", "sizes", "offsets", "num_elements"}
    return {key: value for key, value in values.items() if key in keep}


def record(judged: Mapping[str, Choice] | None = None, only: str = "") -> dict[str, Choice]:
    """What this code chooses, or its seconds of what is ``judged``; of those whose names contain ``only``."""
    choices = dict(degrees(judged or {})) if only in DEGREES else {}
    for name, make in plans():
        if only not in name:
            continue
        try:
            plan = make()
        except ConfigError as error:
            choices[name] = {"seconds": None, "refused": str(error)}
        else:
            choices[name] = chosen(plan) if judged is None else {"seconds": priced(plan, judged.get(name, {}))}
        print(name, choices[name]["seconds"], file=sys.stderr, flush=True)
    return choices


def compared(old: Mapping[str, Choice], new: Mapping[str, Choice]) -> tuple[list[str], bool]:
    """The table, and whether a step is too slow or missing."""
    rows, slow = [], False
    for name, before in old.items():
        after = new.get(name, {"seconds": None})
        first, second = before["seconds"], after["seconds"]
        ratio = second / first if first and second else None
        slow |= bool(first) and (ratio is None or ratio > SLOWER)
        same = {**before, "seconds": 0} == {**after, "seconds": 0}
        numbers = ("-" if number is None else f"{number:.5g}" for number in (first, second, ratio))
        rows.append((name, *numbers, "same" if same else "another"))
    return table(("case", "before", "after", "ratio", "choice"), rows, markdown=True), slow


def main() -> int:
    """See the module docstring. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("out", "judge", "compare"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--only", default="", help=f"of names that contain it, or {DEGREES}")
    given = parser.parse_args()
    choices = record(json.loads(given.judge.read_text()) if given.judge else None, given.only)
    if given.out:
        lines = (f"{json.dumps(name)}: {json.dumps(choice)}" for name, choice in choices.items())
        given.out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    if not given.compare:
        return 0
    lines_, slow = compared(json.loads(given.compare.read_text()), choices)
    print("\n".join(lines_))
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
