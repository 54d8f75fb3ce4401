"""Quantities as people write them: `64MiB`, `1.5GiB`, `500ms`, `2min`."""

from __future__ import annotations

__all__ = (
    "parse_bytes",
    "parse_seconds",
)

import re
from fractions import Fraction

_BYTES: dict[str, int | Fraction] = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_BYTES.update({"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "TB": 10**12})
_SECONDS: dict[str, int | Fraction] = {"": 1, "s": 1, "min": 60, "h": 3600}
_SECONDS.update({"us": Fraction(1, 10**6), "ms": Fraction(1, 10**3)})
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Read a size, rounded down to whole bytes. Units are case-sensitive: `Mb` is not one.

    Raises:
        ValueError: If it is not one; the message shows examples.
    """
    quantity = _parse(text, _BYTES)
    if quantity is None:
        raise ValueError(f'{text!r} is not a number of bytes; write 1048576, "64MiB", "64MB" or "1.5GiB"')

    return int(quantity)


def parse_seconds(text: str) -> float:
    """Read a duration.

    Raises:
        ValueError: If it is not one; the message shows examples.
    """
    quantity = _parse(text, _SECONDS)
    if quantity is None:
        raise ValueError(f'{text!r} is not a number of seconds; write 0.5, "500ms", "5s", "2min" or "1h"')

    return float(quantity)


def _parse(text: str, units: dict[str, int | Fraction]) -> Fraction | None:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None or found[2] not in units:
        return None

    return Fraction(found[1]) * units[found[2]]
