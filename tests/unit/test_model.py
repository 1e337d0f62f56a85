"""Building the model: same seed, same bits; what Transformers would have drawn; one copy in memory; clear refusals."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM

from deepstow.trainer.config.sections import ModelSection, RunConfig
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.machine.probe import status_bytes
from deepstow.trainer.model.build import build, load_config
from deepstow.trainer.tasks.task import TASKS
from tests.helpers.forked import in_fork
from tests.helpers.tiny import GPT2, LLAMA, MODELS, OPT, VOCAB, run_config

UNTIED = {name: {**config, "tie_word_embeddings": False} for name, config in MODELS.items()}


def made(config: RunConfig, seed: int = 0, **more: Any) -> Any:
    return build(config.model, load_config(config.model), seed=seed, partitioned=False, **more)


def stock(config: RunConfig) -> Any:
    """As Transformers makes it."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(load_config(config.model))


# Random weights


@pytest.mark.parametrize("name", ["llama", "mixtral", "opt"])
def test_weights_follow_the_seed_and_nothing_else(name: str) -> None:
    config = run_config(MODELS[name])
    first = made(config, seed=1).state_dict()
    torch.rand(17)  # the state of the generator before does not matter
    again, other = made(config, seed=1).state_dict(), made(config, seed=2).state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in first.items())
    drawn = [key for key, tensor in first.items() if tensor.unique().numel() > 2]  # not zeros or ones
    assert len(drawn) > 8
    assert all(not torch.equal(first[key], other[key]) for key in drawn)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_distributed_as_transformers_draws_them(name: str) -> None:
    config = run_config(UNTIED[name])
    ours, theirs = made(config), stock(config)
    expected = dict(theirs.named_parameters())
    assert list(expected) == [key for key, _ in ours.named_parameters()]
    for key, parameter in ours.named_parameters():
        assert parameter.device.type == "cpu"
        assert (parameter.dtype, parameter.shape) == (torch.float32, expected[key].shape)
        if expected[key].unique().numel() <= 2:  # norms are ones, biases zeros
            assert torch.equal(parameter, expected[key]), key
        else:  # at least 256 draws of each: the deviation of a deviation is below 4.5 %
            assert float(parameter.std()) == pytest.approx(float(expected[key].std()), rel=0.25), key
            assert abs(float(parameter.mean())) < 0.25 * float(parameter.std()), key
    buffers = dict(theirs.named_buffers())
    assert list(buffers) == [key for key, _ in ours.named_buffers()]
    assert all(torch.equal(buffer, buffers[key]) for key, buffer in ours.named_buffers())
    loss = ours(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss
    assert abs(float(loss) - torch.log(torch.tensor(float(VOCAB)))) < 0.5  # knows nothing yet


@pytest.mark.parametrize(("name", "tied"), [("llama", True), ("gpt2", False), ("opt", True), ("mixtral", False)])
def test_heads_are_tied_as_the_config_says(name: str, tied: bool) -> None:
    model = made(run_config({**MODELS[name], "tie_word_embeddings": tied}))
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embedding is head) is torch.equal(embedding, head) is tied


@pytest.mark.parametrize(("base", "tied"), [(OPT, True), ({**LLAMA, "pad_token_id": 5}, False)], ids=["opt", "llama"])
def test_the_row_of_the_padding_token_is_zero(base: Mapping[str, Any], tied: bool) -> None:
    weight = made(run_config({**base, "tie_word_embeddings": tied})).get_input_embeddings().weight
    assert torch.count_nonzero(weight[base["pad_token_id"]]) == 0
    assert torch.count_nonzero(weight.abs().sum(dim=1)) == VOCAB - 1


def test_dtype() -> None:
    model = made(run_config(LLAMA, model={"dtype": "bfloat16"}))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32


# From a folder


def saved(folder: Path, config: Mapping[str, Any] = LLAMA) -> RunConfig:
    made(run_config(config), seed=3).save_pretrained(folder)
    return run_config(None, model={"config": None, "name_or_path": str(folder), "tokenizer": None})


