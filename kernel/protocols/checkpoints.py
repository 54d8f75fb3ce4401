"""A checkpoint whose documents have been read, as a layout offers it."""

from __future__ import annotations

__all__ = (
    "ChecksummedCheckpoint",
    "FoundItems",
    "ItemKind",
    "LeafColumns",
    "ListedItems",
    "NamedTensors",
    "PackedCheckpoint",
    "StorageDetails",
    "StoredCheckpoint",
    "StoredSize",
    "ZarrDetails",
)

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from penstock.kernel.protocols.capability import Capability
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
class ListedItems(Capability, Protocol):
    """A `Layout` that reads checkpoints of several items."""

    def items(self, store: Store, path: str) -> FoundItems:
        """Name the items of the checkpoint at `path`. Blocking.

        Raises:
            CorruptCheckpointError: What `Layout.open` raises.
            UnsupportedFormatError: If the checkpoint has none.
        """
        ...


@runtime_checkable
class StorageDetails(Capability, Protocol):
    """A `StoredCheckpoint` that knows how much room its leaves take on the medium."""

    @property
    def started_at_ns(self) -> int | None:
        """When the save began, nanoseconds since the epoch; None if that was not recorded."""
        ...

    def codec(self, number: int) -> str | None:
        """The codec of leaf `number` in `leaves`, such as `zstd:3`; None if it is not encoded."""
        ...

    def stored_nbytes(self, number: int) -> int:
        """Bytes that the encoded chunks of a leaf take. Reads none of them."""
        ...


@runtime_checkable
class StoredSize(Capability, Protocol):
    """A `StoredCheckpoint` that can compare its recorded sizes with the files."""

    def stored_bytes(self, store: Store) -> int:
        """Return the bytes that all its arrays take on the medium, without holes in files. Blocking."""
        ...


@runtime_checkable
class ZarrDetails(Capability, Protocol):
    """A `StoredCheckpoint` whose arrays are in a zarr format."""

    @property
    def uses_zarr3(self) -> bool:
        """True if they are in zarr version 3; otherwise in version 2."""
        ...

    def zarr_metadata(self, number: int) -> Mapping[str, Any] | None:
        """The `.zarray` or `zarr.json` of leaf `number` in `leaves`; None if it is no such array."""
        ...


@runtime_checkable
class NamedTensors(Capability, Protocol):
    """A `StoredCheckpoint` that has names but no structure: the reader says what tree they form."""

    def split(self, separator: str) -> StoredCheckpoint:
        """Return the same leaves as a tree, their names split at `separator`.

        Raises:
            SpecError: If one name is a prefix of another.
        """
        ...

    def following(self, wanted: Sequence[tuple[ParamInfo, Any]]) -> StoredCheckpoint:
        """Return the same leaves at the places where the target has their names.

        Args:
            wanted: The leaves of the target and its empty containers.
        """
        ...


@runtime_checkable
class PackedCheckpoint(Capability, Protocol):
    """A `StoredCheckpoint` that can locate many small leaves at once."""

    def whole_chunks(self, numbers: Sequence[int]) -> WholeChunks:
        """Return where leaves of one raw chunk each are.

        Args:
            numbers: Places in `leaves`.
        """
        ...


@runtime_checkable
class ChecksummedCheckpoint(Capability, Protocol):
    """A `StoredCheckpoint` that recorded checksums of its array bytes."""

    def without_checksums(self) -> StoredCheckpoint:
        """Return the same checkpoint, whose reads are as short as they can be and carry no checksums."""
        ...


@runtime_checkable
class LeafColumns(Capability, Protocol):
    """Leaves of a `StoredCheckpoint` that are also available in columns.

    Reading columns costs a fraction of creating an object for each leaf.
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
        """The directory that holds the tree: `path` or an item in it. Data file names are relative to it."""
        ...

    @property
    def leaves(self) -> Sequence[StoredLeaf]:
        """Every leaf and empty marker, in stored order."""
        ...

    @property
    def custom_metadata(self) -> Mapping[str, Any] | None:
        """The caller's metadata of the checkpoint or step."""
        ...

    @property
    def tree_custom_metadata(self) -> object:
        """The caller's metadata stored with the tree; None if there is none."""
        ...

    @property
    def root_custom_metadata(self) -> Mapping[str, Any] | None:
        """The caller's metadata of the directory of steps that was opened."""
        ...

    @property
    def committed_at_ns(self) -> int | None: ...
    @property
    def digests(self) -> Mapping[str, bytes]:
        """The digest of each leaf's bytes, by stored name, where one was recorded."""
        ...

    def parts(self, numbers: Sequence[int], leaves: Sequence[int]) -> Sequence[Sequence[Written]]:
        """Return where the bytes of some leaves are, as recorded when they were written.

        Args:
            numbers: Places in `leaves`, the leaves of this checkpoint.
            leaves: What to put into `Written.leaf`, for each of them.

        Returns:
            For each leaf parts that tile every chunk, as plain bytes with known checksums, in files named
            from `directory`; nothing if the leaf is in any other way. Chunks that another process has on a
            disk of its own are left out.

        Raises:
            CorruptCheckpointError: If a chunk is of another length than it must have, or is missing.
        """
        ...

    def reads(self, index: int, stored: StoredLeaf, region: Destination, piece_bytes: int) -> Iterator[Read]:
        """Plan the reads that fill `region`, each of at most about `piece_bytes`. Opens no file.

        Args:
            index: What to put into `Read.leaf`.
            stored: One of `leaves`.
            region: Where the bytes go.
            piece_bytes: Upper bound for one read, unless a codec makes a chunk indivisible.

        Raises:
            CorruptCheckpointError: If chunks that were recorded as written are missing.
        """
        ...
