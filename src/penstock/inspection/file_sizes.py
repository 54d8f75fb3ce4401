"""The disk space of a checkpoint's files, and the part that they share with others."""

from __future__ import annotations

__all__ = ("FileSizes", "files_below", "sizes_below")

import os
import stat
from dataclasses import dataclass
from typing import final

from penstock.handlers.stores.publishing.paths import scheme_of
from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.stores import Store


@final
@dataclass(frozen=True, slots=True)
class FileSizes:
    """Bytes in files, those of other programs included."""

    own_bytes: int = 0  #: in files that only this directory has
    shared_bytes: int = 0  #: in files with another name, too, as those of a step that the next one links
    n_files: int = 0

    @property
    def nbytes(self) -> int:
        """All of them."""
        return self.own_bytes + self.shared_bytes

    def __add__(self, other: FileSizes) -> FileSizes:
        return FileSizes(
            self.own_bytes + other.own_bytes,
            self.shared_bytes + other.shared_bytes,
            self.n_files + other.n_files,
        )


def sizes_below(store: Store, path: str) -> FileSizes:
    """Count the bytes of the file at `path`, or of all files below it. What disappears meanwhile is left out.

    Links are not followed. A file with several names counts as shared; in a bucket there are none.
    """
    if scheme_of(path) is not None:
        return _sizes_in_store(store, path)
    if not os.path.isdir(path):
        return _size_of_file(path)

    found = FileSizes()
    for directory, _, names in os.walk(path):
        for name in names:
            found += _size_of_file(os.path.join(directory, name))

    return found


def _size_of_file(path: str) -> FileSizes:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return FileSizes()
    except OSError as error:
        raise StorageError.of("stat", path, error) from error

    if not stat.S_ISREG(status.st_mode):
        return FileSizes(n_files=1)

    is_shared = status.st_nlink > 1
    return FileSizes(0 if is_shared else status.st_size, status.st_size if is_shared else 0, 1)


def _sizes_in_store(store: Store, path: str, *, is_listed: bool = False) -> FileSizes:
    if store.kind(path) == "file":
        return FileSizes(store.size(path), 0, 1)

    objects = None if is_listed else store.objects
    snapshot = None if objects is None else objects.snapshot(path)
    if snapshot is not None:  # of a checkpoint in a bucket: one list says all that is in it
        return _sizes_in_store(snapshot, path, is_listed=True)

    found = FileSizes()
    for name in store.list_directory(path):
        found += _sizes_in_store(store, os.path.join(path, name), is_listed=is_listed)

    return found


def files_below(store: Store, path: str) -> list[tuple[str, int, object]]:
    """Return the name, the length and the `Store.identity` of each file at or below `path`, in order.

    Blocking. One that is written anew has another identity in almost every store. Directories that are links
    are passed over: one may lead to where it is.
    """
    if store.kind(path) == "file":
        return [("", store.size(path), store.identity(path))]

    found: list[tuple[str, int, object]] = []
    for name in store.list_directory(path):
        below = os.path.join(path, name)
        if store.system_files is not None and os.path.islink(below) and os.path.isdir(below):
            continue

        there = files_below(store, below)
        found += [(os.path.join(name, inside), size, identity) for inside, size, identity in there]

    return found
