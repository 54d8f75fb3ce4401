"""The header of one safetensors file: eight bytes of length, JSON, and after it nothing but data.

Everything it says is checked before any of it is used: a file may come from anywhere.

Source:
    The format's description in the README of safetensors; what its reader refuses was tried with 0.8.
"""

from __future__ import annotations

__all__ = ("MAX_HEADER_BYTES", "METADATA", "FileHeader", "Tensor", "encode_header", "read_header")

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.formats.common.checked_json import as_list, as_object, as_shape, as_string
from penstock.handlers.formats.safetensors.element_types import CODES, NAMES, PACKED
from penstock.handlers.formats.safetensors.header_scanner import Tensor, scan
from penstock.kernel.errors import CorruptCheckpointError, TruncatedDataError, UnsupportedFormatError
from penstock.kernel.protocols.stores import Store

MAX_HEADER_BYTES: Final = 100_000_000
"""Longer ones are refused by every reader."""

METADATA: Final = "__metadata__"
"""The one member of a header that is no tensor: a map from text to text."""

_LENGTH_BYTES: Final = 8
_MOST_AXES: Final = 64  # what numpy has


@final
@dataclass(frozen=True, slots=True)
class FileHeader:
    """What one file holds."""

    path: str
    tensors: tuple[Tensor, ...]  #: in the order of the header
    metadata: Mapping[str, str]


def read_header(store: Store, path: str) -> FileHeader:
    """Read and check the header of the file at `path`.

    Raises:
        TruncatedDataError: If the file ends before its header or its data do.
        CorruptCheckpointError: If the header is not one, or its tensors do not tile the data.
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

    return _decode(path, data, size)


def encode_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int, int]], metadata: Mapping[str, str]
) -> bytes:
    """Encode what a file begins with, its length included, padded to a multiple of eight bytes.

    Args:
        tensors: Name, dtype (by its name here, and one that the format has), shape, and where its data
            begin and end, in bytes from the end of the header. Together they tile the data.
        metadata: Texts by name.
    """
    document: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    for name, dtype, shape, begin, end in tensors:
        document[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}

    data = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    data += b" " * (-len(data) % _LENGTH_BYTES)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def _read(read_at: Any, offset: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    read_at(offset, [memoryview(data)])
    return bytes(data)


def _decode(path: str, data: bytes, size: int) -> FileHeader:
    start = _LENGTH_BYTES + len(data)
    try:
        text = data.decode()
        quick = scan(text, start, size, _distinct)
        if quick is not None:
            return FileHeader(path, quick[0], _metadata(path, quick[1]))

        document: object = json.loads(text, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(path, f"its header is not JSON: {error}") from error

    members = dict(as_object(path, "the header", document))
    metadata = _metadata(path, members.pop(METADATA, None))
    tensors = tuple([_tensor(path, name, value, start) for name, value in members.items()])
    _check_tiling(path, tensors, start, size)
    return FileHeader(path, tensors, metadata)


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members: dict[str, object] = {}
    for name, value in pairs:
        if name in members:
            message = f"{name!r} occurs twice"
            raise ValueError(message)

        members[name] = value

    return members


def _metadata(path: str, value: object) -> dict[str, str]:
    if value is None:
        return {}

    texts = as_object(path, METADATA, value)
    return {name: as_string(path, f"{METADATA}[{name!r}]", text) for name, text in texts.items()}


def _tensor(path: str, name: str, value: object, start: int) -> Tensor:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise CorruptCheckpointError(path, f"the name {name!r} is no valid Unicode text") from error

    about = as_object(path, name, value)
    code = as_string(path, f"the dtype of {name!r}", about.get("dtype"))
    if code not in NAMES:
        why = "shares bytes between elements" if code in PACKED else "penstock does not know"
        raise UnsupportedFormatError(
            path, f"{name!r} is of type {code!r}, which {why}", key_path=f"[{name!r}]"
        )

    shape = as_shape(path, f"the shape of {name!r}", about.get("shape"))
    offsets = as_list(path, f"the data_offsets of {name!r}", about.get("data_offsets"))
    match offsets:
        case [int(begin), int(end)] if not isinstance(begin, bool) and 0 <= begin <= end:
            pass
        case _:
            raise CorruptCheckpointError(path, f"the data_offsets of {name!r} are {offsets!r}"[:200])

    itemsize = numpy_dtype(NAMES[code]).itemsize
    if len(shape) > _MOST_AXES or math.prod([n or 1 for n in shape]) * itemsize >= 1 << 63:
        raise CorruptCheckpointError(path, f"the shape of {name!r} is beyond any memory: {shape}"[:200])

    nbytes = math.prod(shape) * itemsize
    if nbytes != end - begin:
        problem = f"{name!r} of {code} and shape {list(shape)} takes {nbytes} bytes, not {end - begin}"
        raise CorruptCheckpointError(path, problem, key_path=f"[{name!r}]")

    return Tensor(name, NAMES[code], shape, start + begin, nbytes)


def _check_tiling(path: str, tensors: Sequence[Tensor], start: int, size: int) -> None:
    """Every byte after the header belongs to exactly one tensor."""
    end, before = start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != end:
            fault = "overlaps" if tensor.offset < end else "leaves a hole after"
            problem = f"the data of {tensor.name!r} {fault} {before}"
            raise CorruptCheckpointError(path, problem, key_path=f"[{tensor.name!r}]")

        end, before = tensor.offset + tensor.nbytes, f"those of {tensor.name!r}"
        if end > size:
            raise TruncatedDataError(path, end, size, key_path=f"[{tensor.name!r}]")

    if end != size:
        raise CorruptCheckpointError(path, f"has {size - end} bytes that belong to no tensor")
