"""What processes of ``test_saving.py`` do: they measure their memory while they save or load."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strategies.engine import AdamW, StowOptimizer, stow
from tests.helpers.engine import plan_of

CONFIG = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 12, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256, "tie_word_embeddings": True,
}  # fmt: skip


def memory(name: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def begin(site: str) -> StowOptimizer:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIG))
    plan: Any = plan_of(model, site=site, weights="travelling" if site == "host" else "resident")
    optimizer = stow(model, plan, rule=AdamW(), device="cpu")
    ids = torch.arange(32)[None]
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.drain()
    return optimizer


def main(out: Path, what: str, folder: Path, site: str) -> None:
    """Do ``what`` in ``folder``; what is printed is in the file ``out``."""
    for number in (1, 2):
        os.dup2(os.open(out, os.O_CREAT | os.O_APPEND | os.O_WRONLY), number)
    optimizer = begin(site)
    if what != "save":
        optimizer.save(folder)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    before = memory("VmRSS")
    getattr(optimizer, what)(folder)
    buckets = optimizer.engine.layout.buckets
    print(
        json.dumps(
            {
                "growth": memory("VmHWM") - before,
                "bucket": max(8 * bucket.num_elements for bucket in buckets),
                "state": sum(8 * bucket.num_elements for bucket in buckets),
            }
        ),
        flush=True,
    )
