"""What a restart does after its newest checkpoint was damaged: other training systems against this project.

    OMP_NUM_THREADS=1 python -m benchmarks.incumbent_faults --out runs/incumbent-faults

Disks, full quotas and preemption damage checkpoints. A run that accepts such a checkpoint trains on with other weights
and nobody is told; a run that dies of it needs a person. This script finds out what happens in transformers.Trainer,
DeepSpeed ZeRO-2, torch.distributed.checkpoint (DCP) and this project. Each trains a tiny Llama for 6 steps in one CPU
process, saves every 2 steps with the defaults of its documentation, and is killed after step 5. The newest checkpoint
(of step 4) is then damaged, the same command is started again, and three things are reported: whether it trains, from
which step on, and whether the weights after step 6 have the bits of the undisturbed run. Trainer restarts with
``resume_from_checkpoint=True``, this project with ``training.resume_from_checkpoint=auto``. DeepSpeed's and DCP's loops
belong to the user: here DeepSpeed loads what its file ``latest`` names, DCP the folder of the greatest step.

Every training is a process of its own (``incumbents.py``, where the four are), forked from this one, which may have no
threads. Writes ``table.md`` and ``run.log``.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.incumbents import NEWEST, SAVE, STEPS, checkpointed, load_libraries
from benchmarks.incumbents import main as main_of_child
from strategies.report.table import table

TITLES = {"trainer": "Trainer", "deepspeed": "DeepSpeed ZeRO-2", "dcp": "DCP", "deepstow": "DeepStow"}
NAMES = {"deepspeed": "global_step{}"}  # of checkpoints, where it is not "checkpoint-{}"
OPTIMIZER = {"trainer": "optimizer.pt", "deepspeed": "*optim_states.pt", "dcp": "*.distcp",
             "deepstow": "optimizer/*.safetensors"}  # fmt: skip
WEIGHTS = {"deepspeed": "*model_states.pt", "dcp": ""}  # where it is not model.safetensors
ONE_FILE, USERS_LOOP = "n/a: weights and optimizer are one file", "n/a: the loop is the user's"
WIDTH = 60  # of an error in the table; the log has all of it


def main() -> None:
    """The whole script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/incumbent-faults"))
    parser.add_argument("--systems", default=",".join(TITLES))
    arguments = parser.parse_args()
    load_libraries()
    arguments.out.mkdir(parents=True, exist_ok=True)
    systems = arguments.systems.split(",")
    rows: dict[str, list[str]] = {}
    packages = ("torch", "transformers", "accelerate", "deepspeed", "safetensors")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    with tempfile.TemporaryDirectory() as scratch, (arguments.out / "run.log").open("w") as log:
        say = partial(print, file=log, flush=True)
        say(f"python {sys.version.split()[0]}, {versions}")
        for what in systems:
            for label, outcome in cases(what, Path(scratch) / what, say):
                rows.setdefault(label, []).append(outcome)
                say(f"{what} | {label} | {outcome}\n")
                print(f"{what:10} {label:55} {outcome}", flush=True)
    header = ["fault", *(TITLES[what] for what in systems)]
    lines = table(header, [[label, *outcomes] for label, outcomes in rows.items()], markdown=True)
    (arguments.out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def cases(what: str, home: Path, say: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """Do every fault to a copy of a killed run of ``what``; yields its name and what a restart does."""
    home.mkdir()
    name = NAMES.get(what, "checkpoint-{}").format(NEWEST)

    def trained(folder: Path, death: str = "none") -> dict[str, Any]:
        found = start(what, folder, death)
        say(f"{what}: {folder.name}, to die: {death}: {json.dumps(found)}")
        return found

    whole = trained(home / "whole")
    assert whole["weights"] and whole["trained"] == STEPS, whole
    reference = whole["weights"]
    trained(home / "stopped", "after step 5")
    assert (home / "stopped" / name).is_dir() and not (home / "stopped" / name.replace("4", "6")).exists()

    def restarted(folder: Path) -> str:
        return outcome(trained(folder), reference)

    def damaged(damage: Callable[[Path], object]) -> str:
        folder = home / "case"
        shutil.copytree(home / "stopped", folder)
        damage(folder / name)
        said = restarted(folder)
        shutil.rmtree(folder)
        return said

    def killed(death: str) -> str:
        folder = home / death.replace(" ", "-")
        found = trained(folder, death)
        assert found.get("signal") in ("SIGKILL", "SIGXFSZ"), found
        say(f"left: {[f'{path.relative_to(folder)}: {path.stat().st_size}' for path in checkpointed(folder)]}")
        return restarted(folder)

    optimizer = OPTIMIZER[what]
    weights = WEIGHTS.get(what, "model.safetensors")
    yield "none (control)", damaged(lambda place: None)
    yield "one bit flipped in the weights", damaged(partial(flip, name=weights)) if weights else ONE_FILE
    yield "one bit flipped in the optimizer's file", damaged(partial(flip, name=optimizer))
    yield "the optimizer's file cut to half", damaged(lambda it: os.truncate(file(it, optimizer), half(it, optimizer)))
    yield "the optimizer's file deleted", damaged(lambda place: file(place, optimizer).unlink())
    yield "killed in the middle of the largest file", killed("in the largest file")
    yield "killed before the last file", killed("before the last file")
    over = "killed in the middle, saving over the one before"
    yield over, killed("in the largest file over the last") if what == "dcp" else "n/a: a folder for each step"
    over = "killed before the last file, saving over the one before"
    yield over, killed("before the last file over the last") if what == "dcp" else "n/a: a folder for each step"
    marker = home / "executed"
    said = damaged(partial(plant, what=what, marker=marker))
    yield "a pickle payload in the state", f"{'executed' if marker.exists() else 'not executed'}; {said}"
    yield "a finished run is started again", finished(restarted, home / "whole") if what in (
        "trainer", "deepstow") else USERS_LOOP  # fmt: skip


def finished(restarted: Callable[[Path], str], folder: Path) -> str:
    """Start a finished run again; also whether the bytes of its export changed."""
    export = folder / "export/model.safetensors"
    before, touched = export.read_bytes(), export.stat().st_mtime_ns
    said = restarted(folder)
    changed = "changed" if export.read_bytes() != before else "has the same bytes"
    return f"{said}; export {changed}{'' if export.stat().st_mtime_ns == touched else ', written again'}"


def file(place: Path, name: str) -> Path:
    """The largest file in ``place`` with that name."""
    return max(place.glob(name), key=lambda path: path.stat().st_size)


def half(place: Path, name: str) -> int:
    """Half the size of that file."""
    return file(place, name).stat().st_size // 2


def flip(place: Path, name: str) -> None:
    """Flip a high bit of the mantissa of the fp32 number in the middle of a file."""
    path = file(place, name)
    content = bytearray(path.read_bytes())
    content[len(content) // 8 * 4 + 2] ^= 16
    path.write_bytes(content)


class Payload:
    """When unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def plant(place: Path, what: str, marker: Path) -> None:
    """Put a payload into the pickled state; in place of the optimizer's file where nothing is pickled."""
    if what == "dcp":
        metadata = pickle.loads((place / ".metadata").read_bytes())
        metadata.note = Payload(marker)
        (place / ".metadata").write_bytes(pickle.dumps(metadata))
        return
    path = file(place, OPTIMIZER[what])
    state = {} if what == "deepstow" else torch.load(path, weights_only=False)
    torch.save({**state, "note": Payload(marker)}, path)


def start(what: str, folder: Path, death: str) -> dict[str, Any]:
    """Train in a process of its own, a fork of this one; what it reports, or the signal it died of."""
    with tempfile.TemporaryFile("w+") as output:
        if not (pid := os.fork()):
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
            signal.alarm(180)
            if what == "deepspeed":
                os.environ["LOCAL_RANK"] = "0"  # its launcher's, the one thing that it insists on
            try:
                main_of_child(what, folder, death)
            finally:
                sys.stdout.flush()
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        lines = output.read().splitlines()
    if code < 0:
        return {"signal": signal.Signals(-code).name}
    reports = [line[7:] for line in lines if line.startswith("REPORT ")]
    assert reports, "\n".join(lines)
    found: dict[str, Any] = json.loads(reports[-1])
    said = [line for line in lines if "damaged: " in line or line.startswith(("finished before", "resuming"))]
    return {**found, "said": [line.replace(str(folder), "RUN") for line in said], "end": lines[-3:-1]}


def outcome(found: Mapping[str, Any], reference: str) -> str:
    """One line about what a restart did."""
    if "signal" in found:
        return f"died of {found['signal']}"
    if found["error"]:
        said = f"traceback: {found['error']}"
        return said if len(said) <= WIDTH else f"{said[:WIDTH]} ..."
    if found["code"]:
        return f"refused: {found['end'][-1]}"
    same = "same weights" if found["weights"] == reference else "other weights at the end"
    steps = found["trained"]
    forms = {0: "trained no step", STEPS - NEWEST: "accepted", STEPS: "started from the beginning"}
    forms[STEPS - NEWEST + SAVE] = "fell back to the older checkpoint"
    return f"{forms.get(steps, f'trained {steps} steps')}, {same}"


if __name__ == "__main__":
    main()
