"""A progress bar by rich, on stderr."""

from __future__ import annotations

__all__ = ("RichBar",)

import sys
import time
from typing import Final, final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

_EVERY_S: Final = 0.1


@final
class RichBar:
    """A bar of bytes. It draws when it is told something, and so needs no thread.

    Args:
        title: What goes on.
    """

    __slots__ = ("_drawn", "_progress", "_task")

    def __init__(self, title: str) -> None:
        # Its own way to show a bar in a notebook needs ipywidgets; a line of text needs nothing.
        interactive = True if "IPython" in sys.modules else None
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=36),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True, force_jupyter=False, force_terminal=interactive),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(title, total=None)
        self._drawn = time.monotonic()
        self._progress.start()

    def show(self, done: int, total: int) -> None:
        """Draw it, unless that was done a tenth of a second ago."""
        self._progress.update(self._task, completed=done, total=total or None)
        now = time.monotonic()
        if now - self._drawn >= _EVERY_S:
            self._drawn = now
            self._progress.refresh()

    def close(self) -> None:
        """Draw it for the last time, and leave it there."""
        self._progress.stop()
