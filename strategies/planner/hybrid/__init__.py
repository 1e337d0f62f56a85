"""Degrees of a job over many ranks: pipeline stages, tensor and data parallelism, and what goes with them."""
