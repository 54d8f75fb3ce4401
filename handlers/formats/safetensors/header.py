"""The header of a safetensors file: eight bytes of length, then JSON. Only data follow it.

Source:
    The format's description in the README of safetensors; what its reader refuses was tested with 0.8.
"""

from __future__ import annotations

__all__ = ("MAX_HEADER_BYTES", "encode_header", "header_bytes", "read_header")

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from penstock.handlers.formats.safetensors import file_digests
from penstock.handlers.formats.safetensors.element_types import CODES
from penstock.handlers.formats.safetensors.header_decoding import METADATA, FileHeader, decode_header
from penstock.kernel.errors import CorruptCheckpointError, TruncatedDataError
from penstock.kernel.protocols.stores import Store

MAX_HEADER_BYTES: Final = 100_000_000
"""Longer ones are refused by every reader."""

_LENGTH_BYTES: Final = 8


def header_bytes(store: Store, path: str) -> int:
    """Return how long the header of a file says that it is; 0 if that cannot be, which `read_header` reports.

    Raises:
        StorageError: If the file cannot be read.
    """
    file = store.open_data_file(path)
    try:
        length = int.from_bytes(_read(file.read_at, 0, _LENGTH_BYTES), "little")
    finally:
        file.close()

    return length if length <= MAX_HEADER_BYTES else 0


def read_header(store: Store, path: str, *, whole: bool = True, compared: bool = True) -> FileHeader:
    """Read and check the header of the file at `path`.

    Args:
        store: Where.
        path: Of the file.
        whole: Whether the data must be there in their whole length, and nothing behind them.
        compared: Whether the header is compared with its checksum.

    Raises:
        TruncatedDataError: If the file ends before its header or its data do.
        CorruptCheckpointError: If the header is not one, or its tensors do not tile the data.
        ChecksumError: If it is not as penstock wrote it.
        UnsupportedFormatError: If a tensor has elements that penstock does not read.
    """
    size = store.size(path)
    if size < _LENGTH_BYTES:
        raise TruncatedDataError(path, _LENGTH_BYTES, size)

    file = store.open_data_file(path)
    try:
        length = int.from_bytes(_read(file.read_at, 0, _LENGTH_BYTES), "little")
        if length > MAX_HEADER_BYTES:
            problem = f"says that its header has {length} bytes, of at most {MAX_HEADER_BYTES}"
            raise CorruptCheckpointError(path, problem)
        if _LENGTH_BYTES + length > size:
            raise TruncatedDataError(path, _LENGTH_BYTES + length, size)

        data = _read(file.read_at, _LENGTH_BYTES, length)
    finally:
        file.close()

    return decode_header(path, data, size if whole else None, compared=compared)


def encode_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int, int]], metadata: Mapping[str, str]
) -> bytes:
    """Encode what a file begins with, its length included, ended as `file_digests` says.

    Args:
        tensors: Name, dtype (by its name here, and one that the format has), shape, and where its data
            begin and end, in bytes from the end of the header. Together they tile the data.
        metadata: Texts by name.
    """
    document: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    for name, dtype, shape, begin, end in tensors:
        document[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}

    data = file_digests.ended(json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode())
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def _read(read_at: Any, offset: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    read_at(offset, [memoryview(data)])
    return bytes(data)
