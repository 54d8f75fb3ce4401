"""Directories that other libraries write into, by operating system paths."""

from __future__ import annotations

__all__ = ("foreign_files",)

from penstock.kernel.errors import UnsupportedByStoreError
from penstock.kernel.protocols.store_capabilities import ForeignFiles
from penstock.kernel.protocols.stores import Store


def foreign_files(store: Store, path: str) -> ForeignFiles:
    """Return the store, if other libraries can write files at `path` and below.

    Raises:
        UnsupportedByStoreError: If the store's paths are not operating system paths.
    """
    if not isinstance(store, ForeignFiles):
        raise UnsupportedByStoreError("let a leaf handler write files at", path, store, ForeignFiles)

    return store
