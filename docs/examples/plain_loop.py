"""An ordinary PyTorch loop with a model that does not fit into the memory it is given.

python -m docs.examples.plain_loop
"""

import pydoc_data.topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deepstow import AdamW, plan_for, stow
from deepstow.strategies.report.plan_table import table

ROWS, TOKENS, STEPS = 4, 64, 20


def main() -> list[float]:
    """Train on the help texts that come with Python, byte by byte; the losses."""
    torch.manual_seed(0)
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=688, num_hidden_layers=8, num_attention_heads=4)
    )
    # Weights, gradients and AdamW's state are over 90 MiB, and backward keeps another 40. There are 60.
    plan = plan_for(model, gpu_memory="60MiB", batch=(ROWS, TOKENS), max_grad_norm=1.0)
    print(table(plan))
    optimizer = stow(model, plan, rule=AdamW(lr=1e-3, weight_decay=0.1))
    losses = []
    for step in range(STEPS):
        starts = torch.randint(len(data) - TOKENS, (ROWS,)).tolist()
        batch = torch.stack([data[start : start + TOKENS] for start in starts]).to(optimizer.engine.device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step:2}  loss {losses[-1]:.3f}  gradient norm {norm.item():.2f}")
    return losses


if __name__ == "__main__":
    main()
