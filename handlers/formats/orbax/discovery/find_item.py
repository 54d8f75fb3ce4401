"""Find the tree or other item to read, in a checkpoint, a step or a directory of steps.

Source:
    ORBAX_FORMAT.md §3.3 for half-written checkpoints, §3.5 for the order in which items are tried.
"""

from __future__ import annotations

__all__ = ("CheckpointPlace", "ItemPlace", "check_there", "checkpoint_at", "locate")

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from penstock.handlers.formats.common.temporary_names import (
    PARTIAL_SUFFIX,
    TEMPORARY_SUFFIX,
    unfinished_at,
)
from penstock.handlers.formats.orbax.discovery.item_kinds import (
    KINDS_OF_TREES,
    KINDS_WITHOUT_ITEMS,
    USUAL_ITEMS,
    ItemKind,
    holds_arrays,
    is_array,
    items_of,
    kind_of_item,
    kind_of_item_at,
)
from penstock.handlers.formats.orbax.discovery.step_dirs import (
    is_marked,
    is_unfinished,
    latest_step,
    read_root_metadata,
)
from penstock.handlers.formats.orbax.discovery.tombstone import check_not_deleted, deleted_item
from penstock.handlers.formats.orbax.documents.checkpoint_metadata import CheckpointMetadata
from penstock.handlers.formats.orbax.documents.file_names import (
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    INTEGRITY,
    LEGACY_MSGPACK,
    METADATA,
    V1_MARK,
)
from penstock.handlers.formats.orbax.documents.sealed_documents import SealedDocuments
from penstock.kernel.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    UnsupportedFormatError,
)
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.paths import is_whole_bucket, path_or_url


@final
@dataclass(frozen=True, slots=True)
class ItemPlace:
    """Where a tree, or another item, lies."""

    directory: str  #: holds `_METADATA` and the arrays, or the item's other files
    names: frozenset[str]  #: of what is in it
    checkpoint: CheckpointMetadata  #: of the checkpoint it belongs to
    path: str = ""  #: of the checkpoint: as it was asked for, or a step there
    kind: ItemKind = ItemKind.TREE
    root_metadata: Mapping[str, Any] | None = None  #: the caller's metadata of the directory of steps
    sealed: SealedDocuments | None = None  #: the documents in `directory`


def locate(store: Store, path: str, item: str | None = None) -> ItemPlace:
    """Find the item of the checkpoint at `path`; of a directory of steps, that of the latest finished one.

    Args:
        store: Where `path` is.
        path: A directory of steps, a step, an item in one, or a checkpoint that is itself a tree.
        item: Its name, where there are several; by default the one that holds the tree.

    Raises:
        NotACheckpointError: If there is nothing, or nothing of this layout, or no such item.
        IncompleteCheckpointError: If a save was interrupted there.
        UnsupportedFormatError: If it is ambiguous which item is meant.
        CorruptCheckpointError: If `_CHECKPOINT_METADATA` is damaged.
    """
    at = checkpoint_at(store, path)
    root_metadata = read_root_metadata(store, path) if at.is_step else None
    return _enter(store, at.path, at.names, item, root_metadata)


@final
@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """Where a checkpoint lies."""

    path: str  #: as it was asked for, or that of the latest step there
    names: frozenset[str]  #: of what is in it
    is_step: bool  #: whether it was found in a directory of steps


def checkpoint_at(store: Store, path: str) -> CheckpointPlace:
    """Find the checkpoint at `path`, or the latest finished one in the directory of steps there.

    Raises:
        NotACheckpointError: If there is no directory.
        IncompleteCheckpointError: If a save was interrupted there.
        UnsupportedFormatError: If there are steps of several names.
    """
    check_there(store, path)
    names = frozenset(store.list_directory(path))
    step = latest_step(store, path, names)
    if step is None:
        return CheckpointPlace(path, names, is_step=False)

    inner = os.path.join(path, step)
    return CheckpointPlace(inner, frozenset(store.list_directory(inner)), is_step=True)


