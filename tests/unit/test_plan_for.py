"""Plans for live models: forwards that cannot be counted end in one line, and parameters come as torch takes them."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer

from deepstow.strategies.engine import stow
from deepstow.trainer.config.sections import ModelSection
from deepstow.trainer.errors import CountingError
from deepstow.trainer.model import build as model_module
from deepstow.trainer.model.params import decay_groups, list_params
from deepstow.trainer.planning.plan_for import count_live, plan_for
from deepstow.trainer.run.callbacks.plan_check import count_saved
from tests.helpers.engine import checkpointing
from tests.helpers.marks import rarely
from tests.helpers.models import build
from tests.helpers.tiny import MODELS
from tests.helpers.zoo import hub


class Net(nn.Module):
    """Its forward does one thing more."""

    def __init__(self, more: Callable[[Tensor], Any] = lambda x: None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        self.more(x)
        return x


BATCH = {"x": torch.ones(2, 4)}
NOT_COUNTED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a value": (lambda x: x.sum().item(), "DataDependentOutputException: aten._local_scalar_dense.default"),
    "a shape": (lambda x: x.nonzero(), "DynamicOutputShapeException: aten.nonzero.default"),
    "numpy": (lambda x: x.detach().numpy(), "RuntimeError: .numpy() is not supported"),
    "gradients": (lambda x: torch.autograd.grad(x.square().sum(), x), "RuntimeError: forward computes gradients"),
    "sparse": (lambda x: x.to_sparse() @ x.T, "NotImplementedError: forward uses sparse tensors"),
    "its own": (lambda x: {}["rate"], "KeyError: 'rate'"),
    "several lines": (lambda x: int("1\n2\n"), "ValueError: invalid literal"),
}


@pytest.mark.parametrize("what", NOT_COUNTED)
def test_a_forward_that_cannot_be_counted(what: str) -> None:
    more, reason = NOT_COUNTED[what]
    with pytest.raises(CountingError) as refused:
        plan_for(Net(more), batch=BATCH, max_grad_norm=None)
    line = str(refused.value)
    assert reason in line and "leave out batch=" in line and "\n" not in line
    assert refused.value.__cause__ is not None
    assert plan_for(Net(more), max_grad_norm=None).layout is not None


PARAMS: dict[str, Callable[[nn.Module], Any]] = {
    "with names": lambda net: list(net.named_parameters()),
    "iterators in groups": lambda net: [
        {"params": (p for p in net.parameters() if p.ndim > 1)},
        {"params": (p for p in net.parameters() if p.ndim == 1), "lr": 1e-4},
    ],
    "groups with names": lambda net: [
        {"params": [(name, p) for name, p in net.named_parameters() if p.ndim > 1]},
        {"params": [(name, p) for name, p in net.named_parameters() if p.ndim == 1]},
    ],
}


@pytest.mark.parametrize("kind", PARAMS)
def test_what_torchs_optimizers_take(kind: str) -> None:
    """The same object is given to both."""
    net = Net()
    params = PARAMS[kind](net)
    plan = plan_for(net, params, max_grad_norm=None)
    groups = {param.name: param.group for param in plan.facts.params}
    assert groups["layers.0.weight"] == 0 and groups["layers.0.bias"] == int("groups" in kind)
    optimizer = stow(net, plan, params, device="cpu")
    assert [len(group["params"]) for group in optimizer.param_groups] == ([2, 2] if "groups" in kind else [4])


@pytest.mark.parametrize("kind", [rarely("qwen3"), "llama"])
def test_what_is_saved_with_and_without_a_mask(kind: str) -> None:
    """To the byte; on full rows attention keeps less, where heads are grouped."""
    model = model_module.build(*section_of({**MODELS[kind], "num_hidden_layers": 3}), seed=0, partitioned=False).train()
    ids = torch.randint(0, 64, (2, 16))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    sums = []
    for batch in ({"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": ids, "attention_mask": mask}):
        foretold = plan_for(model, eval_rows=0, batch=batch, max_grad_norm=None).facts.units
        with count_saved(model) as measured:
            model(**batch)
        sums.append(sum(measured.values()))
        assert sum(unit.saved_bytes for unit in foretold) == sums[-1]
    assert sums[1] > 1.03 * sums[0]


@pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")
def test_planning_leaves_gradients_as_they_are() -> None:
    """A reentrant checkpoint runs its backward on the model's own parameters, also while it is counted."""
    model: Any = model_module.build(*section_of(MODELS["llama"]), seed=0, partitioned=False).train()
    checkpointing(model, "reentrant")
    first, *others = model.parameters()
    first.grad = kept = torch.ones_like(first)
    plan_for(model, batch=(2, 16), max_grad_norm=None)
    assert first.grad is kept and bool((kept == 1).all())
    assert [type(param.grad) for param in others if param.grad is not None] == []


def section_of(config: Mapping[str, Any]) -> tuple[ModelSection, Any]:
    section = ModelSection(config=dict(config), tokenizer="none")
    return section, model_module.load_config(section)


def test_a_single_group_is_no_list_of_groups() -> None:
    net = Net()
    plan_for(net, net.named_parameters(), max_grad_norm=None)  # an iterator
    with pytest.raises(ValueError, match="params holds 'params', which is no parameter"):
        plan_for(net, {"params": list(net.parameters())}, max_grad_norm=None)  # type: ignore[arg-type]


# Parameters as the planner lists them


def test_what_an_embedding_only_looks_up() -> None:
    """Not what shares its unit and is multiplied by, as a norm."""
    listed = list_params(build("bert"), {}, lambda _: "float32")
    looked_up = {param.name.removeprefix("bert.embeddings.") for param in listed if param.looked_up}
    assert looked_up == {f"{name}_embeddings.weight" for name in ("word", "position", "token_type")}
    tied = list_params(build("llama", tied=True), {}, lambda _: "float32")
    assert [(param.users, param.looked_up) for param in tied if "embed" in param.name] == [(("head",), True)]


def test_a_tied_head_reads_the_embedding_in_a_module_of_its_own() -> None:
    """Seen in a forward on fake tensors, which replace a parameter under all its names."""
    counted = count_live(build("llama", tied=True), (2, 8), [])
    assert [param.name for param in counted.params if param.elsewhere] == []


def test_what_is_in_use_while_blocks_run() -> None:
    """Parameters of the model itself, and of a module that contains blocks."""
    for model, wanted in ((build("shared"), "scale"), (hub("wav2vec2"), "inner.wav2vec2.masked_spec_embed")):
        assert [param.name for param in list_params(model, {}, lambda _: "float32") if param.elsewhere] == [wanted]


@pytest.mark.parametrize("name", MODELS)
def test_weight_decay_is_for_those_that_the_trainer_says(name: str) -> None:
    with torch.device("meta"):
        section = ModelSection(config=dict(MODELS[name]), tokenizer="none")
        model = AutoModelForCausalLM.from_config(model_module.load_config(section))
    rule: Any = Trainer.get_decay_parameter_names  # uses nothing of its trainer
    decayed = set(rule(None, model))
    assert decayed
    assert decay_groups(model) == {name: int(name not in decayed) for name, _ in model.named_parameters()}
