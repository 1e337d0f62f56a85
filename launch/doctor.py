"""Is this machine ready to train, and how fast is it?

Prints one row per fact, then ``ready``, or what to fix, each with the command that fixes it; warnings leave the exit
code 0. DeepSpeed compiles its C++ extensions at first use, silently, for a minute or two; ``--build`` does so
beforehand. ``--rates`` measures the rates from which plans compute the time of a step; nothing else should run then.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

if __name__ == "__main__":  # runs where the package is not installed, too
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepstow.benchmarks.harness.record import QUIET
from deepstow.launch import cli
from deepstow.strategies.core.on_disk import check_folders, folders_of
from deepstow.strategies.core.sizes import human, human_duration
from deepstow.trainer.distributed.deepspeed_ops import CPU_ADAM, FUSED_ADAM, SHM, Op, cache_folder, compiler
from deepstow.trainer.distributed.ranks import Ranks, settle_environment
from deepstow.trainer.errors import ConfigError, ExitCode, write_line
from deepstow.trainer.machine.probe import GIB, Memory, cores, disk_free_bytes, host_memory, probe
from deepstow.trainer.machine.profiles import COMMAND, StoredRates, known_rates, one_line, stored_at

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"  # of a checkout; an installed package has none


def install(need: str) -> str:
    """The command that brings a package; in a checkout all of them, at the pinned versions."""
    return "make setup" if PROJECT.exists() else f"{sys.executable} -m pip install --force-reinstall '{need}'"


class Status(StrEnum):
    """Result of a check; FAIL means that training cannot work here."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Row:
    """One fact. ``cure`` is the command that fixes it, empty if nothing is wrong."""

    status: Status
    name: str
    value: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.status:<5}{self.name:<20}{self.value}"


def checked(name: str, value: str, *, cure: str, fail: bool = False, warn: bool = False) -> Row:
    """A row that fails, warns, or is ok and needs no cure."""
    status = Status.FAIL if fail else Status.WARN if warn else Status.OK
    return Row(status, name, value, "" if status is Status.OK else cure)


def declared(pyproject: Path) -> tuple[str, list[str], list[str]]:
    """The interpreters, the packages, and those for LoRA, from the checkout or else from what pip installed."""
    if pyproject.exists():
        project = tomllib.loads(pyproject.read_text())["project"]
        return project["requires-python"], project["dependencies"], project.get("optional-dependencies", {})["lora"]
    about = importlib.metadata.metadata("deepstow")
    lines = [line.partition(";") for line in about.get_all("Requires-Dist") or []]
    extras = [need.strip() for need, _, marker in lines if marker.split("==")[-1].strip(" '\"") == "lora"]
    return about["Requires-Python"], [need.strip() for need, _, marker in lines if not marker], extras


def package_rows(pyproject: Path) -> Iterator[Row]:
    """Compare the interpreter and every dependency with what the project needs. Missing extras only warn."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    requires, dependencies, optional = declared(pyproject)
    python = platform.python_version()
    cure = "make setup PYTHON=python3.12" if pyproject.exists() else "python3.12 -m venv NEW, and install there"
    cure += f"   # needs {requires}"
    wrong = not SpecifierSet(requires).contains(python)
    yield checked("python", f"{python}  {sys.executable}", cure=cure, fail=wrong)
    for line in dependencies + optional:
        need = Requirement(line)
        try:
            value = importlib.metadata.version(need.name)
            wrong = not need.specifier.contains(value, prereleases=True)
        except importlib.metadata.PackageNotFoundError:
            value, wrong = "missing", True
        if wrong:
            value += f", needs {need.specifier}" + (", for LoRA" if line in optional else "")
        pinned = " -c constraints.txt" if pyproject.exists() else ""
        cure = f"{sys.executable} -m pip install{pinned} '{line}'"
        yield checked(need.name, value, cure=cure, fail=wrong and line not in optional, warn=wrong)


def toolchain_rows() -> Iterator[Row]:
    """Whether there are a C++ compiler and ninja, with which torch builds DeepSpeed's extensions."""
    value, path = "c++ not found", compiler()
    if path:
        process = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=10)
        value = f"{(process.stdout.splitlines() or [''])[0]}  {path}"
    yield checked("compiler", value, cure="apt-get install g++", fail=path is None)
    ninja = shutil.which("ninja")
    yield checked("ninja", ninja or "missing", cure=install("ninja"), fail=ninja is None)


