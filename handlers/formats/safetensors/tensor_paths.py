"""Recognises paths of safetensors. Imports little, because a list of a run asks it of every step."""

from __future__ import annotations

__all__ = ("INDEX_SUFFIX", "SUFFIX", "are_tensors", "holds_only_tensors", "holds_tensors", "is_safetensors")

import os
from collections.abc import Collection
from typing import Final

from penstock.handlers.formats.orbax.file_names import COMMIT_MARK, MARKS, TEMPORARY_SUFFIX
from penstock.kernel.protocols.stores import Store

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"

_OF_OTHERS: Final = MARKS - {COMMIT_MARK}
"""A bucket publishes every folder by that one, whatever is in it."""


def is_safetensors(store: Store, path: str) -> bool:
    """True if `path` is a finished safetensors file, or a folder of them that is not an Orbax checkpoint."""
    if TEMPORARY_SUFFIX in os.path.basename(path):
        return False

    kind = store.kind(path)
    return (
        path.endswith(SUFFIX)
        if kind == "file"
        else kind is not None and are_tensors(store.list_directory(path))
    )


def are_tensors(names: Collection[str]) -> bool:
    """True if these are the names in a folder of safetensors, and in no Orbax checkpoint."""
    return _OF_OTHERS.isdisjoint(names) and any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)


def holds_only_tensors(store: Store, path: str, beside: Collection[str] = ()) -> bool:
    """True if `path` is a safetensors file, or a folder without anything else, which may be replaced.

    Args:
        store: Where it is.
        path: Absolute.
        beside: Names of files that are written anew next to tensors.
    """
    if store.kind(path) == "file":
        return path.endswith(SUFFIX)

    names = set(store.list_directory(path)) - {COMMIT_MARK}
    others = [name for name in names if not name.endswith((SUFFIX, INDEX_SUFFIX))]
    return not others or (are_tensors(names) and set(beside).issuperset(others))


def holds_tensors(store: Store, path: str) -> bool:
    """True if there is a safetensors file at `path`, or a folder with one in it."""
    kind = store.kind(path)
    if kind == "file":
        return path.endswith(SUFFIX)

    return kind == "directory" and any(
        name.endswith((SUFFIX, INDEX_SUFFIX)) for name in store.list_directory(path)
    )
