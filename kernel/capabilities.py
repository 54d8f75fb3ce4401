"""What only some layouts, handlers and checkpoints can do: small protocols, looked for where it matters."""

from __future__ import annotations

__all__ = (
    "ArrangedLayout",
    "Arrangement",
    "ChunkingHandler",
    "FormattedLayout",
    "FoundItems",
    "ItemKind",
    "ItemLayout",
    "ItemsLayout",
    "ListedItems",
    "NamedTensors",
    "PartsHandler",
    "Place",
    "StorageDetails",
    "ZarrDetails",
)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from penstock.kernel.messages import (
    Document,
    Leaf,
    LeafSpec,
    ParamInfo,
    ReadLeaf,
    StoredLeaf,
    Target,
    WrittenBatch,
)
from penstock.kernel.protocols import Store, StoredCheckpoint
from penstock.kernel.save_format import SaveArgs, SaveFormat


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a whole leaf begin."""

    file: str  #: relative to the checkpoint directory
    offset: int


@dataclass(frozen=True, slots=True)
class Arrangement:
    """All places of a checkpoint whose format wants them decided before anything is written."""

    heads: tuple[Document, ...]  #: what each data file begins with
    places: tuple[Place | None, ...]  #: of each leaf, whole and in C order; None if it has no array bytes
    documents: tuple[Document, ...] = ()  #: what lies beside the data files


@runtime_checkable
class ArrangedLayout(Protocol):
    """What a `Layout` adds whose files begin with where everything lies in them."""

    def arrange(
        self,
        path: str,
        infos: Sequence[ParamInfo],
        specs: Sequence[LeafSpec],
        custom_metadata: Mapping[str, Any] | None,
    ) -> Arrangement:
        """Decide where each leaf of the checkpoint `path` goes. Pure.

        Raises:
            SpecError: If the format cannot hold them.
        """
        ...

    def file_of(self, path: str) -> str | None:
        """The file of the arrangement that alone becomes `path`; None if `path` becomes a directory."""
        ...


@runtime_checkable
class FormattedLayout(Protocol):
    """What a `Layout` adds that has a choice of how arrays are stored."""

    @property
    def save_format(self) -> SaveFormat:
        """What was chosen."""
        ...

    def fit(self, spec: LeafSpec, info: ParamInfo, args: SaveArgs | None) -> LeafSpec:
        """Say how a leaf is stored: `spec` as its handler described it, with chunks, dtype and codec chosen.

        Raises:
            InvalidLeafError: If the leaf cannot be stored as `args` ask for.
        """
        ...

    def encode(self, codec: str, chunks: Sequence[memoryview]) -> Sequence[bytes]:
        """Encode whole chunks, each by itself. Blocking. `codec` is one that `fit` chose, and not `auto`."""
        ...

    def chunk_file(self, leaf: Leaf, chunk: tuple[int, ...]) -> str | None:
        """The file in which a chunk must lie, alone, relative to the checkpoint directory.

        None for all chunks if they may lie in any data files, together.
        """
        ...


@runtime_checkable
class ItemLayout(Protocol):
    """What a `Layout` adds that can write a tree as an item of a checkpoint."""

    def item_documents(
        self,
        leaves: Sequence[Leaf],
        batches: Sequence[WrittenBatch],
        *,
        committed_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        digests: Mapping[str, bytes],
    ) -> Sequence[Document]:
        """Make the documents of the tree; all files are named from the item's directory."""
        ...


@runtime_checkable
class ItemsLayout(Protocol):
    """What a `Layout` adds whose leaves lie in directories below the checkpoint, each with data files."""

    @property
    def only_folder(self) -> str | None:
        """The directory, relative to the checkpoint, of all leaves; None if they lie in several."""
        ...

    def folder(self, leaf: Leaf) -> str:
        """The directory, relative to the checkpoint, from which the data files of a leaf are named."""
        ...

    def within(self, leaf: Leaf) -> ParamInfo:
        """Return a leaf's place in that directory: its keys there. For people it keeps its whole path."""
        ...

    def by_folder(self, named: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """Sort out what is known of leaves, by stored name, into directories and the names there."""
        ...

    def from_folders(self, found: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        """Put together what is known of leaves in directories; the reverse of `by_folder`."""
        ...

    def open_all(self, store: Store, path: str) -> StoredCheckpoint:
        """Open the items of the checkpoint `path` that would be written, as the one tree that would be saved.

        Data files are named from `path`.

        Raises:
            CorruptCheckpointError: As `Layout.open`.
        """
        ...


ItemKind: TypeAlias = Literal["tree", "array"]
"""What an item is, as far as its value is not simply what is restored of it."""


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
class ChunkingHandler(Protocol):
    """What a `LeafHandler` may add, so that its leaves may be cut, cast and encoded as was asked for."""

    @property
    def follows_spec(self) -> bool:
        """Whether `pieces` yields chunks of `leaf.spec.chunk_shape` in `leaf.spec.dtype`, whatever they are.

        The chunk shape divides the one that `describe` gave. A piece is a whole chunk if `piece_bytes`
        allows it.
        """
        ...


@runtime_checkable
class PartsHandler(Protocol):
    """What a `LeafHandler` may add, so that a leaf larger than the memory budget is restored in parts.

    What its value becomes out of lies in the parts' `Target.detail`: the handler itself holds no state.
    """

    def parts(
        self, stored: StoredLeaf, target: Target, part_bytes: int, *, whole_chunks: bool
    ) -> Sequence[Target]:
        """Cut what `target` decided into parts that are filled, and put in their places, one by one.

        Allocates nothing.

        Args:
            stored: The leaf on disk.
            target: What the handler's own `target` returned for it.
            part_bytes: Upper bound for the regions of a part, unless that is less than an element or,
                with `whole_chunks`, a row of chunks.
            whole_chunks: Cut only where the stored chunks end, for each is decoded as a whole.

        Returns:
            Targets whose regions together hold what those of `target` would, and whose `staging_bytes`
            are those of their own regions. Nothing if it cannot be cut.
        """
        ...

    def place(self, part: ReadLeaf) -> None:
        """Put what the filled regions of a part hold in its place. Blocking; their memory is let go of.

        Called once for each part, in any order, perhaps by several threads at once.
        """
        ...

    def join(self, part: ReadLeaf) -> Any:
        """Return the value. Called once, with any of the parts, when every one is in its place."""
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
