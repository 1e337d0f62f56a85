"""Ranks and process groups, processes started here, and DeepSpeed's compiled extensions."""
