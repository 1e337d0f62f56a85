"""Tensors: what the parameters and gradients of a stowed model are to everybody else."""
