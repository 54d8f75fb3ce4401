"""Numbers for people."""

from __future__ import annotations


def amount(nbytes: float) -> str:
    """`1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:.0f} {unit}"

    return f"{nbytes:.0f} B"


def seconds(value: float) -> str:
    """`1.25 s` or `12.5 ms`."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def microseconds(value: float) -> str:
    """`12.5`; whole numbers when there are many."""
    return f"{value * 1e6:,.0f}" if value >= 1e-4 else f"{value * 1e6:.1f}"
