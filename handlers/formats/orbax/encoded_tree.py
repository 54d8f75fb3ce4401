"""Every document of a new tree, in the order in which they must become durable.

An `EncodedTree` encodes all that depends on the tree alone once; `EncodedTrees` keeps those of recent trees.

Source:
    ORBAX_FORMAT.md §3.1 (flat layout) and §8 (what Orbax must find).
"""

from __future__ import annotations

__all__ = ("EncodedTree", "EncodedTrees", "check_names")

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import chain
from typing import Any, Final, final

from penstock.handlers.formats import integrity
from penstock.handlers.formats.integrity import columns_of
from penstock.handlers.formats.orbax.checkpoint_metadata import content_of, encode_checkpoint_metadata
from penstock.handlers.formats.orbax.chunk_index import ChunkIndex
from penstock.handlers.formats.orbax.file_names import (
    ARRAY_METADATAS,
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    DATA_FOLDER,
    INTEGRITY,
    MANIFEST,
    METADATA,
    SHARDING,
    STRINGS,
)
from penstock.handlers.formats.orbax.leaf_documents import (
    encode_array_metadatas,
    encode_shardings,
    encode_strings,
)
from penstock.handlers.formats.orbax.sealed_documents import encode_mark
from penstock.handlers.formats.orbax.tree_columns import TreeColumns, check_directories
from penstock.handlers.formats.orbax.tree_metadata import encode_tree_metadata
from penstock.handlers.formats.zarr import METADATA_KEYS, array_metadata, prefix_of
from penstock.kernel.concurrency.brief_steps import append
from penstock.kernel.config.save_format import SaveFormat
from penstock.kernel.errors import DuplicateNameError
from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity
from penstock.kernel.protocols.leaf import ParamInfo
from penstock.kernel.protocols.leaf_infos import LeafInfos
from penstock.kernel.protocols.views import WrittenLeaves
from penstock.kernel.protocols.written import Document

_BYTES_OF_A_LEAF: Final = 512


@final
class EncodedTrees:
    """Remembers how the last few trees were encoded. Thread-safe.

    Args:
        most: Trees to remember; one of 10,000 leaves takes some 5 MB.
        form: How they are stored.
    """

    __slots__ = ("_form", "_known")

    def __init__(self, most: int = 2, form: SaveFormat | None = None) -> None:
        self._form = SaveFormat() if form is None else form
        self._known: BoundedCache[ByIdentity, EncodedTree] = BoundedCache(most)

    @property
    def caches(self) -> Sequence[BoundedCache[Any, Any]]:
        """See `Caching`."""
        return (self._known,)

    def of(self, tree: TreeColumns) -> EncodedTree:
        """Return the encoded tree of these very columns (by identity); encode it if needed.

        Raises:
            DuplicateNameError, InvalidLeafError: As `check_names`.
        """
        nbytes = _BYTES_OF_A_LEAF * len(tree)
        is_kept = self._known.takes(nbytes)

        def make() -> EncodedTree:
            return EncodedTree(tree, self._form, is_kept=is_kept)

        return self._known.get_or_make(tree.identity, make, lambda _: nbytes)


