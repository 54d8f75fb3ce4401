"""What outlives one save or restore: an object of each kind that stages ask for."""

from __future__ import annotations

__all__ = ("Shared",)

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, TypeVar, cast, final

T = TypeVar("T")


@final
class Shared:
    """One object of each class, made when it is first asked for. Thread-safe.

    Stages keep nothing themselves, and modules keep no state; what is worth remembering from one
    run to the next (the plan of a tree that is saved again and again) lives here, as long as the
    Checkpointer does.
    """

    __slots__ = ("_lock", "_objects")

    def __init__(self) -> None:
        self._objects: dict[Callable[[], Any], Any] = {}
        self._lock = Lock()

    @classmethod
    def with_objects(cls, objects: Mapping[Callable[[], Any], Any]) -> Shared:
        """Make one that has some objects of another."""
        made = cls()
        made._objects.update(objects)
        return made

    def of(self, kind: Callable[[], T]) -> T:
        """Return the one object that `kind()` makes. It must take care of its own locking."""
        with self._lock:
            if kind not in self._objects:
                self._objects[kind] = kind()

            return cast("T", self._objects[kind])
