"""How many bytes went to or from a file, and by which way."""

from __future__ import annotations

__all__ = ("Transfers",)

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Transfers:
    """Bytes of one file or of several, by the way they took.

    Of a direct transfer, the bytes at its edges that share a page with other bytes count as buffered.
    """

    direct_bytes: int = 0  #: past the page cache (O_DIRECT)
    buffered_bytes: int = 0  #: through the page cache, or through a buffer of the store

    def __add__(self, other: Transfers) -> Transfers:
        return Transfers(self.direct_bytes + other.direct_bytes, self.buffered_bytes + other.buffered_bytes)
