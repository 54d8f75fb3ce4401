"""Which items a checkpoint has.

Source:
    ORBAX_FORMAT.md §3.1, §5.
"""

from __future__ import annotations

__all__ = ("list_items",)

import os
from collections.abc import Mapping
from typing import Final

from penstock.handlers.formats.orbax.discovery.find_item import check_marked, checkpoint_at
from penstock.handlers.formats.orbax.discovery.item_kinds import items_of, kind_of_item
from penstock.handlers.formats.orbax.discovery.step_dirs import is_unfinished
from penstock.handlers.formats.orbax.discovery.tombstone import deleted_item
from penstock.handlers.formats.orbax.documents.checkpoint_metadata import CheckpointMetadata
from penstock.handlers.formats.orbax.documents.file_names import CHECKPOINT_METADATA
from penstock.handlers.formats.orbax.documents.sealed_documents import SealedDocuments
from penstock.kernel.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    UnsupportedFormatError,
)
from penstock.kernel.protocols.checkpoints import FoundItems, ItemKind
from penstock.kernel.protocols.stores import Store

_ARRAY_HANDLER: Final = ".ArrayCheckpointHandler"


def list_items(store: Store, path: str) -> FoundItems:
    """Name the items of the checkpoint at `path`, or of the latest step there. Blocking.

    Raises:
        NotACheckpointError: If there is nothing.
        IncompleteCheckpointError: If a save was interrupted there.
        UnsupportedFormatError: If the checkpoint is one tree, or one document, and has no items.
        CorruptCheckpointError: If an item is missing that the checkpoint is recorded to have.
    """
    at = checkpoint_at(store, path)
    check_marked(store, at.path, at.names)
    recorded = SealedDocuments.open(store, at.path, at.names).about(at.names)
    if is_unfinished(at.names, recorded):
        raise IncompleteCheckpointError(
            at.path, f"a save was interrupted here; {CHECKPOINT_METADATA} says so"
        )
    if kind_of_item(store, at.path, at.names) is not None:
        raise UnsupportedFormatError(at.path, "is one item, and has none; restore it as a whole")

    gone = {deleted_item(store, at.path, at.names)}
    forms = items_of(store, at.path, at.names - gone)
    listed = set(recorded.items) - gone
    lost = sorted(listed - at.names)
    if lost:
        raise CorruptCheckpointError(
            os.path.join(at.path, lost[0]), f"is missing, and {CHECKPOINT_METADATA} lists it"
        )

    names = sorted({*forms, *listed})
    if not names:
        raise NotACheckpointError(at.path, "has no items")

    return FoundItems(at.path, {name: _kind(recorded, name) for name in names})


def _kind(recorded: CheckpointMetadata, name: str) -> ItemKind:
    handlers = recorded.item_handlers
    handler = handlers.get(name, "") if isinstance(handlers, Mapping) else ""
    return "array" if handler.endswith(_ARRAY_HANDLER) else "tree"