@final
class EncodedTree:
    """Everything in a tree's documents except where its bytes lie.

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
        *,
        started_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        digests: Mapping[str, bytes],
        beside: Sequence[Document] = (),
    ) -> Iterator[Document]:
        """Make the documents of a flat checkpoint of this tree, one after another.

        Args:
            batches: Where every piece and pack of every array lies.
            started_ns: When the save began, in nanoseconds since the epoch.
            custom_metadata: The caller's own; JSON.
            digests: Of leaves, by stored name.
            beside: Documents that were written already, for the record.

        Raises:
            SpecError: If `custom_metadata` is not JSON.
            PenstockError: If the pieces of a chunk do not tile it: when the first document is asked for.
        """
        committed_ns = time.time_ns()
        encoded = encode_checkpoint_metadata(
            started_ns=started_ns, committed_ns=committed_ns, custom_metadata=custom_metadata
        )
        about = Document(CHECKPOINT_METADATA, encoded)
        content = content_of(CHECKPOINT_METADATA, encoded)
        made = chain(self._own_documents(batches, committed_ns), (about,))
        return _with_mark(_with_record(made, batches, digests, beside, content))

    def item_documents(
        self,
        batches: Sequence[WrittenLeaves],
        committed_ns: int,
        digests: Mapping[str, bytes],
        beside: Sequence[Document] = (),
    ) -> Iterator[Document]:
        """Make the documents of the tree as an item of a checkpoint, named from the item's directory.

        Args:
            batches: Where every piece and pack of its arrays lies.
            committed_ns: Now, in nanoseconds since the epoch.
            digests: Of leaves, by stored name.
            beside: Documents that were written already, for the record.

        Raises:
            PenstockError: If the pieces of a chunk do not tile it: when the first document is asked for.
        """
        return _with_record(self._own_documents(batches, committed_ns), batches, digests, beside)

    def _own_documents(self, batches: Sequence[WrittenLeaves], committed_ns: int) -> Iterator[Document]:
        yield from self._index_documents(batches, committed_ns)
        if self._documents is None:
            yield from _tree(self.tree, self._form, self._custom_metadata)
        else:
            yield from self._documents

    def _index_documents(self, batches: Sequence[WrittenLeaves], committed_ns: int) -> Iterator[Document]:
        """Encode the OCDBT index; there is none without arrays."""
        index = self._made_index() if self._documents is None else self._index
        if index is None:
            return

        node_file = f"{DATA_FOLDER}/{uuid.uuid4().hex}"
        encoded = index.encode(
            batches, node_file=node_file, uuid=uuid.uuid4().bytes, commit_time_ns=committed_ns
        )
        del index
        manifest = Document(MANIFEST, encoded.manifest)
        yield Document(node_file, encoded.nodes)
        del encoded
        yield manifest

    def _made_index(self) -> ChunkIndex | None:
        arrays = self.tree.arrays()
        return ChunkIndex(arrays, self._form.zarr) if len(arrays) and self._form.ocdbt else None


def _with_mark(documents: Iterable[Document]) -> Iterator[Document]:
    """Pass documents on, and then the commit mark, which has the digest of their record."""
    for document in documents:
        yield document
        if document.path == INTEGRITY:
            yield Document(COMMIT_MARK, encode_mark(document.data))

        del document  # while the next one is made


def _with_record(
    documents: Iterable[Document],
    batches: Sequence[WrittenLeaves],
    digests: Mapping[str, bytes],
    beside: Sequence[Document],
    content: Mapping[str, object] | None = None,
) -> Iterator[Document]:
    """Pass documents on, and then the record of their digests and those of all pieces."""
    found: dict[str, integrity.Digest] = {}
    for document in documents:
        found[document.path] = integrity.digest_of(document.data)
        yield document
        del document  # while the next one is made

    found |= {document.path: integrity.digest_of(document.data) for document in beside}
    record = integrity.encode_files(columns_of(batches), digests, found, content)
    yield Document(INTEGRITY, record)


def _directories(arrays: TreeColumns, version: int) -> Iterator[Document]:
    """Encode the metadata of arrays that have a directory each."""
    key = METADATA_KEYS[version - 2]
    for name, spec in zip(arrays.names(), arrays.specs, strict=True):
        yield Document(prefix_of(name) + key, array_metadata(spec, version))


def _tree(
    tree: TreeColumns, form: SaveFormat, custom_metadata: Mapping[str, Any] | None
) -> Iterator[Document]:
    """Encode what is recorded about the leaves, except where they lie."""
    specs = tree.specs
    if not form.ocdbt:
        yield from _directories(tree.arrays(), form.zarr)

    yield _joined(METADATA, encode_tree_metadata(tree.infos, specs, form, custom_metadata))
    on_devices = [
        at for at, spec in enumerate(specs) if spec.typestr == "jax.Array" and spec.shape is not None
    ]
    names = tree.names() if on_devices else []
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
    content = BytesIO()  # to join the slices would need all of them beside the whole
    for each in slices:
        append(content, each)

    return Document(path, content.getvalue())


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
