"""A file operation of a run fails: a sample of ``full/test_every_operation.py``, one of each kind.

Every run ends in one line with a documented code, or goes on. The next one, in which nothing fails, ends with the bits
of one that nothing has disturbed, and with every step once in its metrics.
"""

import errno
from collections.abc import Iterator

import pytest

from tests.helpers.failing import Failing, Fault, Operation

DRAFT, ROWS = "run/checkpoints.writing/checkpoint-2", "home/datasets/deepstow/.*-*-*"
GOES_ON, FOR_GOOD = 0, True
SAMPLE = [  # from which start; the operation; its errno, and whether it stays; the exit code
    # what a run reports
    ("fresh", "create", "run/metrics.jsonl", 2, errno.EACCES, FOR_GOOD, 14),
    ("fresh", "write", "run/metrics.jsonl", 7, errno.EROFS, False, GOES_ON),  # the last
    ("fresh", "write", "run/runs/*/events", 2, errno.EIO, False, GOES_ON),
    # a tokenizer that was trained
    ("fresh", "stat", "run/tokenizer/tokenizer.json", 1, errno.ENOENT, False, 14),
    # a checkpoint is looked for
    ("killed", "list", "run", 2, errno.EACCES, False, 14),
    ("killed", "open", "run/checkpoint-2/manifest.json", 1, errno.EIO, FOR_GOOD, 14),
    # one is saved: by Python, Rust and C++
    ("fresh", "mkdir", "run/checkpoints.writing", 1, errno.ENOENT, FOR_GOOD, 14),
    ("fresh", "create", f"{DRAFT}/training_args.bin", 1, errno.EROFS, False, GOES_ON),
    ("fresh", "open", f"{DRAFT}/model.safetensors", 1, errno.EACCES, False, GOES_ON),
    ("fresh", "rename", "run/checkpoint-2", 1, errno.ENOSPC, False, GOES_ON),
    # the data
    ("fresh", "read", "data/text.jsonl", 1, errno.EIO, False, 14),
    ("fresh", "close", f"{ROWS}/documents.arrow", 1, errno.EDQUOT, False, 14),
    # the export
    ("killed", "rename", "run/export", 1, errno.EROFS, FOR_GOOD, 14),
    ("over", "open", "run/export/manifest.json", 1, errno.EIO, False, GOES_ON),
]


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failing]:
    made = Failing(tmp_path_factory.mktemp("failing"))
    yield made
    made.close()


@pytest.mark.parametrize(("start", "kind", "path", "number", "error", "for_good", "code"), SAMPLE)
def test_an_operation_fails(
    start: str, kind: str, path: str, number: int, error: int, for_good: bool, code: int, failing: Failing
) -> None:
    fault = Fault(Operation(kind, path, number), error, for_good)
    assert failing.may(fault)
    complaints = failing.complaints(start, fault, code)
    assert not complaints, "\n".join(complaints)
