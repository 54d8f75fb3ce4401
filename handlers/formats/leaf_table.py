"""The leaves of a checkpoint in columns, and their key paths as they are printed.

A tree of 100,000 leaves is a `LeafTable`; the object for a leaf is made when `StoredLeaves` is asked for it.
"""

from __future__ import annotations

__all__ = (
    "MOST_LEVELS",
    "ChunkRows",
    "KeyPathBudget",
    "LeafTable",
    "StoredArray",
    "StoredLeaves",
    "check_tree",
    "show_key_path",
)

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, final, overload

import numpy as np
import numpy.typing as npt

from penstock.handlers.formats.zarr import ArrayFormat, GridKeys, prefix_of
from penstock.handlers.ocdbt.index import KeyTable
from penstock.kernel.concurrency.brief_steps import parts_of
from penstock.kernel.errors import SpecError, UnsupportedFormatError
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafSpec, ParamInfo, StoredLeaf

MOST_CHUNKS: Final = 4096
"""Chunks of a leaf whose rows are looked up in advance. A leaf with more of them is no small one."""


@final
@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in zarr chunks: `StoredLeaf.detail` of a leaf of Orbax's layout."""

    format: ArrayFormat
    prefix: str  #: of the array's keys in the index: the stored name and a slash, or nothing


