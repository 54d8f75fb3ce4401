"""`_PENSTOCK_INTEGRITY`: the checksum of every piece that was written, for restore and for `verify`.

A file of penstock's own, which Orbax ignores: a msgpack map of a version and, for each data file, the
offsets, lengths and checksums of its pieces as three columns, by ascending offset. Columns, because a
list for each of 100,000 pieces would cost more than writing them. Version 1 had lists.
"""

from __future__ import annotations

__all__ = ("Checksum", "decode", "encode")

import itertools
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, cast, final

import msgpack
import numpy as np

from penstock.kernel.errors import CorruptCheckpointError, UnsupportedFormatError
from penstock.kernel.messages import WrittenBatch

VERSION: Final = 2
_COLUMNS: Final[dict[str, np.dtype[Any]]] = {
    "offsets": np.dtype("<u8"),
    "nbytes": np.dtype("<u8"),
    "crc32c": np.dtype("<u4"),
}


@final
class Checksum(NamedTuple):
    """What a range of a data file holds."""

    offset: int  #: bytes from the start of the file
    nbytes: int
    crc32c: int


def encode(batches: Iterable[WrittenBatch]) -> bytes:
    """Encode the document."""
    files: dict[str, tuple[list[int], list[int], list[int]]] = {}
    for batch in batches:
        for part in batch.written:
            offsets, lengths, checksums = files.setdefault(part.file, ([], [], []))
            offsets.append(part.offset)
            lengths.append(part.nbytes)
            checksums.append(part.crc32c)

        for pack in batch.packs:
            offsets, lengths, checksums = files.setdefault(pack.file, ([], [], []))
            sizes = [leaf.spec.nbytes for leaf in pack.leaves]
            offsets.extend(itertools.accumulate(sizes[:-1], initial=pack.offset))
            lengths.extend(sizes)
            checksums.extend(pack.crc32cs)

    return msgpack.packb({"version": VERSION, "files": {file: _packed(*files[file]) for file in files}})


def _packed(offsets: list[int], lengths: list[int], checksums: list[int]) -> dict[str, bytes]:
    order = np.argsort(np.array(offsets, np.int64), kind="stable")
    columns = zip(_COLUMNS.items(), (offsets, lengths, checksums), strict=True)
    return {name: np.array(column, dtype)[order].tobytes() for (name, dtype), column in columns}


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
    if type(version) is not int or version < 1:
        raise CorruptCheckpointError(path, f"is of version {version!r}, not {VERSION}")

    read = _pieces if version == 1 else _columns
    return {file: read(path, file, pieces) for file, pieces in _as_map(path, members.get("files")).items()}


def _columns(path: str, file: str, value: object) -> tuple[Checksum, ...]:
    found = _as_map(path, value)
    columns: list[list[int]] = []
    for name, dtype in _COLUMNS.items():
        data = found.get(name)
        if not isinstance(data, bytes) or len(data) % dtype.itemsize:
            raise CorruptCheckpointError(path, f"{file!r} has no column {name!r} of numbers")

        columns.append(np.frombuffer(data, dtype).tolist())

    if len({len(column) for column in columns}) != 1:
        raise CorruptCheckpointError(path, f"{file!r} has columns of different lengths")

    return tuple([Checksum(*row) for row in zip(*columns, strict=True)])


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
