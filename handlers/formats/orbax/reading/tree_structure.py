"""Which leaves a tree has, from `_METADATA`, the msgpack file or the names of arrays.

Source:
    ORBAX_FORMAT.md §1.1, §1.2, §1.9.
"""

from __future__ import annotations

__all__ = ("Structure", "array_directories", "read_structure")

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

from penstock.handlers.formats.common.inside_paths import EnteredDirectories
from penstock.handlers.formats.common.key_paths import show_key_path
from penstock.handlers.formats.common.zarr_metadata import METADATA_KEYS
from penstock.handlers.formats.orbax.discovery.find_item import ItemPlace
from penstock.handlers.formats.orbax.discovery.item_kinds import ItemKind
from penstock.handlers.formats.orbax.documents import sharding_document as sharding
from penstock.handlers.formats.orbax.documents import tree_metadata as metadata
from penstock.handlers.formats.orbax.documents.file_names import LEGACY_MSGPACK, MANIFEST, METADATA, SHARDING
from penstock.handlers.formats.orbax.documents.sealed_documents import SealedDocuments
from penstock.handlers.formats.orbax.documents.tree_entries import Columns
from penstock.handlers.formats.orbax.documents.tree_metadata import TreeMetadata
from penstock.handlers.formats.orbax.documents.tuple_types import tuple_paths
from penstock.handlers.formats.orbax.msgpack.msgpack_tree import PackedLeaf, read_tree
from penstock.handlers.formats.orbax.reading.document_cache import RememberedDocuments
from penstock.handlers.ocdbt.database_reader import read_index
from penstock.kernel.errors import CorruptCheckpointError, MissingFileError, UnsupportedFormatError
from penstock.kernel.protocols.leaf import KeyKind, KeyPath
from penstock.kernel.protocols.stores import Store

_MOST_LEVELS: Final = 64  # of directories


@final
@dataclass(frozen=True, slots=True)
class Structure:
    """The leaves, and the values of those not stored as arrays."""

    tree: TreeMetadata
    packed: Mapping[KeyPath, PackedLeaf] = field(default_factory=dict[KeyPath, PackedLeaf])


def read_structure(
    store: Store, place: ItemPlace, remembered: RememberedDocuments, sealed: SealedDocuments
) -> Structure:
    """Read which leaves the tree at `place` has. `_METADATA` is decoded only if it was not before.

    Raises:
        CorruptCheckpointError: If a document is damaged, or lacks a value that another says is in it.
        UnsupportedFormatError: If it is valid, but penstock cannot represent it.
    """
    if place.kind is ItemKind.PACKED:
        sealed.check_file(LEGACY_MSGPACK)
        return _packed(read_tree(store, os.path.join(place.directory, LEGACY_MSGPACK)))
    if place.kind is ItemKind.NAMED:
        names = array_directories(store, place.directory)
        return Structure(_named(place.directory, names, _sharded(place, sealed)))

    return _recorded(store, place, remembered, sealed)


def _recorded(
    store: Store, place: ItemPlace, remembered: RememberedDocuments, sealed: SealedDocuments
) -> Structure:
    path = os.path.join(place.directory, METADATA)
    if METADATA not in place.names and _is_single_array(store, place):
        return Structure(_named(place.directory, [LEGACY_MSGPACK], _sharded(place, sealed)))
    if METADATA not in place.names:
        raise MissingFileError(path, "is missing, and the structure of the tree with it")

    tree, first = remembered.decode(METADATA, _decode, path, sealed.read(METADATA))
    # Early Orbax always wrote this file, but it is read only if it is recorded to hold values.
    if first is None:
        return Structure(tree)

    packed = os.path.join(place.directory, LEGACY_MSGPACK)
    if LEGACY_MSGPACK not in place.names:
        key_path = show_key_path(tree.keys[first], tree.kinds[first])
        raise CorruptCheckpointError(packed, "is missing, and values are in it", key_path=key_path)

    sealed.check_file(LEGACY_MSGPACK)
    found = {leaf.keys: leaf for leaf in read_tree(store, packed)}
    elsewhere = {keys for keys, leaf in found.items() if leaf.elsewhere}
    skips = [skip and keys not in elsewhere for keys, skip in zip(tree.keys, tree.skips, strict=True)]
    return Structure(replace(tree, skips=skips), found)


