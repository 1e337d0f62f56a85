"""Layers with low-rank adapters (PEFT) under DeepSpeed's tensor parallelism.

AutoTP goes through a model until it meets something with a weight. PEFT puts a module there that shows the weight of
the layer inside, and AutoTP would replace it, adapters and all. So these layers are divided before DeepSpeed gets the
model, by its own kinds of layers and as ``autotp.cut_of`` says; it leaves alone what is marked as ``replaced``.

    columns   y_r = W_r x + B_r A x          A is whole: its gradient is that of all ranks, summed behind B_r
    rows      y   = sum W_r x_r + B sum A_r x_r

Invariant. What is whole, A of the first kind and B of the second, has the same gradient on all ranks to the last bit.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from deepstow.strategies.parallel.autotp import Cut, cut_of


def divide(model: nn.Module, degree: int) -> None:
    """Give every layer of ``model`` that has adapters the part of this rank, of ``degree`` that follow each other."""
    adapted = [(name, module) for name, module in model.named_modules() if hasattr(module, "base_layer")]
    if not adapted:
        return
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, set_autotp_mode
    from deepspeed.module_inject.tp_shard import AutoTPMeta
    from deepspeed.utils import groups

    set_autotp_mode(training=True)
    groups._init_tp_mesh_device(degree)  # DeepSpeed's engine uses the same groups
    arguments: dict[str, Any] = {"mp_group": groups.get_tensor_model_parallel_group()}
    arguments["tp_meta"] = AutoTPMeta.from_model_config(model.config)
    kinds = {Cut.COLUMNS: LinearLayer, Cut.ROWS: LinearAllreduce}
    for prefix, wrapper in adapted:
        for name, layer in list(wrapper.named_modules(prefix=prefix)):
            cut = cut_of(name, tied=True) if isinstance(layer, nn.Linear) else None
            if cut is not None:
                path, _, key = name.rpartition(".")
                setattr(model.get_submodule(path), key, kinds[cut](layer, name=name, **arguments))
        wrapper.replaced = True  # type: ignore[assignment]
