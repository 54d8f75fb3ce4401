"""Paths in a checkpoint from elsewhere: they lead to places in it, and not to any number of them."""

from __future__ import annotations

__all__ = ("EnteredDirectories", "check_inside")

import os
from collections import Counter
from typing import Final, final

from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.protocols.stores import Store


def check_inside(path: str, name: str) -> None:
    """Raise unless a name, relative to a directory, leads to a place in it.

    An untrusted checkpoint must not make its reader open other files.

    Args:
        path: What says so: a document, or the directory, for the error.
        name: With slashes.

    Raises:
        CorruptCheckpointError: If it is absolute, goes up, or has a zero byte, which no file name has.
    """
    if os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
        raise CorruptCheckpointError(path, f"{name!r} leads out of the checkpoint"[:300])


@final
class EnteredDirectories:
    """Counts how often each directory is entered, by its identity. Belongs to one walk.

    Args:
        store: Where they are.
    """

    MOST: Final = 16  #: times; a directory that is linked to under several names is entered under each

    __slots__ = ("_counts", "_store")

    def __init__(self, store: Store) -> None:
        self._store = store
        self._counts: Counter[object] = Counter()

    def enter(self, path: str) -> None:
        """Count the directory at `path`. Blocking.

        Raises:
            CorruptCheckpointError: If it was entered too often.
        """
        identity = self._store.identity(path)
        if identity is None:
            return

        self._counts[identity] += 1
        if self._counts[identity] > self.MOST:
            raise CorruptCheckpointError(path, f"is reached by links in more than {self.MOST} ways")
