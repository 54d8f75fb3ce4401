"""A second try at bytes that do not fit their checksum, where they may have been damaged on the way."""

from __future__ import annotations

__all__ = ("read_twice",)

from collections.abc import Callable
from typing import TypeVar

from penstock.kernel.errors import ChecksumError
from penstock.kernel.protocols.store_capabilities import OverNetwork

T = TypeVar("T")


def read_twice(file: object, read: Callable[[], T]) -> T:
    """Return `read()`; if what it read of `file` does not fit its checksum, call it once more. Blocking.

    Args:
        file: The file. Of one that did not come over a network, the first answer counts.
        read: Reads and compares. It may be called twice.

    Raises:
        ChecksumError: If the second time it does not fit, either.
    """
    try:
        return read()
    except ChecksumError:
        if not isinstance(file, OverNetwork):
            raise

    return read()
