"""Benchmarks: measured against peers, simulated, and checks of the runtime's order."""

if __name__ != "deepstow.benchmarks":  # a second copy of each module otherwise
    raise ImportError("import deepstow.benchmarks")
