"""Kernels whose sums have one order: for comparisons, and for a run with ``training.full_determinism``.

Many kernels of a GPU add in the order in which their threads come, so that two runs of the same program differ: the
backward of torch's fused attentions among them. Of cuDNN's, which torch prefers in 16 bits on Hopper and Blackwell, it
knows no other. What is set here is of the process and not of a thread, so it holds where autograd computes forward
again, in a thread of its own.

Not by Hugging Face's ``full_determinism``: that makes each kernel wait for the one before, which takes the time that
copies are hidden in, and would hide a wait that the engine forgot.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.backends import cudnn
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp

# What cuBLAS reads when it starts, without which torch refuses its products; and what Transformers reads at each call
# of FlashAttention's package.
_VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}


def repeat_sums() -> None:
    """Select kernels whose sums have one order, in this process. Memory that nothing has written to is filled with NaN,
    so that a comparison finds who reads it.
    """
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(mode=True)
    cudnn.deterministic, cudnn.benchmark = True, False
    enable_cudnn_sdp(False)


@contextmanager
def repeated_sums(*, wanted: bool) -> Iterator[None]:
    """Inside, ``repeat_sums``, but no memory is filled; after it all is as before. Nothing unless ``wanted``."""
    if not wanted:
        yield
        return
    memory: Any = torch.utils.deterministic
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    mode, fills = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    deterministic = cudnn.deterministic
    benchmark = cudnn.benchmark
    attends = cudnn_sdp_enabled()
    repeat_sums()
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        enable_cudnn_sdp(attends)
        cudnn.deterministic, cudnn.benchmark = deterministic, benchmark
        memory.fill_uninitialized_memory = fills
        torch.set_deterministic_debug_mode(mode)
        for name, value in variables.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
