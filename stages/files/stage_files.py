"""Files that a stage has open: they are closed however it ends, and their transfers are counted."""

from __future__ import annotations

__all__ = ("closing", "log_transfers")

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from anyio import move_on_after

from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.stores import Transfers

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger


CLOSING_S = 30.0


class _File(Protocol):
    def close(self) -> None: ...


@asynccontextmanager
async def closing(threads: Threads, files: Callable[[], Iterable[_File]]) -> AsyncGenerator[None]:
    """Close all of `files()` at the end of the block, even if closing one of them fails.

    Raises:
        StorageError: If a file could not be closed. If the body failed, its own error is raised instead:
            it came first, and the files no longer matter.

    Cancellation:
        The files are closed all the same, in at most `CLOSING_S` seconds.
    """
    try:
        yield
    except BaseException:
        with move_on_after(CLOSING_S, shield=True), suppress(StorageError):
            # In a thread of its own: all others may hang, as reads of a medium that does not answer.
            await Threads(1).leaving_calls(after_s=0.0).run(_close, files)

        raise

    with move_on_after(CLOSING_S, shield=True):
        await threads.run(_close, files)


def _close(files: Callable[[], Iterable[_File]]) -> None:
    with ExitStack() as stack:
        for file in files():
            stack.callback(file.close)


class _CountedFile(Protocol):
    @property
    def transfers(self) -> Transfers: ...


def log_transfers(events: BoundLogger, event: str, files: Iterable[_CountedFile]) -> None:
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
