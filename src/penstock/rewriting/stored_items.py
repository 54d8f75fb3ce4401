"""Takes a stored checkpoint apart into items: trees of `StoredValue`s, and documents."""

from __future__ import annotations

__all__ = ("LEFT_OUT", "ItemsReader", "StoredItems", "stored_value", "tree_of")

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, TypeAlias, final

from anyio.from_thread import check_cancelled

from penstock.handlers.formats.npz_archive import compare_plain_members, is_npz, open_npz
from penstock.handlers.formats.orbax.checkpoint_documents import SealedDocuments
from penstock.handlers.formats.orbax.discovery import (
    KINDS_OF_TREES,
    RANDOM_KEYS,
    Contents,
    ItemKind,
    arrays_in,
    contents_of,
    json_file,
    nothing_to_open,
    proto_file,
)
from penstock.handlers.formats.orbax.file_names import CHECKPOINT_METADATA
from penstock.handlers.formats.orbax.open_checkpoint import open_checkpoint
from penstock.handlers.formats.safetensors import safetensors_checkpoint
from penstock.handlers.formats.safetensors.tensor_paths import is_safetensors
from penstock.handlers.layouts.item_parts import HANDLERS, Parts, TreePart
from penstock.handlers.layouts.item_types import Json, NumpyRandomKey, Proto, PyTree, RandomKey
from penstock.handlers.leaves.stored_value import SourceFiles, StoredValue
from penstock.kernel.errors import CorruptCheckpointError, UnsupportedFormatError
from penstock.kernel.memory.memory_limit import MOST_EXPANSION
from penstock.kernel.protocols.layouts import NamedTensors, StoredCheckpoint
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Document
from penstock.kernel.rules import Rules
from penstock.rewriting.leaf_changes import LeafChanges
from penstock.stages.locate import split_names
from penstock.stages.planning.restore_planner import check_expansion
from penstock.stages.pytree.flattening import nest
from penstock.stages.rules.application import derive

_ARRAY_HANDLER: Final = ".ArrayCheckpointHandler"
_KINDS: Final = {
    ItemKind.TREE: PyTree,
    ItemKind.PACKED: PyTree,
    ItemKind.NAMED: PyTree,
    ItemKind.JSON: Json,
    ItemKind.PROTO: Proto,
    ItemKind.JAX_KEY: RandomKey,
    ItemKind.NUMPY_KEY: NumpyRandomKey,
}


class _LeftOut(Enum):
    LEFT_OUT = auto()


LEFT_OUT: Final = _LeftOut.LEFT_OUT
"""Stands for a leaf, or for an item, that is left out."""

TakeLeaf: TypeAlias = Callable[[str, StoredCheckpoint, StoredLeaf], object]
"""From the place of an item in the checkpoint, the opened item and a leaf of it, to what is saved in place of
the leaf, or `LEFT_OUT`. The first is empty if the checkpoint is one tree."""


@final
@dataclass(frozen=True, slots=True)
class StoredItems:
    """All that a checkpoint holds."""

    tree: object  #: of all leaves: `StoredValue`s and values that are saved as they are
    parts: Parts | None  #: what belongs to which item; None if the checkpoint is one tree and has no items
    custom_metadata: Mapping[str, Any] | None
    tree_custom_metadata: object = None  #: what is stored with the tree, if there are no items


