"""The keys under which an array and its chunks are stored. Pure."""

from __future__ import annotations

__all__ = ("array_metadata", "chunk_grid", "chunk_key", "prefix_of")

import itertools
from collections.abc import Iterable, Sequence

from penstock.handlers.formats.common.zarr_metadata import encode_v2, encode_v3
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.views import StagedLeaf


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


def chunk_grid(leaf: StagedLeaf) -> Iterable[tuple[int, ...]]:
    """Yield the index of every chunk, in order."""
    shape, chunk_shape = leaf.spec.shape or (), leaf.spec.chunk_shape
    counts = [-(-n // chunk) for n, chunk in zip(shape, chunk_shape, strict=True)]
    return itertools.product(*map(range, counts))
