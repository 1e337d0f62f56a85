"""Sizes as people write and read them: "20GiB", a share of the memory such as 0.8, a number of bytes, '1.5 GiB'."""

from __future__ import annotations

import math
import re
from decimal import Decimal

AUTO = "auto"
SHARE = 0.9  # of a memory if no size is given: the rest is for the context, libraries and fragmentation
# What a CUDA device holds beside planned tensors: the context (about 0.5 GiB on H100 and H200); cuBLAS's workspaces, of
# 32 MiB on sm_90, one for each thread that multiplies: forward's and autograd's; scratch of kernels, and what torch's
# allocator rounds up.
CONTEXT_BYTES = 512 << 20
OVERHEAD_BYTES = {"cuda": CONTEXT_BYTES + 2 * (32 << 20) + (448 << 20)}  # by torch's name of the kind of device
SMALLEST = 1024  # a smaller number is a mistake: 20 is not 20 bytes of memory
LARGEST = 1 << 63  # bytes: no machine addresses as many
UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_bytes(text: str) -> int:
    """Bytes of "20GiB", "512 MiB", "1.5GB" or "4096". Raise ValueError, with words that follow a config key."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or (match[2] or "b").lower() not in UNITS:
        raise ValueError("must be a size, as in 20GiB, 512MiB or 20GB")
    return meant(int(Decimal(match[1]) * UNITS[(match[2] or "b").lower()]))


def meant(num_bytes: int) -> int:
    """``num_bytes``. Raise ValueError if it is too small to be meant, or more than any machine has."""
    if num_bytes < SMALLEST:
        raise ValueError(f"that is {num_bytes} bytes; write the unit, as in 20GiB")
    if num_bytes >= LARGEST:
        raise ValueError("no machine has as many bytes; must be below 8388608TiB, as in 20GiB")
    return num_bytes


def human(num_bytes: float) -> str:
    """``1610612736`` -> ``'1.5 GiB'``: binary units; whole bytes have no decimals, TiB have two."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1023.95:  # 1023.95 would print as 1024.0 of this unit
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def check_size(value: str) -> str:
    """``value``, if it is a size. Raise ValueError like ``parse_bytes``."""
    parse_bytes(value)
    return value


def check_size_or_auto(value: str) -> str:
    """``value``, if it is "auto" or a size. Raise ValueError like ``parse_bytes``."""
    return value if value == AUTO else check_size(value)


def check_budget(value: str | float) -> str | float:
    """``value``, if it is "auto", a size, bytes, or a share between 0 and 1. Raise ValueError like ``parse_bytes``."""
    if isinstance(value, str):
        if value != AUTO:
            try:
                parse_bytes(value)
            except ValueError as error:
                raise ValueError(f"{error}; also auto, or a share such as 0.8") from None
    elif isinstance(value, int):
        meant(value)
    elif not 0 < value <= 1:
        raise ValueError("a number with a point is a share of the memory, above 0 and at most 1; a size has a unit")
    return value


def written(num_bytes: int) -> str:
    """A size that can be written into a config and is not smaller than ``num_bytes``."""
    unit, name = (1 << 20, "MiB") if num_bytes >= 16 << 20 else (1 << 10, "KiB")
    return f"{-(-num_bytes // unit)}{name}"


def human_duration(seconds_s: float) -> str:
    """``72`` -> ``'1m12s'``: the two largest units, seconds with a tenth below one second."""
    if not math.isfinite(seconds_s):
        return "?"
    if 0 < seconds_s < 1:
        return f"{seconds_s:.1f}s"
    minutes, seconds = divmod(round(seconds_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"


def human_number(value: float, digits: int) -> str:
    """``value`` with this many significant digits, trailing zeros kept so that columns stay aligned."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if not -4 <= magnitude < 6:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"
