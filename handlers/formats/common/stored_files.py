"""What the files of a checkpoint take on the medium."""

from __future__ import annotations

__all__ = ("bytes_on_medium", "problem_of_holes")

from collections.abc import Iterable

from penstock.kernel.memory.memory_limit import FREE_BYTES, MOST_EXPANSION
from penstock.kernel.protocols.store_capabilities import UntrustedFiles
from penstock.kernel.protocols.stores import Store


def problem_of_holes(store: Store, path: str, nbytes: int) -> str:
    """Say why so many bytes are not read of the file at `path`; empty if they may be. Blocking."""
    if nbytes <= FREE_BYTES or store.kind(path) != "file":
        return ""

    stored = bytes_on_medium(store, [path])
    if nbytes <= MOST_EXPANSION * stored:
        return ""

    return f"takes {stored} bytes on the medium, and {nbytes} would be compared: it is not read"


def bytes_on_medium(store: Store, paths: Iterable[str]) -> int:
    """Return the bytes of files, all of each, but without their holes where the store can tell. Blocking."""
    if isinstance(store, UntrustedFiles):
        return sum(store.data_sizes(paths))

    return sum([store.size(path) for path in paths])
