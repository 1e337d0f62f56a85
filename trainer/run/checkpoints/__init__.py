"""Checkpoints: what one is, how it is written, and what a run goes on from."""
