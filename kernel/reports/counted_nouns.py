"""A number before its noun."""

from __future__ import annotations

__all__ = ("counted",)


def counted(n: int, one: str, many: str = "") -> str:
    """Return `1 leaf`, `2 leaves`, `1,000 steps`.

    Args:
        n: How many.
        one: The noun for one.
        many: For any other number; by default with an s.
    """
    return f"{n:,} {one if n == 1 else many or one + 's'}"
