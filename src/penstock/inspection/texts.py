"""Leaves and times as text, and any text of a checkpoint made safe to show: what is in it is data."""

from __future__ import annotations

__all__ = (
    "age",
    "bars",
    "format_number",
    "iso_time",
    "metric_at",
    "metric_text",
    "one_line",
    "printable",
    "shape_text",
    "sharding_text",
    "width_of",
)

import json
import time
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, cast

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


def format_number(number: float) -> str:
    """Return a number with four digits, as in `0.3333` and `1.235e5`; an int with all, as in `65,536`."""
    if isinstance(number, int):
        return f"{number:,}"

    mantissa, is_scientific, exponent = f"{number:.4g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if is_scientific else mantissa


def metric_at(metrics: Mapping[str, Any], name: str) -> object:
    """Return the metric called `name`, nested ones as `eval/loss`; None if there is none."""
    value: object = metrics
    for part in [name] if name in metrics else name.split("/"):
        value = cast("Mapping[str, object]", value).get(part) if isinstance(value, Mapping) else None

    return value


def metric_text(metrics: Mapping[str, Any], name: str) -> str:
    """Return the metric called `name` as text; empty if there is none."""
    value = metric_at(metrics, name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return format_number(value)

    return "" if value is None else json.dumps(value)


_BARS: Final = " ▁▂▃▄▅▆▇█"


def bars(counts: Sequence[int], width: int) -> str:
    """Return a small histogram: a bar for each count, or for several where there are more than `width`."""
    each = -(-len(counts) // width)
    joined = [sum(counts[at : at + each]) for at in range(0, len(counts), each)]
    most = max(joined, default=0) or 1
    return "".join([_BARS[-(-count * (len(_BARS) - 1) // most)] for count in joined])


_ESCAPED: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Control characters, and those that change the direction of text or cannot be seen."""


def printable(text: str) -> str:
    """Return `text` with every control character but line ends written as an escape, as Python writes it."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text

    return "".join([character if character == "\n" else _shown(character) for character in text])


def one_line(text: str) -> str:
    """Return `text` as `printable` does, with line ends escaped, too: for a cell of a table."""
    if text.isascii() and text.isprintable():
        return text

    return "".join(map(_shown, text))


def width_of(text: str) -> int:
    """Return the columns that printable text takes on a terminal."""
    if text.isascii():
        return len(text)

    return sum(_columns(character) for character in text)


def _shown(character: str) -> str:
    if unicodedata.category(character) in _ESCAPED:
        return ascii(character)[1:-1]

    return character


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0

    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
