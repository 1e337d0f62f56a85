"""Rows to batches, and whether a model can take packed ones.

Unpacked batches carry an ``attention_mask`` and are padded on the right. Packed batches carry ``position_ids``
and *no* ``attention_mask``: by that Transformers knows them, and builds the block-diagonal causal mask from the
places where positions restart (masking_utils.py; eager, sdpa and flex, any batch size). Two conditions:
``use_cache`` is off (a cache switches the detection off; TrainingArguments turns it off), and for flash attention
the batch is a single row (modeling_flash_attention_utils.py), so there ``flatten`` lays the rows end to end.

Padding of a packed row is a document of its own: positions restart, labels are masked. It attends to nothing
and nothing attends to it.

[Rounding] Packed equals unpacked up to rounding, not bitwise. Masked scores contribute exact zeros, but a row of
another length is multiplied and summed in blocks of another shape, in another order.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.data.packing import MASKED

_TOLERANCE = 1e-3  # of the largest logit; rounding is a thousand times smaller, a leak a hundred times larger


@dataclass(frozen=True)
class Collator:
    """Rows as a dict of int64 tensors [rows, length], length a multiple of ``pad_to_multiple_of``.

    Args:
        packing: rows carry ``position_ids``; no ``attention_mask`` is made.
        flatten: one row [1, rows * length]; for packing with flash attention.
    """

    pad_token_id: int
    packing: bool
    pad_to_multiple_of: int = 8
    flatten: bool = False

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        length = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        shape = (len(rows), length)
        batch = {
            "input_ids": torch.full(shape, self.pad_token_id),
            "labels": torch.full(shape, MASKED),
        }
        third = "position_ids" if self.packing else "attention_mask"
        batch[third] = torch.zeros(shape, dtype=torch.long)
        for index, row in enumerate(rows):
            used = len(row["input_ids"])
            batch["input_ids"][index, :used] = torch.as_tensor(row["input_ids"])
            batch["labels"][index, :used] = torch.as_tensor(row["labels"])
            batch[third][index, :used] = torch.as_tensor(row["position_ids"]) if self.packing else 1
            if self.packing:
                batch[third][index, used:] = torch.arange(length - used)
        if self.flatten:
            return {name: tensor.reshape(1, -1) for name, tensor in batch.items()}
        return batch


def packing_supported(model: torch.nn.Module) -> str | None:
    """Why the model cannot be trained on packed rows, or None if it can.

    A real probe on a float32 copy: two packed rows against their four documents run one by one. Call it on a
    small model of the same architecture.
    """
    name = type(model).__name__
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{name} takes no position_ids"
    probe = copy.deepcopy(model).float().eval()
    vocab_size = int(probe.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    device = next(probe.parameters()).device
    generator = torch.Generator().manual_seed(0)
    lengths = [(5, 7), (8, 3)]
    documents = [[torch.randint(vocab_size, (n,), generator=generator) for n in row] for row in lengths]
    rows = [
        {
            "input_ids": torch.cat(row),
            "labels": torch.cat(row),
            "position_ids": torch.cat([torch.arange(len(document)) for document in row]),
        }
        for row in documents
    ]
    batch = {name: tensor.to(device) for name, tensor in Collator(0, packing=True)(rows).items()}
    try:
        with torch.no_grad():
            packed = probe(**batch, use_cache=False).logits
            for index, row in enumerate(documents):
                used = sum(map(len, row))
                alone = torch.cat([probe(d[None].to(device), use_cache=False).logits[0] for d in row])
                error = (packed[index, :used] - alone).abs().max() / alone.abs().max()
                if not error <= _TOLERANCE:
                    return f"{name} lets packed documents see each other (logits differ by {float(error):.1%})"
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"{name} cannot run a packed row: {str(error).splitlines()[0]}"
    return None
