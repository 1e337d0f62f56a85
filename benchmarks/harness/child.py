"""One run of one contender, alone in this process, so that peak memory is the contender's own.

    python -m deepstow.benchmarks.harness.child < request.json

The request names the work, the contender and the folder for the result. A failure is a result, too. Over ranks there is
one process and one result of each; the environment says which rank this is, as under a launcher.

The clock starts after the warm-up steps and stops after the last step, both times when deferred updates are finished
and the device is idle, so the time contains as many updates as steps. Single steps are stamped without waiting for the
device: on an accelerator a stamp says when the host was done. Memory is measured after the clock, by micro-batches
without an update, whose gradients the contender then discards.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
from torch import Tensor

from deepstow.benchmarks.harness.contenders import Trained, Unavailable
from deepstow.benchmarks.harness.work import OURS, Contender, Work
from deepstow.strategies.engine.memory import accelerator
from deepstow.trainer.distributed.ranks import from_environment, process_group
from deepstow.trainer.machine.probe import cores, others_cpu_s, probe, status_bytes
from deepstow.trainer.machine.profiles import known_rates, one_line
from deepstow.trainer.machine.repeated_sums import repeated_sums
from deepstow.trainer.run.callbacks.plan_check import count_saved

NUM_BATCHES = 2  # optimizer steps before the tokens repeat: the loss then falls, and a wrong update shows in it
NOISE_LENGTH = 4_194_301  # a prime, so that rows of a matrix differ
TIMEOUT_S = 600
PACKAGES = ("torch", "transformers", "deepspeed", "torchao")
Batches = Sequence[Sequence[Mapping[str, Tensor]]]  # the micro-batches of each optimizer step
Then = Callable[[dict[str, Any], Trained, Batches], None]


def main() -> int:
    """Do what the request says. The result goes to a file, because libraries print to stdout."""
    request, ranks = json.load(sys.stdin), from_environment()
    out = Path(request["out"]) / f"result-{ranks.rank}.json"
    if "contender" not in request:
        out.write_text(json.dumps(surroundings()))
        return 0
    work = Work(**request["work"])
    try:
        with process_group(ranks, TIMEOUT_S, single=False):
            result = run(work, Contender(**request["contender"]))
    except Exception as error:
        traceback.print_exc()
        result = {"failed": reason(error)}
    out.write_text(json.dumps(result))
    return int("failed" in result)


def surroundings() -> dict[str, Any]:
    """This machine with its measured rates ("": there are none), and the versions of the compared packages."""
    machine, versions = probe(), {"python": sys.version.split()[0]}
    versions |= {name: version(name) if find_spec(name) else "not installed" for name in PACKAGES}
    stored = known_rates(machine)
    measured = stored.rates is not None and stored.rates.origin == "measured"
    rates = one_line(stored.rates) if measured and stored.rates else ""
    return {"hardware": asdict(machine), "versions": versions, "rates": rates, "rates_ignored": stored.ignored}


def reason(error: Exception) -> str:
    """The error as one line."""
    text = " ".join(str(error).split("\n\n")[0].split())[:200]
    return text if isinstance(error, Unavailable) else f"{type(error).__name__}: {text}"


def run(work: Work, contender: Contender, then: Then = lambda *_: None) -> dict[str, Any]:
    """Train and measure; returns everything that the record has about this run, which ``then`` gets as well, with what
    was trained, before that is closed. Every maker has the option ``repeats``: only kernels whose sums have one order.
    """
    options = {name: value for name, value in contender.options.items() if name != "repeats"}
    with repeated_sums(wanted=contender.options.get("repeats", False)):
        return measured(work, replace(contender, options=options), then)


def measured(work: Work, contender: Contender, then: Then) -> dict[str, Any]:
    """``run``, with the kernels that are selected."""
    module, name = contender.maker.split(":")
    imported = importlib.import_module(f"deepstow.benchmarks.harness.{module}")
    device, options = accelerator.current() or torch.device("cpu"), dict(contender.options)
    row = accelerator.row_of(device)
    row.expand_segments(device)
    if contender.gpu_memory is not None and device.type != "cpu":
        row.limit(device, contender.gpu_memory)
        options |= {"gpu_memory": contender.gpu_memory} if contender.maker == OURS else {}
    batches = tokens(work, device)
    before_bytes = status_bytes("VmRSS")
    began_s = time.perf_counter()
    model = llama(work)
    built_s = time.perf_counter() - began_s
    trained: Trained = getattr(imported, name)(work, model, device, **options)
    result: dict[str, Any] = {"settings": dict(trained.settings), "notes": list(trained.notes)}
    result["gpu_memory"] = contender.gpu_memory
    result |= {"built_s": built_s, "setup_s": time.perf_counter() - began_s}
    gc.collect()
    trained.model.train()
    if device.type != "cpu":
        result["setup_device_peak_bytes"] = torch.accelerator.max_memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
    result |= timed(work, trained, batches, device)
    result |= {"host_peak_bytes": status_bytes("VmHWM"), "host_before_bytes": before_bytes}
    planned = result["planned_device_bytes"] = trained.planned_device_bytes
    if device.type != "cpu":
        free, total = torch.accelerator.get_memory_info()
        result |= {
            "device_peak_bytes": torch.accelerator.max_memory_allocated(),
            "reserved_peak_bytes": torch.accelerator.max_memory_reserved(),
            "context_bytes": total - free - torch.accelerator.memory_reserved(),
        }
    elif planned is not None:
        with count_saved(trained.model) as saved:  # in place of an allocator's figure
            trained.model(**batches[0][0])
        result["saved_bytes"] = sum(saved.values())
        result["device_peak_bytes"] = planned + result["saved_bytes"]
    result["backward_peak_bytes"] = backward_peak_bytes(trained, batches[0][0], device)
    trained.discard(batches[0][0])
    then(result, trained, batches)
    trained.close()
    return result


def llama(work: Work, *, filled: bool = True) -> Any:
    """Build the model on the CPU, with the same random weights in every process; not ``filled``: without touching any.

    All weights are cut from one draw, because drawing billions of numbers would take longer than the timed steps.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.initialization import no_init_weights

    shape = work.shape
    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.heads, vocab_size=shape.vocab,
        max_position_embeddings=max(2048, work.length), use_cache=False, attention_dropout=work.dropout,
    )  # fmt: skip
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[work.dtype]
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=work.attention)
    generator = torch.Generator().manual_seed(work.seed)
    noise = torch.randn(NOISE_LENGTH, generator=generator).mul_(config.initializer_range).to(dtype)
    for index, param in enumerate(model.parameters() if filled else ()):
        if param.dim() == 1:
            param.data.fill_(1.0)
            continue
        shifted = noise.roll(-7919 * index)
        for piece in param.data.view(-1).split(NOISE_LENGTH):
            piece.copy_(shifted[: piece.numel()])
    if work.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def step(trained: Trained, micro_batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """An optimizer step, whose update may be deferred; its loss."""
    losses = [trained.micro_batch(batch) for batch in micro_batches]
    trained.update()
    return torch.stack(losses).mean()


def tokens(work: Work, device: torch.device) -> list[list[dict[str, Tensor]]]:
    """The micro-batches of each optimizer step, the same in every process of a rank."""
    generator = torch.Generator().manual_seed(work.seed + 1)
    size = (NUM_BATCHES, work.accumulation, work.ranks, work.rows, work.length)
    ids = torch.randint(work.shape.vocab, size, generator=generator)[:, :, from_environment().rank].to(device)
    positions = {}
    if work.documents > 1:
        places = torch.arange(work.length, device=device) % -(-work.length // work.documents)
        positions["position_ids"] = places.expand(work.rows, -1)
    return [[{"input_ids": micro, "labels": micro, **positions} for micro in step] for step in ids]


def summed(numbers: Sequence[Tensor | float], work: Work) -> list[float]:
    """Each of ``numbers`` summed over the ranks."""
    sums = torch.tensor([float(number) for number in numbers], dtype=torch.float64)
    if work.ranks > 1:
        sums = sums.to(accelerator.current() or "cpu")
        torch.distributed.all_reduce(sums)
    return sums.tolist()


def timed(work: Work, trained: Trained, batches: Batches, device: torch.device) -> dict[str, Any]:
    """Run the warm-up and the measured steps; the module docstring says when the clock runs."""

    def settle() -> float:
        """Wait until everything is done; the time then."""
        trained.drain()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        if work.ranks > 1:
            torch.distributed.barrier()
        return time.perf_counter()

    graphs = torch._dynamo.utils.counters["stats"]
    torch.manual_seed(work.seed)  # of dropout
    losses = [step(trained, batches[index % len(batches)]) for index in range(work.warmup)]
    stamps = [settle()]
    others_s = others_cpu_s()
    own_s = time.process_time()
    compiled = graphs["unique_graphs"]
    for index in range(work.warmup, work.warmup + work.steps):
        losses.append(step(trained, batches[index % len(batches)]))
        stamps.append(time.perf_counter())
    seconds = settle() - stamps[0]
    others_s, own_s = others_cpu_s() - others_s, time.process_time() - own_s
    means = [loss / work.ranks for loss in summed(losses, work)]
    others_s -= summed([own_s], work)[0] - own_s  # the other ranks are not others
    return {
        "tokens_per_s": work.tokens * work.ranks * work.steps / seconds,
        "measured_s": seconds,
        "step_s": [after - before for before, after in pairwise(stamps)],
        "losses": means,
        "loss": means[-1],
        "threads": torch.get_num_threads(),
        "compiled_later": graphs["unique_graphs"] - compiled,
        "others_share": max(0.0, others_s / (seconds * cores()[1])),
    }


def backward_peak_bytes(trained: Trained, batch: Mapping[str, Tensor], device: torch.device) -> int:
    """Peak memory of forward and backward of a micro-batch beyond what was allocated before, gradients included.

    On a CPU: resident memory, after the C library has returned freed memory to the system.
    """
    trained.micro_batch(batch)  # allocates the gradients
    trained.expect_another()
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        trained.micro_batch(batch)
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    trained.micro_batch(batch)
    return status_bytes("VmHWM") - before


if __name__ == "__main__":
    sys.exit(main())
