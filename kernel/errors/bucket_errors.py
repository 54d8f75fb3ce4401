"""`StorageError`s of object stores, and what is said where their client is not installed."""

from __future__ import annotations

__all__ = ("AccessDeniedError", "MissingExtraError", "ThrottledError", "UnreachableError")

import errno
from typing import final

from penstock.kernel.errors.families import SpecError, StorageError


@final
class AccessDeniedError(StorageError, PermissionError):
    """The server refuses the credentials, or what they ask for. Mend those; trying again does not help."""

    def __init__(self, operation: str, path: str, problem: str) -> None:
        StorageError.__init__(self, operation, path, problem, errno.EACCES)


@final
class ThrottledError(StorageError):
    """The server answered that it is too busy, also when it was asked again. Save or restore later."""

    def __init__(self, operation: str, path: str, problem: str) -> None:
        super().__init__(operation, path, problem, errno.EAGAIN)


@final
class UnreachableError(StorageError, ConnectionError):
    """The server does not answer, or not in time. Look at the endpoint and at the network."""

    def __init__(self, operation: str, path: str, problem: str) -> None:
        StorageError.__init__(self, operation, path, problem, errno.EHOSTUNREACH)


@final
class MissingExtraError(SpecError, ImportError):
    """The path asks for a part of penstock whose packages are not installed.

    Attributes:
        path: What was asked for.
        extra: What to install: `pip install 'penstock[<extra>]'`.
    """

    def __init__(self, path: str, extra: str) -> None:
        super().__init__(f"{path!r} needs packages that are not installed: pip install 'penstock[{extra}]'")
        self.path, self.extra = path, extra
