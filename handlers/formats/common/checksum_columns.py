"""The checksums of pieces, in columns: an object for each of 100,000 pieces would take longer than they."""

from __future__ import annotations

__all__ = (
    "BLOCKS",
    "COLUMNS",
    "RUNNING",
    "Checksum",
    "Checksums",
    "columns",
    "columns_of",
    "n_running",
    "running_of",
)

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias, cast, final, overload

import numpy as np
import numpy.typing as npt

from penstock.kernel.concurrency.brief_steps import integers, parts_of
from penstock.kernel.protocols.reads import RunningChecksums
from penstock.kernel.protocols.views import ColumnsOfParts, WrittenLeaves
from penstock.kernel.protocols.written import RunningSums, Written

COLUMNS: Final[dict[str, np.dtype[Any]]] = {
    "offsets": np.dtype("<u8"),
    "nbytes": np.dtype("<u8"),
    "crc32c": np.dtype("<u4"),
}
"""The columns as they are stored."""

BLOCKS: Final = ("block_bytes", np.dtype("<u4"))
RUNNING: Final = ("running", np.dtype("<u4"))
"""Two more, where a part of a piece can be of use: see `Written.running`; of the second `n_running` a row."""

Column: TypeAlias = npt.NDArray[Any]
_Numbers: TypeAlias = npt.NDArray[np.int64]
_Table: TypeAlias = tuple[_Numbers, _Numbers, _Numbers, _Numbers, npt.NDArray[np.uint32]]
"""The columns of `Checksums`, of which the last is longer or shorter than the others."""

_NONE: Final = np.zeros(0, np.uint32)


@final
class Checksum(NamedTuple):
    """What a range of a data file holds."""

    offset: int  #: bytes from the start of the file
    nbytes: int
    crc32c: int


