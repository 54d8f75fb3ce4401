"""The paths that handlers get."""

from __future__ import annotations

__all__ = ("handler_path", "path_as_given", "path_text")

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.kernel.storage.paths import absolute_path


def handler_path(path: str | os.PathLike[str]) -> Any:
    """Return the absolute local path, as handlers written for Orbax expect it.

    That is an `etils.epath.Path` where etils is installed (those have `rmtree`, `glob`, `as_posix`, and more
    than pathlib's), and a `pathlib.Path` elsewhere.

    Raises:
        PathError: If it names no local path.
    """
    return path_as_given(absolute_path(path))


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
