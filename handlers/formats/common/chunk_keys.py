"""The keys under which an array and its chunks are stored. Pure."""

from __future__ import annotations

__all__ = ("array_metadata", "chunk_key", "chunk_keys", "prefix_of")

import itertools
from collections.abc import Sequence

from penstock.handlers.formats.common.zarr_metadata import encode_v2, encode_v3
from penstock.kernel.protocols.leaf import LeafSpec


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
