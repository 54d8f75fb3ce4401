"""Reserved names of items and files."""

from __future__ import annotations

__all__ = ("AUTO", "DELETION", "METRICS", "RESERVED", "STATE", "check_item_names", "check_one_name")

import os
from collections.abc import Iterable
from typing import Any, Final, cast

STATE: Final = "state"
"""The item that `save` makes."""
AUTO: Final = "AUTO"
"""Asks `load` to find the item that holds a tree."""
METRICS: Final = "metrics"
DELETION: Final = "_CHECKPOINT_DELETION"
RESERVED: Final = frozenset({METRICS, AUTO, DELETION})


def check_item_names(given: Any, what: str) -> None:
    """Refuse anything but a dict with names of items.

    Raises:
        ValueError: If it is refused.
    """
    if not isinstance(given, dict):
        raise ValueError(f"`{what}` must be a valid dict of names to objects, but got {type(given)}")

    check_names(cast("Any", given))


def check_one_name(name: str | None) -> None:
    """Refuse anything but the name of an item, None, or `AUTO`.

    Raises:
        ValueError: If it is refused.
    """
    if name is not None and name != AUTO:
        check_names((name,))


def check_names(names: Iterable[Any]) -> None:
    """Refuse a name that no item can have.

    Raises:
        ValueError: If it is refused.
    """
    names = list(names)
    if "" in names:
        raise ValueError("Empty string is not supported as a checkpointable name: it must not be empty.")

    reserved = RESERVED & set(names)
    if reserved:
        raise ValueError(f"Provided reserved checkpointable keys: {sorted(reserved)}.")

    for name in names:
        if not isinstance(name, str) or name in {".", ".."} or os.sep in name or "\0" in name:
            raise ValueError(f"a checkpointable cannot be called {name!r}: it is the name of its directory")
