"""Where leaves of one raw chunk lie, all of them at once. Pure."""

from __future__ import annotations

__all__ = ("whole_chunks",)

import os
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.handlers.layout.integrity import Checksums
from penstock.handlers.layout.leaves import StoredLeaves
from penstock.handlers.ocdbt.index import Index
from penstock.handlers.zarr import ArrayFormat
from penstock.kernel.read_pack import WholeChunks


def whole_chunks(
    leaves: StoredLeaves,
    index: Index,
    recorded: Mapping[str, Checksums],
    directory: str,
    numbers: Sequence[int],
) -> WholeChunks:
    """Look the chunks up, and the checksums of their bytes.

    What is not one chunk in a data file, of just the right length, is left to be looked at by itself;
    and so is a chunk that was written in pieces, each of which has its own checksum.

    Args:
        leaves: Of the checkpoint.
        index: Where their chunks lie.
        recorded: Checksums by absolute file name.
        directory: What the data files are relative to.
        numbers: Which of `leaves`.
    """
    suffixes: dict[int, str | None] = {}
    sizes: dict[int, int] = {}
    keys: list[bytes] = []
    wanted: list[int] = []
    for number in numbers:
        form, spec = leaves.formats[number], leaves.specs[number]
        if id(form) not in suffixes:
            suffixes[id(form)] = _suffix(form)
        if id(spec) not in sizes:
            sizes[id(spec)] = spec.nbytes

        suffix = suffixes[id(form)]
        path = leaves.keys[number]
        name = path[0] if len(path) == 1 else ".".join(path)
        keys.append(b"" if suffix is None else f"{name}{suffix}".encode() if name else suffix[1:].encode())
        wanted.append(sizes[id(spec)])

    get = index.rows.get
    rows = np.array([get(key, -1) for key in keys], np.int64)
    lengths = np.array(wanted, np.int64)
    if not len(index):
        return WholeChunks((), [-1] * len(numbers), [0] * len(numbers), [-1] * len(numbers))

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


def _suffix(form: ArrayFormat | None) -> str | None:
    """What the key of an array's only chunk ends with; None if it has not just one, or that is coded."""
    if form is None or not form.plain or form.shape != form.chunk_shape:
        return None

    return "/" + form.chunk_key((0,) * len(form.shape))
