"""File descriptors that have one owner each, and the translation of `OSError` to `StorageError`."""

from __future__ import annotations

__all__ = ("Descriptor", "translated")

import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import final

from penstock.kernel.errors import StorageError


@contextmanager
def translated(operation: str, path: str) -> Generator[None]:
    """Turn an `OSError` raised in the block into a `StorageError` with the same number and message."""
    try:
        yield
    except OSError as error:
        raise StorageError.of(operation, path, error) from error


@final
class Descriptor:
    """An open file. Warns if it is collected before it is closed.

    Args:
        path: The file or directory to open.
        flags: Flags for `os.open`, which adds O_CLOEXEC, so that no child process inherits the descriptor.

    Raises:
        StorageError: If it cannot be opened.
    """

    __slots__ = ("number", "path")

    number: int  #: -1 once closed, so that every operation fails with EBADF
    path: str

    def __init__(self, path: str, flags: int) -> None:
        self.number = -1
        self.path = path
        with translated("open", path):
            self.number = os.open(path, flags, 0o666)

    def close(self) -> None:
        """Close the file. Idempotent. Must not be called while another thread uses it."""
        number, self.number = self.number, -1
        if number >= 0:
            with translated("close", self.path):
                os.close(number)

    def __del__(self) -> None:
        if self.number >= 0:
            warnings.warn(f"{self.path!r} was not closed", ResourceWarning, stacklevel=1, source=self)
            self.close()
