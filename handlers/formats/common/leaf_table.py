"""The leaves of a checkpoint in columns. The object for a leaf is created on access."""

from __future__ import annotations

__all__ = ("LeafTable", "StoredArray", "StoredLeaves")

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import final, overload

import numpy as np
import numpy.typing as npt

from penstock.handlers.formats.common.chunk_keys import prefix_of
from penstock.handlers.formats.common.key_paths import show_key_path
from penstock.handlers.formats.common.zarr_metadata import ArrayFormat
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafSpec, ParamInfo, StoredLeaf


@final
@dataclass(frozen=True, slots=True)
class StoredArray:
    """What Orbax's layout keeps in `StoredLeaf.detail` of a leaf with array bytes."""

    format: ArrayFormat
    prefix: str  #: of the array's keys in the index: the stored name and a slash, or nothing


@final
@dataclass(frozen=True, eq=False)
class LeafTable:
    """What is stored of every leaf, in columns. Checkpoints of one tree share it. Immutable."""

    keys: Sequence[KeyPath]
    kinds: Sequence[tuple[KeyKind, ...]]
    specs: Sequence[LeafSpec]
    formats: Sequence[ArrayFormat | None]  #: None for leaves without array bytes and for those in `details`
    rows: Mapping[bytes, int]  #: of the keys in the index
    details: Mapping[int, object] = field(default_factory=dict[int, object])
    """`StoredLeaf.detail`, by number, of the few leaves whose bytes lie outside zarr arrays."""

    @cached_property
    def only_chunks(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For each leaf, the row of its only chunk and its bytes; -1 unless it has exactly one raw chunk."""
        get = self.rows.get
        suffixes = {id(form): _suffix(form) for form in {id(form): form for form in self.formats}.values()}
        sizes = {id(spec): spec.nbytes or -1 for spec in {id(spec): spec for spec in self.specs}.values()}
        rows: list[int] = []
        for path, form in zip(self.keys, self.formats, strict=True):
            suffix = suffixes[id(form)]
            key = "" if suffix is None else prefix_of(".".join(path)) + suffix
            rows.append(get(key.encode(), -1) if key else -1)

        return np.array(rows, np.int64), np.array([sizes[id(spec)] for spec in self.specs], np.int64)


def _suffix(form: ArrayFormat | None) -> str | None:
    """Return the end of the key of an array's only chunk; None if there are several, or it has a codec."""
    if form is None or not form.plain or form.shape != form.chunk_shape:
        return None

    return form.chunk_key((0,) * len(form.shape))


@final
@dataclass(frozen=True, slots=True, eq=False)
class StoredLeaves(Sequence[StoredLeaf]):
    """Every leaf and empty marker, in stored order. Immutable: specs and formats are shared by many."""

    directory: str
    table: LeafTable

    @classmethod
    def of(cls, directory: str, leaves: Iterable[StoredLeaf]) -> StoredLeaves:
        """Build the columns from existing leaves."""
        known = tuple(leaves)
        table = LeafTable(
            keys=[leaf.info.keys for leaf in known],
            kinds=[leaf.info.kinds for leaf in known],
            specs=[leaf.spec for leaf in known],
            formats=[None] * len(known),
            rows={},
            details={at: leaf.detail for at, leaf in enumerate(known)},
        )
        return cls(directory, table)

    @property
    def keys(self) -> Sequence[KeyPath]:
        return self.table.keys

    @property
    def kinds(self) -> Sequence[tuple[KeyKind, ...]]:
        return self.table.kinds

    @property
    def specs(self) -> Sequence[LeafSpec]:
        return self.table.specs

    @overload
    def __getitem__(self, index: int, /) -> StoredLeaf: ...
    @overload
    def __getitem__(self, index: slice, /) -> tuple[StoredLeaf, ...]: ...
    def __getitem__(self, index: int | slice, /) -> StoredLeaf | tuple[StoredLeaf, ...]:
        if isinstance(index, slice):
            return tuple([self._leaf(at) for at in range(len(self))[index]])

        return self._leaf(index)

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[StoredLeaf]:
        return map(self._leaf, range(len(self)))

    def info(self, at: int) -> ParamInfo:
        """Where one leaf stands."""
        keys, kinds = self.keys[at], self.kinds[at]
        return ParamInfo(keys, kinds, show_key_path(keys, kinds), self.directory)

    def _leaf(self, at: int) -> StoredLeaf:
        info, form = self.info(at), self.table.formats[at]
        if form is None:
            return StoredLeaf(info, self.specs[at], self.table.details.get(at))

        return StoredLeaf(info, self.specs[at], StoredArray(form, prefix_of(info.name)))
