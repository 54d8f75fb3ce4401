"""Tells paths of safetensors. Light: whoever lists a run asks it of every step."""

from __future__ import annotations

__all__ = ("INDEX_SUFFIX", "SUFFIX", "holds_tensors", "is_safetensors")

import os
from typing import Final

from penstock.handlers.formats.orbax.file_names import COMMIT_MARK, MARKS, TEMPORARY_SUFFIX
from penstock.kernel.protocols.stores import Store

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"

_OF_OTHERS: Final = MARKS - {COMMIT_MARK}
"""A bucket publishes every folder by that one, whatever is in it."""


def is_safetensors(store: Store, path: str) -> bool:
    """True if `path` is a finished safetensors file, or a folder of them that is not an Orbax checkpoint."""
    if TEMPORARY_SUFFIX in os.path.basename(path) or not holds_tensors(store, path):
        return False

    return store.kind(path) == "file" or _OF_OTHERS.isdisjoint(store.list_directory(path))


def holds_tensors(store: Store, path: str) -> bool:
    """True if there is a safetensors file at `path`, or a folder with one in it."""
    kind = store.kind(path)
    if kind == "file":
        return path.endswith(SUFFIX)

    return kind == "directory" and any(
        name.endswith((SUFFIX, INDEX_SUFFIX)) for name in store.list_directory(path)
    )