def import_row(module: str) -> Row:
    """Whether the package can be imported, which a broken CUDA library prevents."""
    logging.disable(logging.WARNING)  # DeepSpeed reports its choice of accelerator while it is imported
    began_s = time.perf_counter()
    try:
        importlib.import_module(module)
    except Exception as error:  # any error of the package is the result
        cure = install(module)
        return Row(Status.FAIL, f"import {module}", f"{type(error).__name__}: {error}", cure)
    finally:
        logging.disable(logging.NOTSET)
    return Row(Status.OK, f"import {module}", human_duration(time.perf_counter() - began_s))


def device_rows(build: str, driver_text: str, names: list[str], memory: list[Memory]) -> Iterator[Row]:
    """What torch was built for (``CUDA 13.0``), NVIDIA's driver (of which /proc has a text) and each device found."""
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)", driver_text)
    driver = match and match[1]
    for_cuda = build.startswith("CUDA")
    wheel = f"{sys.executable} -m pip install --force-reinstall torch   # this wheel is for {build}, not for CUDA"
    yield checked("torch build", build, cure=wheel, warn=driver is not None and not for_cuda and not names)
    without = "not NVIDIA's" if names else "none, training runs on the CPU"
    yield Row(Status.OK, "driver", f"NVIDIA {driver}" if driver else without)
    if for_cuda and driver and not names:
        cure = f"nvidia-smi; echo CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES   # the driver must support {build}"
        yield Row(Status.FAIL, "device", "torch sees no device although there is a driver", cure)
    for index, (name, device) in enumerate(zip(names, memory, strict=True)):
        value = f"{name}  {human(device.available_bytes)} free of {human(device.total_bytes)}"
        cure = f"{'nvidia-smi' if for_cuda else 'ps aux'}   # another process holds this device"
        yield checked(f"device {index}", value, cure=cure, warn=device.available_bytes < device.total_bytes // 2)


def find_devices() -> Iterator[Row]:
    """The accelerators, one row each, or the row that says there are none."""
    import torch

    from deepstow.strategies.engine.memory import accelerator

    version, kind = Path("/proc/driver/nvidia/version"), accelerator.kind()
    driver_text = version.read_text() if version.exists() else ""
    built = torch.accelerator.current_accelerator()  # for what, whether or not there is such a device
    build = accelerator.row_of(built).software() or built.type if built else "CPU"
    devices = [torch.device(kind, index) for index in range(torch.accelerator.device_count())] if kind else []
    memory = [Memory(total, free) for free, total in map(torch.accelerator.get_memory_info, devices)]
    yield from device_rows(build, driver_text, [accelerator.name_of(device) for device in devices], memory)


def rates_row(stored: StoredRates) -> Row:
    """The rates of this machine that plans use; warns if their file is ignored."""
    if stored.ignored:
        reason, _, cure = stored.ignored.partition("; to measure again: ")
        return Row(Status.WARN, "rates", reason, cure)
    if stored.rates is None:
        return Row(Status.OK, "rates", f"not measured; {COMMAND} does, in under a minute")
    origin = f"measured {stored.date}" if stored.date else f"of a named profile; {COMMAND} measures"
    if stored.others_share > QUIET:
        origin += f" while others used {stored.others_share:.0%} of the cores"
    cure = f"{COMMAND}   # when nothing else runs"
    return checked("rates", f"{one_line(stored.rates)}  ({origin})", cure=cure, warn=stored.others_share > QUIET)


def measure_rates(path: Path, disk: list[str]) -> None:
    """Measure and store the rates, printing progress."""
    from deepstow.trainer.machine import rates

    began_s = time.perf_counter()
    try:
        with cli.file_of("--out", path):
            places = folders_of(check_folders(disk)) if disk else ()
            stored = rates.measure_and_store(path, write_line, places)
    except ValueError as error:
        raise ConfigError(f"--disk {' '.join(disk)}: {error}") from None
    write_line(f"\n{rates_row(stored)}\nstored in {path} after {human_duration(time.perf_counter() - began_s)}")


def op_row(op: Op, folder: Path, torch_folder: Path) -> Row:
    """Whether the build of one op in ``folder`` is there and made for the torch in ``torch_folder``. A build that was
    killed leaves a lock, and every later load waits for it without end.
    """
    library = folder / f"{op.name}.so"
    lock = folder / "lock"
    recipe = folder / "build.ninja"
    build = "deepstow doctor --build"
    if lock.exists():
        value = f"locked for {human_duration(time.time() - lock.stat().st_mtime)}: a build is running or was killed"
        return Row(Status.WARN, op.name, value, f"rm {lock}   # only when no build is running; loading waits for it")
    if not library.exists():
        return Row(Status.WARN, op.name, f"not built yet ({op.takes} at first use); for {op.use}", build)
    same_torch = recipe.exists() and str(torch_folder / "include") in recipe.read_text()
    if not same_torch or library.stat().st_mtime < (torch_folder / "version.py").stat().st_mtime:
        return Row(Status.WARN, op.name, f"built for another torch: rebuilt at first use ({op.takes})", build)
    return Row(Status.OK, op.name, f"built, in {folder}")


def build_op(op: Op, folder: Path) -> Row | None:
    """Compile and load one op in another process, which that may crash. Returns a row only if it fails."""
    write_line(f"     building {op.name}, {op.takes}, cached in {folder} ...")
    began_s = time.perf_counter()
    code = f"from deepspeed.ops.op_builder import {op.builder} as Builder; Builder().load(verbose=True)"
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if process.returncode == 0:
        write_line(f"     built {op.name} in {human_duration(time.perf_counter() - began_s)}")
        return None
    reason = next((line for line in process.stdout.splitlines() if "error" in line.lower()), "no message")
    return Row(Status.FAIL, op.name, f"build failed: {reason.strip()[:200]}", f'{sys.executable} -c "{code}"')


def op_rows(*, build: bool) -> Iterator[Row]:
    """Whether DeepSpeed's extensions are built; with ``build``, build those that are not."""
    import torch
    from deepspeed.git_version_info import installed_ops

    from deepstow.strategies.engine.memory import accelerator

    cache, torch_folder = cache_folder(), Path(torch.__file__).parent
    for op in (SHM, CPU_ADAM) if accelerator.kind() is None else (CPU_ADAM, FUSED_ADAM):
        if installed_ops.get(op.name):
            yield Row(Status.OK, op.name, "installed with DeepSpeed")
            continue
        folder = cache / op.name
        row = op_row(op, folder, torch_folder)
        if build and row.status is Status.WARN and not (folder / "lock").exists():
            row = build_op(op, folder) or op_row(op, folder, torch_folder)
        yield row


def room_rows(folder: Path) -> Iterator[Row]:
    """Cores, memory, open files, and disk space where the run ``folder`` will be."""
    physical, usable = cores()
    yield Row(Status.OK, "cores", f"{usable} usable, {physical} physical")
    host, shm = host_memory(), Path("/dev/shm")
    value = f"{human(host.available_bytes)} free of {human(host.total_bytes)}"
    cure = "ps aux --sort=-rss | head   # or raise the container's memory limit; offload lives in host memory"
    yield checked("host memory", value, cure=cure, warn=host.available_bytes < 4 * GIB)
    free_bytes = disk_free_bytes(shm) if shm.is_dir() else 0  # ranks and data loaders pass tensors through it
    cure = "mount -o remount,size=8G /dev/shm   # in Docker: docker run --shm-size=8g ..."
    yield checked("/dev/shm", f"{human(free_bytes)} free", cure=cure, warn=free_bytes < GIB)
    free_bytes = disk_free_bytes(folder)
    cure, low = f"df -h {folder}   # or set training.output_dir to a larger disk", free_bytes < 20 * GIB
    yield checked("disk", f"{human(free_bytes)} free for {folder}", cure=cure, fail=free_bytes < GIB, warn=low)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = files == resource.RLIM_INFINITY
    value = "unlimited" if unlimited else f"{files:,}"
    yield checked("open files", value, cure="ulimit -n 4096", warn=not unlimited and files < 4096)
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield Row(Status.OK, "locked memory", "unlimited" if memlock == resource.RLIM_INFINITY else human(memlock))


def examine(folder: Path, *, build: bool) -> Iterator[Row]:
    """All rows in order, each as soon as it is known. Checks that need a package that does not load are skipped."""
    needed = [import_row(module) for module in ("packaging", "psutil")]  # by the doctor itself
    if failed := [row for row in needed if row.status is Status.FAIL]:
        yield from failed
        return
    settle_environment(Ranks(), cores()[1])  # ninja and torch's builds are looked for as in a run
    yield from package_rows(PROJECT)
    yield from toolchain_rows()
    loads = {}
    for module in ("torch", "deepspeed", "transformers"):
        row = import_row(module)
        loads[module] = row.status is Status.OK
        yield row
    if loads["torch"]:
        yield from find_devices()
        yield from op_rows(build=build) if loads["deepspeed"] else ()
    yield from room_rows(folder)
    if loads["torch"]:
        yield rates_row(known_rates(probe()))


def summary(rows: list[Row]) -> list[str]:
    """The last lines: what must be fixed, then what would help."""
    failed, warned = (
        [f"  {row.name}: {row.cure}" for row in rows if row.status is status] for status in (Status.FAIL, Status.WARN)
    )
    lines = [f"not ready, to fix: {len(failed)}", *failed] if failed else ["ready"]
    return [*lines, "would help:", *warned] if warned else lines


def main(argv: list[str] | None = None) -> int:
    """The whole command. Returns the exit code."""
    parser = cli.explained(cli.Parser(), "doctor", __doc__)
    parser.add_argument("--build", action="store_true", help="compile DeepSpeed's missing extensions now")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows to this file")
    parser.add_argument("--rates", action="store_true", help="measure how fast this machine is, in under a minute")
    parser.add_argument("--out", type=Path, metavar="PATH", help=f"with --rates: the file (default {stored_at()})")
    told = "with --rates: also the disk, for optimizer state; several folders: drives that have parts of it"
    parser.add_argument("--disk", nargs="+", default=[], metavar="FOLDER", help=told)
    args = parser.parse_args(argv)
    if args.rates:
        if args.build or args.json:
            parser.error("--rates measures and does nothing else; leave out --build and --json")
        return cli.answered(lambda: measure_rates(args.out or stored_at(), args.disk))
    if args.out or args.disk:
        parser.error(f"{'--out' if args.out else '--disk'} goes with --rates")
    return cli.answered(lambda: check(args.json, build=args.build))


def check(path: Path | None, *, build: bool) -> int:
    """Print the rows and what they come to, and write them to ``path``; the exit code."""
    cli.refuse_paths(json=path)
    rows = []
    for row in examine(Path("runs"), build=build):
        write_line(str(row))
        rows.append(row)
    write_line("\n" + "\n".join(summary(rows)))
    ready = all(row.status is not Status.FAIL for row in rows)
    if path is not None:
        path.write_text(json.dumps({"ready": ready, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    return ExitCode.FINISHED if ready else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
