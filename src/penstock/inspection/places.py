"""The store of a path that a command was given."""

from __future__ import annotations

__all__ = ("store_of",)

import os

from penstock.config.config import Config
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.paths import path_or_url
from penstock.stores.store_finder import StoreFinder


def store_of(path: str | os.PathLike[str]) -> tuple[Store, str]:
    """Return the store that `path` lies in, by the process's configuration, and the path as it names it."""
    final_path = path_or_url(path)
    return StoreFinder(None, Config.load().store).at(final_path), final_path
