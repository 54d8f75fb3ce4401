"""Paths as handlers get them, and the files of an item that are no arrays."""

from __future__ import annotations

__all__ = (
    "bucket_url",
    "check_document",
    "find_text",
    "handler_path",
    "is_there",
    "path_as_given",
    "path_text",
    "place_of",
    "store_at",
    "write_bytes",
    "write_text",
)

import errno
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock import handlers as built_in
from penstock import kernel
from penstock.embedding import document_files, paths
from penstock.embedding import store_at as store_of_place
from penstock.errors import StorageError


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
    await kernel.Threads(1).run(document_files.rewrite_document, built_in.LocalStore(), file, data)


def find_text(directory: Any, names: Sequence[str]) -> str | None:
    """Return the content of the first of several files that exists; None if none does. Blocking.

    Raises:
        ChecksumError: If it is not as it was written.
        MissingFileError: If it was written and is not there.
        StorageError: If the medium refuses.
    """
    sealed = document_files.sealed_documents(store_at(directory), path_text(directory))
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


def handler_path(path: str | os.PathLike[str]) -> Any:
    """Return the absolute local path, as handlers written for Orbax expect it.

    That is an `etils.epath.Path` where etils is installed (those have `rmtree`, `glob`, `as_posix`, and more
    than pathlib's), and a `pathlib.Path` elsewhere.

    Raises:
        PathError: If it names no local path.
    """
    return path_as_given(paths.absolute_path(path))


def place_of(path: str | os.PathLike[str]) -> Any:
    """Return a path as `handler_path` does, for a handler that writes no files: it may be in a bucket.

    Raises:
        PathError: If it names neither a local path nor a place in a bucket.
    """
    return path_as_given(paths.path_or_url(path))


def bucket_url(path: str | os.PathLike[str]) -> str | None:
    """Return the URL that a path names in a bucket; None if it names no bucket.

    Raises:
        PathError: If it is a URL of a bucket that says more than a name.
    """
    text = path_text(path)
    if not paths.is_scheme(text.partition(":")[0]):
        return None

    found = paths.path_or_url(text)
    return None if paths.scheme_of(found) is None else found


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


def store_at(path: Any, *, snapshot: bool = False) -> kernel.Store:
    """Return the store of a path, on a disk or in a bucket; or a snapshot, which alone connects to it.

    Raises:
        PathError: If it is a URL of a bucket that says more than a name.
    """
    url = bucket_url(path)
    return built_in.LocalStore() if url is None else store_of_place(url, snapshot=snapshot)


def is_there(path: Any) -> bool:
    """Return whether there is something at a path. Blocking."""
    return store_at(path).kind(path_text(path)) is not None
