"""Finds and removes what processes left that ended in the middle of a save or a deletion."""

from __future__ import annotations

__all__ = ("GcReport", "collect_in_bucket", "gc")

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from penstock.checkpointer.checkpointer import Path
from penstock.checkpointer.parts import config_and_regulator
from penstock.config.config import Config
from penstock.handlers.formats.orbax.discovery import names_a_step
from penstock.handlers.formats.orbax.file_names import TEMPORARY_SUFFIX
from penstock.handlers.stores.publishing.deletion import remove_abandoned
from penstock.handlers.stores.publishing.paths import path_or_url
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import InUseError, NotACheckpointError, StorageError
from penstock.kernel.pipeline.failures import short_traceback
from penstock.kernel.protocols.stores import ObjectStore, Store
from penstock.steps.step_directory import DELETED
from penstock.stores.store_finder import StoreFinder

_Left: TypeAlias = Literal["removed", "published", "kept", "unmarked"]


@final
@dataclass(frozen=True, slots=True)
class GcReport:
    """The findings of `gc`. Each path is of a checkpoint, or of the directory in which one was built."""

    path: str
    removed: tuple[str, ...] = ()  #: what was no checkpoint, and is gone
    published: tuple[str, ...] = ()
    """Checkpoints in a bucket of which only the mark was missing. They are there now."""
    kept: tuple[str, ...] = ()  #: where somebody is at work, or may be
    unmarked: tuple[str, ...] = ()
    """In a bucket, what is named like a step and has no `commit_success.txt`, so it is no checkpoint, and
    that no save claims: an interrupted copy, or a save whose claim was removed. It is there still."""


@short_traceback
async def gc(
    path: Path,
    *,
    older_than_s: float | None = None,
    unmarked: bool = False,
    config: Config | Path | None = None,
    store: Store | None = None,
) -> GcReport:
    """Remove what savers and deleters left that ended before they were done.

    Looks at `path` itself and right below it. Checkpoints are not touched, nor is what a live process does.
    A save to the same path, or a manager that opens the directory, does the same for itself.

    Args:
        path: A checkpoint's path, or a directory of checkpoints, such as one of steps.
        older_than_s: In a bucket, what a process of another machine claims counts as left once that was not
            renewed for so many seconds, by the server's clock; by default when its lease is over. A process
            that is at work after all finds out, and publishes nothing.
        unmarked: Whether `GcReport.unmarked` is removed, too. Nothing tells whether another program is about
            to complete it.
        config: As for `Checkpointer`.
        store: Where it is; by default where its path says, on a disk or in a bucket.

    Raises:
        NotACheckpointError: If neither the path nor anything that was left there exists.
        StorageError: If the medium refuses. What was removed until then is gone.

    Cancellation:
        Returns when what was being removed is gone.
    """
    final = path_or_url(path)
    options, _ = config_and_regulator(config, {})
    at = StoreFinder(store, options.store).at(final)
    return await Threads(1).run(_collect, at, final, older_than_s, unmarked)


def _collect(store: Store, path: str, older_than_s: float | None, unmarked: bool) -> GcReport:
    if (objects := store.objects) is not None:
        found = collect_in_bucket(objects, path, older_than_s, unmarked=unmarked)
    else:
        found = _collect_by_name(store, path)
    if not found and store.kind(path) is None:
        raise NotACheckpointError(path, "does not exist")

    return GcReport(path, *[_which(found, became) for became in ("removed", "published", "kept", "unmarked")])


def collect_in_bucket(
    store: ObjectStore, path: str, older_than_s: float | None, *, unmarked: bool
) -> Mapping[str, _Left]:
    """Collect in a store that finds remains itself. Blocking. Returns the outcome for each.

    Only what is named like a step is looked at for a mark, so that a folder of runs is never taken for junk;
    and what has a checkpoint anywhere below it is none.
    """
    found: dict[str, _Left] = dict(store.collect(path, older_than_s))
    for place in _unmarked(store, path):
        found[place] = "removed" if unmarked else "unmarked"
        if unmarked:
            store.remove_tree(place)

    return found


def _unmarked(store: ObjectStore, path: str) -> list[str]:
    at, name = os.path.split(path)
    if names_a_step(name):
        if store.marked_folders(at, [name]):
            return []
        if store.is_unmarked(path):
            return [path]

    try:
        listed = store.list_folders(path)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return []

        raise

    steps = [name for name in listed if names_a_step(name)]
    marked = frozenset(store.marked_folders(path, steps)) if steps else frozenset[str]()
    places = [os.path.join(path, name) for name in steps if name not in marked]
    return [place for place in places if store.is_unmarked(place)]


def _collect_by_name(store: Store, path: str) -> Mapping[str, _Left]:
    """Remove the directories in which saves build and deletions hide, but for those that are held."""
    found: dict[str, _Left] = {}
    for place in (
        *_temporary(store, os.path.dirname(path), os.path.basename(path)),
        *_temporary(store, path),
    ):
        try:
            remove_abandoned(store, place)
        except InUseError:
            found[place] = "kept"
        else:
            found[place] = "removed"

    return found


def _temporary(store: Store, directory: str, of: str | None = None) -> list[str]:
    """Return the places in a directory where something is built, or hidden; of one name alone."""
    try:
        names = store.list_folders(directory)
    except StorageError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR}:
            return []

        raise

    wanted = None if of is None else (of, f"{DELETED}{of}")
    return [
        os.path.join(directory, name)
        for name in sorted(names)
        if TEMPORARY_SUFFIX in name and (wanted is None or name.partition(TEMPORARY_SUFFIX)[0] in wanted)
    ]


def _which(found: Mapping[str, _Left], became: str) -> tuple[str, ...]:
    return tuple([path for path, each in found.items() if each == became])
