"""How many bytes went to or from a file, and by which way."""

from __future__ import annotations

__all__ = ("Transfers",)

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Transfers:
    """Bytes of one file or of several. Edges that share a page with others are always buffered."""

    direct_bytes: int = 0  #: past the page cache (O_DIRECT)
    buffered_bytes: int = 0  #: through the page cache

    def __add__(self, other: Transfers) -> Transfers:
        return Transfers(self.direct_bytes + other.direct_bytes, self.buffered_bytes + other.buffered_bytes)
