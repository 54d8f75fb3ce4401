"""Patterns that select leaves: shell patterns over dotted names, or key paths as they are printed. Pure."""

from __future__ import annotations

__all__ = ("keys_in", "pattern_fits")

import re
from ast import literal_eval
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

from penstock.kernel.protocols.leaf import KeyPath

_STRING: Final = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_PART: Final = re.compile(
    rf"\[(?:(?P<text>{_STRING})|(?P<number>-?[0-9]+)|<flat index (?P<flat>[0-9]+)>)\]|\.(?P<name>[^\W\d]\w*)"
)


@lru_cache(maxsize=1024)
def keys_in(text: str) -> KeyPath | None:
    """Return the keys of a printed key path, such as `['opt'][0].mu`; None if `text` is none.

    What can be read as a key path is one: `[12]` is the thirteenth element, and no set of characters.
    """
    keys: list[str] = []
    at = 0
    while at < len(text):
        found = _PART.match(text, at)
        if found is None:
            return None

        at = found.end()
        quoted = found["text"]
        if quoted is None:
            keys.append(found["number"] or found["flat"] or found["name"])
            continue
        try:
            keys.append(literal_eval(quoted))
        except (SyntaxError, ValueError):  # as of an escape that is none
            return None

    return tuple(keys) if keys else None


def pattern_fits(pattern: str, name: str, keys: KeyPath, *, below: bool = True) -> bool:
    """Whether a pattern names the leaf, or a node that it lies below.

    Args:
        pattern: A shell pattern over dotted names, or a printed key path.
        name: The dotted name of the leaf.
        keys: Its keys.
        below: Whether a shell pattern that fits a node selects what is below it; a key path always does.
    """
    wanted = keys_in(pattern)
    if wanted is not None:
        return keys[: len(wanted)] == wanted

    return fnmatchcase(name, pattern) or (below and fnmatchcase(name, f"{pattern}.*"))
