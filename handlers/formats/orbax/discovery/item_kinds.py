"""The kind of an item, by the names in its directory.

Source:
    ORBAX_FORMAT.md §1, §5.
"""

from __future__ import annotations

__all__ = (
    "KINDS_OF_TREES",
    "KINDS_WITHOUT_ITEMS",
    "RANDOM_KEYS",
    "ROOT_FOLDER",
    "USUAL_ITEMS",
    "ItemKind",
    "holds_arrays",
    "is_array",
    "items_of",
    "json_file",
    "kind_of_item",
    "kind_of_item_at",
    "proto_file",
)

import os
from collections.abc import Collection
from enum import Enum, auto
from typing import Final

from penstock.handlers.formats.common.temporary_names import TEMPORARY_SUFFIX
from penstock.handlers.formats.common.zarr_metadata import METADATA_KEYS
from penstock.handlers.formats.orbax.documents.file_names import (
    ARRAY_METADATAS,
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    INTEGRITY,
    LEGACY_MSGPACK,
    MANIFEST,
    METADATA,
    SHARDING,
    STRINGS,
    V1_MARK,
)
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import DISK_MARK, STAGE_RECORD

_JSON_FILES: Final = ("data.json", "metadata", "metrics")  # of v1, of v0, and of both for metrics
PROTO_FILE: Final = "proto.pbtxt"
ROOT_FOLDER: Final = "metadata"
"""Other entries of a directory of steps."""

USUAL_ITEMS: Final = ("default", "state", "pytree")
"""What Orbax calls the tree: its manager, its v1 API since 0.12, and before."""


_BESIDE_METADATA: Final = frozenset({MANIFEST, SHARDING, STRINGS, ARRAY_METADATAS})
_BESIDE_TREES: Final = frozenset(
    {COMMIT_MARK, CHECKPOINT_METADATA, DISK_MARK, V1_MARK, INTEGRITY, STAGE_RECORD}
)


class ItemKind(Enum):
    """How an item is stored."""

    TREE = auto()  #: with `_METADATA`, or with files that occur only beside it
    PACKED = auto()  #: the structure, perhaps all of it, is in a msgpack file
    NAMED = auto()  #: only the names of arrays tell the structure
    JSON = auto()
    PROTO = auto()  #: a protobuf message as text
    JAX_KEY = auto()
    NUMPY_KEY = auto()


RANDOM_KEYS: Final = {ItemKind.JAX_KEY: "jax_random_key", ItemKind.NUMPY_KEY: "np_random_key"}
"""What holds the array or tree; the directory beside it has `_metadata` appended."""


KINDS_OF_TREES: Final = frozenset({ItemKind.TREE, ItemKind.PACKED})
KINDS_WITHOUT_ITEMS: Final = KINDS_OF_TREES | frozenset(RANDOM_KEYS)
"""Directories of these kinds have no items, although their entries may look like items."""


def kind_of_item(store: Store, directory: str, names: Collection[str]) -> ItemKind | None:
    """Return the kind of item in `directory`, whose entries are `names`; None if it is not an item.

    A directory with nothing but arrays is not recognised here: see `holds_arrays`.
    """
    if METADATA in names:
        return ItemKind.TREE
    for kind, name in RANDOM_KEYS.items():
        if name in names and f"{name}_metadata" in names:
            return kind
    if LEGACY_MSGPACK in names and store.kind(os.path.join(directory, LEGACY_MSGPACK)) == "file":
        return ItemKind.PACKED
    if _is_single_array(store, directory, names):
        return ItemKind.NAMED
    if not _BESIDE_METADATA.isdisjoint(names):
        return ItemKind.TREE
    if proto_file(names) is not None:
        return ItemKind.PROTO

    return ItemKind.JSON if json_file(store, directory, names) else None


def _is_single_array(store: Store, directory: str, names: Collection[str]) -> bool:
    """Whether it is an item of one array as Orbax wrote it before 0.11: with no `_METADATA`."""
    others = set(names) - _BESIDE_METADATA - _BESIDE_TREES - {LEGACY_MSGPACK}
    return LEGACY_MSGPACK in names and not others and is_array(store, directory, LEGACY_MSGPACK)


def kind_of_item_at(store: Store, directory: str) -> ItemKind | None:
    """Return the kind of item at `directory`; None if it is not a directory or not an item."""
    if store.kind(directory) != "directory":
        return None

    return kind_of_item(store, directory, store.list_directory(directory))


def items_of(store: Store, path: str, names: Collection[str]) -> dict[str, ItemKind]:
    """Return the kind of each item of the checkpoint at `path`, by name, without unfinished ones."""
    found: dict[str, ItemKind] = {}
    for name in sorted(names):
        # Early directories of steps had their own metadata in what looks like an item.
        is_item = TEMPORARY_SUFFIX not in name and (name != ROOT_FOLDER or CHECKPOINT_METADATA in names)
        kind = kind_of_item_at(store, os.path.join(path, name)) if is_item else None
        if kind is not None:
            found[name] = kind

    return found


def json_file(store: Store, directory: str, names: Collection[str]) -> str | None:
    """Name the file that holds a JSON item."""
    for name in _JSON_FILES:
        if name in names and store.kind(os.path.join(directory, name)) == "file":
            return name

    # Its name may be chosen; but then it is the only file.
    others = [name for name in names if name not in _BESIDE_TREES]
    is_one = len(others) == 1 and others[0].endswith(".json") and others[0] not in _BESIDE_METADATA
    return others[0] if is_one and store.kind(os.path.join(directory, others[0])) == "file" else None


def proto_file(names: Collection[str]) -> str | None:
    """Name the file that holds a protobuf message as text."""
    if PROTO_FILE in names:
        return PROTO_FILE

    others = [name for name in names if name not in _BESIDE_TREES]
    return others[0] if len(others) == 1 and others[0].endswith((".pbtxt", ".textproto")) else None


def holds_arrays(store: Store, directory: str, names: Collection[str]) -> bool:
    """Whether `directory` holds arrays in directories of their own, and no document of their structure.

    If there are other documents, the one with the structure is lost, and nothing is guessed.
    """
    return _BESIDE_TREES.isdisjoint(names) and any(is_array(store, directory, name) for name in ("", *names))


def is_array(store: Store, directory: str, name: str = "") -> bool:
    """Whether the directory `name` in `directory` is that of an array."""
    return any(store.kind(os.path.join(directory, name, key)) == "file" for key in METADATA_KEYS)
