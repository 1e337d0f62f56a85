"""Benchmarks: measured against peers, simulated, and checks of the runtime's order."""
