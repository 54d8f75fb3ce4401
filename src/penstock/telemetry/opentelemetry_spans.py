"""Spans of OpenTelemetry around saves and restores, and of their stages."""

from __future__ import annotations

__all__ = ("OpenTelemetrySpans",)

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import final

from anyio import get_cancelled_exc_class
from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode, Tracer, TracerProvider

from penstock.kernel.memory.regulator import RegulatorStatistics
from penstock.kernel.pipeline.statistics import StageStatistics
from penstock.reports.report import StageReport
from penstock.telemetry.observers import TellReport


@final
class OpenTelemetrySpans:
    """An observer that makes a span `penstock.save` or `penstock.restore`, and one in it for each stage.

    Its parent is the span in which `save` or `restore` was called, also of a save that goes on in the
    background. It is the current span for the stages and the store: what these trace is in it.

    Args:
        provider: By default the global one.
    """

    __slots__ = ("_tracer",)

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer: Tracer = trace.get_tracer("penstock", tracer_provider=provider)

    @contextmanager
    def observing(self, kind: str, path: str) -> Generator[TellReport]:
        """Trace one save or restore."""
        about = {"penstock.path": path}
        with self._tracer.start_as_current_span(f"penstock.{kind}", attributes=about) as span:
            try:
                yield partial(self._finished, span)
            except get_cancelled_exc_class():
                span.set_attribute("penstock.cancelled", True)
                span.set_status(Status(StatusCode.ERROR, "cancelled"))
                raise
            except Exception as error:
                stage = getattr(error, "stage", None)
                if stage:
                    span.set_attribute("penstock.stage", stage)
                raise

    @contextmanager
    def watching(self, statistics: Callable[[], RegulatorStatistics]) -> Generator[None]:
        """Do nothing: spans tell nothing about memory."""
        yield

    def _finished(self, span: Span, report: StageReport) -> None:
        span.set_attribute("penstock.n_leaves", report.n_leaves)
        span.set_attribute("penstock.nbytes", report.nbytes)
        span.set_attribute("penstock.bottleneck", report.explain())
        # Stages are timed by a clock that has no date.
        offset = time.time_ns() - time.perf_counter_ns()
        for stage in report.stages:
            if stage.spans:
                self._trace_stage(stage, span, offset)

    def _trace_stage(self, stage: StageStatistics, parent: Span, offset: int) -> None:
        started = min(span.start for span in stage.spans)
        ended = max(span.end for span in stage.spans)
        traced = self._tracer.start_span(
            f"penstock.stage.{stage.name}",
            trace.set_span_in_context(parent),
            start_time=offset + int(started * 1e9),
            attributes={
                "penstock.workers": stage.workers,
                "penstock.messages": stage.n_in,
                "penstock.nbytes": stage.nbytes,
                "penstock.busy_s": stage.busy_s,
                "penstock.starved_s": stage.starved_s,
                "penstock.blocked_s": stage.blocked_s,
                "penstock.memory_wait_s": stage.memory_wait_s,
            },
        )
        traced.end(offset + int(ended * 1e9))
