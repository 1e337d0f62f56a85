"""A model that is written tensor by tensor has the bytes of ``save_pretrained``, and opens as the same model."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from deepstow.strategies.engine.memory.scratch_file import DiskError
from deepstow.trainer.model import apart
from deepstow.trainer.model.build import build, load_config
from deepstow.trainer.model.mapped import Spilled
from tests.helpers.tiny import LLAMA, MIXTRAL, run_config
from tests.parity.test_experts import MODELS

TIED: Mapping[str, Any] = {**MIXTRAL, "tie_word_embeddings": True}
LIMIT = 20_000  # bytes of a file; the largest tensor has 16 KiB
JOINED: Mapping[str, Any] = {**LLAMA, "model_type": "hrm_text", "head_dim": 8, "num_layers_per_stack": 1}


def written(model: Any, folder: Path) -> tuple[bool, int, list[bytes]]:
    """Whether it was taken apart, bytes of the disk for that, and the files of both ways."""
    pieces = Spilled(folder)
    found = apart.save(model, folder / "ours", model.state_dict(), pieces)
    model.save_pretrained(folder / "theirs")
    files = [folder / name / "model.safetensors" for name in ("ours", "theirs")]
    return found, pieces.num_bytes, [path.read_bytes() for path in files if path.is_file()]


@pytest.mark.parametrize("name", [*MODELS, "tied", "dense", "joined"])
def test_it_is_written_as_transformers_writes_it(name: str, tmp_path: Path) -> None:
    """Of random weights and of loaded ones, which remember how they were converted. Nothing is converted of a dense
    model and of GPT-OSS; what is put together of several tensors is left to Transformers.
    """
    config = {**MODELS, "tied": TIED, "dense": LLAMA, "joined": JOINED}[name]
    section = run_config(config).model
    model = build(section, load_config(section), seed=0, partitioned=False)
    for each in (model, "again"):
        if each == "again":
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        found, num_bytes, files = written(model, tmp_path)
        assert files[0] == files[1] and found is (name not in ("gpt_oss", "dense", "joined"))
        fused = sum(param.nbytes for key, param in model.named_parameters() if ".experts." in key)
        assert num_bytes >= fused * found


def test_in_several_files_none_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own have the same tensors, and more of them in one file than it may have."""
    section = run_config(MIXTRAL).model
    model = build(section, load_config(section), seed=0, partitioned=False)
    monkeypatch.setattr(model, "save_pretrained", partial(model.save_pretrained, max_shard_size=LIMIT))
    written(model, tmp_path)
    tensors, largest = [], []
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = {name: load_file(folder / name) for name in sorted(set(index["weight_map"].values()))}
        assert index["weight_map"] == {key: name for name, found in files.items() for key in found}
        tensors.append({key: value for found in files.values() for key, value in found.items()})
        sizes = [sum(value.nbytes for value in found.values()) for found in files.values()]
        assert index["metadata"]["total_size"] == sum(sizes)
        largest.append(max(sizes))
    assert largest[0] <= LIMIT < largest[1]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(value, tensors[1][key]) for key, value in tensors[0].items())


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    section = run_config(MIXTRAL).model
    model = build(section, load_config(section), seed=0, partitioned=False)
    model.save_pretrained(tmp_path / "theirs")
    no_folder = tmp_path / "theirs" / "config.json"
    with pytest.raises(OSError, match=r"config\.json"):
        apart.save(model, tmp_path / "ours", model.state_dict(), Spilled(no_folder))
    assert not (tmp_path / "ours").exists()
    with pytest.raises(OSError, match=r"config\.json"):
        reload: Any = partial(AutoModelForCausalLM.from_pretrained, tmp_path / "theirs")
        apart.opened(tmp_path / "theirs", reload, Spilled(no_folder))


def test_it_is_put_together_with_the_same_bits(tmp_path: Path) -> None:
    section = run_config(TIED).model
    build(section, load_config(section), seed=0, partitioned=False).save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    place = Spilled(tmp_path)
    again: Any = apart.opened(tmp_path, partial(AutoModelForCausalLM.from_pretrained, tmp_path), place)
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in whole.state_dict().items())
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert place.num_bytes >= sum(param.nbytes for param in whole.parameters()), "none is in memory"
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(whole.eval()(ids).logits, again.eval()(ids).logits)


def test_what_the_disk_did_not_keep_is_not_kept(tmp_path: Path) -> None:
    """A bit flips in the file while the model is saved from it."""
    place = Spilled(tmp_path)
    values = [place(torch.arange(5000)), place(torch.ones(3, 1000, dtype=torch.bfloat16))]
    place.settle()
    with Path(f"/proc/self/fd/{place._file.fileno()}").open("r+b", buffering=0) as drive:
        drive.seek(20000)
        drive.write(b"\x01")
    assert values[0][2500] != 2500
    with pytest.raises(DiskError, match=f"{tmp_path}: weights that were put on this disk to be saved are not what was"):
        place.refuse_damaged()
    (good := Spilled(tmp_path))(values[1])
    good.settle()
    good.refuse_damaged()
