"""Finds a checkpoint, or an item of one, and reads its documents.

A tree is read by `tree_documents`. The items that are no trees are read here: JSON, text of a protocol
buffer, and random keys of jax and of NumPy (ORBAX_FORMAT.md §5).
"""

from __future__ import annotations

__all__ = ("json_leaves", "open_checkpoint")

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final, cast

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.formats.leaf_table import MOST_LEVELS, KeyPathBudget, StoredLeaves, show_key_path
from penstock.handlers.formats.orbax.discovery import (
    RANDOM_KEYS,
    ItemKind,
    ItemPlace,
    json_file,
    locate,
    proto_file,
)
from penstock.handlers.formats.orbax.embedded_arrays import number
from penstock.handlers.formats.orbax.stored_checkpoint import OrbaxCheckpoint
from penstock.handlers.formats.orbax.tree_documents import RememberedDocuments, Source, open_tree
from penstock.handlers.formats.untrusted import as_string, parse_object, parse_value
from penstock.handlers.ocdbt.index import Index
from penstock.kernel.errors import CorruptCheckpointError, UnsupportedFormatError
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.protocols.stores import Store


def open_checkpoint(
    store: Store,
    path: str,
    item: str | None = None,
    *,
    remembered: RememberedDocuments | None = None,
    whole: bool = True,
    foreign: frozenset[str] = frozenset(),
) -> OrbaxCheckpoint:
    """Find the checkpoint at `path` and read its documents.

    Args:
        store: Where.
        path: Of a checkpoint, of an item of one, or of a directory of steps; see `locate`. The result's
            path is that of the checkpoint found: a step, if this is a directory of steps.
        item: Its name, where there are several; by default the one that holds the tree.
        remembered: Documents decoded before, and what takes up those decoded now.
        whole: Whether every data file must be there in its whole length.
        foreign: Types of leaves that a handler may keep in its own files; see `Source`.

    Raises:
        NotACheckpointError: If nothing of this layout is there, or no such item.
        IncompleteCheckpointError: If a save was interrupted there.
        UnsupportedFormatError: If it is of a kind that penstock recognises and does not read.
        TruncatedDataError: If a data file is shorter than the index says.
        LinkOutsideError: If a symbolic link leads out of it, and the store does not allow that.
        CorruptCheckpointError: If a document is damaged or missing; the message names it.
    """
    source = Source(store, RememberedDocuments() if remembered is None else remembered, whole, foreign)
    place = locate(store, path, item)
    store.check_links(place.path, place.directory)
    return OPENERS[place.kind](source, place)


# Of a jax random key, only its data is stored. `unsafe_rbg` has data of the same shape as `rbg`.
_IMPLS: Final = {2: "threefry2x32", 4: "rbg"}
_KEY: Final = "checkpoint"


def _open_json(source: Source, place: ItemPlace) -> OrbaxCheckpoint:
    name = json_file(source.store, place.directory, place.names)
    assert name is not None, "the kind says that there is one"
    path = os.path.join(place.directory, name)
    return _of_leaves(source, place, json_leaves(path, place.sealed.read(name), place.directory))


def _open_proto(source: Source, place: ItemPlace) -> OrbaxCheckpoint:
    """Open a message as its text, for its class is not recorded."""
    name = proto_file(place.names)
    assert name is not None, "the kind says that there is one"
    path = os.path.join(place.directory, name)
    try:
        text = place.sealed.read(name).decode()
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
    if _flag(place, "typed"):
        path, about = _about(place)
        recorded = about.get("impl", _IMPLS.get(shape[-1]))
        impl = None if recorded is None else as_string(path, "impl", recorded)

    spec = replace(leaf.spec, extended_dtype=impl)
    info = replace(leaf.info, keys=(), kinds=(), key_path="")
    return replace(tree, leaves=StoredLeaves.of(tree.directory, [replace(leaf, info=info, spec=spec)]))


