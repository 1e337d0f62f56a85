"""Write a model that was gathered into a file (``Spilled``), and open it again, with one tensor in memory at a time.

On saving Transformers takes apart what it put together on loading, as the experts of a layer: all tensors at once. Here
its own conversions do so for one tensor of the model at a time, and what they make goes into a file without a name.
To be checked, what was written is put together in the same way (``parts.py``), into such a file.

Invariant. What is written has the bytes of ``save_pretrained``; of what is larger than one file, its tensors, since
Transformers puts all that it took apart of one tensor into one file, however large. Whether conversions can be made of
one tensor alone is seen without values: names and shapes have to be those of all at once. Otherwise Transformers makes
them, in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from deepstow.trainer.model import parts, tying
from deepstow.trainer.model.mapped import Spilled

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save(model: PreTrainedModel, folder: Path, state: Mapping[str, Tensor], pieces: Spilled) -> bool:
    """Write ``model`` with this ``state``, which is in a file; whether it was taken apart, into ``pieces``.

    Raises:
        OSError: the disk has no room for the pieces.
        DiskError: the disk has not given them back as they were.
    """
    tensors = None if hasattr(model, "peft_config") else taken_apart(model, state, pieces)
    pieces.settle()
    if tensors is None:
        model.save_pretrained(folder, state_dict=dict(state))
    else:
        model.save_pretrained(folder, state_dict=tensors, save_original_format=False)
        pieces.refuse_damaged()
    return tensors is not None


def taken_apart(
    model: PreTrainedModel, state: Mapping[str, Tensor], place: Callable[[Tensor], Tensor]
) -> dict[str, Tensor] | None:
    """What Transformers writes of ``state``, new tensors where ``place`` puts them; None: it makes no new ones, or some
    of several.
    """
    unsaved = model._keys_to_ignore_on_save or ()
    saved: Any = {name: value for name, value in state.items() if name not in unsaved}
    saved = remove_tied_weights_from_state_dict(saved, model)
    empty = {name: torch.empty_like(value, device="meta") for name, value in saved.items()}
    original = revert_weight_conversion(model, dict(empty))
    name_of = {id(value): name for name, value in empty.items()}
    as_it_is = {name: name_of[id(value)] for name, value in original.items() if id(value) in name_of}
    changed = [name for name in empty if name not in as_it_is.values()]
    items = [item for name in changed for item in revert_weight_conversion(model, {name: empty[name]}).items()]
    expected = sorted((name, value.shape) for name, value in original.items() if name not in as_it_is)
    if not changed or sorted((name, value.shape) for name, value in items) != expected:
        return None
    tensors = {name: saved[source] for name, source in as_it_is.items()}
    for name in changed:
        for piece, value in revert_weight_conversion(model, {name: saved[name]}).items():
            tensors[piece] = place(value)
    return {name: tensors[name] for name in original}


def opened(folder: Path, reload: Callable[..., PreTrainedModel], place: Spilled) -> PreTrainedModel:
    """The model in ``folder``, as ``reload`` opens it, with its values in a file. OSError: the disk has no room."""
    model = reload(device_map="meta")
    tying.untie(model, tying.untied(model, str(folder)))
    values = dict[str, Tensor]()
    parts.fill(model, (), str(folder), 0, reload, lambda name, value: values.__setitem__(name, place(value)))
    place.settle()
    for name, value in values.items():
        parts.put(model, name, nn.Parameter(value, requires_grad=False))
    model.tie_weights(recompute_mapping=False)
    return model
