"""Reads `progress=` of a save or a restore: a bar by tqdm or rich, or a function that is called."""

from __future__ import annotations

__all__ = ("ShownProgress", "shown_progress")

import sys
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import PurePath
from typing import Any, Final, Protocol, TypeAlias, cast, final

from penstock.kernel.errors import SpecError
from penstock.kernel.events import get_logger
from penstock.kernel.memory.regulator import RegulatorStatistics
from penstock.kernel.pipeline.run_context import ShowProgress
from penstock.telemetry.observers import TellReport

# Drawing costs milliseconds in a notebook.
EVERY_S: Final = 0.1

Tell: TypeAlias = Callable[[int, int], object]


class ProgressBar(Protocol):
    """A bar that one save or restore draws."""

    def show(self, done: int, total: int) -> None:
        """Draw it, unless that was done a moment ago."""
        ...

    def close(self) -> None:
        """Draw it for the last time."""
        ...


@final
class ShownProgress:
    """Shows how far one save or restore is: an observer of it, which is also called with its figures.

    What it raises is logged once as `progress.failed`; the operation goes on without a bar.

    Args:
        function: Called with the figures, if the caller gave one.
        make_bar: What draws a bar with a given title, otherwise.
    """

    __slots__ = ("_failed", "_figures", "_make_bar", "_tell")

    def __init__(self, function: Tell | None, make_bar: Callable[[str], ProgressBar] | None = None) -> None:
        self._tell = function
        self._make_bar = make_bar
        self._figures = (0, 0)
        self._failed = False

    def __call__(self, done: int, total: int) -> None:
        """Show `done` of `total` bytes."""
        self._figures = (done, total)
        if self._tell is None or self._failed:
            return
        try:
            self._tell(done, total)
        except Exception as error:
            self._failed = True
            get_logger().warning("progress.failed", error=repr(error))

    @contextmanager
    def observing(self, kind: str, path: str) -> Generator[TellReport]:
        """Show a bar as long as the operation runs. Its report ends the bar, which is full then."""
        bar = None if self._make_bar is None else self._make_bar(f"{kind} {PurePath(path).name}")
        if bar is not None:
            self._tell = bar.show
        try:
            yield self._finish
        finally:
            if bar is not None:
                bar.close()

    def watching(self, statistics: Callable[[], RegulatorStatistics]) -> AbstractContextManager[object]:
        """Do nothing: a progress is made for one operation."""
        del statistics
        return nullcontext()

    def _finish(self, report: object) -> None:
        del report
        done, total = self._figures
        if done != total:  # of a checkpoint of which some was not read
            self(total, total)


def shown_progress(progress: ShowProgress) -> ShownProgress | None:
    """Return what shows the progress of one operation; None if nothing is to be shown.

    With True nothing is shown where it would not be seen: stderr is no terminal, and there is no notebook.

    Raises:
        SpecError: If it is none of these, or what draws the bar is not installed.
    """
    if progress is False:
        return None
    if progress is True:
        if not _is_visible():
            return None

        installed = [name for name in ("tqdm", "rich") if find_spec(name) is not None]
        if not installed:
            raise SpecError("progress=True needs tqdm or rich: pip install 'penstock[progress]'")

        return ShownProgress(None, partial(_bar, installed[0]))

    if callable(progress):
        return ShownProgress(progress)
    if progress not in ("rich", "tqdm"):
        wanted = "True, False, 'rich', 'tqdm' or a function of the bytes done and all bytes"
        raise SpecError(f"progress must be {wanted}, not {cast('object', progress)!r}")
    if find_spec(progress) is None:
        raise SpecError(f"progress={progress!r} needs a package that is not here: pip install {progress}")

    return ShownProgress(None, partial(_bar, progress))


def _bar(library: str, title: str) -> ProgressBar:
    return _TqdmBar(title) if library == "tqdm" else _RichBar(title)


def _is_visible() -> bool:
    """True if stderr is a terminal, or shown by a notebook."""
    ipython = sys.modules.get("IPython")
    in_shell = ipython is not None and ipython.get_ipython() is not None
    return in_shell or (sys.stderr is not None and sys.stderr.isatty())  # none: a program without a console


@final
class _TqdmBar:
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


@final
class _RichBar:
    """A bar of bytes. It draws when its figures change, and so needs no thread.

    Args:
        title: What goes on.
    """

    __slots__ = ("_drawn", "_progress", "_task")

    def __init__(self, title: str) -> None:
        from rich.console import Console  # only a caller who asked for a bar loads it
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

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
        if now - self._drawn >= EVERY_S:
            self._drawn = now
            self._progress.refresh()

    def close(self) -> None:
        """Draw it for the last time, and leave it there."""
        self._progress.stop()
