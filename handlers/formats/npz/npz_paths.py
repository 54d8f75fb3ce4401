"""Whether a path is a NumPy archive. Light."""

from __future__ import annotations

__all__ = ("SUFFIX", "is_npz")

from typing import Final

from penstock.kernel.protocols.stores import Store

SUFFIX: Final = ".npz"


def is_npz(store: Store, path: str) -> bool:
    """Whether there is a file at `path` that is named like a NumPy archive. Blocking."""
    return path.endswith(SUFFIX) and store.kind(path) == "file"
