"""Counts of the bytes that went to or from a file, by way, and of the requests that it took."""

from __future__ import annotations

__all__ = ("RequestFigures", "Transfers")

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


@final
@dataclass(frozen=True, slots=True)
class RequestFigures:
    """Requests to a server, and what became of them."""

    n_sent: int = 0  #: each try counts; of uploads in parts and of copies, each call
    n_repeated: int = 0  #: tries that failed, and were made again
    n_refused: int = 0  #: tries for which the server was too busy
    waited_s: float = 0.0  #: before tries, of all threads together

    def __add__(self, other: RequestFigures) -> RequestFigures:
        return RequestFigures(
            self.n_sent + other.n_sent,
            self.n_repeated + other.n_repeated,
            self.n_refused + other.n_refused,
            self.waited_s + other.waited_s,
        )

    def __sub__(self, other: RequestFigures) -> RequestFigures:
        return RequestFigures(
            self.n_sent - other.n_sent,
            self.n_repeated - other.n_repeated,
            self.n_refused - other.n_refused,
            self.waited_s - other.waited_s,
        )
