"""Long JSON documents in slices: a parser holds the interpreter's lock for as long as one call takes."""

from __future__ import annotations

__all__ = ("SLICE", "slices")

from collections.abc import Iterator
from typing import Final

SLICE: Final = 1 << 16
"""Characters looked at in one step, during which no other thread runs: about a millisecond."""


def slices(text: str, start: int, end: int, mark: str, keep: int) -> Iterator[str]:
    """Cut `text[start:end]` after the first `keep` characters of a mark, leaving out the comma behind them.

    Args:
        text: A document.
        start: Where its list or object of many members begins.
        end: Where that ends.
        mark: What ends one member and begins the next; no string can hold it.
        keep: How much of the mark belongs to the member that ends.
    """
    while end - start > SLICE:
        stop = text.find(mark, start + SLICE, end)
        if stop < 0:
            break

        yield text[start : stop + keep]
        start = stop + len(mark) - 1

    yield text[start:end]
