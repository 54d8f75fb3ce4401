"""A progress bar by tqdm: a line of text on stderr, in a terminal and in a notebook."""

from __future__ import annotations

__all__ = ("TqdmBar",)

from importlib import import_module
from typing import Any, final


@final
class TqdmBar:
    """A bar of bytes. Several at once stand below each other.

    Args:
        title: What goes on.
    """

    __slots__ = ("_bar",)

    def __init__(self, title: str) -> None:
        tqdm: Any = import_module("tqdm.std").tqdm  # it has no types
        # Its monitor is a thread that outlives the bar.
        quiet = type("Bar", (tqdm,), {"monitor_interval": 0})
        self._bar: Any = quiet(desc=title, unit="B", unit_scale=True, unit_divisor=1000)

    def show(self, done: int, total: int) -> None:
        """Draw it, unless that was done a tenth of a second ago."""
        self._bar.total = total or None
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Draw it for the last time, and leave it there."""
        self._bar.close()
