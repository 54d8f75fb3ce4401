"""Find a checkpoint, or an item of one, and read its documents."""

from __future__ import annotations

__all__ = ("find_checkpoint", "open_checkpoint")

from functools import partial

from penstock.handlers.formats.orbax.discovery.find_item import ItemPlace, locate
from penstock.handlers.formats.orbax.reading.document_cache import RememberedDocuments
from penstock.handlers.formats.orbax.reading.document_sizes import bytes_to_decode
from penstock.handlers.formats.orbax.reading.plain_items import OPENERS
from penstock.handlers.formats.orbax.reading.stored_checkpoint import OrbaxCheckpoint
from penstock.handlers.formats.orbax.reading.tree_documents import Source
from penstock.kernel.protocols.layouts import Opening
from penstock.kernel.protocols.store_capabilities import UntrustedFiles
from penstock.kernel.protocols.stores import Store


def open_checkpoint(
    store: Store,
    path: str,
    item: str | None = None,
    *,
    remembered: RememberedDocuments | None = None,
    whole: bool = True,
    foreign: frozenset[str] = frozenset(),
) -> OrbaxCheckpoint:
    """Find the checkpoint at `path` and read its documents.

    Args:
        store: Where.
        path: Of a checkpoint, of an item of one, or of a directory of steps; see `locate`. The result's
            path is that of the checkpoint found: a step, if this is a directory of steps.
        item: Its name, where there are several; by default the one that holds the tree.
        remembered: Documents decoded before, and what takes up those decoded now.
        whole: Whether every data file must be there in its whole length.
        foreign: Types of leaves that a handler may keep in files of its own; see `Source`.

    Raises:
        NotACheckpointError: If nothing of this layout lies there, or no such item.
        IncompleteCheckpointError: If a save was interrupted there.
        UnsupportedFormatError: If it is of a kind that penstock recognises and does not read.
        TruncatedDataError: If a data file is shorter than the index says.
        LinkOutsideError: If a symbolic link leads out of it, and the store does not allow that.
        CorruptCheckpointError: If a document is damaged or missing; the message names it.
    """
    source = Source(store, RememberedDocuments() if remembered is None else remembered, whole, foreign)
    place = _place(store, path, item)
    return OPENERS[place.kind](source, place)


def find_checkpoint(
    store: Store, path: str, item: str | None, remembered: RememberedDocuments, foreign: frozenset[str]
) -> Opening:
    """Find the checkpoint that `open_checkpoint` opens, and tell what its documents take.

    Raises:
        PenstockError: As `open_checkpoint`, for what can be seen without reading them.
    """
    place = _place(store, path, item)
    open_ = partial(OPENERS[place.kind], Source(store, remembered, foreign=foreign), place)
    return Opening(bytes_to_decode(store, place), open_)


def _place(store: Store, path: str, item: str | None) -> ItemPlace:
    place = locate(store, path, item)
    if isinstance(store, UntrustedFiles):
        store.check_links(place.path, place.directory)

    return place
