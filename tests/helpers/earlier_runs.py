"""Runs whose checkpoints an earlier commit made, and what it got by going on: ``tests/data/earlier.tar.xz``.

    cd WORKTREE_OF_THAT_COMMIT
    PYTHONPATH=$PWD OMP_NUM_THREADS=1 python -P .../tests/helpers/earlier_runs.py .../tests/data/earlier.tar.xz

Each run of ``RUNS`` saves at step 2 or 3, and ends at step ``STEPS``, resumed from there. The archive has the
checkpoint, the weights at the end, and what was logged of the later steps. The models are small enough for many to fit.
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deepstow.trainer.distributed.ranks import Ranks
from tests.helpers import moves
from tests.helpers.moves import SAVED, Job, Kind, forget_run, in_turn
from tests.helpers.worlds import run_counted

COMMIT = "d309ba20"
ARCHIVE = Path(__file__).parents[1] / "data" / "earlier.tar.xz"
STEPS = 4
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
SLOW_LINK: Mapping[str, Any] = {
    "save_steps": 3,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    **CLIPPED,
}
LORA: Mapping[str, Any] = {"lora": {"r": 2}}


def _offload(ranks: int = 1, training: Mapping[str, Any] = {}, zero: int | None = None, **options: Any) -> Kind:
    return Kind(ranks, {"offload": options} | ({} if zero is None else {"zero": {"stage": zero}}), training)


def _exchanging(options: Mapping[str, Any], training: Mapping[str, Any] = SLOW_LINK, **more: Any) -> Kind:
    return Kind(2, {"collectives": options, **more}, training)


EXACT: Mapping[str, Kind] = {  # whose next steps have the earlier commit's bits
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
    "no copies": _offload(1, BF16, weight_copies=False, **HOST),
    "speculative": _offload(1, CLIPPED, update_in_backward="speculative", **HOST),
    "moments bf16": _offload(moments="bf16", **HOST),
    "disk": _offload(disk="DISK", disk_memory="64MiB", **HOST),
    "disk, trained weights": _offload(1, BF16, disk="DISK", disk_memory="64MiB", host_memory="96KiB", **PASSING),
    "recompute": Kind(1, {"recompute": {"policy": "full"}}),
    "adapters": replace(_offload(1, BF16, **HOST), section=LORA),
    "adapters, fp8": replace(_offload(1, BF16, frozen_weights="fp8", **HOST), section=LORA),
    "offload, two ranks": _offload(2, **HOST),
    "shared, zero 1": _offload(2, CLIPPED, zero=1, site="host"),
    "shared, zero 3": _offload(2, CLIPPED, zero=3, **HOST),
    "shared, zero 3, bf16": _offload(2, {**CLIPPED, **BF16}, zero=3, **HOST),
    "shared, gathered on the host": _offload(2, CLIPPED, zero=3, gather="host", **HOST),
    "pipeline": moves.pipeline(2),
    "pipeline, offload": moves.staged(2),
    "tensor": moves.tensor(0),
    "tensor, zero 1": moves.tensor(1),
    "tensor, offload": Kind(2, {"tensor": {"degree": 2}, "offload": dict(HOST)}),
    "tensor, exchange": Kind(2, {"tensor": {"degree": 2, "exchange": {"tokens": 0.5, "bits": 4}}}),
    "sequence": Kind(2, {"sequence": {"degree": 2}}),
    "experts": Kind(2, {"experts": {"degree": 2}}, model=EXPERTS),
    "topk": _exchanging({"compress": "topk", "density": 0.1}),
    "topk, shared": _exchanging({"compress": "topk", "density": 0.1}, offload=dict(HOST), zero={"stage": 3}),
    "int8": _exchanging({"compress": "int8"}),
    "local steps": _exchanging({"local_steps": 2}),
    "local steps, host": _exchanging({"local_steps": 2}, offload=dict(HOST)),
    "onebit, second stage": _exchanging({"compress": "onebit", "start": 2}),
    "onebit, warm-up": _exchanging({"compress": "onebit", "start": 3}, {**SLOW_LINK, "save_steps": 2}),
    "two levels": Kind(4, {"collectives": {"hierarchical": True}}),
}
INT8: Mapping[str, Kind] = {  # their code for first moments is another one since
    "moments int8": _offload(1, BF16, moments="int8", **HOST),
    "masters bf16": _offload(1, BF16, moments="int8", masters="bf16", **HOST),
}
LOSSY: Mapping[str, Kind] = {  # torch batches its products by buckets, which are formed anew
    "powersgd": _exchanging({"compress": "powersgd", "rank": 1, "start": 2}),
    "powersgd, host": _exchanging({"compress": "powersgd", "rank": 1, "start": 2}, offload=dict(HOST)),
}
RUNS: Mapping[str, Kind] = {**EXACT, **INT8, **LOSSY}


def config_of(name: str, folder: Path) -> Any:
    """The config of a run, in ``folder``, where its disk is as well."""
    kind = RUNS[name]
    strategies = {key: dict(options) for key, options in kind.strategies.items()}
    if "disk" in strategies.get("offload", {}):
        strategies["offload"]["disk"] = str(folder / "disk")
        (folder / "disk").mkdir(parents=True, exist_ok=True)
    return replace(kind, strategies=strategies, model={**SMALL, **kind.model}).config(folder, STEPS)


def saved(name: str) -> str:
    """The name of a run's checkpoint."""
    return f"checkpoint-{RUNS[name].training.get('save_steps', SAVED)}"