def test_a_saved_model_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model, expected = made(saved(tmp_path, GPT2), seed=9), made(run_config(GPT2), seed=3).state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys() and model.config.use_cache is False
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def measured(section: Mapping[str, Any], saved_to: Path | None = None) -> tuple[int, int, float]:
    """How much the peak of resident memory grows while a model is built; bytes and sum of its weights."""
    known = ModelSection.model_validate(section)
    before = status_bytes("VmRSS")
    model = build(known, load_config(known), seed=0, partitioned=False)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    rows = (row for p in model.parameters() for row in p.detach().split(64))  # all at once, sums in fp64 copy a matrix
    total = sum(float(row.sum(dtype=torch.float64)) for row in rows)  # touches every page of a mapped file
    grown = status_bytes("VmHWM") - before
    if saved_to is not None:
        model.save_pretrained(saved_to)
    return grown, weights, total


@pytest.mark.slow
def test_weights_exist_once_while_they_are_built_and_loaded(tmp_path: Path) -> None:
    # Most matrices have 64 MB: memory that this process has freed is never given to them.
    large = {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 8192, "num_hidden_layers": 1}
    made(saved(tmp_path / "tiny"))  # what is loaded once is not the model's
    random = in_fork(partial(measured, {"config": large, "tokenizer": "none"}, tmp_path / "saved"))
    loaded = in_fork(partial(measured, {"name_or_path": str(tmp_path / "saved")}))
    for grown, weights, _ in (random, loaded):
        assert weights > 250e6  # what else grows, 30 MB of libraries here, does not grow with it
        assert 0.8 * weights < grown < 1.5 * weights
    assert loaded[2] == random[2]


# Adapters


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapters_start_at_nothing_on_a_frozen_base(name: str) -> None:
    target = "q_proj" if name == "llama" else "c_attn"
    config = run_config(MODELS[name], model={"lora": {"r": 3, "lora_alpha": 6, "target_modules": [target]}})
    model, plain = made(config), made(run_config(MODELS[name]))
    trainable = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trainable) == 4
    assert all(f".{target}.lora_" in key for key in trainable)
    ids = torch.arange(8)[None]
    assert torch.equal(model.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)
    again = made(config)
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in model.state_dict().items())


def test_bad_target_modules_are_refused_with_the_modules_there_are() -> None:
    config = run_config(LLAMA, model={"lora": {"target_modules": ["query"]}})
    with pytest.raises(ConfigError) as caught:
        made(config)
    line = str(caught.value)
    assert line.startswith("model.lora.target_modules = ['query']: ")
    assert line.endswith("linear layers are: down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj")
    assert "\n" not in line


def test_random_weights_beside_adapters_are_refused(tmp_path: Path) -> None:
    """A BERT of masked words has no pooler."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    BertForMaskedLM(BertConfig(intermediate_size=64, **sizes)).save_pretrained(tmp_path)

    def of(lora: dict[str, Any]) -> Any:
        options = {"config": None, "name_or_path": str(tmp_path), "lora": lora}
        return made(run_config(None, model=options), task=TASKS["classification"])

    with pytest.raises(ConfigError, match=r"has no weights for bert\.pooler\.dense, and .* write .*export: merged$"):
        of({"target_modules": ["query"]})
    of({"target_modules": ["query"], "export": "merged"})
    of({"target_modules": ["query"], "modules_to_save": ["pooler"]})


# Refusals


def refused(**model: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(run_config(None, model=model).model)
    (line,) = caught.value.lines
    assert "\n" not in line
    return line


def test_an_unknown_model_type_names_the_nearest() -> None:
    assert refused(config={"model_type": "lama"}) == (
        "model.config.model_type = 'lama': not a model type that Transformers knows; did you mean 'llama'?"
    )
    assert refused(config={"model_type": "zzzzzzzz"}).endswith("not a model type that Transformers knows")


@pytest.mark.parametrize("name", ["no/such/folder", "./absent", "~/absent", "trainer/absent"])
def test_what_can_only_be_a_folder_is_not_asked_of_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(config=None, name_or_path=name) == f"model.name_or_path = {name!r}: there is no such folder"
    assert f"{str(tmp_path)!r}: the folder holds no model (" in refused(config=None, name_or_path=str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("models/llama").mkdir(parents=True)
    assert refused(config=None, name_or_path="models/lama").endswith("no such folder; did you mean 'models/llama'?")
    assert refused(config=None, name_or_path="runs/quickstart/export").endswith(
        "no such folder; deepstow train --config quickstart makes it"
    )


def test_remote_code_is_not_run_unless_allowed(tmp_path: Path) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    line = refused(config=None, name_or_path=str(tmp_path))
    assert line.endswith("which is not run unless you set model.trust_remote_code: true")
    assert not (tmp_path / "ran").exists()