def check_there(store: Store, path: str) -> None:
    """Raise unless `path` is a directory, and not the remains of an interrupted save.

    Raises:
        NotACheckpointError: If there is nothing, or a file.
        IncompleteCheckpointError: If its name, or that of its parent, says that a save was interrupted.
        UnsupportedFormatError: If it is a safetensors file.
    """
    parent, name = os.path.split(path_or_url(path))
    if TEMPORARY_SUFFIX in name:
        raise unfinished_at(store, path, path)
    if PARTIAL_SUFFIX in name:
        raise IncompleteCheckpointError(path, "is a partial save that was not finalized; its name says so")
    if TEMPORARY_SUFFIX in parent or PARTIAL_SUFFIX in os.path.basename(parent):
        raise IncompleteCheckpointError(path, "is part of a save that was interrupted; its name says so")

    kind = store.kind(path)
    if kind == "directory":
        check_not_deleted(store, path_or_url(path))
        return
    if kind == "file":
        if name.endswith(".safetensors"):
            raise UnsupportedFormatError(path, "is a safetensors file, which SafetensorsLayout reads")
        if name.endswith(".npz"):
            raise UnsupportedFormatError(path, "is an npz file, which only `penstock convert` reads")

        raise NotACheckpointError(path, "is a file, not a checkpoint directory")

    siblings = store.list_directory(parent) if store.kind(parent) == "directory" else ()
    left = [
        sibling
        for sibling in siblings
        if sibling.startswith((name + TEMPORARY_SUFFIX, name + PARTIAL_SUFFIX))
    ]
    if left:
        raise unfinished_at(store, path, os.path.join(parent, min(left)))

    raise NotACheckpointError(path, "does not exist")


def check_marked(store: Store, path: str, names: frozenset[str]) -> None:
    """Raise unless a checkpoint, or what it is an item of, was published.

    Raises:
        IncompleteCheckpointError: If it was not.
    """
    if not is_marked(store, path, names):
        problem = f"has no {COMMIT_MARK}: a save or a copy was interrupted here"
        raise IncompleteCheckpointError(path, f"{problem}; copy it with `penstock cp`, or save it again")


def _enter(
    store: Store,
    path: str,
    names: frozenset[str],
    item: str | None,
    root_metadata: Mapping[str, Any] | None = None,
) -> ItemPlace:
    """Find the item in a checkpoint, or in an item of one."""
    has_documents = not names.isdisjoint({CHECKPOINT_METADATA, METADATA, V1_MARK, INTEGRITY})
    if has_documents:  # first: what was not published may lack any of them
        check_marked(store, path, names)

    sealed = _sealed(store, path, names)
    found = sealed.about(names)
    if is_unfinished(names, found):
        raise IncompleteCheckpointError(path, f"a save was interrupted here; {CHECKPOINT_METADATA} says so")
    gone = deleted_item(store, path, names)
    names -= {gone}
    if item is None:
        name, kind = _choose(store, path, names, found, gone)
    elif item == gone:
        raise NotACheckpointError(path, f"has no item {item!r} any more: it is being deleted")
    else:
        name, kind = item, _kind_of_named(store, path, names, item)
    if not has_documents:
        check_marked(store, path, names)

    directory = os.path.join(path, name) if name else path
    inside = frozenset(store.list_directory(directory)) if name else names
    documents = sealed.item(name, inside) if name else sealed
    return ItemPlace(directory, inside, found, path, kind, root_metadata, documents)


def _sealed(store: Store, path: str, names: frozenset[str]) -> SealedDocuments:
    """Find the digests of the documents in `path`; those of an item may lie in the checkpoint around it."""
    parent, name = os.path.split(path)
    has_own = is_whole_bucket(path) or not names.isdisjoint({INTEGRITY, CHECKPOINT_METADATA})
    if has_own or store.kind(os.path.join(parent, INTEGRITY)) is None:
        return SealedDocuments.open(store, path, names)

    above = SealedDocuments.open(store, parent, frozenset(store.list_directory(parent)))
    return above.item(name, names)


