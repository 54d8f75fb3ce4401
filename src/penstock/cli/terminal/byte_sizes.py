"""Sizes in bytes, for people to read."""

from __future__ import annotations

__all__ = ("format_bytes",)


def format_bytes(nbytes: int) -> str:
    """Return a size as people read it: `32.5 MB`, powers of 1000."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"

        size /= 1000

    return f"{size:.1f} TB"
