"""Progress bars on stderr, with rich, where that is a terminal; nothing elsewhere."""

from __future__ import annotations

__all__ = ("Bar", "NoBar", "open_bar")

import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any, Protocol, final


class Bar(Protocol):
    """A progress bar."""

    def show(self, done: int, text: str = "", total: int | None = None) -> None:
        """Show that `done` of the total are done; of a new total, if one is given."""
        ...


@final
class NoBar:
    """Shows nothing: stderr is no terminal, or there is no rich."""

    __slots__ = ()

    def show(self, done: int, text: str = "", total: int | None = None) -> None:
        """Do nothing."""


def open_bar(total: int | None, unit: str) -> AbstractContextManager[Bar]:
    """Return a bar as a context. It goes away when it is done, and leaves the results alone on the screen.

    Args:
        total: What is to be done; None while it is not known.
        unit: `bytes`, or what is counted.
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:  # which is in an extra
        return nullcontext(NoBar())

    return _rich_bar(total, unit)


@contextmanager
def _rich_bar(total: int | None, unit: str) -> Generator[Bar]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    counted = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    with Progress(
        BarColumn(bar_width=36),
        counted,
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # what is said meanwhile stands above the bar
    ) as progress:
        yield _RichBar(progress, progress.add_task(unit, total=total, text=""))


@final
class _RichBar:
    __slots__ = ("_progress", "_task")

    def __init__(self, progress: Any, task: Any) -> None:
        self._progress = progress
        self._task = task

    def show(self, done: int, text: str = "", total: int | None = None) -> None:
        from penstock.cli.terminal.printable import one_line

        more = {} if total is None else {"total": total}
        self._progress.update(self._task, completed=done, text=one_line(text), **more)
