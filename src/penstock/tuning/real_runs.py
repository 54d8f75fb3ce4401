"""Real saves and restores of one tree, on the store that is measured."""

from __future__ import annotations

__all__ = ("RealRuns", "made_up_tree", "tree_of")

import os
import time
from contextlib import suppress
from typing import Any, Final, final

import numpy as np

from penstock import api
from penstock.kernel.config.config import Config
from penstock.kernel.protocols.stores import Store
from penstock.removal.delete import delete
from penstock.tuning.candidates import nested_tables
from penstock.tuning.search import Options, Timing

_LEAVES: Final = 8
_SMALL: Final = 200


def made_up_tree(nbytes: int) -> dict[str, Any]:
    """Return noise of about this size, in eight large arrays, and two hundred small ones beside them."""
    random = np.random.default_rng(0)
    large = max(nbytes // _LEAVES // 4, 1)
    return {
        "large": [random.standard_normal(large, np.float32) for _ in range(_LEAVES)],
        "small": [np.full(64, n, np.float32) for n in range(_SMALL)],
    }


async def tree_of(path: str) -> Any:
    """Return the tree of a checkpoint of the user's own."""
    return await api.restore(path)


@final
class RealRuns:
    """Saves and restores a tree below a directory of its own.

    Args:
        directory: Exists; what is saved there is removed after each run.
        tree: What is saved.
        config: The options that are measured are laid over these.
        store: Where the directory lies; by default on a disk.
    """

    __slots__ = ("_config", "_directory", "_n", "_store", "_tree")

    def __init__(self, directory: str, tree: Any, config: Config, store: Store | None = None) -> None:
        self._directory = directory
        self._tree = tree
        self._config = config
        self._n = 0
        self._store = store

    async def measure(self, options: Options) -> Timing:
        """Save and restore once. What was written is dropped from the page cache before it is read."""
        self._n += 1
        path = os.path.join(self._directory, str(self._n))
        config = self._config.changed(nested_tables(options))
        async with api.Checkpointer(config=config, store=self._store) as checkpointer:
            start = time.perf_counter()
            await (await checkpointer.save(path, self._tree))
            saved = time.perf_counter()
            _drop_from_cache(path)
            began = time.perf_counter()
            await checkpointer.restore(path)
            ended = time.perf_counter()

        await delete(path)
        return Timing(saved - start, ended - began)


def _drop_from_cache(path: str) -> None:
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return

    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError), open(os.path.join(folder, name), "rb") as file:
                advise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
