"""Hearing from the file system that a directory has changed, where a library for that is installed."""

from __future__ import annotations

__all__ = ("set_at_change", "tells_changes")

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from anyio import Event

SETTLING_MS = 20
"""Changes that follow each other so closely are one."""


def tells_changes() -> bool:
    """Whether `watchfiles` is installed."""
    return find_spec("watchfiles") is not None


async def set_at_change(directory: str, changed: Event) -> None:
    """Set `changed` when an entry of the directory changes; return without that if nobody can tell.

    It may never be set: network file systems tell nothing of what other machines do.

    Cancellation:
        Takes effect within some tens of milliseconds.
    """
    watchfiles: Any = import_module("watchfiles")
    changes = watchfiles.awatch(
        directory, watch_filter=None, recursive=False, debounce=SETTLING_MS, step=SETTLING_MS
    )
    try:
        async for _ in changes:
            changed.set()
            return
    except (OSError, RuntimeError):  # it is not there (yet), or there are too many watches
        return
    finally:
        await changes.aclose()
