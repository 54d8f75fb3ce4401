"""A leaf without its value: its place in the tree, and what is stored of it.

`LeafInfos` has the places of all leaves in columns. Most are siblings of many others, so what siblings share
is kept once, and the `ParamInfo` of a leaf is made on access.
"""

from __future__ import annotations

__all__ = (
    "EMPTY_MARKERS",
    "ONE_REPLICA",
    "Children",
    "ChosenInfos",
    "ContainerNode",
    "InfoRun",
    "KeyKind",
    "KeyPath",
    "LeafInfos",
    "LeafPredicate",
    "LeafSpec",
    "ParamInfo",
    "Replicas",
    "StoredLeaf",
    "StoredRows",
    "keys_of",
    "names_of",
    "runs_of",
)

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import groupby
from typing import Final, TypeAlias, final, overload

EMPTY_MARKERS: Final = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple"})
"""The typestrs of None and of empty containers, for which no bytes are stored."""


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """One leaf found on disk."""

    info: ParamInfo
    spec: LeafSpec
    detail: object = None  #: the layout's own, handed back to it when the leaf is read


@final
@dataclass(frozen=True, slots=True, eq=False)
class StoredRows(Sequence[StoredLeaf]):
    """Some leaves of a checkpoint. Each `StoredLeaf` is made on access: most need their `specs` alone."""

    leaves: Sequence[StoredLeaf]  #: all of the checkpoint
    rows: Sequence[int]  #: places in them
    specs: Sequence[LeafSpec]  #: of the chosen ones

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int, /) -> StoredLeaf: ...
    @overload
    def __getitem__(self, at: slice, /) -> StoredRows: ...
    def __getitem__(self, at: int | slice, /) -> StoredLeaf | StoredRows:
        if isinstance(at, slice):
            return StoredRows(self.leaves, self.rows[at], self.specs[at])

        return self.leaves[self.rows[at]]


KeyPath: TypeAlias = tuple[str, ...]
"""The keys from the root to a leaf, as they are stored: `("opt", "0", "mu")`."""

LeafPredicate: TypeAlias = Callable[[KeyPath], bool]
"""True for some leaves, by their stored key paths: of `prioritise`, for those that come first."""


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
    """How many keys lead to the value that each process has for itself and that this leaf is in; None if
    it is in none. Where there are several processes, the next key names one of them."""
    name: str = field(init=False, compare=False, repr=False)
    """The stored name: the keys joined by dots, with no escaping."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", ".".join(self.keys))


@final
@dataclass(frozen=True, slots=True)
class Replicas:
    """The copies of each shard of a leaf that is saved, and those of them that are written."""

    n: int = 1  #: devices that hold the same shard, over all processes
    n_writers: int = 1  #: replicas that each write a part of a shard
    is_global: bool = False  #: whether other processes hold shards of the leaf
    writer: int | None = field(default=0, compare=False)
    """The replica that writes a shard, or its first part. None if each process writes all that it holds, on a
    disk of its own; then chunks of other processes are not there."""


ONE_REPLICA: Final = Replicas()


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """The description of a leaf as it is stored: everything but its bytes and its place in the tree."""

    typestr: str  #: `jax.Array`, `np.ndarray`, `scalar`, `string`, an empty marker, or a user's own
    shape: tuple[int, ...] | None = None  #: None when no array bytes are stored
    dtype: str = ""  #: by name, as zarr v3 spells it: `float32`, `bfloat16`, `int4`
    itemsize: int = 0  #: bytes of one stored element
    chunk_shape: tuple[int, ...] = ()  #: divides `shape`; every axis at least 1
    write_shape: tuple[int, ...] | None = None  #: the part that one replica writes, of what devices hold
    text: str | None = None  #: the value of a leaf that is kept as text, of any type
    sharding: str | None = None
    """The parts that it was in when it was saved, in words that its handler and the format know: opaque."""
    extended_dtype: str | None = None
    """What the elements are where `dtype` is only how they are stored, in words that the handler and the
    format know: of random keys, the generator. Such a leaf is never cast. None for plain numbers."""
    codec: str | None = None
    """How a save encodes each chunk: `zstd:3`, `auto` while that is undecided, or None for not at all."""
    replicas: Replicas = ONE_REPLICA  #: at a save
    shapes_recorded: bool = True  #: at a save: whether `write_shape` and `extended_dtype` are recorded

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


SLICE: Final = 8192
"""Leaves of which columns are made at once: so that a million leaves are never written out in full."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Children:
    """The keys of one container's children, in order."""

    keys: Sequence[str]  #: as they are stored
    kinds: Sequence[KeyKind]
    shown: Callable[[int], str]  #: a key as it is printed in a key path, by number


