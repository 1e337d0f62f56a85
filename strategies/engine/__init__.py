"""The memory engine: trains a model in the memory of a layout. Its interface is ``stow``; see ``optimizer.py``."""

from strategies.engine.optimizer import StowOptimizer, stow, stowed_by
from strategies.engine.updating.clipping import NonFiniteError
from strategies.engine.updating.optim import SGD, AdamW, UpdateRule

__all__ = ["SGD", "AdamW", "NonFiniteError", "StowOptimizer", "UpdateRule", "stow", "stowed_by"]
