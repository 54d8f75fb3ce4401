"""`StorageError`s about room on the medium. Make room, and save again."""

from __future__ import annotations

__all__ = ("NoSpaceError",)

import errno
from typing import final

from penstock.kernel.errors.families import StorageError


@final
class NoSpaceError(StorageError):
    """The medium has no room for what a save has to write. Nothing of it is left; earlier ones are untouched.

    Its `key_path` is that of the first leaf without room, where that is known.

    Attributes:
        bytes_needed: What had to be written: all of the save, or the rest of it.
        bytes_free: What was free then; None if the store cannot tell. More than is needed means that
            something else was full: a quota, or the number of files.
    """

    def __init__(
        self,
        operation: str,
        path: str,
        bytes_needed: int,
        bytes_free: int | None,
        key_path: str | None,
        said: str = "No space left",
    ) -> None:
        free = "" if bytes_free is None else f" and {bytes_free} are free"
        leaf = "" if key_path is None else f", from leaf {key_path} on"
        problem = f"{said}: {bytes_needed} bytes are needed{free}{leaf}"
        problem += " (the save is undone; earlier checkpoints are untouched)"
        super().__init__(operation, path, problem, errno.ENOSPC)
        self.bytes_needed, self.bytes_free, self.key_path = bytes_needed, bytes_free, key_path
