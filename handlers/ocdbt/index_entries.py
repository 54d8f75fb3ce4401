"""The keys of a database and where their values lie, in columns.

A tree of 100,000 leaves has 200,000 keys. One object per key would take longer to make than the index takes
to read, and the garbage collector would take longer than both.
"""

from __future__ import annotations

__all__ = ("Index", "Values")

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.ocdbt.key_cache import KeyTable
from penstock.handlers.ocdbt.value_refs import Indirect, Inline, Value
from penstock.kernel.memory.bounded_cache import ByIdentity

Column: TypeAlias = npt.NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """Where the values of some keys lie, in the order of the keys."""

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


@final
class Index(Mapping[bytes, Value]):
    """All keys of a database, each with its `Value`. Immutable.

    Args:
        table: The keys.
        parts: Their values, in the order of the keys; each part covers the next few keys.
    """

    __slots__ = ("_inline", "_keys", "files", "ids", "lengths", "offsets", "rows")

    def __init__(self, table: KeyTable, parts: Iterable[Values]) -> None:
        files: dict[str, int] = {}
        inline = _Inline()
        columns: list[tuple[Column, Column, Column]] = []
        for part in parts:
            numbers = np.array([*[files.setdefault(file, len(files)) for file in part.files], -1], np.int64)
            columns.append((numbers[part.ids], inline.places(part), part.lengths))

        self._keys = table.keys
        self.rows = table.rows  #: the row of each key
        self.files = list(files)  #: data files, relative to the database's directory
        self.ids = _joined([ids for ids, _, _ in columns])  #: index into `files`; -1 if inline
        self.offsets = _joined([offsets for _, offsets, _ in columns])
        self.lengths = _joined([lengths for _, _, lengths in columns])
        self._inline = bytes(inline.data)

    @classmethod
    def of(cls, values: Mapping[bytes, Value]) -> Index:
        """Make an index from a mapping of a few keys."""
        ordered = sorted(values)
        return cls(KeyTable.of(ordered), [Values.of([values[key] for key in ordered])])

    def __getitem__(self, key: bytes) -> Value:
        return self.value(self.rows[key])

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def keys_in_order(self) -> Sequence[bytes]:
        """All keys, in ascending order: that of their rows."""
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

    def inline_values(self, rows: list[int]) -> list[bytes | None]:
        """Return the inline values of many rows; None for a value in a data file."""
        ids, offsets = self.ids[rows], self.offsets[rows]
        ends = offsets + self.lengths[rows]
        inline = self._inline
        return [
            inline[start:end] if file < 0 else None
            for file, start, end in zip(ids.tolist(), offsets.tolist(), ends.tolist(), strict=True)
        ]

    @property
    def inline_nbytes(self) -> int:
        """Bytes of all values that are stored in the index itself."""
        return int(self.lengths[self.ids < 0].sum())

    def what_it_says(self) -> Hashable:
        """Return a value that is equal for two indices with the same keys and the same inline values.

        Keys are the same if their table is the same object. Places in data files are not compared.
        """
        inline = self.ids < 0
        places = self.offsets[inline].tobytes(), self.lengths[inline].tobytes()
        return ByIdentity(self.rows), self._inline, inline.tobytes(), places

    def needed(self) -> dict[str, int]:
        """Return the least length of each data file, in bytes."""
        there = self.ids >= 0
        ends = np.zeros(len(self.files), np.int64)
        np.maximum.at(ends, self.ids[there], (self.offsets + self.lengths)[there])
        return dict(zip(self.files, ends.tolist(), strict=True))


@final
class _Inline:
    """Values that are stored in the index itself, each distinct one once: arrays are of few kinds."""

    __slots__ = ("_known", "data")

    def __init__(self) -> None:
        self.data = bytearray()
        self._known: dict[bytes, int] = {}

    def places(self, part: Values) -> Column:
        """Return the offsets of a part's values; of those that it holds itself, in `data`."""
        there = np.flatnonzero(part.ids < 0)
        starts, lengths = part.offsets[there].tolist(), part.lengths[there].tolist()
        found: list[int] = []
        for start, length in zip(starts, lengths, strict=True):
            value = part.inline[start : start + length]
            at = self._known.get(value)
            if at is None:
                at = self._known[value] = len(self.data)
                self.data += value

            found.append(at)

        offsets = part.offsets.copy()
        offsets[there] = found
        return offsets


def _joined(columns: list[Column]) -> Column:
    return np.concatenate(columns) if columns else np.zeros(0, np.int64)
