"""Strategies: one file each, one frozen options object each, found by file name."""
