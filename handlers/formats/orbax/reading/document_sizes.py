"""What reading and decoding the documents of a checkpoint takes, told from their lengths."""

from __future__ import annotations

__all__ = ("bytes_to_decode",)

import os
from collections.abc import Iterator
from typing import Final

from penstock.handlers.formats.orbax.discovery.find_item import ItemPlace
from penstock.handlers.formats.orbax.discovery.item_kinds import ItemKind, json_file, proto_file
from penstock.handlers.formats.orbax.documents.file_names import MANIFEST, METADATA, SHARDING, STRINGS
from penstock.handlers.ocdbt.database_reader import index_bytes
from penstock.kernel.protocols.layouts import SMALL_DOCUMENT
from penstock.kernel.protocols.stores import Store

# Host bytes for each byte stored: the document itself, and what is made of it, as measured.
_METADATA_BYTES: Final = 2
_STRINGS_BYTES: Final = 8
_SHARDING_BYTES: Final = 4
_INDEX_BYTES: Final = 5
_JSON_BYTES: Final = 8  # a list of short numbers
_TEXT_BYTES: Final = 3


def bytes_to_decode(store: Store, place: ItemPlace) -> int:
    """Add up what the long documents at `place` take, about. Blocking; reads the manifest at most.

    A msgpack file counts as nothing: it holds arrays, too, and how much is structure is known only once it
    is read.

    Raises:
        StorageError: If the length of a file cannot be told.
        CorruptCheckpointError: If the manifest is damaged.
    """
    return sum([nbytes * factor for nbytes, factor in _lengths(store, place) if nbytes > SMALL_DOCUMENT])


def _lengths(store: Store, place: ItemPlace) -> Iterator[tuple[int, int]]:
    """Yield the length of each document, and what each of its bytes takes."""
    for name, factor in _documents(store, place):
        if name in place.names:
            yield store.size(os.path.join(place.directory, name)), factor

    if MANIFEST in place.names:
        yield index_bytes(store, place.directory), _INDEX_BYTES


def _documents(store: Store, place: ItemPlace) -> Iterator[tuple[str, int]]:
    yield from ((METADATA, _METADATA_BYTES), (STRINGS, _STRINGS_BYTES), (SHARDING, _SHARDING_BYTES))
    if place.kind is ItemKind.JSON:
        yield json_file(store, place.directory, place.names) or "", _JSON_BYTES
    elif place.kind is ItemKind.PROTO:
        yield proto_file(place.names) or "", _TEXT_BYTES
