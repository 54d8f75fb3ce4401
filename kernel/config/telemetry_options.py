"""Options for who is told of saves and restores."""

from __future__ import annotations

__all__ = ("TelemetryOptions",)

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    """`[telemetry]`: who is told of saves and restores.

    Attributes:
        observers: Names: `"prometheus"` and `"opentelemetry"` (extra `metrics`), or of entry points of the
            group "penstock.observers", which are called without arguments.
        keep_reports: How many reports of recent saves are kept in a small file beside the checkpoints,
            `_PENSTOCK_REPORTS.json`, which `penstock ui` shows. 0 writes none.
    """

    observers: tuple[str, ...] = ()
    keep_reports: int = 0
