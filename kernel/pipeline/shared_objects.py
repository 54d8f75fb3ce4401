"""Objects that outlive one save or restore, such as caches; one per class."""

from __future__ import annotations

__all__ = ("Shared",)

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, TypeVar, cast, final

from penstock.kernel.memory.bounded_cache import BoundedCache, Caching

T = TypeVar("T")


@final
class Shared:
    """One object per class, created on first request. Thread-safe.

    Stages and modules keep no state. What is worth keeping between runs, such as the structure of a tree
    that is saved repeatedly, lives here as long as the Checkpointer.
    """

    __slots__ = ("_caches", "_lock", "_objects")

    def __init__(self) -> None:
        self._objects: dict[Callable[[], Any], Any] = {}
        self._caches: list[BoundedCache[Any, Any]] = []
        self._lock = Lock()

    @property
    def caches(self) -> Sequence[BoundedCache[Any, Any]]:
        """The caches of all objects that were created here."""
        return self._caches

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
                made = self._objects[kind] = kind()
                self._caches += made.caches if isinstance(made, Caching) else ()

            return cast("T", self._objects[kind])
