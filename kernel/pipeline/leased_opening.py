"""Opens a checkpoint within the memory budget."""

from __future__ import annotations

__all__ = ("open_leased",)

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar, final

from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.protocols.checkpoints import StoredCheckpoint
from penstock.kernel.protocols.layouts import Opening

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class _Opened(Generic[T]):
    """The outcome of opening a checkpoint whose documents are small."""

    value: T


async def open_leased(
    run: RestoreRun, path: str, item: str | None, make: Callable[[StoredCheckpoint], T]
) -> T:
    """Open a checkpoint, and return what `make` makes of it.

    While long documents are read and decoded, what that takes is leased; more than the whole budget is
    admitted alone, with the event `memory.oversize`. What is kept of them does not count: whoever holds
    a lease must not wait for another one, and the caller goes on to lease the bytes of arrays. For that
    reason the caller holds none yet.

    Args:
        run: Whose layout, store, threads and budget are used.
        path: As for `Layout.find`.
        item: As for `Layout.find`.
        make: Called in a worker thread, as long as the lease lasts.

    Raises:
        PenstockError: What the layout or `make` raises.

    Cancellation:
        The lease ends; a thread that still reads may be left behind.
    """
    found = await run.threads.run(partial(_open_small, run, path, item, make))
    if isinstance(found, _Opened):
        return found.value

    with await run.lease(found.nbytes, "", prioritised=False, about={"documents_of": path}):
        return await run.threads.run(_finish, found, make)


def _open_small(
    run: RestoreRun, path: str, item: str | None, make: Callable[[StoredCheckpoint], T]
) -> _Opened[T] | Opening:
    """Open the checkpoint at once if that takes no bytes that count. Else only find it."""
    found = run.layout.find(run.store, path, item)
    return found if found.nbytes else _Opened(make(found.open()))


def _finish(found: Opening, make: Callable[[StoredCheckpoint], T]) -> T:
    return make(found.open())