def _kind_of_named(store: Store, path: str, names: frozenset[str], item: str) -> ItemKind:
    directory = os.path.join(path, item)
    there = item in names and TEMPORARY_SUFFIX not in item and store.kind(directory) == "directory"
    if not there:
        items = ", ".join(items_of(store, path, names)) or "none"
        raise NotACheckpointError(path, f"has no item {item!r} (its items: {items})")

    kind = kind_of_item_at(store, directory)
    if kind is not None:
        return kind
    if holds_arrays(store, directory, store.list_directory(directory)):
        return ItemKind.NAMED

    raise UnsupportedFormatError(directory, f"is not an item that penstock knows: it has no {METADATA}")


def _choose(
    store: Store, path: str, names: frozenset[str], found: CheckpointMetadata, gone: str | None
) -> tuple[str, ItemKind]:
    """Return the name and kind of the item to read; the name is empty if it is all of `path`."""
    kind = kind_of_item(store, path, names)
    if kind in KINDS_WITHOUT_ITEMS:
        return "", kind

    items = items_of(store, path, names)
    trees = [name for name, kind in items.items() if kind in KINDS_OF_TREES]
    usual = [name for name in USUAL_ITEMS if name in items][:1]
    if not usual:  # a lost one may have been meant
        _check_items_there(store, path, sorted(set(found.items) - items.keys() - {gone}))
    for candidates in (usual, trees, list(items)):
        if len(candidates) == 1:
            return candidates[0], items[candidates[0]]
    if trees:
        listed = ", ".join(trees)
        raise UnsupportedFormatError(
            path, f"holds {len(trees)} trees ({listed}); name one, as in item={trees[0]!r}"
        )
    if kind is not None:
        return "", kind
    if not items and holds_arrays(store, path, names):
        if LEGACY_MSGPACK in names and not is_array(store, path, LEGACY_MSGPACK):
            raise CorruptCheckpointError(os.path.join(path, LEGACY_MSGPACK), "is a directory, not a file")
        return "", ItemKind.NAMED

    raise _nothing_to_open(store, path, names, items)


def _check_items_there(store: Store, path: str, listed: Iterable[str]) -> None:
    """Raise if an item that the checkpoint lists is not there."""
    for name in listed:
        directory = os.path.join(path, name)
        kind = store.kind(directory)
        if kind != "directory":
            problem = "is missing" if kind is None else "is a file, not a directory"
            raise CorruptCheckpointError(directory, f"{problem}, and {CHECKPOINT_METADATA} lists it")


def _nothing_to_open(
    store: Store, path: str, names: frozenset[str], items: Mapping[str, ItemKind]
) -> NotACheckpointError | UnsupportedFormatError | IncompleteCheckpointError:
    """Return the error that says what lies at `path` instead of a tree."""
    unfinished = sorted(name for name in names if TEMPORARY_SUFFIX in name)
    if unfinished:
        return unfinished_at(store, path, os.path.join(path, unfinished[0]))
    if items:
        return UnsupportedFormatError(
            path, f"holds no tree; name an item, as in item={min(items)!r} (it has {', '.join(items)})"
        )
    if any(name.endswith(".safetensors") for name in names):
        return UnsupportedFormatError(path, "holds safetensors, which SafetensorsLayout reads")
    if CHECKPOINT_METADATA in names or V1_MARK in names:
        problem = f"is an Orbax checkpoint without a tree: nothing in it holds {METADATA}"
        return UnsupportedFormatError(path, f"{problem} (it has {', '.join(sorted(names))})")

    return NotACheckpointError(
        path, f"is no checkpoint: it holds neither {METADATA} nor {CHECKPOINT_METADATA}"
    )
