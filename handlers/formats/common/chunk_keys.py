"""The keys under which an array and its chunks are stored. Pure."""

from __future__ import annotations

__all__ = ("GridKeys", "array_metadata", "chunk_key", "chunk_keys", "grid_indices", "prefix_of")

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import final

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

    Many arrays share a grid, so that a key is made once. An array may claim a grid of any size: whoever
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
