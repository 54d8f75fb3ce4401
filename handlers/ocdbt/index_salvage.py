"""Reads what is left of a damaged OCDBT index: every node that can be reached and has its checksum.

A lost manifest is found again by the node that it points to, which ends the file of nodes. penstock writes
one file that holds nothing behind its first node but nodes; where there are several, nothing is guessed.
"""

from __future__ import annotations

__all__ = ("SalvagedIndex", "salvage_index")

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final, final

from penstock.handlers.ocdbt.database_reader import Database, read_leaves
from penstock.handlers.ocdbt.index_entries import Index
from penstock.handlers.ocdbt.key_cache import KeyTable, RememberedKeys
from penstock.handlers.ocdbt.key_tables import DataFile
from penstock.handlers.ocdbt.node_decoding import NodeReference
from penstock.handlers.ocdbt.value_refs import Value
from penstock.handlers.ocdbt.wire_format import ENVELOPE_BYTES, MAX_OFFSET, NODE_MAGIC
from penstock.kernel.errors import PenstockError
from penstock.kernel.protocols.stores import Store

_MOST_FILE_BYTES: Final = 256 * 2**20
"""A longer file is not searched for nodes: those of a million arrays take half as much."""

_LOOK_BYTES: Final = 64 * 1024
"""Where the first node begins: only metadata of arrays with some sixty axes may lie before it."""

_HEIGHT_AT: Final = 14  # of a node, in its sealed form
_LENGTH: Final = slice(4, 12)


@final
@dataclass(frozen=True, slots=True)
class SalvagedIndex:
    """What could be read of an index."""

    entries: Mapping[bytes, Value]
    problems: Sequence[str]  #: of the nodes that are lost, and all below them


def salvage_index(store: Store, directory: str, data_folder: str) -> SalvagedIndex | None:
    """Read what is left of the index in `directory`. Blocking.

    Args:
        store: Where.
        directory: Of the database.
        data_folder: The name of the folder in it where a lost root is looked for.

    Returns:
        None if nobody knows where its root is. Compressed nodes are found only from an intact manifest.
    """
    problems: list[str] = []

    def note(error: PenstockError) -> None:
        problems.append(str(error))

    with closing(Database(store, directory, RememberedKeys())) as database:
        root = _recorded_root(database) or _lost_root(store, directory, data_folder)
        if root is None:
            return None

        nodes, values = read_leaves(database, root, note)

    return SalvagedIndex(Index(KeyTable.of([key for keys in nodes for key in keys]), values), problems)


def _recorded_root(database: Database) -> NodeReference | None:
    try:
        return database.manifest()[0].root
    except PenstockError:
        return None


def _lost_root(store: Store, directory: str, data_folder: str) -> NodeReference | None:
    """Return the node at the end of the only file of nodes; None if there is no such file, or several."""
    folder = os.path.join(directory, data_folder)
    found: list[NodeReference] = []
    try:
        for name in store.list_directory(folder):
            root = _last_node(store, os.path.join(folder, name), f"{data_folder}/{name}")
            if root is not None:
                found.append(root)
    except PenstockError:
        return None

    return found[0] if len(found) == 1 else None


def _last_node(store: Store, path: str, name: str) -> NodeReference | None:
    """Return the last node of a file that holds nothing but nodes behind the first one, by their lengths."""
    if store.kind(path) != "file" or not ENVELOPE_BYTES <= store.size(path) <= _MOST_FILE_BYTES:
        return None

    if NODE_MAGIC not in _beginning(store, path):
        return None

    data = store.read_file(path)
    at = last = data.find(NODE_MAGIC)
    while at < len(data):
        node = data[at : at + ENVELOPE_BYTES]
        length = int.from_bytes(node[_LENGTH], "little")
        if node[:4] != NODE_MAGIC or not ENVELOPE_BYTES < length <= len(data) - at:
            return None

        last, at = at, at + length

    height = data[last + _HEIGHT_AT]
    n_keys = MAX_OFFSET if height else 0  # how many there are is recorded in the manifest alone
    return NodeReference(DataFile("", name), last, at - last, height, n_keys)


def _beginning(store: Store, path: str) -> bytes:
    data = bytearray(min(_LOOK_BYTES, store.size(path)))
    file = store.open_data_file(path)
    try:
        file.read_at(0, [memoryview(data)])
    finally:
        file.close()

    return bytes(data)
