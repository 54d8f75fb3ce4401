"""On-disk formats: `Layout`, its parts, and the `StoredCheckpoint` that it opens.

The parts of a layout are values, each None for a format that lacks it. A layout that is built on another one
hands on the parts of that one; it restates none of their methods.
"""

from __future__ import annotations

__all__ = (
    "ArrangedDigests",
    "ArrangedLayout",
    "Arrangement",
    "CheckpointFinder",
    "ChecksummedCheckpoint",
    "CutLeaves",
    "FilePosition",
    "FormattedLayout",
    "FoundItems",
    "ItemKind",
    "ItemsLayout",
    "Layout",
    "LeafColumns",
    "ListedItems",
    "NamedTensors",
    "Opening",
    "PackedCheckpoint",
    "StorageDetails",
    "StoredCheckpoint",
    "StoredSize",
    "WrittenRange",
    "ZarrDetails",
    "chunk_file_of",
)

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    final,
    runtime_checkable,
)

from penstock.kernel.protocols.capability import Capability

if TYPE_CHECKING:
    # What only opens a checkpoint waits for none of these.
    from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafSpec, ParamInfo, StoredLeaf
    from penstock.kernel.protocols.leaf_handlers import Leaf
    from penstock.kernel.protocols.reads import Destination, Read, WholeChunks
    from penstock.kernel.protocols.save_format import SaveArgs, SaveFormat
    from penstock.kernel.protocols.stores import Store
    from penstock.kernel.protocols.written import Document, Written, WrittenLeaves

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
class CutLeaves(Capability, Protocol):
    """A `StoredCheckpoint` some of whose leaves are made when they are read, and so have no chunks."""

    def is_cut_freely(self, stored: StoredLeaf) -> bool:
        """Return whether any box of a leaf can be read without more of it."""
        ...

    def block_shape(self, stored: StoredLeaf, most: int, far: int) -> tuple[int, ...] | None:
        """Return boxes that are made of stored elements next to each other; None if those in C order are.

        Args:
            stored: A leaf that is cut freely.
            most: Elements that a box may have.
            far: If fewer elements change their order together, None: they are read a few times instead.
        """
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


SMALL_DOCUMENT: Final = 2**20
"""Documents of at most so many bytes do not count against the memory budget."""


@final
@dataclass(frozen=True, slots=True)
class Opening:
    """A checkpoint that was found, and whose documents are still to be read."""

    nbytes: int  #: host bytes that reading and decoding them takes, about; 0 if all of them are small
    open: Callable[[], StoredCheckpoint]  #: blocking; raises as `Layout.find`, of the documents


class CheckpointFinder(Protocol):
    """Finds the checkpoints of one format or of several."""

    def find(self, store: Store, path: str, item: str | None = None) -> Opening:
        """Find the checkpoint at `path`, or the latest of several there. Blocking; reads no documents.

        Args:
            store: Where it is.
            path: Absolute.
            item: Which of its items is meant; by default the one that holds the tree.

        Raises:
            NotACheckpointError: If nothing of these formats is there, or no such item.
            IncompleteCheckpointError: If a save was interrupted there.
            CorruptCheckpointError: If a document is damaged; the message names it.
        """
        ...


class Layout(CheckpointFinder, Protocol):
    """An on-disk format: names and documents, no array bytes. Every method is blocking or pure."""

    @property
    def arrays(self) -> FormattedLayout | None:
        """The choice of how arrays are stored; None if there is none."""
        ...

    @property
    def places(self) -> ArrangedLayout | None:
        """The part that decides every place before anything is written; None if files just grow."""
        ...

    @property
    def folders(self) -> ItemsLayout | None:
        """The directories of the leaves; None if all are in that of the checkpoint."""
        ...

    def temporary_name(self, path: str) -> str:
        """The name under which the checkpoint `path` is built before it is published."""
        ...

    def data_file(self) -> str:
        """A fresh name for a data file, relative to the checkpoint directory."""
        ...

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Refuse leaves that cannot be stored together, before anything is written.

        Raises:
            SpecError: If two have one stored name, or one has a name that cannot be stored.
        """
        ...

    def documents(
        self,
        leaves: Sequence[Leaf],
        batches: Sequence[WrittenLeaves],
        *,
        started_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        digests: Mapping[str, bytes] | None = None,
        beside: Sequence[Document] = (),
    ) -> Iterable[Document]:
        """Make every document of a checkpoint, in the order in which they must become durable.

        Array bytes are where `batches` say. The last document is the commit mark. The `digests`, by stored
        name, are stored with the checkpoint. Documents `beside` its own were written already, named from the
        checkpoint; they are only recorded.

        Each may be made when it is asked for. The caller writes it and lets it go before the next:
        those of a million leaves are not in memory together.
        """
        ...

    def recognises(self, store: Store, path: str) -> bool:
        """True if the directory at `path` is of this layout or empty, and so may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class FilePosition:
    """The place where the bytes of a whole leaf begin."""

    file: str  #: relative to the checkpoint directory
    offset: int


