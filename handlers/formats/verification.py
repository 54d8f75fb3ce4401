"""Compares ranges of stored files with the checksums that were recorded when they were written."""

from __future__ import annotations

__all__ = (
    "BLOCK_BYTES",
    "Finding",
    "FindingKind",
    "RecordedRange",
    "block_bytes",
    "check_ranges",
    "finding_of",
)

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from crc32c import crc32c

from penstock.handlers.formats.integrity import Checksum
from penstock.kernel.errors import (
    CorruptCheckpointError,
    PenstockError,
    StorageError,
    TruncatedDataError,
    UnsupportedFormatError,
)
from penstock.kernel.protocols.stores import ReadableFile, Store

BLOCK_BYTES: Final = 4 * 2**20
"""Bytes read at a time, and so the memory that one check takes."""
NETWORK_BLOCK_BYTES: Final = 16 * 2**20
"""The same where each read is a request: a whole object of a bucket."""


FindingKind: TypeAlias = Literal["damaged", "unreadable", "absent", "unchecked"]
"""Not as it was written; refused by the medium; not there; without anything to compare it with."""

_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})
"""The errors of a file that is not there, as opposed to a medium that fails."""


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """A file or range that differs from what was written, or that could not be checked."""

    kind: FindingKind
    file: str  #: absolute; a directory if it concerns all of it
    problem: str
    key_paths: tuple[str, ...] = ()  #: of the leaves concerned, each within its item; empty if none is known
    offset: int = 0  #: bytes from the start of the file
    nbytes: int = 0  #: how many are concerned; 0 if it is the whole file

    def __str__(self) -> str:
        leaves = ", ".join(self.key_paths) or "no leaf"
        where = f", bytes {self.offset} to {self.offset + self.nbytes}" if self.nbytes else ""
        return f"{leaves}: {self.problem} ({self.file}{where})"


@final
@dataclass(frozen=True, slots=True)
class RecordedRange:
    """A range of a file whose checksum is known."""

    file: str  #: absolute
    checksum: Checksum
    key_paths: tuple[str, ...]  #: of the leaves that have bytes in it


def finding_of(error: PenstockError, path: str) -> Finding:
    """Return what an error says about the checkpoint at `path`, or about a file in it."""
    leaves = () if error.key_path is None else (error.key_path,)
    match error:
        case UnsupportedFormatError():
            return Finding("unchecked", error.path, error.problem, leaves)
        case CorruptCheckpointError():
            return Finding("damaged", error.path, error.problem, leaves)
        case StorageError() if error.errno in _GONE:
            return Finding("damaged", error.path, "is missing, or is not the file that it was", leaves)
        case StorageError():
            return Finding("unreadable", error.path, _refused(error), leaves)
        case _:
            return Finding("unchecked", path, str(error), leaves)


def block_bytes(store: Store) -> int:
    """Return how many bytes are read at a time: more where each read is a request."""
    return NETWORK_BLOCK_BYTES if store.over_network else BLOCK_BYTES


def check_ranges(store: Store, ranges: Sequence[RecordedRange]) -> list[Finding]:
    """Read ranges of one file, and compare each with its checksum. Blocking; takes `block_bytes` of memory.

    Where each read is a request, short ranges that follow each other are read together.
    """
    try:
        file = store.open_data_file(ranges[0].file)
    except StorageError as error:
        if error.errno in _GONE:
            return [_finding("damaged", found, "the file is missing") for found in ranges]

        return [_finding("unreadable", found, _refused(error)) for found in ranges]

    runs = list(_runs(ranges, block_bytes(store) if store.over_network else 0))
    longest = max(run[-1].checksum.offset + run[-1].checksum.nbytes - run[0].checksum.offset for run in runs)
    block = memoryview(bytearray(min(block_bytes(store), longest)))
    try:
        return [finding for run in runs for finding in _check_run(file, run, block)]
    finally:
        file.close()


def _runs(ranges: Sequence[RecordedRange], most: int) -> Iterator[list[RecordedRange]]:
    """Yield ranges that follow each other without a gap, together at most so many bytes; or a longer one."""
    run: list[RecordedRange] = []
    end = nbytes = 0
    for found in ranges:
        if run and (found.checksum.offset != end or nbytes + found.checksum.nbytes > most):
            yield run
            run, nbytes = [], 0

        run.append(found)
        end = found.checksum.offset + found.checksum.nbytes
        nbytes += found.checksum.nbytes

    if run:
        yield run


def _check_run(file: ReadableFile, run: Sequence[RecordedRange], block: memoryview) -> Iterator[Finding]:
    """Compare a run of ranges that is read at once; if that fails, compare each range by itself."""
    start, bad = run[0].checksum.offset, list(run)
    if len(run) > 1:
        whole = block[: run[-1].checksum.offset + run[-1].checksum.nbytes - start]
        with suppress(TruncatedDataError, StorageError):
            file.read_at(start, [whole])
            bad = [found for found in run if not _fits(whole, start, found.checksum)]

    yield from [finding for found in bad if (finding := _check(file, found, block)) is not None]


def _fits(whole: memoryview, start: int, found: Checksum) -> bool:
    at = found.offset - start
    return crc32c(whole[at : at + found.nbytes]) == found.crc32c


def _check(file: ReadableFile, found: RecordedRange, block: memoryview) -> Finding | None:
    sum_ = 0
    offset, end = found.checksum.offset, found.checksum.offset + found.checksum.nbytes
    try:
        for at in range(offset, end, len(block) or 1):
            part = block[: min(len(block), end - at)]
            file.read_at(at, [part])
            sum_ = crc32c(part, sum_)
    except TruncatedDataError as error:
        return _finding("damaged", found, f"the file ends at byte {error.found}")
    except StorageError as error:
        return _finding("unreadable", found, _refused(error))

    if sum_ == found.checksum.crc32c:
        return None

    return _finding("damaged", found, "the bytes are not those that were written")


def _finding(kind: FindingKind, found: RecordedRange, problem: str) -> Finding:
    return Finding(kind, found.file, problem, found.key_paths, found.checksum.offset, found.checksum.nbytes)


def _refused(error: StorageError) -> str:
    reason = error.strerror or (os.strerror(error.errno) if error.errno else str(error))
    return f"could not be read: {reason}"
