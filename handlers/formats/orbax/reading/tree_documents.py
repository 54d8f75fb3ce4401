"""Read the documents of a tree and combine what they say about each leaf.

No array byte is read and no jax is imported.
"""

from __future__ import annotations

__all__ = ("Source", "open_tree")

import os
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, final

from penstock.handlers.formats.common.leaf_table import LeafTable, StoredLeaves
from penstock.handlers.formats.orbax.chunks.stored_index import check_files, directory_index
from penstock.handlers.formats.orbax.discovery.find_item import ItemPlace
from penstock.handlers.formats.orbax.documents import array_metadatas
from penstock.handlers.formats.orbax.documents import sharding_document as sharding
from penstock.handlers.formats.orbax.documents import strings_document as strings
from penstock.handlers.formats.orbax.documents.file_names import (
    ARRAY_METADATAS,
    MANIFEST,
    METADATA,
    SHARDING,
    STRINGS,
)
from penstock.handlers.formats.orbax.documents.sealed_documents import SealedDocuments
from penstock.handlers.formats.orbax.documents.tree_metadata import TreeMetadata
from penstock.handlers.formats.orbax.reading.document_cache import RememberedDocuments
from penstock.handlers.formats.orbax.reading.leaf_spec_decoding import (
    ARRAY_TYPES,
    ArrayFormats,
    has_value,
    leaf_table,
)
from penstock.handlers.formats.orbax.reading.stored_checkpoint import OrbaxCheckpoint
from penstock.handlers.formats.orbax.reading.tree_structure import Structure, read_structure
from penstock.handlers.formats.orbax.reading.unmerged import check_merged
from penstock.handlers.ocdbt.database_reader import read_index
from penstock.handlers.ocdbt.index_entries import Index
from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.protocols.stores import Store

NONE: Final[dict[str, Any]] = {}
"""What an absent document says. A single object, because results are cached by identity. Never changed."""


@final
@dataclass(frozen=True, slots=True)
class Source:
    """What documents are read from, and how."""

    store: Store
    remembered: RememberedDocuments  #: documents decoded before; those decoded now are added
    whole: bool = True  #: whether every data file must be there in its whole length
    foreign: frozenset[str] = frozenset()  #: types of leaves that may lie in their handler's own files


def open_tree(source: Source, place: ItemPlace) -> OrbaxCheckpoint:
    """Read the documents of the tree at `place`.

    Raises:
        IncompleteCheckpointError: If a save was interrupted there.
        UnsupportedFormatError: If it is of a kind that penstock recognises and does not read.
        TruncatedDataError: If a data file is shorter than the index says.
        CorruptCheckpointError: If a document is damaged or missing; the message names it.
    """
    sealed = place.sealed or SealedDocuments.open(source.store, place.directory, place.names)
    if METADATA not in place.names:
        sealed.check_absent(METADATA)  # the names of arrays would tell another tree

    structure = read_structure(source.store, place, source.remembered, sealed)
    tree = structure.tree
    documents = _Documents(source, place, tree, sealed)
    index = documents.index()
    return OrbaxCheckpoint(
        store=source.store,
        path=place.path,
        directory=place.directory,
        leaves=StoredLeaves(place.directory, _leaf_table(documents, structure, index)),
        custom_metadata=place.checkpoint.custom_metadata,
        committed_at_ns=place.checkpoint.committed_at_ns,
        uses_ocdbt=documents.uses_ocdbt,
        all_chunks_written=tree.all_chunks_written,
        checksums=sealed.recorded.files,
        digests=sealed.recorded.digests,
        index=index,
        tree_custom_metadata=deepcopy(tree.custom_metadata),  # the caller may change it
        root_custom_metadata=place.root_metadata,
        started_at_ns=place.checkpoint.started_at_ns,
        uses_zarr3=tree.use_zarr3,
    )


def _leaf_table(documents: _Documents, structure: Structure, index: Index) -> LeafTable:
    source, directory = documents.source, documents.place.directory
    path, texts = documents.strings()
    parts = (documents.tree, texts, documents.shardings(), documents.random_keys())
    known = source.remembered.table(parts, index)
    if known is not None:
        return known

    arrays = ArrayFormats(documents.sealed, directory, index)
    table = leaf_table(
        directory,
        parts[0],
        arrays,
        strings=(path, texts),
        shardings=parts[2],
        random_keys=parts[3],
        packed=structure.packed,
        ocdbt=documents.uses_ocdbt,
        foreign=source.foreign,
    )
    # Values that lie elsewhere may have changed by the next time, and another handler may be asked.
    if not arrays.far and not structure.packed and not source.foreign:
        source.remembered.keep_table(parts, index, table)

    return table


@final
@dataclass(frozen=True, slots=True)
class _Documents:
    """The documents beside `_METADATA`, each of which may be absent."""

    source: Source
    place: ItemPlace
    tree: TreeMetadata
    sealed: SealedDocuments

    @property
    def uses_ocdbt(self) -> bool:
        recorded = self.tree.use_ocdbt
        return MANIFEST in self.place.names if recorded is None else recorded

    def index(self) -> Index:
        store, directory, tree = self.source.store, self.place.directory, self.tree
        if any(map(has_value, tree.typestrs, tree.skips)):
            check_merged(directory, self.place.names, tree.use_ocdbt)

        entries = zip(tree.keys, tree.typestrs, tree.skips, strict=True)
        if not self.uses_ocdbt:
            names = [".".join(keys) for keys, typestr, skip in entries if has_value(typestr, skip)]
            return Index.of(directory_index(store, directory, names, self.sealed.check))
        if MANIFEST not in self.place.names:
            expected = ARRAY_TYPES - self.source.foreign
            if not any(typestr in expected and not skip for _, typestr, skip in entries):
                return Index.of({})
            raise CorruptCheckpointError(
                os.path.join(directory, MANIFEST), "is missing, and there are arrays"
            )

        index = read_index(store, directory, self.source.remembered.keys)
        check_files(store, directory, index.needed(), whole=self.source.whole)
        return index

    def strings(self) -> tuple[str, dict[str, object]]:
        path, data = self._read(STRINGS)
        if data is None:
            return path, NONE

        return path, self.source.remembered.decode(STRINGS, strings.decode, path, data)

    def shardings(self) -> dict[str, str]:
        path, data = self._read(SHARDING)
        if data is None:
            return NONE

        return self.source.remembered.decode(SHARDING, sharding.decode, path, data)

    def random_keys(self) -> dict[str, str]:
        # Every process records the same, so any one of the files is enough.
        folder = os.path.join(self.place.directory, ARRAY_METADATAS)
        files = (
            sorted(self.source.store.list_directory(folder)) if ARRAY_METADATAS in self.place.names else []
        )
        if not files:
            self.sealed.check_absent(ARRAY_METADATAS)
            return NONE

        path = os.path.join(folder, files[0])
        data = self.sealed.read(f"{ARRAY_METADATAS}/{files[0]}")
        return self.source.remembered.decode(ARRAY_METADATAS, array_metadatas.decode_random_keys, path, data)

    def _read(self, name: str) -> tuple[str, bytes | None]:
        path = os.path.join(self.place.directory, name)
        if name in self.place.names:
            return path, self.sealed.read(name)

        self.sealed.check_absent(name)
        return path, None
