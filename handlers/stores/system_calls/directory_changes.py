"""Changes of a directory as reported by the file system, if `watchfiles` is installed."""

from __future__ import annotations

__all__ = ("set_at_change", "tells_changes")

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from anyio import Event, create_task_group, sleep_forever

SETTLING_MS = 50
"""Changes within this time count as one."""


def tells_changes() -> bool:
    """True if `watchfiles` is installed."""
    return find_spec("watchfiles") is not None


async def set_at_change(directory: str, changed: Event) -> None:
    """Set `changed` when an entry of the directory changes; return at once if it cannot be watched.

    It may never be set: network file systems do not report what other machines do.

    Cancellation:
        Takes effect within some tens of milliseconds.
    """
    watchfiles: Any = import_module("watchfiles")
    stop = Event()
    changes = watchfiles.awatch(
        directory,
        watch_filter=None,
        recursive=False,
        debounce=SETTLING_MS,
        step=SETTLING_MS,
        stop_event=stop,
    )
    async with create_task_group() as tasks:
        tasks.start_soon(_set_when_cancelled, stop)
        try:
            async for _ in changes:
                changed.set()
                break

            await changes.aclose()
        except (OSError, RuntimeError):  # it is not there (yet), or there are too many watches
            return
        finally:
            tasks.cancel_scope.cancel()


async def _set_when_cancelled(event: Event) -> None:
    """Wake the thread in which the library waits: it cannot be cancelled and would wait for seconds."""
    try:
        await sleep_forever()
    finally:
        event.set()
