"""What the files of a checkpoint take on the medium."""

from __future__ import annotations

__all__ = ("bytes_on_medium",)

from collections.abc import Iterable

from penstock.kernel.protocols.store_capabilities import UntrustedFiles
from penstock.kernel.protocols.stores import Store


def bytes_on_medium(store: Store, paths: Iterable[str]) -> int:
    """Return the bytes of files, all of each, but without their holes where the store can tell. Blocking."""
    if isinstance(store, UntrustedFiles):
        return sum(store.data_sizes(paths))

    return sum([store.size(path) for path in paths])
