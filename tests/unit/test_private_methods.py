"""Which private names of Hugging Face's Trainer, of TRL's and of Accelerate we use, and why nothing public does it.

Libraries are read as text, whatever release is installed: a name with an underscore that one of their classes defines
or assigns is private to it. We use it by a method of that name in a subclass, by assigning it, or by reading it;
a class in place of an object's own counts as well.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
LIBRARIES = {
    "transformers": "trainer.py trainer_seq2seq.py trainer_callback.py training_args.py",
    "accelerate": "accelerator.py data_loader.py optimizer.py state.py",
    "trl": "trainer/*.py",
    "sentence_transformers": "**/trainer.py",
}
THEIRS = {"Trainer", "StowedTrainer", "Accelerator", "TrainerState", "TrainingArguments"}  # bases of classes of ours
HOLDERS = ("trainer", "accelerator", "args", "control", "callback_handler", "super()")
BUCKETS = "parity/test_trainers.py::test_saved_bucket_by_bucket_and_resumed"

# Of each name in our Trainer, and in ``stowed(AnyTrainer)``: why, and the test that would notice a change.
TRAINER = {
    "_init_training_state": (
        "of a stream it takes all steps for those of the first pass; it makes the state, which a full disk would end",
        "parity/test_tasks.py::test_a_stream_goes_on_in_a_later_pass",
    ),
    "_run_epoch": (
        "it skips batches of a checkpoint that train() was given, and train() loads its files into every rank",
        "parity/test_moves.py::test_from_plain",
    ),
}
STOWED = {
    "_save_optimizer_and_scheduler": ("it asks for one state dict, a second copy of all moments", BUCKETS),
    "_load_optimizer_and_scheduler": ("the same on the way back", BUCKETS),
    "_load_rng_state": (
        "states belong before a pass draws its order, or after its skipped batches; only the loop knows which",
        "parity/test_trainers.py::test_generators_as_a_run_has_saved_them",
    ),
    "_prepare_inputs": (
        "compared, never called: a Trainer that has one of its own takes micro-batches one by one",
        "parity/test_trainers.py::test_refused",
    ),
}
WHERE = {"trainer/run/trainer.py": TRAINER, "trainer/run/stowed_trainer.py": STOWED}


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def classes(tree: ast.AST) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def last_name(node: ast.AST) -> str:
    """``a.b.c`` is c."""
    return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)


def named_in(kind: ast.ClassDef) -> set[str]:
    """What a class defines, or gives its objects."""
    found = {node.name for node in kind.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    found |= {last_name(to) for node in kind.body if isinstance(node, ast.Assign) for to in node.targets}
    found |= {last_name(node.target) for node in kind.body if isinstance(node, ast.AnnAssign)}
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return set(filter(is_private, found))


@pytest.fixture(scope="module")
def private() -> set[str]:
    """Of the libraries that are installed."""
    found = set[str]()
    for library, patterns in LIBRARIES.items():
        spec = importlib.util.find_spec(library)
        for folder in spec.submodule_search_locations or () if spec else ():
            files = [path for pattern in patterns.split() for path in Path(folder).glob(pattern)]
            found |= {
                name for path in files for kind in classes(ast.parse(path.read_text())) for name in named_in(kind)
            }
    assert {"_save_checkpoint", "_precompute_ref_logps", "_dataloaders", "_prepare_inputs"} <= found
    return found - {"_step_count"}  # of torch's schedulers


def is_theirs(kind: ast.ClassDef) -> bool:
    return kind.name in THEIRS or any(last_name(base) in THEIRS for base in kind.bases)


def uses(tree: ast.AST, private: set[str], own: set[str]) -> Iterator[str]:
    """Private names that a module uses. ``own``: those that classes of ours define which have no base there."""
    for kind in filter(is_theirs, classes(tree)):
        yield from named_in(kind) & private
        yield from (node.attr for node in ast.walk(kind) if isinstance(node, ast.Attribute) and node.attr in private)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of, name = last_name(node.value), node.attr
        elif isinstance(node, ast.Call) and last_name(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            of, name = last_name(node.args[0]), getattr(node.args[1], "value", "")
        else:
            continue
        swaps = name == "__class__" and isinstance(getattr(node, "ctx", None), ast.Store)
        held = of.endswith(HOLDERS)
        if (swaps and held) or (name in private and (held or (name not in own and of not in ("self", "cls")))):
            yield name


def of_ours(trees: list[ast.Module]) -> set[str]:
    return {name for tree in trees for kind in classes(tree) if not is_theirs(kind) for name in named_in(kind)}


def test_no_others_are_used(private: set[str]) -> None:
    paths = [path for folder in ("trainer", "strategies") for path in (TESTS.parent / folder).rglob("*.py")]
    named = re.compile(rf"\b({'|'.join(map(re.escape, private))}|__class__)\b")  # to parse all modules takes long
    texts = {path.relative_to(TESTS.parent).as_posix(): path.read_text() for path in paths}
    trees = {where: ast.parse(text) for where, text in texts.items() if named.search(text)}
    own = of_ours(list(trees.values()))
    found = {where: names for where, tree in trees.items() if (names := set(uses(tree, private, own)))}
    assert found == {where: set(names) for where, names in WHERE.items()}
    assert len(TRAINER) <= 2 and len(STOWED) <= 4


def test_each_has_its_test() -> None:
    for names in WHERE.values():
        for _, test in names.values():
            path, _, name = test.partition("::")
            assert f"def {name}(" in (TESTS / path).read_text(), test