@final
@dataclass(frozen=True, eq=False)
class Checksums(Sequence[Checksum]):
    """The checksums of one data file, by ascending offset."""

    offsets: Column
    nbytes: Column
    crc32c: Column
    block_bytes: Column | None = None  #: 0 where nothing is known of blocks; None if that is nowhere
    running: Column | None = None  #: `n_running` of each piece, one after another

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

    def running_of(self, at: int) -> RunningChecksums | None:
        """What is known of the blocks of piece `at`."""
        found = self._running_of(at)
        return None if found is None else RunningChecksums(found[0], cast("Sequence[int]", found[1]))

    def written_running(self, at: int) -> RunningSums | None:
        """The same, as it was when the piece was written."""
        found = self._running_of(at)
        return None if found is None else RunningSums(found[0], found[1].tobytes())

    def _running_of(self, at: int) -> tuple[int, Column] | None:
        if self.block_bytes is None or self.running is None or not self.block_bytes[at]:
            return None

        start, stop = int(self._ends[at - 1]) if at else 0, int(self._ends[at])
        return int(self.block_bytes[at]), self.running[start:stop]

    @cached_property
    def _ends(self) -> Column:
        """Where the blocks of each piece end in `running`."""
        assert self.block_bytes is not None
        return np.cumsum(n_running(self.nbytes, self.block_bytes))

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

    def have_blocks(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether anything is known of the blocks of the pieces that begin at many offsets."""
        if self.block_bytes is None:
            return np.zeros(len(offsets), np.bool_)

        return self.block_bytes[np.searchsorted(self.offsets, offsets.astype(np.uint64))] > 0


def n_running(nbytes: Column, block_bytes: Column) -> npt.NDArray[np.int64]:
    """The number of blocks but the last in each piece; 0 where `block_bytes` is 0."""
    has = (block_bytes > 0) & (nbytes > 0)
    counts = np.zeros(len(has), np.int64)
    counts[has] = (nbytes[has].astype(np.int64) - 1) // block_bytes[has].astype(np.int64)
    return counts


def running_of(running: Column, nbytes: Column, block_bytes: Column, rows: npt.NDArray[np.int64]) -> Column:
    """Choose from the checksums of the blocks of all pieces those of some, in the order of `rows`."""
    if not len(running):
        return running

    counts = n_running(nbytes, block_bytes)
    starts, chosen = np.cumsum(counts) - counts, counts[rows]
    moved = np.repeat(starts[rows] - (np.cumsum(chosen) - chosen), chosen)
    return running[moved + np.arange(len(moved))]


def columns(pieces: Sequence[tuple[int, int, int]], before: Checksums | None = None) -> dict[str, bytes]:
    """Encode the pieces of a data file: offset, bytes, and crc32c of each.

    Args:
        pieces: At least one, in any order.
        before: What was recorded of the first of them, in this order: what it says of blocks is kept.
    """
    offsets, lengths, sums = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
    blocks, running = np.zeros(len(offsets), np.int64), _NONE
    if before is not None and before.block_bytes is not None and before.running is not None:
        blocks[: len(before)] = before.block_bytes
        running = before.running

    return _packed((offsets, lengths, sums, blocks, running))


def columns_of(batches: Iterable[WrittenLeaves]) -> dict[str, dict[str, bytes]]:
    """Encode where everything lies that was written, by data file."""
    pieces: dict[str, list[Written]] = {}
    small: dict[str, tuple[list[int], list[int], list[int]]] = {}
    many: dict[str, list[_Table]] = {}
    for batch in batches:
        for part in batch.written:
            pieces.setdefault(part.file, []).append(part)

        for pack in batch.packs:
            offsets, lengths, checksums = small.setdefault(pack.file, ([], [], []))
            sizes = pack.chunk_sizes
            offsets.extend(itertools.accumulate(sizes[:-1], initial=pack.offset))
            lengths.extend(sizes)
            checksums.extend(pack.crc32cs)

        for found in batch.columns:
            _add(many, found)

    for file, parts in pieces.items():
        many.setdefault(file, []).append(_of_parts(parts))

    for file, rest in small.items():
        offset, nbytes, crc32c = (np.frombuffer(integers(column), np.int64) for column in rest)
        many.setdefault(file, []).append((offset, nbytes, crc32c, np.zeros(len(offset), np.int64), _NONE))

    # One after another: to forget all tables of thousands of files at the end would take some 10 ms.
    return {file: _packed(_joined(many.pop(file))) for file in list(many)}


def _of_parts(parts: Sequence[Written]) -> _Table:
    rows = [
        (part.offset, part.nbytes, part.crc32c, 0 if part.running is None else part.running.block_bytes)
        for part in parts
    ]
    running = b"".join([part.running.crc32cs for part in parts if part.running is not None])
    offset, nbytes, crc32c, blocks = np.concatenate([np.array(some, np.int64) for some in parts_of(rows)]).T
    return offset, nbytes, crc32c, blocks, np.frombuffer(running, RUNNING[1])


def _add(many: dict[str, list[_Table]], found: ColumnsOfParts) -> None:
    """Add what another process wrote to the tables of its files."""
    order = np.argsort(found.file, kind="stable")
    numbers, starts = np.unique(found.file[order], return_index=True)
    groups = np.split(order, starts[1:]) if len(order) else []
    for number, rows in zip(map(int, numbers), groups, strict=True):
        running = running_of(found.running, found.nbytes, found.block_bytes, rows)
        table = found.offset[rows], found.nbytes[rows], found.crc32c[rows], found.block_bytes[rows], running
        many.setdefault(found.files[number], []).append(table)


def _joined(tables: Sequence[_Table]) -> _Table:
    if len(tables) == 1:
        return tables[0]

    offset, nbytes, crc32c, blocks, running = map(np.concatenate, zip(*tables, strict=True))
    return offset, nbytes, crc32c, blocks, running.astype(np.uint32)


def _packed(table: _Table) -> dict[str, bytes]:
    *numbers, running = table
    offsets, nbytes, _, blocks = numbers
    order = np.argsort(offsets, kind="stable")
    named = zip((*COLUMNS.items(), BLOCKS), numbers, strict=True)
    packed = {name: column[order].astype(dtype).tobytes() for (name, dtype), column in named}
    if not len(running):
        del packed[BLOCKS[0]]
        return packed

    packed[RUNNING[0]] = running_of(running, nbytes, blocks, order).astype(RUNNING[1]).tobytes()
    return packed
