"""Every strategy found by file, on two real gloo ranks, against plain training with the same kernels.

A strategy declares how it must compare (``parity``) and small options (``examples``); this file knows neither its
name nor what it does. Bits are compared where BITWISE is declared; otherwise the declared tolerance is the bound. Where
ranks hold a copy of the model together, plain training is on as many ranks as there are copies.
"""

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from deepstow.strategies.core.compose import refusals
from deepstow.strategies.core.facts import RunFacts
from deepstow.strategies.core.protocol import Parity, Phase, Strategy
from deepstow.strategies.core.registry import available, find
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.planning.facts import run_facts
from deepstow.trainer.verify.verify import compare, shrink, train, without_strategies
from tests.helpers.moves import forget_run
from tests.helpers.releases import is_refused, needs, needs_stage_3
from tests.helpers.tiny import run_config
from tests.helpers.worlds import run_counted

RANKS, STEPS = 2, 3
LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
GPT2 = {"model_type": "gpt2", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}  # tied, Conv1D, dropout

MIXTRAL = LLAMA | {"model_type": "mixtral"}

NEVER_CLIPS = "fp32/llama, clipping that never triggers"
CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32/llama": (LLAMA, {"max_grad_norm": 0.0}),
    NEVER_CLIPS: (LLAMA, {"max_grad_norm": 1e6}),
    "fp32/llama tied, accumulation 3": (
        LLAMA | {"tie_word_embeddings": True},
        {"max_grad_norm": 0.0, "gradient_accumulation_steps": 3},
    ),
    "fp32/gpt2 with dropout, checkpointing": (GPT2, {"max_grad_norm": 0.0, "gradient_checkpointing": True}),
    "fp32/llama, clipping that triggers": (LLAMA, {"max_grad_norm": 0.05}),
    "bf16/llama": (LLAMA, {"max_grad_norm": 0.0, "bf16": True}),
}
OF_EXPERTS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {  # for strategies that need them
    "fp32/mixtral, clipping that triggers": (MIXTRAL, {"max_grad_norm": 0.05, "optim": "sgd", "learning_rate": 1.0}),
    "bf16/mixtral": (MIXTRAL, {"max_grad_norm": 0.0, "bf16": True}),
}
plain_results: dict[tuple[str, bool, int], dict[str, torch.Tensor]] = {}


def config_of(case: str, strategies: Mapping[str, Any], folder: Path) -> RunConfig:
    model, training = (CASES | OF_EXPERTS)[case]
    if any(find(name).phase is Phase.KEEP for name in strategies):  # one answer to what forward keeps
        training = {name: value for name, value in training.items() if name != "gradient_checkpointing"}
    return shrink(run_config(model, strategies=strategies, **{"learning_rate": 1e-2} | training), folder, STEPS)


