"""What a run does with a model that was built: it gets the dtype of compute, and strategies change it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepstow.strategies.core.compose import degrees, in_order
from deepstow.strategies.core.facts import EXPERT, Precision
from deepstow.strategies.core.protocol import Axis
from deepstow.strategies.engine.forward.compiled import compile_blocks
from deepstow.strategies.engine.tensors.quantised import is_quantised
from deepstow.strategies.parallel.tensor_shards import Shard
from deepstow.trainer.model.build import with_lora

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from deepstow.strategies.core.plan import Plan
    from deepstow.trainer.config.sections import ModelSection, RunConfig


def loads_spans(config: RunConfig, plan: Plan) -> bool:
    """Whether the memory engine is given weights one by one, of which a rank keeps its spans. Others would look at them
    before: adapters wrap them, Trainers of preferences copy the model.
    """
    return config.chosen_task.language and config.model.lora is None and plan.loads_spans


def shards(weights: PreTrainedModel, config: RunConfig, rank: int) -> dict[str, Shard]:
    """The parts that ``rank`` has of parameters of which it is given some rows alone."""
    ways, found = degrees(config.strategies).get(Axis.EXPERTS, 1), {}
    for name, param in weights.named_parameters():
        if ways > 1 and EXPERT.search(name):
            sizes = (len(param) // ways,) * ways
            found[name] = Shard(0, sizes, rank % ways, tuple(param.shape))
    return found


def loads_slices(config: RunConfig, plan: Plan) -> ModelSection | None:
    """The model, without adapters, of which tensor ranks load slices; None: they load no slices. Adapters are added to
    what is loaded; on random weights they go on with the numbers of these, which every rank has to draw for that.
    """
    section = config.model
    if plan.facts.run.tensor == 1 or (section.lora is not None and section.name_or_path is None):
        return None
    return section.model_copy(update={"lora": None, "adapter": None})


def adapted(weights: PreTrainedModel, section: ModelSection, seed: int) -> PreTrainedModel:
    """``weights``, which are loaded, with the adapters of ``section``, if it has any, as ``build`` adds them."""
    if section.lora is None:
        return weights
    torch.manual_seed(seed)
    return with_lora(weights, section.lora, adapter=section.adapter)


def to_compute(weights: PreTrainedModel, plan: Plan) -> None:
    """Give weights that the engine computes with in bf16 that dtype."""
    if plan.layout is not None and plan.facts.run.precision is Precision.BF16:
        for parameter in weights.parameters():  # one by one; the engine keeps fp32 masters
            if not is_quantised(parameter):
                parameter.data = parameter.data.to(torch.bfloat16)


def apply_strategies(weights: PreTrainedModel, config: RunConfig, plan: Plan) -> None:
    """Let recipes change the model, and compile blocks, if the config says so; then let each strategy and those that it
    implies change the model, in the order of deciding. Names stay the same.
    """
    for recipe in config.switched_on:
        recipe.apply(weights, config)
    if (backend := config.training.compile_backend) is not None:
        compile_blocks(weights, backend)
    for name, strategy in in_order(config.strategies).items():
        before = _names_of(weights)
        strategy.apply(weights, plan)
        assert _names_of(weights) == before, f"strategies.{name} renamed, reordered or dropped something"


def _names_of(weights: PreTrainedModel) -> list[str]:
    """The names of all modules, parameters and buffers, in order."""
    kinds = (weights.named_modules(), weights.named_parameters(remove_duplicate=False), weights.named_buffers())
    return [name for kind in kinds for name, _ in kind]
