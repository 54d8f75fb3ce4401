"""Writes leaves, sizes and times for tables."""

from __future__ import annotations

__all__ = ("age", "iso_time", "shape_text", "sharding_text")

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

_UNITS: Final = (("d", 86400), ("h", 3600), ("min", 60))


def age(committed_at_ns: int | None) -> str:
    """Return how long ago something was, as in `3 h`."""
    if committed_at_ns is None:
        return ""

    seconds = max(0.0, time.time() - committed_at_ns / 1e9)
    for unit, length in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"

    return f"{seconds:.0f} s"


def iso_time(nanoseconds: int | None) -> str:
    """Return a time of the wall clock in ISO format, in UTC; empty if there is none."""
    if nanoseconds is None:
        return ""

    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(timespec="milliseconds")


def shape_text(shape: Sequence[int] | None) -> str:
    """Return a shape as in `4x3`; `scalar` for that of one number, nothing for what is no array."""
    if shape is None:
        return ""

    return "x".join(map(str, shape)) or "scalar"


def sharding_text(sharding: Mapping[str, Any] | None) -> str:
    """Return a recorded sharding in a few words, as in `(data) over data=2`."""
    if sharding is None:
        return ""
    if sharding.get("sharding_type") != "NamedSharding":
        return str(sharding.get("device_str") or sharding.get("sharding_type", "?"))

    parts = ", ".join(map(_partition, sharding.get("partition_spec", ())))
    axes = zip(sharding.get("axis_names", ()), sharding.get("shape", ()), strict=False)
    return f"({parts}) over {' '.join(f'{name}={size}' for name, size in axes)}"


def _partition(part: Any) -> str:
    if part is None:
        return "-"

    return part if isinstance(part, str) else "+".join(part)
