"""Optimizer state on disk: damage is refused by name before anything changes, and no failure costs an earlier save."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from deepstow.strategies.engine import SGD, AdamW, StowOptimizer, stow
from deepstow.strategies.state import commit, spans
from deepstow.strategies.state.sealed import signed
from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.distributed.spawn import run_world
from deepstow.trainer.machine.probe import status_bytes
from tests.helpers.engine import plan_of
from tests.helpers.models import build
from tests.helpers.sides import BATCHES, everything, train, unequal

HOST: dict[str, Any] = {"site": "host", "weights": "travelling", "prefetch": 2}
RECORD = "optimizer-00000-of-00001.json"


def trained(steps: int = 1) -> tuple[nn.Module, StowOptimizer]:
    model = build("llama")
    plan: Any = plan_of(model, **HOST)
    optimizer = stow(model, plan, rule=AdamW(lr=1e-2), device="cpu")
    train(model, optimizer, BATCHES[:steps])
    return model, optimizer


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "optimizer"
    _, optimizer = trained(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "FILE_BYTES", 100_000)  # several files
        optimizer.save(folder)
    return folder


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved_once, tmp_path / "optimizer")


@pytest.fixture(scope="module")
def once() -> tuple[nn.Module, StowOptimizer]:
    return trained(1)


def test_files_are_ordinary_safetensors(saved: Path) -> None:
    model, optimizer = trained(2)
    expected = everything(model, optimizer)
    found: dict[str, Tensor] = {}
    for path in saved.glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == {f"{n}.{k}" for n, _ in model.named_parameters() for k in ("exp_avg", "exp_avg_sq")}
    assert all(torch.equal(value, expected[" ".join(name.rsplit(".", 1))]) for name, value in found.items())
    content = json.loads((saved / "optimizer.json").read_text())["content"]
    assert content["rule"] == "AdamW" and content["param_groups"][0]["lr"] == 1e-2
    described = json.loads((saved / RECORD).read_text())["content"]["parameters"]["lm_head.weight"]
    assert described["dtype"] == "float32" and described["numbers"] == {"step": 2.0}


def flipped(folder: Path, first: Path, last: Path) -> None:
    data = bytearray(last.read_bytes())
    data[-1] ^= 4
    last.write_bytes(data)


def swapped(folder: Path, first: Path, last: Path) -> None:
    data = first.read_bytes()
    first.write_bytes(last.read_bytes())
    last.write_bytes(data)


def missing(folder: Path, first: Path, last: Path) -> None:
    first.unlink()
    last.unlink()


def linked(folder: Path, first: Path, last: Path) -> None:
    (folder / RECORD).symlink_to((folder / RECORD).rename(folder.parent / "elsewhere"))


def replaced(old: str, new: str) -> Callable[[Path, Path, Path], None]:
    def replace(folder: Path, first: Path, last: Path) -> None:
        index = folder / "optimizer.json"
        assert old in index.read_text()
        index.write_text(index.read_text().replace(old, new))

    return replace


def forged(change: Callable[[dict[str, Any]], object], name: str = RECORD) -> Callable[[Path, Path, Path], None]:
    """Change what a file says and sign it again."""

    def forge(folder: Path, first: Path, last: Path) -> None:
        content = json.loads((folder / name).read_text())["content"]
        change(content)
        (folder / name).write_text(signed(content))

    return forge


def leads_out(content: dict[str, Any]) -> None:
    content["files"]["../other"] = content["files"].pop(max(content["files"]))


def other_parameters(content: dict[str, Any]) -> None:
    content["parameters"]["lm_head.weight"]["shape"] = [1, 2]
    content["parameters"]["model.norm.weight"]["dtype"] = "bfloat16"


def promises_more(content: dict[str, Any]) -> None:
    content["parameters"]["model.norm.weight"]["tensors"]["other"] = [2]


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (lambda folder, first, last: os.truncate(last, last.stat().st_size // 2), ["LAST", "bytes"]),
        (flipped, ["LAST", "damaged"]),
        (replaced('"lr": 0.01', '"lr": 0.02'), ["optimizer.json", "damaged"]),
        (replaced("}", ""), ["optimizer.json", "cannot be read"]),
        (missing, ["FIRST", "LAST", "missing"]),
        (lambda folder, first, last: (folder / RECORD).unlink(), [RECORD, "missing"]),
        (linked, [RECORD, "missing"]),
        (lambda folder, first, last: shutil.rmtree(folder), ["no optimizer.json"]),
        (swapped, ["FIRST", "LAST"]),
        (forged(leads_out), [RECORD, "damaged"]),
        (forged(lambda content: content.update(version=9)), ["format 9"]),
        (forged(other_parameters), ["lm_head.weight: saved as [1, 2]", "model.norm.weight: saved as bfloat16"]),
        (forged(lambda content: content["param_groups"].append({"params": []}), "optimizer.json"), ["param_groups: 2"]),
        (forged(promises_more), ["model.norm.weight.other is in no file"]),
    ],
)
def test_damage_is_one_error_by_name(
    damage: Callable[[Path, Path, Path], None], parts: list[str], saved: Path, once: tuple[nn.Module, StowOptimizer]
) -> None:
    """And changes nothing."""
    first, last = min(saved.glob("*.safetensors")), max(saved.glob("*.safetensors"))
    shutil.copy(last, saved.parent / "other")
    damage(saved, first, last)
    model, optimizer = once
    before, rates = everything(model, optimizer), json.dumps([g["lr"] for g in optimizer.param_groups])
    with pytest.raises(ValueError) as caught:
        optimizer.load(saved)
    names = {"FIRST": first.name, "LAST": last.name}
    assert all(names.get(part, part) in str(caught.value) for part in parts), caught.value
    assert unequal(everything(model, optimizer), before) == []
    assert json.dumps([g["lr"] for g in optimizer.param_groups]) == rates


def test_another_model_and_another_rule(saved: Path) -> None:
    for kind, rule, wishes, line in (
        (
            "gpt2",
            AdamW(),
            HOST,
            r"(?s)transformer\.wte\.weight: not in the save.*embed_tokens\.weight: only in the save",
        ),
        ("llama", SGD(), {**HOST, "moments": 0}, "saved by AdamW, this optimizer is SGD"),
    ):
        model = build(kind)
        plan: Any = plan_of(model, **wishes)
        with pytest.raises(ValueError, match=line):
            stow(model, plan, rule=rule, device="cpu").load(saved)


def test_hyperparameters_that_are_not_json(tmp_path: Path) -> None:
    _, optimizer = trained()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['lr'\]"):
        optimizer.save(tmp_path / "optimizer")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    _, optimizer = trained()
    with pytest.raises(FileExistsError, match="holds other files"):
        optimizer.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_what_cannot_be_written_leaves_the_earlier_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(1)
    optimizer.save(tmp_path / "optimizer")
    expected = everything(model, optimizer)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for owner, step in ((spans, "write"), (commit, "sync"), (Path, "rename")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, step, fail)
            with pytest.raises(OSError, match=r"was not saved: No space left.*earlier save in it is intact"):
                optimizer.save(tmp_path / "optimizer")
        assert [path.name for path in tmp_path.iterdir()] == ["optimizer"]
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: free)
        with pytest.raises(OSError, match=r"needs .* the disk has"):
            optimizer.save(tmp_path / "optimizer")
    for again in (False, True):
        if again:
            train(model, optimizer, BATCHES[:1])
            optimizer.save(str(tmp_path / "optimizer"))
            expected = everything(model, optimizer)
            # Killed between the two renames of another one (``test_commit.py`` has every step).
            (tmp_path / "optimizer").rename(commit.earlier(tmp_path / "optimizer"))
        other, fresh = trained(0)
        other.load_state_dict({name: expected[name] for name in model.state_dict()})
        fresh.load(tmp_path / "optimizer")
        assert unequal(everything(other, fresh), expected) == []


# --- processes -------------------------------------------------------------------------------------------------------


CONFIG = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 12, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256, "tie_word_embeddings": True,
}  # fmt: skip


def begun() -> StowOptimizer:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIG))
    plan: Any = plan_of(model, site="host", weights="travelling")
    optimizer = stow(model, plan, rule=AdamW(), device="cpu")
    ids = torch.arange(32)[None]
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.drain()
    return optimizer


def measured(ranks: Ranks, what: str, folder: Path) -> dict[str, int]:
    """By how much memory grows for a moment, and the bytes of the largest bucket and of all state."""
    optimizer = begun()
    if what != "save":
        optimizer.save(folder)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    before = status_bytes("VmRSS")
    getattr(optimizer, what)(folder)
    state = [8 * bucket.num_elements for bucket in optimizer.engine.layout.buckets]
    return {"growth": status_bytes("VmHWM") - before, "bucket": max(state), "state": sum(state)}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("what", ["save", "load"])
def test_memory(what: str, tmp_path: Path) -> None:
    """Peak RSS grows by less than one bucket and 12 MiB: buffers, imports of safetensors, headers, allocator slack."""
    found = run_world(1, measured, what, tmp_path / "optimizer", deepspeed=False)
    assert found["state"] > 60 << 20, "the state is too small to show a copy"
    assert found["bucket"] < found["state"] / 8
    assert found["growth"] <= found["bucket"] + (12 << 20), found
