"""Describes the items of a checkpoint and their leaves, and compares two trees, without reading an array."""

from __future__ import annotations

__all__ = ("ItemFacts", "LeafFacts", "Pair", "TreeComparison", "compare_trees", "open_item", "read_items")

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from penstock.handlers.formats.orbax.discovery import contents_of
from penstock.handlers.formats.orbax.open_checkpoint import open_checkpoint
from penstock.handlers.formats.safetensors.tensor_paths import is_safetensors
from penstock.handlers.stores.publishing.reading import Reading, read_unchanged
from penstock.kernel.protocols.layouts import StorageDetails, StoredCheckpoint
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafSpec, StoredLeaf
from penstock.kernel.protocols.stores import Store

if TYPE_CHECKING:
    from penstock.kernel.concurrency.threads import Threads


@final
@dataclass(frozen=True, slots=True)
class LeafFacts:
    """One leaf."""

    key_path: str  #: as it is pasted into `only=`: `['opt'][0]['mu']`
    name: str  #: the same, keys joined by dots
    keys: KeyPath
    kinds: tuple[KeyKind, ...]
    kind: str  #: the recorded type: `jax.Array`, `np.ndarray`, `scalar`, `string`, ...
    shape: tuple[int, ...] | None  #: None if it is not an array
    dtype: str
    nbytes: int  #: uncompressed
    stored_nbytes: int  #: of its chunks as they are stored
    codec: str | None
    chunk_shape: tuple[int, ...]
    sharding: Mapping[str, Any] | None
    random_key_impl: str | None

    @property
    def holds_value(self) -> bool:
        """True for an array, a number and a text; an empty list has no value."""
        return self.shape is not None or self.kind == "string"


@final
@dataclass(frozen=True, slots=True)
class ItemFacts:
    """One item of a checkpoint, or a checkpoint that is one tree."""

    name: str  #: empty if it is all of the checkpoint
    path: str  #: of the checkpoint
    leaves: Sequence[LeafFacts] = field(repr=False)
    custom_metadata: Mapping[str, Any] | None = None  #: the caller's, of the checkpoint
    tree_custom_metadata: object = None  #: the caller's, of the tree
    committed_at_ns: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, uncompressed."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def stored_nbytes(self) -> int:
        """Bytes of all arrays as they are stored."""
        return sum(leaf.stored_nbytes for leaf in self.leaves)


async def read_items(store: Store, threads: Threads, path: str, item: str | None = None) -> list[ItemFacts]:
    """Describe the items of the checkpoint at `path`, or one of them, all of one state of it.

    Raises:
        ReplacedError: If it was replaced again and again while it was read.
        PenstockError: If there is none, or a document is damaged.
    """

    async def read(_: Reading) -> list[ItemFacts]:
        return await threads.run(_read_items, store, path, item)

    return await read_unchanged(store, threads, path, read)


def _read_items(store: Store, path: str, item: str | None) -> list[ItemFacts]:
    if item is not None or is_safetensors(store, path):
        return [_opened(store, path, item)]

    items = contents_of(store, path).items
    return [_opened(store, path, name) for name in items] if items else [_opened(store, path, None)]


def _opened(store: Store, path: str, item: str | None) -> ItemFacts:
    opened = open_item(store, path, item)
    return ItemFacts(
        item or "",
        path,
        _leaves(opened),
        opened.custom_metadata,
        opened.tree_custom_metadata,
        opened.committed_at_ns,
    )


def open_item(store: Store, path: str, item: str | None) -> StoredCheckpoint:
    """Open a checkpoint as a layout does, without the modules of one that are for saves."""
    if not is_safetensors(store, path):
        return open_checkpoint(store, path, item)

    # Here, because most checkpoints are not.
    from penstock.handlers.formats.safetensors import safetensors_checkpoint

    return safetensors_checkpoint.open_checkpoint(store, path, item)


def _leaves(opened: StoredCheckpoint) -> list[LeafFacts]:
    details = opened if isinstance(opened, StorageDetails) else None
    return [_leaf(leaf, details, at) for at, leaf in enumerate(opened.leaves)]


def _leaf(leaf: StoredLeaf, details: StorageDetails | None, at: int) -> LeafFacts:
    spec: LeafSpec = leaf.spec
    return LeafFacts(
        leaf.info.key_path,
        leaf.info.name,
        leaf.info.keys,
        leaf.info.kinds,
        spec.typestr,
        spec.shape,
        spec.dtype,
        spec.nbytes,
        spec.nbytes if details is None else details.stored_nbytes(at),
        None if details is None else details.codec(at),
        spec.chunk_shape,
        json.loads(spec.sharding) if spec.sharding else None,
        spec.extended_dtype,
    )


@final
@dataclass(frozen=True, slots=True)
class Pair:
    """A leaf that both have, under one name."""

    first: LeafFacts
    second: LeafFacts

    @property
    def is_alike(self) -> bool:
        """True if their values can be compared. A number may be stored as an array of no axes."""
        return (self.first.shape, self.first.dtype) == (self.second.shape, self.second.dtype)


@final
@dataclass(frozen=True, slots=True)
class TreeComparison:
    """The leaves of two trees."""

    only_first: Sequence[LeafFacts]
    only_second: Sequence[LeafFacts]
    changed: Sequence[Pair]  #: of another shape or dtype
    alike: Sequence[Pair]


def compare_trees(first: Sequence[LeafFacts], second: Sequence[LeafFacts]) -> TreeComparison:
    """Compare two trees by dotted names, so that a converted checkpoint has the leaves of its source."""
    theirs = {leaf.name: leaf for leaf in second}
    pairs = [Pair(leaf, theirs[leaf.name]) for leaf in first if leaf.name in theirs]
    shared = {pair.first.name for pair in pairs}
    return TreeComparison(
        [leaf for leaf in first if leaf.name not in shared],
        [leaf for leaf in second if leaf.name not in shared],
        [pair for pair in pairs if not pair.is_alike],
        [pair for pair in pairs if pair.is_alike],
    )
