"""python run.py ROWS [packed]: memory of preparing that many short rows of ids, and of reading batches of them."""

import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, RandomSampler

from trainer.config.sections import DataSection
from trainer.data import prepare, tokenizer

rows, packing = int(sys.argv[1]), "packed" in sys.argv
folder = Path(tempfile.mkdtemp(prefix="many-rows-"))
with (folder / "d.jsonl").open("w") as file:
    for i in range(rows):
        file.write('{"input_ids": [%s]}\n' % ", ".join(map(str, [i % 500, i // 500 % 500, i // 250000, *[9] * (i % 8)])))
words = tokenizer.trained(512, folder, ["some words of it row of many " * 20] * 20)


def own() -> float:
    """MiB of this process that are in no file."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


most = [0.0]


def watch() -> None:
    while True:
        most[0] = max(most[0], own())
        time.sleep(0.02)


threading.Thread(target=watch, daemon=True).start()
before, start = own(), time.monotonic()
section = DataSection(path=str(folder / "d.jsonl"), max_length=128, packing=packing)
found = prepare.prepare(section, words, 512, 0, folder / "prepared", lambda line: None)
took, peak = time.monotonic() - start, most[0]
most[0] = 0.0
loader = DataLoader(found.train, 8, sampler=RandomSampler(found.train, generator=torch.Generator().manual_seed(0)), collate_fn=len)
for number, _ in enumerate(loader):
    if number == 5000:
        break
print(f"| {rows:,} | {'yes' if packing else 'no'} | {len(found.train):,} | {before:.0f} | {peak:.0f} | {own():.0f} | {took:.0f} |", flush=True)
shutil.rmtree(folder)
