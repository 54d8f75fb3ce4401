"""Finds out what is at a path, in Orbax's layout: steps, a checkpoint, an item of one, or its remains.

`locate` finds the tree that a restore means, `list_items` the items of a checkpoint. Below them are the rules
that both share, and that managers and tools ask for by themselves: the kind of an item by the names in its
directory (`kind_of_item`), what is finished, and what is being deleted. All of it blocks.

Source:
    ORBAX_FORMAT.md §3.1 to §3.5, §5. Orbax's v0 API ignores the mark of a deletion in §3.5.
"""

from __future__ import annotations

__all__ = (
    "KINDS_OF_TREES",
    "KINDS_WITHOUT_ITEMS",
    "RANDOM_KEYS",
    "ROOT_FOLDER",
    "USUAL_ITEMS",
    "FoundStep",
    "ItemKind",
    "ItemPlace",
    "StepState",
    "arrays_in",
    "check_there",
    "checkpoint_at",
    "contents_of",
    "deleted_item",
    "disk_mark",
    "is_array",
    "is_checkpoint",
    "is_marked",
    "is_unfinished",
    "json_file",
    "kind_of_item",
    "latest_step",
    "list_items",
    "locate",
    "names_a_step",
    "nothing_at",
    "nothing_to_open",
    "proto_file",
    "read_root_metadata",
    "step_at",
)

import errno
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Literal, TypeAlias, final

from penstock.handlers.formats.orbax.checkpoint_documents import (
    CheckpointDocument,
    SealedDocuments,
    read_checkpoint_metadata,
)
from penstock.handlers.formats.orbax.file_names import (
    ARRAY_METADATAS,
    BESIDE_STEPS,
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    DELETION,
    ENCODED,
    INTEGRITY,
    LEGACY_MSGPACK,
    MANIFEST,
    METADATA,
    OF_A_PROCESS,
    PARTIAL_SUFFIX,
    ROOT_METADATA,
    SHARDING,
    STRINGS,
    TEMPORARY_SUFFIX,
    TIER,
    V1_MARK,
    unfinished_at,
)
from penstock.handlers.formats.untrusted import as_object, as_string, parse_object
from penstock.handlers.formats.zarr import METADATA_KEYS
from penstock.handlers.stores.publishing.paths import is_whole_bucket, path_or_url
from penstock.kernel.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    StorageError,
    UnsupportedFormatError,
)
from penstock.kernel.protocols.layouts import FoundItems
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import DISK_MARK, STAGE_RECORD, DiskMark
from penstock.kernel.words import near_steps

_ARRAY_HANDLER: Final = ".ArrayCheckpointHandler"  #: ends the recorded name of what stores one array
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
    """The form that an item is stored in."""

    TREE = auto()  #: with `_METADATA`, or with files that occur only next to it
    PACKED = auto()  #: the structure, perhaps all of it, is in a msgpack file
    NAMED = auto()  #: only the names of arrays tell the structure
    JSON = auto()
    PROTO = auto()  #: a protobuf message as text
    JAX_KEY = auto()
    NUMPY_KEY = auto()


RANDOM_KEYS: Final = {ItemKind.JAX_KEY: "jax_random_key", ItemKind.NUMPY_KEY: "np_random_key"}
"""Names of the folder with the array or tree. A folder next to it has `_metadata` appended."""

KINDS_OF_TREES: Final = frozenset({ItemKind.TREE, ItemKind.PACKED})

KINDS_WITHOUT_ITEMS: Final = KINDS_OF_TREES | frozenset(RANDOM_KEYS)
"""Directories of these kinds have no items, although their entries may look like items."""


@final
@dataclass(frozen=True, slots=True)
class ItemPlace:
    """The place of a tree, or of another item."""

    directory: str  #: holds `_METADATA` and the arrays, or the item's other files
    names: frozenset[str]  #: of what is in it
    checkpoint: CheckpointDocument  #: of the checkpoint it belongs to
    path: str  #: of the checkpoint: as it was asked for, or a step there
    kind: ItemKind
    root_metadata: Mapping[str, Any] | None  #: the caller's metadata of the directory of steps
    sealed: SealedDocuments  #: the documents in `directory`


