"""The file of an item that is not a tree: JSON, or a protobuf message as text."""

from __future__ import annotations

__all__ = ("find_text", "write_text")

import errno
import os
from collections.abc import Sequence
from typing import Any

from penstock.handlers.stores.local import LocalStore
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import StorageError


async def write_text(directory: Any, name: str, text: str) -> None:
    """Write a file of an item, durably.

    Args:
        directory: Of the item; it exists.
        name: Of the file.
        text: Its content.

    Raises:
        StorageError: If the medium refuses.
    """
    await Threads(1).run(LocalStore().write_file, os.path.join(directory, name), text.encode())


def find_text(directory: Any, names: Sequence[str]) -> str | None:
    """Return the content of the first of several files that exists; None if none does. Blocking.

    Raises:
        StorageError: If the medium refuses.
    """
    for name in names:
        try:
            return LocalStore().read_file(os.path.join(directory, name)).decode()
        except StorageError as error:
            if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
                raise

    return None
