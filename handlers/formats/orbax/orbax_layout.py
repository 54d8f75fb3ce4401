"""Orbax's layout: whole checkpoints, or trees in directories that their caller makes (`TreeDirectory`).

An `EncodedTree` encodes all that depends on the tree alone once; the layout keeps those of recent trees.
Documents are yielded in the order in which they must become durable.

Source:
    ORBAX_FORMAT.md §3.1 (flat layout) and §8 (what Orbax must find).
"""

from __future__ import annotations

__all__ = (
    "EncodedTree",
    "OrbaxLayout",
    "TreeDirectory",
    "check_names",
)

import copy
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from typing import Any, ClassVar, Final, cast, final

from penstock.handlers.formats import integrity
from penstock.handlers.formats.integrity import columns_of
from penstock.handlers.formats.orbax.checkpoint_documents import (
    Origin,
    content_of,
    encode_checkpoint_metadata,
    encode_mark,
)
from penstock.handlers.formats.orbax.chunk_index import ChunkIndex
from penstock.handlers.formats.orbax.discovery import list_items, locate
from penstock.handlers.formats.orbax.file_names import (
    ARRAY_METADATAS,
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    DATA_FOLDER,
    INTEGRITY,
    MANIFEST,
    MARKS,
    METADATA,
    OF_A_PROCESS,
    SHARDING,
    STRINGS,
)
from penstock.handlers.formats.orbax.open_checkpoint import OPENERS
from penstock.handlers.formats.orbax.storage_choice import CODED_CHUNK, fitted, split_among_replicas
from penstock.handlers.formats.orbax.stored_checkpoint import OrbaxCheckpoint
from penstock.handlers.formats.orbax.tree_columns import TreeColumns, check_directories
from penstock.handlers.formats.orbax.tree_documents import RememberedDocuments, Source, bytes_to_decode
from penstock.handlers.formats.orbax.tree_metadata import (
    encode_array_metadatas,
    encode_shardings,
    encode_strings,
    encode_tree_metadata,
)
from penstock.handlers.formats.zarr import METADATA_KEYS, array_metadata, chunk_key, prefix_of
from penstock.handlers.stores.publishing.paths import temporary_path
from penstock.kernel.codecs import codec_of
from penstock.kernel.concurrency.brief_steps import append
from penstock.kernel.errors import DuplicateNameError, SpecError
from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity
from penstock.kernel.protocols.layouts import FoundItems, Opening
from penstock.kernel.protocols.leaf import LeafInfos, LeafSpec, ParamInfo, names_of
from penstock.kernel.protocols.leaf_handlers import Leaf
from penstock.kernel.protocols.save_format import SaveArgs, SaveFormat
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Document, WrittenLeaves

_BYTES_OF_A_LEAF: Final = 512
_NO_ORIGIN: Final = Origin()


