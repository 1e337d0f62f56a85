"""Export: what comes back is what was trained, and what does not is refused by name. The old one stays until then."""

import errno
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, TrainerState

from deepstow.strategies.core.protocol import BITWISE, Parity
from deepstow.trainer.config.load import load_tree
from deepstow.trainer.config.sections import RunConfig
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.distributed.stopping import Stop
from deepstow.trainer.errors import ExitCode
from deepstow.trainer.execution.base import Execution
from deepstow.trainer.model.build import build, load_config
from deepstow.trainer.run import session as runs
from deepstow.trainer.run.callbacks.nonfinite import NonFinite
from deepstow.trainer.run.exporting import export as export_module
from deepstow.trainer.run.exporting.export import ExportError, export, model_card
from deepstow.trainer.run.trainer import Trainer
from deepstow.trainer.verify.verify import _tokenizer, random_run
from tests.helpers import small_runs
from tests.helpers.releases import HIGHEST_STAGE
from tests.helpers.tiny import GPT2, LLAMA, MIXTRAL, VOCAB, run_config

WEIGHTS = "model.safetensors"
LORA = {"r": 3, "target_modules": ["q_proj", "down_proj"]}


def loop(model: Any, *, is_first: bool = True) -> Any:
    """As much of a Trainer as an export asks: an unwrapped model on one rank."""
    model.requires_grad_(True)
    with torch.no_grad():
        for parameter in model.parameters():  # zeros and ones hide mistakes
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.05)
    trainer: Any = SimpleNamespace(
        logits_of=lambda ids: Trainer.logits_of(trainer, ids),
        accelerator=SimpleNamespace(unwrap_model=lambda wrapped, keep_torch_compile: wrapped),
        whole_state=lambda place: copies(model),
        model_wrapped=model,
        whole=model,
        execution=Execution(),
        stowed=None,
        plan=SimpleNamespace(layout=None),
        args=SimpleNamespace(device="cpu", bf16=False, fp16=False, world_size=1),
        state=TrainerState(global_step=3),
        compute_loss_context_manager=torch.enable_grad,
        is_world_process_zero=lambda: is_first,
    )
    return trainer


