"""Make batches of rows, and test whether a model can be trained on packed ones.

Unpacked batches have an ``attention_mask`` and are padded on the right. Packed batches have ``position_ids`` and *no*
``attention_mask``: Transformers then builds the block-diagonal causal mask from the positions that restart
(masking_utils.py). Two conditions: ``use_cache`` is off, since a cache switches that off (TrainingArguments does so),
and for flash attention the batch is a single row, so ``flatten`` concatenates the rows. The padding of a packed row is
a document of its own. Packed equals unpacked up to rounding: kernels sum rows of another length in another order.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from deepstow.strategies.parallel.varlen import DOCUMENTS, Documents
from deepstow.trainer.data import packing
from deepstow.trainer.data.packing import MASKED
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model import build
from deepstow.trainer.model.attention import of_copy
from deepstow.trainer.model.shrink import VOCAB, small_copy

if TYPE_CHECKING:
    from deepstow.trainer.config.recipe import Column
    from deepstow.trainer.config.sections import RunConfig

MULTIPLE = 8
# Of the largest logit. Rounding errors are a thousand times smaller, a leak is a hundred times larger.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Collator:
    """Makes a dict of int64 tensors [rows, length] of rows; length is a multiple of ``MULTIPLE``. An attention that
    takes documents is told how long they are (``varlen.Documents``).
    """

    pad_token_id: int
    packing: bool  # rows have ``position_ids``; no ``attention_mask`` is made
    flatten: bool = False  # one row [1, rows * length]; for packing with flash attention
    least: int = 0  # tokens; compiled blocks take rows of one length
    documents: bool = False  # attention takes documents; for packing
    columns: Mapping[str, Column] = field(default_factory=dict)  # of recipes, that rows may have

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        longest = max(self.least, *(len(row["input_ids"]) for row in rows))
        length = -(-longest // MULTIPLE) * MULTIPLE
        shape = (len(rows), length)
        batch: dict[str, Any] = {"input_ids": torch.full(shape, self.pad_token_id), "labels": torch.full(shape, MASKED)}
        third = "position_ids" if self.packing else "attention_mask"
        batch[third] = torch.zeros(shape, dtype=torch.long)
        for index, row in enumerate(rows):
            size = len(row["input_ids"])
            batch["input_ids"][index, :size] = torch.as_tensor(row["input_ids"])
            batch["labels"][index, :size] = torch.as_tensor(row["labels"])
            batch[third][index, :size] = torch.as_tensor(row["position_ids"]) if self.packing else 1
            if self.packing:
                batch[third][index, size:] = torch.arange(length - size)
        for name in (column for column in self.columns if column in rows[0]):
            batch[name] = self.columns[name](rows, batch["labels"])
        if self.documents:
            batch[DOCUMENTS] = Documents.at(batch["position_ids"])
        if self.flatten:
            return {name: tensor.flatten(0, 1)[None] for name, tensor in batch.items()}
        return batch


def check_packing(config: RunConfig) -> None:
    """Raise ConfigError if documents in one row see each other in a small copy of the model, or it cannot pack."""
    if not config.data.packing:
        return
    reason = packing_supported(small_copy(build.load_config(config.model, VOCAB), of_copy(config.model)))
    if reason is not None:
        raise ConfigError(f"data.packing = true: {reason}; set data.packing: false for this model")


def check_batch(config: RunConfig, rows: Any, replicas: int) -> None:
    """Raise ConfigError if only full batches are taken, and the ``rows`` are fewer than one of all ``replicas`` has."""
    batch_size = config.training.per_device_train_batch_size * replicas
    if config.training.dataloader_drop_last and not config.data.streaming and len(rows) < batch_size:
        what = f"the data has {len(rows):,} rows, and a batch has {batch_size:,}, so all are dropped"
        cure = "leave it out, or write a smaller training.per_device_train_batch_size"
        raise config.error("training.dataloader_drop_last", True, f"{what}; {cure}")


def packing_supported(model: torch.nn.Module) -> str | None:
    """Why the model (a small one of the same architecture, on the CPU) cannot be trained on packed rows, or None: a
    float32 copy runs on two packed rows and on their four documents one by one, and the logits are compared.
    """
    name = type(model).__name__
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{name} takes no position_ids"
    probe = copy.deepcopy(model).float().eval()
    vocab_size = int(probe.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    generator, lengths = torch.Generator().manual_seed(0), [5, 7, 8, 3]
    documents = [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]
    rows = packing.rows(packing.whole(lengths), lambda index: (documents[index].numpy(),) * 2, 12, packing=True)
    try:
        with torch.no_grad():
            packed = probe(**Collator(0, packing=True)(list(rows)), use_cache=False).logits
            for row, pair in zip(packed, (documents[:2], documents[2:]), strict=True):
                alone = torch.cat([probe(document[None], use_cache=False).logits[0] for document in pair])
                error = (row[: len(alone)] - alone).abs().max() / alone.abs().max()
                if not error <= _TOLERANCE:
                    return f"{name} lets packed documents see each other (logits differ by {float(error):.1%})"
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"{name} cannot run a packed row: {str(error).splitlines()[0]}"
    return None
