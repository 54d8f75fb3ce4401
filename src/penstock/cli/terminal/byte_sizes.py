"""Sizes in bytes, formatted for people."""

from __future__ import annotations

__all__ = ("format_bytes",)


def format_bytes(nbytes: int) -> str:
    """Return a size such as `32.5 MB`, in powers of 1000."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"

        size /= 1000

    return f"{size:.1f} TB"
