"""The files of an item that are no arrays: compared where they are read, recorded anew where rewritten.

The last of them says that a checkpoint is complete.
"""

from __future__ import annotations

__all__ = (
    "bucket_url",
    "check_document",
    "find_text",
    "handler_path",
    "is_there",
    "mark_complete",
    "path_as_given",
    "path_text",
    "place_of",
    "replace_file",
    "rewrite_document",
    "sealed_documents",
    "store_at",
    "write_bytes",
    "write_text",
)

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final, final

from penstock.handlers.formats.common import integrity
from penstock.handlers.formats.common.integrity import digest_of
from penstock.handlers.formats.common.temporary_names import TEMPORARY_SUFFIX
from penstock.handlers.formats.orbax.documents import checkpoint_metadata, commit_mark_text
from penstock.handlers.formats.orbax.documents.file_names import CHECKPOINT_METADATA, COMMIT_MARK, INTEGRITY
from penstock.handlers.formats.orbax.documents.recording import record_documents
from penstock.handlers.formats.orbax.documents.sealed_documents import SealedDocuments
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.config.config import Config
from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.paths import BUCKETS, absolute_path, bucket_of, path_or_url
from penstock.stores.store_finder import StoreFinder

_LEVELS: Final = 3
"""A document may lie in its checkpoint, in an item, or in an item of an item, as that of a random key."""


async def write_text(directory: Any, name: str, text: str) -> None:
    """Write a file of an item, durably; see `rewrite_document`.

    Args:
        directory: Of the item; it exists.
        name: Of the file.
        text: Its content.

    Raises:
        StorageError: If the medium refuses.
    """
    await write_bytes(os.path.join(directory, name), text.encode())


async def write_bytes(file: str, data: bytes) -> None:
    """Write a file durably, in a worker thread; see `rewrite_document`.

    Raises:
        StorageError: If the medium refuses.
    """
    await Threads(1).run(rewrite_document, LocalStore(), file, data)


def find_text(directory: Any, names: Sequence[str]) -> str | None:
    """Return the content of the first of several files that exists; None if none does. Blocking.

    Raises:
        ChecksumError: If it is not as it was written.
        MissingFileError: If it was written and is not there.
        StorageError: If the medium refuses.
    """
    sealed = sealed_documents(store_at(directory), path_text(directory))
    for name in names:
        try:
            return sealed.read(name).decode()
        except StorageError as error:
            if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
                raise

    return None


def check_document(directory: Any, name: str) -> None:
    """Compare a file with its digest, for a reader that does not, if it is there and has one. Blocking.

    Raises:
        ChecksumError: If it is not as it was written.
        MissingFileError: If it was written and is not there.
        StorageError: If the medium refuses.
    """
    find_text(directory, [name])


def sealed_documents(store: Store, directory: str) -> SealedDocuments:
    """Find the record of the documents in a directory: there, or in the checkpoint around it. Blocking.

    Raises:
        CorruptCheckpointError: If the record is lost or damaged.
    """
    place, prefix = path_or_url(directory), ""
    for _ in range(_LEVELS):
        if store.kind(place) != "directory":
            break

        names = store.list_directory(place)
        if INTEGRITY in names or CHECKPOINT_METADATA in names:
            sealed = SealedDocuments.open(store, place, names)
            return replace(sealed, directory=directory, prefix=prefix)

        place, name = os.path.split(place)
        prefix = f"{name}/{prefix}"

    return SealedDocuments(store, directory)


def rewrite_document(store: LocalStore, file: str, data: bytes) -> None:
    """Write a document durably, and record its digest anew where documents have one. Blocking.

    A document of a finished checkpoint is replaced in one step. While that goes on, no digest of it is
    recorded, so that the checkpoint can be restored at each moment, also after a crash.

    Raises:
        ChecksumError: If a record is not as it was written; then nothing is.
        StorageError: If the medium refuses.
    """
    if TEMPORARY_SUFFIX in file:
        store.write_file(file, data)  # of a checkpoint that is being built: it is recorded in the end
        return

    records = _records_of(store, file)
    for record in reversed(records):
        record.leave_out()

    replace_file(store, file, data)
    for record in records:
        record.renew()


def replace_file(store: LocalStore, file: str, data: bytes) -> None:
    """Replace a file in one step, durably. Blocking."""
    new = file + TEMPORARY_SUFFIX
    store.write_file(new, data)
    os.replace(new, file)
    store.sync_directory(os.path.dirname(file))