def _open_numpy_key(source: Source, place: ItemPlace) -> OrbaxCheckpoint:
    """Open the state of a generator as numpy takes it: a tuple if it is a legacy one, or a dict."""
    tree = _inner(source, place)
    if not _flag(place, "legacy"):
        return tree

    kinds = [(KeyKind.TUPLE, *kinds[1:]) for kinds in tree.leaves.kinds]
    table = replace(tree.leaves.table, kinds=kinds)
    return replace(tree, leaves=StoredLeaves(tree.directory, table))


def _inner(source: Source, place: ItemPlace) -> OrbaxCheckpoint:
    directory = os.path.join(place.directory, RANDOM_KEYS[place.kind])
    names = frozenset(source.store.list_directory(directory))
    inner = place.sealed.item(RANDOM_KEYS[place.kind], names)
    at = replace(place, directory=directory, names=names, kind=ItemKind.TREE, sealed=inner)
    return open_tree(source, at)


def _flag(place: ItemPlace, name: str) -> bool:
    path, about = _about(place)
    value = about.get(name)
    if type(value) is not bool:
        raise CorruptCheckpointError(path, f"{name} is {value!r}, not a boolean")

    return value


def _about(place: ItemPlace) -> tuple[str, dict[str, object]]:
    name = f"{RANDOM_KEYS[place.kind]}_metadata/metadata"
    path = os.path.join(place.directory, name)
    return path, parse_object(path, place.sealed.read(name))


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


_Kinds = tuple[KeyKind, ...]

_MARKERS: Final[Mapping[type, str]] = {type(None): "None", dict: "Dict", list: "List"}


def json_leaves(path: str, data: bytes, directory: str) -> tuple[StoredLeaf, ...]:
    """Make leaves of numbers, strings, null and empty containers, in the document's order.

    Args:
        path: Of the document, for the error.
        data: Its content.
        directory: Put into every `ParamInfo`.

    Raises:
        CorruptCheckpointError: If it is not JSON.
        UnsupportedFormatError: If it is nested too deeply, or an int needs more than 64 bits.
    """
    budget = KeyPathBudget(path)
    leaves: list[StoredLeaf] = []
    for keys, kinds, value in _walk(path, parse_value(path, data), (), ()):
        budget.spend(keys)
        info = ParamInfo(keys, kinds, show_key_path(keys, kinds), directory)
        leaves.append(_leaf(path, info, value))

    return tuple(leaves)


def _walk(path: str, node: object, keys: KeyPath, kinds: _Kinds) -> Iterator[tuple[KeyPath, _Kinds, object]]:
    if not isinstance(node, dict | list) or not node:
        yield keys, kinds, node
        return
    if len(keys) == MOST_LEVELS:
        raise UnsupportedFormatError(path, f"is nested more than {MOST_LEVELS} levels deep")

    if isinstance(node, dict):
        for key, value in cast("dict[str, object]", node).items():
            yield from _walk(path, value, (*keys, key), (*kinds, KeyKind.MAPPING))
    else:
        for at, value in enumerate(cast("list[object]", node)):
            yield from _walk(path, value, (*keys, str(at)), (*kinds, KeyKind.SEQUENCE))


def _leaf(path: str, info: ParamInfo, value: object) -> StoredLeaf:
    if isinstance(value, str):
        return StoredLeaf(info, LeafSpec("string", text=value))
    if not isinstance(value, int | float):
        return StoredLeaf(info, LeafSpec(_MARKERS[type(value)]))

    array = number(path, value)
    if array is None:
        problem = f"an int of {value.bit_length()} bits; most are 64" if isinstance(value, int) else ""
        raise UnsupportedFormatError(path, problem, key_path=info.key_path)

    itemsize = numpy_dtype(array.dtype).itemsize
    return StoredLeaf(info, LeafSpec("scalar", (), array.dtype, itemsize), array)
