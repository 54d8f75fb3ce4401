"""A part of a checkpoint, chosen by the names of its leaves, as if it were all of it."""

from __future__ import annotations

__all__ = ("select_leaves",)

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, final, overload

from penstock.kernel.errors import SpecError
from penstock.kernel.messages.restore import Only
from penstock.kernel.protocols.checkpoints import LeafColumns, PackedCheckpoint, StoredCheckpoint
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafSpec, StoredLeaf
from penstock.kernel.protocols.reads import Destination, Read, WholeChunks
from penstock.kernel.protocols.written import Written


def select_leaves(checkpoint: StoredCheckpoint, only: Only) -> StoredCheckpoint:
    """Return the checkpoint with only those leaves that `only` says.

    Args:
        checkpoint: Any.
        only: A function from a key path to whether it is wanted; or shell patterns over dotted names,
            where a name stands for all below it, too.

    Raises:
        SpecError: If a pattern fits no leaf, or no leaf is wanted.
    """
    leaves = checkpoint.leaves
    keys = leaves.keys if isinstance(leaves, LeafColumns) else [leaf.info.keys for leaf in leaves]
    if callable(only):
        rows = [row for row, path in enumerate(keys) if only(path)]
    else:
        rows = _matching(checkpoint.path, keys, (only,) if isinstance(only, str) else tuple(only))
    if not rows:
        raise SpecError(f"only: nothing in {checkpoint.path} is wanted")

    return _Selected(checkpoint, _Leaves(leaves, rows))


def _matching(path: str, keys: Sequence[KeyPath], patterns: Sequence[str]) -> list[int]:
    unused = set(patterns)
    rows: list[int] = []
    for row, key_path in enumerate(keys):
        name = ".".join(key_path)
        fitting = [one for one in patterns if fnmatchcase(name, one) or fnmatchcase(name, f"{one}.*")]
        unused.difference_update(fitting)
        if fitting:
            rows.append(row)

    if unused:
        raise SpecError(f"only: nothing in {path} is called {min(unused)!r}")

    return rows


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Leaves(Sequence[StoredLeaf]):
    """Some of the leaves, in columns as far as the others are."""

    leaves: Sequence[StoredLeaf]
    rows: Sequence[int]

    @property
    def keys(self) -> Sequence[KeyPath]:
        leaves = self.leaves
        if isinstance(leaves, LeafColumns):
            return [leaves.keys[row] for row in self.rows]

        return [leaves[row].info.keys for row in self.rows]

    @property
    def kinds(self) -> Sequence[tuple[KeyKind, ...]]:
        leaves = self.leaves
        if isinstance(leaves, LeafColumns):
            return [leaves.kinds[row] for row in self.rows]

        return [leaves[row].info.kinds for row in self.rows]

    @property
    def specs(self) -> Sequence[LeafSpec]:
        leaves = self.leaves
        if isinstance(leaves, LeafColumns):
            return [leaves.specs[row] for row in self.rows]

        return [leaves[row].spec for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int, /) -> StoredLeaf: ...
    @overload
    def __getitem__(self, at: slice, /) -> tuple[StoredLeaf, ...]: ...
    def __getitem__(self, at: int | slice, /) -> StoredLeaf | tuple[StoredLeaf, ...]:
        if isinstance(at, slice):
            return tuple([self.leaves[row] for row in self.rows[at]])

        return self.leaves[self.rows[at]]

    def __iter__(self) -> Iterator[StoredLeaf]:
        return (self.leaves[row] for row in self.rows)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Selected:
    """A checkpoint that has fewer leaves."""

    whole: StoredCheckpoint
    leaves: _Leaves

    @property
    def path(self) -> str:
        return self.whole.path

    @property
    def directory(self) -> str:
        return self.whole.directory

    @property
    def custom_metadata(self) -> Mapping[str, Any] | None:
        return self.whole.custom_metadata

    @property
    def tree_custom_metadata(self) -> object:
        return self.whole.tree_custom_metadata

    @property
    def root_custom_metadata(self) -> Mapping[str, Any] | None:
        return self.whole.root_custom_metadata

    @property
    def committed_at_ns(self) -> int | None:
        return self.whole.committed_at_ns

    @property
    def digests(self) -> Mapping[str, bytes]:
        return self.whole.digests

    def parts(self, stored: StoredLeaf) -> Sequence[Written]:
        """Say where the bytes of a leaf lie; see `StoredCheckpoint.parts`."""
        return self.whole.parts(stored)

    def reads(self, index: int, stored: StoredLeaf, region: Destination, piece_bytes: int) -> Iterator[Read]:
        """Plan the reads that fill `region`; see `StoredCheckpoint.reads`."""
        return self.whole.reads(index, stored, region, piece_bytes)

    def whole_chunks(self, numbers: Sequence[int]) -> WholeChunks:
        """Say where leaves lie that are one raw chunk each; see `PackedCheckpoint.whole_chunks`."""
        if not isinstance(self.whole, PackedCheckpoint):
            return WholeChunks((), [-1] * len(numbers), [0] * len(numbers), [-1] * len(numbers))

        return self.whole.whole_chunks([self.leaves.rows[number] for number in numbers])