def copies(model: Any) -> dict[str, torch.Tensor]:
    """A tensor of its own for every name, tied or not, as DeepSpeed's stages 0 to 2 hand it over."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def built(config: Mapping[str, Any] = LLAMA, **model: Any) -> Any:
    section = run_config(config, model=model).model
    return build(section, load_config(section), seed=0, partitioned=False)


def damage(monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]) -> None:
    """Let ``change`` at the folder between writing and checking, as a bad disk would."""
    reload = export_module.reload

    def after_damage(folder: Path, *given: Any, **options: Any) -> Any:
        change(folder)
        return reload(folder, *given, **options)

    monkeypatch.setattr(export_module, "reload", after_damage)


def tensors_of(change: Callable[[dict[str, torch.Tensor]], object], file: str = WEIGHTS) -> Callable[[Path], None]:
    """``change`` of the tensors in a file."""

    def changed(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file, metadata={"format": "pt"})

    return changed


def refused(folder: Path, model: Any, config: RunConfig | None = None) -> str:
    with pytest.raises(ExportError) as caught:
        export(loop(model), _tokenizer(), config or run_config(output_dir=folder.parent))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Round trips


@pytest.mark.parametrize(("base", "tied"), [(LLAMA, False), (GPT2, True)], ids=["llama", "gpt2, tied"])
def test_what_is_loaded_is_what_was_trained(tmp_path: Path, base: Mapping[str, Any], tied: bool) -> None:
    model = built({**base, "tie_word_embeddings": tied})
    receipt = export(loop(model), _tokenizer(), run_config(output_dir=old_export(tmp_path).parent))
    assert receipt is not None and not (tmp_path / "export" / "old").exists()
    assert receipt.largest_difference == 0.0
    stored = load_file((tmp_path / "export") / WEIGHTS)
    assert len(stored) == len(model.state_dict()) - tied  # tied weights are stored once
    assert receipt.num_tensors == len(model.state_dict())
    assert receipt.num_bytes == ((tmp_path / "export") / WEIGHTS).stat().st_size
    assert sum(tensor.nbytes for tensor in stored.values()) == sum(4 * p.numel() for p in model.parameters())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    assert ((tmp_path / "export") / "tokenizer.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_compiled_model(tmp_path: Path) -> None:
    """Its own names show that it is compiled; nobody who loads it should see that."""
    from accelerate import Accelerator

    model = built()
    train = loop(model)
    train.accelerator = Accelerator(cpu=True)
    train.model_wrapped = torch.compile(model, backend="eager")
    train.whole_state = lambda place=None: train.model_wrapped.state_dict()
    assert next(iter(train.whole_state())).startswith("_orig_mod.")
    receipt = export(train, _tokenizer(), run_config(output_dir=tmp_path))
    assert receipt is not None and receipt.num_tensors == len(model.state_dict())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_adapters_with_other_values_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built().save_pretrained(tmp_path / "base")
    damage(monkeypatch, tensors_of(lambda tensors: tensors[min(tensors)][0, 0].add_(1), "adapter_model.safetensors"))
    config = adapters(tmp_path / "base", output_dir=tmp_path)
    model = build(config.model, load_config(config.model), seed=0, partitioned=False)
    line = refused(tmp_path / "export", model, config)
    assert "layers.0.mlp.down_proj.lora_A.default.weight has other values" in line


def adapters(base: Path, **options: Any) -> RunConfig:
    return run_config(None, model={"config": None, "name_or_path": str(base), "lora": LORA}, **options)


def test_a_mask_belongs_to_the_model(tmp_path: Path) -> None:
    """The probe has more tokens than the window: without the mask its logits are others, and the config says it."""
    model = {"attention_mask": {"window": 4, "sink": 1}}
    receipt = export(loop(built(**model)), _tokenizer(), run_config(model=model, output_dir=tmp_path))
    assert receipt is not None and receipt.largest_difference < 1e-6
    folder = tmp_path / "export"
    assert json.loads((folder / "config.json").read_text())["trained_attention_mask"] == model["attention_mask"]
    assert "Each token saw the last 4 tokens and the first 1 of its document" in (folder / "README.md").read_text()
    (tmp_path / "other").mkdir()
    assert "logits differ" in refused(tmp_path / "other" / "export", built(**model))


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    assert export(loop(built(), is_first=False), _tokenizer(), run_config(output_dir=tmp_path)) is None
    assert list(tmp_path.iterdir()) == []


# As it came

XLM: Mapping[str, Any] = {  # an architecture without the key
    "model_type": "xlm", "emb_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": VOCAB, "dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("base", "own", "named"),
    [(LLAMA, True, False), ({**LLAMA, "use_cache": False}, False, True), (XLM, None, False)],
    ids=["default", "given, of a named one", "unknown"],
)
def test_the_cache_is_as_the_model_came(tmp_path: Path, base: Mapping[str, Any], own: bool | None, named: bool) -> None:
    model = built(base)
    if named:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**base)).save_pretrained(tmp_path / "base")
        section = run_config(None, model={"config": None, "name_or_path": str(tmp_path / "base")}).model
        model = build(section, load_config(section), seed=0, partitioned=False)
    model.train()
    config, values = model.config, model.config.to_dict()
    assert values["use_cache"] is False  # in training
    receipt = export(loop(model), _tokenizer(), run_config(output_dir=tmp_path))
    assert receipt is not None
    for name in ("config.json", "generation_config.json"):
        assert json.loads(((tmp_path / "export") / name).read_text()).get("use_cache") is own
    assert model.config is config and config.to_dict() == values and model.training  # training may go on


def test_the_card_says_what_the_run_knows(tmp_path: Path) -> None:
    history: list[Any] = [{"loss": 3.0, "step": 7}, {"eval_loss": 2.0, "step": 7}, {"loss": 1.5, "step": 14}]
    state = TrainerState(global_step=14, log_history=history)
    config = run_config(
        None, output_dir="runs/mine", stage=2, learning_rate=3e-3, bf16=True, data={"path": "my.jsonl"},
        model={"config": None, "name_or_path": "owner/base", "lora": {**LORA, "r": 5}},
    )  # fmt: skip
    parities = {"zero": BITWISE, "recompute": BITWISE, "tensor": Parity(1e-5, "sums of parts")}
    card = model_card(config, LlamaConfig(), state, 2, parities)
    assert len(str(card).splitlines()) <= 30
    header = card.data.to_dict()
    assert header["base_model"] == "owner/base" and header["library_name"] == "peft" and "license" not in header
    text = card.text
    for part in (
        "adapters (rank 5) for `owner/base`", "trained on local files in sequences", "for 14 steps",
        "training loss, at step 14, was 1.5000 (perplexity 4.5)",
        "evaluation loss, at step 7, was 2.0000 (perplexity 7.4)",
        "Settings: learning_rate 0.003, per_device_train_batch_size 8, ", "optim adamw_torch_fused, seed 42, bf16 True",
        "zero, recompute bit for bit; tensor to 1e-05 of the largest weight (sums of parts).",
        "Strategies, on 2 processes: zero (stage 2)", f"torch {version('torch')}",
    ):  # fmt: skip
        assert part in text
    assert "output_dir" not in text and "fp16" not in text and "weight_decay" not in text  # of no effect, or not set

    unlogged = model_card(run_config(LLAMA), LlamaConfig(), TrainerState(), 1, {})
    assert unlogged.data.to_dict()["library_name"] == "transformers" and "base_model" not in unlogged.data.to_dict()
    assert "type llama" in unlogged.text and "random weights" in unlogged.text and "on 1 process: none" in unlogged.text
    assert "loss" not in unlogged.text and "equals plain" not in unlogged.text


# Damage


def cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()


def flip(tensors: dict[str, torch.Tensor]) -> None:
    """One bit, in a row that no probe looks at."""
    tensors["model.embed_tokens.weight"][1].view(torch.int32)[0] ^= 1


def shorten(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def configured(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / "config.json").read_text()
        assert old in text
        (folder / "config.json").write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # Transformers would fill it with random numbers and a warning.
        (tensors_of(lambda tensors: tensors.pop("model.norm.weight")), "model.norm.weight is not in the file"),
        (tensors_of(cut), f"lm_head.weight has shape ({VOCAB - 1}, 32) in the file, not ({VOCAB}, 32)"),
        (tensors_of(flip), ": 1 tensors differ after reloading: model.embed_tokens.weight has other values"),
        (shorten, "cannot be opened"),
        # All tensors are right, and the model is wrong: the probe's part.
        (configured('"silu"', '"relu"'), "logits differ by"),
        (configured('"num_hidden_layers": 2', '"num_hidden_layers": 1'), "9 tensors differ after reloading: model.lay"),
    ],
    ids=["a tensor dropped", "a shape", "a value", "a file cut short", "an activation", "a layer fewer"],
)
def test_damage_is_named_and_the_old_export_stays(
    change: Callable[[Path], object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(monkeypatch, change)
    old = old_export(tmp_path)
    assert said in refused(old, built())
    assert [path.name for path in old.iterdir()] == ["old"]


def old_export(parent: Path) -> Path:
    (parent / "export").mkdir()
    (parent / "export" / "old").write_text("a good export")
    return parent / "export"


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = built()
    train = loop(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[1, :3] = float("inf")
        model.model.norm.weight[0] = float("nan")
    line = r"^model.layers.0.mlp.up_proj.weight: 3 of 2048 values are not finite \(NaN or infinity\), [^\n]*$"
    with pytest.raises(NonFinite, match=line):
        export(train, _tokenizer(), run_config(output_dir=tmp_path))
    assert list(tmp_path.iterdir()) == []


# Real processes


def train_and_export(ranks: Ranks, config: RunConfig) -> dict[str, float]:
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    from deepstow.trainer.run import building

    trainer = building.make_trainer(random_run(config, ranks))
    try:
        trainer.train()
        splits = is_deepspeed_zero3_enabled()
        receipt = export(trainer, _tokenizer(), config)
        assert is_deepspeed_zero3_enabled() is splits  # else a sample after this export would hang
        return {"difference": receipt.largest_difference, "tensors": receipt.num_tensors} if receipt else {}
    finally:
        trainer.accelerator.free_memory()


def test_adapters_whose_base_was_rounded_to_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base in fp32, which the memory engine holds in bf16; beside another base they are refused."""
    (model := built()).save_pretrained(tmp_path / "base")
    how: dict[str, Any] = {"strategies": {"offload": {}}, "max_steps": 1, "bf16": True, "data": {"max_length": 32}}
    config = adapters(tmp_path / "base", output_dir=tmp_path, **how)
    assert train_and_export(Ranks(), config)["difference"] < 5e-2

    def doubled(_: Path) -> None:
        model.get_output_embeddings().weight.data.mul_(2)
        model.save_pretrained(tmp_path / "base")

    damage(monkeypatch, doubled)
    with pytest.raises(ExportError, match=r"lm_head\.weight has other values"):
        train_and_export(Ranks(), config)


