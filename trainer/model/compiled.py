"""Count compiled blocks: they run the graphs that would be compiled, operator by operator, on fake tensors.

What a compiled block saves for backward is what torch's partitioner decides, which recomputes cheap operators and saves
less than eager torch. Dynamo and inductor work here as in a run, up to the point where code would be generated: that
follows from shapes, so it is the same on fake tensors. The counters around the model (dispatch modes) are away while
dynamo looks, which compiles nothing inside of them, and there again when the graph runs.

Temporaries are an upper bound: inductor fuses operators, and what is between these is never in memory. All gradients of
a block's weights are there at the end of its backward, which eager torch hands over one by one.

Refused: what dynamo cannot trace whole, in the words of its error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode, _push_mode

from deepstow.strategies.engine.forward.blocks import find_blocks
from deepstow.strategies.engine.forward.compiled import INDUCTOR, compiled
from deepstow.trainer.errors import first_line


class NotCompilable(Exception):
    """Why a block cannot be compiled whole."""


@contextmanager
def as_graphs(model: nn.Module) -> Iterator[None]:
    """Inside, compiled blocks of ``model`` run their graphs operator by operator."""
    runners = [runner for block in find_blocks(model).values() if (runner := compiled(block)) is not None]
    runs = {runner: runner.run for runner in runners}
    shared: dict[Callable[..., Any], ByOperator] = {}
    for runner in runners:
        forward = type(runner.block).forward
        runner.run = shared.setdefault(forward, ByOperator(forward, runner.backend))
    try:
        yield
    finally:
        for runner, run in runs.items():
            runner.run = run
        if runners:
            torch._dynamo.reset()  # what was traced here would count against the limit of compiled versions


class ByOperator:
    """``forward`` of a class of blocks, as ``backend`` compiles it, run operator by operator."""

    def __init__(self, forward: Callable[..., Any], backend: str) -> None:
        self._name = backend
        self._run = torch.compile(forward, fullgraph=True, dynamic=False, backend=self._backend)
        self._modes: Sequence[TorchDispatchMode] = ()

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes() as self._modes:
            try:
                return self._run(block, *args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:
                raise NotCompilable(f"{type(block).__name__}: {first_line(error)}") from error

    def _backend(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        if self._name == INDUCTOR:
            from torch._inductor.compile_fx import compile_fx

            by_operator: Any = _by_operator
            run: Any = compile_fx(graph, inputs, inner_compile=by_operator)
        else:
            run = torch._dynamo.lookup_backend(self._name)(graph, inputs)

        def within(*flat: Any) -> Any:
            with _modes_again(self._modes):
                return run(*flat)

        return within


def _by_operator(graph: torch.fx.GraphModule, inputs: Any, **_: Any) -> Callable[[list[Any]], Any]:
    """Instead of inductor's code: the graph itself, which frees its inputs as the code would."""

    def run(flat: list[Any]) -> Any:
        return torch.fx.Interpreter(graph).boxed_run(flat)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextmanager
def _modes_again(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Modes that ``_disable_current_modes`` has taken off, innermost first, are there inside."""
    for mode in reversed(modes):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()
