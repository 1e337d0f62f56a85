"""Policies of the code base, read from the syntax trees: who imports whom, how long things are, what is documented."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from deepstow.strategies.core.protocol import BITWISE, Parity, Phase, Strategy
from deepstow.strategies.core.registry import available, find
from tests.helpers.fakes import run_facts

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("launch", "strategies", "trainer")
FILES = sorted(path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
BENCHMARKS = sorted(
    path.relative_to(ROOT) for pattern in ("*.py", "harness/*.py") for path in (ROOT / "benchmarks").glob(pattern)
)
EVERYWHERE = [*FILES, *BENCHMARKS, Path("deepstow/__init__.py")]
STRATEGIES = [path for path in FILES if path.parent == Path("strategies") and path.stem != "__init__"]
PURE = [path for path in FILES if path.parts[:2] in {("strategies", name) for name in ("core", "planner", "report")}]
MOST_LINES, MOST_FUNCTION_LINES = 600, 70

# The rooms, without the root `deepstow.`, each behind those that may import it. A strategy is a file of its own,
# directly in `strategies`.
ROOMS = (
    "strategies.core", "strategies.planner", "strategies.report", "strategies.state", "strategies.engine",
    "strategies.backends", "strategies", "trainer.errors", "trainer.config", "trainer.tasks", "trainer.distributed",
    "trainer.model", "trainer.machine", "trainer.planning", "trainer.data", "trainer.run", "trainer.verify", "deepstow",
    "tests", "benchmarks.harness", "launch", "benchmarks",
)  # fmt: skip
# The floors of ``strategies/engine``, lowest first.
FLOORS = (
    "transfer", "memory", "tensors", "forward", "buckets", "ranks", "residency", "updating", "model_checks",
    "module_hooks", "prefetch", "engine", "keeper", "saving", "optimizer", "pruning", "named",
)  # fmt: skip
# The files of ``strategies/engine`` that define a bucket's state, and the fields that only they write.
OWNERS = {
    "bucket_state.py": {"pending", "present", "given_up", "open", "job", "replaced", "overlapping", "zeros_stay"},
    "gradient_state.py": {"landed", "unsent", "touched", "summed", "spent", "zeroed", "norms"},
    "parameter_views.py": {"own", "versions", "counts", "bound", "shown"},
}
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "sort", "update"}
# Who may look at the environment, and why.
ENVIRONMENT = {
    "strategies/engine/memory/accelerator.py": "torch's allocator reads its settings from it, and the user's stay",
    "trainer/distributed/ranks.py": "launchers describe the job there, and libraries read their settings from it",
    "trainer/errors.py": "torch's launcher names there the file whose text it shows last",
    "trainer/distributed/spawn.py": "is the launcher of its own ranks",
    "trainer/distributed/deepspeed_ops.py": "torch finds compilers and its folder of compiled extensions by it",
    "trainer/machine/repeated_sums.py": "cuBLAS and FlashAttention's package read from it whether sums have one order",
    "trainer/verify/verify.py": "how many threads the user gives to a process",
    "trainer/run/live.py": "what kind of terminal the run has is said there and nowhere else",
    "trainer/run/trackers.py": "trackers are told their project by it, which may not be the one of the config",
}
# Who may unpickle, and what; never what was read from a file.
UNPICKLES = {
    "trainer/model/undisturbed.py": "what its own child has written into a pipe",
    "trainer/run/stowed_trainer.py": "what the first rank of the same job has broadcast",
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.AST, *, module_level: bool = False, typing: bool = True) -> Iterator[str]:
    """Dotted names of everything imported, ours without their root; ``typing``: with what only type checkers see, never
    at module level.
    """
    for node in running(tree, functions=not module_level) if module_level or not typing else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("deepstow.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "imports are absolute"
            module = node.module.removeprefix("deepstow.")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def running(tree: ast.AST, *, functions: bool) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported; with ``functions`` also those that run when they are called."""
    for node in ast.iter_child_nodes(tree):
        checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        called = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if not checking and (functions or not called):
            yield node
            yield from running(node, functions=functions)


