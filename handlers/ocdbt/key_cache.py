"""A cache of decoded keys: the databases of one run have the same keys, and other values."""

from __future__ import annotations

__all__ = ("KeyTable", "RememberedKeys")

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias, final

from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity

Columns: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], bytes]
"""Keys as they are stored: lengths of prefixes, lengths of suffixes, suffixes."""

_BYTES_OF_A_KEY: Final = 100  # with its row, beside its text


@final
@dataclass(frozen=True, slots=True, eq=False)
class KeyTable:
    """The keys of a database, in ascending order. Nobody may change it."""

    keys: list[bytes]
    rows: Mapping[bytes, int]  #: which place a key has in `keys`

    @classmethod
    def of(cls, keys: list[bytes]) -> KeyTable:
        """Number the keys."""
        return cls(keys, dict(zip(keys, range(len(keys)), strict=True)))


@final
@dataclass(frozen=True, slots=True, eq=False)
class RememberedKeys:
    """Remembers the keys of the last few nodes and databases. Thread-safe.

    A node is recognised by all bytes of its keys. Equal keys are one object.
    """

    _nodes: BoundedCache[Columns, list[bytes]] = field(default_factory=lambda: BoundedCache(16), init=False)
    _tables: BoundedCache[ByIdentity, KeyTable] = field(default_factory=lambda: BoundedCache(2), init=False)

    def keys(self, stored: Columns, decode: Callable[[], list[bytes]]) -> list[bytes]:
        """Return the keys of a node, decoded now or before."""
        return self._nodes.get_or_make(stored, decode, _nbytes)

    def table(self, nodes: list[list[bytes]]) -> KeyTable:
        """Return the table of all keys, given those of each node."""

        def make() -> KeyTable:
            return KeyTable.of([key for keys in nodes for key in keys])

        return self._tables.get_or_make(ByIdentity(*nodes), make, lambda table: _nbytes(table.keys))


def _nbytes(keys: list[bytes]) -> int:
    return sum(map(len, keys)) + _BYTES_OF_A_KEY * len(keys)
