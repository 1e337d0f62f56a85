"""Planned and measured memory of one step on a packed row: python measure.py ATTENTION LENGTH DOCUMENTS."""

import ctypes
import sys
import time
from pathlib import Path

import torch

from strategies.core.facts import Tier
from strategies.core.sizes import human
from strategies.engine import AdamW, stow
from tests.helpers.tiny import run_config
from trainer.data.collate import Collator
from trainer.dist.ranks import Ranks
from trainer.machine.probe import probe, status_bytes
from trainer.model.build import build, load_config
from trainer.model.params import decay_groups
from trainer.planning.from_config import plan_of

attention, length, documents = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
sizes |= {"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": length}
options = {"model": {"attn_implementation": attention}, "data": {"packing": True, "max_length": length}}
config = run_config(sizes, strategies={"offload": {}}, per_device_train_batch_size=1, **options)
plan = plan_of(config, Ranks(), probe())
planned = plan.peak(Tier.DEVICE) - plan.addresses.num_bytes(Tier.DEVICE)  # what a step needs beside the arena
print(f"{attention}, {documents} documents in {length:,} tokens: planned {human(planned)} beside the arena", flush=True)
if "--plan" in sys.argv:
    sys.exit()
model = build(config.model, load_config(config.model, 512), seed=0, partitioned=False).train()
group_of = decay_groups(model)
groups = [{"params": [param for name, param in model.named_parameters() if group_of[name] == number]} for number in (0, 1)]
optimizer = stow(model, plan, groups, AdamW(lr=1e-3))
generator = torch.Generator().manual_seed(0)
cuts = torch.randperm(length - 2, generator=generator)[: documents - 1].sort().values.tolist()
pieces = [b - a for a, b in zip([0, *(cut + 1 for cut in cuts)], [*(cut + 1 for cut in cuts), length], strict=True)]
ids = torch.randint(512, (length,), generator=generator)
positions = torch.cat([torch.arange(piece) for piece in pieces])
batch = Collator(0, packing=True)([{"input_ids": ids, "labels": ids, "position_ids": positions}])
for step in range(3):
    ctypes.CDLL(None).malloc_trim(0)
    before, began = status_bytes("VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    loss = model(**batch).loss
    loss.backward()
    measured, seconds = status_bytes("VmHWM") - before, time.process_time() - began
    optimizer.clip_grad_norm_(1.0), optimizer.step(), optimizer.zero_grad()
    print(f"step {step}: {human(measured)}, {measured / planned:.3f} of planned; loss {loss.item():.4f}; {seconds:.1f} s of the process", flush=True)
