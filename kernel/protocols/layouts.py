"""What only some layouts, handlers and checkpoints can do: small protocols, looked for where it matters."""

from __future__ import annotations

__all__ = (
    "ArrangedLayout",
    "Arrangement",
    "FormattedLayout",
    "ItemLayout",
    "ItemsLayout",
    "Layout",
    "Place",
)

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from penstock.kernel.config.save_format import SaveArgs, SaveFormat
from penstock.kernel.protocols.checkpoints import (
    StoredCheckpoint,
)
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.views import StagedLeaf, WrittenLeaves
from penstock.kernel.protocols.written import Document


class Layout(Protocol):
    """An on-disk format: names and documents, no array bytes. Every method is blocking or pure."""

    def temporary_name(self, path: str) -> str:
        """The name under which the checkpoint `path` is built before it is published."""
        ...

    def data_file(self) -> str:
        """A fresh name for a data file, relative to the checkpoint directory."""
        ...

    def check(self, leaves: Sequence[StagedLeaf]) -> None:
        """Refuse leaves that could not be stored beside each other, before anything is written.

        Raises:
            SpecError: If two have one stored name, or one has a name that cannot be stored.
        """
        ...

    def documents(
        self,
        leaves: Sequence[StagedLeaf],
        batches: Sequence[WrittenLeaves],
        *,
        started_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        digests: Mapping[str, bytes] | None = None,
    ) -> Iterable[Document]:
        """Make every document of a checkpoint, in the order in which they must become durable.

        Array bytes lie where `batches` say. The last document is the commit mark. The `digests`, by
        stored name, are kept with the checkpoint.
        """
        ...

    def recognises(self, store: Store, path: str) -> bool:
        """Whether the directory at `path` is of this layout, or empty: it may be overwritten then."""
        ...

    def open(self, store: Store, path: str, item: str | None = None) -> StoredCheckpoint:
        """Find the checkpoint at `path`, or the latest of several there, and read its documents.

        Args:
            store: Where it lies.
            path: Absolute.
            item: Which of its items is meant; by default the one that holds the tree.

        Raises:
            NotACheckpointError: If nothing of this layout lies there, or no such item.
            IncompleteCheckpointError: If a save was interrupted there.
            CorruptCheckpointError: If a document is damaged; the message names it.
        """
        ...


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

    def chunk_file(self, leaf: StagedLeaf, chunk: tuple[int, ...]) -> str | None:
        """The file in which a chunk must lie, alone, relative to the checkpoint directory.

        None for all chunks if they may lie in any data files, together.
        """
        ...


@runtime_checkable
class ItemLayout(Protocol):
    """What a `Layout` adds that can write a tree as an item of a checkpoint."""

    def item_documents(
        self,
        leaves: Sequence[StagedLeaf],
        batches: Sequence[WrittenLeaves],
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

    def folder(self, leaf: StagedLeaf) -> str:
        """The directory, relative to the checkpoint, from which the data files of a leaf are named."""
        ...

    def within(self, leaf: StagedLeaf) -> ParamInfo:
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


"""What an item is, as far as its value is not simply what is restored of it."""
