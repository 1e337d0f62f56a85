"""Checkpoints that d309ba20 made of every kind are resumed, and go on with what that commit got.

``tests/data/earlier.tar.xz`` has, of each run of ``RUNS``, a checkpoint of step 2 or 3, the weights at step ``STEPS``
and what was logged of all steps, as that commit got them by going on from the checkpoint. tests/helpers/earlier_runs.py
of 62a15a80 made it. Where torch computes here what it computed then, the bits are compared. Elsewhere sums have another
order: fp32 was off by 2e-7 and half precision by 2e-3 with ``ATEN_CPU_CAPABILITY=default``.

First moments in int8 rest in another code since, so loading rounds them once more: they are compared with the
checkpoint's, and only losses and norms afterwards. A checkpoint of 1-bit Adam is refused by name.
"""

import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepstow.trainer.distributed.ranks import Ranks
from deepstow.trainer.run.checkpoints import checkpoint, resuming
from tests.helpers import moves
from tests.helpers.moves import Job, Kind, different, far, forget_run, in_turn
from tests.helpers.worlds import run_counted

pytestmark = pytest.mark.ranks
ARCHIVE = Path(__file__).parents[1] / "data" / "earlier.tar.xz"
STEPS = 4
OFF, OFF_IN_HALF, OFF_IN_INT8 = 1e-5, 1e-2, 2e-3  # of the sums of another machine; of what is logged after int8 moments
SMALL: Mapping[str, Any] = {
    "hidden_size": 4, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
EXPERTS: Mapping[str, Any] = {
    "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False, **SMALL,
}  # fmt: skip
CLIPPED: Mapping[str, Any] = {"max_grad_norm": 0.05}
BF16: Mapping[str, Any] = {"bf16": True}
HOST: Mapping[str, Any] = {"site": "host", "weights": "streamed"}
STREAMED: Mapping[str, Any] = {"site": "streamed", "weights": "streamed"}
PASSING: Mapping[str, Any] = {"site": "host", "gradients": "passing"}
DISK: Mapping[str, Any] = {"disk": "DISK", "disk_memory": "64MiB"}
SLOW_LINK: Mapping[str, Any] = {
    "save_steps": 3, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, **CLIPPED
}  # fmt: skip


def _offload(ranks: int = 1, training: Mapping[str, Any] = {}, zero: int | None = None, **options: Any) -> Kind:
    return Kind(ranks, {"offload": options} | ({} if zero is None else {"zero": {"stage": zero}}), training)


def _exchanging(**options: Any) -> Kind:
    beside = {key: options.pop(key) for key in ("offload", "zero") if key in options}
    return Kind(2, {"collectives": options, **beside}, SLOW_LINK)


INT8: Mapping[str, Kind] = {
    "moments int8": _offload(1, BF16, moments="int8", **HOST),
    "masters bf16": _offload(1, BF16, moments="int8", masters="bf16", **HOST),
}
RUNS: Mapping[str, Kind] = {
    "plain": moves.plain(**CLIPPED),
    "plain, bf16": moves.plain(**BF16),
    "plain, momentum": moves.plain(optim="sgd", optim_args="momentum=0.9"),
    "plain, fp16": moves.plain(fp16=True),
    "ddp": moves.plain(2),
    **{f"zero {stage}": moves.zero(stage, 2) for stage in (0, 1, 2, 3)},
    "zero 2, bf16": moves.zero(2, 2, **BF16),
    "device": _offload(site="device"),
    "host": _offload(1, CLIPPED, **HOST),
    "host, bf16": _offload(1, BF16, **HOST),
    "streamed": _offload(1, CLIPPED, **STREAMED),
    "streamed, bf16": _offload(1, BF16, **STREAMED),
    "passing": _offload(**PASSING),
    "no copies": _offload(1, BF16, **HOST),  # saved with weight_copies: false, which is gone
    "speculative": _offload(1, CLIPPED, **HOST),  # saved with update_in_backward: speculative, which is gone
    "moments bf16": _offload(moments="bf16", **HOST),
    "disk": _offload(**DISK, **HOST),
    "disk, trained weights": _offload(1, BF16, host_memory="96KiB", **DISK, **PASSING),
    "recompute": Kind(1, {"recompute": {"policy": "full"}}),
    "adapters": replace(_offload(1, BF16, **HOST), section={"lora": {"r": 2}}),
    "adapters, fp8": replace(_offload(1, BF16, frozen_weights="fp8", **HOST), section={"lora": {"r": 2}}),
    "offload, two ranks": _offload(2, **HOST),
    "shared, zero 1": _offload(2, CLIPPED, zero=1, site="host"),
    "shared, zero 3": _offload(2, CLIPPED, zero=3, **HOST),
    "shared, zero 3, bf16": _offload(2, {**CLIPPED, **BF16}, zero=3, **HOST),
    "shared, gathered on the host": _offload(2, CLIPPED, zero=3, gather="host", **HOST),
    "pipeline": moves.pipeline(2),
    "pipeline, offload": moves.staged(2),
    "tensor": moves.tensor(0),
    "tensor, zero 1": moves.tensor(1),
    "tensor, offload": Kind(2, {"tensor": {"degree": 2}, "offload": HOST}),
    "tensor, exchange": Kind(2, {"tensor": {"degree": 2, "exchange": {"tokens": 0.5, "bits": 4}}}),
    "sequence": Kind(2, {"sequence": {"degree": 2}}),
    "experts": Kind(2, {"experts": {"degree": 2}}, model=EXPERTS),
    "topk": _exchanging(compress="topk", density=0.1),
    "topk, shared": _exchanging(compress="topk", density=0.1, offload=HOST, zero={"stage": 3}),
    "int8": _exchanging(compress="int8"),
    "powersgd": _exchanging(compress="powersgd", rank=1, start=2),
    "powersgd, host": _exchanging(compress="powersgd", rank=1, start=2, offload=HOST),
    "local steps": _exchanging(local_steps=2),
    "local steps, host": _exchanging(local_steps=2, offload=HOST),
    "two levels": Kind(4, {"collectives": {"hierarchical": True}}),
    **INT8,
}
REFUSED: Mapping[str, tuple[Kind, str]] = {
    name: (Kind(2, {}, SLOW_LINK), "was saved with onebit: 1-bit Adam's momentum and frozen variance are not AdamW's")
    for name in ("onebit, second stage", "onebit, warm-up")
}
# In ``make test``: each kind of file, and each reader of one.
QUICK: Mapping[int, Sequence[str]] = {
    1: ("plain, momentum", "host, bf16", "disk, trained weights", "adapters, fp8", *INT8),
    2: ("zero 3", "shared, zero 3, bf16", "pipeline, offload", "tensor, zero 1", "experts", "topk, shared"),
}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints, and beside each the weights at the end and what was logged."""
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def _config(kind: Kind, folder: Path) -> Any:
    strategies = {key: dict(options) for key, options in kind.strategies.items()}
    if "disk" in strategies.get("offload", {}):
        strategies["offload"]["disk"] = str(folder / "disk")
        (folder / "disk").mkdir(parents=True)
    return replace(kind, strategies=strategies, model={**SMALL, **kind.model}).config(folder, STEPS)


def _saved(earlier: Path, name: str) -> Path:
    (found,) = (earlier / name).glob("checkpoint-*")
    return found


def _each(ranks: Ranks, jobs: Sequence[Job]) -> dict[str, Any]:
    """``in_turn``; of a run that ends with an error on all ranks, the error's text."""
    found: dict[str, Any] = {}
    for job in jobs:
        try:
            found |= in_turn(ranks, [job])
        except Exception as error:
            found[job[0]] = f"{type(error).__name__}: {error}"
            forget_run()
    return found


def _kernels() -> str:
    """A digest of what torch and Transformers alone compute here: equal digests let bits be compared."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, num_hidden_layers=2))
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), torch.arange(1, 121).view(6, 20)
    for precise in (True, False, True):
        with torch.autocast("cpu", enabled=not precise):
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    digest = sha256(f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}".encode())
    for param in model.parameters():
        digest.update(param.detach().numpy().tobytes())
    return digest.hexdigest()


def _wrong(name: str, found: Any, earlier: Path, *, bits: bool) -> list[str]:
    """What is not as it was."""
    if isinstance(found, str):
        return [f"{name}: {found}"]
    half = RUNS[name].training.keys() & {"bf16", "fp16"}
    off = OFF_IN_INT8 if name in INT8 else OFF_IN_HALF if half else 0.0 if bits else OFF
    end = load_file(earlier / name / "end.safetensors")
    weights = {key: value for key, value in found["end"].items() if key.endswith(" weight")}
    if name in INT8:
        wrong = _misread(_state(_saved(earlier, name)), found["start"])
    else:
        wrong = different(end, weights) if bits else far(end, weights, off)
    for key, before in json.loads((earlier / name / "logged.json").read_text()).items():
        alike = found[key] == pytest.approx(before, rel=0.0 if bits and name not in INT8 else off, abs=0.0, nan_ok=True)
        wrong += [] if alike else [f"{key}: {before}, now {found[key]}"]
    return [f"{name}: {each}" for each in wrong]


def _state(saved: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint of one rank: masters where there are some, and moments, in fp32."""
    found = {f"{key} weight": value for key, value in load_file(saved / "model.safetensors").items()}
    for file in (saved / "optimizer").glob("*.safetensors"):
        for key, value in load_file(file).items():
            name, _, kind = key.rpartition(".")
            found[f"{name} {'weight' if kind == 'master' else kind}"] = value
    return {key: value.float() for key, value in found.items()}


def _misread(saved: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """State that is not the ``saved``; first moments may be off by what rounding their root to 127 steps changes."""
    wrong = []
    for key, before in saved.items():
        largest, off = before.abs().amax(), (found[key] - before).abs()
        step = 2 * (before.abs() * largest).sqrt() / 127 + largest / 127**2 + before.abs() / 2**10
        if (off > (step if key.endswith(" exp_avg") else 0)).any():
            wrong.append(f"{key} at the start")
    return wrong


@pytest.mark.parametrize("names", [
    *(pytest.param(names, id=f"{ranks} ranks") for ranks, names in QUICK.items()),
    *(pytest.param([name for name, kind in RUNS.items() if kind.ranks == ranks and name not in QUICK.get(ranks, ())],
                   id=f"the others of {ranks} ranks", marks=pytest.mark.slow) for ranks in (1, 2, 4)),
])  # fmt: skip
def test_goes_on_as_the_earlier_commit_did(names: Sequence[str], earlier: Path, tmp_path: Path) -> None:
    jobs = [(name, _config(RUNS[name], tmp_path / name), str(_saved(earlier, name))) for name in names]
    found = run_counted(RUNS[names[0]].ranks, _each, jobs, timeout_s=300 + 30 * len(names))
    bits = _kernels() == (earlier / "kernels").read_text()
    assert [line for name in names for line in _wrong(name, found[name], earlier, bits=bits)] == []


def test_each_manifest_is_read_and_nothing_is_refused_but_what_is_gone(earlier: Path, tmp_path: Path) -> None:
    """The files have their hashes; the config of then is compared with the same one of now."""
    for name, kind in [*RUNS.items(), *((name, kind) for name, (kind, _) in REFUSED.items())]:
        found = checkpoint.verified(_saved(earlier, name))
        lines = [line.what for line in resuming.compare(_config(kind, tmp_path / name), kind.ranks, found).refused]
        assert REFUSED[name][1] in lines[0] if name in REFUSED else lines == [], (name, lines)
    assert {path.parent.name for path in earlier.glob("*/end.safetensors")} == {*RUNS, *REFUSED}
