"""Ranks: who am I, process groups that close, processes started here, compiled extensions."""