@final
@dataclass(frozen=True, slots=True, eq=False)
class ChunkRows:
    """The rows of chunks in an index, leaf by leaf, in C order of each leaf's grid."""

    rows: npt.NDArray[np.int64]  #: of all leaves, one after another
    counts: npt.NDArray[np.int64]  #: chunks of each leaf; 0 for a leaf that is stored in another way

    def of(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the rows of some leaves, one after another, and the number of each leaf's rows."""
        counts = self.counts[numbers]
        ends = np.cumsum(counts)
        starts = (np.cumsum(self.counts) - self.counts)[numbers]
        return self.rows[np.repeat(starts - (ends - counts), counts) + np.arange(counts.sum())], counts


@final
@dataclass(frozen=True, eq=False)
class LeafTable:
    """Everything that is stored of the leaves, in columns. Checkpoints of one tree share it. Immutable."""

    keys: Sequence[KeyPath]
    kinds: Sequence[tuple[KeyKind, ...]]
    specs: Sequence[LeafSpec]
    formats: Sequence[ArrayFormat | None]  #: None for leaves without array bytes and for those in `details`
    index_keys: KeyTable = field(default_factory=lambda: KeyTable([]))
    details: Mapping[int, object] = field(default_factory=dict[int, object])
    """`StoredLeaf.detail`, by number, of the few leaves whose bytes are outside zarr arrays."""

    @cached_property
    def chunk_rows(self) -> ChunkRows:
        """The rows of the chunks of every leaf that is stored raw, in not too many whole chunks."""
        alike: dict[int, list[int]] = {}
        for number, form in enumerate(self.formats):
            alike.setdefault(id(form), []).append(number)

        counts = np.zeros(len(self.formats), np.int64)
        first = np.full(len(self.formats), -1, np.int64)
        others: dict[int, list[int]] = {}
        for numbers in alike.values():
            form = self.formats[numbers[0]]
            if form is None or not form.plain:
                continue
            n_chunks = math.prod(form.grid_shape)
            juts_out = any(size % chunk for size, chunk in zip(form.shape, form.chunk_shape, strict=True))
            if n_chunks > MOST_CHUNKS or juts_out:
                continue
            if n_chunks == 1:
                key = form.chunk_key((0,) * len(form.shape)).encode()
                for some in parts_of(numbers):
                    names = [".".join(self.keys[number]) for number in some]
                    found = self.index_keys.find([prefix_of(name).encode() + key for name in names])
                    first[some] = [-1 if row is None else row for row in found]
            else:
                keys = GridKeys(form.grid_shape, form.chunk_key)
                others |= {number: self._all_rows(number, keys) for number in numbers}

        counts[first >= 0] = 1
        counts[list(others)] = list(map(len, others.values()))
        starts, rows = np.cumsum(counts) - counts, np.zeros(int(counts.sum()), np.int64)
        rows[starts[first >= 0]] = first[first >= 0]
        for number, chunks in others.items():
            rows[starts[number] : starts[number] + len(chunks)] = chunks

        return ChunkRows(rows, counts)

    def _all_rows(self, number: int, keys: Iterable[bytes]) -> list[int]:
        """Return the rows of the chunks of a leaf; none if one is missing."""
        prefix = prefix_of(".".join(self.keys[number])).encode()
        found = self.index_keys.find(list(map(prefix.__add__, keys)))
        rows = [row for row in found if row is not None]
        return rows if len(rows) == len(found) else []  # an error when the leaf is restored alone


@final
class StoredLeaves(Sequence[StoredLeaf]):
    """Every leaf and empty marker, in stored order. Immutable: specs and formats are shared by many.

    Args:
        directory: Of the tree.
        table: What is stored of the leaves.
    """

    __slots__ = ("_directory", "keys", "kinds", "specs", "table")

    def __init__(self, directory: str, table: LeafTable) -> None:
        self._directory = directory
        self.table = table
        self.keys, self.kinds, self.specs = table.keys, table.kinds, table.specs

    @classmethod
    def of(cls, directory: str, leaves: Iterable[StoredLeaf]) -> StoredLeaves:
        """Build the columns from existing leaves."""
        known = tuple(leaves)
        table = LeafTable(
            keys=[leaf.info.keys for leaf in known],
            kinds=[leaf.info.kinds for leaf in known],
            specs=[leaf.spec for leaf in known],
            formats=[None] * len(known),
            details={at: leaf.detail for at, leaf in enumerate(known)},
        )
        return cls(directory, table)

    @overload
    def __getitem__(self, index: int, /) -> StoredLeaf: ...
    @overload
    def __getitem__(self, index: slice, /) -> tuple[StoredLeaf, ...]: ...
    def __getitem__(self, index: int | slice, /) -> StoredLeaf | tuple[StoredLeaf, ...]:
        if isinstance(index, slice):
            return tuple([self[at] for at in range(len(self))[index]])

        keys, kinds, form = self.keys[index], self.kinds[index], self.table.formats[index]
        info = ParamInfo(keys, kinds, show_key_path(keys, kinds), self._directory)
        if form is None:
            return StoredLeaf(info, self.specs[index], self.table.details.get(index))

        return StoredLeaf(info, self.specs[index], StoredArray(form, prefix_of(info.name)))

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[StoredLeaf]:
        return map(self.__getitem__, range(len(self)))


MOST_LEVELS: Final = 256
"""How deep containers may be nested in a document. jax flattens trees by recursion, too."""


def show_key_path(keys: KeyPath, kinds: Sequence[KeyKind]) -> str:
    """Return the path as `jax.tree_util.keystr` prints it, as far as the medium tells: `['opt'][0]['mu']`.

    Attributes and dict keys are stored alike on the medium, so both are shown as dict keys.
    """
    return "".join(
        [
            f"[{key!r}]" if kind is KeyKind.MAPPING else f"[{key}]"
            for key, kind in zip(keys, kinds, strict=True)
        ]
    )


@final
class KeyPathBudget:
    """Limits how many leaves a document has, and the length of their key paths together.

    Each path repeats the keys above it, and each leaf takes some hundred bytes besides, but perhaps no more
    than one byte in the document. A small document could otherwise take gigabytes.

    Args:
        path: Of the document, for the error.
    """

    MOST_CHARACTERS: Final = 256 * 1024 * 1024
    LEAF_CHARACTERS: Final = 128  #: counted for each leaf, besides those of its keys

    __slots__ = ("_left", "_path")

    def __init__(self, path: str) -> None:
        self._path = path
        self._left = self.MOST_CHARACTERS

    def spend(self, keys: KeyPath) -> None:
        """Count the key path of one more leaf.

        Raises:
            UnsupportedFormatError: If all of them together are too long.
        """
        self._left -= self.LEAF_CHARACTERS + sum(map(len, keys))
        if self._left < 0:
            raise UnsupportedFormatError(
                self._path, f"its leaves and key paths take more than {self.MOST_CHARACTERS} characters"
            )


def check_tree(path: str, names: Sequence[ParamInfo], split: Sequence[ParamInfo], separator: str) -> None:
    """Refuse two equal key paths, and a key path that is a prefix of another.

    Args:
        path: Of the checkpoint, for the error.
        names: The leaves under their names.
        split: The same leaves, in the same order, at their key paths.
        separator: For the error.

    Raises:
        SpecError: Naming both.
    """
    owners: dict[KeyPath, str] = {}
    for flat, info in zip(names, split, strict=True):
        first = owners.setdefault(info.keys, flat.name)
        if first != flat.name:
            raise _collision(path, first, flat.name, separator)

    for flat, info in zip(names, split, strict=True):
        for depth in range(len(info.keys)):
            shorter = owners.get(info.keys[:depth])
            if shorter is not None:
                raise _collision(path, shorter, flat.name, separator)


def _collision(path: str, first: str, second: str, separator: str) -> SpecError:
    return SpecError(
        f"{path}: {first!r} and {second!r} cannot both stand in one tree when names are split at "
        f"{separator!r}; read it flat, without split"
    )
