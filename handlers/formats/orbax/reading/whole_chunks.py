"""Where leaves lie whose chunks follow each other in a file, looked up all at once. Pure."""

from __future__ import annotations

__all__ = ("whole_chunks",)

import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from penstock.handlers.formats.common.combined_checksums import append_zeros_to_each
from penstock.handlers.formats.common.integrity import Checksums
from penstock.handlers.formats.common.leaf_table import StoredLeaves
from penstock.handlers.ocdbt.index_entries import Index
from penstock.kernel.protocols.reads import WholeChunks

_Column = npt.NDArray[np.int64]


def whole_chunks(
    leaves: StoredLeaves,
    index: Index,
    recorded: Mapping[str, Checksums],
    directory: str,
    numbers: Sequence[int],
) -> WholeChunks:
    """Look the chunks up, and the checksums of their bytes.

    A leaf is left out (the caller handles it separately) unless all of its chunks have the right length and
    follow each other in one data file, in C order of its grid; and also if a chunk was written in several
    pieces, each with its own checksum.

    Args:
        leaves: Of the checkpoint.
        index: Where their chunks lie.
        recorded: Checksums by absolute file name.
        directory: What the data files are relative to.
        numbers: Which of `leaves`.
    """
    chosen = np.asarray(numbers, np.int64)
    rows, counts = leaves.table.chunk_rows.of(chosen)
    stored = np.flatnonzero(counts)  # others have nothing in the columns of chunks
    ids, offsets, crc32cs = (np.full(len(chosen), default, np.int64) for default in (-1, 0, -1))
    files = [os.path.join(directory, file) for file in index.files]
    if len(stored):
        counts = counts[stored]
        of_leaves = np.cumsum(counts) - counts  # the first chunk of each
        sizes = np.repeat(_chunk_nbytes(leaves, chosen[stored]), counts)
        found, firsts = _follow_each_other(index, rows, sizes, counts), rows[of_leaves]
        there = np.where(found, index.ids[firsts], -1)
        sums = np.full(len(stored), -1, np.int64)
        for number, file in enumerate(files):
            if file in recorded:
                mine, chunks = (
                    np.flatnonzero(there == number),
                    np.flatnonzero(np.repeat(there == number, counts)),
                )
                known = recorded[file].exactly(index.offsets[rows[chunks]], sizes[chunks])
                sums[mine] = _joined(known, sizes[chunks], counts[mine])
                there[mine[sums[mine] < 0]] = -1

        ids[stored], offsets[stored], crc32cs[stored] = there, index.offsets[firsts], sums

    return WholeChunks(files, ids.tolist(), offsets.tolist(), crc32cs.tolist())


def _chunk_nbytes(leaves: StoredLeaves, numbers: _Column) -> _Column:
    chosen: list[int] = numbers.tolist()
    column = leaves.specs
    specs = [column[at] for at in chosen]
    known = {id(spec): spec.chunk_nbytes for spec in {id(spec): spec for spec in specs}.values()}
    return np.array([known[id(spec)] for spec in specs], np.int64)


def _follow_each_other(index: Index, rows: _Column, sizes: _Column, counts: _Column) -> npt.NDArray[np.bool_]:
    """Whether all chunks of a leaf have their sizes, and lie one after another in one data file."""
    starts = np.cumsum(counts) - counts
    firsts, before = rows[starts], np.cumsum(sizes) - sizes
    expected = np.repeat(index.offsets[firsts] - before[starts], counts) + before
    right: npt.NDArray[np.bool_] = (
        (index.lengths[rows] == sizes)
        & (sizes > 0)
        & (index.ids[rows] == np.repeat(index.ids[firsts], counts))
        & (index.offsets[rows] == expected)
    )
    return np.logical_and.reduceat(right, starts)


def _joined(crc32cs: _Column, sizes: _Column, counts: _Column) -> _Column:
    """The checksum of each leaf, from those of its chunks; -1 if one is not known."""
    if not len(counts):
        return counts

    starts, ends = np.cumsum(counts) - counts, np.cumsum(counts)
    n_behind = np.repeat(ends, counts) - np.arange(len(sizes)) - 1  # chunks of the same leaf
    moved = append_zeros_to_each(np.maximum(crc32cs, 0).astype(np.uint32), n_behind * sizes)
    known = np.logical_and.reduceat(crc32cs >= 0, starts)
    return np.where(known, np.bitwise_xor.reduceat(moved, starts).astype(np.int64), -1)
