"""Benchmarks against peers: the same work, in turn, each subject in a fresh process.

work.py      what is trained, and the names of who trains it: no torch
contenders.py  plain torch, and this project's memory engine
recompute.py ways to keep less for backward
peers.py     DeepSpeed, FSDP2, torchao, each at its best settings
compare.py   a theme from its subjects to its record
child.py     one run in its own process: train, time, measure memory
harness.py   the processes: rounds, progress, failures
record.py    medians, the table, the folder under benchmarks/records/
"""
