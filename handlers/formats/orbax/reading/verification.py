"""Compares a stored checkpoint with the checksums that were recorded when it was written."""

from __future__ import annotations

__all__ = ("BLOCK_BYTES", "Damage", "RecordedRange", "Survey", "check_ranges", "survey")

import errno
import itertools
import os
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from crc32c import crc32c

from penstock.handlers.formats.common.checksummed_reads import NONE
from penstock.handlers.formats.common.integrity import Checksum, Checksums
from penstock.handlers.formats.common.leaf_table import StoredArray
from penstock.handlers.formats.orbax.documents.file_names import INTEGRITY
from penstock.handlers.formats.orbax.reading.stored_checkpoint import OrbaxCheckpoint
from penstock.handlers.ocdbt.value_refs import Indirect, Inline
from penstock.kernel.errors import (
    CorruptCheckpointError,
    StorageError,
    TruncatedDataError,
    UnsupportedFormatError,
)
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.stores import ReadableFile, Store

BLOCK_BYTES: Final = 4 * 2**20
"""Bytes read at a time, and so the memory that one check takes."""

_Extent: TypeAlias = "tuple[int, int, str]"
"""Where bytes of a leaf begin and end in a file, and the leaf's key path."""


@final
@dataclass(frozen=True, slots=True)
class Damage:
    """A range of bytes that differs from what was written."""

    file: str  #: absolute
    problem: str
    key_paths: tuple[str, ...] = ()  #: of the leaves that lie there; empty if none does
    offset: int = 0  #: bytes from the start of the file
    nbytes: int = 0  #: how many are concerned

    def __str__(self) -> str:
        leaves = ", ".join(self.key_paths) or "no leaf"
        return f"{leaves}: {self.problem} ({self.file}, bytes {self.offset} to {self.offset + self.nbytes})"


@final
@dataclass(frozen=True, slots=True)
class RecordedRange:
    """A range of a file whose checksum is known."""

    file: str  #: absolute
    checksum: Checksum
    key_paths: tuple[str, ...]  #: of the leaves that have bytes in it


@final
@dataclass(frozen=True, slots=True)
class Survey:
    """All ranges to check, and the damage that is visible without reading a byte."""

    ranges: tuple[RecordedRange, ...]  #: by file and offset
    damages: tuple[Damage, ...]  #: chunks that are not there or of the wrong length
    unchecked: tuple[str, ...]  #: key paths of leaves with bytes whose checksum was not recorded


def survey(checkpoint: OrbaxCheckpoint) -> Survey:
    """Find the leaves that each recorded range belongs to. Pure.

    Raises:
        UnsupportedFormatError: If no checksums were recorded: penstock did not write it.
        CorruptCheckpointError: If the record names a file outside of the checkpoint.
    """
    if not checkpoint.has_checksums and any(leaf.spec.nbytes for leaf in checkpoint.leaves):
        problem = f"records no checksums: there is no {INTEGRITY}, which penstock writes and Orbax does not"
        raise UnsupportedFormatError(checkpoint.path, problem)

    extents: dict[str, list[_Extent]] = defaultdict(list)
    damages: list[Damage] = []
    for leaf in checkpoint.leaves:
        for found in _extents(checkpoint, leaf):
            if isinstance(found, Damage):
                damages.append(found)
            else:
                file, extent = found
                insort(extents[file], extent)

    ranges: list[RecordedRange] = []
    for file in sorted(checkpoint.checksums):
        if os.path.isabs(file) or ".." in file.split("/"):
            raise CorruptCheckpointError(checkpoint.path, f"{file!r} leads out of the checkpoint")
        path = os.path.join(checkpoint.directory, file)
        ranges += [
            RecordedRange(path, checksum, _leaves_in(extents[file], checksum))
            for checksum in checkpoint.checksums[file]
        ]

    return Survey(tuple(ranges), tuple(damages), _unchecked(extents, checkpoint.checksums))


