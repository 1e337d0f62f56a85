"""What a model adds to its loss, as routers of experts do, counts as the mean over an update's micro-batches and ranks,
by hand and under strategies. Transformers' Trainer adds it up.
"""

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.nn.functional import cross_entropy

from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model import loss_terms
from deepstow.trainer.model.build import build, config_of, load_config
from deepstow.trainer.planning.facts import check_model
from deepstow.trainer.verify.verify import full_weights
from tests.helpers.moves import UNEVEN, Kind, made
from tests.helpers.tiny import LLAMA, MIXTRAL, run_config
from tests.helpers.worlds import run_counted

ROUTED: Mapping[str, Any] = {**MIXTRAL, "pad_token_id": 0, "output_router_logits": True, "router_aux_loss_coef": 0.5}
BAMBA: Mapping[str, Any] = {
    **LLAMA, "pad_token_id": 0, "model_type": "bamba", "z_loss_coefficient": 0.1, "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8, "attn_layer_indices": [1],
}  # fmt: skip
SHIFTS = r"loss_function\(|shift_(l|t)|labels\[[^]]*1:"  # in the code of a forward whose labels are of the next token
RATE = 0.5
SGD: Mapping[str, Any] = {
    "optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "weight_decay": 0.0,
    "warmup_steps": 0, "per_device_train_batch_size": 2, "save_strategy": "no",
}  # fmt: skip


def stepped(ranks: Ranks, config: RunConfig) -> tuple[Any, Any, int]:
    """Loss and weights after a step, and by hand the same, of so many micro-batches on all ranks."""
    trainer = made(ranks, config, some=UNEVEN)
    calls = list[Any]()
    trainer.model.register_forward_pre_hook(lambda model, args, kwargs: calls.append(kwargs), with_kwargs=True)
    trainer.train()
    every: list[Any] = [calls] * ranks.world_size
    if ranks.world_size > 1:
        dist.all_gather_object(every, calls)
    (loss,) = (record["loss"] for record in trainer.state.log_history if "loss" in record)
    weights = full_weights(trainer, ranks)
    before = build(config.model, load_config(config.model), seed=config.training.seed, partitioned=False)
    together = [call for some in every for call in some]
    return (loss, weights), by_hand(before, together), len(together)


def by_hand(model: Any, calls: list[Any]) -> tuple[float, dict[str, Any]]:
    """The loss of an update, and the weights after it: the mean over all tokens, and over micro-batches of the term."""
    model.train()
    targets = [call["labels"][:, 1:] for call in calls]
    tokens, total = sum(int(each.ne(-100).sum()) for each in targets), torch.tensor(0.0)
    for call, each in zip(calls, targets, strict=True):
        given = {key: value for key, value in call.items() if key in ("input_ids", "attention_mask", "position_ids")}
        out = model(**given)
        total = total + cross_entropy(out.logits[:, :-1].transpose(1, 2), each, reduction="sum") / tokens
        if model.config.model_type == "bamba":
            term = 0.1 * out.logits.logsumexp(dim=-1).pow(2).mean()
        else:
            term = 0.5 * out.aux_loss
        total = total + term / len(calls)
    total.backward()
    return float(total), {name: param.detach() - RATE * param.grad for name, param in model.named_parameters()}


def kind(ranks: int, accumulated: int, model: Mapping[str, Any], **strategies: Any) -> Kind:
    return Kind(ranks, strategies, {**SGD, "gradient_accumulation_steps": accumulated}, model)


@pytest.mark.parametrize(
    "kind",
    [
        kind(1, 3, ROUTED, offload={"site": "host", "weights": "streamed"}), kind(1, 3, BAMBA),
        pytest.param(kind(2, 2, ROUTED, zero={"stage": 1}), marks=pytest.mark.ranks),
    ],
    ids=["stowed", "z-loss", "ranks"],
)  # fmt: skip
def test_terms_are_means(kind: Kind, tmp_path: Path) -> None:
    (loss, weights), (expected_loss, expected), micro_batches = run_counted(
        kind.ranks, stepped, kind.config(tmp_path, 1)
    )
    assert micro_batches == kind.ranks * kind.training["gradient_accumulation_steps"] > 1
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-6, msg=name)


def test_smoothed_labels_leave_no_term_out(tmp_path: Path) -> None:
    """Transformers' Trainer computes that loss by itself, without what the model adds."""
    for model, key in ((ROUTED, "output_router_logits"), (BAMBA, "z_loss_coefficient")):
        config = run_config(model, label_smoothing_factor=0.1)
        with pytest.raises(ConfigError, match=rf"label_smoothing_factor = 0.1: leaves out .*\(model.config.{key}\)"):
            check_model(config, config_of(config))
    silent = run_config(MIXTRAL, label_smoothing_factor=0.1)
    check_model(silent, config_of(silent))


@pytest.mark.slow
def test_every_term_in_transformers_has_a_switch() -> None:
    """A release that adds another kind of term, or a model whose labels are not of the next token, fails here."""
    autos = (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM)
    kinds = {kind for auto in autos for kind in auto._model_mapping.values()}
    sources = {kind.__name__: inspect.getsource(kind.forward) for kind in kinds if inspect.isclass(kind)}
    adds = {name: text for name, text in sources.items() if re.search(r"\bloss (\+=|= loss \+)", text)}
    assert {"MixtralForCausalLM", "JambaForCausalLM", "BambaForCausalLM"} <= adds.keys()
    unshifted = {
        each.model_type
        for each, kind in transformers.AutoModelForCausalLM._model_mapping.items()
        if inspect.isclass(kind) and not re.search(SHIFTS, inspect.getsource(kind.forward))
    }
    assert unshifted <= {*loss_terms.UNSHIFTED}
    without = [name for name, text in adds.items() if not any(key in text for key in loss_terms.SWITCHES)]
    assert {name for name in without if "Musicgen" not in name} == set()  # it sums the losses of its codebooks
