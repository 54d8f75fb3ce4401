"""The stages of a save or a restore as a table of plain text, 80 columns wide at most."""

from __future__ import annotations

__all__ = ("COLUMNS", "cells", "stage_table")

from collections.abc import Iterable, Sequence
from typing import Final

from penstock.kernel.reports.statistics import StageStatistics

_MIB: Final = 2**20
_NAME: Final = 17
_WIDTHS: Final = (4, 8, 8, 8, 8, 9, 9, 7)  #: of the columns behind the name

COLUMNS: Final = ("stage", "", "work", "input", "output", "memory", "MiB", "MiB/s", "queue")
"""The second one is the number of workers. Times are of one worker on average, in seconds: at work,
and waiting for input, output and memory. The queue is the messages that waited for the stage, on average."""


def stage_table(stages: Iterable[StageStatistics]) -> str:
    """Return a line for each stage below a line of headings, without a line break at the end."""
    lines = [COLUMNS, *(cells(stage) for stage in stages)]
    return "\n".join(_line(line) for line in lines)


def cells(stage: StageStatistics) -> tuple[str, ...]:
    """Return what the table says of a stage, in the order of `COLUMNS`."""
    times = (stage.busy_s, stage.starved_s, stage.blocked_s, stage.memory_wait_s)
    speed = "" if stage.throughput is None else _short(stage.throughput / _MIB)
    workers = f"x{stage.workers}" if stage.workers > 1 else ""
    queue = "" if not stage.n_in else _short(stage.queued_mean)
    size = _short(stage.nbytes / _MIB) if stage.nbytes else ""
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


def _short(number: float) -> str:
    if number == 0:
        return "0"

    return f"{number:.1f}" if number < 1000 else f"{number:.0f}"
