"""The entries of an OCDBT database in memory.

An `Index` is a mapping from key to value whose values stay in columns. `RememberedKeys` keeps the keys of
recent trees, because a checkpoint of the next step has the same ones.
"""

from __future__ import annotations

__all__ = ("BYTES_OF_A_KEY", "Index", "KeyTable", "RememberedKeys", "Values")

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.ocdbt.wire_format import Indirect, Inline, Value
from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity

StoredKeys: TypeAlias = tuple[bytes, bytes, bytes, bytes]
"""Keys in their stored form: lengths of prefixes and suffixes, all suffixes, and what is before each key."""

_SLICE: Final = 8192  # keys: a millisecond or less
BYTES_OF_A_KEY: Final = 100  # overhead of a key and its row, without the key's text


@final
@dataclass(frozen=True, eq=False)
class KeyTable:
    """The keys of a database, in ascending order. It is shared, so it must not be changed."""

    keys: list[bytes]

    @cached_property
    def rows(self) -> Mapping[bytes, int]:
        """The position of each key in `keys`. It is made where it is first asked for."""
        rows: dict[bytes, int] = {}
        for start in range(0, len(self.keys), _SLICE):  # one long call would hold the interpreter
            part = self.keys[start : start + _SLICE]
            rows.update(zip(part, range(start, start + len(part)), strict=True))

        return rows

    def find(self, wanted: Sequence[bytes]) -> Sequence[int | None]:
        """Return the row of each key, None of those that are not there.

        Arrays of one kind have as many keys each. So what is wanted of each of them is at equal distances,
        if it is asked for in order, and no table of a million keys has to be made to find it.
        """
        if len(wanted) > 1:
            first, second = bisect_left(self.keys, wanted[0]), bisect_left(self.keys, wanted[1])
            rows = range(first, first + max(second - first, 1) * len(wanted), max(second - first, 1))
            if self.keys[first : rows.stop : rows.step] == wanted:
                return rows

        row_of = self.rows.get
        return [row_of(key) for key in wanted]


@final
@dataclass(frozen=True, slots=True, eq=False)
class RememberedKeys:
    """Remembers the keys of the last few nodes and databases. Thread-safe.

    A node is recognised by all bytes of its stored keys. Nodes with equal keys share one list, and databases
    with the same lists share one table.
    """

    nodes: BoundedCache[StoredKeys, list[bytes]] = field(default_factory=lambda: BoundedCache(16), init=False)
    _tables: BoundedCache[ByIdentity, KeyTable] = field(default_factory=lambda: BoundedCache(2), init=False)

    @property
    def caches(self) -> Sequence[BoundedCache[Any, Any]]:
        """See `Caching`."""
        return (self._tables, self.nodes)

    def table(self, nodes: list[list[bytes]]) -> KeyTable:
        """Return the table of a database, given the keys of each of its nodes in order."""
        identity = ByIdentity(*nodes)
        found = self._tables.get(identity)
        if found is None:
            found = KeyTable([key for keys in nodes for key in keys])
            nbytes = sum(map(len, found.keys)) + BYTES_OF_A_KEY * len(found.keys)
            self._tables.put(identity, found, nbytes)

        return found


# A tree of 100,000 leaves has 200,000 keys. One object per key would take longer to make than the index takes
# to read, and the garbage collector would take longer than both.
Column: TypeAlias = npt.NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """The places of the values of some keys, in the order of the keys."""

    files: list[str]  #: data files, relative to the database's directory
    inline: bytes  #: the values that are stored in the index itself, concatenated
    ids: Column  #: index into `files`, or -1 for a value in `inline`
    offsets: Column  #: bytes from the start of the file, or of `inline`
    lengths: Column  #: bytes

    @classmethod
    def of(cls, values: Iterable[Value]) -> Values:
        """Make columns from single values."""
        files: dict[str, int] = {}
        inline = bytearray()
        rows: list[tuple[int, int, int]] = []
        for value in values:
            if isinstance(value, Inline):
                rows.append((-1, len(inline), len(value.value)))
                inline += value.value
            else:
                rows.append((files.setdefault(value.file, len(files)), value.offset, value.length))

        columns = np.array(rows, np.int64).reshape(-1, 3)
        return cls(list(files), bytes(inline), columns[:, 0], columns[:, 1], columns[:, 2])


_MANY_ALIKE: Final = 64  # values of one length, which are compared as a table of bytes


