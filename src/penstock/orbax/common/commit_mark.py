"""The file that says that a checkpoint is complete."""

from __future__ import annotations

__all__ = ("mark_complete",)

import os

from penstock.handlers.formats.orbax.documents import commit_mark_text
from penstock.handlers.formats.orbax.documents.file_names import COMMIT_MARK, INTEGRITY
from penstock.handlers.formats.orbax.documents.recording import record_documents
from penstock.kernel.protocols.stores import Store


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
