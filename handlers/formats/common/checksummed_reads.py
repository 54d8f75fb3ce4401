"""Splits reads at the boundaries of written pieces, so that each can be checked. Pure."""

from __future__ import annotations

__all__ = ("NONE", "with_checksums")

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from penstock.handlers.formats.common.integrity import Checksum, Checksums
from penstock.kernel.protocols.reads import DirectRead, Read, ScatterRead

NONE: Final = Checksums.of(())


def with_checksums(
    reads: Iterable[Read], recorded: Mapping[str, Checksums], piece_bytes: int
) -> Iterator[Read]:
    """Give every read of whole pieces its recorded checksum.

    A direct read needs no memory of its own, so it is cut where pieces begin and end, whatever their size.
    Where it covers only part of a piece, that part cannot be checked and is cut at `piece_bytes`. A
    scattered read is checked if it covers exactly one piece.

    Args:
        reads: Direct ones as long as they are contiguous.
        recorded: Checksums by absolute file name, each by ascending offset.
        piece_bytes: Upper bound for a read that cannot be checked.
    """
    for read in reads:
        if isinstance(read, DirectRead):
            yield from _cut(read, recorded.get(read.file, NONE), piece_bytes)
        elif isinstance(read, ScatterRead) and (found := _exactly(read, recorded.get(read.file, NONE))):
            yield replace(read, crc32c=found.crc32c)
        else:
            yield read


def _cut(read: DirectRead, recorded: Checksums, piece_bytes: int) -> Iterator[DirectRead]:
    done, end = read.offset, read.offset + read.nbytes
    for at in range(recorded.from_offset(read.offset), len(recorded)):
        piece = recorded[at]
        if piece.offset + piece.nbytes > end:
            break

        yield from _plain(read, done, piece.offset, piece_bytes)
        yield _part(read, piece.offset, piece.nbytes, piece.crc32c)
        done = piece.offset + piece.nbytes

    yield from _plain(read, done, end, piece_bytes)


def _plain(read: DirectRead, start: int, stop: int, piece_bytes: int) -> Iterator[DirectRead]:
    for at in range(start, stop, piece_bytes):
        yield _part(read, at, min(piece_bytes, stop - at), None)


def _part(read: DirectRead, offset: int, nbytes: int, crc32c: int | None) -> DirectRead:
    start = read.start + offset - read.offset
    return DirectRead(read.leaf, read.file, offset, nbytes, read.region, start, crc32c)


def _exactly(read: ScatterRead, recorded: Checksums) -> Checksum | None:
    at = recorded.from_offset(read.offset)
    if at < len(recorded) and recorded[at][:2] == (read.offset, read.nbytes):
        return recorded[at]

    return None
