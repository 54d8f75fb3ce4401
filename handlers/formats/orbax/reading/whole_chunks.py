"""Where leaves that are one raw chunk each lie, looked up all at once. Pure."""

from __future__ import annotations

__all__ = ("whole_chunks",)

import os
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.handlers.formats.common.integrity import Checksums
from penstock.handlers.formats.common.leaf_table import StoredLeaves
from penstock.handlers.ocdbt.index_entries import Index
from penstock.kernel.protocols.reads import WholeChunks


def whole_chunks(
    leaves: StoredLeaves,
    index: Index,
    recorded: Mapping[str, Checksums],
    directory: str,
    numbers: Sequence[int],
) -> WholeChunks:
    """Look the chunks up, and the checksums of their bytes.

    A leaf is left out (the caller handles it separately) unless it is one chunk of the right length in a data
    file; and also if that chunk was written in several pieces, each with its own checksum.

    Args:
        leaves: Of the checkpoint.
        index: Where their chunks lie.
        recorded: Checksums by absolute file name.
        directory: What the data files are relative to.
        numbers: Which of `leaves`.
    """
    if not len(index):
        return WholeChunks((), [-1] * len(numbers), [0] * len(numbers), [-1] * len(numbers))

    all_rows, sizes = leaves.table.only_chunks
    chosen = np.asarray(numbers, np.int64)
    rows, lengths = all_rows[chosen], sizes[chosen]
    found = (rows >= 0) & (lengths > 0) & (index.lengths[rows] == lengths)
    ids, offsets = np.where(found, index.ids[rows], -1), index.offsets[rows]
    files = [os.path.join(directory, file) for file in index.files]
    crc32cs = np.full(len(rows), -1, np.int64)
    for number, file in enumerate(files):
        there = np.flatnonzero(ids == number)
        checksums = recorded.get(file)
        if checksums is not None and len(there):
            crc32cs[there] = checksums.exactly(offsets[there], lengths[there])
            ids[there[crc32cs[there] < 0]] = -1

    return WholeChunks(files, ids.tolist(), offsets.tolist(), crc32cs.tolist())