@dataclass(frozen=True, slots=True)
class Arrangement:
    """All places in a checkpoint whose format needs them decided before anything is written."""

    heads: tuple[Document, ...]  #: what each data file begins with, of the final length
    #: Of each leaf, whole and in C order; None if it has no array bytes.
    places: tuple[FilePosition | None, ...]
    documents: tuple[Document, ...] = ()  #: what is next to the data files


class WrittenRange(NamedTuple):
    """A range of a file that was written, within one block of a leaf."""

    offset: int  #: bytes from the start of the file
    nbytes: int
    crc32c: int


class ArrangedDigests(Protocol):
    """Collects the checksums of what is written, for heads that have them. Thread-safe."""

    @property
    def block_bytes(self) -> int:
        """A leaf has a checksum for each so many bytes, from its own beginning."""
        ...

    def add(self, ranges: Mapping[str, Sequence[WrittenRange]]) -> None:
        """Add bytes written into a file, in any order; every byte once."""
        ...

    def head(self, file: str) -> bytes:
        """Return the head of a file that is written, of the length that the arrangement reserved."""
        ...

    def encoded(self) -> bytes:
        """Encode the checksums so far, for the process that writes the heads."""
        ...

    def join(self, encoded: bytes) -> None:
        """Take up what another process wrote, as that one `encoded` it.

        Raises:
            ValueError: If that was about another arrangement.
        """
        ...


@runtime_checkable
class ArrangedLayout(Capability, Protocol):
    """The part of a `Layout` whose files begin with a header that says where everything is."""

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

    def digests(self, arrangement: Arrangement, specs: Sequence[LeafSpec]) -> ArrangedDigests:
        """Return what collects the checksums of one save.

        Args:
            arrangement: Of that save.
            specs: Those that it was made of.
        """
        ...

    def file_of(self, path: str) -> str | None:
        """The one file of the arrangement that becomes `path`; None if `path` becomes a directory."""
        ...


@runtime_checkable
class FormattedLayout(Capability, Protocol):
    """The part of a `Layout` that stores arrays as options say, and that several processes can write."""

    @property
    def save_format(self) -> SaveFormat:
        """The format that was chosen."""
        ...

    def fit(self, spec: LeafSpec, info: ParamInfo, args: SaveArgs | None) -> LeafSpec:
        """Return the spec as stored: the handler's `spec` with chunks, dtype and codec chosen.

        Raises:
            InvalidLeafError: If the leaf cannot be stored as `args` ask for.
        """
        ...

    def encode(self, codec: str, chunks: Sequence[memoryview], itemsize: int) -> Sequence[bytes]:
        """Encode whole chunks, each by itself. Blocking.

        Args:
            codec: One that `fit` chose, never `auto`.
            chunks: Bytes; none of them empty.
            itemsize: Bytes of one element.
        """
        ...

    def chunk_file(self, name: str, chunk: tuple[int, ...]) -> str | None:
        """The file that a chunk of the leaf with this stored name must have to itself, in a tree's directory.

        None for all chunks if they may be in any data files, together.
        """
        ...

    def process_folder(self, process_index: int) -> str:
        """The folder for the data files of one process of several, relative to the directory of a tree."""
        ...


def chunk_file_of(layout: Layout, leaf: Leaf, chunk: tuple[int, ...]) -> str | None:
    """Return the file that a chunk must have to itself, relative to the checkpoint; None if none."""
    if layout.arrays is None:
        return None
    if layout.folders is None:
        return layout.arrays.chunk_file(leaf.info.name, chunk)

    file = layout.arrays.chunk_file(layout.folders.within(leaf).name, chunk)
    return None if file is None else f"{layout.folders.folder(leaf)}/{file}"


@runtime_checkable
class ItemsLayout(Capability, Protocol):
    """The part of a `Layout` whose leaves are in directories of their own, each with its data files."""

    @property
    def only_folder(self) -> str | None:
        """The directory, relative to the checkpoint, of all leaves; None if they are in several."""
        ...

    def folder(self, leaf: Leaf) -> str:
        """The directory, relative to the checkpoint, that a leaf's data file names are relative to."""
        ...

    def within(self, leaf: Leaf) -> ParamInfo:
        """Return a leaf's place within that directory. Its `key_path` stays whole, for messages."""
        ...

    def by_folder(self, named: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """Split values by stored name into directories, each by the names used there."""
        ...

    def from_folders(self, found: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        """Merge values by directory into one mapping by stored name; the reverse of `by_folder`."""
        ...

    def open_all(self, store: Store, path: str) -> StoredCheckpoint:
        """Open the items of the checkpoint `path` that this save writes, as one tree.

        Data files are named from `path`.

        Raises:
            CorruptCheckpointError: As `Layout.find` and what it found.
        """
        ...
