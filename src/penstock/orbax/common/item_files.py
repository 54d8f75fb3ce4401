"""The files of an item that are no arrays, compared with their digests where they are read."""

from __future__ import annotations

__all__ = ("check_document", "find_text", "sealed_documents", "write_text")

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from penstock.handlers.formats.orbax.documents.file_names import CHECKPOINT_METADATA, INTEGRITY
from penstock.handlers.formats.orbax.documents.sealed_documents import SealedDocuments
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import StorageError

_LEVELS: Final = 3
"""A document may lie in its checkpoint, in an item, or in an item of an item, as that of a random key."""


async def write_text(directory: Any, name: str, text: str) -> None:
    """Write a file of an item, durably.

    Args:
        directory: Of the item; it exists.
        name: Of the file.
        text: Its content.

    Raises:
        StorageError: If the medium refuses.
    """
    await Threads(1).run(LocalStore().write_file, os.path.join(directory, name), text.encode())


def find_text(directory: Any, names: Sequence[str]) -> str | None:
    """Return the content of the first of several files that exists; None if none does. Blocking.

    Raises:
        ChecksumError: If it is not as it was written.
        MissingFileError: If it was written and is not there.
        StorageError: If the medium refuses.
    """
    sealed = sealed_documents(LocalStore(), str(directory))
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


def sealed_documents(store: LocalStore, directory: str) -> SealedDocuments:
    """Find the record of the documents in a directory: there, or in the checkpoint around it. Blocking.

    Raises:
        CorruptCheckpointError: If the record is lost or damaged.
    """
    place, prefix = os.path.abspath(directory), ""
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
