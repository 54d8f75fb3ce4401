"""A leaf without its value: its place in the tree, and what is stored of it."""

from __future__ import annotations

__all__ = (
    "EMPTY_MARKERS",
    "KeyKind",
    "KeyPath",
    "LeafSpec",
    "ParamInfo",
    "StoredLeaf",
)

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, TypeAlias

EMPTY_MARKERS: Final = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple"})
"""The typestrs of None and of empty containers, for which no bytes are stored."""


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """One leaf found on disk."""

    info: ParamInfo
    spec: LeafSpec
    detail: object = None  #: the layout's own, handed back to it when the leaf is read


KeyPath: TypeAlias = tuple[str, ...]
"""The keys from the root to a leaf, as they are stored: `("opt", "0", "mu")`."""


class KeyKind(IntEnum):
    """The kind of container a key indexes. The numbers are those of the on-disk format, where it has them."""

    SEQUENCE = 1  #: an index of a list, a tuple, or a node registered without key names
    MAPPING = 2  #: a dict key, a namedtuple field, an attribute
    TUPLE = 3  #: an index of what is known to be a tuple; never written
    PROCESS = (
        4  #: of what each process has for itself; replaced by the name of the process, and never written
    )


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """The place of a leaf: in its tree, and on the medium."""

    keys: KeyPath
    kinds: tuple[KeyKind, ...]  #: one for each key
    key_path: str  #: for people, as `jax.tree_util.keystr` prints it: `['opt'][0].mu`
    directory: str = ""  #: the checkpoint being written or read, for handlers with files of their own
    nodes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Where it is to be recorded: of each node on the way, root first, and of the leaf itself, `tuple`,
    or module and class of a named tuple, as in `optax:EmptyState`, or nothing."""
    own_from: int | None = field(default=None, compare=False, repr=False)
    """How many keys lead to the value that each process has for itself and that this leaf lies in; None if
    it lies in none. Where there are several processes, the next key names one of them."""
    name: str = field(init=False, compare=False, repr=False)
    """The stored name: the keys joined by dots, with no escaping."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", ".".join(self.keys))


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """The description of a leaf as it is stored: everything but its bytes and its place in the tree."""

    typestr: str  #: `jax.Array`, `np.ndarray`, `scalar`, `string`, an empty marker, or a user's own
    shape: tuple[int, ...] | None = None  #: None when no array bytes are stored
    dtype: str = ""  #: by name, as zarr v3 spells it: `float32`, `bfloat16`, `int4`
    itemsize: int = 0  #: bytes of one stored element
    chunk_shape: tuple[int, ...] = ()  #: divides `shape`; every axis at least 1
    write_shape: tuple[int, ...] | None = None  #: of a jax.Array: the part that one replica writes
    text: str | None = None  #: the value of a string leaf
    sharding: str | None = None  #: of a jax.Array: its sharding as a JSON text
    random_key_impl: str | None = None  #: of a typed PRNG key: the name of its implementation
    codec: str | None = None
    """How a save encodes each chunk: `zstd:3`, `auto` while that is undecided, or None for not at all."""
    n_replicas: int = 1  #: of a jax.Array to be saved: devices that hold the same shard, over all processes
    n_writers: int = 1  #: of a jax.Array to be saved: replicas that write a part of each shard
    is_global: bool = False  #: of a jax.Array to be saved: whether other processes hold parts of it
    writer: int | None = field(default=0, compare=False)
    """Of a jax.Array to be saved: which replica of a shard writes it, or its first part. None if each process
    writes all that it holds, on a disk of its own; then chunks of other processes are not there."""
    shapes_recorded: bool = (
        True  #: of a jax.Array to be saved: whether its `write_shape` and key are recorded
    )

    nbytes: int = field(init=False, compare=False, repr=False)
    """Array bytes stored in total, uncompressed."""
    chunk_nbytes: int = field(init=False, compare=False, repr=False)
    """Bytes of one whole chunk, uncompressed; 0 if the array has no elements."""

    def __post_init__(self) -> None:
        # Computed once: every stage asks, and thousands of leaves share one spec.
        nbytes = 0 if self.shape is None else math.prod(self.shape) * self.itemsize
        object.__setattr__(self, "nbytes", nbytes)
        object.__setattr__(self, "chunk_nbytes", math.prod(self.chunk_shape) * self.itemsize if nbytes else 0)

    @property
    def claimed_nbytes(self) -> int:
        """Bytes that it takes to restore all of it: those of the array, or of one chunk if that is larger."""
        return max(self.nbytes, self.chunk_nbytes)

    @property
    def is_single_chunk(self) -> bool:
        """True if it has array bytes and all of them are one chunk."""
        return self.nbytes > 0 and self.nbytes == self.chunk_nbytes

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """The number of chunks along each axis; chunks at the end of an axis may jut out."""
        shape = self.shape or ()
        return tuple([-(-size // chunk) for size, chunk in zip(shape, self.chunk_shape, strict=True)])

    @property
    def n_chunks(self) -> int:
        """The number of chunks; 0 if the array has no elements."""
        return math.prod(self.grid_shape) if self.nbytes else 0

    def chunk_indices(self) -> Iterator[tuple[int, ...]]:
        """Yield the index of every chunk in the grid, in C order."""
        return itertools.product(*map(range, self.grid_shape))

    @property
    def is_empty_marker(self) -> bool:
        """True if this stands for None or an empty container."""
        return self.typestr in EMPTY_MARKERS
