"""Every document of a new flat checkpoint, in the order in which they must become durable.

Source:
    ORBAX_FORMAT.md §3.1 (flat layout) and §8 (what Orbax must find).
"""

from __future__ import annotations

__all__ = ("EncodedTree", "EncodedTrees", "check_names")

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any, Final, final

from penstock.handlers.formats.common import integrity
from penstock.handlers.formats.common.chunk_keys import array_metadata, prefix_of
from penstock.handlers.formats.common.tree_columns import TreeColumns
from penstock.handlers.formats.common.zarr_metadata import METADATA_KEYS
from penstock.handlers.formats.orbax.chunks.chunk_index import ChunkIndex
from penstock.handlers.formats.orbax.documents import array_metadatas, checkpoint_metadata, commit_mark_text
from penstock.handlers.formats.orbax.documents import sharding_document as sharding
from penstock.handlers.formats.orbax.documents import strings_document as strings
from penstock.handlers.formats.orbax.documents import tree_metadata as metadata
from penstock.handlers.formats.orbax.documents.file_names import (
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
from penstock.handlers.formats.orbax.writing.name_collisions import check_directories
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

        def make() -> EncodedTree:
            return EncodedTree(tree, self._form)

        return self._known.get_or_make(tree.identity, make, lambda made: _BYTES_OF_A_LEAF * len(made.tree))


@final
class EncodedTree:
    """Everything in a tree's documents except where its bytes lie.

    Args:
        tree: All leaves, empty markers among them, in flatten order.
        form: How they are stored.
        custom_metadata: JSON values that are kept with the tree itself.
    """

    __slots__ = ("_documents", "_index", "tree")

    def __init__(
        self, tree: TreeColumns, form: SaveFormat, custom_metadata: Mapping[str, Any] | None = None
    ) -> None:
        check_names(tree)
        self.tree = tree
        self._documents = _tree(tree, form, custom_metadata)
        arrays = tree.arrays()
        self._index = ChunkIndex(arrays, form.zarr) if len(arrays) and form.ocdbt else None
        if not form.ocdbt:
            self._documents[:0] = _directories(arrays, form.zarr)

    def documents(
        self,
        batches: Sequence[WrittenLeaves],
        *,
        started_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        digests: Mapping[str, bytes],
        beside: Sequence[Document] = (),
    ) -> list[Document]:
        """Make the documents of a flat checkpoint of this tree.

        Args:
            batches: Where every piece and pack of every array lies.
            started_ns: When the save began, in nanoseconds since the epoch.
            custom_metadata: The caller's own; JSON.
            digests: Of leaves, by stored name.
            beside: Documents that were written already, for the record.

        Raises:
            SpecError: If `custom_metadata` is not JSON.
            PenstockError: If the pieces of a chunk do not tile it.
        """
        committed_ns = time.time_ns()
        about = checkpoint_metadata.encode(
            started_ns=started_ns, committed_ns=committed_ns, custom_metadata=custom_metadata
        )
        documents = [
            *self._index_documents(batches, committed_ns),
            *self._documents,
            Document(CHECKPOINT_METADATA, about),
        ]
        content = checkpoint_metadata.content_of(CHECKPOINT_METADATA, about)
        record = integrity.encode(batches, digests, [*documents, *beside], content)
        return [
            *documents,
            Document(INTEGRITY, record),
            Document(COMMIT_MARK, commit_mark_text.encode(record)),
        ]

    def item_documents(
        self,
        batches: Sequence[WrittenLeaves],
        committed_ns: int,
        digests: Mapping[str, bytes],
        beside: Sequence[Document] = (),
    ) -> list[Document]:
        """Make the documents of the tree as an item of a checkpoint, named from the item's directory.

        Args:
            batches: Where every piece and pack of its arrays lies.
            committed_ns: Now, in nanoseconds since the epoch.
            digests: Of leaves, by stored name.
            beside: Documents that were written already, for the record.

        Raises:
            PenstockError: If the pieces of a chunk do not tile it.
        """
        documents = [*self._index_documents(batches, committed_ns), *self._documents]
        record = integrity.encode(batches, digests, [*documents, *beside])
        return [*documents, Document(INTEGRITY, record)]

    def _index_documents(self, batches: Sequence[WrittenLeaves], committed_ns: int) -> list[Document]:
        """Encode the OCDBT index; there is none without arrays."""
        if self._index is None:
            return []

        node_file = f"{DATA_FOLDER}/{uuid.uuid4().hex}"
        index = self._index.encode(
            batches, node_file=node_file, uuid=uuid.uuid4().bytes, commit_time_ns=committed_ns
        )
        return [Document(node_file, index.nodes), Document(MANIFEST, index.manifest)]


def _directories(arrays: TreeColumns, version: int) -> list[Document]:
    """Encode the metadata of arrays that have a directory each."""
    key = METADATA_KEYS[version - 2]
    rows = zip(arrays.names(), arrays.specs, strict=True)
    return [Document(prefix_of(name) + key, array_metadata(spec, version)) for name, spec in rows]


def _tree(tree: TreeColumns, form: SaveFormat, custom_metadata: Mapping[str, Any] | None) -> list[Document]:
    """Encode what is recorded about the leaves, except where they lie."""
    documents = [_joined(METADATA, metadata.encode(tree.infos, tree.specs, form, custom_metadata))]
    specs = tree.specs
    on_devices = [
        at for at, spec in enumerate(specs) if spec.typestr == "jax.Array" and spec.shape is not None
    ]
    names = tree.names() if on_devices else []
    shardings = [specs[at].sharding for at in on_devices]
    known = [text for text in shardings if text is not None]
    if on_devices and len(known) == len(shardings):
        documents.append(_joined(SHARDING, sharding.encode([names[at] for at in on_devices], known)))

    recorded = [at for at in on_devices if specs[at].shapes_recorded]
    if recorded:
        found = array_metadatas.encode([names[at] for at in recorded], [specs[at] for at in recorded])
        documents.append(_joined(f"{ARRAY_METADATAS}/process_0", found))

    texts = list(tree.texts())
    if texts:
        documents.append(Document(STRINGS, strings.encode(texts)))

    return documents


def _joined(path: str, slices: Iterable[bytes]) -> Document:
    content = BytesIO()  # to join the slices would need all of them beside the whole
    content.writelines(slices)
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

    strings.encode(tree.texts())
    if form is not None and not form.ocdbt:
        check_directories(tree.arrays(), form.zarr, single=single)
