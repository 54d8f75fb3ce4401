"""The keys of a database and where their values lie, in columns.

A tree of 100,000 leaves has 200,000 keys: an object for each costs more than reading it, and the
garbage collector more than both.
"""

from __future__ import annotations

__all__ = ("Index", "Values")

from collections.abc import Hashable, Iterable, Iterator, Mapping
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
    inline: bytes  #: the values that lie in the index itself, one after the other
    ids: Column  #: which of `files`, or -1 for a value in `inline`
    offsets: Column  #: from the start of the file, or of `inline`; bytes
    lengths: Column  #: bytes

    @classmethod
    def of(cls, values: Iterable[Value]) -> Values:
        """Put values into columns."""
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
        parts: Their values: those of the first keys, of the next, and so on.
    """

    __slots__ = ("_inline", "_keys", "files", "ids", "lengths", "offsets", "rows")

    def __init__(self, table: KeyTable, parts: Iterable[Values]) -> None:
        files: dict[str, int] = {}
        inline: list[bytes] = []
        columns: list[tuple[Column, Column, Column]] = []
        at = 0
        for part in parts:
            numbers = np.array([*[files.setdefault(file, len(files)) for file in part.files], -1], np.int64)
            moved = np.where(part.ids < 0, part.offsets + at, part.offsets)
            columns.append((numbers[part.ids], moved, part.lengths))
            inline.append(part.inline)
            at += len(part.inline)

        self._keys = table.keys
        self.rows = table.rows  #: which row is a key's
        self.files = list(files)  #: data files, relative to the database's directory
        self.ids = _joined([ids for ids, _, _ in columns])  #: which of `files`; -1 in the index itself
        self.offsets = _joined([offsets for _, offsets, _ in columns])
        self.lengths = _joined([lengths for _, _, lengths in columns])
        self._inline = b"".join(inline)

    @classmethod
    def of(cls, values: Mapping[bytes, Value]) -> Index:
        """Make the index of a few keys at hand."""
        ordered = sorted(values)
        return cls(KeyTable.of(ordered), [Values.of([values[key] for key in ordered])])

    def __getitem__(self, key: bytes) -> Value:
        return self.value(self.rows[key])

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def value(self, row: int) -> Value:
        """The value of one row."""
        file, offset, length = int(self.ids[row]), int(self.offsets[row]), int(self.lengths[row])
        if file < 0:
            return Inline(self._inline[offset : offset + length])

        return Indirect(self.files[file], offset, length)

    def inline_values(self, rows: list[int]) -> list[bytes | None]:
        """The values of many rows; None for one that is not in the index itself."""
        ids, offsets = self.ids[rows], self.offsets[rows]
        ends = offsets + self.lengths[rows]
        inline = self._inline
        return [
            inline[start:end] if file < 0 else None
            for file, start, end in zip(ids.tolist(), offsets.tolist(), ends.tolist(), strict=True)
        ]

    def what_it_says(self) -> Hashable:
        """Return what is equal for two indices of the same keys, with the same values in the index itself.

        Keys are the same if their table is the same object. Where values lie in data files does not count.
        """
        inline = self.ids < 0
        return ByIdentity(self.rows), self._inline, inline.tobytes(), self.lengths[inline].tobytes()

    def needed(self) -> dict[str, int]:
        """How long each data file must be, in bytes."""
        ends = self.offsets + self.lengths
        return {file: int(ends[self.ids == number].max(initial=0)) for number, file in enumerate(self.files)}


def _joined(columns: list[Column]) -> Column:
    return np.concatenate(columns) if columns else np.zeros(0, np.int64)
