"""The header of a safetensors file: eight bytes of length, then JSON, checked before any of it is used.

A file may be untrusted. Writers all use one form, without blanks, which is read in slices. A header of any
other form, or with any error in it, is parsed as a whole. Only data follow it.

Source:
    The format's description in the README of safetensors; what its reader refuses was tested with 0.8.
"""

from __future__ import annotations

__all__ = (
    "CODES",
    "MAX_HEADER_BYTES",
    "METADATA",
    "NAMES",
    "PACKED",
    "FileHeader",
    "Tensor",
    "decode_header",
    "encode_header",
    "header_bytes",
    "read_header",
)

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, final

import numpy as np
from msgspec import Meta, Struct
from msgspec.json import Decoder

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.formats.integrity import Checksums
from penstock.handlers.formats.safetensors import file_digests
from penstock.handlers.formats.untrusted import (
    Slices,
    UnusualFormError,
    add_distinct,
    as_list,
    as_object,
    as_shape,
    as_string,
    check_unicode,
    distinct_members,
    is_beyond_memory,
)
from penstock.kernel.errors import CorruptCheckpointError, TruncatedDataError, UnsupportedFormatError
from penstock.kernel.protocols.stores import Store

NAMES: Final[Mapping[str, str]] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""What the file says -> the dtype by name."""

CODES: Final[Mapping[str, str]] = {name: code for code, name in NAMES.items()}
"""The dtype by name -> what the file says."""

PACKED: Final = frozenset({"F4", "F6_E2M3", "F6_E3M2"})
"""Types that exist and that penstock does not read."""


METADATA: Final = "__metadata__"
"""The one member of a header that is no tensor: a map from text to text."""

_LENGTH_BYTES: Final = 8
_MOST_AXES: Final = 64  # what numpy has
_METADATA_START: Final = b'{"__metadata__":{'
_METADATA_END: Final = b'},"'
_N_QUOTES: Final = 10  # of one tensor: its name, three names of members, and the dtype

_Size: TypeAlias = Annotated[int, Meta(ge=0)]


class _Entry(Struct, gc=False):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_ENTRIES: Final = Decoder(dict[str, _Entry])
_TEXTS: Final = Decoder(dict[str, str])


@final
class Tensor(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: str  #: by its name here: `bfloat16`
    shape: tuple[int, ...]
    offset: int  #: bytes from the start of the file
    nbytes: int


@final
@dataclass(frozen=True, slots=True)
class FileHeader:
    """The content of one file."""

    path: str
    tensors: tuple[Tensor, ...]  #: in the order of the header
    metadata: Mapping[str, str]
    checksums: Checksums | None = None  #: of its tensors' bytes; None if none were recorded of these


def decode_header(path: str, data: bytes, size: int | None, *, compared: bool = True) -> FileHeader:
    """Decode a header, and check it against the size of its file.

    Args:
        path: Of the file, for the error.
        data: The header, without the eight bytes of its length.
        size: Of the whole file, bytes; None: not compared.
        compared: Whether the header is compared with its checksum. Else it is read as if it had none.

    Raises:
        TruncatedDataError: If the file ends before its data do.
        ChecksumError: If the header is not as penstock wrote it.
        CorruptCheckpointError: If the header is not one, or its tensors do not tile the data.
        UnsupportedFormatError: If a tensor has elements that penstock does not read.
    """
    try:
        entries, metadata = _decode_usual(data)
    except UnusualFormError:
        entries, metadata = _decode_any(path, data)

    # First: a damaged header says anything.
    sums = file_digests.find(path, data, metadata) if compared else None
    tensors = _tensors(path, entries, _LENGTH_BYTES + len(data))
    in_order = sorted(tensors, key=itemgetter(3, 4))  # by offset, then by length
    _check_tiling(path, in_order, _LENGTH_BYTES + len(data), size)
    if sums is None:
        return FileHeader(path, tensors, metadata)

    offsets = np.array([tensor.offset for tensor in in_order], np.int64)
    nbytes = np.array([tensor.nbytes for tensor in in_order], np.int64)
    return FileHeader(path, tensors, metadata, sums.at(path, offsets, nbytes))


def _decode_usual(data: bytes) -> tuple[dict[str, _Entry], dict[str, str]]:
    end = len(data.rstrip(b" ")) - 1
    start = 1
    metadata: dict[str, str] = {}
    if data.startswith(_METADATA_START):
        stop = data.find(_METADATA_END)
        for texts, _ in Slices(_TEXTS, data, len(_METADATA_START), stop, b'","'):
            add_distinct(metadata, texts)
        start = stop + 2

    if data[:1] != b"{" or data[end : end + 1] != b"}":
        raise UnusualFormError

    found: dict[str, _Entry] = {}
    for entries, part in Slices(_ENTRIES, data, start, end, b']},"'):
        if part.count(b'"') != _N_QUOTES * len(entries):
            raise UnusualFormError  # members of its own, or one of them twice
        add_distinct(found, entries)

    if METADATA in found:
        raise UnusualFormError

    return found, metadata


def _decode_any(path: str, data: bytes) -> tuple[dict[str, _Entry], dict[str, str]]:
    try:
        # Decoded first, because Python's parser would also accept UTF-16.
        document: object = json.loads(data.decode(), object_pairs_hook=distinct_members)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(path, f"its header is not JSON: {error}") from error

    members = as_object(path, "the header", document)
    texts = as_object(path, METADATA, members.pop(METADATA, None) or {})
    metadata = {name: as_string(path, f"{METADATA}[{name!r}]", text) for name, text in texts.items()}
    return {name: _entry(path, name, value) for name, value in members.items()}, metadata


def _entry(path: str, name: str, value: object) -> _Entry:
    check_unicode(path, [name])
    about = as_object(path, name, value)
    code = as_string(path, f"the dtype of {name!r}", about.get("dtype"))
    shape = as_shape(path, f"the shape of {name!r}", about.get("shape"))
    offsets = as_list(path, f"the data_offsets of {name!r}", about.get("data_offsets"))
    match offsets:
        case [int(begin), int(end)] if not isinstance(begin, bool) and not isinstance(end, bool):
            return _Entry(code, shape, (begin, end))
        case _:
            raise CorruptCheckpointError(path, f"the data_offsets of {name!r} are {offsets!r}"[:200])


def _tensors(path: str, entries: Mapping[str, _Entry], start: int) -> tuple[Tensor, ...]:
    """Make tensors of the entries. Many tensors have few shapes, so each shape is checked once."""
    kinds: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}
    tensors: list[Tensor] = []
    for name, entry in entries.items():
        shape = entry.shape
        kind = kinds.get((entry.dtype, shape))
        if kind is None:
            kind = kinds[entry.dtype, shape] = _kind(path, name, entry)

        dtype, nbytes = kind
        begin, end = entry.data_offsets
        if not 0 <= begin <= end:
            raise CorruptCheckpointError(path, f"the data_offsets of {name!r} are {[begin, end]}"[:200])
        if nbytes != end - begin:
            problem = (
                f"{name!r} of {entry.dtype} and shape {list(shape)} takes {nbytes} bytes, not {end - begin}"
            )
            raise CorruptCheckpointError(path, problem, key_path=f"[{name!r}]")

        tensors.append(Tensor(name, dtype, shape, start + begin, nbytes))

    return tuple(tensors)


def _kind(path: str, name: str, entry: _Entry) -> tuple[str, int]:
    """Return the dtype by its name here, and the bytes that such a tensor takes."""
    code, shape = entry.dtype, entry.shape
    if code not in NAMES:
        why = "shares bytes between elements" if code in PACKED else "penstock does not know"
        raise UnsupportedFormatError(
            path, f"{name!r} is of type {code!r}, which {why}", key_path=f"[{name!r}]"
        )

    itemsize = numpy_dtype(NAMES[code]).itemsize
    if len(shape) > _MOST_AXES or is_beyond_memory(shape, itemsize):
        raise CorruptCheckpointError(path, f"the shape of {name!r} is beyond any memory: {shape}"[:200])

    return NAMES[code], math.prod(shape) * itemsize


def _check_tiling(path: str, tensors: Sequence[Tensor], start: int, size: int | None) -> None:
    """Every byte after the header belongs to exactly one tensor; `tensors` by offset."""
    end = start
    last: Tensor | None = None
    for tensor in tensors:
        if tensor.offset != end:
            fault = "overlaps" if tensor.offset < end else "leaves a hole after"
            before = "the header" if last is None else f"those of {last.name!r}"
            problem = f"the data of {tensor.name!r} {fault} {before}"
            raise CorruptCheckpointError(path, problem, key_path=f"[{tensor.name!r}]")

        end, last = end + tensor.nbytes, tensor
        if size is not None and end > size:
            raise TruncatedDataError(path, end, size, key_path=f"[{tensor.name!r}]")

    if size is not None and end != size:
        raise CorruptCheckpointError(path, f"has {size - end} bytes that belong to no tensor")


MAX_HEADER_BYTES: Final = 100_000_000
"""Longer ones are refused by every reader."""


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
        whole: Whether the data must be there in their whole length, and nothing after them.
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
    """Encode the head of a file, its length included, padded as `file_digests` needs it.

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
