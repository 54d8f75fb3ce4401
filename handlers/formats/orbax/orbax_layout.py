"""Orbax's layout: a whole checkpoint (`OrbaxLayout`), or a tree in a directory that its caller makes."""

from __future__ import annotations

__all__ = ("OrbaxLayout", "TreeLayout")

import copy
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

from penstock.handlers.formats.orbax.discovery import list_items
from penstock.handlers.formats.orbax.encoded_tree import EncodedTree, EncodedTrees, check_names
from penstock.handlers.formats.orbax.file_names import DATA_FOLDER, MARKS, OF_A_PROCESS, temporary_path
from penstock.handlers.formats.orbax.open_checkpoint import find_checkpoint, open_checkpoint
from penstock.handlers.formats.orbax.storage_choice import CODED_CHUNK, fitted, split_among_replicas
from penstock.handlers.formats.orbax.stored_checkpoint import OrbaxCheckpoint
from penstock.handlers.formats.orbax.tree_columns import TreeColumns
from penstock.handlers.formats.orbax.tree_documents import RememberedDocuments
from penstock.handlers.formats.zarr import chunk_key, prefix_of
from penstock.kernel.codecs import codec_of
from penstock.kernel.config.save_format import SaveArgs, SaveFormat
from penstock.kernel.memory.bounded_cache import BoundedCache
from penstock.kernel.protocols.checkpoints import FoundItems
from penstock.kernel.protocols.layouts import Opening
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.views import StagedLeaf, WrittenLeaves
from penstock.kernel.protocols.written import Document


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
        tree_custom_metadata: Any JSON that is stored with the tree of each flat checkpoint, beside what is
            stored with the checkpoint.
    """

    __slots__ = ("_as_described", "_coded_chunk", "_custom", "_form", "_plain_chunk", "_remembered", "_trees")

    def __init__(
        self,
        form: SaveFormat | None = None,
        coded_chunk: int = CODED_CHUNK,
        *,
        plain_chunk: int | None = None,
        tree_custom_metadata: Any = None,
    ) -> None:
        self._custom = tree_custom_metadata
        self._coded_chunk, self._plain_chunk = coded_chunk, plain_chunk
        self._form = form = SaveFormat() if form is None else form
        plain = SaveFormat(ocdbt=form.ocdbt, zarr=form.zarr, replica_parallel=form.replica_parallel)
        self._as_described = form == plain and not form.replica_parallel and plain_chunk is None
        self._remembered = RememberedDocuments()
        self._trees = EncodedTrees(form=form)

    @property
    def caches(self) -> Sequence[BoundedCache[Any, Any]]:
        """See `Caching`."""
        return (*self._remembered.caches, *self._trees.caches)

    def temporary_name(self, path: str) -> str:
        """The name of the same folder while it is being written.

        Raises:
            PathError: If `path` itself is named like an interrupted save, which no reader would open.
        """
        return temporary_path(path)

    def data_file(self) -> str:
        return f"{DATA_FOLDER}/{uuid.uuid4().hex}"

    def process_folder(self, process_index: int) -> str:
        """The folder that Orbax would give that process; with a directory for each array there is none."""
        return f"{OF_A_PROCESS}{process_index}" if self._form.ocdbt else ""

    @property
    def save_format(self) -> SaveFormat:
        """The options by which arrays are written."""
        return self._form

    def chunk_file(self, leaf: StagedLeaf, chunk: tuple[int, ...]) -> str | None:
        """Return the chunk's own file, if each array has a directory."""
        if self._form.ocdbt:
            return None

        return prefix_of(leaf.info.name) + chunk_key(chunk, self._form.zarr)

    def fit(self, spec: LeafSpec, info: ParamInfo, args: SaveArgs | None) -> LeafSpec:
        """Choose chunks, dtype and codec; see `fitted` for what it raises."""
        if spec.shape is None or (args is None and self._as_described):
            return spec

        return fitted(spec, info.key_path, self._form, args, self._coded_chunk, self._plain_chunk)

    def encode(self, codec: str, chunks: Sequence[memoryview], itemsize: int) -> Sequence[bytes]:
        found = codec_of(codec)
        assert found is not None, "a stage encodes its own"
        return found.encode(chunks, itemsize)

    def check(self, leaves: Sequence[StagedLeaf]) -> None:
        """Check only the names; see `check_names` for the errors."""
        check_names(TreeColumns.of(leaves), self._form)

    def documents(
        self,
        leaves: Sequence[StagedLeaf],
        batches: Sequence[WrittenLeaves],
        *,
        started_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        digests: Mapping[str, bytes] | None = None,
        beside: Sequence[Document] = (),
    ) -> Iterable[Document]:
        """Make every document; see `EncodedTree` for what it raises."""
        columns = TreeColumns.of(leaves)
        if self._custom is None:
            tree = self._trees.of(columns)
        else:
            tree = EncodedTree(columns, self._form, self._custom)

        return tree.documents(
            batches,
            started_ns=started_ns,
            custom_metadata=custom_metadata,
            digests=digests or {},
            beside=beside,
        )

    def item_documents(
        self,
        leaves: Sequence[StagedLeaf],
        batches: Sequence[WrittenLeaves],
        *,
        committed_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        digests: Mapping[str, bytes],
    ) -> Iterable[Document]:
        """Make the documents of the tree as an item of a checkpoint; see `EncodedTree` for what it raises."""
        columns = TreeColumns.of(leaves)
        if custom_metadata is None:
            tree = self._trees.of(columns)
        else:
            tree = EncodedTree(columns, self._form, custom_metadata)

        return tree.item_documents(batches, committed_ns, digests)

    def recognises(self, store: Store, path: str) -> bool:
        """Return whether `path` is empty or holds a file that a checkpoint of some version has."""
        names = set(store.list_directory(path))
        return not names or bool(names & MARKS)

    def items(self, store: Store, path: str) -> FoundItems:
        """Name the items of a checkpoint; see `list_items`."""
        return list_items(store, path)

    def find(
        self, store: Store, path: str, item: str | None = None, *, foreign: frozenset[str] = frozenset()
    ) -> Opening:
        """Find a checkpoint or an item of it; see `find_checkpoint`."""
        return find_checkpoint(store, path, item, self._remembered, foreign)

    def open(
        self, store: Store, path: str, item: str | None = None, *, foreign: frozenset[str] = frozenset()
    ) -> OrbaxCheckpoint:
        """Read the documents of a checkpoint or of an item of it; see `open_checkpoint`."""
        return open_checkpoint(store, path, item, remembered=self._remembered, foreign=foreign)


