"""Whether the blocks of an architecture can run apart, as a pipeline needs it: tried on a small copy, before any data.

The copy has four blocks, and the dtype and autocast of the run. ``strategies/parallel/stages.py`` compares its parts
with the whole by bits. What the copy cannot show is refused by its key: layers that training leaves out at random.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deepstow.strategies.core.compose import degrees, requirements_of
from deepstow.strategies.core.facts import Precision
from deepstow.strategies.core.protocol import Axis, Requirement
from deepstow.strategies.parallel import stages
from deepstow.trainer.errors import ConfigError, first_line
from deepstow.trainer.model import build
from deepstow.trainer.model.params import EMBEDDING, units_by_name
from deepstow.trainer.model.shrink import VOCAB, small_copy
from deepstow.trainer.planning.facts import precision_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from deepstow.strategies.parallel.stages import Form
    from deepstow.trainer.config.sections import RunConfig

BLOCKS = 4


def form_of_stages(config: RunConfig) -> Form | None:
    """How the configured model's forward runs in stages; None if it has none. Raise ConfigError if it cannot."""
    if Axis.STAGES not in degrees(config.strategies):
        return None
    hf_config = build.load_config(config.model, VOCAB)
    text = hf_config.get_text_config()
    drops = [key for key, value in text.to_dict().items() if "layerdrop" in key and value]
    if drops:
        what = f"model.config.{drops[0]} is on, and a stage whose first block is left out would go on without its input"
        raise _cannot(config, text.model_type, f"{what}; write {drops[0]}: 0.0")
    try:
        with torch.random.fork_rng(devices=[]):
            return _tried(hf_config, config)
    except stages.CannotCut as error:
        raise _cannot(config, text.model_type, str(error)) from None
    except Exception as error:  # a model's code can raise anything
        what = f"a small copy, on which that would be tried, cannot be built or run: {first_line(error)}"
        raise _cannot(config, text.model_type, what) from None


def _cannot(config: RunConfig, kind: str, why: str) -> ConfigError:
    line = f"strategies.pipeline: {kind} cannot be cut into stages: {why}"
    return ConfigError(config.located("strategies.pipeline", line))


def _tried(hf_config: PretrainedConfig, config: RunConfig) -> Form:
    mixed = precision_of(config) is not Precision.FP32
    casts = Requirement.COMPUTE_DTYPE in requirements_of(config.strategies)  # weights, once; else autocast products
    dtype = torch.bfloat16 if mixed and casts else getattr(torch, config.model.dtype)
    copy = small_copy(hf_config, {"dtype": dtype}, BLOCKS)
    copy.config.use_cache = False
    ids = torch.arange(1, 25).view(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed and not casts):
        form = stages.form_of(copy, inputs)
    if casts:
        _refuse_beside_engine(copy, form)
    return form


def _refuse_beside_engine(copy: Any, form: Form) -> None:
    """Raise CannotCut if the memory engine cannot train stages of this model: the head is tied, or a module is defined
    in front of the blocks and called behind them, or the other way.

    The plan goes by the order of definition, and the memory engine has room for what the plan gives a stage.
    """
    head = copy.get_output_embeddings()
    if head is not None and head.weight is copy.get_input_embeddings().weight:
        raise stages.CannotCut(
            "its head is tied to the embedding, and gradients of the two ends are added before any update; leave "
            "strategies.offload out"
        )
    for name, unit in units_by_name(copy).items():
        path = name.rpartition(".")[0]
        if path in form.outside and (unit == EMBEDDING) != (path in form.front):
            raise stages.CannotCut(
                f"{path} is defined on one side of the blocks and called on the other, and its bytes are planned where "
                f"it is defined; leave strategies.offload out"
            )
