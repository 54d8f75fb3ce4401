"""Text from a checkpoint, made safe for a terminal: what is in it is data, whoever wrote it."""

from __future__ import annotations

__all__ = ("one_line", "printable", "width_of")

import unicodedata
from typing import Final

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
