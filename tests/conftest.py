"""Random tests draw the same examples on every run, so that what passes here passes elsewhere."""

import os

import torch
from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.load_profile("same")

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share the cores
    torch.set_num_threads(1)
