"""Directories that others write into, by the paths of the operating system."""

from __future__ import annotations

__all__ = ("foreign_files",)

from penstock.kernel.errors import UnsupportedByStoreError
from penstock.kernel.protocols.store_capabilities import ForeignFiles
from penstock.kernel.protocols.stores import Store


def foreign_files(store: Store, path: str) -> ForeignFiles:
    """Return the store, if others can write files at `path` and below.

    Raises:
        UnsupportedByStoreError: If they cannot: the paths of the store are its own.
    """
    if not isinstance(store, ForeignFiles):
        raise UnsupportedByStoreError("let a leaf handler write files at", path, store, ForeignFiles)

    return store
