"""Selects leaves by patterns: shell patterns over dotted names, or key paths as they are printed. Pure."""

from __future__ import annotations

__all__ = ("keys_in", "near_leaves", "pattern_fits", "select_rows")

import re
from ast import literal_eval
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from penstock.kernel.errors import SpecError
from penstock.kernel.protocols.leaf import KeyPath
from penstock.kernel.words import hint_at, nearest

if TYPE_CHECKING:
    from penstock.kernel.messages.restore import Only

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
    """Return whether a pattern names the leaf, or a node that it is below.

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


def select_rows(path: str, keys: Sequence[KeyPath], only: Only) -> list[int]:
    """Return the places of the leaves that `only` selects, in order.

    Args:
        path: The checkpoint, for messages.
        keys: The keys of all stored leaves.
        only: A predicate on key paths, or shell patterns over dotted names, or key paths as they are
            printed. One that matches a node selects every leaf below it.

    Raises:
        SpecError: If a pattern matches no leaf, or no leaf is selected.
    """
    if callable(only):
        rows = [row for row, key_path in enumerate(keys) if only(key_path)]
    else:
        rows = _fitting(path, keys, (only,) if isinstance(only, str) else tuple(only))
    if not rows:
        raise SpecError(f"only selects no leaf of {path}")

    return rows


def _fitting(path: str, keys: Sequence[KeyPath], patterns: Sequence[str]) -> list[int]:
    unused = set(patterns)
    rows: list[int] = []
    for row, key_path in enumerate(keys):
        name = ".".join(key_path)
        fitting = [one for one in patterns if pattern_fits(one, name, key_path)]
        unused.difference_update(fitting)
        if fitting:
            rows.append(row)

    if unused:
        pattern = min(unused)
        problem = f"only: no leaf of {path} matches {pattern!r}"
        raise SpecError(f"{problem}; {near_leaves(pattern, keys)}")

    return rows


def near_leaves(pattern: str, keys: Sequence[KeyPath]) -> str:
    """Say what there is where a pattern that matches no leaf leaves the tree, and what is like it.

    Args:
        pattern: A shell pattern over dotted names, or a printed key path.
        keys: The keys of all leaves.

    Returns:
        The end of a sentence, as in `did you mean 'params.head'?`.
    """
    parts = keys_in(pattern) or tuple(pattern.split("."))
    below = list(keys)
    depth = 0
    while depth < len(parts):
        fitting = [one for one in below if len(one) > depth and fnmatchcase(one[depth], parts[depth])]
        if not fitting:
            break

        below, depth = fitting, depth + 1

    above = ".".join(parts[:depth])
    if depth == len(parts):  # it is a node, and was asked for as a leaf
        return f"did you mean '{above}.*'?"

    there = list(dict.fromkeys(one[depth] for one in below if len(one) > depth))
    if not there:
        return f"{'.'.join(below[0])!r} is a leaf" if below else "it has no leaf"

    near = nearest(parts[depth], there)
    if near is not None:
        meant = [*parts[:depth], near, *parts[depth + 1 :]]
        is_there = any(len(one) == len(meant) and all(map(fnmatchcase, one, meant)) for one in below)
        return f"did you mean {'.'.join(meant if is_there else meant[: depth + 1])!r}?"

    deeper = _by_last_key(parts, keys) if not depth else None
    if deeper is not None:
        return f"did you mean {deeper!r}?"

    return f"{hint_at(parts[depth], there)} below {above}" if above else hint_at(parts[depth], there)


def _by_last_key(parts: KeyPath, keys: Sequence[KeyPath]) -> str | None:
    """Return the pattern for what is called so deeper in the tree; None if nothing is."""
    wanted = "*." + ".".join(parts)
    return wanted if any(pattern_fits(wanted, ".".join(one), one) for one in keys) else None