@final
class EncodedTree:
    """Everything in a tree's documents except where its bytes are.

    Args:
        tree: All leaves, empty markers among them, in flatten order.
        form: How they are stored.
        custom_metadata: JSON values that are kept with the tree itself.
        is_kept: Whether it is encoded once, for several checkpoints. If not, each document is made when it is
            asked for, so that those of a very large tree need not be in memory together.

    Raises:
        DuplicateNameError, InvalidLeafError: As `check_names`.
    """

    __slots__ = ("_custom_metadata", "_documents", "_form", "_index", "tree")

    def __init__(
        self,
        tree: TreeColumns,
        form: SaveFormat,
        custom_metadata: Mapping[str, Any] | None = None,
        *,
        is_kept: bool = False,
    ) -> None:
        check_names(tree)
        self.tree = tree
        self._form, self._custom_metadata = form, custom_metadata
        self._documents: Sequence[Document] | None = None  #: what is not the index, if both are kept
        self._index: ChunkIndex | None = None
        if is_kept:
            self._documents = list(_tree(tree, form, custom_metadata))
            self._index = self._made_index()

    def documents(
        self,
        batches: Sequence[WrittenLeaves],
        committed_ns: int,
        digests: Mapping[str, bytes],
        beside: Sequence[Document] = (),
        about: Document | None = None,
        origin: Origin = _NO_ORIGIN,
    ) -> Iterator[Document]:
        """Make the documents of the tree and the record of all of them, one after another.

        Args:
            batches: Where every piece of every array is.
            committed_ns: Now, in nanoseconds since the epoch.
            digests: Of leaves, by stored name.
            beside: Documents that were written already, for the record.
            about: What is said of the whole checkpoint, if the tree is one; it ends with the mark then, which
                has the digest of the record. None if it is an item, named from the item's directory.
            origin: Of which it is made; its documents and digests are kept.

        Raises:
            PenstockError: If the pieces of a chunk do not tile it: when the first document is asked for.
        """
        found: dict[str, integrity.Digest] = {}
        for made in self._own_documents(batches, committed_ns):
            document = origin.kept(made)
            del made
            found[document.path] = integrity.digest_of(document.data)
            yield document
            del document  # while the next one is made

        content: Mapping[str, object] | None = None
        if about is not None:
            about = origin.kept(about)
            found[about.path] = integrity.digest_of(about.data)
            content = content_of(about.path, about.data)
            yield about

        for document in beside:
            found[document.path] = integrity.digest_of(document.data)

        record = integrity.encode_files(
            columns_of(batches), digests or origin.digests.get("", {}), found, content
        )
        yield Document(INTEGRITY, record)
        if about is not None:
            yield Document(COMMIT_MARK, encode_mark(record, origin.mark))

    def _own_documents(self, batches: Sequence[WrittenLeaves], committed_ns: int) -> Iterator[Document]:
        index = self._made_index() if self._documents is None else self._index
        if index is not None:
            node_file = f"{DATA_FOLDER}/{uuid.uuid4().hex}"
            encoded = index.encode(
                batches, node_file=node_file, uuid=uuid.uuid4().bytes, commit_time_ns=committed_ns
            )
            del index  # of a large tree nothing else has it
            manifest = Document(MANIFEST, encoded.manifest)
            yield Document(node_file, encoded.nodes)
            del encoded
            yield manifest
            del manifest

        if self._documents is None:
            yield from _tree(self.tree, self._form, self._custom_metadata)
        else:
            yield from self._documents

    def _made_index(self) -> ChunkIndex | None:
        """Make the OCDBT index; there is none without arrays."""
        arrays = self.tree.arrays()
        return ChunkIndex(arrays, self._form.zarr) if len(arrays) and self._form.ocdbt else None


def _directories(arrays: TreeColumns, version: int) -> Iterator[Document]:
    """Encode the metadata of arrays that have a directory each."""
    key = METADATA_KEYS[version - 2]
    for name, spec in zip(names_of(arrays.infos), arrays.specs, strict=True):
        yield Document(prefix_of(name) + key, array_metadata(spec, version))


def _tree(
    tree: TreeColumns, form: SaveFormat, custom_metadata: Mapping[str, Any] | None
) -> Iterator[Document]:
    """Encode the documents about the leaves, except their places."""
    specs = tree.specs
    if not form.ocdbt:
        yield from _directories(tree.arrays(), form.zarr)

    yield _joined(METADATA, encode_tree_metadata(tree.infos, specs, form, custom_metadata))
    on_devices = [
        at for at, spec in enumerate(specs) if spec.typestr == "jax.Array" and spec.shape is not None
    ]
    names = names_of(tree.infos) if on_devices else []
    shardings = [specs[at].sharding for at in on_devices]
    known = [text for text in shardings if text is not None]
    if on_devices and len(known) == len(shardings):
        yield _joined(SHARDING, encode_shardings([names[at] for at in on_devices], known))

    recorded = [at for at in on_devices if specs[at].shapes_recorded]
    if recorded:
        found = encode_array_metadatas([names[at] for at in recorded], [specs[at] for at in recorded])
        yield _joined(f"{ARRAY_METADATAS}/process_0", found)

    texts = list(tree.texts())
    if texts:
        yield Document(STRINGS, encode_strings(texts))


def _joined(path: str, slices: Iterable[bytes]) -> Document:
    content = BytesIO()  # to join the slices would need all of them next to the whole
    for each in slices:
        append(content, each)

    return Document(path, content.getvalue())


def _is_as_described(form: SaveFormat) -> bool:
    """True if every leaf is stored as its handler describes it."""
    plain = SaveFormat(ocdbt=form.ocdbt, zarr=form.zarr, replica_parallel=form.replica_parallel)
    return form == plain and not form.replica_parallel


