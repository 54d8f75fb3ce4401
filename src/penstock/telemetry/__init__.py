"""Metrics and traces for services: observers, of which two use Prometheus's and OpenTelemetry's own clients.

`pip install 'penstock[metrics]'` brings these. docs/howto/watch-it.md shows both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ("Observer", "OpenTelemetrySpans", "PrometheusMetrics", "Promotion", "PromotionObserver")

if TYPE_CHECKING:
    from penstock.reports.report import Promotion
    from penstock.telemetry.observers import Observer, PromotionObserver
    from penstock.telemetry.opentelemetry_spans import OpenTelemetrySpans
    from penstock.telemetry.prometheus_metrics import PrometheusMetrics
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.reports.report": ("Promotion",),
            "penstock.telemetry.observers": ("Observer", "PromotionObserver"),
            "penstock.telemetry.opentelemetry_spans": ("OpenTelemetrySpans",),
            "penstock.telemetry.prometheus_metrics": ("PrometheusMetrics",),
        },
    )
