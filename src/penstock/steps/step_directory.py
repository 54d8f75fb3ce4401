"""A directory of steps on the medium: listing it, reading the documents of a step, deleting one. Blocking.

Source:
    ORBAX_FORMAT.md §3.1 to §3.4.
"""

from __future__ import annotations

__all__ = (
    "DELETED",
    "METRICS",
    "TREE",
    "StepReader",
    "check_root",
    "delete_step",
    "find_steps",
    "leftovers",
    "list_root",
    "read_root_metadata",
    "seal_root_metadata",
    "step_at",
    "write_root_metadata",
)

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

from penstock.handlers.formats import integrity
from penstock.handlers.formats.integrity import Digest, digest_of
from penstock.handlers.formats.orbax.checkpoint_documents import (
    CheckpointDocument,
    SealedDocuments,
    check_record,
    decode_checkpoint_metadata,
    digest_in_mark,
    encode_mark,
)
from penstock.handlers.formats.orbax.discovery import (
    ROOT_FOLDER,
    is_checkpoint,
    read_root_metadata,
    step_at,
)
from penstock.handlers.formats.orbax.file_names import (
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    INTEGRITY,
    ROOT_METADATA,
    TEMPORARY_SUFFIX,
)
from penstock.handlers.formats.untrusted import parse_object
from penstock.handlers.stores.publishing.deletion import delete_checkpoint, move_checkpoint
from penstock.kernel.errors import ChecksumError, PathError, SpecError, StorageError
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import DISK_MARK, DiskMark, Document

if TYPE_CHECKING:
    from penstock.steps.keep_policies import Needs, StepInfo
    from penstock.steps.step_names import NameFormat

TREE: Final = "default"
"""The item of a step that holds one tree, as Orbax's manager names it."""
METRICS: Final = "metrics"
"""The item that holds the metrics, and the file in it."""

_METRICS_FILE: Final = f"{METRICS}/{METRICS}"

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


def list_root(store: Store, root: str) -> Sequence[str]:
    """Name the directories in `root`; none if there is no `root`.

    Where a mark makes a checkpoint, those with a mark alone.
    """
    if (objects := store.objects) is not None:
        return objects.marked_folders(root)

    try:
        return store.list_folders(root)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return ()

        raise


def find_steps(
    store: Store,
    root: str,
    names: NameFormat,
    listed: Sequence[str] | None = None,
    after: int | None = None,
) -> dict[int, str]:
    """List the steps in `root`: number to directory name, ascending. Most steps are not opened.

    Only directories count, except those left by interrupted saves. Where steps are built under their own
    names, only those with a mark; on a disk, where Orbax can do so, unfinished ones at the end are left out.

    Args:
        store: Where it is.
        root: The directory of steps; it need not exist.
        names: Names of step directories.
        listed: What `list_root` returned just now.
        after: Leave out this step and those before it.
    """
    if listed is None:
        listed = list_root(store, root) if after is None else _list_later(store, root, names, after)

    found: dict[int, str] = {}
    for name in listed:
        step = names.step(name)
        is_later = step is not None and (after is None or step > after)
        # Several directories may be one step; the one with the name that penstock writes counts.
        if step is not None and is_later and (step not in found or names.name(step) == name):
            found[step] = name

    steps = {step: found[step] for step in sorted(found)}
    # From the end: only the last steps can be unfinished, and a run has thousands of others.
    for step in reversed(list(steps)):
        if step_at(store, os.path.join(root, steps[step])).is_published:
            break

        del steps[step]

    return steps


def _list_later(store: Store, root: str, names: NameFormat, after: int) -> Sequence[str]:
    """List what is later than a step. Where each mark may take a request, only theirs are asked for."""
    if (objects := store.objects) is None:
        return list_root(store, root)
    try:
        steps = [(names.step(name), name) for name in store.list_folders(root)]
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return ()

        raise

    later = [name for step, name in steps if step is not None and step > after]
    return objects.marked_folders(root, later) if later else ()


def leftovers(listed: Sequence[str], names: NameFormat) -> list[str]:
    """Name the temporary directories, among those of a root, of saves and deletions that crashed or go on."""
    found: list[str] = []
    for name in listed:
        before, suffix, _ = name.partition(TEMPORARY_SUFFIX)
        if suffix and names.step(before.removeprefix(DELETED)) is not None:
            found.append(name)

    return found


