"""Count one forward of a model: what autograd saves for backward in each unit, and what saving less would cost.

Saved bytes are the bytes of storages that autograd saves, parameters excluded. A storage counts once, in the unit that
was running when it was first saved. With Hugging Face's checkpointing that is each block's input.

Operators with a name (``strategies/engine/forward/checkpointing``) may be kept one by one; all others of a block would
be recomputed together. A replay ends as soon as the last tensor is saved, so operators after that are not counted. An
operator costs its floating-point operations; one without any the bytes that it reads and writes; a view nothing.

Sparse tensors are refused, since their memory is not counted. The error is raised after the forward, because torch
calls some operators (``prim.device``) at places where an exception would end the process.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

from deepstow.strategies.core.facts import NO_WORK, Choices, InChunks, Operator, Temporaries, Unit, UnitKind, Work
from deepstow.strategies.engine.forward.blocks import find_blocks
from deepstow.strategies.engine.forward.checkpointing import Names, draws, stream_in
from deepstow.strategies.engine.forward.compiled import compiled
from deepstow.strategies.engine.forward.effects import attributes, changed
from deepstow.strategies.engine.forward.routed_linear import storage_of
from deepstow.strategies.engine.forward.token_slices import PRODUCT
from deepstow.strategies.engine.tensors.nested import tensors_in
from deepstow.strategies.engine.tensors.quantised import is_quantised, num_weights
from deepstow.trainer.model.params import EMBEDDING, HEAD, units_by_name
from deepstow.trainer.model.stubs import likes_of, stubs

ALLOCATE = tuple(getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty"))


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Flop of operators that torch's counter lacks: the CPU's fused attention, which fake runs use, grouped_mm, and
    products with 4-bit weights, and those whose sum is divided.
    """

    def attention(query: Any, key: Any, value: Any, *_: object, out_shape: object = None, **__: object) -> int:
        batch, heads, queries, width = query
        keys = key[2]
        return int(2 * batch * heads * queries * keys * (width + value[3]))

    def grouped(rows: Any, weight: Any, *_: object, out_shape: object = None, **__: object) -> int:
        return int(2 * rows[0] * rows[1] * weight[2])  # each row of tokens meets one expert: [S, K] x [E, K, N]

    def scattered(rows: Any, weight: Any, *_: object, out_shape: object = None, **__: object) -> int:
        return int(2 * prod(rows) * weight[0])

    def packed(rows: Any, weight: Any, shape: Any, *_: object, out_shape: object = None, **__: object) -> int:
        return int(2 * prod(rows) * shape[0])

    quantised = {torch.ops.bitsandbytes.gemm_4bit: packed} if hasattr(torch.ops.bitsandbytes, "gemm_4bit") else {}
    return quantised | {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
        torch.ops.aten._grouped_mm: grouped,
        PRODUCT: scattered,
    }


@dataclass(slots=True)
class BlockForward:
    """One forward of a block.

    Args:
        inputs: bytes by storage of the tensors that no earlier block was given; ``hidden`` are the hidden states.
        calls: each operator's name, work, and its outputs with their versions, if it has a name.
        last_saved: how many operators had run when the last tensor was saved.
    """

    names: Names
    inputs: Mapping[int, int]
    hidden: Tensor | None
    calls: list[tuple[str | None, Work, list[Tensor], list[int]]] = field(default_factory=list)
    last_saved: int = 0

    def choices(self, saved_bytes: int, saved: Container[int]) -> Choices:
        """What may be kept of this forward, which saves ``saved_bytes``; ``saved``: all storages that were saved."""
        operators, rest = dict[str, Operator](), Work()
        for name, work, outputs, versions in self.calls[: self.last_saved]:
            if name is None or [tensor._version for tensor in outputs] != versions:  # written to afterwards
                rest += work
            else:
                sizes = {out.untyped_storage()._cdata: out.untyped_storage().nbytes() for out in outputs}
                earlier = operators.get(name, Operator(name, 0, NO_WORK))
                operators[name] = Operator(name, earlier.num_bytes + sum(sizes.values()), earlier.work + work)
        not_saved = sum(size for storage, size in self.inputs.items() if storage not in saved)
        # The hidden states cannot wait elsewhere if they are a view, or an earlier block was given them.
        hidden, stream = self.hidden, 0
        if hidden is not None and hidden.untyped_storage().nbytes() == hidden.nbytes:
            stream = self.inputs.get(hidden.untyped_storage()._cdata, 0)
        return Choices(sum(self.inputs.values()), saved_bytes + not_saved, tuple(operators.values()), rest, stream)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _refuse_backward(nothing: None) -> Tensor:
    raise RuntimeError("forward computes gradients itself")


