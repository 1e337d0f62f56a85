"""Bytes that torch's pipeline sets aside on one rank, besides the state of the rank's part. Pure.

``strategies/pipeline.py`` makes its decisions from these, and the search over degrees (``hybrid/``) its account: both
count the same bytes.
"""

from __future__ import annotations

from deepstow.strategies.core.facts import RunFacts

MESSAGE_BYTES = 25 << 20  # of gradients to the other copies, as torch's data parallelism sends them


def boundary_bytes(run: RunFacts) -> int:
    """Of one micro-batch's hidden states, which stages send to each other."""
    return run.micro_batch * run.sequence * run.hidden_size * run.precision.element_bytes


def received_bytes(run: RunFacts, borders: int, micro_batches: int) -> int:
    """Of the tensors that come from other stages over ``borders`` of the rank's parts; each micro-batch has its own."""
    return borders * micro_batches * boundary_bytes(run)


def message_bytes(run: RunFacts, num_trainable: int, copies: int, *, shared: bool = False) -> int:
    """Of what gradients are copied into to be summed over the ``copies`` of the model; none if there is one. Where they
    have ``shared`` the optimizer's state, messages of new weights come later, and beside each the rank's part of it.

    A message is closed when it is full, so it can be longer by the largest gradient.
    """
    if copies == 1:
        return 0
    whole = min(run.trained_bytes * num_trainable, MESSAGE_BYTES + run.trained_bytes * run.largest_param)
    return whole + -(-whole // copies) * shared
