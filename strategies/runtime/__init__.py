"""The memory engine: carries out a layout. Its public face is ``stow``; see ``optimizer.py``."""

from strategies.runtime.optimizer import StowOptimizer, stow
from strategies.runtime.rules import SGD, AdamW, Rule

__all__ = ["SGD", "AdamW", "Rule", "StowOptimizer", "stow"]
