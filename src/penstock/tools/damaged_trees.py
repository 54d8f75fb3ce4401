"""Opens a damaged tree: a damaged document is made again, or hidden where the tree can do without it."""

from __future__ import annotations

__all__ = (
    "DamagedTree",
    "open_tree_at",
    "problem_of",
    "split_place",
)

import json
import os
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast, final

from penstock.handlers.formats.leaf_table import show_key_path
from penstock.handlers.formats.orbax.file_names import (
    ARRAY_METADATAS,
    CHECKPOINT_METADATA,
    DATA_FOLDER,
    INTEGRITY,
    MANIFEST,
    METADATA,
    SHARDING,
    STRINGS,
)
from penstock.handlers.formats.orbax.open_checkpoint import open_checkpoint
from penstock.handlers.formats.orbax.stored_checkpoint import OrbaxCheckpoint
from penstock.handlers.formats.orbax.tree_documents import ARRAY_TYPES, array_directories
from penstock.handlers.formats.orbax.tree_metadata import decode_shardings, decode_strings
from penstock.handlers.formats.zarr import METADATA_KEYS
from penstock.handlers.ocdbt.database_reader import read_index, salvage_index
from penstock.handlers.ocdbt.database_writer import encode_index
from penstock.kernel.errors import CorruptCheckpointError, PenstockError, StorageError
from penstock.kernel.protocols.leaf import KeyKind
from penstock.kernel.protocols.stores import Store
from penstock.tools.patched_store import PatchedStore
from penstock.tools.repair_report import RepairedLeaf

_NODE_FILE: Final = f"{DATA_FOLDER}/{'0' * 32}"
_MAPPING: Final = 2  #: the kind of a key, as `_METADATA` records it


def _index_rebuilt(patched: PatchedStore, directory: str) -> str | None:
    """Replace a damaged index by one of its readable entries. Blocking.

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


def _rebuild_structure(patched: PatchedStore, directory: str) -> bool:
    """Replace a lost `_METADATA` by one that lists every array and string that exists. Blocking.

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
        arrays = _names_of_arrays(patched, directory)
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


def _names_of_arrays(patched: PatchedStore, directory: str) -> Mapping[str, str]:
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
    """Yield an entry for each name. They are split at dots, unless one leaf would then be in another."""
    paths = {name: tuple(name.split(".")) if name else () for name in types}
    above = {path[:depth] for path in paths.values() for depth in range(len(path))}
    whole = not above.isdisjoint(paths.values())
    for name, path in paths.items():
        keys = (name,) if whole else path
        steps = [{"key": key, "key_type": _MAPPING} for key in keys]
        value = {"value_type": types[name], "skip_deserialize": False}
        yield str(keys), {"key_metadata": steps, "value_metadata": value}


_DISPENSABLE: Final = frozenset({CHECKPOINT_METADATA, INTEGRITY, SHARDING, STRINGS})
"""Documents without which the arrays of a checkpoint can be read all the same."""