def plain(
    case: str, folder: Path, strategies: Mapping[str, Strategy] = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """Plain training of this case on as many ranks as there are copies of the model, run once."""
    config = config_of(case, strategies, folder)
    copies = run_facts(config, RANKS).replicas
    key = (case, copies < RANKS, copies)  # then the config is of a model without dropout
    if key not in plain_results:
        plain_results[key] = run_counted(copies, train, without_strategies(config))["weights"]
    return plain_results[key]


def goes(strategies: Mapping[str, Strategy], case: str) -> bool:
    """Whether they are not refused in this case."""
    config = config_of(case, strategies, Path("unused"))
    model = any(list(each.refuses_model(config.model.config or {})) for each in strategies.values())
    return not model and not list(refusals(strategies, run_facts(config, RANKS)))


def alone() -> Iterator[Any]:
    """Every example with a case in which it is to have the same bits, if there is one; the other kinds of parity that
    it declares, which are slow, take turns with the examples, and so do the cases of each kind."""
    facts = {case: run_facts(config_of(case, {}, Path("unused")), RANKS) for case in CASES | OF_EXPERTS}
    examples = [(name, options) for name in available() for options in find(name).examples]
    for turn, (name, options) in enumerate(examples):
        strategy = find(name).model_validate(options)
        kinds: dict[Parity, list[str]] = {}
        for case in cases_for(name, strategy):
            kinds.setdefault(declared(strategy, facts[case], case), []).append(case)
        chosen = {each[turn % len(each)] for each in in_turn(kinds, turn)}
        tolerances = {case: declared(strategy, facts[case], case).tolerance for case in chosen}
        for number, case in enumerate(sorted(chosen, key=lambda case: (tolerances[case], case))):
            marks = [needs(name, options), *([pytest.mark.slow] if number else [])]
            yield pytest.param(name, options, case, id=f"{name} {dict(options)} {case}", marks=marks)


def cases_for(name: str, strategy: Strategy) -> list[str]:
    """Those in which it is not refused; of models with experts only if there are no others."""
    found = ([case for case in some if goes({name: strategy}, case)] for some in (CASES, OF_EXPERTS))
    return next((cases for cases in found if cases), [])


def in_turn(kinds: Mapping[Parity, list[str]], turn: int) -> list[list[str]]:
    """The cases of bitwise parity, and now and then those of another kind; of some kind in any case."""
    same = [cases for kind, cases in kinds.items() if kind.tolerance == 0.0]
    others = [cases for kind, cases in kinds.items() if kind.tolerance > 0.0]
    other = [*others, None][turn % (len(others) + 1)]
    return [*same, *([other] if other else [])] or others[:1]


def declared(strategy: Strategy, run: RunFacts, case: str) -> Parity:
    # A limit that no gradient reaches multiplies by one: whatever is declared for clipping, it is as without.
    return strategy.parity(replace(run, max_grad_norm=0.0) if case == NEVER_CLIPS else run)


def one_by_one(ranks: Ranks, configs: Mapping[str, RunConfig]) -> dict[str, Any]:
    """The weights that each trains in the same ranks, or why not."""
    found: dict[str, Any] = {}
    for name, config in configs.items():
        try:
            found[name] = train(ranks, config)["weights"]
        except Exception:
            found[name] = traceback.format_exc()
        forget_run()
    return found


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``one_by_one`` has of the tests that were asked for. After ``tensor`` DeepSpeed divides all models of a
    process, so one such run is the last, and others have ranks of their own.
    """
    configs: dict[str, RunConfig] = {}
    divided: dict[str, RunConfig] = {}
    for item in request.session.items:
        skipped = any(mark.args[0] for mark in item.iter_markers("skipif"))
        given = getattr(item, "callspec", None)
        if item.path == request.path and given and not skipped:
            case, strategies = asked(given.params)
            config = config_of(case, strategies, tmp_path_factory.mktemp("run"))
            (divided if "tensor" in strategies else configs)[given.id] = config
    first, *others = [{name: config} for name, config in divided.items()] or [{}]
    found: dict[str, Any] = {}
    for some in filter(None, (configs | first, *others)):
        found |= run_counted(RANKS, one_by_one, some, timeout_s=300 + 30 * len(some))
    return found


def asked(params: Mapping[str, Any]) -> tuple[str, dict[str, Strategy]]:
    """The case and the strategies of a test."""
    if "names" in params:
        return NEVER_CLIPS, {name: find(name).model_validate(find(name).examples[-1]) for name in params["names"]}
    return params["case"], {params["name"]: find(params["name"]).model_validate(params["options"])}


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "options", "case"), alone())
def test_alone(
    name: str, options: Any, case: str, trained: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    equal(*asked({"name": name, "options": options, "case": case}), tmp_path, trained[request.node.callspec.id])


def equal(case: str, strategies: Mapping[str, Strategy], folder: Path, weights: Any = None) -> None:
    """Whether training with ``strategies`` is as equal to plain training as they declare; ``weights``: what they have
    trained, or why they have not.
    """
    config = config_of(case, strategies, folder)
    run = run_facts(config, RANKS)
    weights = weights or run_counted(RANKS, train, config)["weights"]
    assert isinstance(weights, dict), weights
    found = compare(plain(case, folder, strategies), weights)
    parity = max((declared(each, run, case) for each in strategies.values()), key=lambda each: each.tolerance)
    if parity.tolerance == 0.0:
        assert found == []
    else:
        assert max((difference.relative for difference in found), default=0.0) <= parity.tolerance, parity.reason


def together() -> Iterator[Any]:
    """Any two strategies that go together, by their last examples, in groups as large as may be.

    First without ``offload``, beside which zero is in its engine and not in DeepSpeed's.
    """
    known = [name for name in available() if not is_refused(name)]
    last = {name: find(name).model_validate(find(name).examples[-1]) for name in known}
    others = [name for name in last if name != "offload"]
    left = [*combinations(others, 2), *((name, "offload") for name in others)]
    left = [pair for pair in left if goes({name: last[name] for name in pair}, NEVER_CLIPS)]
    while left:
        group = list(left[0])
        for name in [*last] if "offload" in group else others:
            if name not in group and goes({each: last[each] for each in (*group, name)}, NEVER_CLIPS):
                group.append(name)
        left = [pair for pair in left if not set(pair) <= set(group)]
        stage_3 = "zero" in group and "offload" not in group  # with zero by its last example
        yield pytest.param(tuple(sorted(group)), id=" + ".join(sorted(group)), marks=[needs_stage_3] if stage_3 else [])


@pytest.mark.ranks
@pytest.mark.parametrize("names", together())
def test_together(names: tuple[str, ...], trained: Any, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Strategies that go together train as each alone."""
    equal(*asked({"names": names}), tmp_path, trained[request.node.callspec.id])


@pytest.mark.ranks
def test_training_moves_every_weight(tmp_path: Path) -> None:
    """Equality of weights that never moved would prove nothing."""
    trained = plain("fp32/llama", tmp_path)
    untrained = run_world(1, train, _no_steps(config_of("fp32/llama", {}, tmp_path)))["weights"]
    assert {name for name, weight in trained.items() if torch.equal(weight, untrained[name])} == set()


def _no_steps(config: RunConfig) -> RunConfig:
    training = config.training.model_copy(update={"learning_rate": 1e-30, "max_steps": 1})
    return config.model_copy(update={"training": training})
