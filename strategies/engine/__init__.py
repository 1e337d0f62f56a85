"""The memory engine: trains a model in the memory of a layout. Its interface is ``stow``; see ``optimizer.py``."""

from deepstow.strategies.engine.optimizer import StowOptimizer, stow, stowed_by
from deepstow.strategies.engine.updating.clipping import NonFiniteError
from deepstow.strategies.engine.updating.optim import SGD, AdamW, UpdateRule

__all__ = ["SGD", "AdamW", "NonFiniteError", "StowOptimizer", "UpdateRule", "stow", "stowed_by"]
