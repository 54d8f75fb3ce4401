"""How a leaf is stored and how much room it takes, from the index alone. Pure."""

from __future__ import annotations

__all__ = ("codec_of", "leaf_codec", "leaf_nbytes", "leaf_zarr_metadata")

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from penstock.handlers.formats.common.chunk_keys import prefix_of
from penstock.handlers.formats.common.leaf_table import StoredArray, StoredLeaves
from penstock.handlers.formats.common.zarr_metadata import ArrayFormat
from penstock.handlers.formats.orbax.chunks.chunk_lookup import stored_rows
from penstock.handlers.formats.orbax.chunks.embedded_arrays import PackedArray
from penstock.handlers.ocdbt.index_entries import Index

# Parts of a zarr v3 codec chain that only order bytes and do not encode them.
_TRANSPARENT: Final = frozenset({"bytes", "sharding_indexed"})
_LEVELS: Final = ("cname", "level", "clevel")  # options that are part of a codec's description


def codec_of(form: ArrayFormat) -> str | None:
    """Describe the codecs of an array's chunks, in order: `zstd:3`, `blosc:lz4:5`, `shuffle+zlib:6`.

    None if there was no codec. The order of bytes and axes, and inner chunks, do not count as one.
    """
    if form.plain:
        return None

    metadata = form.metadata
    if form.version == 2:
        steps = [*_dicts(metadata.get("filters")), *_dicts([metadata.get("compressor")])]
        return "+".join([_text(step.get("id"), step) for step in steps]) or None

    return "+".join(_chain(metadata.get("codecs"))) or None


def leaf_codec(leaves: StoredLeaves, number: int) -> str | None:
    """Describe the codecs of one leaf's chunks."""
    array = _array(leaves, number)
    return codec_of(array.format) if isinstance(array, StoredArray) else None


def leaf_zarr_metadata(leaves: StoredLeaves, number: int) -> Mapping[str, Any] | None:
    """Return the document of one leaf's array, as stored; None if it is no zarr array."""
    array = _array(leaves, number)
    return array.format.metadata if isinstance(array, StoredArray) else None


def leaf_nbytes(leaves: StoredLeaves, index: Index, number: int) -> int:
    """Count the stored bytes of one leaf's chunks."""
    array = _array(leaves, number)
    if isinstance(array, PackedArray):
        return array.nbytes
    if array is None:
        return 0

    grid, rows = array.format.grid_shape, index.rows
    if math.prod(grid) > len(index):  # a grid may be as large as its document says
        found = [row for _, row in stored_rows(index, array, tuple([(0, n) for n in grid]))]
    else:
        keys = [array.prefix + array.format.chunk_key(at) for at in itertools.product(*map(range, grid))]
        found = [rows[key] for key in map(str.encode, keys) if key in rows]

    return sum([max(0, nbytes) for nbytes in index.lengths[found].tolist()])


def _array(leaves: StoredLeaves, number: int) -> StoredArray | PackedArray | None:
    form = leaves.table.formats[number]
    if form is not None:
        return StoredArray(form, prefix_of(".".join(leaves.keys[number])))

    detail = leaves.table.details.get(number)
    return detail if isinstance(detail, StoredArray | PackedArray) else None


def _chain(codecs: object) -> Iterator[str]:
    for step in _dicts(codecs):
        name, options = step.get("name"), step.get("configuration")
        inner = cast("dict[str, Any]", options) if isinstance(options, dict) else {}
        if name == "sharding_indexed":
            yield from _chain(inner.get("codecs"))
        elif name not in _TRANSPARENT:
            yield _text(name, inner)


def _text(name: object, options: dict[str, Any]) -> str:
    found = [options[key] for key in _LEVELS if type(options.get(key)) in (str, int)]
    return ":".join(map(str, [name, *found]))


def _dicts(values: object) -> list[dict[str, Any]]:
    found = cast("list[object]", values) if isinstance(values, list) else []
    return [cast("dict[str, Any]", value) for value in found if isinstance(value, dict)]
