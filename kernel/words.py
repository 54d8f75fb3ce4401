"""Words of messages: counts with their nouns, and what is nearest to a name or a step that is not there."""

from __future__ import annotations

__all__ = ("counted", "hint_at", "in_short", "near_steps", "nearest")

from collections.abc import Collection, Sequence
from typing import Final

_MOST_COMPARED: Final = 10_000  # with one name, at some 10 microseconds each
_MOST_NAMED: Final = 20
_MOST_JOINED: Final = 2


def counted(n: int, one: str, many: str = "") -> str:
    """Return `1 leaf`, `2 leaves`, `1,000 steps`.

    Args:
        n: How many.
        one: The noun for one.
        many: For any other number; by default with an s.
    """
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def in_short(names: Sequence[str]) -> str:
    """Return `a`, `a and b`, or `a to d (4)`: names in an order in which those between can be guessed."""
    return f"{names[0]} to {names[-1]} ({len(names):,})" if len(names) > _MOST_JOINED else " and ".join(names)


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that is most like `name`, whatever the case of its letters; None if none is."""
    from difflib import get_close_matches  # no one pays for it before something is wrong

    folded = {one.casefold(): one for one in known[:_MOST_COMPARED]}
    near = get_close_matches(name.casefold(), folded, n=1)
    return folded[near[0]] if near else None


def hint_at(name: str, known: Sequence[str]) -> str:
    """Say what may have been meant by a name that is not known: the nearest one, else all that there are."""
    near = nearest(name, known)
    if near is not None:
        return f"did you mean {near!r}?"

    more = f" and {len(known) - _MOST_NAMED:,} more" if len(known) > _MOST_NAMED else ""
    return f"there are {', '.join(known[:_MOST_NAMED]) or 'none'}{more}"


def near_steps(step: int, steps: Collection[int]) -> str:
    """Say which steps there are around one that is missing, as in `there are 1500 and 2000`."""
    before = max((one for one in steps if one < step), default=None)
    after = min((one for one in steps if one > step), default=None)
    if before is not None and after is not None:
        return f"there are {before} and {after}"
    if before is not None:
        return f"the latest is {before}"

    return "there are none" if after is None else f"the first is {after}"
