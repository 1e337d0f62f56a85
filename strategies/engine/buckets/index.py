"""Which bucket has a parameter."""

from __future__ import annotations

from deepstow.strategies.engine.buckets.bucket_state import BucketState


class BucketOf(dict[int, tuple[BucketState, int]]):
    """The bucket of each parameter, by the parameter's id, and its index in the bucket."""

    def __missing__(self, param: int) -> tuple[BucketState, int]:
        raise RuntimeError(
            "a parameter of this model is not the one that was stowed: model.to(), to_empty() or an assignment has "
            "put another in its place; close() the optimizer before such changes"
        )
