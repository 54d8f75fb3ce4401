"""What a path is: a directory of steps, a checkpoint, safetensors, or a folder of these."""

from __future__ import annotations

__all__ = ("Place", "PlaceKind", "checkpoint_path", "find_place", "store_of")

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from penstock.handlers.formats.orbax.discovery import (
    check_there,
    holds_arrays,
    is_checkpoint,
    items_of,
    kind_of_item,
    latest_step,
    names_a_step,
)
from penstock.handlers.formats.orbax.file_names import TEMPORARY_SUFFIX
from penstock.handlers.formats.safetensors.tensor_paths import is_safetensors
from penstock.kernel.config.config import Config
from penstock.kernel.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    UnsupportedFormatError,
)
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.paths import path_or_url
from penstock.stores.store_finder import StoreFinder

PlaceKind: TypeAlias = Literal["root", "checkpoint", "tensors", "folder"]


@final
@dataclass(frozen=True, slots=True)
class Place:
    """What lies at a path."""

    path: str  #: absolute, or a URL
    kind: PlaceKind  #: "folder" is a directory that is none of the others, such as one of several runs
    steps: tuple[str, ...] = ()  #: of a root: names of its steps, ascending, finished or not


def store_of(path: str | os.PathLike[str]) -> tuple[Store, str]:
    """Return the store that `path` lies in, by the process's configuration, and the path as it names it."""
    final_path = path_or_url(path)
    return StoreFinder(None, Config.load().store).at(final_path), final_path


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
    if is_checkpoint(store, path) or kind_of_item(store, path, names):
        return Place(path, "checkpoint")
    if items := items_of(store, path, names):
        return Place(path, "folder" if _are_checkpoints(store, path, items) else "checkpoint")
    if holds_arrays(store, path, names):
        return Place(path, "checkpoint")

    unfinished = any(names_a_step(name.partition(TEMPORARY_SUFFIX)[0]) for name in names if _is_built(name))
    return Place(path, "root" if unfinished else "folder")


def _are_checkpoints(store: Store, path: str, items: Iterable[str]) -> bool:
    """Whether what look like items of a checkpoint are checkpoints that lie in one folder.

    Items of a step have documents of their own where an early Orbax wrote them.
    """
    is_step = names_a_step(os.path.basename(path))
    return not is_step and all(is_checkpoint(store, os.path.join(path, name)) for name in items)


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
