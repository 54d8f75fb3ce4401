"""Read the documents of a checkpoint, and put together what they say of each leaf.

No array byte is read and no jax is imported.
"""

from __future__ import annotations

__all__ = ("open_checkpoint",)

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from penstock.handlers.layout import array_metadatas, integrity, metadata, sharding, strings
from penstock.handlers.layout.chunk_index import check_files, directory_index
from penstock.handlers.layout.describing import ARRAY_TYPES, ArrayFormats, has_value, leaf_table
from penstock.handlers.layout.integrity import Checksums
from penstock.handlers.layout.leaves import LeafTable, StoredLeaves
from penstock.handlers.layout.locate import Place, locate
from penstock.handlers.layout.metadata import TreeMetadata
from penstock.handlers.layout.names import (
    ARRAY_METADATAS,
    INTEGRITY,
    MANIFEST,
    METADATA,
    SHARDING,
    STRINGS,
)
from penstock.handlers.layout.remembered import RememberedDocuments
from penstock.handlers.layout.stored import OrbaxCheckpoint
from penstock.handlers.ocdbt.index import Index
from penstock.handlers.ocdbt.reader import read_index
from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.protocols import Store

NONE: Final[dict[str, Any]] = {}
"""What an absent document says: one object, for by that the same is known again. Nobody changes it."""


def open_checkpoint(
    store: Store, path: str, remembered: RememberedDocuments | None = None, *, whole: bool = True
) -> OrbaxCheckpoint:
    """Find the checkpoint at `path` and read its documents.

    Args:
        store: Where.
        path: Of the checkpoint.
        remembered: Documents decoded before, and what takes up those decoded now.
        whole: Whether every data file must be there in its whole length.

    Raises:
        NotACheckpointError: If nothing of this layout lies there.
        IncompleteCheckpointError: If a save was interrupted there.
        UnsupportedFormatError: If it is of a kind that penstock recognises and does not read.
        TruncatedDataError: If a data file is shorter than the index says.
        CorruptCheckpointError: If a document is damaged or missing; the message names it.
    """
    remembered = RememberedDocuments() if remembered is None else remembered
    place = locate(store, path)
    file = os.path.join(place.directory, METADATA)
    tree = remembered.decode(METADATA, metadata.decode, file, store.read_file(file))
    documents = _Documents(store, place, tree, remembered, whole)
    index = documents.index()
    table = _leaf_table(store, place.directory, documents, index, remembered)
    return OrbaxCheckpoint(
        path=path,
        directory=place.directory,
        leaves=StoredLeaves(place.directory, table),
        custom_metadata=place.checkpoint.custom_metadata,
        committed_at_ns=place.checkpoint.committed_at_ns,
        uses_ocdbt=documents.uses_ocdbt,
        all_chunks_written=tree.all_chunks_written,
        checksums=documents.checksums(),
        digests=documents.digests(),
        index=index,
    )


def _leaf_table(
    store: Store, directory: str, documents: _Documents, index: Index, remembered: RememberedDocuments
) -> LeafTable:
    path, texts = documents.strings()
    parts = (documents.tree, texts, documents.shardings(), documents.random_keys())
    known = remembered.table(parts, index)
    if known is not None:
        return known

    arrays = ArrayFormats(store, directory, index)
    table = leaf_table(
        directory, parts[0], arrays, strings=(path, texts), shardings=parts[2], random_keys=parts[3]
    )
    if not arrays.far:  # what lies elsewhere may have changed the next time
        remembered.keep_table(parts, index, table)

    return table


@final
@dataclass(frozen=True, slots=True)
class _Documents:
    """The documents beside `_METADATA`, each of which may be absent."""

    store: Store
    place: Place
    tree: TreeMetadata
    remembered: RememberedDocuments
    whole: bool  #: data files must be there

    @property
    def uses_ocdbt(self) -> bool:
        recorded = self.tree.use_ocdbt
        return MANIFEST in self.place.names if recorded is None else recorded

    def index(self) -> Index:
        directory, tree = self.place.directory, self.tree
        entries = zip(tree.keys, tree.typestrs, tree.skips, strict=True)
        if not self.uses_ocdbt:
            names = [".".join(keys) for keys, typestr, skip in entries if has_value(typestr, skip=skip)]
            return Index.of(directory_index(self.store, directory, names))
        if MANIFEST not in self.place.names:
            if not any(typestr in ARRAY_TYPES and not skip for _, typestr, skip in entries):
                return Index.of({})
            raise CorruptCheckpointError(
                os.path.join(directory, MANIFEST), "is missing, and there are arrays"
            )

        index = read_index(directory, self.remembered.keys)
        check_files(self.store, directory, index.needed(), whole=self.whole)
        return index

    def strings(self) -> tuple[str, dict[str, object]]:
        path, data = self._read(STRINGS)
        return path, NONE if data is None else self.remembered.decode(STRINGS, strings.decode, path, data)

    def shardings(self) -> dict[str, str]:
        path, data = self._read(SHARDING)
        return NONE if data is None else self.remembered.decode(SHARDING, sharding.decode, path, data)

    def checksums(self) -> Mapping[str, Checksums]:
        path, data = self._read(INTEGRITY)
        return {} if data is None else integrity.decode(path, data)

    def digests(self) -> Mapping[str, bytes]:
        path, data = self._read(INTEGRITY)
        return {} if data is None else integrity.decode_digests(path, data)

    def random_keys(self) -> dict[str, str]:
        # Every process records the same, so one of the files will do.
        folder = os.path.join(self.place.directory, ARRAY_METADATAS)
        files = sorted(self.store.list_directory(folder)) if ARRAY_METADATAS in self.place.names else []
        if not files:
            return NONE

        path = os.path.join(folder, files[0])
        data = self.store.read_file(path)
        return self.remembered.decode(ARRAY_METADATAS, array_metadatas.decode_random_keys, path, data)

    def _read(self, name: str) -> tuple[str, bytes | None]:
        path = os.path.join(self.place.directory, name)
        return path, self.store.read_file(path) if name in self.place.names else None
