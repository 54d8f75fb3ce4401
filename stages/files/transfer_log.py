"""Logs how many bytes of a stage's files went through the page cache, and how many past it."""

from __future__ import annotations

__all__ = ("tell_transfers",)

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from penstock.kernel.protocols.transfers import Transfers

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger


class _File(Protocol):
    @property
    def transfers(self) -> Transfers: ...


def tell_transfers(events: BoundLogger, event: str, files: Iterable[_File]) -> None:
    """Log one event with the sums over all files; none if there is no file.

    Args:
        events: Of the run.
        event: `data.read` or `data.written`.
        files: May be closed.
    """
    transfers = [file.transfers for file in files]
    if transfers:
        total = sum(transfers, Transfers())
        events.info(
            event,
            n_files=len(transfers),
            direct_bytes=total.direct_bytes,
            buffered_bytes=total.buffered_bytes,
        )