class Counter(TorchDispatchMode):
    """Context manager around one forward of ``model``: counts what is saved, and the operators of blocks.

    Attributes:
        outside: parameters that are read outside of the modules that own them.
        computing: modules that computed with a parameter of theirs, and did not look rows up only; None: nothing ran.
        flops: floating-point operations of the whole forward.
        saved: bytes that each unit saves, where there are any.
        draws: whether it draws random numbers.
        outputs: what each block returned (``likes_of``).
        temporaries: by unit, and ``in_chunks``: the head with its loss by chunks; who counts them adds them.
    """

    def __init__(
        self,
        model: nn.Module,
        like: Mapping[str, str] = MappingProxyType({}),
        outputs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Blocks in ``like`` do not run (``stubs.py``): what is counted of the block that it names counts for each.
        ``outputs`` are known before.
        """
        super().__init__()
        self.model, self.like = model, like
        self.outside = set[str]()
        self.written = set[str]()  # parameters that forward writes to
        self.computing: set[str] | None = None
        self.flops = 0
        self.saved: dict[str, int] = {}
        self.draws = False
        self.outputs = dict(outputs)
        self.temporaries: Mapping[str, Temporaries] = {}
        self.in_chunks: InChunks | None = None
        self.launches_back: Mapping[str, int] = {}
        self.blocks = find_blocks(model)
        self._compiled = {name for name, block in self.blocks.items() if compiled(block) is not None}  # as one operator
        self._flop_of = {**flop_registry, **{op: shape_wrapper(formula) for op, formula in flop_formulas().items()}}
        self._sparse = False
        self._changed = ""  # an attribute of a module that forward has set
        self._flops_in = dict[str, int]()
        self._launches = dict[str, int]()
        self._parameters = {tensor.untyped_storage()._cdata for tensor in model.parameters()}
        self._saved: dict[int, tuple[str, object]] = {}  # unit, and the storage itself: its address is not used again
        self._inputs: dict[int, object] = {}
        self._running: list[str] = []
        self._outer_unit = EMBEDDING  # what is saved while no block runs belongs to it
        self._forwards: dict[str, BlockForward] = {}
        self._entered, self._repeated = set[str](), set[str]()  # blocks that were called, and more than once
        self._choices: dict[str, Choices] = {}
        self._checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        self._owners: dict[int, set[str]] = {}  # by a weight's storage: the modules in which it may be read
        self._names: dict[int, str] = {}  # by the same
        self._inside: dict[str, int] = {}  # how many calls of each of these modules are running
        units = units_by_name(model)
        for name, param in model.named_parameters(remove_duplicate=False):  # a tied one under all its names
            storage = param.untyped_storage()._cdata
            self._names.setdefault(storage, name)
            owner = name.rpartition(".")[0] if units[name] in (EMBEDDING, HEAD) else units[name]
            self._owners.setdefault(storage, set()).add(owner)
        layers = {path: module for path, module in model.named_modules() if storage_of(module) is not None}
        self._layers: dict[str, tuple[Any, list[tuple[int, bool]]]] = {path: (it, []) for path, it in layers.items()}

    def __enter__(self) -> Counter:
        self._within, self.computing = ExitStack(), set()
        self._held = attributes(self.model)
        for name in {name for names in self._owners.values() for name in names}:
            module = self.model.get_submodule(name)
            self._within.callback(module.register_forward_pre_hook(partial(self._count, name, 1)).remove)
            leaving = module.register_forward_hook(partial(self._count, name, -1), always_call=True)
            self._within.callback(leaving.remove)
        hooks = [(block, partial(self._enter, name)) for name, block in self.blocks.items()]
        hooks += [(layer, partial(_see, calls)) for layer, calls in self._layers.values()]
        for module, hook in hooks:
            self._within.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for name in self.blocks.keys() - self.like.keys():
            self._within.callback(self.blocks[name].register_forward_hook(partial(self._leave, name)).remove)
        # Nothing is kept for a backward that never comes: a graph that held its own outputs would never be freed.
        self._within.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, _refuse_backward))
        self._within.enter_context(stubs(self.model, self.like, lambda name: self.outputs[self.like[name]]))
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Sum up. Raise NotImplementedError if the forward used sparse tensors."""
        super().__exit__(kind, error, trace)
        self._within.close()
        self._changed, self._held = changed(self._held, self.model), {}
        forwards, self._forwards = self._forwards, {}  # outputs and their graph are a reference cycle that would leak
        if error is not None:
            return
        if self._sparse:
            raise NotImplementedError("forward uses sparse tensors, whose memory is not counted")
        for name, alike in self.like.items():
            if alike in forwards:
                forwards[name], self.outputs[name] = forwards[alike], self.outputs[alike]
                self.saved[name] = self.saved.get(alike, 0)
                self.flops += self._flops_in.get(alike, 0)
                self._launches[name] = self._launches.get(alike, 0)
        # Only for blocks that save something, ran once, and are not recomputed already.
        self._choices = {
            name: run.choices(self.saved.get(name, 0), self._saved)
            for name, run in forwards.items()
            if run.last_saved and name not in self._repeated and not self._checkpointed
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.prim.device.default:  # more than half of all calls on fake tensors
            self._look(filter(_is_dense, args), looks_up=True)
            return out
        inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(out))
        if not all(map(_is_dense, (*inputs, *outputs))):
            self._sparse = True
            return out
        if not self.draws and torch.Tag.nondeterministic_seeded in func.tags:
            fused = any(argument.name == "dropout_p" for argument in func._schema.arguments)
            self.draws = not fused or draws(func, args, kwargs)
        self._look(inputs, looks_up=func is torch.ops.aten.embedding.default)
        if func._schema.is_mutable:
            self.written |= {
                self._names[storage]
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.is_write and isinstance(value, Tensor)
                if (storage := value.untyped_storage()._cdata) in self._names
            }
        formula = self._flop_of.get(func.overloadpacket)
        flops = 0 if formula is None else formula(*args, **kwargs, out_val=out)
        self.flops += flops
        touched = touched_by(func, inputs, outputs)
        if touched != NO_WORK and func.overloadpacket not in ALLOCATE:
            unit = self._running[-1] if self._running else self._outer_unit
            self._launches[unit] = self._launches.get(unit, 0) + 1
        if self._running:
            block = self._running[-1]
            self._flops_in[block] = self._flops_in.get(block, 0) + flops
            forward = self._forwards[block]
            name = None if block in self._compiled else forward.names.of(func, args, kwargs)
            work = touched if formula is None else Work(flops=flops)
            kept_outputs = outputs if name is not None else []
            forward.calls.append((name, work, kept_outputs, [tensor._version for tensor in kept_outputs]))
        return out

    def _count(self, name: str, number: int, *_: Any) -> None:
        self._inside[name] = self._inside.get(name, 0) + number

    def _look(self, inputs: Iterable[Tensor], *, looks_up: bool) -> None:
        """Check the tensors that an operator reads, which may look rows up in them and do nothing else."""
        for tensor in inputs:
            storage = tensor.untyped_storage()._cdata
            if storage in self._owners:
                running = [name for name in self._owners[storage] if self._inside.get(name)]
                if not running:
                    self.outside.add(self._names[storage])
                elif not looks_up and self.computing is not None:
                    self.computing.update(running)

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._outer_unit = HEAD
        if name in self._entered:
            self._repeated.add(name)
        self._entered.add(name)
        first = stream_in(args)
        hidden = first if args else kwargs.get("hidden_states")
        if self._checkpointed and isinstance(hidden, Tensor) and hidden.requires_grad:
            self._keep_input(name, hidden)
        if name in self.like:
            return
        self._running.append(name)
        self._forwards[name] = BlockForward(Names(module), self._new([args, kwargs]), first)

    def _leave(self, name: str, module: nn.Module, args: object, output: Any) -> None:
        self._running.pop()
        self.outputs[name] = likes_of(output)

    def _new(self, values: Any) -> dict[int, int]:
        """Bytes by storage of the tensors that no earlier block was given."""
        dense = filter(_is_dense, tensors_in(values))  # a sparse one is reported by the operator that reads it
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in dense}
        first_seen = {key: storage for key, storage in storages.items() if key not in self._inputs}
        self._inputs.update(first_seen)
        return {key: storage.nbytes() for key, storage in first_seen.items()}

    def _keep_input(self, name: str, hidden: Tensor) -> None:
        """Count a checkpointed block's input in the block; torch (up to 2.12) saves it just before the block runs."""
        storage = hidden.untyped_storage()
        unit, _ = self._saved.get(storage._cdata, ("", None))
        if unit in (EMBEDDING, HEAD):
            self.saved[unit] -= storage.nbytes()
        if unit in ("", EMBEDDING, HEAD):
            self._saved[storage._cdata] = name, storage
            self.saved[name] = self.saved.get(name, 0) + storage.nbytes()

    def _save(self, tensor: Tensor) -> None:
        if not _is_dense(tensor):
            self._sparse = True
            return
        storage = tensor.untyped_storage()
        if self._running:
            forward = self._forwards[self._running[-1]]
            forward.last_saved = len(forward.calls)
        if storage._cdata not in self._parameters and storage._cdata not in self._saved:
            unit = self._running[-1] if self._running else self._outer_unit
            self._saved[storage._cdata] = unit, storage
            self.saved[unit] = self.saved.get(unit, 0) + storage.nbytes()

    # --- what was counted --------------------------------------------------------------------------------------------

    def same(self, one: str, other: str) -> bool:
        """Whether the same was counted of two blocks."""
        listed: dict[str, list[object]] = {one: [], other: []}
        for block, path in self.linears():
            if block in listed:
                weight = self._layers[path][0].weight
                traits = weight.shape, weight.dtype, weight.requires_grad, self._calls(block, path)
                listed[block].append((path.removeprefix(block), *traits))
        counted = (self.saved, self._choices, self._flops_in, self._launches)
        reads = [name for name in self.outside if name.startswith((f"{one}.", f"{other}."))]
        return not reads and listed[one] == listed[other] and all(item.get(one) == item.get(other) for item in counted)

    def units(self) -> tuple[Unit, ...]:
        """The embedding, the blocks and the head, in this order, with what was counted. Empty ones are left out."""
        kinds = {EMBEDDING: UnitKind.EMBEDDING, **dict.fromkeys(self.blocks, UnitKind.BLOCK), HEAD: UnitKind.HEAD}
        unit_of = units_by_name(self.model)
        params, trainable, quantised, stored = (dict.fromkeys(kinds, 0) for _ in range(4))
        for name, parameter in self.model.named_parameters():  # shared parameters come once
            unit, packed = unit_of[name], is_quantised(parameter)
            params[unit] += num_weights(parameter)
            trainable[unit] += parameter.numel() * parameter.requires_grad
            quantised[unit] += num_weights(parameter) * packed
            stored[unit] += parameter.nbytes * packed
        with_params = set(unit_of.values())  # a tied head has no parameter of its own
        return tuple(
            Unit(
                path,
                kind,
                params[path],
                trainable[path],
                self.saved.get(path, 0),
                self._choices.get(path),
                temporaries=self.temporaries.get(path),
                in_chunks=self.in_chunks if kind is UnitKind.HEAD else None,
                quantised=quantised[path],
                quantised_bytes=stored[path],
                launches=0 if path in self._compiled else self._launches.get(path, 0),
                launches_back=0 if path in self._compiled else self.launches_back.get(path, 0),
            )
            for path, kind in kinds.items()
            if path in with_params or self.saved.get(path)
        )

    @property
    def not_layerwise(self) -> str:
        """Why micro-batches cannot take turns in each block (``strategies/engine/layers_first.py``)."""
        reasons = {
            "the model has no blocks": not self.blocks,
            "a block runs twice in a forward": bool(self._repeated),
            "not every block runs in a forward": self.blocks.keys() != self._entered,
            f"the forward writes to {self._changed}, which the next micro-batch would read": bool(self._changed),
        }
        return next((reason for reason, is_so in reasons.items() if is_so), "")

    def linears(self) -> Iterator[tuple[str, str]]:
        """The linear layers of blocks that were called: the block's path, and the layer's."""
        for path in self._layers:
            block = next((block for block in self.blocks if path.startswith(f"{block}.")), None)
            if block is not None and self._calls(block, path):
                yield block, path

    def _calls(self, block: str, path: str) -> list[tuple[int, bool]]:
        """How a layer of ``block`` was called; where the block is like another one, how that one's was."""
        return self._layers[self.like.get(block, block) + path.removeprefix(block)][1]


def touched_by(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> Work:
    """What an operator reads and writes; a view nothing."""
    read_storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    is_view = all(tensor.untyped_storage()._cdata in read_storages for tensor in outputs)
    if is_view and not func._schema.is_mutable:
        return NO_WORK
    return Work(touched_bytes=sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs)))


def _see(calls: list[tuple[int, bool]], module: nn.Module, args: Any, kwargs: Any) -> None:
    """Note a call of a linear layer: how many rows, and whether its input needs a gradient."""
    x = args[0] if args else next(iter(kwargs.values()))
    # The first forward of a reentrant checkpoint runs without gradients.
    calls.append((x.numel() // max(1, x.shape[-1]), x.requires_grad or not torch.is_grad_enabled()))
