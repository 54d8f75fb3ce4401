"""Finds out what is at a path, of any format: steps, a checkpoint, safetensors, or a folder of these.

`find_place` says what it is, and `checkpoint_path` which checkpoint is meant. `tensors_at` finds safetensors
for reading. Anything else is in Orbax's layout: `penstock.handlers.formats.orbax.discovery` goes
on inside it. All of it blocks, and reads names and few documents.
"""

from __future__ import annotations

__all__ = ("Place", "PlaceKind", "checkpoint_path", "find_place", "tensors_at")

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, final

from penstock.handlers.formats.orbax.discovery import (
    check_there,
    contents_of,
    is_checkpoint,
    latest_step,
    names_a_step,
)
from penstock.handlers.formats.orbax.file_names import TEMPORARY_SUFFIX
from penstock.handlers.formats.safetensors.tensor_paths import is_safetensors
from penstock.kernel.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    UnsupportedFormatError,
)
from penstock.kernel.protocols.layouts import Opening
from penstock.kernel.protocols.stores import Store

PlaceKind: TypeAlias = Literal["root", "checkpoint", "tensors", "folder"]


@final
@dataclass(frozen=True, slots=True)
class Place:
    """The kind of thing that is at a path."""

    path: str  #: absolute, or a URL
    kind: PlaceKind  #: "folder" is a directory that is none of the others, such as one of several runs
    steps: tuple[str, ...] = ()  #: of a root: names of its steps, ascending, finished or not


def find_place(store: Store, path: str) -> Place:
    """Say what lies at `path`, by names and few documents.

    Raises:
        NotACheckpointError: If there is nothing, or a file of another kind.
        IncompleteCheckpointError: If it is itself what an interrupted save left.
    """
    if is_safetensors(store, path):
        return Place(path, "tensors")

    check_there(store, path)
    names = frozenset(store.list_directory(path))
    steps = tuple(sorted(filter(names_a_step, names), key=_order))
    if _is_root(store, path, names):
        return Place(path, "root", steps)
    if is_checkpoint(store, path):
        return Place(path, "checkpoint")
    contents = contents_of(store, path, names)
    if contents.items:
        return Place(path, "folder" if _are_checkpoints(store, path, contents.items) else "checkpoint")
    if contents.whole is not None:
        return Place(path, "checkpoint")

    unfinished = any(names_a_step(name.partition(TEMPORARY_SUFFIX)[0]) for name in names if _is_built(name))
    return Place(path, "root" if unfinished else "folder")


def _are_checkpoints(store: Store, path: str, items: Iterable[str]) -> bool:
    """Return whether what look like items of a checkpoint are checkpoints that lie in one folder.

    Items of a step have documents of their own where an early Orbax wrote them.
    """
    is_step = names_a_step(os.path.basename(path))
    return not is_step and all(is_checkpoint(store, os.path.join(path, name)) for name in items)


def tensors_at(store: Store, path: str, item: str | None = None) -> Opening | None:
    """Find safetensors at `path`; None if there are none. They have no items, so `item` is an error then."""
    if not is_safetensors(store, path):
        return None

    # Here, because most checkpoints are not, and lists of steps ask of each of them.
    from penstock.handlers.formats.safetensors.file_set import bytes_to_decode
    from penstock.handlers.formats.safetensors.safetensors_checkpoint import open_checkpoint

    return Opening(bytes_to_decode(store, path), partial(open_checkpoint, store, path, item))


def checkpoint_path(store: Store, path: str, step: int | None = None) -> str:
    """Return the path of the checkpoint that is meant: of a root the step asked for, or the latest one.

    Raises:
        NotACheckpointError: If there is no such step, or `path` is no root and a step was asked for.
        PenstockError: What `find_place` raises.
    """
    place = find_place(store, path)
    if step is not None:
        found = [name for name in place.steps if _order(name)[0] == step]
        if not found:
            has = f"its latest is {place.steps[-1]}" if place.steps else "it is no directory of steps"
            raise NotACheckpointError(path, f"has no step {step} ({has})")

        return os.path.join(path, found[0])
    if place.kind != "root":
        return path

    latest = latest_step(store, path, frozenset(store.list_directory(path)))
    if latest is None:
        raise NotACheckpointError(path, "no step is finished")

    return os.path.join(path, latest)


def _is_root(store: Store, path: str, names: frozenset[str]) -> bool:
    try:
        return latest_step(store, path, names) is not None
    except (IncompleteCheckpointError, UnsupportedFormatError, CorruptCheckpointError):
        return not is_checkpoint(store, path)  # there are steps, and something is wrong with them


def _is_built(name: str) -> bool:
    return TEMPORARY_SUFFIX in name


def _order(name: str) -> tuple[int, str]:
    return int(name.rpartition("_")[2]), name
