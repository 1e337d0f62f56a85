"""The memory engine: carries out a layout. Its public face is ``stow``; see ``optimizer.py``."""

from strategies.runtime.optimizer import StowOptimizer, stow, stowed_by
from strategies.runtime.rules import SGD, AdamW, Rule
from strategies.runtime.verdicts import NonFiniteError

__all__ = ["SGD", "AdamW", "NonFiniteError", "Rule", "StowOptimizer", "stow", "stowed_by"]
