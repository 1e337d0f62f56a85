"""A model that is given some of its parameters: the bits of the whole one, the others without values."""

import errno
import resource
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from deepstow.trainer.config.sections import ModelSection
from deepstow.trainer.distributed.agreement import Agreement
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model import mapped, parts, saved_tensors
from deepstow.trainer.model.build import build, load_config, tensors_of
from deepstow.trainer.run import building
from tests.helpers.tiny import GPT2, LLAMA, MIXTRAL, MODELS, OPT, run_config

QWEN_MOE: Mapping[str, Any] = {
    **LLAMA, "model_type": "qwen3_moe", "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
}  # fmt: skip


def _refuse() -> Any:
    raise NotImplementedError


def filled(section: ModelSection, front: bool, whole_from: str | None = None) -> str | None:
    """Compare a model with one half of the parameters and the whole one; why it was built whole."""
    make = partial(build, section, load_config(section), seed=3, partitioned=False)
    expected, after = dict(tensors_of(whole := make())), torch.rand(2)
    part = make(on_meta=True)
    names = list(dict(part.named_parameters(remove_duplicate=False)))
    half = len(names) // 2
    held = set(names[:half] if front else names[half:])
    why = parts.fill(part, held, section.name_or_path, 3, make)
    assert why is not None or section.name_or_path or torch.equal(torch.rand(2), after)  # the generator is as far
    found = dict(tensors_of(part))
    assert list(found) == list(expected)
    for name, tensor in found.items():
        shares = {other for other, same in expected.items() if same is expected[name]}
        assert {other for other, same in found.items() if same is tensor} == shares
        assert (tensor.device.type == "cpu") is (bool(held & shares) or not isinstance(tensor, nn.Parameter)), name
        assert (tensor.dtype, tensor.requires_grad) == (expected[name].dtype, expected[name].requires_grad)
        assert tensor.device.type == "meta" or torch.equal(tensor, expected[name]), name
    assert part.config.to_dict() == whole.config.to_dict()
    assert part.generation_config.to_dict() == whole.generation_config.to_dict()
    return why


WHOLE = "each rank loads the whole model before it keeps its part: "


@pytest.mark.parametrize(("name", "tied"), [("llama", True), *((name, name == "gpt2") for name in MODELS)])
def test_random_weights_have_the_bits_of_the_whole_model(name: str, tied: bool) -> None:
    """Where the head is tied it is the embedding's half that is held, and the other one else."""
    config = {**MODELS[name], "tie_word_embeddings": tied, "pad_token_id": 5}
    assert filled(run_config(config, model={"dtype": "bfloat16"}).model, front=tied) is None


@pytest.mark.parametrize(
    ("base", "dtype", "front"),
    [
        (LLAMA, "float32", False),
        (OPT, "bfloat16", True),
        (GPT2, "bfloat16", False),
        (MIXTRAL, "bfloat16", True),
        (QWEN_MOE, "float32", False),
    ],
)
def test_saved_weights_are_read_by_name(base: Mapping[str, Any], dtype: str, front: bool, tmp_path: Path) -> None:
    section = run_config(base).model
    model = build(section, load_config(section), seed=5, partitioned=False)
    saved = model.base_model if base is GPT2 else model  # without its head, whose weight is the embedding's
    saved.save_pretrained(tmp_path, max_shard_size="30KB" if base in (LLAMA, QWEN_MOE) else "1GB")
    changes = {"config": None, "name_or_path": str(tmp_path), "tokenizer": None, "dtype": dtype}
    assert filled(run_config(None, model=changes).model, front) is None


def test_buffers_are_those_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaModel

    section, own = run_config(LLAMA).model, LlamaModel.__init__
    build(section, load_config(section), seed=5, partitioned=False).save_pretrained(tmp_path)
    saved = load_file(tmp_path / saved_tensors.WHOLE) | {"model.seen": torch.tensor([3.0, 4.0])}
    save_file(saved, tmp_path / saved_tensors.WHOLE, metadata={"format": "pt"})

    def with_buffer(self: Any, config: Any) -> None:
        own(self, config)
        self.register_buffer("seen", torch.zeros(2))

    monkeypatch.setattr(LlamaModel, "__init__", with_buffer)
    changes = {"config": None, "name_or_path": str(tmp_path), "tokenizer": None}
    assert filled(run_config(None, model=changes).model, True) is None


