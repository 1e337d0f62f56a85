"""``training.full_determinism``: only kernels whose sums have one order, while a run lasts and no longer."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.backends import cudnn
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp

from deepstow.trainer.machine.repeated_sums import repeated_sums
from tests.helpers.small_runs import make_rows_and_model, ran, tree_of

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC", "CUDA_LAUNCH_BLOCKING")


def state() -> list[Any]:
    return [
        cudnn_sdp_enabled(), torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory, *(os.environ.get(name) for name in VARIABLES),
    ]  # fmt: skip


INSIDE = [False, 2, True, False, False, ":4096:8", "1", None]


@pytest.mark.parametrize("attends", [True, False])
def test_all_is_put_back(attends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was so before stays so, after an error as well; nothing is done where it is not wanted."""
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    enable_cudnn_sdp(attends)
    try:
        before = state()
        with repeated_sums(wanted=False):
            assert state() == before
        with pytest.raises(KeyError), repeated_sums(wanted=True):
            assert state() == INSIDE
            raise KeyError
        assert state() == before
    finally:
        enable_cudnn_sdp(True)


def moment(query: torch.Tensor) -> str:
    """When an attention is computed."""
    again = torch._C._current_graph_task_id() != -1
    return "again, for backward" if again else "in training" if query.requires_grad else "in evaluation"


MOMENTS = {"in training", "again, for backward", "in evaluation"}


def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[Any]]]:
    """Of each attention that is computed: when, and what is selected then."""
    found: list[tuple[str, list[Any]]] = []
    own = torch.nn.functional.scaled_dot_product_attention

    def attention(query: Any, *given: Any, **more: Any) -> Any:
        found.append((moment(query), state()))
        return own(query, *given, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    return found


@pytest.mark.slow
def test_whole_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training, in the forward that is computed again for backward, and in evaluation."""
    make_rows_and_model(tmp_path)
    recomputes, evaluates = {"recompute": {"policy": "full"}}, {"eval_strategy": "steps", "eval_steps": 1}
    more: dict[str, Any] = {"max_steps": 2, "gradient_accumulation_steps": 1, "full_determinism": True}
    tree = tree_of(tmp_path, tmp_path / "run", {"data": {"eval_fraction": 0.5}}, recomputes, **more, **evaluates)
    found, before = attended(monkeypatch), state()
    ran(tree)
    assert {each for each, _ in found} == MOMENTS
    assert [each for _, each in found if each != INSIDE] == []
    assert state() == before