def locate(store: Store, path: str, item: str | None = None) -> ItemPlace:
    """Find the item of the checkpoint at `path`, or of the latest finished step there.

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
    path, names = at.path, at.names
    has_documents = not names.isdisjoint({CHECKPOINT_METADATA, METADATA, V1_MARK, INTEGRITY})
    # In a store that renames, what has its final name was published.
    needs_mark = store.objects is not None
    if needs_mark and has_documents:  # first: what was not published may lack any of them
        check_marked(store, path, names)

    sealed = _sealed(store, path, names)
    recorded = sealed.about(names)
    if is_unfinished(names, recorded):
        raise IncompleteCheckpointError(path, f"a save was interrupted here; {CHECKPOINT_METADATA} says so")
    if item is None and METADATA in names and DELETION not in names:
        name, kind = "", ItemKind.TREE  # as nearly always: that file alone says so
    elif item is None:
        contents = contents_of(store, path, names)
        names = contents.names
        name, kind = _choose(store, path, contents, recorded)
    else:
        gone = deleted_item(store, path, names)
        if item == gone:
            raise NotACheckpointError(path, f"has no item {item!r} any more: it is being deleted")

        names -= {gone}
        name, kind = item, _kind_of_named(store, path, names, item)
    if needs_mark and not has_documents:
        check_marked(store, path, names)

    directory = os.path.join(path, name) if name else path
    inside = frozenset(store.list_directory(directory)) if name else names
    documents = sealed.item(name, inside) if name else sealed
    return ItemPlace(directory, inside, recorded, path, kind, root_metadata, documents)


@final
@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """The place of a checkpoint."""

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
        NotACheckpointError: If there is nothing, or a file, or an item that is being deleted.
        IncompleteCheckpointError: If its name, or that of its parent, says that a save was interrupted.
        CorruptCheckpointError: If the mark of a deletion does not say which item is deleted.
        UnsupportedFormatError: If it is a safetensors file.
    """
    at = path_or_url(path)
    parent, name = os.path.split(at)
    if TEMPORARY_SUFFIX in name:
        raise unfinished_at(store, path, path)
    if PARTIAL_SUFFIX in name:
        raise IncompleteCheckpointError(path, "is a partial save that was not finalized; its name says so")
    if TEMPORARY_SUFFIX in parent or PARTIAL_SUFFIX in os.path.basename(parent):
        raise IncompleteCheckpointError(path, "is part of a save that was interrupted; its name says so")

    kind = store.kind(path)
    if kind == "directory":
        if is_whole_bucket(at) or store.kind(os.path.join(at, CHECKPOINT_METADATA)) is not None:
            return  # it is a checkpoint, and no item of one
        is_deleting = store.kind(os.path.join(parent, DELETION)) is not None
        if is_deleting and deleted_item(store, parent, (DELETION,)) == name:
            raise NotACheckpointError(at, f"is being deleted, as {DELETION} beside it says")
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

    raise nothing_at(store, path)


def nothing_at(store: Store, path: str) -> NotACheckpointError:
    """Return the error that nothing is at `path`. If that would be a step of a run, it names those near.

    Of a run with tiers, it names these: a step may be in one of them alone.
    """
    at = path_or_url(path)
    name = os.path.basename(at)
    if not names_a_step(name):
        return NotACheckpointError(path, "does not exist")

    root = os.path.dirname(at)
    siblings = store.list_directory(root) if store.kind(root) else ()
    steps = [_step_number(sibling) for sibling in siblings if names_a_step(sibling)]
    near = f": no such step ({near_steps(_step_number(name), steps)})" if steps else ""
    tiers = _tiers_in(store, root) if TIER in siblings else ()
    if tiers:
        near += f"; the run has tiers, where it may be: {', '.join(tiers)}"
        near += ", and penstock.restore and a CheckpointManager look there, too"

    return NotACheckpointError(path, f"does not exist{near}")