def check_names(tree: TreeColumns, form: SaveFormat | None = None, *, single: bool = False) -> None:
    """Refuse two values with one name, and strings that could not be found under their names.

    Empty markers are stored under no name.

    Raises:
        DuplicateNameError: If two leaves have one stored name.
        InvalidLeafError: If a string has a name under which Orbax could not find it, or an array one that
            its directory cannot have.
    """
    if not (isinstance(tree.infos, LeafInfos) and tree.infos.distinct):
        by_name: dict[str, ParamInfo] = {}
        for info, spec in zip(tree.infos, tree.specs, strict=True):
            if not spec.is_empty_marker:
                first = by_name.setdefault(info.name, info)
                if first is not info:
                    raise DuplicateNameError(info.name, first.key_path, info.key_path)

    encode_strings(tree.texts())
    if form is not None and not form.ocdbt:
        check_directories(tree.arrays(), form.zarr, single=single)


@final
@dataclass(frozen=True, slots=True)
class TreeDirectory:
    """Says that a tree is written in place, into a directory that its caller made, without a commit mark."""

    CUSTOM: ClassVar[str] = "custom_metadata"
    """The one member of the custom metadata of such a save; its value, any JSON, is kept with the tree."""

    single: bool = False  #: whether it is one array, under a name that is otherwise reserved by Orbax
    foreign: frozenset[str] = frozenset()
    """Types of leaves that a handler may keep in its own files."""