def _heads_of_equal(data: bytes, starts: Column, sizes: Column) -> Column:
    """Return the places of the values that are not known to be equal to the one before."""
    follows = (sizes[1:] == sizes[:-1]) & (starts[1:] == starts[:-1] + sizes[:-1])
    breaks: list[int] = (np.flatnonzero(~follows) + 1).tolist()
    differs = np.ones(len(sizes), np.bool_)
    for begin, end in pairwise([0, *breaks, len(sizes)]):
        nbytes = int(sizes[begin]) if end - begin >= _MANY_ALIKE else 0
        for at in range(begin, end - 1, _SLICE) if nbytes else ():
            n = min(_SLICE + 1, end - at)
            table = np.frombuffer(data, np.uint8, n * nbytes, int(starts[at])).reshape(n, nbytes)
            differs[at + 1 : at + n] = (table[1:] != table[:-1]).any(axis=1)

    return np.flatnonzero(differs)


@final
class Index(Mapping[bytes, Value]):
    """All keys of a database, each with its `Value`. Immutable.

    Args:
        table: The keys.
        parts: Their values, in the order of the keys; each part covers the next few keys.
    """

    __slots__ = ("_inline", "_keys", "files", "ids", "lengths", "offsets", "table")

    def __init__(self, table: KeyTable, parts: Iterable[Values]) -> None:
        files: dict[str, int] = {}
        inline = bytearray()
        known: dict[bytes, int] = {}  # each distinct inline value once: arrays are of few kinds
        none = np.zeros(0, np.int64)
        ids, offsets, lengths = [none], [none], [none]
        for part in parts:
            numbers = np.array([*[files.setdefault(file, len(files)) for file in part.files], -1], np.int64)
            here = np.flatnonzero(part.ids < 0)
            heads = _heads_of_equal(part.inline, part.offsets[here], part.lengths[here])
            found: list[int] = []
            rows = here[heads]
            for start, nbytes in zip(part.offsets[rows].tolist(), part.lengths[rows].tolist(), strict=True):
                value = part.inline[start : start + nbytes]
                at = known.get(value)
                if at is None:
                    at = known[value] = len(inline)
                    inline += value

                found.append(at)

            places = part.offsets.copy()
            places[here] = np.repeat(np.array(found, np.int64), np.diff(heads, append=len(here)))
            ids.append(numbers[part.ids])
            offsets.append(places)
            lengths.append(part.lengths)

        self._keys = table.keys
        self.table = table
        self.files = list(files)  #: data files, relative to the database's directory
        self.ids = np.concatenate(ids)  #: index into `files`; -1 if inline
        self.offsets = np.concatenate(offsets)
        self.lengths = np.concatenate(lengths)
        self._inline = bytes(inline)

    @classmethod
    def of(cls, values: Mapping[bytes, Value]) -> Index:
        """Make an index from a mapping of a few keys."""
        ordered = sorted(values)
        return cls(KeyTable(ordered), [Values.of([values[key] for key in ordered])])

    def __getitem__(self, key: bytes) -> Value:
        return self.value(self.table.rows[key])

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def keys_in_order(self) -> Sequence[bytes]:
        """All keys, in ascending order, which is the order of their rows."""
        return self._keys

    def rows_below(self, prefix: bytes) -> range:
        """Return the rows of the keys that begin with `prefix`, which is empty or ends with a slash."""
        if not prefix:
            return range(len(self._keys))

        behind = prefix[:-1] + bytes([prefix[-1] + 1])
        return range(bisect_left(self._keys, prefix), bisect_left(self._keys, behind))

    def value(self, row: int) -> Value:
        """Return the value of one row."""
        file, offset, length = int(self.ids[row]), int(self.offsets[row]), int(self.lengths[row])
        if file < 0:
            return Inline(self._inline[offset : offset + length])

        return Indirect(self.files[file], offset, length)

    def inline_places(self, rows: Sequence[int]) -> list[int]:
        """Number the values of many rows: alike for equal inline ones, -1 for empty and for all others."""
        at = np.asarray(rows, np.int64)
        is_inline = (self.ids[at] < 0) & (self.lengths[at] > 0)
        places: list[int] = np.where(is_inline, self.offsets[at], -1).tolist()
        return places

    @property
    def inline_nbytes(self) -> int:
        """Bytes of all values that are stored in the index itself."""
        return int(self.lengths[self.ids < 0].sum())

    def content_key(self) -> Hashable:
        """Return a value that is equal for two indices with the same keys and the same inline values.

        Keys are the same if their table is the same object. Places in data files are not compared.
        """
        inline = self.ids < 0
        places = self.offsets[inline].tobytes(), self.lengths[inline].tobytes()
        return ByIdentity(self.table), self._inline, inline.tobytes(), places

    def needed(self) -> dict[str, int]:
        """Return the least length of each data file, in bytes."""
        there = self.ids >= 0
        ends = np.zeros(len(self.files), np.int64)
        np.maximum.at(ends, self.ids[there], (self.offsets + self.lengths)[there])
        return dict(zip(self.files, ends.tolist(), strict=True))
