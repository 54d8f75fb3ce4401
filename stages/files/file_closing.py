"""Closes a stage's files, however the stage ends."""

from __future__ import annotations

__all__ = ("closing",)

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Protocol

from anyio import move_on_after

from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import StorageError

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
