"""Counters, histograms and gauges for Prometheus."""

from __future__ import annotations

__all__ = ("PrometheusMetrics",)

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Final, final

from anyio import get_cancelled_exc_class
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from penstock.kernel.memory.regulator import RegulatorStatistics
from penstock.reports.report import Promotion, SaveReport, StageReport
from penstock.telemetry.observers import TellReport

_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_STALLS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_BYTES: Final = tuple(float(10**power) for power in range(3, 14))
Statistics = Callable[[], RegulatorStatistics]


@final
class PrometheusMetrics:
    """An observer that keeps metrics in a registry of `prometheus_client`. docs/howto/watch-it.md lists them.

    Several Checkpointers may each have one: over one registry they add up.

    Args:
        registry: By default that of the process.
    """

    __slots__ = ("_metrics",)

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._metrics = _metrics_in(registry)

    @contextmanager
    def observing(self, kind: str, path: str) -> Generator[TellReport]:
        """Count one save or restore."""
        metrics = self._metrics
        with metrics.under_way.labels(kind).track_inprogress():
            try:
                yield metrics.finished
            except get_cancelled_exc_class():
                metrics.failures.labels(kind, "cancelled").inc()
                raise
            except Exception as error:
                metrics.failures.labels(kind, type(error).__name__).inc()
                raise

    def promoted(self, promotion: Promotion, /) -> None:
        """Count a step that has come to a further tier."""
        self._metrics.promoted(promotion)

    @contextmanager
    def watching(self, statistics: Statistics) -> Generator[None]:
        """Show the memory budget of one Checkpointer while it is open."""
        self._metrics.budgets.append(statistics)
        try:
            yield
        finally:
            self._metrics.budgets.remove(statistics)


@final
class _Metrics:
    """All metrics of one registry, which refuses to have them twice."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.budgets: list[Statistics] = []
        self.done = Counter(
            "penstock_operations", "Saves and restores that succeeded.", ["operation"], registry=registry
        )
        self.failures = Counter(
            "penstock_failures",
            "Saves and restores that failed, by the class of the error, or were cancelled.",
            ["operation", "error"],
            registry=registry,
        )
        self.under_way = Gauge(
            "penstock_operations_under_way", "Saves and restores.", ["operation"], registry=registry
        )
        self.nbytes = Counter(
            "penstock_bytes", "Array bytes written or read.", ["operation"], registry=registry
        )
        self.sizes = Histogram(
            "penstock_operation_bytes",
            "Array bytes of one save or restore.",
            ["operation"],
            buckets=_BYTES,
            registry=registry,
        )
        self.seconds = Histogram(
            "penstock_operation_seconds",
            "Seconds from the first to the last work of one save or restore.",
            ["operation"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.stalls = Histogram(
            "penstock_save_stall_seconds",
            "Seconds from the call until the state may change: what training waits for.",
            buckets=_STALLS,
            registry=registry,
        )
        self.kept = Histogram(
            "penstock_save_kept_seconds",
            "Seconds from the call until the step survives this process.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.promotion_lags = Histogram(
            "penstock_promotion_lag_seconds",
            "Seconds from the call of a save until its step is in a further tier, or in the root.",
            ["tier"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.promotion_seconds = Histogram(
            "penstock_promotion_seconds",
            "Seconds in which a step was copied to a tier, or to the root.",
            ["tier"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.promoted_bytes = Counter(
            "penstock_promoted_bytes", "Bytes copied to a tier, or to the root.", ["tier"], registry=registry
        )
        self.encoding_seconds = Counter(
            "penstock_encoding_processor_seconds",
            "Processor seconds of the process that encodes steps on their way.",
            ["tier"],
            registry=registry,
        )
        self.stage_seconds = Counter(
            "penstock_stage_seconds",
            "Seconds of all workers of a stage: busy, starved, blocked, or waiting for memory.",
            ["operation", "stage", "doing"],
            registry=registry,
        )
        self.stage_busy = Histogram(
            "penstock_stage_busy_seconds",
            "Seconds in which a stage's busiest worker was busy, in one save or restore.",
            ["operation", "stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        for name, field, about in (
            ("penstock_memory_limit_bytes", "limit", "Memory budgets of the open Checkpointers."),
            ("penstock_memory_leased_bytes", "leased", "Bytes of these budgets in use."),
            ("penstock_memory_cached_bytes", "cached", "Bytes of these budgets that caches hold."),
            ("penstock_memory_tasks_waiting", "tasks_waiting", "Tasks that wait for bytes of them."),
        ):
            gauge = Gauge(name, about, registry=registry)
            gauge.set_function(partial(self._sum, field))

    def finished(self, report: StageReport) -> None:
        """Count the figures of a report."""
        kind = report.kind
        self.done.labels(kind).inc()
        self.nbytes.labels(kind).inc(report.nbytes)
        self.sizes.labels(kind).observe(report.nbytes)
        self.seconds.labels(kind).observe(report.wall_s)
        if isinstance(report, SaveReport):
            self.stalls.observe(report.staged_s)
            if not math.isnan(report.kept_s):
                self.kept.observe(report.kept_s)

        for stage in report.stages:
            doing = {
                "busy": stage.busy_s,
                "starved": stage.starved_s,
                "blocked": stage.blocked_s,
                "memory_wait": stage.memory_wait_s,
            }
            for name, seconds in doing.items():
                self.stage_seconds.labels(kind, stage.name, name).inc(max(seconds, 0.0))

            self.stage_busy.labels(kind, stage.name).observe(stage.busiest_s)

    def promoted(self, promotion: Promotion) -> None:
        """Count the figures of a promotion."""
        tier = promotion.tier
        self.promotion_seconds.labels(tier).observe(promotion.seconds)
        self.promoted_bytes.labels(tier).inc(promotion.nbytes)
        if promotion.processor_s is not None:
            self.encoding_seconds.labels(tier).inc(promotion.processor_s)
        if promotion.lag_s is not None:
            self.promotion_lags.labels(tier).observe(promotion.lag_s)

    def _sum(self, field: str) -> float:
        return float(sum(getattr(statistics(), field) for statistics in list(self.budgets)))


@lru_cache(maxsize=16)
def _metrics_in(registry: CollectorRegistry) -> _Metrics:
    return _Metrics(registry)
