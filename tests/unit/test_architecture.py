"""Policies of the code base, read from the syntax trees: who imports whom, how long things are, what is documented."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from strategies.core.protocol import BITWISE, Parity, Phase, Strategy
from strategies.core.registry import available, find
from tests.helpers.fakes import run_facts

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path.relative_to(ROOT) for name in ("launch", "strategies", "trainer") for path in (ROOT / name).rglob("*.py")
)
BENCHMARKS = sorted(path.relative_to(ROOT) for path in (ROOT / "benchmarks").glob("*.py"))
EVERYWHERE = [*FILES, *BENCHMARKS, Path("deepstow.py")]
STRATEGIES = [path for path in FILES if path.parent == Path("strategies") and path.stem != "__init__"]
PURE = [path for path in FILES if path.parts[:2] in {("strategies", "core"), ("strategies", "planner")}]
MOST_LINES, MOST_FUNCTION_LINES = 400, 70

# Imports go one way; each part may import itself and what stands behind it.
BEHIND = {
    "launch": {"trainer", "strategies"},
    "trainer": {"strategies"},
    "strategies": set[str](),
}
# Who may look at the environment, and why.
ENVIRONMENT = {
    "trainer/dist/ranks.py": "launchers describe the job there, and libraries read their settings from it",
    "trainer/dist/spawn.py": "is the launcher of its own ranks",
    "trainer/dist/deepspeed_ops.py": "torch finds compilers and its folder of compiled extensions by it",
    "trainer/verify/differences.py": "cuBLAS repeats its sums only where it is asked to by it",
    "launch/doctor.py": "examines the environment that a run would find",
}
# Whose functions need no docstring, and why.
UNDOCUMENTED = {
    "trainer/config/conflicts.py": "one function per rule; its name and the line that it gives to the user say all",
}

parametrize = pytest.mark.parametrize("path", FILES, ids=str)


def tree_of(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.AST, *, module_level: bool = False) -> Iterator[str]:
    """Dotted names of everything imported; at module level without what only type checkers see."""
    for node in at_module_level(tree) if module_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_module_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not checking and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from at_module_level(node)


def starts(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_the_scan_sees_the_code() -> None:
    """A policy over no files would always hold."""
    assert {Path("launch/train.py"), Path("trainer/run/order.py"), Path("strategies/core/plan.py")} <= set(FILES)
    assert Path("strategies/zero.py") in STRATEGIES
    assert {Path("strategies/core/compose.py"), Path("strategies/planner/placement_search.py")} <= set(PURE)
    assert "strategies.core.plan.Plan" in set(imports(tree_of(Path("trainer/run/order.py"))))


@parametrize
def test_imports_go_one_way(path: Path) -> None:
    package = path.parts[0]
    ahead = {"launch", "trainer", "strategies", "tests"} - {package} - BEHIND[package]
    assert [name for name in imports(tree_of(path)) if starts(name, *ahead)] == []


@pytest.mark.parametrize("path", STRATEGIES, ids=str)
def test_strategies_know_the_core_and_not_each_other(path: Path) -> None:
    others = [module_of(other) for other in STRATEGIES if other != path]
    assert [name for name in imports(tree_of(path)) if starts(name, *others)] == []
    at_once = list(imports(tree_of(path), module_level=True))
    assert [name for name in at_once if starts(name, "trainer", "launch", "deepspeed", "torch", "transformers")] == []


@pytest.mark.parametrize("path", PURE, ids=str)
def test_deciding_needs_no_torch(path: Path) -> None:
    heavy = ("torch", "deepspeed", "transformers", "accelerate", "numpy")
    assert [name for name in imports(tree_of(path), module_level=True) if starts(name, *heavy)] == []
    inside = [name for name in imports(tree_of(path)) if starts(name, *heavy)]
    assert inside == (["torch", "torch.nn"] if path.name == "protocol.py" else [])  # for type checkers


@parametrize
def test_deepspeed_is_never_imported_with_a_module(path: Path) -> None:
    """Importing it costs seconds and prints; whoever needs it imports it where it is used."""
    assert [name for name in imports(tree_of(path), module_level=True) if starts(name, "deepspeed")] == []


@parametrize
def test_files_and_functions_fit_the_eye(path: Path) -> None:
    assert len((ROOT / path).read_text().splitlines()) < MOST_LINES
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > MOST_FUNCTION_LINES} == {}


@parametrize
def test_what_is_public_is_documented(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree), "a module says what it is for"
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    silent = [node.name for node in public if not ast.get_docstring(node)]
    assert bool(silent) is (str(path) in UNDOCUMENTED), silent


@parametrize
def test_the_environment_is_read_in_one_place(path: Path) -> None:
    """Ambient switches cannot be seen in a config; ``ENVIRONMENT`` lists who may look, and why."""
    reads = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv")
    ]
    reads += [0 for name in imports(tree_of(path)) if name in ("os.environ", "os.getenv")]
    assert bool(reads) is (str(path) in ENVIRONMENT), reads


def test_cuda_is_named_in_one_place() -> None:
    """Every other file calls what is the same for all accelerators."""

    def names_cuda(path: Path) -> bool:
        nodes = list(ast.walk(tree_of(path)))
        attributes = [node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr == "cuda"]
        named = any(isinstance(value, ast.Name) and value.id == "torch" for value in attributes)
        return named or any(starts(name, "torch.cuda") for name in imports(tree_of(path)))

    assert {Path("deepstow.py"), Path("benchmarks/gpu_engine.py"), Path("trainer/machine/probe.py")} <= set(EVERYWHERE)
    assert [str(path) for path in EVERYWHERE if names_cuda(path)] == ["strategies/engine/memory/accelerator.py"]


@pytest.mark.parametrize("name", available())
def test_every_strategy_is_complete(name: str) -> None:
    tree = tree_of(Path("strategies") / f"{name}.py")
    bases = [
        base.id
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name)
    ]
    assert bases.count("Strategy") == 1
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
    with pytest.raises(ValueError, match="frozen"):
        made.phase_of_the_moon = 1  # type: ignore[attr-defined]  # must be refused
