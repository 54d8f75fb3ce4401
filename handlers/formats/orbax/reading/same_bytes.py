"""Whether a leaf of one checkpoint holds the bytes that another recorded of its own before it was damaged."""

from __future__ import annotations

__all__ = ("holds_recorded_bytes",)

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import final

from crc32c import crc32c

from penstock.handlers.formats.common.checksummed_reads import NONE
from penstock.handlers.formats.common.chunk_keys import grid_indices
from penstock.handlers.formats.common.integrity import Checksum, Checksums
from penstock.handlers.formats.common.leaf_table import StoredArray
from penstock.handlers.formats.orbax.reading.stored_checkpoint import OrbaxCheckpoint
from penstock.handlers.formats.orbax.reading.verification import BLOCK_BYTES
from penstock.handlers.ocdbt.value_refs import Indirect
from penstock.kernel.errors import PenstockError
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.stores import ReadableFile


def holds_recorded_bytes(
    damaged: OrbaxCheckpoint, leaf: StoredLeaf, other: OrbaxCheckpoint, other_leaf: StoredLeaf
) -> bool:
    """Whether each stored chunk of `other_leaf` has the checksums recorded of the same chunk of `leaf`.

    Reads `other_leaf` whole, block by block. False if a chunk of `leaf` has no complete record, lies in
    the index itself, or is stored in another form. Blocking.
    """
    array, same = leaf.detail, other_leaf.detail
    if not isinstance(array, StoredArray) or not isinstance(same, StoredArray):
        return False
    if array.format != same.format or _described(leaf) != _described(other_leaf):
        return False

    files = _Files(other)
    try:
        for index in grid_indices(tuple([(0, n) for n in array.format.grid_shape])):
            chunk = damaged.index.get((array.prefix + array.format.chunk_key(index)).encode())
            there = other.index.get((same.prefix + same.format.chunk_key(index)).encode())
            if not isinstance(chunk, Indirect) or not isinstance(there, Indirect):
                return False

            ranges = list(_within(damaged.checksums.get(chunk.file, NONE), chunk))
            if not ranges or chunk.length != there.length:
                return False
            if not all(files.agrees(there, found) for found in ranges):
                return False
    except PenstockError:
        return False  # the other one is damaged, too
    finally:
        files.close()

    return True


def _described(leaf: StoredLeaf) -> object:
    """What of a leaf's spec its bytes depend on. Its sharding may have changed."""
    return replace(leaf.spec, sharding=None, write_shape=None)


def _within(recorded: Checksums, chunk: Indirect) -> Iterator[Checksum]:
    """Yield the checksums that tile a chunk, their offsets from its start; nothing if they leave a gap."""
    end, stop = chunk.offset, chunk.offset + chunk.length
    found: list[Checksum] = []
    for at in range(recorded.from_offset(chunk.offset), len(recorded)):
        if recorded[at].offset != end or end >= stop:
            break

        found.append(recorded[at])
        end += recorded[at].nbytes

    if end == stop:
        for checksum in found:
            yield Checksum(checksum.offset - chunk.offset, checksum.nbytes, checksum.crc32c)


@final
class _Files:
    """The file of a checkpoint that was used last; only one is kept open."""

    def __init__(self, checkpoint: OrbaxCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._name = ""
        self._file: ReadableFile | None = None

    def agrees(self, chunk: Indirect, recorded: Checksum) -> bool:
        """Whether a part of a chunk has the recorded checksum."""
        file = self._opened(chunk.file)
        block = memoryview(bytearray(min(BLOCK_BYTES, recorded.nbytes)))
        start, sum_ = chunk.offset + recorded.offset, 0
        for at in range(0, recorded.nbytes, len(block) or 1):
            part = block[: min(len(block), recorded.nbytes - at)]
            file.read_at(start + at, [part])
            sum_ = crc32c(part, sum_)

        return sum_ == recorded.crc32c

    def close(self) -> None:
        """Close the file, if one is open."""
        file, self._file, self._name = self._file, None, ""
        if file is not None:
            file.close()

    def _opened(self, name: str) -> ReadableFile:
        if self._file is None or name != self._name:
            self.close()
            path = os.path.join(self._checkpoint.directory, name)
            self._file = self._checkpoint.store.open_data_file(path)
            self._name = name

        return self._file