def check_ranges(store: Store, ranges: Sequence[RecordedRange]) -> list[Damage]:
    """Read ranges of one file, and compare each with its checksum. Blocking; takes `BLOCK_BYTES`."""
    block = memoryview(bytearray(min(BLOCK_BYTES, max(found.checksum.nbytes for found in ranges))))
    try:
        file = store.open_data_file(ranges[0].file)
    except StorageError as error:
        problem = "the file is missing" if error.errno == errno.ENOENT else f"cannot be opened: {error}"
        return [_damage(found, problem) for found in ranges]

    try:
        return [damage for found in ranges if (damage := _check(file, found, block)) is not None]
    finally:
        file.close()


def _check(file: ReadableFile, found: RecordedRange, block: memoryview) -> Damage | None:
    sum_ = 0
    offset, end = found.checksum.offset, found.checksum.offset + found.checksum.nbytes
    try:
        for at in range(offset, end, len(block) or 1):
            part = block[: min(len(block), end - at)]
            file.read_at(at, [part])
            sum_ = crc32c(part, sum_)
    except TruncatedDataError as error:
        return _damage(found, f"the file ends at byte {error.found}")
    except StorageError as error:
        return _damage(found, f"cannot be read: {error}")

    return (
        None if sum_ == found.checksum.crc32c else _damage(found, "the bytes are not those that were written")
    )


def _damage(found: RecordedRange, problem: str) -> Damage:
    return Damage(found.file, problem, found.key_paths, found.checksum.offset, found.checksum.nbytes)


def _extents(checkpoint: OrbaxCheckpoint, leaf: StoredLeaf) -> Iterator[tuple[str, _Extent] | Damage]:
    """Yield where each chunk of a leaf lies. One in the index itself was checked when that was read."""
    array, key_path = leaf.detail, leaf.info.key_path
    if not isinstance(array, StoredArray) or not leaf.spec.nbytes:
        return

    for index in itertools.product(*map(range, array.format.grid_shape)):
        key = array.prefix + array.format.chunk_key(index)
        value = checkpoint.index.get(key.encode())
        if isinstance(value, Indirect):
            expected = leaf.spec.chunk_nbytes
            if array.format.plain and value.length != expected:
                problem = f"chunk {key!r} has {value.length} bytes, not {expected}"
                yield Damage(_path(checkpoint, value.file), problem, (key_path,), value.offset, value.length)
            yield value.file, (value.offset, value.offset + value.length, key_path)
        elif not isinstance(value, Inline) and checkpoint.all_chunks_written:
            yield Damage(checkpoint.directory, f"chunk {key!r} is missing", (key_path,))


def _path(checkpoint: OrbaxCheckpoint, file: str) -> str:
    return os.path.join(checkpoint.directory, file)


def _leaves_in(extents: Sequence[_Extent], checksum: Checksum) -> tuple[str, ...]:
    """Name the leaves with bytes in a range; `extents` by ascending offset, apart from each other."""
    end = checksum.offset + checksum.nbytes
    at = bisect_left(extents, (checksum.offset,))
    if at and extents[at - 1][1] > checksum.offset:
        at -= 1

    names: dict[str, None] = {}
    while at < len(extents) and extents[at][0] < end:
        names[extents[at][2]] = None
        at += 1

    return tuple(names)


def _unchecked(
    extents: Mapping[str, Sequence[_Extent]], checksums: Mapping[str, Checksums]
) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for file, found in extents.items():
        recorded = checksums.get(file, NONE)
        for start, stop, key_path in found:
            if not _covered(recorded, start, stop):
                names[key_path] = None

    return tuple(names)


def _covered(recorded: Checksums, start: int, stop: int) -> bool:
    """Whether ranges, by ascending offset, leave no gap between two offsets."""
    for at in range(max(recorded.from_offset(start + 1) - 1, 0), len(recorded)):
        found = recorded[at]
        if start >= stop or found.offset > start:
            break

        start = max(start, found.offset + found.nbytes)

    return start >= stop
