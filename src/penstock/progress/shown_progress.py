"""Reads `progress=` of a save or a restore: which bar is shown, or which function is called."""

from __future__ import annotations

__all__ = ("ShownProgress", "shown_progress")

import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import PurePath
from typing import Protocol, TypeAlias, cast, final

from penstock.kernel.errors import SpecError
from penstock.kernel.events import get_logger
from penstock.kernel.memory.regulator import RegulatorStatistics
from penstock.kernel.pipeline.run_context import ShowProgress
from penstock.telemetry.observers import TellReport

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
        function: What is told, if the caller gave one.
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
        """Do nothing: it is made for one operation."""
        del statistics
        return nullcontext()

    def _finish(self, report: object) -> None:
        del report
        done, total = self._figures
        if done != total:  # of a checkpoint of which some was not read
            self(total, total)


def shown_progress(progress: ShowProgress) -> ShownProgress | None:
    """Return what shows the progress of one operation; None if nothing is to be shown.

    With True nothing is shown where nobody looks: stderr is no terminal, and there is no notebook.

    Raises:
        SpecError: If it is none of these, or what draws the bar is not installed.
    """
    if progress is False:
        return None
    if progress is True:
        if not _somebody_looks():
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
    # Only who asked for one loads what draws it.
    if library == "tqdm":
        from penstock.progress.tqdm_bar import TqdmBar

        return TqdmBar(title)

    from penstock.progress.rich_bar import RichBar

    return RichBar(title)


def _somebody_looks() -> bool:
    """True if stderr is a terminal, or a notebook shows what is written there."""
    ipython = sys.modules.get("IPython")
    in_shell = ipython is not None and ipython.get_ipython() is not None
    return in_shell or (sys.stderr is not None and sys.stderr.isatty())  # none: a program without a console
