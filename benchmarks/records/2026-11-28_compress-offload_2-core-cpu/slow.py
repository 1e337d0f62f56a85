"""Two ranks on two machines made of network namespaces; launch/train.py with offload, with and without local steps."""
import json, os, re, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, "/work/main")
from benchmarks.namespaces import machines
OUT = Path(sys.argv[2]); OUT.mkdir(parents=True, exist_ok=True)
WAYS = {
    "every step": {},
    "every step, bf16": None,
    "powersgd, rank 32, start 10": ["strategies.collectives.compress=powersgd","strategies.collectives.rank=32"],
    "topk, density 0.05": ["strategies.collectives.compress=topk","strategies.collectives.density=0.05"],
    "powersgd, spans": ["strategies.collectives.compress=powersgd","strategies.collectives.rank=32","strategies.zero.stage=2"],
    "spans": ["strategies.zero.stage=2"],
}
del WAYS["every step, bf16"]
steps = int(sys.argv[3])
with machines(float(sys.argv[1]), 10_000, 2) as names:
    for number, (way, more) in enumerate(WAYS.items()):
        folder = OUT / f"run{number}"
        ranks = []
        for rank, name in enumerate(names):
            env = os.environ | {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(29600 + number), "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "stow", "OMP_NUM_THREADS": "1"}
            command = ["ip", "netns", "exec", name, sys.executable, "/work/main/launch/train.py", "--config", sys.argv[4], f"training.output_dir={folder}", f"training.max_steps={steps}", *(more or [])]
            ranks.append(subprocess.Popen(command, env=env, stdout=(OUT / f"{number}-{rank}.log").open("w"), stderr=subprocess.STDOUT))
        codes = [each.wait() for each in ranks]
        text = (OUT / f"{number}-0.log").read_text()
        print(json.dumps({"way": way, "codes": codes, "evals": re.findall(r"eval at step (\d+): loss ([\d.]+)  perplexity ([\d.,]+)", text), "end": re.findall(r"finished at step .*", text)}), flush=True)
