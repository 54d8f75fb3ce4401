"""A directory of steps on the medium: listing it, and reading the documents of a step. Blocking.

Source:
    ORBAX_FORMAT.md §3.1 to §3.4.
"""

from __future__ import annotations

__all__ = (
    "DELETED",
    "METRICS",
    "TREE",
    "check_root",
    "find_steps",
    "is_finished",
    "leftovers",
    "read_info",
    "read_metrics",
    "read_root_metadata",
    "seal_root_metadata",
    "write_root_metadata",
)

import errno
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.handlers.formats.common import integrity
from penstock.handlers.formats.common.checked_json import parse_object
from penstock.handlers.formats.common.temporary_names import TEMPORARY_SUFFIX
from penstock.handlers.formats.orbax.discovery.item_kinds import ROOT_FOLDER
from penstock.handlers.formats.orbax.discovery.step_dirs import (
    is_checkpoint,
    may_be_finished_step,
    read_root_metadata,
)
from penstock.handlers.formats.orbax.documents import checkpoint_metadata, commit_mark_text
from penstock.handlers.formats.orbax.documents.file_names import (
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    INTEGRITY,
    ROOT_METADATA,
)
from penstock.handlers.formats.orbax.documents.sealed_documents import SealedDocuments
from penstock.kernel.errors import CorruptCheckpointError, PathError, SpecError, StorageError
from penstock.kernel.protocols.store_capabilities import FolderListing
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Document
from penstock.steps.keep_policies import Needs, StepInfo
from penstock.steps.step_names import NameFormat

TREE: Final = "default"
"""The item of a step that holds one tree, as Orbax's manager names it."""
METRICS: Final = "metrics"
"""The item that holds the metrics, and the file in it."""

DELETED: Final = "deleted_"
"""Prefix of the name of a step that is being deleted."""


def check_root(store: Store, root: str) -> None:
    """Refuse a path that is no directory of steps but a checkpoint.

    Raises:
        PathError: If it is one.
    """
    if is_checkpoint(store, root):
        problem = "is itself a checkpoint, and no directory of steps; restore it with a Checkpointer"
        raise PathError(root, problem)


def find_steps(store: Store, root: str, names: NameFormat) -> dict[int, str]:
    """List the steps in `root`: number to directory name, ascending. Most steps are not opened.

    Only directories count, except those left by interrupted saves. Where steps are built under their own
    names, as Orbax does on object stores, unfinished ones at the end are left out.

    Returns:
        An empty dict if there is no `root`.
    """
    try:
        listed = store.list_folders(root) if isinstance(store, FolderListing) else store.list_directory(root)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return {}

        raise

    found: dict[int, str] = {}
    for name in listed:
        step = names.step(name)
        if step is not None and (step not in found or names.name(step) == name):
            found[step] = name

    steps = {step: found[step] for step in sorted(found)}
    for step in reversed(list(steps)):
        if is_finished(store, os.path.join(root, steps[step])):
            break

        del steps[step]

    return steps


def is_finished(store: Store, path: str) -> bool:
    """Whether there is a step at `path` that is not still being built.

    A damaged step is one, and so is one whose content only its own handler knows.
    """
    try:
        return may_be_finished_step(store, path)
    except CorruptCheckpointError:
        return True
    except StorageError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR}:
            return False

        raise


def leftovers(store: Store, root: str, names: NameFormat) -> list[str]:
    """Name the temporary directories in `root`, of saves and deletions that crashed or are under way."""
    found: list[str] = []
    for name in store.list_directory(root):
        before, suffix, _ = name.partition(TEMPORARY_SUFFIX)
        if suffix and names.step(before.removeprefix(DELETED)) is not None:
            found.append(name)

    return found


def read_info(store: Store, path: str, step: int, needs: Needs) -> StepInfo:
    """Read what policies look at in one step.

    Raises:
        CorruptCheckpointError: If a document is damaged.
    """
    metrics = read_metrics(store, path) if "metrics" in needs else None
    if "time" not in needs:
        return StepInfo(step, metrics=metrics)

    file = os.path.join(path, CHECKPOINT_METADATA)
    data = _read_if_there(store, file)
    about = checkpoint_metadata.decode(file, data or b"")
    return StepInfo(step, (about.committed_at_ns or about.started_at_ns or 0) / 1e9, metrics)


def read_metrics(store: Store, path: str) -> Mapping[str, Any] | None:
    """Read the metrics of the step at `path`; None if it has none.

    Raises:
        CorruptCheckpointError: If they are not a JSON object.
    """
    file = os.path.join(path, METRICS, METRICS)
    data = _read_if_there(store, file)
    names = _names_in(store, path)
    sealed = SealedDocuments.open(store, path, names)
    if data is not None:
        sealed.check(f"{METRICS}/{METRICS}", data)
        return parse_object(file, data)
    if sealed.is_sealed and METRICS in sealed.about(names).items:
        sealed.check_absent(METRICS)

    return None


def write_root_metadata(store: Store, root: str, custom_metadata: Mapping[str, Any]) -> None:
    """Write the caller's metadata into the directory of steps, unless it has some already.

    Raises:
        SpecError: If it is not JSON.
    """
    try:
        data = json.dumps({"internal_metadata": {}, "custom_metadata": dict(custom_metadata)}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"metadata cannot be written as JSON: {error}") from error

    folder = os.path.join(root, ROOT_FOLDER)
    file = os.path.join(folder, ROOT_METADATA)
    if store.kind(file) is None:
        store.make_directory(folder)
        try:
            store.write_file(file, data, create=True)
        except StorageError as error:
            if error.errno != errno.EEXIST:  # if another writer was faster, its metadata stay
                raise

            return

        seal_root_metadata(store, root)


def seal_root_metadata(store: Store, root: str) -> bool:
    """Record the digests of the metadata of a directory of steps, as they are now, unless that was done.

    A mark has the digest of the record, as that of a checkpoint has.

    Returns:
        Whether anything was written.

    Raises:
        ChecksumError: If they differ from a digest that was recorded before.
    """
    folder = os.path.join(root, ROOT_FOLDER)
    names = store.list_directory(folder) if store.kind(folder) == "directory" else ()
    documents = [name for name in names if name not in {INTEGRITY, COMMIT_MARK}]
    sealed = SealedDocuments.open(store, folder, names)
    mark = os.path.join(folder, COMMIT_MARK)
    marked = COMMIT_MARK in names and commit_mark_text.decode(store.read_file(mark)) is not None
    if not documents or (sealed.is_sealed and marked):
        return False

    record = integrity.encode((), {}, [Document(name, sealed.read(name)) for name in documents])
    store.write_file(os.path.join(folder, INTEGRITY), record)
    store.sync_directory(folder)  # before the mark that says that it is there
    store.write_file(mark, commit_mark_text.encode(record))
    store.sync_directory(folder)
    return True


def _names_in(store: Store, path: str) -> Sequence[str]:
    return store.list_directory(path) if store.kind(path) == "directory" else ()


def _read_if_there(store: Store, file: str) -> bytes | None:
    try:
        return store.read_file(file)
    except StorageError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR}:
            return None

        raise
