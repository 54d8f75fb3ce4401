"""The paths that handlers get, and the stores that they lie in."""

from __future__ import annotations

__all__ = ("bucket_url", "handler_path", "is_there", "path_as_given", "path_text", "place_of", "store_at")

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.handlers.stores.local import LocalStore
from penstock.kernel.config.config import Config
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.paths import BUCKETS, absolute_path, bucket_of, path_or_url
from penstock.stores.store_finder import StoreFinder


def handler_path(path: str | os.PathLike[str]) -> Any:
    """Return the absolute local path, as handlers written for Orbax expect it.

    That is an `etils.epath.Path` where etils is installed (those have `rmtree`, `glob`, `as_posix`, and more
    than pathlib's), and a `pathlib.Path` elsewhere.

    Raises:
        PathError: If it names no local path.
    """
    return path_as_given(absolute_path(path))


def place_of(path: str | os.PathLike[str]) -> Any:
    """Return a path as `handler_path` does, for a handler that writes no files: it may be in a bucket.

    Raises:
        PathError: If it names neither a local path nor a place in a bucket.
    """
    return path_as_given(path_or_url(path))


def bucket_url(path: str | os.PathLike[str]) -> str | None:
    """Return the URL that a path names in a bucket; None if it names no bucket.

    Raises:
        PathError: If it is a URL of a bucket that says more than a name.
    """
    text = path_text(path)
    if text.partition(":")[0] not in BUCKETS:
        return None

    found = path_or_url(text)
    return None if bucket_of(found) is None else found


def path_as_given(path: str | os.PathLike[str]) -> Any:
    """Return a path of the same kind as `handler_path`, which stays relative if it is."""
    try:
        etils: Any = import_module("etils.epath")
    except ImportError:
        return Path(path)

    return etils.Path(path)


def path_text(path: Any) -> str:
    """Return a path of any kind as text."""
    return os.fsdecode(path)


def store_at(path: Any) -> Store:
    """Return the store of a path, on a disk or in a bucket. Connects to nothing.

    Raises:
        PathError: If it is a URL of a bucket that says more than a name.
    """
    url = bucket_url(path)
    return LocalStore() if url is None else StoreFinder(None, Config.load().store).at(url)


def is_there(path: Any) -> bool:
    """Whether something lies at a path. Blocking."""
    return store_at(path).kind(path_text(path)) is not None
