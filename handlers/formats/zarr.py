"""The metadata of zarr arrays, versions 2 and 3, and the keys of their chunks. Pure.

`encode_v2` and `encode_v3` make the metadata of an array, `decode` reads either into an `ArrayFormat`.
The members that name a codec come from the registry of codecs, and the bytes of chunks pass through it.

Source:
    zarr v2 and v3 specifications; what TensorStore and Orbax write is in ORBAX_FORMAT.md §1.6.
"""

from __future__ import annotations

__all__ = (
    "METADATA_KEYS",
    "MOST_AXES",
    "ArrayFormat",
    "GridKeys",
    "array_metadata",
    "chunk_key",
    "chunk_keys",
    "codec_to_decode",
    "decode",
    "encode_v2",
    "encode_v3",
    "grid_indices",
    "opaque_codec",
    "prefix_of",
)

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal, cast, final

from penstock.handlers.dtypes import numpy_dtype, storable
from penstock.handlers.formats.untrusted import (
    as_list,
    as_object,
    as_shape,
    as_string,
    is_beyond_memory,
    parse_object,
)
from penstock.kernel.codecs import CODECS, Codec, codec_of
from penstock.kernel.errors import CorruptCheckpointError, UnsupportedFormatError
from penstock.kernel.protocols.leaf import LeafSpec

_LONG_NUMBER: Final = 20  # digits, more than any index has

MOST_AXES: Final = 64
"""What numpy has."""

METADATA_KEYS: Final = (".zarray", "zarr.json")
"""The key of an array's metadata, in version 2 and in version 3."""

_OPAQUE: Final = {"opaque": True}
"""Prefix that tells a stage's own codec from one that zarr may define one day."""

_V2_CODES: Final = {
    "bool": "|b1",
    "int8": "|i1",
    "uint8": "|u1",
    "int16": "<i2",
    "uint16": "<u2",
    "int32": "<i4",
    "uint32": "<u4",
    "int64": "<i8",
    "uint64": "<u8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
}
_V2_NAMES: Final = {code[1:]: name for name, code in _V2_CODES.items()}


@final
@dataclass(frozen=True, slots=True)
class ArrayFormat:
    """The form that one array is stored in: everything but the place of its bytes."""

    shape: tuple[int, ...]
    dtype: str  #: by name: `float32`, `bfloat16`
    chunk_shape: tuple[int, ...]  #: every axis at least 1; chunks at the far edges are stored whole
    version: Literal[2, 3]
    separator: str  #: between the indices in a chunk key
    key_prefix: str  #: of every chunk key: `c` in version 3, nothing in version 2
    plain: bool  #: chunks are raw little-endian elements in C order, with no codec of any kind
    metadata: dict[str, Any] = field(compare=False, repr=False)  #: as stored, for a driver

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        return numpy_dtype(self.dtype).itemsize

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Number of chunks along each axis; 0 where the array has no elements."""
        return tuple([-(-n // chunk) for n, chunk in zip(self.shape, self.chunk_shape, strict=True)])

    def chunk_key(self, index: Sequence[int]) -> str:
        """Return the key of a chunk, below the array's own prefix: `0.1`, `c/0/1`; 0-d: `0`, `c`."""
        parts = [self.key_prefix] if self.key_prefix else []
        parts.extend(map(str, index))
        return self.separator.join(parts) or "0"

    def chunk_index(self, key: bytes) -> tuple[int, ...] | None:
        """Return the index of the chunk that has a key; None if it is no chunk's. Undoes `chunk_key`."""
        text = key.decode(errors="replace")
        parts = text.split(self.separator) if self.shape else []
        digits = parts[1:] if self.key_prefix and self.shape else parts
        if not all(part.isdecimal() and len(part) < _LONG_NUMBER for part in digits):
            return None

        index = tuple(map(int, digits))
        return index if len(index) == len(self.shape) and self.chunk_key(index) == text else None