def _tiers_in(store: Store, root: str) -> Sequence[str]:
    """Return the tiers that a root names; none if that is not to be read."""
    with suppress(StorageError, ValueError, TypeError, KeyError, RecursionError):
        told = json.loads(store.read_file(os.path.join(root, TIER)))
        return [str(tier) for tier in told["tiers"]] if told["root"] == path_or_url(root) else ()

    return ()


def _step_number(name: str) -> int:
    return int(name.rpartition("_")[2])


def check_marked(store: Store, path: str, names: frozenset[str]) -> None:
    """Raise unless a checkpoint, or the one around an item, was published.

    Raises:
        IncompleteCheckpointError: If it was not.
    """
    if not is_marked(store, path, names):
        problem = f"has no {COMMIT_MARK}: a save or a copy was interrupted here"
        raise IncompleteCheckpointError(path, f"{problem}; copy it with `penstock cp`, or save it again")


def list_items(store: Store, path: str) -> FoundItems:
    """Name the items of the checkpoint at `path`, or of the latest step there. Blocking.

    Raises:
        NotACheckpointError: If there is nothing.
        IncompleteCheckpointError: If a save was interrupted there.
        UnsupportedFormatError: If the checkpoint is one tree, or one document, and has no items.
        CorruptCheckpointError: If an item is missing that the checkpoint is recorded to have.
    """
    at = checkpoint_at(store, path)
    check_marked(store, at.path, at.names)
    recorded = SealedDocuments.open(store, at.path, at.names).about(at.names)
    if is_unfinished(at.names, recorded):
        raise IncompleteCheckpointError(
            at.path, f"a save was interrupted here; {CHECKPOINT_METADATA} says so"
        )
    contents = contents_of(store, at.path, at.names)
    if contents.whole not in (None, ItemKind.NAMED):
        raise UnsupportedFormatError(at.path, "is one item, and has none; restore it as a whole")

    listed = set(recorded.items) - {contents.gone}
    lost = sorted(listed - at.names)
    if lost:
        raise CorruptCheckpointError(
            os.path.join(at.path, lost[0]), f"is missing, and {CHECKPOINT_METADATA} lists it"
        )

    names = sorted({*contents.items, *listed})
    if not names:
        raise NotACheckpointError(at.path, "has no items")

    return FoundItems(at.path, {name: _kind(recorded, name) for name in names})


def _kind(recorded: CheckpointDocument, name: str) -> Literal["tree", "array"]:
    handlers = recorded.item_handlers
    handler = handlers.get(name, "") if isinstance(handlers, Mapping) else ""
    return "array" if handler.endswith(_ARRAY_HANDLER) else "tree"


def _sealed(store: Store, path: str, names: frozenset[str]) -> SealedDocuments:
    """Find the digests of the documents in `path`; those of an item may be recorded in its checkpoint."""
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
        items = ", ".join(_items_of(store, path, names)) or "none"
        raise NotACheckpointError(path, f"has no item {item!r} (its items: {items})")

    kind = _kind_of_item_at(store, directory)
    if kind is not None:
        return kind
    if _holds_arrays(store, directory, store.list_directory(directory)):
        return ItemKind.NAMED

    raise UnsupportedFormatError(directory, f"is not an item that penstock knows: it has no {METADATA}")


