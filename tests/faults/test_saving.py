"""Optimizer state on disk: damage is refused by name before anything changes, and no failure costs an earlier save."""

import json
import multiprocessing
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from strategies.core import commit
from strategies.core.sealed import signed
from strategies.engine import SGD, AdamW, StowOptimizer, stow
from strategies.state import saved_state, spans
from tests.faults import saving_child
from tests.helpers.engine import plan_of
from tests.helpers.models import build, tokens
from trainer.dist.spawn import PRELOAD

HOST: dict[str, Any] = {"site": "host", "weights": "travelling", "prefetch": 2}
RECORD = "optimizer-00000-of-00001.json"


def trained(steps: int = 1, kind: str = "llama", **wishes: Any) -> tuple[nn.Module, StowOptimizer]:
    model = build(kind)
    plan: Any = plan_of(model, **(HOST | wishes))
    optimizer = stow(model, plan, rule=AdamW(lr=1e-2), device="cpu")
    for batch in tokens(kind, steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def everything(model: nn.Module, optimizer: StowOptimizer) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        found |= {f"{name}.{key}": value.clone() for key, value in optimizer.state_of(param).items()}
    return found


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    _, optimizer = trained(2)
    monkeypatch.setattr(spans, "FILE_BYTES", 100_000)  # several files
    optimizer.save(tmp_path / "optimizer")
    return tmp_path / "optimizer"


def refused(folder: Path, *parts: str) -> None:
    """Loading raises one error that has all ``parts``, and changes nothing."""
    model, optimizer = trained(1)
    before, rates = everything(model, optimizer), json.dumps([g["lr"] for g in optimizer.param_groups])
    with pytest.raises(ValueError, match=re.escape(parts[0])) as caught:
        optimizer.load(folder)
    assert all(part in str(caught.value) for part in parts), caught.value
    assert equal(everything(model, optimizer), before)
    assert json.dumps([g["lr"] for g in optimizer.param_groups]) == rates


def last_file(folder: Path) -> Path:
    return max(folder.glob("*.safetensors"))


def test_files_are_ordinary_safetensors(saved: Path) -> None:
    model, optimizer = trained(2)
    expected = everything(model, optimizer)
    found: dict[str, Tensor] = {}
    for path in saved.glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == {f"{n}.{k}" for n, _ in model.named_parameters() for k in ("exp_avg", "exp_avg_sq")}
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    content = json.loads((saved / "optimizer.json").read_text())["content"]
    assert content["rule"] == "AdamW" and content["param_groups"][0]["lr"] == 1e-2
    described = json.loads((saved / RECORD).read_text())["content"]["parameters"]["lm_head.weight"]
    assert described["dtype"] == "float32" and described["numbers"] == {"step": 2.0}


def test_truncated_file(saved: Path) -> None:
    path = last_file(saved)
    os.truncate(path, path.stat().st_size // 2)
    refused(saved, path.name, "bytes")


@pytest.mark.parametrize("where", [3, 40, -1], ids=["length", "header", "data"])
def test_flipped_bit(saved: Path, where: int) -> None:
    path = last_file(saved)
    data = bytearray(path.read_bytes())
    data[where] ^= 4
    path.write_bytes(data)
    refused(saved, path.name, "damaged")


def test_flipped_bit_in_the_index(saved: Path) -> None:
    index = saved / "optimizer.json"
    index.write_text(index.read_text().replace('"lr": 0.01', '"lr": 0.02'))
    refused(saved, "optimizer.json", "damaged")
    index.write_text(index.read_text()[:-30])
    refused(saved, "optimizer.json", "damaged")


def test_missing_files(saved: Path) -> None:
    first, last = min(saved.glob("*.safetensors")), last_file(saved)
    first.unlink()
    last.unlink()
    refused(saved, first.name, last.name, "missing")
    refused(saved / "nowhere", "no optimizer.json")


def test_swapped_files(saved: Path) -> None:
    first, last = min(saved.glob("*.safetensors")), last_file(saved)
    data = first.read_bytes()
    first.write_bytes(last.read_bytes())
    last.write_bytes(data)
    refused(saved, first.name, last.name)


def forge(folder: Path, change: Any, name: str = RECORD) -> None:
    """Change what a file says and sign it again."""
    content = json.loads((folder / name).read_text())["content"]
    change(content)
    (folder / name).write_text(signed(content))


def test_no_path_leads_out_of_the_folder(saved: Path) -> None:
    shutil.copy(last_file(saved), saved.parent / "other")

    def change(content: dict[str, Any]) -> None:
        content["files"]["../other"] = content["files"].pop(last_file(saved).name)

    forge(saved, change)
    refused(saved, RECORD, "damaged")


def test_another_format(saved: Path) -> None:
    forge(saved, lambda content: content.update(version=9))
    refused(saved, "format 9")


def test_another_model(saved: Path, tmp_path: Path) -> None:
    model = build("gpt2")
    plan: Any = plan_of(model, **HOST)
    optimizer = stow(model, plan, device="cpu")
    with pytest.raises(ValueError, match="only in the save") as caught:
        optimizer.load(saved)
    assert all(name in str(caught.value) for name in ("transformer.wte.weight", "model.embed_tokens.weight"))


def test_another_shape_dtype_grouping(saved: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["parameters"]["lm_head.weight"]["shape"] = [1, 2]
        content["parameters"]["model.norm.weight"]["dtype"] = "bfloat16"

    forge(saved, change)
    forge(saved, lambda content: content["param_groups"].append({"params": []}), "optimizer.json")
    refused(saved, "lm_head.weight: saved as [1, 2]", "model.norm.weight: saved as bfloat16", "param_groups: 2")


def test_a_promise_that_the_file_does_not_keep(saved: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["parameters"]["model.norm.weight"]["tensors"]["other"] = [2]

    forge(saved, change)
    refused(saved, "model.norm.weight.other is in no file")


def test_another_rule(saved: Path) -> None:
    model = build("llama")
    plan: Any = plan_of(model, moments=0, **HOST)
    with pytest.raises(ValueError, match="saved by AdamW, this optimizer is SGD"):
        stow(model, plan, rule=SGD(), device="cpu").load(saved)


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


def test_saved_twice(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    optimizer.save(tmp_path / "optimizer")
    for batch in tokens("llama", 1):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.save(str(tmp_path / "optimizer"))
    assert [path.name for path in tmp_path.iterdir()] == ["optimizer"]
    other, fresh = trained(0)
    other.load_state_dict(model.state_dict())
    fresh.load(tmp_path / "optimizer")
    assert equal(everything(other, fresh), everything(model, optimizer))


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
    other, fresh = trained(0)
    other.load_state_dict(model.state_dict())
    fresh.load(tmp_path / "optimizer")
    assert equal(everything(other, fresh), expected)


def test_every_moment_of_the_exchange_leaves_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two changes of names on the disk, ``load`` finds the earlier save or the new one."""
    seen: list[str] = []
    model, optimizer = trained(1)
    _, reader = trained(0)
    for method in ("rename", "mkdir"):
        _look_around(monkeypatch, Path, method, lambda: seen.append(look(reader, tmp_path)))
    _look_around(monkeypatch, shutil, "rmtree", lambda: seen.append(look(reader, tmp_path)))
    monkeypatch.setattr(spans, "write", _looking(spans.write, lambda: seen.append(look(reader, tmp_path))))
    optimizer.save(tmp_path / "optimizer")
    first = len(seen)
    for batch in tokens("llama", 1):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.save(tmp_path / "optimizer")
    assert set(seen[:first]) == {"nothing", "1"} and "nothing" not in seen[first:]
    assert seen[first] == "1" and seen[-1] == "2"


def look(reader: StowOptimizer, folder: Path) -> str:
    try:
        reader.load(folder / "optimizer")
    except ValueError as error:
        assert "no optimizer.json" in str(error)
        return "nothing"
    return str(int(reader.state_of(reader.param_groups[0]["params"][0])["step"]))


def _looking(call: Any, before: Any) -> Any:
    def looked(*args: Any, **kwargs: Any) -> Any:
        before()
        made = call(*args, **kwargs)
        before()
        return made

    return looked


def _look_around(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, before: Any) -> None:
    monkeypatch.setattr(owner, name, _looking(getattr(owner, name), before))


# --- processes -------------------------------------------------------------------------------------------------------


def child(what: str, folder: Path, site: str) -> tuple[Any, Path]:
    """A process forked from one that has the imports, and the file with what it says."""
    out = folder.with_name("said")
    out.write_text("")
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=saving_child.main, args=(out, what, folder, site))
    process.start()
    return process, out


def said(what: str, folder: Path, site: str) -> str:
    process, out = child(what, folder, site)
    process.join(120)
    assert process.exitcode == 0, out.read_text()
    return out.read_text()


@pytest.mark.parametrize("what", ["save", "load"])
@pytest.mark.parametrize("site", ["host", "device"])
def test_memory(what: str, site: str, tmp_path: Path) -> None:
    """Peak RSS grows by less than one bucket and 12 MiB: buffers, imports of safetensors, headers, allocator slack."""
    found = json.loads(said(what, tmp_path / "optimizer", site).splitlines()[-1])
    assert found["state"] > 60 << 20, "the state is too small to show a copy"
    assert found["bucket"] < found["state"] / 8
    assert found["growth"] <= found["bucket"] + (12 << 20), found


def test_a_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    out = said("limit", tmp_path / "optimizer", "host")
    assert "was not saved: File too large; the earlier save in it is intact" in out


def test_killed_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """Killed at three moments of its second save; the first one is loaded, and the next save cleans up."""
    _, optimizer = trained(0)
    for delay in (0.0, 0.05, 0.15):
        shutil.rmtree(tmp_path / "optimizer", ignore_errors=True)
        process, out = child("kill", tmp_path / "optimizer", "host")
        while "saving again" not in out.read_text():
            assert process.is_alive(), out.read_text()
            time.sleep(0.001)
        time.sleep(delay)
        assert process.is_alive(), out.read_text()
        process.kill()
        process.join()
        out.unlink()
        folder = tmp_path / "optimizer"
        folder = folder if folder.exists() else commit.earlier(folder)
        saved_state.opened(folder, hashes=True)
    shutil.rmtree(tmp_path / "optimizer", ignore_errors=True)
    optimizer.save(tmp_path / "optimizer")
    assert [path.name for path in tmp_path.iterdir()] == ["optimizer"]
