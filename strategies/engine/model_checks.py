"""Whether a model can be stowed by a plan: the reasons why not, one line each.

A plan gives every parameter contiguous memory of its own. Parameters that share memory otherwise, or are not
contiguous, would train to other bits, or keep old values, without any error.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from deepstow.strategies.core.facts import Tier
from deepstow.strategies.core.layout import Layout
from deepstow.strategies.core.optimizers import STATE
from deepstow.strategies.engine.forward.blocks import around_blocks
from deepstow.strategies.engine.tensors.parameters import ACCUMULATED, is_placeholder
from deepstow.strategies.engine.tensors.quantised import KINDS, complaints
from deepstow.strategies.engine.updating.optim import UpdateRule

NOT_IN_KERNELS = ("maximize", "differentiable", "capturable", "dampening", "initial_accumulator_value")


def refuse_over_ranks(layout: Layout) -> None:
    """Raise ValueError if ``layout`` is for one rank only."""
    if layout.accumulation > 1 and any(bucket.grad_tier is Tier.HOST for bucket in layout.buckets):
        raise ValueError("over ranks, gradients of several micro-batches must stay on the device: gradients=device")
    if any(bucket.grad_direct for bucket in layout.buckets):
        raise ValueError("this plan is for one rank: ranks exchange gradients in slots, and some have none in it")


def mismatches(model: nn.Module, layout: Layout, groups: list[dict[str, Any]], rule: UpdateRule) -> Iterator[str]:
    """Why ``layout`` does not fit the model, its groups and the rule, one line per reason."""
    params = dict(model.named_parameters())
    group_of = {id(param): number for number, group in enumerate(groups) for param in group["params"]}
    yield from _unmovable(model, params)
    yield from complaints(model)
    yield from not_in_kernels(groups, rule)
    moments = len(rule.names)
    if layout.moments != moments:
        yield f"the plan has room for {layout.moments} moments per parameter, the update rule keeps {moments}"
    if layout.moments_as != "fp32" and rule.names != ("exp_avg", "exp_avg_sq"):
        yield f"the plan has moments in {layout.moments_as}, which are AdamW's two: {rule.kind} has {list(rule.names)}"
    for bucket in layout.buckets:
        for name, size in zip(bucket.params, bucket.sizes, strict=True):
            param = params.get(name)
            if param is None:
                yield f"{name}: the model has no such parameter"
                continue
            group = group_of.get(id(param)) if param.requires_grad else None
            actual = (param.numel(), str(param.dtype).removeprefix("torch."), group)
            if actual != (size, bucket.dtype, bucket.group):
                yield (
                    f"{name}: the plan has {size} x {bucket.dtype} in group {bucket.group}, the model {actual[0]} x "
                    f"{actual[1]} in group {actual[2]}"
                )
    around = around_blocks(model)
    for name in (name for b in layout.buckets if not b.resident for name in b.params if name in around):
        owner = name.rpartition(".")[0] or "the model"
        yield f"{name}: leaves the device in the plan, and {owner}, which owns it, uses it while its blocks run"
    for name in params.keys() - {name for bucket in layout.buckets for name in bucket.params}:
        yield f"{name}: not in the plan"


def _unmovable(model: nn.Module, params: Mapping[str, nn.Parameter]) -> Iterator[str]:
    """Parameters that cannot be moved into planned memory, one line per reason."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield f"{name}: a scripted module, whose weights cannot be moved: stow the model as it was before"
    for name, param in params.items():
        if type(param) is not nn.Parameter and (param.requires_grad or type(param).__name__ not in KINDS):
            yield f"{name}: a {type(param).__name__}, which manages its memory itself"
        if not param.is_contiguous() and not is_placeholder(param):
            yield f"{name}: its memory is not in order of rows: build it with .contiguous()"
        if param.requires_grad and getattr(param, "_post_accumulate_grad_hooks", None):
            yield f"{name}: {ACCUMULATED}"
    places = sorted(
        (param.data_ptr(), param.data_ptr() + param.nbytes, name)
        for name, param in params.items()
        if param.numel() and not is_placeholder(param)
    )
    for (_, end, first), (begin, _, second) in pairwise(places):
        if begin < end:
            yield f"{first} and {second} share memory and are two parameters: tie them by giving both modules the same"
    if not places:
        return
    starts, mine = [begin for begin, _, _ in places], {id(param) for param in params.values()}
    for name, module in model.named_modules():
        for key, value in {**vars(module), **module._buffers}.items():
            if key == "_buffers" or f"{key}_orig" in module._parameters:
                continue  # torch.nn.utils.spectral_norm computes the latter anew in every forward
            for tensor in _tensors(value):
                begin, end, owner = places[bisect(starts, tensor.data_ptr()) - 1]
                if id(tensor) not in mine and begin <= tensor.data_ptr() < end:
                    yield f"{owner}: {name}.{key} shares its memory, and would keep the old weight: make a clone"


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel():
            yield leaf


def not_in_kernels(groups: Sequence[Mapping[str, Any]], rule: UpdateRule) -> Iterator[str]:
    """Options of parameter groups that the update rule does not support, one line each."""
    for number, group in enumerate(groups):
        for name in NOT_IN_KERNELS:
            if group.get(name):
                yield f"parameter group {number}: {name} = {group[name]} is not supported; leave it out"
        for name in ("fused", *filter(None, STATE[rule.kind].values())):
            stowed = rule.defaults().get(name)
            if bool(group.get(name, stowed)) != bool(stowed):
                difference = f"{name} is {group[name]} there and {stowed} in the rule that was stowed"
                yield f"parameter group {number}: {difference}, which decides its kernel and state"


def unlike(name: str, saved: Mapping[str, Any], state: Mapping[str, Tensor], rule: UpdateRule) -> Iterator[str]:
    """Why an update could not go on from what was ``saved`` of a parameter, whose own is ``state``, one line each."""
    counted = ("step",) if rule.kernel.counts else ()
    missing = [key for key in (*counted, *rule.names) if key not in saved] if rule.names else []
    if missing:
        yield f"{name}: {', '.join(missing)} missing in the saved state, which has {', '.join(map(str, saved))}"
    for key in state.keys() & saved.keys():
        shape = list(torch.as_tensor(saved[key]).shape)
        if shape != list(state[key].shape):
            yield f"{name}: {key} was saved with shape {shape}, and has {list(state[key].shape)} here"
