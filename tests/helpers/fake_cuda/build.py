"""Compile the fake CUDA for the environment that runs this: ``python tests/helpers/fake_cuda/build.py FOLDER``.

Into ``FOLDER`` go one library for the runtime and the driver, one for torch's kernels, and ``fake-cuda COMMAND...``,
which runs a command with them. What torch asks of CUDA's libraries and is not in the sources becomes a function that
says its name and fails. Needs g++ and torch's wheel for CUDA.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).parent
SITE = Path(torch.__file__).parent.parent
LIBRARIES = SITE / "torch" / "lib"
INCLUDES = [SITE / "nvidia/cu13/include", SITE / "torch/include", SITE / "torch/include/torch/csrc/api/include"]
RUNTIME = ("streams", "memory", "device", "driver", "collectives")
KERNELS = ("kernels", "attention")
VERSION = "libcudart.so.13"  # also that of its symbols
# Of these the driver's symbols are meant; the others that begin so are of libraries on top of it.
NOT_THE_DRIVER = re.compile("cu(da|blas|dnn|fft|sparse|solver|rand|File)")
LAUNCHER = """#!/usr/bin/env bash
# fake-cuda COMMAND...: with CUDA made of host memory.
export LD_PRELOAD={runtime} LD_LIBRARY_PATH={folder} PATH={bin}:$PATH OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}
exec "$@"
"""


def run(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def compiled(source: Path, folder: Path) -> Path:
    """The object file of ``source``; that of the last call, if nothing has changed since."""
    made = folder / f"{source.stem}.o"
    given = [source, Path(torch.__file__), *HERE.glob("*.h"), *HERE.parent.glob("simulated/*.h")]
    if made.exists() and made.stat().st_mtime > max(file.stat().st_mtime for file in given):
        return made
    flags = ["-std=c++20", "-O1", "-g0", "-w", "-fPIC", *(f"-I{path}" for path in INCLUDES)]
    run("g++", *flags, "-c", source, "-o", made)
    return made


def symbols(file: Path, *options: str) -> set[str]:
    """Names of functions that ``nm`` finds, without their versions."""
    return {line.split()[-1].split("@")[0] for line in run("nm", *options, file).splitlines()}


def missing(objects: list[Path]) -> str:
    """Functions that torch needs, or looks up by name, and that ``objects`` lack."""
    wanted = {name for file in LIBRARIES.glob("*.so") for name in symbols(file, "-D", "--undefined-only")}
    wanted = {name for name in wanted if re.match(r"(__)?cuda[A-Z]|cu[A-Z]", name)}
    looked_up = (SITE / "torch/include/c10/cuda/driver_api.h").read_text()
    wanted |= set(re.findall(r"_\((cu\w+)", looked_up)) - {"cuda"}
    wanted = {name for name in wanted if "cuda" in name or not NOT_THE_DRIVER.match(name)}
    there = {name for file in objects for name in symbols(file, "--defined-only")}
    body = '{{ fprintf(stderr, "[fake CUDA] not there: {0}\\n"); return 801; }}'
    lines = [f'extern "C" int {name}() ' + body.format(name) for name in sorted(wanted - there)]
    return "\n".join(["#include <stdio.h>", *lines, ""])


def main(folder: Path) -> None:
    if not torch.version.cuda:
        sys.exit(f"torch {torch.__version__} is not for CUDA")
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        work = {name: pool.submit(compiled, HERE / f"{name}.cpp", folder) for name in RUNTIME + KERNELS}
    objects = {name: found.result() for name, found in work.items()}
    runtime = [objects[name] for name in RUNTIME]
    (folder / "missing.cpp").write_text(missing(runtime))
    runtime.append(compiled(folder / "missing.cpp", folder))
    (folder / "symbols").write_text(f"{VERSION} {{ global: cu*; __cuda*; nccl*; fake_*; local: *; }};\n")
    to = folder / VERSION
    run("g++", "-shared", "-o", to, *runtime, f"-Wl,-soname,{VERSION},--version-script,{folder / 'symbols'}", "-ldl")
    driver = folder / "libcuda.so.1"
    driver.unlink(missing_ok=True)
    driver.symlink_to(VERSION)
    links = [f"-L{LIBRARIES}", "-ltorch_cuda", "-ltorch_cpu", "-lc10_cuda", "-lc10", f"-L{folder}", f"-l:{VERSION}"]
    run("g++", "-shared", "-o", folder / "libfake_kernels.so", *(objects[name] for name in KERNELS), *links)
    where = {"runtime": to, "folder": folder, "bin": sysconfig.get_path("scripts")}
    launcher = folder / "fake-cuda"
    launcher.write_text(LAUNCHER.format(**{name: shlex.quote(str(path)) for name, path in where.items()}))
    launcher.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