@final
@dataclass(frozen=True, slots=True, eq=False)
class ContainerNode:
    """A container with its place in the tree."""

    keys: KeyPath
    kinds: tuple[KeyKind, ...]
    key_path: str
    children: Children

    def info(self, number: int) -> ParamInfo:
        """Return the place of a child."""
        key, kind = self.children.keys[number], self.children.kinds[number]
        key_path = self.key_path + self.children.shown(number)
        return ParamInfo((*self.keys, key), (*self.kinds, kind), key_path)


@final
@dataclass(frozen=True, slots=True, eq=False)
class InfoRun:
    """Leaves that follow each other and are children of one container."""

    outer: KeyPath  #: keys of the container
    outer_kinds: tuple[KeyKind, ...]
    keys: Sequence[str]  #: the last key of each leaf
    kinds: Sequence[KeyKind]  #: the kind of that key


@final
class LeafInfos(Sequence[ParamInfo]):
    """The places of all leaves of one tree, in flatten order. Immutable.

    Args:
        runs: The number of the first leaf of each run of siblings; their container; and the first one's
            number among its children. In order.
        n_leaves: All leaves.
    """

    __slots__ = ("_n_leaves", "_runs", "_starts", "distinct")

    def __init__(
        self, runs: Sequence[tuple[int, ContainerNode, int]], n_leaves: int, *, distinct: bool
    ) -> None:
        self._starts = [start for start, _, _ in runs]
        ends = [*self._starts, n_leaves][1:]
        # The container of each run, and the numbers that its leaves have among the children.
        self._runs = [
            (node, range(first, first + end - start))
            for (start, node, first), end in zip(runs, ends, strict=True)
        ]
        self._n_leaves = n_leaves
        self.distinct = distinct  #: whether all stored names are known to be distinct and valid

    def __len__(self) -> int:
        return self._n_leaves

    @overload
    def __getitem__(self, at: int, /) -> ParamInfo: ...
    @overload
    def __getitem__(self, at: slice, /) -> tuple[ParamInfo, ...]: ...
    def __getitem__(self, at: int | slice, /) -> ParamInfo | tuple[ParamInfo, ...]:
        if isinstance(at, slice):
            return tuple([self[one] for one in range(self._n_leaves)[at]])

        place = range(self._n_leaves)[at]
        run = bisect_right(self._starts, place) - 1
        node, numbers = self._runs[run]
        return node.info(numbers[place - self._starts[run]])

    def __iter__(self) -> Iterator[ParamInfo]:
        for node, numbers in self._runs:
            for number in numbers:
                yield node.info(number)

    def runs(self) -> Iterator[InfoRun]:
        """Yield all leaves in runs of siblings, of at most `SLICE` each."""
        for node, numbers in self._runs:
            for at in range(numbers.start, numbers.stop, SLICE):
                stop, children = min(at + SLICE, numbers.stop), node.children
                yield InfoRun(node.keys, node.kinds, children.keys[at:stop], children.kinds[at:stop])


@final
@dataclass(frozen=True, slots=True, eq=False)
class ChosenInfos(Sequence[ParamInfo]):
    """Some places, by number. Each `ParamInfo` is made on access: a handler needs few of them."""

    infos: Sequence[ParamInfo]  #: all of the tree
    numbers: Sequence[int]  #: in them

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, at: int, /) -> ParamInfo: ...
    @overload
    def __getitem__(self, at: slice, /) -> ChosenInfos: ...
    def __getitem__(self, at: int | slice, /) -> ParamInfo | ChosenInfos:
        if isinstance(at, slice):
            return ChosenInfos(self.infos, self.numbers[at])

        return self.infos[self.numbers[at]]


def runs_of(infos: Sequence[ParamInfo]) -> Iterator[InfoRun]:
    """Yield leaves in runs of siblings, of at most `SLICE` each. None of them is a bare leaf."""
    if isinstance(infos, LeafInfos):
        yield from infos.runs()
        return

    for at in range(0, len(infos), SLICE):
        for (outer, kinds), group in groupby(infos[at : at + SLICE], _outer):
            siblings = list(group)
            keys = [info.keys[-1] for info in siblings]
            yield InfoRun(outer, kinds, keys, [info.kinds[-1] for info in siblings])


def names_of(infos: Sequence[ParamInfo]) -> list[str]:
    """Return the stored name of each leaf."""
    if isinstance(infos, ChosenInfos):
        every = names_of(infos.infos)  # in runs of siblings, which is faster than one by one
        return [every[at] for at in infos.numbers]
    if not isinstance(infos, LeafInfos):
        return [info.name for info in infos]

    names: list[str] = []
    for run in infos.runs():
        prefix = ".".join((*run.outer, ""))
        names += [prefix + key for key in run.keys]

    return names


def keys_of(infos: Sequence[ParamInfo]) -> list[KeyPath]:
    """Return the keys of each leaf."""
    if not isinstance(infos, LeafInfos):
        return [info.keys for info in infos]

    return [(*run.outer, key) for run in infos.runs() for key in run.keys]


def _outer(info: ParamInfo) -> tuple[KeyPath, tuple[KeyKind, ...]]:
    return info.keys[:-1], info.kinds[:-1]
