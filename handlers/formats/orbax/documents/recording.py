"""Records the digests of what lies in a directory, for documents that were not made by a layout."""

from __future__ import annotations

__all__ = ("documents_below", "record_documents", "renew_record")

import os
from collections.abc import Collection, Iterator
from typing import Final

from penstock.handlers.formats.common import integrity
from penstock.handlers.formats.common.inside_paths import EnteredDirectories
from penstock.handlers.formats.common.stored_files import digest_of_file
from penstock.handlers.formats.orbax.documents import checkpoint_metadata, commit_mark_text
from penstock.handlers.formats.orbax.documents.file_names import (
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    DATA_FOLDER,
    DELETION,
    INTEGRITY,
    OF_A_PROCESS,
)
from penstock.kernel.protocols.stores import Store

_NOT_RECORDED: Final = frozenset({INTEGRITY, COMMIT_MARK, DELETION})


def documents_below(store: Store, directory: str, files: Collection[str]) -> Iterator[str]:
    """Name every file that is no data file and not in a directory with a record of its own; that is named.

    Args:
        store: Where.
        directory: Which the names are relative to.
        files: The data files.

    Raises:
        CorruptCheckpointError: If links make too many paths.
    """
    entered = EnteredDirectories(store)
    pending = [""]
    while pending:
        below = pending.pop()
        inside = os.path.join(directory, below)
        entered.enter(inside)
        names = sorted(store.list_directory(inside))
        if below and INTEGRITY in names:
            yield f"{below}/{INTEGRITY}"
            continue

        for name in names:
            full = f"{below}/{name}" if below else name
            if name in _NOT_RECORDED or name.startswith(f"{INTEGRITY}.") or full in files:
                continue
            if store.kind(os.path.join(directory, full)) == "directory":
                pending.append(full)
            else:
                yield full


def record_documents(store: Store, directory: str) -> bytes:
    """Write the record of a directory that is being built: what it said so far, and every document. Blocking.

    The data files of a database are left out: what lies in them has checksums of its own, or none.

    Args:
        store: Where.
        directory: Of a checkpoint.

    Returns:
        The content of the record.
    """
    path = os.path.join(directory, INTEGRITY)
    data = store.read_file(path) if store.kind(path) == "file" else None
    before = integrity.Integrity() if data is None else integrity.decode(path, data)
    documents = {
        name: before.documents.get(name) or digest_of_file(store, os.path.join(directory, name))
        for name in documents_below(store, directory, before.files)
        if name in before.documents or not _is_database_file(name)
    }
    about = None
    if CHECKPOINT_METADATA in documents:
        file = os.path.join(directory, CHECKPOINT_METADATA)
        content = store.read_file(file)
        about = checkpoint_metadata.content_of(file, content) if content else None

    record = integrity.with_documents(path, data, documents, about)
    store.write_file(path, record)
    store.sync_directory(directory)
    return record


def renew_record(store: Store, directory: str) -> None:
    """Record anew the documents of a tree that is being built, which changed after they were recorded."""
    path = os.path.join(directory, INTEGRITY)
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
    mark = os.path.join(directory, COMMIT_MARK)
    if store.kind(mark) == "file":
        store.write_file(mark, commit_mark_text.encode(record, store.read_file(mark)))


def _is_database_file(name: str) -> bool:
    """Whether a file, named from the directory of its tree, holds values of a database."""
    steps = name.split("/")
    return steps[0] == DATA_FOLDER or steps[0].startswith(OF_A_PROCESS)