CUSTOM: Final = "custom_metadata"
"""The one member of the custom metadata of a save; its value, any JSON, is kept with the tree."""


@final
class TreeLayout:
    """Writes a tree into a directory that exists, without a commit mark. Thread-safe.

    Args:
        form: How arrays are written.
        coded_chunk: Bytes of a chunk with a codec, about.
        single: Whether the tree is one array, under a name that is otherwise reserved by Orbax.
    """

    __slots__ = ("_foreign", "_form", "_layout", "_single", "_trees")

    def __init__(
        self, form: SaveFormat | None = None, coded_chunk: int = CODED_CHUNK, *, single: bool = False
    ) -> None:
        self._form = SaveFormat() if form is None else form
        self._layout = OrbaxLayout(self._form, coded_chunk)
        self._trees = EncodedTrees(form=self._form)
        self._single = single
        self._foreign = frozenset[str]()

    def with_foreign(self, typestrs: frozenset[str]) -> TreeLayout:
        """Return this layout for trees in which a handler may keep leaves of these types in its own files."""
        other = copy.copy(self)
        other._foreign = typestrs
        return other

    def temporary_name(self, path: str) -> str:
        """The path itself: the tree is built in place."""
        return path

    def data_file(self) -> str:
        return self._layout.data_file()

    def process_folder(self, process_index: int) -> str:
        """See `OrbaxLayout.process_folder`."""
        return self._layout.process_folder(process_index)

    @property
    def single(self) -> bool:
        """True if the tree is one array."""
        return self._single

    @property
    def save_format(self) -> SaveFormat:
        """The options by which arrays are written."""
        return self._form

    def chunk_file(self, leaf: StagedLeaf, chunk: tuple[int, ...]) -> str | None:
        return self._layout.chunk_file(leaf, chunk)

    def fit(self, spec: LeafSpec, info: ParamInfo, args: SaveArgs | None) -> LeafSpec:
        if not self._form.replica_parallel:  # then the inner layout gives each replica its part
            spec = split_among_replicas(spec)

        return self._layout.fit(spec, info, args)

    def encode(self, codec: str, chunks: Sequence[memoryview], itemsize: int) -> Sequence[bytes]:
        return self._layout.encode(codec, chunks, itemsize)

    def check(self, leaves: Sequence[StagedLeaf]) -> None:
        """Check only the names; see `check_names` for the errors."""
        check_names(TreeColumns.of(leaves), self._form, single=self._single)

    def documents(
        self,
        leaves: Sequence[StagedLeaf],
        batches: Sequence[WrittenLeaves],
        *,
        started_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        digests: Mapping[str, bytes] | None = None,
        beside: Sequence[Document] = (),
    ) -> Iterable[Document]:
        """Make the documents of the tree; see `EncodedTree` for what it raises."""
        columns = TreeColumns.of(leaves)
        if custom_metadata is None:
            tree = self._trees.of(columns)
        else:
            tree = EncodedTree(columns, self._form, custom_metadata[CUSTOM])

        return tree.item_documents(batches, time.time_ns(), digests or {}, beside)

    def recognises(self, store: Store, path: str) -> bool:
        """True: the caller made the directory and allows it."""
        return True

    def find(self, store: Store, path: str, item: str | None = None) -> Opening:
        return self._layout.find(store, path, item, foreign=self._foreign)

    def open(self, store: Store, path: str, item: str | None = None) -> OrbaxCheckpoint:
        return self._layout.open(store, path, item, foreign=self._foreign)
