"""What callers may pass as a path, and the absolute path that comes of it."""

from __future__ import annotations

__all__ = ("absolute_path",)

import os
from urllib.parse import unquote, urlsplit

from penstock.kernel.errors import PathError


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute local path that `path` names: relative, with `~`, or a `file://` URL.

    Raises:
        PathError: If it is empty, not text, has a NUL in it, or names another kind of store.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise PathError(repr(path), "is not text")
    if not text.strip():
        raise PathError(text, "is empty; it must name a directory")
    if "\0" in text:
        raise PathError(text, "has a NUL character in it")
    if "://" in text:
        url = urlsplit(text)
        if url.scheme != "file" or url.netloc not in {"", "localhost"}:
            raise PathError(text, f"names a {url.scheme}:// store; only local paths are supported yet")

        text = unquote(url.path)

    return os.path.abspath(os.path.expanduser(text))