def _choose(
    store: Store, path: str, contents: Contents, recorded: CheckpointDocument
) -> tuple[str, ItemKind]:
    """Return the name and kind of the item to read; the name is empty if it is all of `path`."""
    names, kind, items = contents.names, contents.whole, contents.items
    if kind in KINDS_WITHOUT_ITEMS:
        return "", kind

    trees = [name for name, kind in items.items() if kind in KINDS_OF_TREES]
    usual = [name for name in USUAL_ITEMS if name in items][:1]
    if not usual:  # a lost one may have been meant
        _check_items_there(store, path, sorted(set(recorded.items) - items.keys() - {contents.gone}))
    for candidates in (usual, trees, list(items)):
        if len(candidates) == 1:
            return candidates[0], items[candidates[0]]
    if trees:
        listed = ", ".join(trees)
        raise UnsupportedFormatError(
            path, f"holds {len(trees)} trees ({listed}); name one, as in item={trees[0]!r}"
        )
    if kind is ItemKind.NAMED and LEGACY_MSGPACK in names and not is_array(store, path, LEGACY_MSGPACK):
        raise CorruptCheckpointError(os.path.join(path, LEGACY_MSGPACK), "is a directory, not a file")
    if kind is not None:
        return "", kind

    raise nothing_to_open(store, path, names, items)


def _check_items_there(store: Store, path: str, listed: Iterable[str]) -> None:
    """Raise if an item that the checkpoint lists is not there."""
    for name in listed:
        directory = os.path.join(path, name)
        kind = store.kind(directory)
        if kind != "directory":
            problem = "is missing" if kind is None else "is a file, not a directory"
            raise CorruptCheckpointError(directory, f"{problem}, and {CHECKPOINT_METADATA} lists it")


def nothing_to_open(
    store: Store, path: str, names: frozenset[str], items: Mapping[str, ItemKind]
) -> NotACheckpointError | UnsupportedFormatError | IncompleteCheckpointError:
    """Return the error that says what is at `path` instead of a tree."""
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


@final
@dataclass(frozen=True, slots=True)
class Contents:
    """The items in the directory of a checkpoint: one as a whole, or several by name."""

    names: frozenset[str]  #: of what is in it, but for an item that is being deleted
    gone: str | None  #: that item
    whole: ItemKind | None  #: of a checkpoint that is one item; None if it has items, or nothing known
    items: Mapping[str, ItemKind]  #: by name; without those that are only arrays, see `arrays_in`


def contents_of(store: Store, path: str, names: frozenset[str] | None = None) -> Contents:
    """Find the items of the checkpoint at `path`. Blocking.

    A checkpoint with items may have a document next to them. That does not make it one item.

    Args:
        store: Where it is.
        path: Of the checkpoint: no directory of steps.
        names: What is in it, if that was listed before.

    Raises:
        CorruptCheckpointError: If the mark of a deletion does not say of which item.
    """
    names = frozenset(store.list_directory(path)) if names is None else names
    gone = deleted_item(store, path, names)
    names -= {gone}
    whole = kind_of_item(store, path, names)
    items = {} if whole in KINDS_WITHOUT_ITEMS else _items_of(store, path, names)
    if items:
        whole = None
    elif whole is None and _holds_arrays(store, path, names):
        whole = ItemKind.NAMED

    return Contents(names, gone, whole, items)


def arrays_in(store: Store, path: str, name: str) -> bool | None:
    """Return whether an entry that is none of the `items` holds arrays; None if it is no directory."""
    directory = os.path.join(path, name)
    if store.kind(directory) != "directory":
        return None

    return _holds_arrays(store, directory, store.list_directory(directory))


