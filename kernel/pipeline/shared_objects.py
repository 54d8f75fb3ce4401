"""Objects that outlive one save or restore, such as caches; one per class."""

from __future__ import annotations

__all__ = ("Shared",)

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, TypeVar, cast, final

T = TypeVar("T")


@final
class Shared:
    """One object per class, created on first request. Thread-safe.

    Stages and modules keep no state. What is worth keeping between runs, such as the structure of a tree
    that is saved repeatedly, lives here as long as the Checkpointer.
    """

    __slots__ = ("_lock", "_objects")

    def __init__(self) -> None:
        self._objects: dict[Callable[[], Any], Any] = {}
        self._lock = Lock()

    @classmethod
    def with_objects(cls, objects: Mapping[Callable[[], Any], Any]) -> Shared:
        """Create a set that starts with some objects of another."""
        made = cls()
        made._objects.update(objects)
        return made

    def of(self, kind: Callable[[], T]) -> T:
        """Return the object of class `kind`, created on first request. It does its own locking."""
        with self._lock:
            if kind not in self._objects:
                self._objects[kind] = kind()

            return cast("T", self._objects[kind])
