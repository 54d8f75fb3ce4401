"""What callers may pass as a path, and the absolute path it stands for."""

from __future__ import annotations

__all__ = ("absolute_path",)

import os
import re
from typing import Final, cast
from urllib.parse import unquote

from penstock.kernel.errors import PathError

_URL: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(//(?P<host>[^/]*))?(?P<path>/.*)", re.DOTALL)


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute local path that `path` names: relative, with `~`, or a `file://` URL.

    Raises:
        PathError: If it is empty, not text, has a NUL in it, or names another kind of store.
    """
    text = cast("object", os.fspath(path))  # the caller may have passed bytes all the same
    if not isinstance(text, str):
        raise PathError(repr(path), "is not text")
    if not text.strip():
        raise PathError(text, "is empty; it must name a directory")
    if "\0" in text:
        raise PathError(text, "has a NUL character in it")

    url = _URL.match(text)
    if url is not None:
        # pathlib makes `gs:/bucket` of `gs://bucket`, which must not become a folder called `gs:`.
        if url["scheme"] != "file" or (url["host"] or "") not in {"", "localhost"}:
            raise PathError(text, f"names a {url['scheme']}:// store; only local paths are supported yet")

        text = unquote(url["path"])

    return os.path.abspath(os.path.expanduser(text))
