"""A local store on a file system that refuses locks. Public as `penstock.testing.lockless_store`."""

from __future__ import annotations

__all__ = ("lockless_store",)

import errno
import os

from penstock.handlers.stores.local import LocalStore
from penstock.handlers.stores.system_calls.file_system import SystemCalls


def lockless_store(error: int = errno.ENOLCK) -> LocalStore:
    """Return a store as on a network file system that has no `flock`: files with claims take its place.

    Args:
        error: What the system says: ENOLCK, ENOSYS, ENOTSUP or EOPNOTSUPP.
    """

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(error, os.strerror(error))

    return LocalStore(calls=SystemCalls(flock=refuse))
