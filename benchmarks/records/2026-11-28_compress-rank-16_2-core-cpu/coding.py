"""CPU seconds of a step of the quickstart's model with PowerSGD and int8, in one process that exchanges with itself.

python benchmarks/records/2026-11-28_compress-rank-16_2-core-cpu/coding.py
"""

import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from strategies.backends.compressed import Compressed
from strategies.core.compression import Compression

SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 2048}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "tie_word_embeddings": True}
CASES = [None, *(Compression("powersgd", 1, rank, 2) for rank in (4, 8, 12, 16, 24)), Compression("int8", 1, 1, 2)]


def seconds(how: Compression | None) -> float:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    ranks = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if how is not None:
        exchange = Compressed(how)
        exchange.follow(optimizer, model)
        exchange.hang_on(ranks)
    took, words = [], torch.randint(0, 2048, (1, 128))
    for _ in range(9):
        began = time.process_time()
        ranks(input_ids=words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(time.process_time() - began)
    return statistics.median(took[4:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29777", rank=0, world_size=1)
    for turn in range(2):
        for case in CASES:
            print(turn, "none" if case is None else case.words, f"{seconds(case):.3f}", flush=True)
