"""A checkpoint's structure, shapes, dtypes and metadata, read without any array data."""

from __future__ import annotations

__all__ = ("CheckpointMetadata", "LeafMetadata", "describe_checkpoint")

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, final

from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.protocols.layouts import LeafColumns, StorageDetails, StoredCheckpoint, ZarrDetails
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.words import counted
from penstock.stages.locate import open_leased
from penstock.stages.pytree.flattening import nest_columns


@final
@dataclass(frozen=True, slots=True)
class _Stored:
    """State shared by all `LeafMetadata` of a checkpoint."""

    leaves: Sequence[StoredLeaf]
    specs: Sequence[LeafSpec]
    details: StorageDetails | None
    zarr: ZarrDetails | None

    @classmethod
    def of(cls, checkpoint: StoredCheckpoint) -> _Stored:
        leaves = checkpoint.leaves
        specs = leaves.specs if isinstance(leaves, LeafColumns) else [leaf.spec for leaf in leaves]
        details = checkpoint if isinstance(checkpoint, StorageDetails) else None
        return cls(leaves, specs, details, checkpoint if isinstance(checkpoint, ZarrDetails) else None)


@final
class LeafMetadata:
    """One leaf, described without reading it. Immutable; compared by value."""

    __slots__ = ("_at", "_stored")

    def __init__(self, stored: _Stored, at: int) -> None:
        self._stored = stored
        self._at = at

    @property
    def name(self) -> str:
        """The stored name, keys joined by dots."""
        return self._info.name

    @property
    def key_path(self) -> str:
        """For messages: `['opt'][0]['mu']`."""
        return self._info.key_path

    @property
    def kind(self) -> str:
        """The recorded type: `jax.Array`, `np.ndarray`, `scalar`, `string`, `None`, ..."""
        return self._spec.typestr

    @property
    def shape(self) -> tuple[int, ...] | None:
        """None if the leaf is not an array."""
        return self._spec.shape

    @property
    def dtype(self) -> str:
        """Its name; empty if the leaf is not an array."""
        return self._spec.dtype

    @property
    def nbytes(self) -> int:
        """Bytes, uncompressed; 0 if the leaf is not an array."""
        return self._spec.nbytes

    @property
    def stored_nbytes(self) -> int | None:
        """Bytes of its encoded chunks; 0 if the leaf is not an array, None if unknown."""
        details = self._stored.details
        return None if details is None else details.stored_nbytes(self._at)

    @property
    def codec(self) -> str | None:
        """The codec of its chunks, as in `zstd:3` or `blosc:lz4:5`; None if they are stored as they are."""
        details = self._stored.details
        return None if details is None else details.codec(self._at)

    @property
    def zarr_metadata(self) -> Mapping[str, Any] | None:
        """The `.zarray` or `zarr.json` of the array, as stored; None if it is not stored so. Not a copy."""
        zarr = self._stored.zarr
        return None if zarr is None else zarr.zarr_metadata(self._at)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        return self._spec.chunk_shape

    @property
    def write_shape(self) -> tuple[int, ...] | None:
        """For a jax.Array: the shape that one replica wrote, as recorded."""
        return self._spec.write_shape

    @property
    def sharding(self) -> Mapping[str, Any] | None:
        """As recorded, a fresh copy each time; its devices need not exist here."""
        text = self._spec.sharding
        found: Mapping[str, Any] | None = json.loads(text) if text else None
        return found

    @property
    def random_key_impl(self) -> str | None:
        """For a typed PRNG key: the name of its implementation."""
        return self._spec.extended_dtype

    @property
    def _spec(self) -> LeafSpec:
        return self._stored.specs[self._at]

    @property
    def _info(self) -> ParamInfo:
        return self._stored.leaves[self._at].info

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LeafMetadata):
            return NotImplemented

        return (self._spec, self.name, self.key_path) == (other._spec, other.name, other.key_path)

    def __hash__(self) -> int:
        return hash((self._spec, self.name))

    def __repr__(self) -> str:
        spec = self._spec
        return f"LeafMetadata({self.name!r}, {spec.typestr!r}, shape={spec.shape}, dtype={spec.dtype!r})"


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """The content of a checkpoint."""

    path: str  #: of the checkpoint: as asked for, or the latest step there
    tree: Any = field(
        repr=False
    )  #: as a restore without a target returns it, with a `LeafMetadata` for each leaf
    leaves: tuple[LeafMetadata, ...] = field(repr=False)  #: the same, in order
    custom_metadata: Mapping[str, Any] | None = None  #: the caller's metadata of the checkpoint or step
    committed_at_ns: int | None = None  #: wall clock, nanoseconds since the epoch
    tree_custom_metadata: Any = None  #: the caller's metadata that Orbax stores with the tree, any JSON
    root_custom_metadata: Mapping[str, Any] | None = (
        None  #: of the directory of steps, if `metadata` was asked of one
    )
    started_at_ns: int | None = None  #: when the save began, as `committed_at_ns`
    uses_zarr3: bool = False  #: whether arrays are in zarr version 3, as recorded

    def __repr__(self) -> str:
        leaves = counted(len(self.leaves), "leaf", "leaves")
        about = f"{self.path!r}: {leaves}, {counted(self.nbytes, 'byte')}"
        if self.committed_at_ns is not None:
            when = datetime.fromtimestamp(self.committed_at_ns / 1e9, UTC)
            about += f", committed {when.isoformat(timespec='seconds')}"
        if self.custom_metadata:
            about += f", custom_metadata={dict(self.custom_metadata)!r}"

        return f"<CheckpointMetadata {about}>"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, uncompressed."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def stored_nbytes(self) -> int | None:
        """Bytes of all encoded arrays; None if unknown for any of them."""
        found = [leaf.stored_nbytes for leaf in self.leaves]
        known = [nbytes for nbytes in found if nbytes is not None]
        return sum(known) if len(known) == len(found) else None


async def describe_checkpoint(run: RestoreRun, path: str, item: str | None = None) -> CheckpointMetadata:
    """Read only the documents of a checkpoint, within the budget of `run`.

    Raises:
        CorruptCheckpointError: If there is no checkpoint or it is damaged.
    """
    return await open_leased(run, path, item, _described)


def _described(checkpoint: StoredCheckpoint) -> CheckpointMetadata:
    found, leaves = _Stored.of(checkpoint), checkpoint.leaves
    if isinstance(leaves, LeafColumns):
        keys, kinds = leaves.keys, leaves.kinds
    else:
        keys, kinds = [leaf.info.keys for leaf in leaves], [leaf.info.kinds for leaf in leaves]

    described = tuple([LeafMetadata(found, at) for at in range(len(leaves))])
    return CheckpointMetadata(
        checkpoint.path,
        nest_columns(keys, kinds, described),
        described,
        checkpoint.custom_metadata,
        checkpoint.committed_at_ns,
        checkpoint.tree_custom_metadata,
        checkpoint.root_custom_metadata,
        found.details.started_at_ns if found.details is not None else None,
        found.zarr is not None and found.zarr.uses_zarr3,
    )
