"""Benchmarks against peers: the same work, in turn, each contender in a fresh process.

work.py        what is trained and by whom, as values; no torch
contenders.py  plain torch, this project's memory engine, ways to keep less for backward
peers.py       DeepSpeed, FSDP2, torchao, each at its best settings
processes.py   rounds, fresh processes, progress, failures
child.py       one run in its own process: train, time, measure memory
record.py      a question asked; the folder under benchmarks/records/ and its table
linear.py      routes of linear layers, measured in one process
"""
