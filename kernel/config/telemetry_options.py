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
    """

    observers: tuple[str, ...] = ()
