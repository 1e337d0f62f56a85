"""Benchmarks against peers: the same work, in turn, each contender in a fresh process; see ``benchmarks/README.md``."""
