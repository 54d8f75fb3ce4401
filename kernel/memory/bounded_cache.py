"""The one cache class of penstock, bounded in entries and bytes."""

from __future__ import annotations

__all__ = ("BoundedCache", "ByIdentity", "Caching")

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from operator import is_
from threading import Lock
from typing import Any, Final, Generic, Protocol, TypeVar, final, runtime_checkable

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST_BYTES: Final = 64 * 2**20
"""Default limits of one cache."""


@final
class BoundedCache(Generic[K, V]):
    """Keeps the most recently used values, bounded in number and in bytes. Thread-safe.

    A cache belongs to an object (a layout, or the `Shared` objects of a Checkpointer) and dies with it. If
    that object is `Caching`, what it holds counts against the memory budget, and gives way to leases.

    Args:
        most_entries: Entries to keep; the least recently used goes first.
        most_bytes: Bytes to keep, of all entries together. A larger value is not kept at all.
    """

    __slots__ = ("_entries", "_lock", "_most_bytes", "_most_entries", "_nbytes")

    def __init__(self, most_entries: int, most_bytes: int = MOST_BYTES) -> None:
        self._most_entries = most_entries
        self._most_bytes = most_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()  # the one used last at the end
        self._nbytes = 0
        self._lock = Lock()

    def __deepcopy__(self, memo: object) -> BoundedCache[K, V]:
        """Return another one of the same bounds, empty."""
        return BoundedCache(self._most_entries, self._most_bytes)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all values kept, as their owners counted them."""
        return self._nbytes

    def takes(self, nbytes: int) -> bool:
        """True if a value of so many bytes is kept at all."""
        return nbytes <= self._most_bytes

    def get(self, key: K) -> V | None:
        """Return the value kept for `key`; None if there is none."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None

            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: K, value: V, nbytes: int) -> None:
        """Keep a value for `key`, replacing any earlier one.

        Args:
            key: To look it up by.
            value: Must not be changed from now on.
            nbytes: How much memory it takes, about.
        """
        with self._lock:
            self._replace(key, (value, nbytes))

    def get_or_make(self, key: K, make: Callable[[], V], nbytes: Callable[[V], int]) -> V:
        """Return the value kept for `key`, or make it and keep it.

        Two threads that ask at the same time may both make it; the value kept last stays.

        Args:
            key: To look it up by.
            make: Called without the lock. What it raises is raised here, and nothing is kept.
            nbytes: How much memory a value takes, about.
        """
        found = self.get(key)
        if found is None:
            found = make()
            self.put(key, found, nbytes(found))

        return found

    def change(self, key: K, changed: Callable[[V | None], tuple[V, int] | None]) -> None:
        """Replace the value kept for `key` atomically.

        Args:
            key: Of the value.
            changed: Called under the lock with the value, None if there is none; it returns the new one and
                its bytes, or None to keep none.
        """
        with self._lock:
            before = self._entries.get(key)
            self._replace(key, changed(None if before is None else before[0]))

    def pop(self, key: K) -> V | None:
        """Remove the value kept for `key` and return it; None if there is none."""
        with self._lock:
            before = self._replace(key, None)
            return None if before is None else before[0]

    def free(self, nbytes: int) -> int:
        """Drop the least recently used values until `nbytes` are free; return the bytes freed."""
        with self._lock:
            before = self._nbytes
            while self._entries and before - self._nbytes < nbytes:
                self._replace(next(iter(self._entries)), None)

            return before - self._nbytes

    def _replace(self, key: K, entry: tuple[V, int] | None) -> tuple[V, int] | None:
        """Replace the value of `key`, or drop it for None; return the earlier one. Under the lock."""
        before = self._entries.pop(key, None)
        if before is not None:
            self._nbytes -= before[1]
        if entry is not None and entry[1] <= self._most_bytes:
            self._entries[key] = entry
            self._nbytes += entry[1]
            while len(self._entries) > self._most_entries or self._nbytes > self._most_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self._nbytes -= freed

        return before


@runtime_checkable
class Caching(Protocol):
    """An object with caches. Those of a layout and of the `Shared` objects of a Checkpointer are counted."""

    @property
    def caches(self) -> Sequence[BoundedCache[Any, Any]]:
        """All of them; the same ones at every call."""
        ...


@final
class ByIdentity:
    """A key that compares objects by identity. Keeps them alive.

    Args:
        *objects: They need be neither hashable nor comparable.
    """

    __slots__ = ("_hash", "_objects")

    def __init__(self, *objects: object) -> None:
        self._objects = objects
        self._hash = hash(tuple(map(id, objects)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ByIdentity)
            and len(self._objects) == len(other._objects)
            and all(map(is_, self._objects, other._objects))
        )
