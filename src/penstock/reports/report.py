"""Reports of saves and restores: where the time went, in figures, words and pictures."""

from __future__ import annotations

__all__ = (
    "COLUMNS",
    "Promotion",
    "RestoreReport",
    "Row",
    "SaveReport",
    "StageReport",
    "TimelineBar",
    "plot_timeline",
    "size_text",
    "stage_table",
    "timeline_rows",
    "timeline_svg",
)

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, final

from penstock.kernel.memory.regulator import Flow
from penstock.kernel.messages.restore import Change, ChangeKind
from penstock.kernel.pipeline.run_context import RunLimits
from penstock.kernel.pipeline.statistics import Span, StageStatistics
from penstock.kernel.protocols.stores import RequestFigures
from penstock.kernel.words import counted
from penstock.reports.diagnosis import Diagnosis, diagnose, wall_s

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_COLUMNS: Final = 80


@dataclass(frozen=True, slots=True)
class StageReport:
    """The report of a finished save or restore: what it did, and where its time went.

    `print(report)` shows a table, a notebook also the timeline.
    """

    kind: ClassVar[Flow]

    path: str
    n_leaves: int
    nbytes: int  #: array bytes
    stages: tuple[StageStatistics, ...] = field(default=(), repr=False, compare=False, kw_only=True)
    limits: RunLimits | None = field(default=None, repr=False, compare=False, kw_only=True)
    """The sizes and budgets that held; None if it was not one run of a pipeline."""
    processor_s: float = field(default=0.0, repr=False, compare=False, kw_only=True)
    """Of the whole process in that time, with what else it did."""
    requests: RequestFigures | None = field(default=None, repr=False, compare=False, kw_only=True)
    """Requests to the bucket from its begin to its end, with those of others at that time; None if it is in
    none."""

    @property
    def wall_s(self) -> float:
        """Seconds from the first to the last work of any stage."""
        return wall_s(self.stages)

    def explain(self) -> str:
        """Say what held it up, and which options to change: to what, and what that is expected to gain."""
        return self.diagnosed().text

    def diagnosed(self) -> Diagnosis:
        """Return the same as a value, with the options by their keys."""
        return diagnose(self.stages, self.kind, self.n_leaves, self.nbytes, self.limits, self.processor_s)

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
        """Draw when each worker of each stage was busy, and when it waited for memory.

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


@dataclass(frozen=True, slots=True)
class SaveReport(StageReport):
    """The report of a finished save.

    `nbytes` are array bytes written.
    """

    kind: ClassVar[Flow] = "save"

    nbytes_kept: int = 0  #: array bytes that were not written, for the base holds them
    staged_s: float = math.nan  #: from the call to STAGED
    kept_s: float = math.nan
    """From the call to KEPT; without tiers, `durable_s`. Not known as long as the step of a lost keeper is on
    its way to the next tier."""
    durable_s: float = math.nan  #: from the call to DURABLE
    peak_leased_bytes: int = 0  #: of the shared budget, over its life so far
    single_writer: bool = False
    """Whether it was only the caller's word that nobody else saved to the same path: the server of the bucket
    ignores conditions, and the option `single_writer` is set."""
    superseded_by: str | None = None
    """The newer step that is durable instead, where steps are saved faster than a tier takes them; then this
    one is not at `path`."""
    promoted_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """With tiers: the directories that the step was copied to, each with the seconds from the call until it
    was there."""

    def _figures(self) -> str:
        whole = StageReport._figures(self)
        kept = f", {size_text(self.nbytes_kept)} kept" if self.nbytes_kept else ""
        staged = "" if math.isnan(self.staged_s) else f", staged after {self.staged_s:.3f} s"
        alone = ", kept apart from other savers by single_writer alone" if self.single_writer else ""
        there = "".join([f", in {path} after {s:.3f} s" for path, s in self.promoted_s.items()])
        return f"{whole}{kept}{staged}{alone}{_printable(there)}"


@final
@dataclass(frozen=True, slots=True)
class Promotion:
    """A step that is whole in one more tier of its run, or in the root."""

    path: str  #: of the step there
    tier: str  #: `disk`, `memory`, `root`, or the scheme of a bucket
    nbytes: int  #: that came there: with another codec than before, as it is stored now
    seconds: float  #: that the copy took
    lag_s: float | None  #: seconds since its save began; None if that was in an earlier process
    processor_s: float | None = None
    """Of the process that encoded it, with a low priority; None if files were copied, or this one encoded."""


@final
@dataclass(frozen=True, slots=True)
class RestoreReport(StageReport):
    """The report of a finished restore: `n_leaves` were read, of `nbytes` array bytes.

    Attributes:
        changes: Every difference from what is stored; empty without options.
    """

    kind: ClassVar[Flow] = "restore"

    changes: tuple[Change, ...] = ()

    def key_paths(self, kind: ChangeKind) -> tuple[str, ...]:
        """Return the key paths of all changes of one kind."""
        return tuple(change.key_path for change in self.changes if change.kind == kind)


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


_MIB: Final = 2**20
_NAME: Final = 17
_WIDTHS: Final = (4, 8, 8, 8, 12, 8, 8, 7)  #: of the columns behind the name

COLUMNS: Final = ("stage", "", "busy", "starved", "blocked", "memory_wait", "MiB", "MiB/s", "queue")
"""The second one is the number of workers. Times are of one worker on average, in seconds, by the names of
`StageStatistics`. The queue is the messages that waited for the stage, on average."""


def stage_table(stages: Iterable[StageStatistics]) -> str:
    """Return a line for each stage below a line of headings, without a line break at the end."""
    lines = [COLUMNS, *(cells(stage) for stage in stages)]
    return "\n".join(_line(line) for line in lines)


def cells(stage: StageStatistics) -> tuple[str, ...]:
    """Return what the table says of a stage, in the order of `COLUMNS`."""
    times = (stage.busy_s, stage.starved_s, stage.blocked_s, stage.memory_wait_s)
    speed = "" if stage.throughput is None else _short_cell(stage.throughput / _MIB)
    workers = f"x{stage.workers}" if stage.workers > 1 else ""
    queue = "" if not stage.n_in else _short_cell(stage.queued_mean)
    size = _short_cell(stage.nbytes / _MIB) if stage.nbytes else ""
    shown = [_seconds(each / stage.workers) for each in times]
    return (stage.name, workers, *shown, size, speed, queue)


def _line(line: Sequence[str]) -> str:
    name, *rest = line
    if len(name) > _NAME:
        name = f"{name[: _NAME - 1]}…"

    cells_ = [cell.rjust(width) for cell, width in zip(rest, _WIDTHS, strict=True)]
    return f"{name.ljust(_NAME)}{''.join(cells_)}".rstrip()


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 1000 else f"{seconds:.0f}"


def _short_cell(number: float) -> str:
    if number == 0:
        return "0"

    return f"{number:.1f}" if number < 1000 else f"{number:.0f}"


def trace_json(stages: Sequence[StageStatistics], title: str) -> str:
    """Return a document in the Trace Event Format: one row for each worker, in the order of the flow.

    Times are microseconds from the first work of any stage.

    Args:
        stages: In order.
        title: What the process is called in the trace.
    """
    start = min((span.start for stage in stages for span in stage.spans), default=0.0)
    events: list[dict[str, Any]] = [_named("process_name", title)]
    row = 0
    for stage in stages:
        rows = [row + worker + 1 for worker in range(stage.workers)]
        row = rows[-1]
        for worker, tid in enumerate(rows):
            label = stage.name if stage.workers == 1 else f"{stage.name} {worker}"
            events += [_named("thread_name", label, tid), _sorted(tid)]

        events += [_worked(stage, span, rows[span.worker], start) for span in stage.spans]

    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _worked(stage: StageStatistics, span: Span, row: int, start: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 1,
        "tid": row,
        "name": stage.name,
        "cat": "stage",
        "ts": _micros(span.start - start),
        "dur": _micros(span.end - span.start),
        "args": {"nbytes": span.nbytes, "memory_wait_us": _micros(span.memory_wait_s)},
    }


def _named(kind: str, name: str, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": tid, "name": kind, "args": {"name": name}}


def _sorted(tid: int) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)


MOST_BARS: Final = 1000  #: of one row; nobody sees more, and a picture of them would take megabytes
_WIDTH, _LEFT, _ROW, _HEIGHT = 720, 130, 18, 12
_BUSY_COLOUR, _MEMORY_WAIT_COLOUR = "#2563eb", "#f59e0b"


@final
@dataclass(frozen=True, slots=True)
class TimelineBar:
    """A stretch of time of one worker, in seconds from the first of any; of it `memory_wait_s`, else busy."""

    start_s: float
    seconds: float
    memory_wait_s: float


@final
@dataclass(frozen=True, slots=True)
class Row:
    """The work of one worker."""

    label: str
    bars: tuple[TimelineBar, ...]


def timeline_rows(stages: Sequence[StageStatistics], most_bars: int = MOST_BARS) -> list[Row]:
    """Return a row for each worker that did something. Bars that almost touch are one, if it has many."""
    spans = [span for stage in stages for span in stage.spans]
    start = min((span.start for span in spans), default=0.0)
    whole = max((span.end for span in spans), default=0.0) - start
    rows: list[Row] = []
    for stage in stages:
        for worker in range(stage.workers):
            bars = [
                TimelineBar(span.start - start, span.end - span.start, span.memory_wait_s)
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
            x, waited = _LEFT + bar.start_s * scale, bar.memory_wait_s * scale
            busy = max(bar.seconds * scale - waited, 0.5)
            if waited >= 0.5:
                lines.append(_rect(x, y, waited, _MEMORY_WAIT_COLOUR))
            lines.append(_rect(x + waited, y, busy, _BUSY_COLOUR))

    base = f'y="{high - 6}"'
    lines.append(f'<text x="{_LEFT}" {base}>0 s</text>')
    lines.append(f'<text x="{_WIDTH - 10}" {base} text-anchor="end">{whole:.3f} s</text>')
    legend = "blue: busy, orange: memory_wait"
    lines.append(f'<text x="{(_LEFT + _WIDTH) / 2}" {base} text-anchor="middle">{legend}</text></svg>')
    return "".join(lines)


def _joined(bars: Sequence[TimelineBar], whole_s: float, most: int) -> tuple[TimelineBar, ...]:
    """Join neighbours, so that at most about `most` remain."""
    joined: list[TimelineBar] = []
    gap_s = whole_s / most
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        last = joined[-1] if joined else None
        if last is not None and len(bars) > most and bar.start_s - last.start_s - last.seconds <= gap_s:
            end = max(last.start_s + last.seconds, bar.start_s + bar.seconds)
            joined[-1] = TimelineBar(last.start_s, end - last.start_s, last.memory_wait_s + bar.memory_wait_s)
        else:
            joined.append(bar)

    return tuple(joined)


def _rect(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_HEIGHT}" fill="{colour}"/>'


def plot_timeline(
    stages: Sequence[StageStatistics], title: str, path: str | os.PathLike[str] | None
) -> Figure:
    """Draw a row for each worker: blue where it was busy, orange where it waited for memory.

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
        waits = [(bar.start_s, bar.memory_wait_s) for bar in row.bars]
        works = [
            (bar.start_s + bar.memory_wait_s, max(bar.seconds - bar.memory_wait_s, 0.0)) for bar in row.bars
        ]
        axes.broken_barh(waits, (at - 0.35, 0.7), facecolors=_MEMORY_WAIT_COLOUR)
        axes.broken_barh(works, (at - 0.35, 0.7), facecolors=_BUSY_COLOUR)

    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("seconds (blue: busy, orange: memory_wait)")
    axes.set_title(title, fontsize=10, parse_math=False)
    if path is not None:
        figure.savefig(path, dpi=120)

    made: Figure = figure
    return made
