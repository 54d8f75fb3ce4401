"""When each worker of each stage worked, and when it waited for memory, as bars of a picture."""

from __future__ import annotations

__all__ = ("Bar", "Row", "plot_timeline", "timeline_rows", "timeline_svg")

import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final, final

from penstock.kernel.reports.statistics import StageStatistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MOST_BARS: Final = 1000  #: of one row; nobody sees more, and a picture of them would take megabytes
_WIDTH, _LEFT, _ROW, _HEIGHT = 720, 130, 18, 12
_WORK, _MEMORY = "#2563eb", "#f59e0b"


@final
@dataclass(frozen=True, slots=True)
class Bar:
    """Work of one worker, in seconds from the first work of any; `memory_s` of it waited for memory."""

    start_s: float
    seconds: float
    memory_s: float


@final
@dataclass(frozen=True, slots=True)
class Row:
    """The work of one worker."""

    label: str
    bars: tuple[Bar, ...]


def timeline_rows(stages: Sequence[StageStatistics], most_bars: int = MOST_BARS) -> list[Row]:
    """Return a row for each worker that did something. Bars that almost touch are one, if it has many."""
    spans = [span for stage in stages for span in stage.spans]
    start = min((span.start for span in spans), default=0.0)
    whole = max((span.end for span in spans), default=0.0) - start
    rows: list[Row] = []
    for stage in stages:
        for worker in range(stage.workers):
            bars = [
                Bar(span.start - start, span.end - span.start, span.memory_wait_s)
                for span in stage.spans
                if span.worker == worker
            ]
            if bars:
                label = stage.name if stage.workers == 1 else f"{stage.name} {worker}"
                rows.append(Row(label, _joined(bars, whole, most_bars)))

    return rows


def timeline_svg(stages: Sequence[StageStatistics]) -> str:
    """Return the picture as SVG, for a page or a notebook; "" if nothing was timed."""
    rows = timeline_rows(stages)
    whole = max((bar.start_s + bar.seconds for row in rows for bar in row.bars), default=0.0)
    if whole <= 0:
        return ""

    scale = (_WIDTH - _LEFT - 10) / whole
    high = _ROW * len(rows) + 24
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{high}" font-size="11">']
    for at, row in enumerate(rows):
        y = 4 + _ROW * at
        lines.append(f'<text x="4" y="{y + 10}">{escape(row.label)}</text>')
        for bar in row.bars:
            x, waited = _LEFT + bar.start_s * scale, bar.memory_s * scale
            worked = max(bar.seconds * scale - waited, 0.5)
            if waited >= 0.5:
                lines.append(_rect(x, y, waited, _MEMORY))
            lines.append(_rect(x + waited, y, worked, _WORK))

    base = f'y="{high - 6}"'
    lines.append(f'<text x="{_LEFT}" {base}>0 s</text>')
    lines.append(f'<text x="{_WIDTH - 10}" {base} text-anchor="end">{whole:.3f} s</text>')
    legend = "blue: at work, orange: waiting for memory"
    lines.append(f'<text x="{(_LEFT + _WIDTH) / 2}" {base} text-anchor="middle">{legend}</text></svg>')
    return "".join(lines)


def _joined(bars: Sequence[Bar], whole_s: float, most: int) -> tuple[Bar, ...]:
    """Join neighbours, so that at most about `most` remain."""
    joined: list[Bar] = []
    gap_s = whole_s / most
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        last = joined[-1] if joined else None
        if last is not None and len(bars) > most and bar.start_s - last.start_s - last.seconds <= gap_s:
            end = max(last.start_s + last.seconds, bar.start_s + bar.seconds)
            joined[-1] = Bar(last.start_s, end - last.start_s, last.memory_s + bar.memory_s)
        else:
            joined.append(bar)

    return tuple(joined)


def _rect(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_HEIGHT}" fill="{colour}"/>'


def plot_timeline(
    stages: Sequence[StageStatistics], title: str, path: str | os.PathLike[str] | None
) -> Figure:
    """Draw a row for each worker: blue where it worked, orange where it waited for memory.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the extra `cli` has it.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plot() needs matplotlib: pip install 'penstock[cli]'") from error

    rows = timeline_rows(stages)
    figure: Any = Figure(figsize=(9, 0.8 + 0.28 * max(len(rows), 1)), layout="constrained")
    axes = figure.add_subplot()
    for at, row in enumerate(rows):
        waits = [(bar.start_s, bar.memory_s) for bar in row.bars]
        works = [(bar.start_s + bar.memory_s, max(bar.seconds - bar.memory_s, 0.0)) for bar in row.bars]
        axes.broken_barh(waits, (at - 0.35, 0.7), facecolors="#f59e0b")
        axes.broken_barh(works, (at - 0.35, 0.7), facecolors="#2563eb")

    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("seconds (orange: waiting for memory)")
    axes.set_title(title, fontsize=10, parse_math=False)
    if path is not None:
        figure.savefig(path, dpi=120)

    made: Figure = figure
    return made