def kind_of_item(store: Store, directory: str, names: Collection[str]) -> ItemKind | None:
    """Return the kind of item in `directory`, whose entries are `names`; None if it is not an item.

    A directory with nothing but arrays is not recognised here: see `_holds_arrays`.
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
    """Return whether it is an item of one array as Orbax wrote it before 0.11: with no `_METADATA`."""
    others = set(names) - _BESIDE_METADATA - _BESIDE_TREES - {LEGACY_MSGPACK}
    return LEGACY_MSGPACK in names and not others and is_array(store, directory, LEGACY_MSGPACK)


def _kind_of_item_at(store: Store, directory: str) -> ItemKind | None:
    """Return the kind of item at `directory`; None if it is not a directory or not an item."""
    if store.kind(directory) != "directory":
        return None

    return kind_of_item(store, directory, store.list_directory(directory))


def _items_of(store: Store, path: str, names: Collection[str]) -> dict[str, ItemKind]:
    """Return the kind of each item of the checkpoint at `path`, by name, without unfinished ones."""
    found: dict[str, ItemKind] = {}
    for name in sorted(set(names) - _BESIDE_TREES):  # each look is a question to a keeper, or to a bucket
        # Early directories of steps had their own metadata in what looks like an item.
        is_item = TEMPORARY_SUFFIX not in name and (name != ROOT_FOLDER or CHECKPOINT_METADATA in names)
        kind = _kind_of_item_at(store, os.path.join(path, name)) if is_item else None
        if kind is not None:
            found[name] = kind

    return found


def json_file(store: Store, directory: str, names: Collection[str]) -> str | None:
    """Name the file that holds a JSON item."""
    for name in _JSON_FILES:
        if name in names and store.kind(os.path.join(directory, name)) == "file":
            return name

    # Its name may be chosen; but then it is the only file.
    others = [name for name in names if name not in _BESIDE_TREES and name not in BESIDE_STEPS]
    is_one = len(others) == 1 and others[0].endswith(".json") and others[0] not in _BESIDE_METADATA
    return others[0] if is_one and store.kind(os.path.join(directory, others[0])) == "file" else None


def proto_file(names: Collection[str]) -> str | None:
    """Name the file that holds a protobuf message as text."""
    if PROTO_FILE in names:
        return PROTO_FILE

    others = [name for name in names if name not in _BESIDE_TREES]
    return others[0] if len(others) == 1 and others[0].endswith((".pbtxt", ".textproto")) else None


def _holds_arrays(store: Store, directory: str, names: Collection[str]) -> bool:
    """Return whether `directory` holds arrays in directories of their own, and none of their structure.

    If there are other documents, the one with the structure is lost, and nothing is guessed.
    """
    return _BESIDE_TREES.isdisjoint(names) and any(is_array(store, directory, name) for name in ("", *names))


def is_array(store: Store, directory: str, name: str = "") -> bool:
    """Return whether the directory `name` in `directory` holds an array."""
    return any(store.kind(os.path.join(directory, name, key)) == "file" for key in METADATA_KEYS)


_NAME: Final = "checkpointable_name"


def deleted_item(store: Store, path: str, names: Collection[str]) -> str | None:
    """Name the item that is being deleted of the checkpoint at `path`, which has these `names`.

    Raises:
        CorruptCheckpointError: If the mark does not say which.
    """
    if DELETION not in names:
        return None

    file = os.path.join(path, DELETION)
    return as_string(file, _NAME, parse_object(file, store.read_file(file)).get(_NAME))


_STEP: Final = re.compile(r"(?:(?P<prefix>.*)_)?(?P<number>[0-9]{1,18})", re.DOTALL)

_MARKS: Final = frozenset({METADATA, CHECKPOINT_METADATA, V1_MARK})

_ROOT_FILES: Final = (ROOT_METADATA, "metadata")  # the second one up to Orbax 0.8

_OWN_KEYS: Final = frozenset({"internal_metadata", "custom_metadata", "custom"})


def is_checkpoint(store: Store, path: str) -> bool:
    """Return whether the directory at `path` is itself a checkpoint, and so no directory of steps."""
    if not store.over_network:  # a list of many steps takes longer
        has_documents = any(store.kind(os.path.join(path, mark)) is not None for mark in _MARKS)
        return has_documents and is_marked(store, path)

    try:
        names = store.list_directory(path)
    except StorageError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR}:
            return False

        raise

    return not _MARKS.isdisjoint(names) and is_marked(store, path, names)


def is_marked(store: Store, path: str, names: Collection[str] | None = None) -> bool:
    """True if the checkpoint at or around `path` was published, in a store where a mark says so.

    In a bucket nothing is renamed. A save that was killed, or a copy that was interrupted, is there under
    its final name, and only a mark says that one is whole. Orbax looks for the same one on `gs://`.

    Args:
        store: Where it is. In one that renames, what has its final name is whole.
        path: A directory.
        names: Of what is in it, if that is known.
    """
    if (objects := store.objects) is None:
        return True
    above = os.path.dirname(path)
    if names is not None and COMMIT_MARK in names:
        # Each item of a step has a mark, too, which is put before that of the step.
        is_item = CHECKPOINT_METADATA not in names and names_a_step(os.path.basename(above))
        return not is_item or is_marked(store, above)

    at = path if names is None else above
    while (above := os.path.dirname(at)) not in ("", at) and not above.endswith(":"):
        if objects.marked_folders(above, [os.path.basename(at)]):
            return True

        at = above

    return names is None and is_whole_bucket(path) and store.kind(os.path.join(path, COMMIT_MARK)) is not None


def latest_step(store: Store, path: str, names: frozenset[str]) -> str | None:
    """Name the latest finished step in `path`; None if it is no directory of steps.

    Raises:
        IncompleteCheckpointError: If there are steps, none of which is finished.
        UnsupportedFormatError: If there are steps of several names, as in `a_1` and `b_2`, or the latest is
            one that penstock does not know.
    """
    if not _MARKS.isdisjoint(names):
        return None

    steps: list[tuple[int, str, str]] = []  # number, name and prefix, of what is named like a step
    for name in names:
        parts = None if TEMPORARY_SUFFIX in name else _STEP.fullmatch(name)
        if parts is not None:
            steps.append((int(parts["number"]), name, parts["prefix"] or ""))

    if not steps:
        return None
    # The folder of metadata next to the steps looks like JSON if it is damaged.
    if kind_of_item(store, path, names) not in (None, ItemKind.JSON):
        return None
    if any(name in names and _kind_of_item_at(store, os.path.join(path, name)) for name in USUAL_ITEMS):
        return None  # a step of early Orbax, which has items and no document

    latest: dict[str, str] = {}
    unfinished: list[str] = []
    unknown: list[str] = []
    for _, step, prefix in sorted(steps, reverse=True):
        if prefix in latest:
            continue
        match _state_of_step(store, os.path.join(path, step)):
            case "finished":
                latest[prefix] = step
            case "unfinished":
                unfinished.append(step)
            case "unknown" if not prefix and not is_array(store, path, step):
                unknown.append(step)
            case _:
                pass  # something else with such a name

    if len(latest) > 1:
        found = ", ".join(sorted(latest.values()))
        raise UnsupportedFormatError(path, f"holds steps of several names; open one of them: {found}")
    if unknown and "" in latest:
        problem = f"holds a later step, {unknown[0]!r}, in which there is nothing that penstock knows"
        raise UnsupportedFormatError(path, f"{problem}; open a step by its own path")
    if unfinished and not latest:
        raise IncompleteCheckpointError(path, f"no step is finished; there is {unfinished[0]!r}")

    return next(iter(latest.values()), None)


def names_a_step(name: str) -> bool:
    """Return whether a manager could have given this name to a step: `7`, `0007`, `step_7`."""
    return TEMPORARY_SUFFIX not in name and _STEP.fullmatch(name) is not None


def is_unfinished(names: Collection[str], found: CheckpointDocument) -> bool:
    """Return whether a directory under its final name is still being written, or its writer died.

    Orbax writes this way on request, for example on object stores: the document then has the start of the
    save but not its end, and there is no commit mark. Finished checkpoints before 0.12.3 have no mark
    either.
    """
    return COMMIT_MARK not in names and found.started_at_ns is not None and found.committed_at_ns is None


def read_root_metadata(store: Store, root: str) -> Mapping[str, Any] | None:
    """Read the caller's own metadata of a directory of steps; None if there is none.

    Raises:
        CorruptCheckpointError: If it is not a JSON object, or not as it was written, or a link leads out of
            `root`.
        MissingFileError: If it was written and is not there.
    """
    folder = os.path.join(root, ROOT_FOLDER)
    kind = store.kind(folder)
    if kind == "file":
        raise CorruptCheckpointError(folder, "is a file, not the directory of the metadata of all steps")
    if kind is None:
        return None
    store.check_links(root, folder)

    names = store.list_directory(folder)
    sealed = SealedDocuments.open(store, folder, names)
    for name in _ROOT_FILES:
        path = os.path.join(folder, name)
        if name not in names:
            sealed.check_absent(name)
            continue

        document = parse_object(path, sealed.read(name))
        if name != _ROOT_FILES[0] or not _OWN_KEYS.issuperset(document):
            return document

        custom = document.get("custom_metadata", document.get("custom"))
        return None if custom is None else as_object(path, "custom_metadata", custom)

    return None


StepState: TypeAlias = Literal["finished", "unfinished", "unknown", "damaged", "absent"]
"""What a directory that is named like a step is. `"unfinished"`: it is being written, or its writer died.
`"unknown"`: nothing in it is known to penstock, so that only a handler of its writer can read it; Orbax
counts every directory of the right name. `"damaged"`: a document in it cannot be read. `"absent"`: it is no
directory, or in a bucket one of steps."""


@final
@dataclass(frozen=True, slots=True)
class FoundStep:
    """A step at a path, and the state that it is in."""

    state: StepState
    problem: CorruptCheckpointError | None = None  #: of a damaged one

    @property
    def is_published(self) -> bool:
        """True if there is a step that is not being written, whether penstock can restore it or not."""
        return self.state in {"finished", "unknown", "damaged"}


def step_at(store: Store, directory: str) -> FoundStep:
    """Find out what the step at `directory` is, by names and one document. Blocking."""
    try:
        return FoundStep(_state_of_step(store, directory))
    except CorruptCheckpointError as error:
        return FoundStep("damaged", error)
    except StorageError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR}:  # it was deleted meanwhile
            return FoundStep("absent")

        raise


def _state_of_step(store: Store, directory: str) -> StepState:
    if store.kind(directory) != "directory":
        return "absent"

    names = frozenset(store.list_directory(directory))
    if store.objects is not None and COMMIT_MARK not in names:
        # A run may be named like a step, as `run_3`, and a directory of steps has no mark.
        others = {ROOT_FOLDER, *BESIDE_STEPS}
        is_root = names and all(
            names_a_step(name) or name in others or name.startswith(ENCODED) for name in names
        )
        return "absent" if is_root else "unfinished"
    if names & {CHECKPOINT_METADATA, V1_MARK}:
        about = read_checkpoint_metadata(store, directory, names)
        return "unfinished" if is_unfinished(names, about) else "finished"
    if kind_of_item(store, directory, names) or _items_of(store, directory, names):
        return "finished"
    if not names or any(TEMPORARY_SUFFIX in name for name in names):
        return "unfinished"
    if not is_array(store, directory) and _holds_arrays(store, directory, names):
        return "finished"

    folders = [os.path.join(directory, name) for name in names]
    written = any(store.kind(folder) == "directory" and _is_built_in(store, folder) for folder in folders)
    return "unfinished" if written else "unknown"


def _is_built_in(store: Store, folder: str) -> bool:
    """Return whether an item in `folder` is being written under its final name, as Orbax can."""
    names = store.list_directory(folder)
    return any(TEMPORARY_SUFFIX in name or name.startswith(OF_A_PROCESS) for name in names)


def disk_mark(store: Store, directory: str) -> DiskMark | None:
    """Return the mark of the process whose part the tree in `directory` is; None if it is whole. Blocking.

    Raises:
        CorruptCheckpointError: If the mark cannot be read.
    """
    places = [directory]
    if store.kind(os.path.join(directory, CHECKPOINT_METADATA)) is None:  # then it is an item of one
        places.append(os.path.dirname(directory))

    for place in places:
        path = os.path.join(place, DISK_MARK)
        if store.kind(path) == "file":
            return DiskMark.decoded(path, store.read_file(path))

    return None