@lru_cache(maxsize=4096)
def encode_v2(shape: tuple[int, ...], dtype: str, chunks: tuple[int, ...], codec: str | None = None) -> bytes:
    """Encode the `.zarray` of an array, byte for byte as TensorStore would.

    The result is remembered: trees have many leaves and few shapes.

    Args:
        shape: Of the whole array.
        dtype: Its name; `storable`.
        chunks: Of one chunk, of the same rank, every axis at least 1.
        codec: As in `LeafSpec.codec`.
    """
    document = {
        "chunks": chunks,
        "compressor": None if codec is None else _compressor(codec, numpy_dtype(dtype).itemsize),
        "dimension_separator": ".",
        "dtype": _V2_CODES.get(dtype, dtype),
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": shape,
        "zarr_format": 2,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _compressor(text: str, itemsize: int) -> dict[str, object]:
    """The member `compressor` of a `.zarray`."""
    codec = codec_of(text)
    return {"id": text, **_OPAQUE} if codec is None else {"id": _name(codec), **codec.zarr2(itemsize)}


def _step(text: str, itemsize: int) -> dict[str, object]:
    """The last of the `codecs` of a `zarr.json`."""
    codec = codec_of(text)
    if codec is None:
        return {"configuration": _OPAQUE, "name": text}

    return {"configuration": codec.zarr3(itemsize), "name": _name(codec)}


def _name(codec: Codec) -> str:
    return codec.text.partition(":")[0]  # it may be asked for by another name


def codec_to_decode(form: ArrayFormat) -> Codec | None:
    """Return the codec of an array's chunks, if TensorStore does not decode it.

    Only arrays that are encoded by that one codec, from little-endian elements in C order, have one.

    Raises:
        ConfigError: If the codec is broken.
        ValueError: If its options are.
    """
    found, options = _last_step(form)
    kind = CODECS.find(found)
    if kind is None or not _is_only_step(form):
        return None

    codec = kind.from_zarr(options)
    return None if codec.in_tensorstore else codec


def _is_only_step(form: ArrayFormat) -> bool:
    metadata = form.metadata
    if form.version == 2:
        is_big = str(metadata.get("dtype")).startswith(">")
        return not metadata.get("filters") and metadata.get("order", "C") == "C" and not is_big

    first, *others = metadata["codecs"]
    return len(others) == 1 and _is_plain_v3("", [first], form.dtype)


def _last_step(form: ArrayFormat) -> tuple[str, dict[str, object]]:
    """Return the name and the options of the last codec of a chunk; an empty name if there is none."""
    version_2 = form.version == 2
    step: object = form.metadata.get("compressor") if version_2 else form.metadata["codecs"][-1]
    if not isinstance(step, dict):  # none, or damaged: the decoder of the chunks says so
        return "", {}

    codec = cast("dict[str, object]", step)
    options = codec if version_2 else codec.get("configuration")
    name = str(codec.get("id" if version_2 else "name"))
    return name, cast("dict[str, object]", options) if isinstance(options, dict) else {}


def opaque_codec(form: ArrayFormat) -> str | None:
    """Return the codec under which a penstock stage made an array opaque; None if it has none."""
    name, options = _last_step(form)
    return name if options.get("opaque") is True else None


@lru_cache(maxsize=4096)
def encode_v3(shape: tuple[int, ...], dtype: str, chunks: tuple[int, ...], codec: str | None = None) -> bytes:
    """Encode the `zarr.json` of an array without shards, byte for byte as TensorStore would.

    Args as those of `encode_v2`.
    """
    kind = numpy_dtype(dtype)
    order = {} if kind.itemsize == 1 else {"configuration": {"endian": "little"}}
    codecs: list[object] = [{**order, "name": "bytes"}]
    if codec is not None:
        codecs.append(_step(codec, kind.itemsize))

    zero: Any = 0 if "int" in dtype else False if dtype == "bool" else 0.0
    document = {
        "chunk_grid": {"configuration": {"chunk_shape": chunks}, "name": "regular"},
        "chunk_key_encoding": {"name": "default"},
        "codecs": codecs,
        "data_type": dtype,
        "fill_value": [0.0, 0.0] if kind.kind == "c" else zero,
        "node_type": "array",
        "shape": shape,
        "zarr_format": 3,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def decode(path: str, data: bytes) -> ArrayFormat:
    """Read the metadata of an array, of either version.

    Args:
        path: Where `data` was found, for the error.
        data: The content of `.zarray` or `zarr.json`.

    Raises:
        CorruptCheckpointError: If it is not the metadata of an array.
        UnsupportedFormatError: If it is, but of a kind that penstock does not read.
    """
    document = parse_object(path, data)
    match document.get("zarr_format"):
        case 2:
            found = _decode_v2(path, document)
        case 3:
            found = _decode_v3(path, document)
        case version:
            raise CorruptCheckpointError(path, f"zarr_format is {version!r}, neither 2 nor 3")

    if found.separator not in (".", "/"):
        problem = f"the chunk key separator is {found.separator!r}, neither '.' nor '/'"
        raise CorruptCheckpointError(path, problem)
    if len(found.shape) != len(found.chunk_shape):
        raise CorruptCheckpointError(
            path, f"shape {found.shape} and chunks {found.chunk_shape} differ in rank"
        )
    if 0 in found.chunk_shape:
        raise CorruptCheckpointError(path, f"chunks {found.chunk_shape} have an axis of 0")
    if len(found.shape) > MOST_AXES:
        raise UnsupportedFormatError(path, f"has {len(found.shape)} axes; penstock reads up to {MOST_AXES}")
    for sizes in (found.shape, found.chunk_shape):
        if is_beyond_memory(sizes, found.itemsize) and (sizes is found.shape or 0 not in found.shape):
            raise CorruptCheckpointError(path, f"{sizes} is beyond any memory"[:200])

    return found


def _decode_v2(path: str, document: dict[str, object]) -> ArrayFormat:
    code = document.get("dtype")
    if isinstance(code, list):
        raise UnsupportedFormatError(path, "the elements are records; penstock reads plain numbers")

    code = as_string(path, "dtype", code)
    order = code[0] if code and code[0] in "<>|" else ""
    dtype = _known(path, _V2_NAMES.get(code[1:], code) if order else code)
    layout = document.get("order", "C")
    if layout not in ("C", "F"):
        raise CorruptCheckpointError(path, f"order is {layout!r}, neither 'C' nor 'F'")

    coded = bool(document.get("compressor") or document.get("filters"))
    return ArrayFormat(
        shape=as_shape(path, "shape", document.get("shape")),
        dtype=dtype,
        chunk_shape=as_shape(path, "chunks", document.get("chunks")),
        version=2,
        separator=cast("str", document.get("dimension_separator", ".")),  # compared in `decode`
        key_prefix="",
        plain=not coded and layout == "C" and order != ">",
        metadata=document,
    )


def _decode_v3(path: str, document: dict[str, object]) -> ArrayFormat:
    if document.get("node_type") != "array":
        raise CorruptCheckpointError(path, f"node_type is {document.get('node_type')!r}, not 'array'")

    grid = as_object(path, "chunk_grid", document.get("chunk_grid"))
    if grid.get("name") != "regular":
        raise UnsupportedFormatError(
            path, f"the chunk grid is {grid.get('name')!r}; penstock reads 'regular'"
        )

    keys = as_object(path, "chunk_key_encoding", document.get("chunk_key_encoding"))
    if keys.get("name") not in ("default", "v2"):
        raise UnsupportedFormatError(path, f"the chunk key encoding is {keys.get('name')!r}")

    is_default = keys["name"] == "default"
    options = as_object(path, "chunk_key_encoding", keys.get("configuration", {}))
    regular = as_object(path, "chunk_grid", grid.get("configuration"))
    dtype = _known(path, as_string(path, "data_type", document.get("data_type")))
    return ArrayFormat(
        shape=as_shape(path, "shape", document.get("shape")),
        dtype=dtype,
        chunk_shape=as_shape(path, "chunk_shape", regular.get("chunk_shape")),
        version=3,
        separator=cast("str", options.get("separator", "/" if is_default else ".")),  # compared in `decode`
        key_prefix="c" if is_default else "",
        plain=_is_plain_v3(path, as_list(path, "codecs", document.get("codecs")), dtype),
        metadata=document,
    )


def _is_plain_v3(path: str, codecs: list[object], dtype: str) -> bool:
    """Return whether the one codec is `bytes`, in little-endian order where there is an order."""
    if not codecs:
        raise CorruptCheckpointError(path, "codecs is an empty list; one of them makes bytes of elements")
    if len(codecs) != 1:
        return False

    codec = as_object(path, "codecs", codecs[0])
    options = as_object(path, "codecs", codec.get("configuration", {}))
    little = options.get("endian") == "little" or numpy_dtype(dtype).itemsize == 1
    return codec.get("name") == "bytes" and little


def _known(path: str, dtype: str) -> str:
    if not storable(dtype):
        raise UnsupportedFormatError(
            path, f"the elements are of type {dtype!r}, which penstock does not read"
        )

    return dtype


def prefix_of(name: str) -> str:
    """Return what all keys of the array `name` begin with: its name and a slash; nothing for a bare leaf."""
    return f"{name}/" if name else ""


def chunk_key(index: Sequence[int], version: int) -> str:
    """Return the key of a chunk, below that of its array: `0.1` in zarr 2, `c/0/1` in zarr 3."""
    if version == 2:
        return ".".join(map(str, index)) or "0"

    return "/".join(["c", *map(str, index)])


def array_metadata(spec: LeafSpec, version: int) -> bytes:
    """Encode the metadata of an array."""
    encode = encode_v2 if version == 2 else encode_v3
    return encode(spec.shape or (), spec.dtype, spec.chunk_shape, spec.codec)


def chunk_keys(grid: Sequence[int], version: int) -> list[str]:
    """Return the keys of all chunks of a grid, in C order."""
    indices = itertools.product(*[list(map(str, range(n))) for n in grid])
    if version == 2:
        return [".".join(index) or "0" for index in indices]

    return ["/".join(["c", *index]) for index in indices]


def grid_indices(grid: Sequence[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """Yield every index of a grid, in C order. Unlike `itertools.product`, it holds no axis in memory.

    Args:
        grid: Ranges of chunk indices.
    """
    if not grid:
        yield ()
        return

    for outer in grid_indices(grid[:-1]):
        for at in range(*grid[-1]):
            yield (*outer, at)


@final
class GridKeys:
    """The keys of all chunks of a grid, in C order. Each is made when it is first asked for, and kept.

    Many arrays share a grid, so that a key is made once. An array may claim a grid of any size: a reader that
    stops at the first chunk that is not stored pays only for those that are.

    Args:
        grid: How many chunks there are along each axis.
        key: Makes the key of a chunk.
    """

    __slots__ = ("_known", "_rest")

    def __init__(self, grid: Sequence[int], key: Callable[[tuple[int, ...]], str]) -> None:
        self._known: list[bytes] = []
        self._rest = map(str.encode, map(key, grid_indices([(0, n) for n in grid])))

    def __iter__(self) -> Iterator[bytes]:
        return itertools.chain(self._known, self._made())

    def _made(self) -> Iterator[bytes]:
        for key in self._rest:
            self._known.append(key)
            yield key
