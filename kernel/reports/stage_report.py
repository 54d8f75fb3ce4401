"""What the reports of a save and of a restore have in common."""

from __future__ import annotations

__all__ = ("StageReport", "size_text")

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from penstock.kernel.protocols.transfers import RequestFigures
from penstock.kernel.reports.bottlenecks import explained, wall_s
from penstock.kernel.reports.counted_nouns import counted
from penstock.kernel.reports.report_table import COLUMNS, cells, stage_table
from penstock.kernel.reports.statistics import StageStatistics
from penstock.kernel.reports.timeline import timeline_svg
from penstock.kernel.reports.timeline_plot import plot_timeline
from penstock.kernel.reports.trace_events import trace_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_COLUMNS: Final = 80


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a finished save or restore did, and where its time went.

    `print(report)` shows a table, a notebook also the timeline.
    """

    kind: ClassVar[str] = "operation"

    path: str
    n_leaves: int
    nbytes: int  #: array bytes
    stages: tuple[StageStatistics, ...] = field(default=(), repr=False, compare=False, kw_only=True)
    requests: RequestFigures | None = field(default=None, repr=False, compare=False, kw_only=True)
    """Requests to the bucket from its begin to its end, with those of others at that time; None if it lies in
    none."""

    @property
    def wall_s(self) -> float:
        """Seconds from the first to the last work of any stage."""
        return wall_s(self.stages)

    def explain(self) -> str:
        """Say in one or two sentences what the bottleneck was, and which option to change."""
        return explained(self.stages, self.kind, self.n_leaves, self.nbytes)

    def to_trace(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return a trace that `chrome://tracing` and https://ui.perfetto.dev open: JSON.

        Args:
            path: A file to write it to as well. Blocking.
        """
        trace = trace_json(self.stages, self._title())
        if path is not None:
            Path(path).write_text(trace, encoding="utf-8")

        return trace

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw when each worker of each stage worked, and when it waited for memory.

        Args:
            path: A picture to write as well; its suffix is the format. Blocking.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed; the extra `cli` has it.
        """
        return plot_timeline(self.stages, _printable(self._title()), path)

    def __str__(self) -> str:
        """Return a title, a table of the stages, and what `explain()` says."""
        lines = [_short(_printable(self._title())), self._figures()]
        if self.stages:
            lines += [stage_table(self.stages), *_wrapped(self.explain())]

        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
        rows = "".join(_row(cells(stage)) for stage in self.stages)
        title, figures = escape(_printable(self._title())), escape(self._figures())
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
        words = f"<p>{escape(self.explain())}</p>" if rows else ""
        return f"<div><b>{title}</b><br>{figures}{table}{words}{timeline_svg(self.stages)}</div>"

    def _title(self) -> str:
        return f"{self.kind} of {self.path}"

    def _figures(self) -> str:
        """Return the figures of the whole, in one line."""
        size = f"{counted(self.n_leaves, 'leaf', 'leaves')}, {size_text(self.nbytes)}"
        took = self.wall_s
        whole = f"{size} in {took:.3f} s ({size_text(self.nbytes / took)}/s)" if took else size
        asked = self.requests
        if asked is None:
            return whole

        whole += f", {counted(asked.n_sent, 'request')}"
        if not asked.n_repeated:
            return whole

        busy = f", {asked.n_refused} of them because the server was too busy" if asked.n_refused else ""
        return f"{whole}, {asked.n_repeated} repeated{busy}, {asked.waited_s:.1f} s waited"


def _printable(text: str) -> str:
    """Without control characters: a path may hold some, and what is printed reaches a terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def size_text(nbytes: float) -> str:
    """Return a number of bytes as people read it, such as `1.5 GiB`."""
    power = 0
    while nbytes >= 1024 and power < len(_UNITS) - 1:
        nbytes, power = nbytes / 1024, power + 1

    return f"{nbytes:.1f} {_UNITS[power]}" if power else f"{nbytes:.0f} B"


def _short(line: str) -> str:
    return line if len(line) <= _COLUMNS else f"{line[:20]}…{line[-(_COLUMNS - 21) :]}"


def _row(shown: Sequence[str]) -> str:
    name, *rest = shown
    return f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"


def _wrapped(text: str) -> list[str]:
    lines: list[str] = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > _COLUMNS:
            lines.append("")

        lines[-1] = f"{lines[-1]} {word}".strip()

    return lines