def test_what_computes_otherwise_in_another_precision(tmp_path: Path) -> None:
    """Files of a base that name bf16, as most do, and adapters trained in fp32; and a mixture under autocast, which in
    fp32 chose other experts, and was refused.
    """
    built(dtype="bfloat16").save_pretrained(tmp_path / "base")
    based = adapters(tmp_path / "base", output_dir=tmp_path / "one", max_steps=1, data={"max_length": 32})
    uneven = {**MIXTRAL, "initializer_range": 0.5}
    mixed = run_config(uneven, output_dir=tmp_path / "two", max_steps=1, bf16=True, data={"max_length": 32})
    for config in (based, mixed):
        Path(config.training.output_dir).mkdir()
        assert train_and_export(Ranks(), config)["difference"] == 0
    assert {each.dtype for each in load_file(tmp_path / "two/export" / WEIGHTS).values()} == {torch.float32}


def test_a_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    errors = [OSError(errno.ENOSPC, "No space"), SafetensorError("No space left on device")]

    def fails(*_: Any) -> None:
        raise errors.pop()

    small_runs.make_rows_and_model(tmp_path)
    monkeypatch.setattr(export_module, "export", fails)
    tree = small_runs.tree_of(tmp_path, tmp_path / "run", {}, max_steps=1)
    assert runs.run(load_tree(tree), Ranks(), Stop()) == ExitCode.DISK
    said = capfd.readouterr().err
    assert f"export: the disk of {tmp_path / 'run'} is full; no export was made" in said and "Traceback" not in said
    assert "no export was made: make room, and start again" in said
    tree["training"]["save_strategy"] = "steps"
    assert runs.run(load_tree(tree), Ranks(), Stop()) == ExitCode.DISK
    assert "training.resume_from_checkpoint=auto goes on from the last checkpoint" in capfd.readouterr().err


@pytest.mark.ranks
def test_adapters_are_merged_after_training_on_two_ranks(tmp_path: Path) -> None:
    config = run_config(
        LLAMA, output_dir=tmp_path, stage=HIGHEST_STAGE, max_steps=1, per_device_train_batch_size=2,
        model={"lora": LORA}, data={"max_length": 32}, learning_rate=1e-2,
    )  # fmt: skip
    found = run_world(2, train_and_export, config)
    assert found["difference"] < 1e-5
    assert found["tensors"] == len(built().state_dict()) == len(load_file(tmp_path / "export" / WEIGHTS))
