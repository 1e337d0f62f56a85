"""The bound of each of the 200 instances beside the best step that is known for it; CPU seconds per bound."""

import json
import time
from pathlib import Path
from statistics import mean, median

from benchmarks.placements import instance
from strategies.planner.places import Places
from strategies.planner.site_search import SiteSearch

RECORD = Path("benchmarks/records/2026-11-25_placements/two-hundred.jsonl")
known = {one["seed"]: one["best_known"] for one in map(json.loads, RECORD.read_text().splitlines())}
ratios, took = [], 0.0
for seed in range(200):
    name, facts, request = instance(seed)
    search = SiteSearch(facts, request, Places(facts, request), request.host_bytes)
    began = time.process_time()
    bound = search.bound(request.device_bytes)
    took += time.process_time() - began
    ratios.append(known[seed] / bound)
    print(seed, name, f"{ratios[-1]:.4f}")
near = [sum(ratio <= 1 + part for ratio in ratios) for part in (0.01, 0.02, 0.1)]
print(f"mean {mean(ratios):.4f} median {median(ratios):.4f} least {min(ratios):.4f} most {max(ratios):.4f}")
print(f"within 1, 2, 10 %: {near}; CPU seconds per bound {took / 200:.4f}")
