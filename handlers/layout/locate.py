"""Find the directory that holds the tree, or say why there is none to be read.

Source:
    ORBAX_FORMAT.md §3.3 for half-written checkpoints, §3.5 for the order in which items are tried.
"""

from __future__ import annotations

__all__ = ("Place", "locate")

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from penstock.handlers.layout import checkpoint_metadata
from penstock.handlers.layout.checkpoint_metadata import CheckpointMetadata
from penstock.handlers.layout.names import (
    CHECKPOINT_METADATA,
    LEGACY_MSGPACK,
    METADATA,
    TEMPORARY_SUFFIX,
    V1_MARK,
)
from penstock.kernel.errors import IncompleteCheckpointError, NotACheckpointError, UnsupportedFormatError
from penstock.kernel.protocols import Store

# What Orbax calls the tree: its manager, its v1 API since 0.12, and before.
_USUAL_ITEMS: Final = ("default", "state", "pytree")
_STEP: Final = re.compile(r"(.*_)?\d+")


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Where a tree lies."""

    directory: str  #: holds `_METADATA` and the arrays
    names: frozenset[str]  #: of what is in it
    checkpoint: CheckpointMetadata  #: of the checkpoint it belongs to


def locate(store: Store, path: str) -> Place:
    """Find the tree of the checkpoint at `path`: there itself, or in the item that holds it.

    Raises:
        NotACheckpointError: If there is nothing, or nothing of this layout.
        IncompleteCheckpointError: If a save was interrupted there.
        UnsupportedFormatError: If it is something that is not one tree, or a tree of another layout.
        CorruptCheckpointError: If `_CHECKPOINT_METADATA` is damaged.
    """
    _check_finished(store, path)
    names = frozenset(store.list_directory(path))
    found = CheckpointMetadata()
    if CHECKPOINT_METADATA in names:
        file = os.path.join(path, CHECKPOINT_METADATA)
        found = checkpoint_metadata.decode(file, store.read_file(file))
    if METADATA in names:
        return Place(path, names, found)

    trees = _items_with_trees(store, path, names)
    chosen: str | None = next((name for name in _USUAL_ITEMS if name in trees), None)
    if chosen is None and len(trees) == 1:
        chosen = trees[0]
    if chosen is None:
        raise _nothing_to_open(store, path, names, trees)

    directory = os.path.join(path, chosen)
    return Place(directory, frozenset(store.list_directory(directory)), found)


def _check_finished(store: Store, path: str) -> None:
    """Raise unless a directory lies at `path` that no interrupted save left."""
    parent, name = os.path.split(os.path.abspath(path))
    if TEMPORARY_SUFFIX in name:
        raise IncompleteCheckpointError(path, "a save was interrupted here; its name says so")

    kind = store.kind(path)
    if kind == "directory":
        return
    if kind == "file":
        if name.endswith(".safetensors"):
            raise UnsupportedFormatError(path, "is a safetensors file, which SafetensorsLayout reads")
        raise NotACheckpointError(path, "is a file, not a checkpoint directory")

    siblings = store.list_directory(parent) if store.kind(parent) == "directory" else ()
    left = [sibling for sibling in siblings if sibling.startswith(name + TEMPORARY_SUFFIX)]
    if left:
        raise IncompleteCheckpointError(path, f"a save was interrupted: there is only {left[0]!r}")

    raise NotACheckpointError(path, "does not exist")


def _items_with_trees(store: Store, path: str, names: frozenset[str]) -> list[str]:
    """Name the sub-directories that hold a tree. Steps of a manager are not items."""
    return [
        name
        for name in sorted(names)
        if TEMPORARY_SUFFIX not in name
        and not name.isdecimal()
        and store.kind(os.path.join(path, name, METADATA)) == "file"
    ]


def _nothing_to_open(
    store: Store, path: str, names: frozenset[str], trees: Sequence[str]
) -> NotACheckpointError | UnsupportedFormatError | IncompleteCheckpointError:
    """Say what lies at `path` instead of one tree."""
    if trees:
        example = os.path.join(path, trees[0])
        return UnsupportedFormatError(
            path, f"holds {len(trees)} trees ({', '.join(trees)}); open {example!r}"
        )

    steps = [name for name in names if _STEP.fullmatch(name) and _is_step(store, os.path.join(path, name))]
    if steps:
        latest = max(steps, key=lambda name: int(name.rpartition("_")[2]))
        example = os.path.join(path, latest)
        return UnsupportedFormatError(path, f"is a directory of {len(steps)} steps; open one: {example!r}")

    unfinished = sorted(name for name in names if TEMPORARY_SUFFIX in name)
    if unfinished:
        return IncompleteCheckpointError(path, f"a save was interrupted: there is {unfinished[0]!r}")
    if LEGACY_MSGPACK in names and store.kind(os.path.join(path, LEGACY_MSGPACK)) == "file":
        problem = (
            f"was written by an early Orbax: its tree is in the file {LEGACY_MSGPACK!r}, not in {METADATA}"
        )
        return UnsupportedFormatError(path, f"{problem}; penstock does not read these yet")
    if any(name.endswith(".safetensors") for name in names):
        return UnsupportedFormatError(path, "holds safetensors, which SafetensorsLayout reads")
    if CHECKPOINT_METADATA in names or V1_MARK in names:
        problem = f"is an Orbax checkpoint without a tree: nothing in it holds {METADATA}"
        return UnsupportedFormatError(path, f"{problem} (it has {', '.join(sorted(names))})")

    return NotACheckpointError(
        path, f"is no checkpoint: it holds neither {METADATA} nor {CHECKPOINT_METADATA}"
    )


def _is_step(store: Store, directory: str) -> bool:
    if store.kind(directory) != "directory":
        return False

    names = frozenset(store.list_directory(directory))
    return bool(names & {CHECKPOINT_METADATA, METADATA}) or bool(_items_with_trees(store, directory, names))
