"""Directories that a walk has entered: links between a few of them make any number of paths."""

from __future__ import annotations

__all__ = ("EnteredDirectories",)

from collections import Counter
from typing import Final, final

from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.protocols.stores import Store


@final
class EnteredDirectories:
    """Counts how often each directory is entered, by its identity. Belongs to one walk.

    Args:
        store: Where they lie.
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
