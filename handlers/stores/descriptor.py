"""File descriptors that have one owner each, and the translation of `OSError` to `StorageError`."""

from __future__ import annotations

__all__ = ("Descriptor", "translated")

import errno
import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import final

from penstock.handlers.stores.regular_files import open_regular
from penstock.kernel.errors import PenstockError, StorageError


@contextmanager
def translated(operation: str, path: str) -> Generator[None]:
    """Turn an `OSError` raised in the block into a `StorageError` with the same number and message.

    So is a name from a document that no file can have, with a NUL or a surrogate in it.
    """
    try:
        yield
    except PenstockError:
        raise
    except OSError as error:
        raise StorageError.of(operation, path, error) from error
    except ValueError as error:
        raise StorageError(operation, path, f"is no possible path: {error}", errno.EINVAL) from error


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

    @classmethod
    def of_regular(cls, path: str) -> Descriptor:
        """Open an existing file for reading; see `open_regular`.

        Raises:
            NotAFileError: If it is a pipe, a socket or a device.
            StorageError: If it is a directory, or cannot be opened.
        """
        opened = cls.__new__(cls)
        opened.number = -1
        opened.path = path
        with translated("open", path):
            opened.number, _ = open_regular(path)

        return opened

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
