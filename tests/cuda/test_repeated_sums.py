"""``training.full_determinism`` on CUDA: cuDNN's attention, which torch prefers in 16 bits, is never chosen."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from tests.helpers.small_runs import make_rows_and_model, ran, tree_of
from tests.unit.test_repeated_sums import MOMENTS, moment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Of each attention: when it is computed, and the number of torch's backend."""
    found: list[tuple[str, int]] = []
    own = torch.nn.functional.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, **more: Any) -> Any:
        halves = (each.bfloat16() for each in (query, key, value))  # as autocast would
        found.append((moment(query), torch._fused_sdp_choice(*halves, **more)))
        return own(query, key, value, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    return found


@pytest.mark.parametrize("repeats", [False, True])
def test_choice_of_a_whole_run(repeats: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training, in the forward that is computed again for backward, in evaluation; afterwards as before."""
    make_rows_and_model(tmp_path)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once in a process
    more: dict[str, Any] = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "full_determinism": repeats}
    sections = {"data": {"eval_fraction": 0.5}}
    recomputes = {"recompute": {"policy": "full"}}
    tree = tree_of(tmp_path, tmp_path / "run", sections, recomputes, use_cpu=False, bf16=True, **more)
    found = chosen(monkeypatch)
    ran(tree)
    assert {each for each, _ in found} == MOMENTS
    takes, cudnn = {number for _, number in found}, SDPBackend.CUDNN_ATTENTION.value
    if repeats:
        assert cudnn not in takes
        query = torch.zeros(1, 4, 64, 32, device="cuda", dtype=torch.bfloat16)
        assert torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
        found.clear()
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        takes = {number for _, number in found}
    if torch.cuda.get_device_capability()[0] == 9:
        assert cudnn in takes, "what a run takes by default"
