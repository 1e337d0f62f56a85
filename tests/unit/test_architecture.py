"""Policies of the code base, read from the syntax trees: who writes what, who may look where, what is documented.

Who may import whom is a contract of import-linter (``pyproject.toml``, ``make lint``).
"""

import ast
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from deepstow.strategies.core.protocol import BITWISE, Parity, Phase, Strategy
from deepstow.strategies.core.registry import available, find
from tests.helpers.fakes import run_facts

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("launch", "strategies", "trainer")
FILES = sorted(path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
STRATEGIES = [path for path in FILES if path.parent == Path("strategies") and path.stem != "__init__"]
PURE = [path for path in FILES if path.parts[:2] in {("strategies", name) for name in ("core", "planner", "report")}]

# Who may look at the environment, and why.
ENVIRONMENT = {
    "strategies/engine/memory/accelerator.py": "torch's allocator reads its settings from it, and the user's stay",
    "trainer/distributed/ranks.py": "launchers describe the job there, and libraries read their settings from it",
    "trainer/errors.py": "torch's launcher names there the file whose text it shows last",
    "trainer/distributed/launcher.py": "is a launcher, and tells its ranks their places by it",
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


@pytest.mark.parametrize("name", ["trainer.errors", "strategies.core", "launch.cli", "benchmarks.harness"])
def test_nothing_is_imported_without_the_root(name: str) -> None:
    """By no name in a string either: it would be a second module, whose classes are others."""
    with pytest.raises(ImportError, match=f"^import deepstow.{name.partition('.')[0]}$"):
        import_module(name)


def test_deciding_needs_no_torch_and_importing_no_deepspeed() -> None:
    """Importing DeepSpeed costs seconds and prints; whoever needs it imports it where it is used."""
    heavy = ("torch", "deepspeed", "transformers", "accelerate", "numpy")
    for path in FILES:
        unwanted = heavy if path in [*PURE, *STRATEGIES] else ("deepspeed",)
        assert [name for name in imports(tree_of(path), module_level=True) if starts(name, *unwanted)] == [], path
    for path in PURE:
        inside = [name for name in imports(tree_of(path)) if starts(name, *heavy)]
        assert inside == (["torch", "torch.nn"] if path.name == "protocol.py" else []), path  # for type checkers


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
