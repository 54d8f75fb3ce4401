"""A cache of decoded keys: the databases of one run have the same keys and different values."""

from __future__ import annotations

__all__ = ("KeyTable", "RememberedKeys")

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity

Columns: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], bytes, bytes]
"""Keys in their stored form: lengths of prefixes and suffixes, all suffixes, and what is before each key."""

_SLICE: Final = 8192  # keys: a millisecond or less
_BYTES_OF_A_KEY: Final = 100  # overhead of a key and its row, without the key's text


@final
@dataclass(frozen=True, slots=True, eq=False)
class KeyTable:
    """The keys of a database, in ascending order. It is shared, so it must not be changed."""

    keys: list[bytes]
    rows: Mapping[bytes, int]  #: position of each key in `keys`

    @classmethod
    def of(cls, keys: list[bytes]) -> KeyTable:
        """Make the table of some keys, which must be in ascending order."""
        rows: dict[bytes, int] = {}
        for start in range(0, len(keys), _SLICE):  # one long call would hold the interpreter
            part = keys[start : start + _SLICE]
            rows.update(zip(part, range(start, start + len(part)), strict=True))

        return cls(keys, rows)


@final
@dataclass(frozen=True, slots=True, eq=False)
class RememberedKeys:
    """Remembers the keys of the last few nodes and databases. Thread-safe.

    A node is recognised by all bytes of its stored keys. Nodes with equal keys share one list, and databases
    with the same lists share one table.
    """

    _nodes: BoundedCache[Columns, list[bytes]] = field(default_factory=lambda: BoundedCache(16), init=False)
    _tables: BoundedCache[ByIdentity, KeyTable] = field(default_factory=lambda: BoundedCache(2), init=False)

    @property
    def caches(self) -> Sequence[BoundedCache[Any, Any]]:
        """See `Caching`."""
        return (self._tables, self._nodes)

    def keys(self, stored: Columns, decode: Callable[[], list[bytes]]) -> list[bytes]:
        """Return the keys of a node; `decode` is called only if they are not cached."""
        return self._nodes.get_or_make(stored, decode, _nbytes)

    def table(self, nodes: list[list[bytes]]) -> KeyTable:
        """Return the table of a database, given the keys of each of its nodes in order."""

        def make() -> KeyTable:
            return KeyTable.of([key for keys in nodes for key in keys])

        return self._tables.get_or_make(ByIdentity(*nodes), make, lambda table: _nbytes(table.keys))


def _nbytes(keys: list[bytes]) -> int:
    return sum(map(len, keys)) + _BYTES_OF_A_KEY * len(keys)
