"""Tests that need a CUDA device, a real one or a fake one."""