def _decode(path: str, data: bytes) -> tuple[TreeMetadata, int | None]:
    """Read `_METADATA`, and return the first leaf whose value lies in the msgpack file."""
    tree = metadata.decode(path, data)
    tuples = tuple_paths(path, tree.value_metadata_tree)
    if tuples:
        rows = zip(tree.keys, tree.kinds, strict=True)
        tree = replace(tree, kinds=[_with_tuples(keys, kinds, tuples) for keys, kinds in rows])

    skipped = (at for at, skip in enumerate(tree.skips) if skip)  # most trees have none
    return tree, next(filter(tree.in_msgpack, skipped), None)


def _with_tuples(
    keys: KeyPath, kinds: tuple[KeyKind, ...], tuples: frozenset[KeyPath]
) -> tuple[KeyKind, ...]:
    return tuple(
        [
            KeyKind.TUPLE if kind is KeyKind.SEQUENCE and keys[:depth] in tuples else kind
            for depth, kind in enumerate(kinds)
        ]
    )


def _packed(leaves: Sequence[PackedLeaf]) -> Structure:
    """Make the structure of the msgpack file alone, which has no types for arrays that lie beside it."""
    columns = Columns(
        keys=[leaf.keys for leaf in leaves],
        kinds=[leaf.kinds for leaf in leaves],
        typestrs=[leaf.typestr for leaf in leaves],
        write_shapes=[None] * len(leaves),
        skips=[not leaf.elsewhere for leaf in leaves],
    )
    return Structure(_tree(columns), {leaf.keys: leaf for leaf in leaves})


def _is_single_array(store: Store, place: ItemPlace) -> bool:
    """Whether a database is an item of one array as Orbax 0.4 wrote it, which needs no other document."""
    if MANIFEST not in place.names:
        return False

    keys = read_index(store, place.directory)
    return {key.rpartition(b"/")[0] for key in keys} == {LEGACY_MSGPACK.encode()}


def _sharded(place: ItemPlace, sealed: SealedDocuments) -> Collection[str]:
    """Name the arrays of which a sharding is recorded: those of jax."""
    if SHARDING not in place.names:
        return ()

    path = os.path.join(place.directory, SHARDING)
    return sharding.decode(path, sealed.read(SHARDING))


def _named(directory: str, names: Iterable[str], sharded: Collection[str]) -> TreeMetadata:
    """Make a tree of dicts of the names alone, in which a dot may be a step or part of a key."""
    found = dict.fromkeys([tuple(name.split(".")) if name else () for name in sorted(names)])
    for keys in found:
        above = next((keys[:n] for n in range(len(keys)) if keys[:n] in found), None)
        if above is not None:
            problem = f"has no {METADATA}, and of {'.'.join(above)!r} and {'.'.join(keys)!r}"
            raise UnsupportedFormatError(directory, f"{problem} one would be inside of the other")

    n = len(found)
    kinds = [(KeyKind.MAPPING,) * len(keys) for keys in found]
    types = ["jax.Array" if ".".join(keys) in sharded else "np.ndarray" for keys in found]
    return _tree(Columns(list(found), kinds, types, [None] * n, [False] * n))


def _tree(columns: Columns) -> TreeMetadata:
    return TreeMetadata(*columns, use_ocdbt=None, use_zarr3=False, all_chunks_written=False)


def array_directories(store: Store, directory: str) -> Iterator[str]:
    """Yield the path, from `directory`, of every directory in it that holds an array. Blocking.

    Raises:
        CorruptCheckpointError: If links make too many paths.
    """
    entered = EnteredDirectories(store)
    pending = [("", 0)]
    while pending:
        name, levels = pending.pop()
        path = os.path.join(directory, name) if name else directory
        names = store.list_directory(path)
        if any(key in names for key in METADATA_KEYS):
            yield name
            continue

        entered.enter(path)
        if levels < _MOST_LEVELS:
            below = [inner for inner in names if store.kind(os.path.join(path, inner)) == "directory"]
            pending += [(f"{name}/{inner}" if name else inner, levels + 1) for inner in below]
