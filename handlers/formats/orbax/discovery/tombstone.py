"""The mark that Orbax leaves while it deletes one item from a checkpoint.

Source:
    ORBAX_FORMAT.md §3.5, and what Orbax 0.12.8 does: the item counts as gone, even if its files remain; the
    others are read. Its v0 API ignores the mark.
"""

from __future__ import annotations

__all__ = ("check_not_deleted", "deleted_item")

import os
from collections.abc import Collection
from typing import Final

from penstock.handlers.formats.common.checked_json import as_string, parse_object
from penstock.handlers.formats.orbax.documents.file_names import CHECKPOINT_METADATA, DELETION
from penstock.kernel.errors import NotACheckpointError
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.paths import is_whole_bucket

_NAME: Final = "checkpointable_name"


def deleted_item(store: Store, path: str, names: Collection[str]) -> str | None:
    """Name the item of the checkpoint at `path`, in which `names` are, that is being deleted.

    Raises:
        CorruptCheckpointError: If the mark does not say which.
    """
    if DELETION not in names:
        return None

    file = os.path.join(path, DELETION)
    return as_string(file, _NAME, parse_object(file, store.read_file(file)).get(_NAME))


def check_not_deleted(store: Store, path: str) -> None:
    """Raise if `path` is an item that is being deleted from the checkpoint around it.

    Raises:
        NotACheckpointError: If it is.
        CorruptCheckpointError: If the mark does not say which item is.
    """
    parent, name = os.path.split(path)
    if is_whole_bucket(path) or store.kind(os.path.join(path, CHECKPOINT_METADATA)) is not None:
        return  # it is a checkpoint, and no item of one
    if store.kind(os.path.join(parent, DELETION)) is None:
        return
    if deleted_item(store, parent, (DELETION,)) == name:
        raise NotACheckpointError(path, f"is being deleted, as {DELETION} beside it says")
