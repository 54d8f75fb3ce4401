"""Where leaves lie whose chunks were written in one piece each, looked up all at once. Pure."""

from __future__ import annotations

__all__ = ("whole_chunks", "whole_parts")

import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from penstock.handlers.formats.common.checksummed_reads import NONE
from penstock.handlers.formats.common.chunk_keys import grid_indices
from penstock.handlers.formats.common.combined_checksums import append_zeros_to_each
from penstock.handlers.formats.common.integrity import Checksums
from penstock.handlers.formats.common.leaf_table import StoredLeaves
from penstock.handlers.ocdbt.index_entries import Index
from penstock.kernel.protocols.reads import WholeChunks
from penstock.kernel.protocols.written import Written

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


def whole_parts(
    leaves: StoredLeaves,
    index: Index,
    recorded: Mapping[str, Checksums],
    numbers: Sequence[int],
    indices: Sequence[int],
) -> list[tuple[Written, ...] | None]:
    """Look up each chunk as the one part that it was written in.

    Args:
        leaves: Of the checkpoint.
        index: Where their chunks lie.
        recorded: Checksums by data file.
        numbers: Which of `leaves`.
        indices: What to put into `Written.leaf`, for each of them.

    Returns:
        None for a leaf that the caller handles separately: one of its chunks lies in the index, is missing,
        is encoded or of a wrong length, or was written in several pieces or with checksums of blocks.
    """
    chosen = np.asarray(numbers, np.int64)
    rows, counts = leaves.table.chunk_rows.of(chosen)
    found: list[tuple[Written, ...] | None] = [None] * len(chosen)
    stored = np.flatnonzero(counts)
    if not len(stored):
        return found

    ends = np.cumsum(counts[stored])
    sizes = np.repeat(_chunk_nbytes(leaves, chosen[stored]), counts[stored])
    sums = _recorded_sums(index, recorded, rows, sizes)
    columns: list[list[int]] = [
        column.tolist() for column in (index.ids[rows], index.offsets[rows], sizes, sums)
    ]
    chunks: list[tuple[int, ...]] = list(zip(*columns, strict=True))
    known = np.flatnonzero(np.logical_and.reduceat(sums >= 0, ends - counts[stored]))
    grids: dict[int, list[tuple[int, ...]]] = {}  # by the identity of the format, which many leaves share
    there: list[tuple[int, int]] = list(zip(stored[known].tolist(), ends[known].tolist(), strict=True))
    for at, end in there:
        form = leaves.table.formats[numbers[at]]
        assert form is not None, "it has rows"
        if id(form) not in grids:
            grids[id(form)] = list(grid_indices([(0, n) for n in form.grid_shape]))

        grid, leaf = grids[id(form)], indices[at]
        found[at] = tuple(
            [
                Written(leaf, chunk, 0, index.files[file], offset, nbytes, crc32c)
                for chunk, (file, offset, nbytes, crc32c) in zip(
                    grid, chunks[end - len(grid) : end], strict=True
                )
            ]
        )

    return found


def _recorded_sums(index: Index, recorded: Mapping[str, Checksums], rows: _Column, sizes: _Column) -> _Column:
    """The checksum of each chunk; -1 of one that is not just a piece with the right length, or has blocks."""
    sums = np.full(len(rows), -1, np.int64)
    ids, right = index.ids[rows], (index.lengths[rows] == sizes) & (sizes > 0)
    for number, file in enumerate(index.files):
        here = np.flatnonzero((ids == number) & right)
        known, offsets = recorded.get(file, NONE), index.offsets[rows[here]]
        found = known.exactly(offsets, sizes[here])
        whole = np.flatnonzero(found >= 0)
        found[whole[known.have_blocks(offsets[whole])]] = -1
        sums[here] = found

    return sums


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
