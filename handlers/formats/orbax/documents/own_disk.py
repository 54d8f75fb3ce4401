"""Whether a tree is the part of one process, which lies on a disk of its own."""

from __future__ import annotations

__all__ = ("disk_mark",)

import os

from penstock.handlers.formats.orbax.documents.file_names import CHECKPOINT_METADATA
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import DISK_MARK, DiskMark


def disk_mark(store: Store, directory: str) -> DiskMark | None:
    """Return whose part the tree in `directory` is; None if it is a whole one. Blocking.

    Raises:
        CorruptCheckpointError: If the mark cannot be read.
    """
    places = [directory]
    if store.kind(os.path.join(directory, CHECKPOINT_METADATA)) is None:  # then it is an item of one
        places.append(os.path.dirname(directory))

    for place in places:
        path = os.path.join(place, DISK_MARK)
        if store.kind(path) == "file":
            return DiskMark.decoded(path, store.read_file(path))

    return None
