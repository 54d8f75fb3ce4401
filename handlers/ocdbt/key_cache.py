"""Keys that were decoded before: the databases of one training have the same, and other values."""

from __future__ import annotations

__all__ = ("KeyTable", "RememberedKeys")

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, TypeAlias, final

Columns: TypeAlias = tuple[Sequence[int], Sequence[int], bytes]
"""Keys as they are stored: lengths of prefixes, lengths of suffixes, suffixes."""

_MOST_NODES: Final = 16
_MOST_TABLES: Final = 2


@final
@dataclass(frozen=True, slots=True, eq=False)
class KeyTable:
    """The keys of a database, in ascending order. Nobody may change it."""

    keys: list[bytes]
    rows: Mapping[bytes, int]  #: which place a key has in `keys`

    @classmethod
    def of(cls, keys: list[bytes]) -> KeyTable:
        return cls(keys, dict(zip(keys, range(len(keys)), strict=True)))


@final
@dataclass(frozen=True, slots=True, eq=False)
class RememberedKeys:
    """Remembers the keys of the last few nodes and databases. Thread-safe.

    What is known again is known by all of its bytes; of the same there is one object.
    """

    _nodes: list[tuple[Columns, list[bytes]]] = field(
        default_factory=list["tuple[Columns, list[bytes]]"], init=False
    )
    _tables: list[tuple[list[list[bytes]], KeyTable]] = field(
        default_factory=list["tuple[list[list[bytes]], KeyTable]"], init=False
    )
    _lock: Lock = field(default_factory=Lock, init=False)

    def keys(self, stored: Columns, decode: Callable[[], list[bytes]]) -> list[bytes]:
        """Return the keys of a node, now decoded or before."""
        with self._lock:
            nodes = list(self._nodes)

        for known, keys in nodes:
            if known == stored:
                return keys

        keys = decode()
        with self._lock:
            self._nodes.append((stored, keys))
            del self._nodes[:-_MOST_NODES]

        return keys

    def table(self, nodes: list[list[bytes]]) -> KeyTable:
        """Return the table of all keys, given those of each node."""
        with self._lock:
            tables = list(self._tables)

        for known, table in tables:
            if len(known) == len(nodes) and all(a is b for a, b in zip(known, nodes, strict=True)):
                return table

        table = KeyTable.of([key for keys in nodes for key in keys])
        with self._lock:
            self._tables.append((nodes, table))
            del self._tables[:-_MOST_TABLES]

        return table