@final
class OrbaxLayout:
    """Writes checkpoints that any Orbax since 0.11 reads, and reads all that Orbax writes. Thread-safe.

    It writes the flat layout, with arrays as `form` says: by default OCDBT, zarr v2 and no codec. It reads
    all of these forms, whatever `form` says, and also items of a step, the latest step in a directory of
    steps, and the msgpack files of early Orbax.

    The encoded documents of recent trees, and the documents read last, are cached.

    Args:
        form: How arrays are written.
        coded_chunk: Bytes of a chunk with a codec, about, if `form` does not say it: such a chunk is
            held in memory as a whole, before and after encoding.
        plain_chunk: Bytes of any other chunk, about, if `form` does not say it; None: a shard is one chunk.
        tree_custom_metadata: Any JSON that is stored with the tree of each flat checkpoint, next to what is
            stored with the checkpoint.
        directory: Says that it writes no whole checkpoints, but trees in place.
        origin: Of which the checkpoints are made that it writes.
    """

    __slots__ = (
        "_as_described",
        "_coded_chunk",
        "_custom",
        "_plain_chunk",
        "_remembered",
        "_trees",
        "caches",
        "directory",
        "origin",
        "save_format",
    )

    def __init__(
        self,
        form: SaveFormat | None = None,
        coded_chunk: int = CODED_CHUNK,
        *,
        plain_chunk: int | None = None,
        tree_custom_metadata: Any = None,
        directory: TreeDirectory | None = None,
        origin: Origin = _NO_ORIGIN,
    ) -> None:
        if not isinstance(cast("object", form), SaveFormat | None):
            raise SpecError(f"form is a penstock.SaveFormat, not {form!r}")

        self.directory, self.origin = directory, origin
        self._custom = tree_custom_metadata
        self._coded_chunk, self._plain_chunk = coded_chunk, plain_chunk
        self.save_format = form = SaveFormat() if form is None else form  #: how arrays are written
        self._as_described = _is_as_described(form) and plain_chunk is None
        self._remembered = RememberedDocuments()
        self._trees: BoundedCache[ByIdentity, EncodedTree] = BoundedCache(2)  # of 10,000 leaves: 5 MB each
        self.caches: Sequence[BoundedCache[Any, Any]]  #: see `Caching`
        self.caches = (*self._remembered.caches, self._trees)

    def with_foreign(self, typestrs: frozenset[str]) -> OrbaxLayout:
        """Return this layout for trees in which a handler may keep leaves of these types in its own files."""
        other = copy.copy(self)
        other.directory = replace(self.directory or TreeDirectory(), foreign=typestrs)
        return other

    def with_codec(self, codec: str) -> OrbaxLayout:
        """Return this layout with another codec; both have their caches in common."""
        other = copy.copy(self)
        other.save_format = replace(self.save_format, codec=codec)
        other._as_described = _is_as_described(other.save_format) and self._plain_chunk is None
        return other

    @property
    def arrays(self) -> OrbaxLayout:
        """The layout itself."""
        return self

    @property
    def places(self) -> None:
        """None: files just grow."""

    @property
    def folders(self) -> None:
        """None: all leaves are in the directory of the tree."""

    def temporary_name(self, path: str) -> str:
        """The name of the same folder while it is being written; the path itself, if that is in place.

        Raises:
            PathError: If `path` itself is named like an interrupted save, which no reader would open.
        """
        return temporary_path(path) if self.directory is None else path

    def data_file(self) -> str:
        return f"{DATA_FOLDER}/{uuid.uuid4().hex}"

    def process_folder(self, process_index: int) -> str:
        """The folder that Orbax would give that process; with a directory for each array there is none."""
        return f"{OF_A_PROCESS}{process_index}" if self.save_format.ocdbt else ""

    def chunk_file(self, name: str, chunk: tuple[int, ...]) -> str | None:
        """Return the chunk's own file, if each array has a directory."""
        if self.save_format.ocdbt:
            return None

        return prefix_of(name) + chunk_key(chunk, self.save_format.zarr)

    def fit(self, spec: LeafSpec, info: ParamInfo, args: SaveArgs | None) -> LeafSpec:
        """Choose chunks, dtype and codec; see `fitted` for what it raises."""
        if self.directory is not None and not self.save_format.replica_parallel:
            spec = split_among_replicas(spec)
        if spec.shape is None or (args is None and self._as_described):
            return spec

        return fitted(spec, info.key_path, self.save_format, args, self._coded_chunk, self._plain_chunk)

    def encode(self, codec: str, chunks: Sequence[memoryview], itemsize: int) -> Sequence[bytes]:
        found = codec_of(codec)
        assert found is not None, "a stage encodes its own"
        return found.encode(chunks, itemsize)

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Check only the names; see `check_names` for the errors."""
        single = self.directory is not None and self.directory.single
        check_names(TreeColumns.of(leaves), self.save_format, single=single)

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
        """Make every document; see `EncodedTree` for what it raises.

        Raises:
            SpecError: If `custom_metadata` is not JSON.
        """
        committed_ns, digests = time.time_ns(), digests or {}
        if self.directory is not None:
            custom = None if custom_metadata is None else custom_metadata[TreeDirectory.CUSTOM]
            return self.tree(leaves, custom).documents(batches, committed_ns, digests, beside)

        encoded = encode_checkpoint_metadata(
            started_ns=started_ns, committed_ns=committed_ns, custom_metadata=custom_metadata
        )
        about = Document(CHECKPOINT_METADATA, encoded)
        tree = self.tree(leaves, self._custom)
        return tree.documents(batches, committed_ns, digests, beside, about, self.origin)

    def tree(self, leaves: Sequence[Leaf], custom_metadata: Any) -> EncodedTree:
        """Return the tree encoded; from the cache, unless it has metadata of its own."""
        columns = TreeColumns.of(leaves)
        if custom_metadata is not None:
            return EncodedTree(columns, self.save_format, custom_metadata)

        # By identity: a tree that is saved again has the very columns that it had.
        key, nbytes = ByIdentity(columns.infos, columns.specs), _BYTES_OF_A_LEAF * len(columns.specs)
        found = self._trees.get(key)
        if found is None:
            found = EncodedTree(columns, self.save_format, is_kept=self._trees.takes(nbytes))
            self._trees.put(key, found, nbytes)

        return found

    def recognises(self, store: Store, path: str) -> bool:
        """Return whether `path` is empty or holds a file that a checkpoint of some version has.

        A directory whose caller made it for one tree may always be written.
        """
        if self.directory is not None:
            return True

        names = set(store.list_directory(path))
        return not names or bool(names & MARKS)

    def items(self, store: Store, path: str) -> FoundItems:
        """Name the items of a checkpoint; see `list_items`."""
        return list_items(store, path)

    def find(self, store: Store, path: str, item: str | None = None) -> Opening:
        """Find a checkpoint or an item of it, and tell what its documents take.

        Raises:
            PenstockError: As `open_checkpoint`, for what can be seen without reading them.
        """
        place = locate(store, path, item)
        store.check_links(place.path, place.directory)
        foreign = frozenset[str]() if self.directory is None else self.directory.foreign
        source = Source(store, self._remembered, foreign=foreign)
        return Opening(bytes_to_decode(store, place), partial(OPENERS[place.kind], source, place))

    def open(self, store: Store, path: str, item: str | None = None) -> OrbaxCheckpoint:
        """Read the documents of a checkpoint or of an item of it; see `open_checkpoint`."""
        return cast("OrbaxCheckpoint", self.find(store, path, item).open())
