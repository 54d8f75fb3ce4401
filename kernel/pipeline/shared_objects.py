"""Objects that outlive one save or restore, such as caches: one of each class."""

from __future__ import annotations

__all__ = ("Shared",)

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, TypeVar, cast, final

T = TypeVar("T")


@final
class Shared:
    """One object of each class, made when it is first asked for. Thread-safe.

    Stages and modules keep no state. What is worth keeping from one run to the next, such as the
    structure of a tree that is saved again and again, lives here for as long as the Checkpointer.
    """

    __slots__ = ("_lock", "_objects")

    def __init__(self) -> None:
        self._objects: dict[Callable[[], Any], Any] = {}
        self._lock = Lock()

    @classmethod
    def with_objects(cls, objects: Mapping[Callable[[], Any], Any]) -> Shared:
        """Make one that starts with some objects of another."""
        made = cls()
        made._objects.update(objects)
        return made

    def of(self, kind: Callable[[], T]) -> T:
        """Return the one object that `kind()` makes. The object does its own locking."""
        with self._lock:
            if kind not in self._objects:
                self._objects[kind] = kind()

            return cast("T", self._objects[kind])
