"""Single documents of a checkpoint that may be finished: found with their record, rewritten, marked complete.

A document of a finished checkpoint is recorded anew where it is rewritten, with all that has its digest. The
commit mark is the last of them: it says that a checkpoint is complete.
"""

from __future__ import annotations

__all__ = ("mark_complete", "record_changes", "replace_file", "rewrite_document", "sealed_documents")

import os
from dataclasses import dataclass, replace
from typing import Final, final

from penstock.handlers.formats import integrity
from penstock.handlers.formats.integrity import Digest, Integrity, digest_of, digest_of_file
from penstock.handlers.formats.orbax.checkpoint_documents import (
    SealedDocuments,
    content_of,
    digest_in_mark,
    documents_below,
    encode_mark,
    mark_without_digest,
)
from penstock.handlers.formats.orbax.file_names import (
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    DATA_FOLDER,
    INTEGRITY,
    OF_A_PROCESS,
    TEMPORARY_SUFFIX,
)
from penstock.handlers.stores.publishing.paths import path_or_url
from penstock.kernel.errors import UnsupportedByStoreError
from penstock.kernel.protocols.stores import Store, SystemFiles

_LEVELS: Final = 3
"""A document may be in its checkpoint, in an item, or in an item of an item, as that of a random key."""


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


def rewrite_document(store: Store, file: str, data: bytes) -> None:
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


def replace_file(store: Store, file: str, data: bytes) -> None:
    """Replace a file in one step, durably. Blocking."""
    store.replace_file(file, data)
    store.sync_directory(os.path.dirname(file))


@final
@dataclass(frozen=True, slots=True)
class _Record:
    """A record that is to have the digest of a document."""

    store: Store
    directory: str
    name: str  #: of the document, relative to the directory

    def leave_out(self) -> None:
        """Remove the document from the record, and the digest of the record from the commit mark."""
        mark = self._path(COMMIT_MARK)
        if self.store.kind(mark) == "file":
            text = self.store.read_file(mark)
            if digest_in_mark(text) is not None:
                self.store.write_file(mark, mark_without_digest(text))

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
            about = content_of(self._path(self.name), data)

        renewed = integrity.with_documents(path, record, {**documents, self.name: digest_of(data)}, about)
        replace_file(self.store, path, renewed)
        mark = self._path(COMMIT_MARK)
        if self.store.kind(mark) == "file":
            self.store.write_file(mark, encode_mark(renewed, self.store.read_file(mark)))

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)


def _records_of(store: Store, file: str) -> list[_Record]:
    """Return the record with the digest of a file, the record with the digest of that one, and so on.

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
            of one has that of its tree, or none.
    """
    record = os.path.join(directory, INTEGRITY)
    data = store.read_file(record) if store.kind(record) == "file" else None
    if whole:
        data = _with_all_documents(store, directory, data)
        store.write_file(record, data)
        store.sync_directory(directory)

    store.write_file(os.path.join(directory, COMMIT_MARK), encode_mark(data))
    store.sync_directory(directory)


def _with_all_documents(store: Store, directory: str, data: bytes | None) -> bytes:
    """Return the record of a directory that is being built: what it said so far, and every document.

    The data files of a database are left out: what is in them has its checksums elsewhere, or none.
    """
    path = os.path.join(directory, INTEGRITY)
    before = Integrity() if data is None else integrity.decode(path, data)
    documents: dict[str, Digest] = {}
    for name in documents_below(store, directory, before.files):
        folder = name.partition("/")[0]
        is_of_database = folder == DATA_FOLDER or folder.startswith(OF_A_PROCESS)
        if name in before.documents or not is_of_database:
            known = before.documents.get(name)
            documents[name] = known or digest_of_file(store, os.path.join(directory, name))

    about = None
    if CHECKPOINT_METADATA in documents:
        file = os.path.join(directory, CHECKPOINT_METADATA)
        content = store.read_file(file)
        about = content_of(file, content) if content else None

    return integrity.with_documents(path, data, documents, about)


def record_changes(store: Store, directory: str) -> None:
    """Make durable what others wrote into a tree that is being built, and record it anew. Blocking.

    Raises:
        UnsupportedByStoreError: If the store does not know files of others, as a bucket.
    """
    if (files := store.system_files) is None:
        raise UnsupportedByStoreError("let a leaf handler write files at", directory, store, SystemFiles)

    files.sync_tree(directory)
    path, mark = os.path.join(directory, INTEGRITY), os.path.join(directory, COMMIT_MARK)
    if store.kind(path) != "file":
        return

    data = store.read_file(path)
    documents = {
        name: digest_of_file(store, os.path.join(directory, name))
        for name in integrity.decode(path, data).documents
        if store.kind(os.path.join(directory, name)) == "file"
    }
    record = integrity.with_documents(path, data, documents)
    store.write_file(path, record)
    if store.kind(mark) == "file":
        store.write_file(mark, encode_mark(record, store.read_file(mark)))
