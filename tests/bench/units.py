"""Numbers for people."""

from __future__ import annotations


def figure(value: float) -> str:
    """Three digits that count, and never an exponent for what is large."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def amount(nbytes: float) -> str:
    """`1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{figure(nbytes / size)} {unit}"

    return f"{nbytes:.0f} B"


def seconds(value: float) -> str:
    """`1.25 s` or `12.5 ms`."""
    return f"{figure(value)} s" if value >= 1 else f"{figure(value * 1e3)} ms"


def microseconds(value: float) -> str:
    """`12.5`; whole numbers when there are many."""
    return f"{value * 1e6:,.0f}" if value >= 1e-4 else f"{value * 1e6:.1f}"
