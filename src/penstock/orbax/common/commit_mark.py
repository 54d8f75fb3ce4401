"""The file that says that a checkpoint is complete."""

from __future__ import annotations

__all__ = ("mark_complete",)

import os

from penstock.handlers.formats.orbax.documents import commit_mark_text
from penstock.handlers.formats.orbax.documents.file_names import COMMIT_MARK, INTEGRITY
from penstock.kernel.protocols.stores import Store


def mark_complete(store: Store, directory: str) -> None:
    """Write the commit mark into the directory of a checkpoint, durably. Blocking."""
    record = os.path.join(directory, INTEGRITY)
    data = store.read_file(record) if store.kind(record) == "file" else None
    store.write_file(os.path.join(directory, COMMIT_MARK), commit_mark_text.encode(data))
    store.sync_directory(directory)
