"""Eager and compiled blocks, plain and streamed, in one process, rounds interleaved: seconds of the process and of the wall."""
import statistics, sys, time
import torch
from benchmarks.harness import child, work
from strategies.engine import AdamW, stow
from strategies.engine.forward.compiled import compile_blocks
from trainer.planning.plan_for import plan_for

torch.set_num_threads(1)
name, steps, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
todo = work.work(name, rows=1, length=256)
batches = child.tokens(todo, torch.device("cpu"))
def plain(model):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **todo.adamw)
    return optimizer, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
def streamed(model):
    plan = plan_for(model, max_grad_norm=1.0, site="host", weights="streamed")
    optimizer = stow(model, plan, rule=AdamW(**todo.adamw))
    return optimizer, lambda: optimizer.clip_grad_norm_(1.0)
made = {}
for label, how, compiled in (("plain, eager", plain, False), ("plain, compiled", plain, True), ("streamed, eager", streamed, False), ("streamed, compiled", streamed, True)):
    model = child.llama(todo)
    if compiled:
        compile_blocks(model)
    made[label] = (model, *how(model))
def step(label, index):
    model, optimizer, clip = made[label]
    loss = model(**batches[index % len(batches)][0]).loss
    loss.backward(); clip(); optimizer.step(); optimizer.zero_grad()
    return loss.item()
losses = {label: [] for label in made}
for label in made:
    began = time.process_time()
    losses[label] += [step(label, index) for index in range(2)]
    print("warm", label, f"{time.process_time() - began:.1f} s of the process", flush=True)
found = {label: [] for label in made}
for turn in range(rounds):
    for label in made:
        began, wall = time.process_time(), time.perf_counter()
        for index in range(steps):
            losses[label].append(step(label, 2 + turn * steps + index))
        if hasattr(made[label][1], "drain"): made[label][1].drain()
        found[label].append(((time.process_time() - began) / steps, (time.perf_counter() - wall) / steps))
        print(turn, label, *(f"{value:.3f}" for value in found[label][-1]), flush=True)
base = statistics.median(each[0] for each in found["plain, eager"])
for label, each in found.items():
    cpu = [one[0] for one in each]
    print(f"{label}: {statistics.median(cpu):.3f} s ({min(cpu):.3f}-{max(cpu):.3f}) of the process per step, {256/statistics.median(cpu):.0f} tokens/s of it, {base/statistics.median(cpu):.3f} of plain eager; wall {statistics.median(one[1] for one in each):.3f} s")
print("compiled bits equal:", losses["plain, compiled"] == losses["streamed, compiled"], "eager bits equal:", losses["plain, eager"] == losses["streamed, eager"], "compiled equals eager:", losses["plain, compiled"] == losses["plain, eager"])
