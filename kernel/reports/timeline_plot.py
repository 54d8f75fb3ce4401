"""The timeline as a picture of matplotlib, which only this file needs, when it is called."""

from __future__ import annotations

__all__ = ("plot_timeline",)

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.kernel.reports.statistics import StageStatistics
from penstock.kernel.reports.timeline import timeline_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