def starts(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def room_of(module: str) -> str | None:
    """The room that a module of ours is in; None for the libraries of others."""
    rooms = [room for room in ROOMS if starts(module, room)]
    return max(rooms, key=len, default=None)


def test_the_scan_sees_the_code() -> None:
    """A policy over no files would always hold."""
    assert {Path("launch/train.py"), Path("trainer/run/order.py"), Path("strategies/core/plan.py")} <= set(FILES)
    assert Path("strategies/zero.py") in STRATEGIES
    assert {Path("strategies/core/compose.py"), Path("strategies/planner/placement_search.py")} <= set(PURE)
    assert "strategies.core.plan.Plan" in set(imports(tree_of(Path("trainer/run/order.py"))))
    assert {room_of(module_of(path)) for path in EVERYWHERE} >= set(ROOMS) - {"tests"}


@pytest.mark.parametrize("name", ["trainer.errors", "strategies.core", "launch.cli", "benchmarks.harness"])
def test_nothing_is_imported_without_the_root(name: str) -> None:
    """By no name in a string either: it would be a second module, whose classes are others."""
    with pytest.raises(ImportError, match=f"^import deepstow.{name.partition('.')[0]}$"):
        import_module(name)


def test_no_import_runs_back_up() -> None:
    """Each room imports only itself and the rooms behind it, inside functions too."""
    place = {room: index for index, room in enumerate(ROOMS)}
    back = [
        f"{module_of(path)} imports {name}"
        for path in EVERYWHERE
        for name in imports(tree_of(path), typing=False)
        if (room := room_of(name)) and room != "strategies" and place[room] > place[room_of(module_of(path)) or ""]
    ]
    assert back == []


def test_there_is_no_import_circle() -> None:
    """Not among imports that only type checkers see either."""
    modules = {module_of(path) for path in EVERYWHERE}
    graph: dict[str, set[str]] = defaultdict(set)
    for path in EVERYWHERE:
        own = module_of(path)
        graph[own] |= {name for name in imports(tree_of(path)) if name in modules - {own}}
    # A package stands for what it exports; that its modules import each other through it is not meant by a circle.
    for package in [module_of(path) for path in EVERYWHERE if path.stem == "__init__"]:
        graph.pop(package, None)
    assert len(graph) > 100
    TopologicalSorter(graph).prepare()  # the error names the circle


def test_the_floors_of_the_engine_import_only_downwards() -> None:
    """Each imports itself and the floors before it in ``FLOORS``."""
    place = {floor: index for index, floor in enumerate(FLOORS)}
    up = []
    for path in FILES:
        if path.parts[:2] == ("strategies", "engine") and path.stem != "__init__":
            names = (name.split(".") for name in imports(tree_of(path)) if name.startswith("strategies.engine."))
            own = path.relative_to("strategies/engine").with_suffix("").parts[0]
            up += [f"{path} imports {'.'.join(name)}" for name in names if place[name[2]] > place[own]]
    assert up == []
    assert set(FLOORS) == {path.stem for path in (ROOT / "strategies/engine").iterdir()} - {"__init__", "__pycache__"}


def writes(tree: ast.AST, names: set[str]) -> Iterator[str]:
    """Every place that assigns to one of these fields, or to an element of one, or changes a collection in it.
    Attributes of ``self`` are another class's own, those of ``ctx`` an autograd function's.
    """
    for node in ast.walk(tree):
        target: Any = node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            target = node.func.value
        elif not isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            continue
        while isinstance(target, ast.Subscript):
            target = target.value
        is_field = isinstance(target, ast.Attribute) and target.attr in names
        if is_field and ast.unparse(target.value) not in ("self", "ctx"):
            yield f"line {target.lineno}: {ast.unparse(target)}"


@pytest.mark.parametrize("owner", OWNERS)
def test_only_the_owner_writes_the_state_of_a_bucket(owner: str) -> None:
    """All others call its methods."""
    names = OWNERS[owner]
    assert list(writes(ast.parse("bucket.grads.{0}[1] += 2; bucket.{0}.add(1)".format(min(names))), names))
    others = [path for path in FILES if path.parts[:2] == ("strategies", "engine") and path.name != owner]
    assert [f"{path} {write}" for path in others for write in writes(tree_of(path), names)] == []


def test_strategies_know_the_core_and_not_each_other() -> None:
    for path in STRATEGIES:
        others = [module_of(other) for other in STRATEGIES if other != path]
        assert [name for name in imports(tree_of(path)) if starts(name, *others)] == [], path


def test_deciding_needs_no_torch_and_importing_no_deepspeed() -> None:
    """Importing DeepSpeed costs seconds and prints; whoever needs it imports it where it is used."""
    heavy = ("torch", "deepspeed", "transformers", "accelerate", "numpy")
    for path in FILES:
        unwanted = heavy if path in [*PURE, *STRATEGIES] else ("deepspeed",)
        assert [name for name in imports(tree_of(path), module_level=True) if starts(name, *unwanted)] == [], path
    for path in PURE:
        inside = [name for name in imports(tree_of(path)) if starts(name, *heavy)]
        assert inside == (["torch", "torch.nn"] if path.name == "protocol.py" else []), path  # for type checkers


def test_files_and_functions_fit_the_eye() -> None:
    assert [path for path in EVERYWHERE if len((ROOT / path).read_text().splitlines()) >= MOST_LINES] == []
    long = [
        f"{path}:{node.name}"
        for path in EVERYWHERE
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= MOST_FUNCTION_LINES
    ]
    assert long == []


def test_what_is_public_is_documented() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for path in FILES:
        tree = tree_of(path)
        assert ast.get_docstring(tree), f"{path}: a module says what it is for"
        public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
        assert [node.name for node in public if not ast.get_docstring(node)] == [], path


def test_the_environment_is_read_in_one_place() -> None:
    """Ambient switches cannot be seen in a config; ``ENVIRONMENT`` lists who may look, and why."""
    for path in FILES:
        reads = [
            node.lineno
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv")
        ]
        reads += [0 for name in imports(tree_of(path)) if name in ("os.environ", "os.getenv")]
        assert bool(reads) is (str(path) in ENVIRONMENT), (path, reads)


def test_no_text_reaches_a_shell_and_no_file_is_executed() -> None:
    """A config, a checkpoint or a dataset may come from a stranger; ``UNPICKLES`` lists who may unpickle, and what."""
    unsafe = {"os.system", "os.popen", "pickle.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
    unpickling = set()
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert called not in unsafe and given.get("shell", "False") == "False", f"{path}:{node.lineno}: {called}"
            assert called != "torch.load" or given.get("weights_only") == "True", f"{path}:{node.lineno}: {called}"
            unpickling |= {str(path)} if called == "pickle.loads" else set()
    assert unpickling == set(UNPICKLES)


def test_cuda_is_named_in_one_place() -> None:
    """Every other file calls what is the same for all accelerators."""

    def names_cuda(path: Path) -> bool:
        nodes = list(ast.walk(tree_of(path)))
        attributes = [node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr == "cuda"]
        named = any(isinstance(value, ast.Name) and value.id == "torch" for value in attributes)
        return named or any(starts(name, "torch.cuda") for name in imports(tree_of(path)))

    assert {Path("deepstow/__init__.py"), Path("benchmarks/gpu_engine.py"), Path("trainer/machine/probe.py")} <= set(
        EVERYWHERE
    )
    assert [str(path) for path in EVERYWHERE if names_cuda(path)] == ["strategies/engine/memory/accelerator.py"]


def test_the_glossary_is_true() -> None:
    """Every word of the glossary in docs/design.md is a name where it says so."""
    text = (ROOT / "docs/design.md").read_text().split("## Glossary")[1].split("\n## ")[0]
    rows = re.findall(r"^\| \*\*([\w ]+)\*\* \| (.+) \| `([\w/.]+)` \|$", text, re.M)
    assert 10 <= len(rows) <= 16
    for word, meaning, where in rows:
        names = {name.lower() for name in _names(Path(where))}
        assert any(word.replace(" ", "_") in name or word.replace(" ", "") in name for name in names), (word, where)
        assert meaning.strip()


def _names(path: Path) -> Iterator[str]:
    """Every identifier of ``path``, and its own name."""
    yield path.stem
    for node in ast.walk(tree_of(path)):
        yield from (str(getattr(node, field)) for field in ("id", "attr", "arg", "name") if hasattr(node, field))


def test_the_map_in_the_readme_is_the_tree() -> None:
    """Every folder with modules has its line in README's map, and nothing else has."""
    text = (ROOT / "README.md").read_text().split("## Map")[1].split("\n## ")[0]
    rows = re.findall(r"^(\w[\w/]*)/ +\S.*$", text, re.M)
    assert sorted(rows) == sorted({str(path.parent) for path in FILES if path.stem != "__init__"})


@pytest.mark.parametrize("name", available())
def test_every_strategy_is_complete(name: str) -> None:
    strategy = find(name)
    assert strategy.__doc__ and strategy.__doc__ != Strategy.__doc__, "the class docstring is the user's manual"
    assert isinstance(strategy.phase, Phase)
    assert strategy.model_config["frozen"] and strategy.model_config["extra"] == "forbid"
    assert all(field.description for field in strategy.model_fields.values()), "every option is described"
    assert len(strategy.examples) > 0
    for example in strategy.examples:
        made = strategy.model_validate(example)
        for accumulation in (1, 3):
            parity = made.parity(run_facts(accumulation=accumulation))
            assert isinstance(parity, Parity)
            assert parity == BITWISE or parity.reason
