"""What a checkpoint holds, without its bytes."""

from __future__ import annotations

__all__ = ("CheckpointMetadata", "LeafMetadata", "describe_checkpoint")

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.kernel.messages import StoredLeaf
from penstock.kernel.protocols import Layout, Store
from penstock.stages.trees import nest


@dataclass(frozen=True, slots=True)
class LeafMetadata:
    """What is known of one leaf without reading it."""

    name: str  #: the stored name, keys joined by dots
    key_path: str  #: for people: `['opt'][0]['mu']`
    kind: str  #: the recorded type: `jax.Array`, `np.ndarray`, `scalar`, `string`, `None`, ...
    shape: tuple[int, ...] | None = None  #: None if it is no array
    dtype: str = ""  #: by name; empty if it is no array
    nbytes: int = 0  #: uncompressed
    chunk_shape: tuple[int, ...] = ()
    sharding: Mapping[str, Any] | None = None  #: as recorded; its devices need not be here
    random_key_impl: str | None = None  #: of a typed PRNG key


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """What a checkpoint holds."""

    path: str  #: of the checkpoint: as asked for, or the latest step there
    tree: Any = field(
        repr=False
    )  #: as a restore without a target gives it, with a `LeafMetadata` for each leaf
    leaves: tuple[LeafMetadata, ...] = field(repr=False)  #: the same, in order
    custom_metadata: Mapping[str, Any] | None = None  #: the caller's own, of the checkpoint or step
    committed_at_ns: int | None = None  #: wall clock, nanoseconds since the epoch
    tree_custom_metadata: Any = None  #: the caller's own that Orbax keeps with the tree, any JSON
    root_custom_metadata: Mapping[str, Any] | None = (
        None  #: of the directory of steps, if `metadata` was asked of one
    )

    @property
    def nbytes(self) -> int:
        """Array bytes in all, uncompressed."""
        return sum(leaf.nbytes for leaf in self.leaves)


def describe_checkpoint(
    layout: Layout, store: Store, path: str, item: str | None = None
) -> CheckpointMetadata:
    """Read the documents of a checkpoint, and nothing else. Blocking.

    Raises:
        CorruptCheckpointError: If there is no checkpoint, or a damaged one.
    """
    checkpoint = layout.open(store, path, item)
    leaves = tuple(_describe(stored) for stored in checkpoint.leaves)
    return CheckpointMetadata(
        checkpoint.path,
        nest([stored.info for stored in checkpoint.leaves], leaves),
        leaves,
        checkpoint.custom_metadata,
        checkpoint.committed_at_ns,
        checkpoint.tree_custom_metadata,
        checkpoint.root_custom_metadata,
    )


def _describe(stored: StoredLeaf) -> LeafMetadata:
    spec = stored.spec
    return LeafMetadata(
        stored.info.name,
        stored.info.key_path,
        spec.typestr,
        spec.shape,
        spec.dtype,
        spec.nbytes,
        spec.chunk_shape,
        json.loads(spec.sharding) if spec.sharding else None,
        spec.random_key_impl,
    )
