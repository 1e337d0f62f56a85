"""Updates ahead: by the CPU under backward, before the norm is known, into memory beside the present state.

They are kept where the norm turns out to multiply nothing, else the updates are made as ever; the engine says how
(``engine/buckets/jobs.py``). They need the state twice, and are of no use where the device is the CPU itself.
"""

from __future__ import annotations

from dataclasses import replace

from deepstow.strategies.core.layout import Bucket, Layout, Site


def may_update_ahead(bucket: Bucket, layout: Layout) -> bool:
    """Whether there can be other state beside that of ``bucket``: of one rank, in memory, and with a master that is not
    the copy from which weights are fetched.
    """
    own_master = bucket.site is Site.HOST and (bucket.mixed or bucket.resident)
    alone = bucket.ways == 1 and not bucket.on_disk
    return own_master and alone and layout.moments_as == "fp32" and not layout.in_backward


def beside_bytes(layout: Layout) -> int:
    """Of the host, for state that is made ahead."""
    return sum(4 * (layout.moments + 1) * bucket.share for bucket in layout.buckets if bucket.updates_ahead)


def waiting(layout: Layout) -> Layout:
    """``layout``, with all updates after the norm."""
    return replace(layout, buckets=tuple(replace(bucket, updates_ahead=False) for bucket in layout.buckets))
