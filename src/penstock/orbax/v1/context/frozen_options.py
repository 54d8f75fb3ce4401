"""Options that cannot be changed while their context is in use."""

from __future__ import annotations

__all__ = ("FROZEN_IDS", "Guarded", "ids_within")

import dataclasses
from contextvars import ContextVar
from typing import Any, Final, cast

FROZEN_IDS: Final[ContextVar[frozenset[int]]] = ContextVar("penstock_frozen_options", default=frozenset())
"""Identities of all objects that belong to the contexts entered here."""


class Guarded:
    """Cannot be changed while a context that it belongs to is entered."""

    def __setattr__(self, name: str, value: object) -> None:
        if id(self) in FROZEN_IDS.get():
            raise RuntimeError("options of a context in use cannot be changed; set them before its `with`")

        object.__setattr__(self, name, value)


def ids_within(*roots: object) -> frozenset[int]:
    """Return the identities of the dataclass instances that can be reached from some objects."""
    found: set[int] = set()
    todo: list[Any] = list(roots)
    while todo:
        value = todo.pop()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            if id(value) not in found:
                found.add(id(value))
                todo += [getattr(value, field.name) for field in dataclasses.fields(value)]
        elif isinstance(value, dict):
            todo += list(cast("Any", value).values())
        elif isinstance(value, list | tuple | set):
            todo += cast("list[Any]", value)

    return frozenset(found)
