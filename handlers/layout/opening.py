"""Read the documents of a checkpoint, and put together what they say of each leaf.

No array byte is read and no jax is imported.
"""

from __future__ import annotations

__all__ = ("open_tree",)

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from penstock.handlers import zarr
from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.layout import array_metadatas, integrity, sharding, strings
from penstock.handlers.layout.chunk_index import check_files, directory_index, read_value
from penstock.handlers.layout.index import prefix_of
from penstock.handlers.layout.integrity import Checksum
from penstock.handlers.layout.locate import Place
from penstock.handlers.layout.metadata import EMPTY_MARKERS, TreeEntry, TreeMetadata
from penstock.handlers.layout.msgpack_tree import PackedLeaf
from penstock.handlers.layout.names import (
    ARRAY_METADATAS,
    INTEGRITY,
    MANIFEST,
    METADATA,
    SHARDING,
    STRINGS,
    show_key_path,
)
from penstock.handlers.layout.packed_leaf import stored_leaf
from penstock.handlers.layout.stored import OrbaxCheckpoint, StoredArray
from penstock.handlers.layout.structure import read_structure
from penstock.handlers.layout.unmerged import check_merged
from penstock.handlers.ocdbt.reader import read_index
from penstock.handlers.ocdbt.values import Value
from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.messages import KeyPath, LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.protocols import Store

_ARRAY_TYPES: Final = frozenset({"jax.Array", "np.ndarray", "scalar"})


def open_tree(store: Store, place: Place) -> OrbaxCheckpoint:
    """Read the documents of the tree at `place`.

    Raises:
        IncompleteCheckpointError: If a save was interrupted there.
        UnsupportedFormatError: If it is of a kind that penstock recognises and does not read.
        TruncatedDataError: If a data file is shorter than the index says.
        CorruptCheckpointError: If a document is damaged or missing; the message names it.
    """
    structure = read_structure(store, place)
    tree = structure.tree
    documents = _Documents(store, place, tree)
    index = documents.index()
    leaves = _Leaves(
        store,
        place.directory,
        index,
        strings=documents.strings(),
        shardings=documents.shardings(),
        random_keys=documents.random_keys(),
        packed=structure.packed,
    )
    return OrbaxCheckpoint(
        path=place.path,
        directory=place.directory,
        leaves=tuple([leaves.leaf(entry) for entry in tree.entries]),
        custom_metadata=place.checkpoint.custom_metadata,
        committed_at_ns=place.checkpoint.committed_at_ns,
        uses_ocdbt=documents.uses_ocdbt,
        all_chunks_written=tree.all_chunks_written,
        checksums=documents.checksums(),
        index=index,
        tree_custom_metadata=tree.custom_metadata,
        root_custom_metadata=place.root_metadata,
    )


@final
@dataclass(frozen=True, slots=True)
class _Documents:
    """The documents beside `_METADATA`, each of which may be absent."""

    store: Store
    place: Place
    tree: TreeMetadata

    @property
    def uses_ocdbt(self) -> bool:
        recorded = self.tree.use_ocdbt
        return MANIFEST in self.place.names if recorded is None else recorded

    def index(self) -> Mapping[bytes, Value]:
        directory = self.place.directory
        if any(map(_has_value, self.tree.entries)):
            check_merged(directory, self.place.names, self.tree.use_ocdbt)
        if not self.uses_ocdbt:
            names = [".".join(entry.keys) for entry in self.tree.entries if _has_value(entry)]
            return directory_index(self.store, directory, names)
        if MANIFEST not in self.place.names:
            if not any(entry.typestr in _ARRAY_TYPES and not entry.skip for entry in self.tree.entries):
                return {}
            raise CorruptCheckpointError(
                os.path.join(directory, MANIFEST), "is missing, and there are arrays"
            )

        index = read_index(directory)
        check_files(self.store, directory, index)
        return index

    def strings(self) -> tuple[str, dict[str, object]]:
        path, data = self._read(STRINGS)
        return path, {} if data is None else strings.decode(path, data)

    def shardings(self) -> dict[str, str]:
        path, data = self._read(SHARDING)
        return {} if data is None else sharding.decode(path, data)

    def checksums(self) -> Mapping[str, Sequence[Checksum]]:
        path, data = self._read(INTEGRITY)
        return {} if data is None else integrity.decode(path, data)

    def random_keys(self) -> dict[str, str]:
        # Every process records the same, so one of the files will do.
        folder = os.path.join(self.place.directory, ARRAY_METADATAS)
        files = sorted(self.store.list_directory(folder)) if ARRAY_METADATAS in self.place.names else []
        if not files:
            return {}

        path = os.path.join(folder, files[0])
        return array_metadatas.decode_random_keys(path, self.store.read_file(path))

    def _read(self, name: str) -> tuple[str, bytes | None]:
        path = os.path.join(self.place.directory, name)
        return path, self.store.read_file(path) if name in self.place.names else None


@final
@dataclass(frozen=True, slots=True)
class _Leaves:
    """Makes a `StoredLeaf` of each entry."""

    store: Store
    directory: str
    index: Mapping[bytes, Value]
    strings: tuple[str, dict[str, object]]
    shardings: Mapping[str, str]
    random_keys: Mapping[str, str]
    packed: Mapping[KeyPath, PackedLeaf]
    formats: dict[bytes, zarr.ArrayFormat] = field(default_factory=dict[bytes, zarr.ArrayFormat])

    def leaf(self, entry: TreeEntry) -> StoredLeaf:
        info = ParamInfo(entry.keys, entry.kinds, show_key_path(entry.keys, entry.kinds), self.directory)
        if entry.typestr in EMPTY_MARKERS:
            return StoredLeaf(info, LeafSpec(entry.typestr))
        if entry.skip:
            return stored_leaf(info, entry, self.packed.get(entry.keys), self.shardings)

        name = info.name
        if entry.typestr == "string":
            text = strings.find(*self.strings, name, info.key_path)
            return StoredLeaf(info, LeafSpec(entry.typestr, text=text))

        array = self._array(name, info)
        if array is None:
            if entry.typestr in _ARRAY_TYPES:
                problem = f"the array {name!r} is listed in {METADATA} and is not there"
                raise CorruptCheckpointError(self.directory, problem, key_path=info.key_path)
            return StoredLeaf(info, LeafSpec(entry.typestr))

        form = array.format
        spec = LeafSpec(
            typestr=entry.typestr,
            shape=form.shape,
            dtype=form.dtype,
            itemsize=numpy_dtype(form.dtype).itemsize,
            chunk_shape=form.chunk_shape,
            write_shape=entry.write_shape,
            sharding=self.shardings.get(name),
            random_key_impl=self.random_keys.get(name),
        )
        return StoredLeaf(info, spec, array)

    def _array(self, name: str, info: ParamInfo) -> StoredArray | None:
        prefix = prefix_of(name)
        for metadata_key in zarr.METADATA_KEYS:
            key = prefix + metadata_key
            value = self.index.get(key.encode())
            if value is None:
                continue

            data = read_value(self.store, self.directory, value)
            form = self.formats.get(data)
            if form is None:
                try:
                    form = zarr.decode(os.path.join(self.directory, key), data)
                except CorruptCheckpointError as error:
                    error.key_path = info.key_path
                    raise
                self.formats[data] = form

            return StoredArray(form, prefix)

        return None


def _has_value(entry: TreeEntry) -> bool:
    return not entry.skip and entry.typestr not in EMPTY_MARKERS and entry.typestr != "string"
