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
    rows, counts = leaves.table.chunk_rows.of(np.asarray(numbers, np.int64))
    stored = np.flatnonzero(counts)  # others have nothing in the columns of chunks
    ids, offsets, crc32cs = (np.full(len(counts), default, np.int64) for default in (-1, 0, -1))
    if not len(stored):
        return WholeChunks((), ids.tolist(), offsets.tolist(), crc32cs.tolist())

    counts = counts[stored]
    known = {id(spec): spec.chunk_nbytes for spec in {id(spec): spec for spec in leaves.specs}.values()}
    sizes = np.repeat(np.array([known[id(leaves.specs[numbers[at]])] for at in stored], np.int64), counts)
    starts = np.cumsum(counts) - counts
    firsts = rows[starts]
    there = np.repeat(index.offsets[firsts], counts) + _within(sizes, starts, counts)
    together = (
        (index.lengths[rows] == sizes)
        & (sizes > 0)
        & (index.ids[rows] == np.repeat(index.ids[firsts], counts))
        & (index.offsets[rows] == there)
    )
    found = np.logical_and.reduceat(together, starts)
    offsets[stored] = index.offsets[firsts]
    ids[stored] = np.where(found, index.ids[firsts], -1)
    files = [os.path.join(directory, file) for file in index.files]
    for number, file in enumerate(files):
        if file in recorded:
            mine = np.flatnonzero(ids[stored] == number)
            chosen = np.flatnonzero(np.repeat(ids[stored] == number, counts))
            of_chunks = recorded[file].exactly(index.offsets[rows[chosen]], sizes[chosen])
            crc32cs[stored[mine]] = _of_leaves(of_chunks, sizes[chosen], counts[mine])
            ids[stored[mine[crc32cs[stored[mine]] < 0]]] = -1

    return WholeChunks(files, ids.tolist(), offsets.tolist(), crc32cs.tolist())


def _within(sizes: _Column, starts: _Column, counts: _Column) -> _Column:
    """Where each chunk begins in its leaf."""
    before = np.cumsum(sizes) - sizes
    return before - np.repeat(before[starts], counts)


def _of_leaves(crc32cs: _Column, sizes: _Column, counts: _Column) -> _Column:
    """The checksum of each leaf, from those of its chunks; -1 if one is not known."""
    starts = np.cumsum(counts) - counts
    known = np.logical_and.reduceat(crc32cs >= 0, starts) if len(counts) else np.zeros(0, np.bool_)
    behind = np.repeat(starts + counts, counts) - np.arange(len(sizes)) - 1  # chunks of the same leaf
    whole = np.where(crc32cs < 0, 0, crc32cs).astype(np.uint32)
    moved = append_zeros_to_each(whole, behind * sizes)
    combined: _Column = np.bitwise_xor.reduceat(moved, starts) if len(counts) else moved
    return np.where(known, combined.astype(np.int64), -1)
