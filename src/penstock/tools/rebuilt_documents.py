"""Documents of a damaged tree, made again: the index from its nodes, `_METADATA` from the index."""

from __future__ import annotations

__all__ = ("names_of_arrays", "rebuild_index", "rebuild_structure")

import json
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, cast

from penstock.handlers.formats.orbax.file_names import DATA_FOLDER, MANIFEST, METADATA, SHARDING, STRINGS
from penstock.handlers.formats.orbax.leaf_documents import decode_shardings, decode_strings
from penstock.handlers.formats.orbax.tree_documents import array_directories
from penstock.handlers.formats.zarr import METADATA_KEYS
from penstock.handlers.ocdbt.database_reader import read_index, salvage_index
from penstock.handlers.ocdbt.database_writer import encode_index
from penstock.kernel.errors import CorruptCheckpointError, PenstockError
from penstock.kernel.protocols.stores import Store
from penstock.tools.patched_store import PatchedStore

_NODE_FILE: Final = f"{DATA_FOLDER}/{'0' * 32}"
_MAPPING: Final = 2  #: the kind of a key, as `_METADATA` records it


def rebuild_index(patched: PatchedStore, directory: str) -> str | None:
    """Let a damaged index be one of all that can still be read of it. Blocking.

    Args:
        patched: Shows the tree. Nothing is changed if the index can be read as it is.
        directory: Of the tree.

    Returns:
        What is lost, for people; empty if nothing is. None if nothing was changed.
    """
    reading = cast("Store", patched)
    try:
        read_index(reading, directory)
    except PenstockError:
        pass
    else:
        return None

    try:
        found = salvage_index(patched.inner, directory, DATA_FOLDER)
        if found is None or not found.entries:
            return None

        index = encode_index(
            found.entries.items(), node_file=_NODE_FILE, node_offset=0, uuid=bytes(16), commit_time_ns=0
        )
    except PenstockError:
        return None

    patched.replace(os.path.join(directory, MANIFEST), index.manifest)
    patched.replace(os.path.join(directory, _NODE_FILE), index.nodes)
    return "; ".join(found.problems)


def rebuild_structure(patched: PatchedStore, directory: str) -> bool:
    """Let a lost `_METADATA` be one that lists every array there is, and every string. Blocking.

    Names alone do not tell what containers there were: all become dicts, and what has no bytes is left out.

    Args:
        patched: Shows the tree.
        directory: Of the tree.

    Returns:
        Whether there is any array.
    """
    store = cast("Store", patched)
    names = frozenset(store.list_directory(directory))
    try:
        arrays = names_of_arrays(patched, directory)
    except PenstockError:
        return False

    if not arrays:
        return False

    sharded = _texts(store, directory, SHARDING, names, decode_shardings)
    types = {name: "jax.Array" if name in sharded else "np.ndarray" for name in sorted(arrays)}
    types |= dict.fromkeys(_names_of(_texts(store, directory, STRINGS, names, decode_strings)), "string")
    document = {
        "tree_metadata": dict(_entries(types)),
        "use_ocdbt": MANIFEST in names,
        "use_zarr3": METADATA_KEYS[1] in arrays.values(),
        # What is missing is taken for lost: an array of zeros might be wrong.
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    patched.replace(os.path.join(directory, METADATA), json.dumps(document).encode())
    return True


def names_of_arrays(patched: PatchedStore, directory: str) -> Mapping[str, str]:
    """Return the stored name of every array of a tree, and what its metadata is called. Blocking.

    Raises:
        PenstockError: If the index is damaged, or a directory cannot be read.
    """
    store = cast("Store", patched)
    if store.kind(os.path.join(directory, MANIFEST)) is not None:
        found = map(_array_of, read_index(store, directory))
        return {name: document for name, document in found if document}

    return {
        name: document
        for name in array_directories(store, directory)
        for document in METADATA_KEYS
        if store.kind(os.path.join(directory, name, document)) == "file"
    }


def _array_of(key: bytes) -> tuple[str, str]:
    """Return the array whose metadata has this key, and under which name; both empty for a chunk."""
    prefix, _, last = key.decode(errors="replace").rpartition("/")
    return (prefix, last) if last in METADATA_KEYS else ("", "")


def _texts(
    store: Store, directory: str, name: str, names: Collection[str], decode: Any
) -> Mapping[str, object]:
    """Read a document that the tree can do without; nothing if it is damaged or missing."""
    path = os.path.join(directory, name)
    try:
        found: Mapping[str, object] = decode(path, store.read_file(path)) if name in names else {}
    except CorruptCheckpointError:
        return {}

    return found


def _names_of(strings: Mapping[str, object], above: str = "") -> Iterator[str]:
    """Yield the stored name of every text in the document of strings: its steps, joined by slashes."""
    for step, value in strings.items():
        name = above + step.replace("~", "~0").replace("/", "~1")
        if isinstance(value, str):
            yield name
        elif isinstance(value, dict):
            yield from _names_of(cast("dict[str, object]", value), f"{name}/")


def _entries(types: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    """Yield an entry for each name. They are split at dots, unless one leaf would then lie in another."""
    paths = {name: tuple(name.split(".")) if name else () for name in types}
    above = {path[:depth] for path in paths.values() for depth in range(len(path))}
    whole = not above.isdisjoint(paths.values())
    for name, path in paths.items():
        keys = (name,) if whole else path
        steps = [{"key": key, "key_type": _MAPPING} for key in keys]
        value = {"value_type": types[name], "skip_deserialize": False}
        yield str(keys), {"key_metadata": steps, "value_metadata": value}
