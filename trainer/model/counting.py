"""Counting one forward: what autograd keeps of each unit, and what keeping less of a block would cost.

Saved bytes are storages that autograd keeps, each once, in the unit that was running when it was saved first, without
parameters. Where Hugging Face's checkpointing is on, that is each block's input.

Operators are counted by torch's dispatcher while a block runs. Those that have a name (``strategies/engine``) may be
kept one by one; all others would run again together. A replay ends as soon as the last tensor is saved, so operators
after that are not counted: they never run again. An operator costs its floating-point operations; one that has none,
the bytes that it reads and writes. Views cost nothing.

Sparse tensors are not counted: a forward that uses them ends with an error. It is raised at the end, since torch calls
operators (``prim.device``) at places where an error would end the process.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from strategies.core.facts import Choices, Operator, Unit, UnitKind, Work
from strategies.engine.blocks import find_blocks
from strategies.engine.checkpointing import Names, stream_in
from strategies.engine.tensors.nested import tensors_in
from trainer.model.outside_reads import Readers
from trainer.model.params import EMBEDDING, HEAD, units_by_name

if TYPE_CHECKING:
    from torch import nn


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """What torch's counter lacks: the CPU's fused attention, which a fake run meets, and the grouped matmul."""

    def attention(query: Any, key: Any, value: Any, *_: object, out_shape: object = None, **__: object) -> int:
        batch, heads, queries, width = query
        keys = key[2]
        return int(2 * batch * heads * queries * keys * (width + value[3]))

    def grouped(rows: Any, weight: Any, *_: object, out_shape: object = None, **__: object) -> int:
        return int(2 * rows[0] * rows[1] * weight[2])  # each row of tokens meets one expert: [S, K] x [E, K, N]

    return {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
        torch.ops.aten._grouped_mm: grouped,
    }


@dataclass(slots=True)
class Forward:
    """One forward of a block. ``last_saved`` counts the operators that had run when the last tensor was saved."""

    names: Names
    inputs: Mapping[int, int]  # bytes of tensors that no block before was given, by storage
    stream: Tensor | None = None  # the hidden states
    calls: list[tuple[str | None, Work, list[Tensor], list[int]]] = field(default_factory=list)
    last_saved: int = 0

    def choices(self, saved_bytes: int, saved: Container[int]) -> Choices:
        """What may be kept of it. An output that was written to after it was made may not.

        Args:
            saved_bytes: of this forward; ``saved`` are all storages that are.
        """
        operators, rest = [], Work()
        for name, work, outputs, versions in self.calls[: self.last_saved]:
            if name is None or [tensor._version for tensor in outputs] != versions:
                rest += work
            else:
                sizes = {out.untyped_storage()._cdata: out.untyped_storage().nbytes() for out in outputs}
                operators.append(Operator(name, sum(sizes.values()), work))
        besides = sum(size for storage, size in self.inputs.items() if storage not in saved)
        return Choices(
            sum(self.inputs.values()), saved_bytes + besides, tuple(operators), rest, stream_bytes=self._stream_bytes()
        )

    def _stream_bytes(self) -> int:
        """Of the hidden states, where they are a tensor of their own that no block before was given."""
        if self.stream is None:
            return 0
        storage = self.stream.untyped_storage()
        return storage.nbytes() if storage._cdata in self.inputs and storage.nbytes() == self.stream.nbytes else 0


class _Operators(TorchDispatchMode):
    """Adds every operator to the block that is running, and shows what it reads; or that there are sparse tensors."""

    def __init__(
        self,
        running: Callable[[], Forward | None],
        look: Callable[[Iterable[Tensor]], None],
        sparse: Callable[[], None],
    ) -> None:
        super().__init__()
        self._running, self._look, self._sparse = running, look, sparse
        self._flops = {**flop_registry}
        for packet, formula in flop_formulas().items():
            self._flops[packet] = _on_shapes(formula)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not all(map(_is_dense, tensors_in((args, kwargs, out)))):
            self._sparse()
            return out
        self._look(tensors_in((args, kwargs)))
        forward = self._running()
        if forward is not None:
            name = forward.names.of(func, args, kwargs)
            outputs = list(tensors_in(out))
            work = self._work(func, args, kwargs, out, outputs)
            kept = outputs if name is not None else []
            forward.calls.append((name, work, kept, [tensor._version for tensor in kept]))
        return out

    def _work(self, func: Any, args: Any, kwargs: Any, out: Any, outputs: list[Tensor]) -> Work:
        formula = self._flops.get(func.overloadpacket)
        if formula is not None:
            return Work(flops=formula(*args, **kwargs, out_val=out))
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        read = {tensor.untyped_storage()._cdata for tensor in inputs}
        is_view = all(tensor.untyped_storage()._cdata in read for tensor in outputs)
        if is_view and not func._schema.is_mutable:
            return Work()
        return Work(touched_bytes=sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs)))


def _on_shapes(formula: Callable[..., int]) -> Callable[..., int]:
    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return formula(*(arg.shape if isinstance(arg, Tensor) else arg for arg in args))

    return count


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _refuse_backward(nothing: None) -> Tensor:
    raise RuntimeError("forward computes gradients itself")


class Counter:
    """Context manager around one forward of ``model``: counts what is saved, and the operators of blocks."""

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor] | None = None) -> None:
        """``weights`` stand in for the model's own tensors of these names in the run."""
        self._model = model
        self._blocks = find_blocks(model)
        self._parameters = {p.untyped_storage()._cdata for p in (weights or dict(model.named_parameters())).values()}
        self._readers = Readers(model, weights)
        self._seen: dict[int, object] = {}  # keeps the storages alive, so that no address comes twice
        self._saved_in: dict[int, str] = {}  # the unit, by storage
        self._inputs: dict[int, object] = {}
        self._bytes: dict[str, int] = {}
        self._running: list[str] = []
        self._outside = EMBEDDING
        self._forwards: dict[str, Forward] = {}
        self._called: set[str] = set()  # blocks that ran more than once
        self._choices: dict[str, Choices] = {}
        self._sparse = False
        self._checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())

    def __enter__(self) -> None:
        self._hooks = [
            hook
            for name, block in self._blocks.items()
            for hook in (
                block.register_forward_pre_hook(self._entering(name), with_kwargs=True),
                block.register_forward_hook(self._leaving),
            )
        ]
        # Nothing is kept for a backward that never comes: a graph that held its own outputs would never be freed.
        self._within = ExitStack()
        saving = torch.autograd.graph.saved_tensors_hooks(self._save, _refuse_backward)
        self._within.enter_context(saving)
        self._within.enter_context(self._readers.watching())
        self._within.enter_context(_Operators(self._forward, self._readers.look, self._see_sparse))

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Sum up.

        Raises:
            NotImplementedError: forward uses sparse tensors.
        """
        self._within.close()
        for hook in self._hooks:
            hook.remove()
        # Outputs and the graph that made them would hold each other for ever.
        forwards, self._forwards = self._forwards, {}
        if error is not None:
            return
        if self._sparse:
            raise NotImplementedError("forward uses sparse tensors, whose memory is not counted")
        # Of blocks that save something, ran once, and are not recomputed already.
        self._choices = {
            name: run.choices(self._bytes.get(name, 0), self._seen)
            for name, run in forwards.items()
            if run.last_saved and name not in self._called and not self._checkpointed
        }

    def _see_sparse(self) -> None:
        self._sparse = True

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running.append(name)
            self._outside = HEAD
            if name in self._forwards:
                self._called.add(name)
            stream = stream_in(args)
            self._forwards[name] = Forward(Names(module), self._new([args, kwargs]), stream)
            hidden = stream if args else kwargs.get("hidden_states")
            if self._checkpointed and isinstance(hidden, Tensor) and hidden.requires_grad:
                self._keep_input(hidden)

        return enter

    def _new(self, values: Any) -> dict[int, int]:
        """Bytes of the tensors that no block before was given, by storage."""
        dense = filter(_is_dense, tensors_in(values))  # a sparse one is seen by the operator that reads it
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in dense}
        new = {key: storage for key, storage in storages.items() if key not in self._inputs}
        self._inputs.update(new)
        return {key: storage.nbytes() for key, storage in new.items()}

    def _leaving(self, *_: object) -> None:
        self._running.pop()

    def _forward(self) -> Forward | None:
        return self._forwards[self._running[-1]] if self._running else None

    def _keep_input(self, hidden: Tensor) -> None:
        """A checkpointed block's input is the block's, where torch (up to 2.12) saved it just before the block ran."""
        storage = hidden.untyped_storage()
        if self._saved_in.get(storage._cdata) in (EMBEDDING, HEAD):
            self._bytes[self._saved_in[storage._cdata]] -= storage.nbytes()
            del self._seen[storage._cdata]
        self._save(hidden)

    def _save(self, tensor: Tensor) -> None:
        if not _is_dense(tensor):
            self._see_sparse()
            return
        storage = tensor.untyped_storage()
        forward = self._forward()
        if forward is not None:
            forward.last_saved = len(forward.calls)
        if storage._cdata not in self._parameters and storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            unit = self._running[-1] if self._running else self._outside
            self._saved_in[storage._cdata] = unit
            self._bytes[unit] = self._bytes.get(unit, 0) + storage.nbytes()

    @property
    def elsewhere(self) -> frozenset[str]:
        """Names of parameters that were read outside of the modules that own them."""
        return frozenset(self._readers.elsewhere)

    def units(self) -> tuple[Unit, ...]:
        """The embedding, the blocks and the head, in this order, with what was counted; empty ones left out."""
        paths = dict.fromkeys((EMBEDDING, *self._blocks, HEAD), (0, 0))
        unit_of = units_by_name(self._model)
        for name, parameter in self._model.named_parameters():  # shared parameters come once
            params, trainable = paths[unit_of[name]]
            size = parameter.numel()
            paths[unit_of[name]] = (params + size, trainable + size * parameter.requires_grad)
        kinds = {EMBEDDING: UnitKind.EMBEDDING, HEAD: UnitKind.HEAD}
        used = set(unit_of.values())  # a tied head has no parameter of its own
        return tuple(
            Unit(
                path,
                kinds.get(path, UnitKind.BLOCK),
                params,
                trainable,
                self._bytes.get(path, 0),
                self._choices.get(path),
            )
            for path, (params, trainable) in paths.items()
            if path in used or self._bytes.get(path)
        )