@final
class StepReader:
    """Reads what policies look at in one step after another. Blocking.

    Args:
        store: Where the steps are.
    """

    __slots__ = ("_store",)

    def __init__(self, store: Store) -> None:
        self._store = store

    def info(self, path: str, step: int, needs: Needs) -> StepInfo:
        """Read what policies look at in the step at `path`.

        Raises:
            CorruptCheckpointError: If a document is damaged.
        """
        from penstock.steps.keep_policies import StepInfo  # who looks at a step alone needs no policies

        metrics = self.metrics(path) if "metrics" in needs else None
        if "time" not in needs:
            return StepInfo(step, metrics=metrics)

        about = self._about(path)
        time_ns = about.committed_at_ns or about.started_at_ns
        if time_ns is None:
            return StepInfo(step, metrics=metrics, is_readable=False)

        return StepInfo(step, time_ns / 1e9, metrics)

    def metrics(self, path: str) -> Mapping[str, Any] | None:
        """Read the metrics of the step at `path`; None if it has none. Opens two or three files.

        Raises:
            CorruptCheckpointError: If they are not a JSON object, or not as they were written.
        """
        file = os.path.join(path, _METRICS_FILE)
        data, expected = self._with_digest(path, _METRICS_FILE)
        if data is not None and expected is not None and digest_of(data) != expected:
            raise ChecksumError(file, "differs from what was written")
        if data is not None:
            return parse_object(file, data)
        if expected is not None:
            self._check_deleted(path)

        return None

    def is_part(self, path: str) -> bool:
        """True if the step at `path` is what one of several processes saved to a disk of its own."""
        return self._store.kind(os.path.join(path, DISK_MARK)) is not None

    def disk_mark(self, path: str) -> DiskMark | None:
        """Read whose part the step at `path` is; None if it is a whole one. Opens two or three files.

        Raises:
            CorruptCheckpointError: If it is malformed, or not as it was written.
        """
        data, expected = self._with_digest(path, DISK_MARK)
        if data is None and expected is None:
            return None

        file = os.path.join(path, DISK_MARK)
        if data is None or expected is None or digest_of(data) != expected:
            raise ChecksumError(file, "differs from what was written")

        return DiskMark.decoded(file, data)

    def _about(self, path: str) -> CheckpointDocument:
        """Read what the step at `path` says of itself. Opens two or three files.

        Raises:
            CorruptCheckpointError: If it is malformed, or not as it was written, and not rewritten by right.
        """
        data, expected = self._with_digest(path, CHECKPOINT_METADATA)
        if expected is not None and (data is None or digest_of(data) != expected):
            names = self._store.list_directory(path)
            return SealedDocuments.open(self._store, path, names).about(names)

        return decode_checkpoint_metadata(os.path.join(path, CHECKPOINT_METADATA), data or b"")

    def _with_digest(self, path: str, name: str) -> tuple[bytes | None, Digest | None]:
        """Return a document of a step and its recorded digest, each if it is there.

        A digest that fits shows that the record is right in this. Else the record itself is compared.

        Raises:
            CorruptCheckpointError: If the record is malformed, lost, or not as it was written.
        """
        record = os.path.join(path, INTEGRITY)
        data, recorded = self._store.read_files((os.path.join(path, name), record))
        expected: Digest | None = None
        if recorded is not None:
            expected = integrity.decode_documents(record, recorded).get(name)
        if data is None or expected is None:
            (mark,) = self._store.read_files((os.path.join(path, COMMIT_MARK),))
            check_record(record, recorded, None if mark is None else digest_in_mark(mark))

        return data, expected

    def _check_deleted(self, path: str) -> None:
        """Raise `MissingFileError` unless metrics that were written, and are gone, were deleted by right."""
        names = self._store.list_directory(path)
        sealed = SealedDocuments.open(self._store, path, names)
        if METRICS in sealed.about(names).items:
            sealed.check_absent(METRICS)


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
    marked = COMMIT_MARK in names and digest_in_mark(store.read_file(mark)) is not None
    if not documents or (sealed.is_sealed and marked):
        return False

    record = integrity.encode((), {}, [Document(name, sealed.read(name)) for name in documents])
    store.write_file(os.path.join(folder, INTEGRITY), record)
    store.sync_directory(folder)  # before the mark that says that it is there
    store.write_file(mark, encode_mark(record))
    store.sync_directory(folder)
    return True


def delete_step(
    store: Store, root: str, name: str, trash: str | None, *, is_wanted: Callable[[], bool] = lambda: True
) -> StorageError | None:
    """Delete the step called `name` in `root`, or move it to the folder `trash` there. Blocking.

    Does nothing if it does not exist, or if `is_wanted` says so once it is held. Of a step that is a symbolic
    link, the link is deleted.

    Returns:
        Why something of it was left under a name that is no step's; None if it is gone.

    Raises:
        InUseError: If it is being read or saved.
        StorageError: If the medium refuses. The step is still there.
        UnsupportedByStoreError: If the store cannot move it to `trash`.
    """
    path = os.path.join(root, name)
    if store.kind(path) is None:
        return None

    if trash is not None:
        return move_checkpoint(store, path, os.path.join(root, trash, name), is_wanted=is_wanted)

    hidden = os.path.join(root, f"{DELETED}{name}{TEMPORARY_SUFFIX}")
    return delete_checkpoint(store, path, hidden, is_wanted=is_wanted)
