"""`_PENSTOCK_INTEGRITY`: the checksum of every piece that was written, for restore and for `verify`.

A file of penstock's own, which Orbax ignores: a msgpack map of a version and, for each data file, a
list of (offset, bytes, crc32c).
"""

from __future__ import annotations

__all__ = ("Checksum", "decode", "encode")

from collections.abc import Iterable
from typing import Final, NamedTuple, cast, final

import msgpack

from penstock.kernel.errors import CorruptCheckpointError, UnsupportedFormatError
from penstock.kernel.messages import Written

VERSION: Final = 1


@final
class Checksum(NamedTuple):
    """What a range of a data file holds."""

    offset: int  #: bytes from the start of the file
    nbytes: int
    crc32c: int


def encode(written: Iterable[Written]) -> bytes:
    """Encode the document."""
    files: dict[str, list[tuple[int, int, int]]] = {}
    for piece in written:
        files.setdefault(piece.file, []).append((piece.offset, piece.nbytes, piece.crc32c))
    for pieces in files.values():
        pieces.sort()

    return msgpack.packb({"version": VERSION, "files": files})


def decode(path: str, data: bytes) -> dict[str, tuple[Checksum, ...]]:
    """Read the document: data file, relative to the checkpoint, to its checksums by ascending offset.

    Raises:
        CorruptCheckpointError: If it is not what such a document would be.
        UnsupportedFormatError: If a later penstock wrote it.
    """
    if not data:
        raise CorruptCheckpointError(path, "is empty")
    try:
        document: object = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise CorruptCheckpointError(path, f"is not msgpack: {str(error) or type(error).__name__}") from error

    members = _as_map(path, document)
    version = members.get("version")
    if type(version) is int and version > VERSION:
        raise UnsupportedFormatError(path, f"is of version {version}; this penstock reads {VERSION}")
    if version != VERSION:
        raise CorruptCheckpointError(path, f"is of version {version!r}, not {VERSION}")

    return {file: _pieces(path, file, pieces) for file, pieces in _as_map(path, members.get("files")).items()}


def _as_map(path: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict) or not all(
        isinstance(key, str) for key in cast("dict[object, object]", value)
    ):
        raise CorruptCheckpointError(path, "is not a map of a version and files")

    return cast("dict[str, object]", value)


def _pieces(path: str, file: str, value: object) -> tuple[Checksum, ...]:
    pieces = cast("list[object]", value) if isinstance(value, list) else [None]
    return tuple([_checksum(path, file, piece) for piece in pieces])


def _checksum(path: str, file: str, value: object) -> Checksum:
    numbers = cast("list[object]", value) if isinstance(value, list) else []
    match numbers:
        case [int(offset), int(nbytes), int(crc)] if offset >= 0 and nbytes >= 0 and 0 <= crc < 1 << 32:
            return Checksum(offset, nbytes, crc)
        case _:
            raise CorruptCheckpointError(path, f"{file!r} has an entry {value!r}: not offset, length, crc32c")