@final
@dataclass(frozen=True, slots=True)
class ItemsReader:
    """Opens checkpoints, and takes them apart. Every method is blocking, and called from a worker thread.

    No array is read, but those of an npz file, which are compared with their checksums.

    Args:
        store: Where they are.
        take: Says what becomes of each leaf.
        split: Of safetensors and npz: what separates the keys in names; None: one flat dict.
        whole: Whether every data file must be there in its whole length.
        max_expansion: How many times the bytes stored the arrays of a tree may take.
        rules: What becomes of the leaves of each tree, before `changes`; not of random keys that are items.
        changes: Other names and dtypes; random keys keep theirs.
    """

    store: Store
    take: TakeLeaf
    split: str | None = None
    whole: bool = True
    max_expansion: int = MOST_EXPANSION
    rules: Rules | None = None
    changes: LeafChanges | None = None

    def read(self, path: str, item: str | None = None) -> StoredItems:
        """Take the checkpoint at `path` apart, or one item of it.

        Raises:
            NotACheckpointError: If there is none.
            UnsupportedFormatError: If it has an item that penstock does not know.
            CorruptCheckpointError: If a document is damaged or missing.
            ExpansionError: If its arrays claim far more bytes than are stored.
        """
        if item is not None or is_npz(self.store, path) or is_safetensors(self.store, path):
            return self._one_tree(path, item)

        names = frozenset(self.store.list_directory(path))
        contents = contents_of(self.store, path, names)
        if contents.whole is not None:
            return self._one_tree(path, None)

        about = SealedDocuments.open(self.store, path, names).about(names)
        recorded = about.item_handlers
        handlers: Mapping[str, str] = recorded if isinstance(recorded, Mapping) else {}
        tree, parts = dict[str, object](), Parts()
        kinds = self._kinds(path, contents, handlers)
        if not kinds and CHECKPOINT_METADATA not in names:
            raise nothing_to_open(self.store, path, names, {})

        for name, kind in kinds.items():
            self.add(tree, parts, path, name, kind, handlers.get(name))

        return StoredItems(tree, parts, about.custom_metadata)

    def _kinds(self, path: str, contents: Contents, listed: Mapping[str, str]) -> Mapping[str, ItemKind]:
        """Return the kind of each item, by name.

        Raises:
            UnsupportedFormatError: If one is of no kind that penstock knows.
            CorruptCheckpointError: If one is missing.
        """
        kinds = dict(contents.items)
        for name in sorted((contents.names | listed.keys()) - kinds.keys() - {contents.gone}):
            directory = os.path.join(path, name)
            has_arrays = arrays_in(self.store, path, name)
            if has_arrays is None:
                if name in listed:
                    raise CorruptCheckpointError(directory, f"is missing, and {CHECKPOINT_METADATA} lists it")
                continue
            if not has_arrays:
                raise UnsupportedFormatError(
                    directory, "is an item of a kind that penstock does not know, and cannot be carried over"
                )
            kinds[name] = ItemKind.NAMED

        return kinds

    def add(
        self,
        tree: dict[str, object],
        parts: Parts,
        path: str,
        name: str,
        kind: ItemKind,
        handler: str | None,
    ) -> None:
        """Add what is written for one item of the checkpoint at `path`.

        Args:
            tree: The leaves so far, by item.
            parts: What else there is so far.
            path: Of the checkpoint.
            name: Of the item.
            kind: Of the item.
            handler: Orbax's, as it is recorded, if it is.
        """
        recorded = handler or HANDLERS[_KINDS[kind]]
        if kind in RANDOM_KEYS:
            self._add_random_key(tree, parts, path, name, kind)
        elif kind in KINDS_OF_TREES or kind is ItemKind.NAMED:
            opened = self._open(path, name)
            custom: Any = opened.tree_custom_metadata
            single = recorded.endswith(_ARRAY_HANDLER)
            tree[name] = tree_of(name, self._ruled(opened), self.take, self.changes)
            parts.tree_parts.append(TreePart((name,), name, custom, single=single))
        else:
            self._open(path, name)  # which compares the document with its digest
            directory = os.path.join(path, name)
            inside = self.store.list_directory(directory)
            file = json_file(self.store, directory, inside) if kind is ItemKind.JSON else proto_file(inside)
            assert file is not None, "the kind says that there is one"
            data = self.store.read_file(os.path.join(directory, file))
            parts.documents.append(Document(f"{name}/{file}", data))

        parts.handlers[name] = recorded
        parts.directories.append(name)

    def _add_random_key(
        self, tree: dict[str, object], parts: Parts, path: str, name: str, kind: ItemKind
    ) -> None:
        inner = RANDOM_KEYS[kind]
        place, about = f"{name}/{inner}", f"{name}/{inner}_metadata/metadata"
        self._open(path, name)  # which compares the document about it with its digest
        opened = self._open(os.path.join(path, name), inner)
        document = Document(about, self.store.read_file(os.path.join(path, about)))
        tree[name] = {inner: tree_of(place, opened, self.take)}
        parts.tree_parts.append(TreePart((name, inner), place, single=kind is ItemKind.JAX_KEY))
        parts.documents.append(document)
        parts.directories += [place, f"{place}_metadata"]

    def _open(self, path: str, item: str | None) -> StoredCheckpoint:
        if is_safetensors(self.store, path):
            return safetensors_checkpoint.open_checkpoint(self.store, path, item)
        if is_npz(self.store, path):
            archive = open_npz(self.store, path, item)
            check_expansion(self.store, archive, range(len(archive.leaves)), self.max_expansion)
            compare_plain_members(self.store, path, archive.archive, check_cancelled)
            return archive

        opened = open_checkpoint(self.store, path, item, whole=self.whole)
        check_expansion(self.store, opened, range(len(opened.leaves)), self.max_expansion)
        return opened

    def _ruled(self, opened: StoredCheckpoint) -> StoredCheckpoint:
        return opened if self.rules is None else derive(self.rules, opened)

    def _one_tree(self, path: str, item: str | None) -> StoredItems:
        opened = self._open(path, item)
        if self.split is not None and isinstance(opened, NamedTensors):
            opened = split_names(opened, self.split)

        tree = tree_of(item or "", self._ruled(opened), self.take, self.changes)
        return StoredItems(tree, None, opened.custom_metadata, opened.tree_custom_metadata)


def tree_of(
    item: str, opened: StoredCheckpoint, take: TakeLeaf, changes: LeafChanges | None = None
) -> object:
    """Return the tree of an opened item, without the leaves that are `LEFT_OUT`."""
    if changes is None:
        taken = [(leaf.info, take(item, opened, leaf)) for leaf in opened.leaves]
    else:
        named = changes.named(opened.path, opened.leaves)
        taken = [(info, changes.cast(opened.path, info, take(item, opened, leaf))) for info, leaf in named]

    kept = [(info, value) for info, value in taken if value is not LEFT_OUT]
    return nest([info for info, _ in kept], [value for _, value in kept])


def stored_value(files: SourceFiles, opened: StoredCheckpoint, leaf: StoredLeaf) -> object:
    """Return a `StoredValue`, or another value that is saved as the leaf is stored."""
    match leaf.spec.typestr:
        case "None" | "NamedTuple":
            return None
        case "Dict":
            return {}
        case "List":
            return []
        case "Tuple":
            return ()
        case _:
            return StoredValue(files, opened, leaf) if leaf.spec.text is None else leaf.spec.text
