"""Strategies: one file each, one frozen options object each, found by file name."""

if __name__ != "deepstow.strategies":  # a second copy of each module otherwise
    raise ImportError("import deepstow.strategies")