@final
@dataclass(frozen=True, slots=True)
class DamagedTree:
    """A tree in a damaged checkpoint. Blocking.

    Args:
        store: Shows the checkpoint; what is decided is patched into it.
        path: Of the checkpoint.
        place: Of the tree in it; empty if it is the whole.
        lost: What is lost, or rebuilt, is added.
    """

    store: PatchedStore
    path: str
    place: str
    lost: list[RepairedLeaf]
    _rebuilt: set[str] = field(default_factory=set[str], init=False)

    def make_openable(self) -> None:
        """Rebuild or hide damaged documents, and leave out lost leaves, until the tree opens, or cannot."""
        while True:
            try:
                open_tree_at(cast("Store", self.store), self.path, self.place)
            except PenstockError as error:
                if not (self._hide_document(error) or self._leave_out(error) or self._rebuild(error)):
                    return
            else:
                return

    @property
    def _directory(self) -> str:
        return os.path.join(self.path, self.place) if self.place else self.path

    def _hide_document(self, error: PenstockError) -> bool:
        if not isinstance(error, CorruptCheckpointError) or not _is_dispensable(error.path):
            return False
        if not self.store.hide(error.path, error.problem):
            return False

        self._note("gone", f"{os.path.basename(error.path)}: {error.problem}")
        return True

    def _leave_out(self, error: PenstockError) -> bool:
        """Drop the leaf of an error, and arrays without any chunk, from `_METADATA`."""
        if error.key_path is None:
            return False

        file = os.path.join(self._directory, METADATA)
        try:
            document: Any = json.loads(self.store.read_file(file))
            there = _names_of_arrays(self.store, self._directory)
        except (ValueError, PenstockError):
            return False  # there may be none: old checkpoints have a msgpack file

        leaves: dict[str, Any] = document.get("tree_metadata", {})
        kept: dict[str, Any] = {}
        for name, leaf in leaves.items():
            key_path = _key_path_of(leaf)
            if key_path == error.key_path:
                self._note("gone", problem_of(error), key_path)
            elif _is_absent(leaf, there):
                self._note("gone", f"the array is listed in {METADATA} and is not there", key_path)
            else:
                kept[name] = leaf

        if len(kept) == len(leaves):
            return False

        self.store.replace(file, json.dumps({**document, "tree_metadata": kept}).encode())
        return True

    def _rebuild(self, error: PenstockError) -> bool:
        """Make a document again without which the tree cannot be opened; each once."""
        file = error.path if isinstance(error, CorruptCheckpointError | StorageError) else ""
        done = self._rebuild_index(error)
        if os.path.basename(file) != METADATA or METADATA in self._rebuilt:
            return done

        self._rebuilt.add(METADATA)
        problem = self.store.problem_of(file) or problem_of(error)
        if not _rebuild_structure(self.store, self._directory):
            return False

        found = "what is left was found by the names of arrays, without containers, None and types"
        self._note("gone", f"{METADATA}: {problem}; {found}")
        return True

    def _rebuild_index(self, error: PenstockError) -> bool:
        if MANIFEST in self._rebuilt:
            return False

        self._rebuilt.add(MANIFEST)
        problem = self.store.problem_below(self._directory) or problem_of(error)
        missing = _index_rebuilt(self.store, self._directory)
        if missing is None:
            return False
        if missing:
            self._note("gone", f"part of the index: {missing}")
        else:
            self._note("rebuilt", f"the index: {problem}")

        return True

    def _note(self, outcome: Any, problem: str, key_path: str = "") -> None:
        self.lost.append(RepairedLeaf(outcome, key_path, self.place, problem))


def open_tree_at(store: Store, path: str, place: str) -> OrbaxCheckpoint:
    """Open the tree at `place` in the checkpoint at `path`, whole or not; see `open_checkpoint`."""
    directory, item = split_place(path, place)
    return open_checkpoint(store, directory, item or None, whole=False)


def split_place(path: str, place: str) -> tuple[str, str]:
    """Return the directory above a tree, and the name of the tree in it; empty if it is the whole."""
    above, _, item = place.rpartition("/")
    return (os.path.join(path, above) if above else path), item


def problem_of(error: PenstockError) -> str:
    """Return what an error says, without the file where it says that apart."""
    return error.problem if isinstance(error, CorruptCheckpointError) else str(error)


def _is_dispensable(file: str) -> bool:
    return os.path.basename(file) in _DISPENSABLE or f"/{ARRAY_METADATAS}/" in f"{file}/"


def _key_path_of(leaf: Any) -> str:
    steps = leaf["key_metadata"]
    keys = tuple([step["key"] for step in steps])
    return show_key_path(keys, tuple([KeyKind(step["key_type"]) for step in steps]))


def _is_absent(leaf: Any, there: Container[str]) -> bool:
    value = leaf["value_metadata"]
    name = ".".join([step["key"] for step in leaf["key_metadata"]])
    return value["value_type"] in ARRAY_TYPES and not value.get("skip_deserialize") and name not in there
