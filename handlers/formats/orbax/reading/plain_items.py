"""Items that are not trees of arrays: JSON, protobuf texts, random keys. Each is opened as a tree.

Source:
    ORBAX_FORMAT.md §5.
"""

from __future__ import annotations

__all__ = ("OPENERS",)

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from penstock.handlers.formats.common.checked_json import as_string, parse_object
from penstock.handlers.formats.common.leaf_table import StoredLeaves
from penstock.handlers.formats.orbax.discovery.find_item import ItemPlace
from penstock.handlers.formats.orbax.discovery.item_kinds import RANDOM_KEYS, ItemKind, json_file, proto_file
from penstock.handlers.formats.orbax.documents.sealed_documents import SealedDocuments
from penstock.handlers.formats.orbax.reading.json_leaves import json_leaves
from penstock.handlers.formats.orbax.reading.stored_checkpoint import OrbaxCheckpoint
from penstock.handlers.formats.orbax.reading.tree_documents import Source, open_tree
from penstock.handlers.ocdbt.index_entries import Index
from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.protocols.leaf import KeyKind, LeafSpec, ParamInfo, StoredLeaf

# Of a jax random key, only its data is stored. `unsafe_rbg` has data of the same shape as `rbg`.
_IMPLS: Final = {2: "threefry2x32", 4: "rbg"}
_KEY: Final = "checkpoint"


def _open_json(source: Source, place: ItemPlace) -> OrbaxCheckpoint:
    name = json_file(source.store, place.directory, place.names)
    assert name is not None, "the kind says that there is one"
    path = os.path.join(place.directory, name)
    return _of_leaves(source, place, json_leaves(path, _read(source, place, name), place.directory))


def _open_proto(source: Source, place: ItemPlace) -> OrbaxCheckpoint:
    """Open a message as its text, for its class is not recorded."""
    name = proto_file(place.names)
    assert name is not None, "the kind says that there is one"
    path = os.path.join(place.directory, name)
    try:
        text = _read(source, place, name).decode()
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(path, f"is not UTF-8: {error.reason}") from error

    info = ParamInfo((), (), "", place.directory)
    return _of_leaves(source, place, (StoredLeaf(info, LeafSpec("string", text=text)),))


def _open_jax_key(source: Source, place: ItemPlace) -> OrbaxCheckpoint:
    """Open a key as the whole tree: typed if it was, and then of the implementation recorded.

    Orbax records none; then the shape tells it.
    """
    tree = _inner(source, place)
    if [leaf.info.keys for leaf in tree.leaves] != [(_KEY,)]:
        raise CorruptCheckpointError(tree.directory, "is not the array of a random key")

    (leaf,) = tree.leaves
    shape = leaf.spec.shape or (0,)
    impl = None
    if _flag(source, place, "typed"):
        path, about = _about(source, place)
        recorded = about.get("impl", _IMPLS.get(shape[-1]))
        impl = None if recorded is None else as_string(path, "impl", recorded)

    spec = replace(leaf.spec, random_key_impl=impl)
    info = replace(leaf.info, keys=(), kinds=(), key_path="")
    return replace(tree, leaves=StoredLeaves.of(tree.directory, [replace(leaf, info=info, spec=spec)]))


def _open_numpy_key(source: Source, place: ItemPlace) -> OrbaxCheckpoint:
    """Open the state of a generator as numpy takes it: a tuple if it is a legacy one, or a dict."""
    tree = _inner(source, place)
    if not _flag(source, place, "legacy"):
        return tree

    kinds = [(KeyKind.TUPLE, *kinds[1:]) for kinds in tree.leaves.kinds]
    table = replace(tree.leaves.table, kinds=kinds)
    return replace(tree, leaves=StoredLeaves(tree.directory, table))


def _inner(source: Source, place: ItemPlace) -> OrbaxCheckpoint:
    directory = os.path.join(place.directory, RANDOM_KEYS[place.kind])
    names = frozenset(source.store.list_directory(directory))
    inner = _sealed(source, place).item(RANDOM_KEYS[place.kind], names)
    at = replace(place, directory=directory, names=names, kind=ItemKind.TREE, sealed=inner)
    return open_tree(source, at)


def _flag(source: Source, place: ItemPlace, name: str) -> bool:
    path, about = _about(source, place)
    value = about.get(name)
    if type(value) is not bool:
        raise CorruptCheckpointError(path, f"{name} is {value!r}, not a boolean")

    return value


def _about(source: Source, place: ItemPlace) -> tuple[str, dict[str, object]]:
    name = f"{RANDOM_KEYS[place.kind]}_metadata/metadata"
    path = os.path.join(place.directory, name)
    return path, parse_object(path, _read(source, place, name))


def _read(source: Source, place: ItemPlace, name: str) -> bytes:
    return _sealed(source, place).read(name)


def _sealed(source: Source, place: ItemPlace) -> SealedDocuments:
    return place.sealed or SealedDocuments.open(source.store, place.directory, place.names)


def _of_leaves(source: Source, place: ItemPlace, leaves: tuple[StoredLeaf, ...]) -> OrbaxCheckpoint:
    return OrbaxCheckpoint(
        store=source.store,
        path=place.path,
        directory=place.directory,
        leaves=StoredLeaves.of(place.directory, leaves),
        custom_metadata=place.checkpoint.custom_metadata,
        committed_at_ns=place.checkpoint.committed_at_ns,
        uses_ocdbt=False,
        all_chunks_written=True,
        checksums={},
        index=Index.of({}),
        root_custom_metadata=place.root_metadata,
        started_at_ns=place.checkpoint.started_at_ns,
    )


OPENERS: Final[Mapping[ItemKind, Callable[[Source, ItemPlace], OrbaxCheckpoint]]] = {
    ItemKind.TREE: open_tree,
    ItemKind.PACKED: open_tree,
    ItemKind.NAMED: open_tree,
    ItemKind.JSON: _open_json,
    ItemKind.PROTO: _open_proto,
    ItemKind.JAX_KEY: _open_jax_key,
    ItemKind.NUMPY_KEY: _open_numpy_key,
}
