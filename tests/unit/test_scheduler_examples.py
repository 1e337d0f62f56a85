"""The examples for SLURM and Kubernetes: SLURM's is run, with stand-ins for its programs; of both, what the ranks are
started with is a config that can be loaded, and every exit code is either followed by another start or not.
"""

import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deepstow.trainer.config.load import load
from deepstow.trainer.distributed.ranks import Ranks, describe
from deepstow.trainer.errors import ExitCode

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
AGAIN = {ExitCode.PREEMPTED, ExitCode.WATCHDOG, ExitCode.PEER_DIED}
OPTIONS = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal", "requeue", "open-mode"
}  # fmt: skip
# What `python` is in the job: the rank notes how it was started and leaves the code; the other use is the real one.
PYTHON = """#!/bin/bash
[ "$1" = -c ] && exec {python} "$@"
env > {folder}/environment
printf '%s\\n' "$@" > {folder}/arguments
mkdir -p runs/zero; [ {code} = none ] || echo '{{"code": {code}}}' > runs/zero/exit.json
"""


def loads(words: list[str]) -> None:
    """A command of the module that trains, whose shipped config and overrides are good."""
    option, module, flag, config, *overrides = words
    assert (option, module, flag) == ("-m", "deepstow.launch.train", "--config")
    load(EXAMPLES.parents[1] / f"configs/{config}.yaml", overrides)


@pytest.mark.parametrize("code", [*ExitCode, "none"])
def test_slurm(code: ExitCode | str, tmp_path: Path) -> None:
    folder, script, value = tmp_path / "bin", EXAMPLES / "slurm.sbatch", getattr(code, "value", code)
    folder.mkdir()
    real = subprocess.run(["which", "python3"], capture_output=True, text=True, check=True).stdout.strip()
    programs = {
        "python": PYTHON.format(python=real, folder=folder, code=value),
        "srun": '#!/bin/bash\nshift; SLURM_PROCID=5 SLURM_LOCALID=1 exec "$@"\n',
        "scontrol": f'#!/bin/bash\n[ "$1" = show ] && printf "node-0\\nnode-1\\n" || echo "$@" > {folder}/requeued\n',
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    slurm = {"NNODES": "2", "NTASKS_PER_NODE": "4", "JOB_NODELIST": "node-[0-1]", "JOB_ID": "77"}
    variables = {f"SLURM_{name}": given for name, given in slurm.items()} | {"PATH": f"{folder}:/usr/bin:/bin"}
    given: dict[str, Any] = {"cwd": tmp_path, "env": variables, "capture_output": True, "text": True}
    found = subprocess.run(["bash", str(script)], check=False, **given)
    assert found.returncode == (0 if code in {*AGAIN, ExitCode.FINISHED} else 1), found.stderr
    assert (folder / "requeued").exists() is (code in AGAIN)
    words = (folder / "arguments").read_text().splitlines()
    assert "training.gradient_accumulation_steps=8" in words
    loads(words)
    said = dict(line.split("=", 1) for line in (folder / "environment").read_text().splitlines() if "=" in line)
    wanted = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node-0"}
    assert said.items() >= wanted.items() and said.keys() >= describe(Ranks()).keys()
    asked = [line.split("--")[1].split("=")[0] for line in script.read_text().splitlines() if line[:8] == "#SBATCH "]
    assert set(asked) == OPTIONS