def kernels() -> str:
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


def weights_of(found: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The weights at the end of a run, in the precision of their masters."""
    return {key: value for key, value in found["end"].items() if key.endswith(" weight")}


def gone_on(names: Sequence[str], checkpoints: Path, folder: Path) -> dict[str, Any]:
    """What runs on the same number of ranks find that go on from ``checkpoints/NAME``, or why they do not."""
    jobs = [(name, config_of(name, folder / name), str(checkpoints / name / saved(name))) for name in names]
    return dict(run_counted(RUNS[names[0]].ranks, each_alone, jobs))


def each_alone(ranks: Ranks, jobs: Sequence[Job]) -> dict[str, Any]:
    """``in_turn``; of a run that ends with an error on all ranks, the error's text."""
    found: dict[str, Any] = {}
    for job in jobs:
        try:
            found |= in_turn(ranks, [job])
        except Exception as error:
            found[job[0]] = {"error": f"{type(error).__name__}: {error}"}
            forget_run()
    return found


def main(archive: Path, chosen: Sequence[str]) -> None:
    """Make the archive, and name what could not be made."""
    folder = Path(tempfile.mkdtemp())
    made: dict[str, Any] = {}
    for number in sorted({RUNS[name].ranks for name in chosen}):
        names = [name for name in chosen if RUNS[name].ranks == number]
        run_counted(number, each_alone, [(name, config_of(name, folder / name), None) for name in names])
        made |= gone_on(names, folder, folder / "again")
    with tarfile.open(archive, "w:xz", preset=9) as into:
        for name in chosen:
            found, home = made[name], folder / name
            if "error" in found:
                print(f"{name}: not made: {found['error']}")
                continue
            save_file({key: each.contiguous() for key, each in weights_of(found).items()}, home / "end.safetensors")
            (home / "logged.json").write_text(json.dumps({key: found[key] for key in ("loss", "norm")}))
            for part in (saved(name), "end.safetensors", "logged.json"):
                into.add(home / part, f"{name}/{part}", filter=_nobodys)
        (folder / "kernels").write_text(kernels())
        into.add(folder / "kernels", "kernels", filter=_nobodys)


def _nobodys(info: tarfile.TarInfo) -> tarfile.TarInfo:
    return info.replace(uid=0, gid=0, uname="", gname="", mtime=0, deep=False)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]), sys.argv[2:] or list(RUNS))
