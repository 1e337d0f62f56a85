"""Compiled blocks: torch.compile of each block's forward, inside of all hooks of the block.

A whole model that is compiled keeps the memory of its weights, and calls no hooks that could fetch them. So blocks are
compiled one by one, and blocks that are alike are compiled once: the code takes weights as inputs. Hooks run outside of
it, before and after. When it runs, the weights are in their homes, at addresses that never change.

Invariant. What runs depends on the shapes of a block's inputs alone, and on nothing that ran before: shapes are static
(``dynamic=False``), and a block is compiled whole (``fullgraph=True``) or torch raises. So a resumed run has the bits
of one that was not interrupted. Compiled blocks have the bits of compiled blocks wherever weights rest, and not those
of eager ones: fused loops add and round in another order.

The engine's classes of parameters (``tensors/parameters.py``) would be traced, and tell one compiled version from
another. So parameters are plain ones while a compiled forward runs. Weights that backward needs are saved by
``save_for_backward``, where the guard sees them (``tensors/guard.py``).

Without gradients, in evaluations and generation, the eager forward runs, whose rows have any length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepstow.strategies.core.applied import log_applied
from deepstow.strategies.engine.forward.blocks import find_blocks
from deepstow.strategies.engine.tensors.parameters import AbsentParameter, StowedParameter

INDUCTOR = "inductor"
Forward = Callable[..., Any]  # of a block's class


class Compiled:
    """Replaces the ``forward`` of ``block``. ``run`` is its class's forward, compiled; blocks of a class share it."""

    def __init__(self, block: nn.Module, run: Forward, backend: str) -> None:
        self.forward = block.forward
        self.block = block
        self.run = run
        self.backend = backend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        with _as_plain(self.block):
            return self.run(self.block, *args, **kwargs)


@contextmanager
def _as_plain(block: nn.Module) -> Iterator[None]:
    """Parameters of ``block`` that an engine manages are plain ones inside. RuntimeError: a weight is away."""
    stowed = (param for param in block.parameters() if isinstance(param, StowedParameter))
    kinds: list[tuple[Any, type]] = [(param, type(param)) for param in stowed]
    for param, kind in kinds:
        if kind is AbsentParameter:  # the engine's hooks have brought all of a block's; compiled code would not ask
            raise RuntimeError(f"{param._keeper.name} is away: a compiled block is called as a module, not by forward")
    for param, _ in kinds:
        param.__class__ = nn.Parameter
    try:
        yield
    finally:
        for param, kind in kinds:
            param.__class__ = kind


def compile_blocks(model: nn.Module, backend: str = INDUCTOR) -> None:
    """Compile the blocks of ``model``, each when it first runs with gradients, and once for blocks that are alike.

    Call it before ``recompute``, ``plan_for`` and ``stow``. With a cache of keys and values (``config.use_cache``) no
    blocks are alike: each asks for its own.

    Raises:
        ValueError: the forward of a block has been replaced already.
    """
    shared: dict[Forward, Forward] = {}
    blocks = find_blocks(model)
    for name, block in blocks.items():
        if "forward" in vars(block):
            raise ValueError(f"{name}: its forward has been replaced already; compile blocks first")
        forward = type(block).forward
        run = shared.setdefault(forward, torch.compile(forward, fullgraph=True, dynamic=False, backend=backend))
        block.forward = Compiled(block, run, backend)
    log_applied("torch_compile", ((name, f"compiled by {backend}") for name in blocks))


def missing(backend: str, *, on_cpu: bool) -> str:
    """What this machine lacks to generate code, and a cure; empty if nothing: eager backends generate none."""
    if backend != INDUCTOR:
        return ""
    if not on_cpu:
        from torch.utils._triton import has_triton

        return "" if has_triton() else "inductor needs Triton on this device; install triton, or leave it out"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "inductor needs a C++ compiler on a CPU, and found none; install g++, or leave it out"
    return ""


def compiled(module: nn.Module) -> Compiled | None:
    """The compiled forward of ``module``, if it has one; that of a recomputed block is inside of the recomputation."""
    forward = vars(module).get("forward")
    forward = getattr(forward, "forward", None) if not isinstance(forward, Compiled) else forward
    return forward if isinstance(forward, Compiled) else None