@final
@dataclass(frozen=True, slots=True)
class _Record:
    """A record that is to have the digest of a document."""

    store: LocalStore
    directory: str
    name: str  #: of the document, relative to the directory

    def leave_out(self) -> None:
        """Let the record say nothing of the document, and the commit mark nothing of the record."""
        mark = self._path(COMMIT_MARK)
        if self.store.kind(mark) == "file":
            text = self.store.read_file(mark)
            if commit_mark_text.decode(text) is not None:
                self.store.write_file(mark, commit_mark_text.without_digest(text))

        data = self.store.read_file(self._path(INTEGRITY))
        left = integrity.without_documents(self._path(INTEGRITY), data, self.name.__eq__)
        replace_file(self.store, self._path(INTEGRITY), left)

    def renew(self) -> None:
        """Record the digest of the document as it is now, and that of the record."""
        path = self._path(INTEGRITY)
        record, data = self.store.read_file(path), self.store.read_file(self._path(self.name))
        found = integrity.decode(path, record)
        documents, about = dict(found.documents), None
        if self.name == CHECKPOINT_METADATA:
            # It need not list the items that were deleted, and what says so is replaced by what it says now.
            gone = SealedDocuments(self.store, self.directory, found).deleted_items()
            documents = {name: one for name, one in documents.items() if name.partition("/")[0] not in gone}
            about = checkpoint_metadata.content_of(self._path(self.name), data)

        renewed = integrity.with_documents(path, record, {**documents, self.name: digest_of(data)}, about)
        replace_file(self.store, path, renewed)
        mark = self._path(COMMIT_MARK)
        if self.store.kind(mark) == "file":
            self.store.write_file(mark, commit_mark_text.encode(renewed, self.store.read_file(mark)))

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)


def _records_of(store: LocalStore, file: str) -> list[_Record]:
    """Return the record that is to have the digest of a file, the one that has that record's, and so on.

    Raises:
        ChecksumError: If one of them is not as it was written.
    """
    found: list[_Record] = []
    place, name = os.path.split(os.path.abspath(file))
    for _ in range(_LEVELS + 1):  # the record of a tree has its digest in that of the checkpoint
        if store.kind(place) != "directory":
            break

        names = store.list_directory(place)
        if INTEGRITY in names:
            sealed = SealedDocuments.open(store, place, names)
            if not (name in sealed.recorded.documents or (sealed.is_sealed and not found)):
                break
            if found:
                sealed.check(name, store.read_file(os.path.join(place, name)))

            found.append(_Record(store, place, name))
            name = INTEGRITY

        place, above = os.path.split(place)
        name = f"{above}/{name}"

    return found


def mark_complete(store: Store, directory: str, *, whole: bool) -> None:
    """Write the commit mark into the directory of a checkpoint, durably. Blocking.

    Args:
        store: Where.
        directory: In which everything else is written.
        whole: Whether it is a checkpoint, which gets a record of the digests of all its documents; an item
            of one has that of its own tree, or none.
    """
    record = os.path.join(directory, INTEGRITY)
    if whole:
        data: bytes | None = record_documents(store, directory)
    else:
        data = store.read_file(record) if store.kind(record) == "file" else None

    store.write_file(os.path.join(directory, COMMIT_MARK), commit_mark_text.encode(data))
    store.sync_directory(directory)


def handler_path(path: str | os.PathLike[str]) -> Any:
    """Return the absolute local path, as handlers written for Orbax expect it.

    That is an `etils.epath.Path` where etils is installed (those have `rmtree`, `glob`, `as_posix`, and more
    than pathlib's), and a `pathlib.Path` elsewhere.

    Raises:
        PathError: If it names no local path.
    """
    return path_as_given(absolute_path(path))


def place_of(path: str | os.PathLike[str]) -> Any:
    """Return a path as `handler_path` does, for a handler that writes no files: it may be in a bucket.

    Raises:
        PathError: If it names neither a local path nor a place in a bucket.
    """
    return path_as_given(path_or_url(path))


def bucket_url(path: str | os.PathLike[str]) -> str | None:
    """Return the URL that a path names in a bucket; None if it names no bucket.

    Raises:
        PathError: If it is a URL of a bucket that says more than a name.
    """
    text = path_text(path)
    if text.partition(":")[0] not in BUCKETS:
        return None

    found = path_or_url(text)
    return None if bucket_of(found) is None else found


def path_as_given(path: str | os.PathLike[str]) -> Any:
    """Return a path of the same kind as `handler_path`, which stays relative if it is."""
    try:
        etils: Any = import_module("etils.epath")
    except ImportError:
        return Path(path)

    return etils.Path(path)


def path_text(path: Any) -> str:
    """Return a path of any kind as text."""
    return os.fsdecode(path)


def store_at(path: Any) -> Store:
    """Return the store of a path, on a disk or in a bucket. Connects to nothing.

    Raises:
        PathError: If it is a URL of a bucket that says more than a name.
    """
    url = bucket_url(path)
    return LocalStore() if url is None else StoreFinder(None, Config.load().store).at(url)


def is_there(path: Any) -> bool:
    """Whether something lies at a path. Blocking."""
    return store_at(path).kind(path_text(path)) is not None
