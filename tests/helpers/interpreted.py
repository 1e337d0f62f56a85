"""Liger's kernels on a CPU: Triton's interpreter runs them, number by number. ``TRITON_INTERPRET=1`` asks for it.

Two things that Liger needs are missing in it (Triton 3.9): numbers that are given to a kernel have no ``to``, and
CUDA's library has no ``rsqrt``. In bf16 its results are wrong, also without us.
"""

import numpy as np
from liger_kernel.ops import rms_norm
from liger_kernel.transformers import _apply_liger_kernel_to_instance as apply_liger
from triton import language as tl
from triton.runtime import interpreter

__all__ = ["apply_liger"]
convert = interpreter._implicit_cvt


def convert_numbers_too(value: object) -> object:
    if isinstance(value, float):
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
    return convert(value)


interpreter._implicit_cvt = convert_numbers_too
rms_norm.rsqrt = lambda value: tl.math.rsqrt(value)  # noqa: PLW0108  the interpreter puts another `math` there
