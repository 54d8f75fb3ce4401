"""The work of the stages as a trace that Chrome's tracing page and Perfetto show."""

from __future__ import annotations

__all__ = ("trace_json",)

import json
from collections.abc import Sequence
from typing import Any

from penstock.kernel.reports.statistics import Span, StageStatistics


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