@pytest.mark.parametrize(("kind", "rank"), [("random", 3), ("saved", 0), ("saved", 3), ("saved as .bin", 3)])
def test_a_rank_has_its_experts_alone(kind: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files no other expert is read, and a layer's are converted in pieces."""
    config = run_config(QWEN_MOE, strategies={"experts": {"degree": 2}}, model={"dtype": "bfloat16"})
    if kind != "random":
        model = build(config.model, load_config(config.model), seed=5, partitioned=False)
        model.save_pretrained(tmp_path)
        if "bin" in kind:
            (tmp_path / saved_tensors.WHOLE).unlink()
            torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        changed = {"config": None, "name_or_path": str(tmp_path), "tokenizer": None}
        config = run_config(None, strategies={"experts": {"degree": 2}}, model=changed)
    monkeypatch.setattr(saved_tensors, "PIECE_BYTES", 3 * 2 * 24 * 32 * 4)
    seen: list[str] = []
    own = saved_tensors.SavedTensor._converted

    def converted(self: Any, sources: Any, dtype: Any) -> Any:
        seen.extend(source.key for source in sources)
        return own(self, sources, dtype)

    monkeypatch.setattr(saved_tensors.SavedTensor, "_converted", converted)
    make = partial(build, config.model, load_config(config.model), seed=3, partitioned=False)
    part, whole = make(on_meta=True), make()
    names = dict(part.named_parameters(remove_duplicate=False))
    shards = building.shards_of(part, config, rank)
    assert len(shards) == 4
    why = parts.fill(part, names, config.model.name_or_path, 3, make, shards=shards)
    assert why == (None if "bin" not in kind else WHOLE + f"it has no {saved_tensors.WHOLE}")
    assert {int(key.split(".experts.")[1].split(".")[0]) // 6 for key in seen} <= {rank % 2}
    assert bool(seen) is (kind == "saved")
    for (name, expected), (_, found) in zip(tensors_of(whole), tensors_of(part), strict=True):
        rows = slice(6 * (rank % 2), 6 * (rank % 2) + 6) if name in shards else slice(None)
        assert torch.equal(found, expected[rows] if name in shards else expected), name
        assert getattr(found, "shard", None) == shards.get(name)
        assert found.untyped_storage().nbytes() == found.nbytes or name not in shards


def test_a_conversion_that_needs_more_than_the_files_have(tmp_path: Path) -> None:
    """One expert of a layer has no gate: Transformers' own loading refuses that, too."""
    section = run_config(MIXTRAL).model
    build(section, load_config(section), seed=5, partitioned=False).save_pretrained(tmp_path)
    path = tmp_path / saved_tensors.WHOLE
    saved = load_file(path)
    section = run_config(None, model={"config": None, "name_or_path": str(tmp_path), "tokenizer": None}).model
    part = build(section, load_config(section), seed=3, partitioned=False, on_meta=True)
    save_file({key: saved[key] for key in saved if "experts.2.w1" not in key}, path, metadata={"format": "pt"})
    with pytest.raises(NotImplementedError):
        parts.fill(part, list(dict(part.named_parameters())), str(tmp_path), 3, _refuse)


def test_a_name_with_and_without_its_prefix(tmp_path: Path) -> None:
    section = run_config(LLAMA).model
    build(section, load_config(section), seed=5, partitioned=False).save_pretrained(tmp_path)
    saved = load_file(tmp_path / saved_tensors.WHOLE)
    save_file(
        saved | {"norm.weight": 2 * saved["model.norm.weight"]},
        tmp_path / saved_tensors.WHOLE,
        metadata={"format": "pt"},
    )
    changes = {"config": None, "name_or_path": str(tmp_path), "tokenizer": None}
    assert filled(run_config(None, model=changes).model, False) == WHOLE + "its files have model.norm.weight twice"


def test_a_weight_that_two_modules_initialise_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaPreTrainedModel

    own = LlamaPreTrainedModel._init_weights

    def scaled(self: Any, module: nn.Module) -> None:
        own(self, module)
        if hasattr(module, "layers"):
            module.layers[0].mlp.up_proj.weight.mul_(0.5)

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", scaled)
    assert (
        filled(run_config(LLAMA).model, False)
        == WHOLE + "a weight of model.layers.0.mlp.up_proj is initialised in two turns"
    )


# In one file, for all ranks of a machine


@pytest.mark.parametrize("base", [{**LLAMA, "tie_word_embeddings": True}, MIXTRAL], ids=["llama", "mixtral"])
def test_weights_that_are_mapped_from_a_file(base: Mapping[str, Any], tmp_path: Path) -> None:
    section = run_config(base, model={"dtype": "bfloat16"}).model
    make = partial(build, section, load_config(section), seed=3, partitioned=False)

    def fill(give: parts.Give) -> Any:
        twin = make(on_meta=True)
        assert parts.fill(twin, (), None, 3, make, give) is None
        return twin

    path, model = tmp_path / "run" / "weights-0.part", make(on_meta=True)
    mapped.load(model, fill, path, Agreement(), writes=True)
    expected, found = dict(tensors_of(make())), dict(tensors_of(model))
    assert all(torch.equal(found[name], expected[name]) for name in expected) and found.keys() == expected.keys()
    assert len({id(tensor) for tensor in found.values()}) == len({id(tensor) for tensor in expected.values()})
    for tensor in found.values():  # written to, they are their own
        tensor.data.mul_(2)
    assert not path.exists() and list(path.parent.iterdir()) == []


def test_a_file_of_weights_that_cannot_be_written(tmp_path: Path) -> None:
    section = run_config(LLAMA).model
    make = partial(build, section, load_config(section), seed=3, partitioned=False)

    def fill(give: parts.Give) -> Any:
        give("model.norm.weight", torch.ones(32))
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "run" / "weights-0.part"
    with pytest.raises(ConfigError, match=r"part: cannot be written \(No space .+\): the weights need .+ KiB there"):
        mapped.load(make(on_meta=True), fill, path, Agreement(), writes=True)
    assert list(path.parent.iterdir()) == []


def test_tensors_that_are_put_into_a_file(tmp_path: Path) -> None:
    """They come back with their bits. A disk that is full is said when all have come, and nothing stays on it."""
    given = [torch.randn(700, 3).T, torch.ones(()), torch.empty(0, 4), torch.arange(5, dtype=torch.bfloat16)]
    spilled = mapped.Spilled(tmp_path / "run")
    found = [spilled(each) for each in given]
    spilled.settle()
    assert all(torch.equal(*each) and each[0].dtype == each[1].dtype for each in zip(found, given, strict=True))
    spilled.refuse_damaged()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    spilled = mapped.Spilled(tmp_path / "run")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        sizes = [spilled(torch.ones(size)).numel() for size in (10, 1 << 15, 10)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sizes == [10, 0, 0]
    with pytest.raises(OSError, match="File too large"):
        spilled.settle()
    assert list((tmp_path / "run").iterdir()) == []
