"""What a layout offers of a checkpoint whose documents have been read."""

from __future__ import annotations

__all__ = (
    "FoundItems",
    "ItemKind",
    "LeafColumns",
    "ListedItems",
    "NamedTensors",
    "PackedCheckpoint",
    "StorageDetails",
    "StoredCheckpoint",
    "ZarrDetails",
)

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.protocols.reads import Destination, Read, WholeChunks
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Written

ItemKind: TypeAlias = Literal["tree", "array"]


@dataclass(frozen=True, slots=True)
class FoundItems:
    """The items of one checkpoint."""

    path: str  #: of the checkpoint: as asked for, or the latest step there
    kinds: Mapping[str, ItemKind]  #: by name


@runtime_checkable
class ListedItems(Protocol):
    """What a `Layout` adds that reads checkpoints of several items."""

    def items(self, store: Store, path: str) -> FoundItems:
        """Name the items of the checkpoint at `path`. Blocking.

        Raises:
            CorruptCheckpointError: What `Layout.open` raises.
            UnsupportedFormatError: If the checkpoint has none.
        """
        ...


@runtime_checkable
class StorageDetails(Protocol):
    """What a `StoredCheckpoint` adds that knows what its leaves take on the medium."""

    @property
    def started_at_ns(self) -> int | None:
        """When the save began, nanoseconds since the epoch; None if that was not recorded."""
        ...

    def codec(self, number: int) -> str | None:
        """What the chunks of a leaf went through, as in `zstd:3`; None if nothing. `number`: in `leaves`."""
        ...

    def stored_nbytes(self, number: int) -> int:
        """Bytes that the chunks of a leaf take, encoded as they are. Reads none of them."""
        ...


@runtime_checkable
class ZarrDetails(Protocol):
    """What a `StoredCheckpoint` adds whose arrays are of zarr."""

    @property
    def uses_zarr3(self) -> bool:
        """Whether they are of version 3; else of 2."""
        ...


@runtime_checkable
class NamedTensors(Protocol):
    """What a `StoredCheckpoint` adds that has names and no structure: its reader says which tree they are."""

    def split(self, separator: str) -> StoredCheckpoint:
        """Return the same leaves as a tree, their names split at `separator`.

        Raises:
            SpecError: If one name is another's beginning.
        """
        ...

    def following(self, wanted: Sequence[tuple[ParamInfo, Any]]) -> StoredCheckpoint:
        """Return the same leaves at the places that a target has for their names.

        Args:
            wanted: The leaves of the target and its empty containers.
        """
        ...


@runtime_checkable
class PackedCheckpoint(Protocol):
    """What a `StoredCheckpoint` may add, so that many small leaves can be found at once."""

    def whole_chunks(self, numbers: Sequence[int]) -> WholeChunks:
        """Say where leaves lie that are one raw chunk each.

        Args:
            numbers: Places in `leaves`.
        """
        ...


@runtime_checkable
class LeafColumns(Protocol):
    """What the leaves of a `StoredCheckpoint` may offer beside being a sequence: the same in columns.

    Looking at columns costs a fraction of making an object for each leaf.
    """

    @property
    def keys(self) -> Sequence[KeyPath]: ...
    @property
    def kinds(self) -> Sequence[tuple[KeyKind, ...]]: ...
    @property
    def specs(self) -> Sequence[LeafSpec]: ...


class StoredCheckpoint(Protocol):
    """A checkpoint whose documents have been read."""

    @property
    def path(self) -> str: ...
    @property
    def directory(self) -> str:
        """What holds the tree: `path`, or an item in it. Data files are named from here."""
        ...

    @property
    def leaves(self) -> Sequence[StoredLeaf]:
        """Every leaf and empty marker, in stored order."""
        ...

    @property
    def custom_metadata(self) -> Mapping[str, Any] | None:
        """The caller's own, of the checkpoint or step."""
        ...

    @property
    def tree_custom_metadata(self) -> object:
        """The caller's own, kept with the tree; None if there is none."""
        ...

    @property
    def root_custom_metadata(self) -> Mapping[str, Any] | None:
        """The caller's own, of the directory of steps that was asked for."""
        ...

    @property
    def committed_at_ns(self) -> int | None: ...
    @property
    def digests(self) -> Mapping[str, bytes]:
        """The digest of each leaf's bytes, by stored name, as far as they were recorded."""
        ...

    def parts(self, stored: StoredLeaf) -> Sequence[Written]:
        """Say where the bytes of a leaf lie, as whoever wrote them said.

        Returns:
            Parts that tile every chunk, as plain bytes with known checksums, in files named from
            `directory` (their `leaf` is 0); nothing if the leaf lies in any other way.
        """
        ...

    def reads(self, index: int, stored: StoredLeaf, region: Destination, piece_bytes: int) -> Iterator[Read]:
        """Plan the reads that fill `region`, each of at most about `piece_bytes`. Opens nothing.

        Args:
            index: What to put into `Read.leaf`.
            stored: One of `leaves`.
            region: Where the bytes go.
            piece_bytes: Upper bound for one read, unless a codec makes a chunk indivisible.

        Raises:
            CorruptCheckpointError: If chunks that were recorded as written are missing.
        """
        ...
