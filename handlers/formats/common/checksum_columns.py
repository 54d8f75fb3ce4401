"""The checksums of pieces, in columns: an object for each of 100,000 pieces would take longer than they."""

from __future__ import annotations

__all__ = ("COLUMNS", "Checksum", "Checksums")

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, final, overload

import numpy as np
import numpy.typing as npt

COLUMNS: Final[dict[str, np.dtype[Any]]] = {
    "offsets": np.dtype("<u8"),
    "nbytes": np.dtype("<u8"),
    "crc32c": np.dtype("<u4"),
}
"""The columns as they are stored."""

Column: TypeAlias = npt.NDArray[Any]


@final
class Checksum(NamedTuple):
    """What a range of a data file holds."""

    offset: int  #: bytes from the start of the file
    nbytes: int
    crc32c: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Checksums(Sequence[Checksum]):
    """The checksums of one data file, by ascending offset."""

    offsets: Column
    nbytes: Column
    crc32c: Column

    @classmethod
    def of(cls, pieces: Iterable[tuple[int, int, int]]) -> Checksums:
        """Put (offset, bytes, crc32c) into columns."""
        rows = sorted(pieces)
        columns = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(
            *[np.array(column, dtype) for column, dtype in zip(columns, COLUMNS.values(), strict=True)]
        )

    @overload
    def __getitem__(self, index: int, /) -> Checksum: ...
    @overload
    def __getitem__(self, index: slice, /) -> tuple[Checksum, ...]: ...
    def __getitem__(self, index: int | slice, /) -> Checksum | tuple[Checksum, ...]:
        if isinstance(index, slice):
            return tuple([self[at] for at in range(len(self))[index]])

        return Checksum(int(self.offsets[index]), int(self.nbytes[index]), int(self.crc32c[index]))

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Checksum]:
        columns = (self.offsets.tolist(), self.nbytes.tolist(), self.crc32c.tolist())
        return map(Checksum._make, zip(*columns, strict=True))

    def from_offset(self, offset: int) -> int:
        """The number of the first piece that begins at `offset` or behind it."""
        return int(self.offsets.searchsorted(np.uint64(offset)))  # the function takes twice as long

    def exactly(self, offsets: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The checksum of each of many ranges; -1 of one that is not just a piece."""
        starts, sizes = offsets.astype(np.uint64), nbytes.astype(np.uint64)
        at = np.minimum(np.searchsorted(self.offsets, starts), max(len(self) - 1, 0))
        if not len(self):
            return np.full(len(at), -1, np.int64)

        same = (self.offsets[at] == starts) & (self.nbytes[at] == sizes)
        return np.where(same, self.crc32c[at].astype(np.int64), -1)
