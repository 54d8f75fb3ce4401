"""Shapes from documents: how large an array may be that anybody can hold."""

from __future__ import annotations

__all__ = ("MOST_BYTES", "is_beyond_memory")

import math
from collections.abc import Sequence
from typing import Final

MOST_BYTES: Final = 2**62
"""Of an array or a chunk, so that no size or offset in one needs more than 64 bits."""


def is_beyond_memory(shape: Sequence[int], itemsize: int) -> bool:
    """Whether no array can have this shape, even if an axis of 0 makes it take no bytes."""
    return math.prod([n or 1 for n in shape]) * itemsize > MOST_BYTES
