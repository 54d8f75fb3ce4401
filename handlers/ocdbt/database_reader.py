"""Reads an OCDBT index: every key of the newest version, and the place of its value.

`read_index` reads a whole index or raises. `salvage_index` reads what is left of a damaged one, and finds the
root again if the manifest is lost. Both go through a `Database`, which reads manifests and nodes and compares
each with its checksum.
"""

from __future__ import annotations

__all__ = ("Database", "index_bytes", "read_index", "read_leaves", "salvage_index")

import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final, NoReturn, final

from penstock.handlers.ocdbt.key_tables import MOST_BYTES_OF_KEYS, DataFileId, KeyTable, RememberedKeys
from penstock.handlers.ocdbt.node_decoding import (
    DumpedDatabase,
    Index,
    Manifest,
    Node,
    NodeReference,
    Values,
    decode_manifest,
    decode_node,
)
from penstock.handlers.ocdbt.wire_format import (
    ENVELOPE_BYTES,
    MANIFEST_MAGIC,
    MAX_OFFSET,
    NODE_MAGIC,
    UNCOMPRESSED,
    Origin,
    Value,
    unseal,
)
from penstock.kernel.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    PenstockError,
    StorageError,
    TruncatedDataError,
)
from penstock.kernel.protocols.stores import ReadableFile, Store

_MANIFEST: Final = "manifest.ocdbt"
_NUMBERED_MANIFEST: Final = re.compile(r"manifest\.[0-9a-f]{16}")
_MOST_NODE_BYTES: Final = 2**27  # Orbax makes them no longer than 100 MB
_MOST_OPEN: Final = 16  # files of nodes
# Compressed keys take a byte each, and more: at least what differs from one to the next.
_KEYS_OF_A_BYTE: Final = 4
_FREE_KEYS: Final = 256
# The errors of a wrong file name, as opposed to a failing medium.
_NO_SUCH_FILE: Final = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}


def _raise(error: PenstockError) -> NoReturn:
    raise error


def read_index(store: Store, directory: str, known: RememberedKeys | None = None) -> Index:
    """Read all keys of the newest version of an OCDBT database, and where their values are.

    Blocks the calling thread. Uncompressed databases, such as penstock writes, are decoded here; TensorStore
    is imported only for compressed ones.

    Args:
        store: The store that holds the database.
        directory: The database's directory, which holds `manifest.ocdbt`.
        known: Keys that were decoded before; newly decoded keys are added.

    Returns:
        Keys in ascending order. Paths of data files are relative to `directory`, even for values that a
        merge left in another process's database. Only the files of index nodes are checked for existence
        and length, not those of values.

    Raises:
        NotACheckpointError: If there is no `manifest.ocdbt`.
        TruncatedDataError: If the manifest, or the file of a node, is too short.
        ChecksumError: If a manifest or node does not match its checksum.
        UnsupportedFormatError: If the format is newer than this version of penstock supports.
        CorruptCheckpointError: If a manifest or node is malformed in any other way.
        UnsupportedByStoreError: If the index is compressed, and TensorStore cannot read the store.
        StorageError: If the medium fails.

    Source:
        TensorStore's OCDBT page, section "Storage format".
    """
    known = RememberedKeys() if known is None else known
    with closing(Database(store, directory, known)) as database:
        manifest, origin = database.manifest()
        root = manifest.root
        if root is None:
            return Index(KeyTable.of([]), [])

        nodes, values = read_leaves(database, root)

    n_keys = sum(map(len, nodes))
    if n_keys != root.n_keys:
        raise origin.corrupt(f"says {root.n_keys} keys, but the index holds {n_keys}")

    return Index(known.table(nodes), values)


def index_bytes(store: Store, directory: str) -> int:
    """Return the bytes of all nodes of the newest version, as the manifest says. Blocking.

    Raises:
        PenstockError: As `read_index`, of the manifest alone.
    """
    with closing(Database(store, directory, RememberedKeys())) as database:
        root = database.manifest()[0].root

    return 0 if root is None else max(root.length, root.tree_bytes)


def read_leaves(
    database: Database, root: NodeReference, damaged: Callable[[PenstockError], None] = _raise
) -> tuple[list[list[bytes]], list[Values]]:
    """Read the leaves below a node, in order: the keys of each, and its values.

    Args:
        database: Where they are.
        root: The node. Reading ends when it has more keys than this says.
        damaged: Called with the error of each node that cannot be read, which is then passed over with all
            that is below it. By default the error is raised.
    """
    nodes: list[list[bytes]] = []
    n_keys = key_bytes = 0
    values: list[Values] = []
    pending = [(root, b"")]
    while pending and n_keys <= root.n_keys:
        reference, prefix = pending.pop()
        try:
            node, where = database.node(reference, prefix)
            keys = node.keys
            key_bytes += sum(map(len, keys)) + (len(prefix) * len(keys) if node.values is None else 0)
            if key_bytes > MOST_BYTES_OF_KEYS:
                raise where.corrupt(f"keys of more than {MOST_BYTES_OF_KEYS} bytes in all")
            if node.values is not None and nodes and keys[0] <= nodes[-1][-1]:
                raise where.corrupt(f"key {keys[0]!r} comes after {nodes[-1][-1]!r}")

            database.count(reference, where)
        except (CorruptCheckpointError, StorageError) as error:
            damaged(error)
            continue

        if node.values is None:
            children = [(child.node, prefix + child.key[: child.inherited]) for child in node.children]
            pending.extend(reversed(children))
        else:
            nodes.append(keys)
            n_keys += len(keys)
            values.append(node.values)

    return nodes, values


@final
class Database:
    """The files of one database. Of those that are read in parts, the last few stay open until `close`."""

    def __init__(self, store: Store, directory: str, known: RememberedKeys) -> None:
        self._store = store
        self._directory = directory
        self._known = known
        self._sizes: dict[str, int] = {}
        self._open: dict[str, ReadableFile] = {}  # the one used last is last
        self._unread = 0  # bytes of the open files in which no node was read yet
        self._dumped: DumpedDatabase | None = None

    def manifest(self) -> tuple[Manifest, Origin]:
        """Read the manifest that holds the newest version."""
        path = os.path.join(self._directory, _MANIFEST)
        if self._store.kind(path) is None:
            raise NotACheckpointError(path, "no OCDBT manifest here")

        manifest, origin = self._manifest(_MANIFEST)
        if not manifest.numbered:
            return manifest, origin

        names = filter(_NUMBERED_MANIFEST.fullmatch, self._store.list_directory(self._directory))
        newest = max(names, default=None)
        if newest is None:
            raise origin.corrupt("refers to numbered manifests, and there is none")

        manifest, origin = self._manifest(newest)
        if manifest.numbered:
            raise origin.corrupt("a numbered manifest that holds no versions")

        return manifest, origin

    def _manifest(self, name: str) -> tuple[Manifest, Origin]:
        origin = Origin(os.path.join(self._directory, name), "OCDBT manifest")
        try:
            data = self._store.read_file(origin.path)
        except StorageError as error:
            raise _translated(origin, error) from error

        method, cursor = unseal(origin, MANIFEST_MAGIC, data)
        if method == UNCOMPRESSED:
            return decode_manifest(cursor), origin

        return self._dump().manifest(origin), origin

    def node(self, reference: NodeReference, prefix: bytes) -> tuple[Node, Origin]:
        """Read a B+tree node, and check that its height is the one its parent records.

        Args:
            reference: Where it is.
            prefix: What the nodes above hold of each key.
        """
        path = os.path.join(self._directory, reference.file.path)
        origin = Origin(path, f"B+tree node at byte {reference.offset}")
        if reference.length < ENVELOPE_BYTES:
            raise origin.corrupt(f"{reference.length} bytes cannot hold a node")
        if not reference.height and reference.n_keys > _FREE_KEYS + _KEYS_OF_A_BYTE * reference.length:
            raise origin.corrupt(f"{reference.length} bytes cannot hold {reference.n_keys} keys")

        method, cursor = unseal(origin, NODE_MAGIC, self._range(origin, reference))
        if method == UNCOMPRESSED:
            node = decode_node(cursor, reference.file.base, self._known, prefix)
        else:
            node = self._dump().node(origin, reference, prefix)

        # Heights that decrease by one at each level also rule out cycles.
        if node.height != reference.height:
            raise origin.corrupt(f"height {node.height}, but its parent says {reference.height}")

        return node, origin

    def count(self, reference: NodeReference, origin: Origin) -> None:
        """Raise if nodes overlap: then a small index could have any number of keys."""
        self._unread -= reference.length
        if self._unread < 0:
            raise origin.corrupt("nodes that lie in one another")

    def _dump(self) -> DumpedDatabase:
        if self._dumped is None:
            self._dumped = DumpedDatabase(self._store, self._directory)

        return self._dumped

    def _range(self, origin: Origin, reference: NodeReference) -> bytes:
        path, end = origin.path, reference.offset + reference.length
        try:
            if path not in self._sizes:
                if self._store.kind(path) == "directory":
                    raise origin.corrupt("Is a directory")

                self._sizes[path] = self._store.size(path)
                self._unread += self._sizes[path]

            size, file = self._sizes[path], self._open.pop(path, None)
            if file is None:
                if len(self._open) == _MOST_OPEN:
                    self._open.pop(next(iter(self._open))).close()

                file = self._store.open_data_file(path)

            self._open[path] = file
            # Checked first, so that a corrupt length is never allocated.
            if end > size:
                raise TruncatedDataError(path, end, size)
            if reference.length > _MOST_NODE_BYTES:
                raise origin.corrupt(f"a node of {reference.length} bytes")

            data = bytearray(reference.length)
            file.read_at(reference.offset, [memoryview(data)])
        except StorageError as error:
            raise _translated(origin, error) from error

        return bytes(data)

    def close(self) -> None:
        """Close the files that are open."""
        with ExitStack() as files:
            for file in self._open.values():
                files.callback(file.close)


def _translated(origin: Origin, error: StorageError) -> Exception:
    if error.errno in _NO_SUCH_FILE:
        return CorruptCheckpointError(origin.path, f"{origin.part}: {os.strerror(error.errno or 0)}")

    return error


# A lost manifest is found again by the node that it points to, which ends the file of nodes. penstock writes
# one file that holds nothing behind its first node but nodes; where there are several, nothing is guessed.
_MOST_FILE_BYTES: Final = 256 * 2**20
"""A longer file is not searched for nodes: those of a million arrays take half as much."""

_LOOK_BYTES: Final = 64 * 1024
"""Where the first node begins: only metadata of arrays with some sixty axes may be before it."""

_HEIGHT_AT: Final = 14  # of a node, in its sealed form
_LENGTH: Final = slice(4, 12)


@final
@dataclass(frozen=True, slots=True)
class SalvagedIndex:
    """The part of an index that could be read."""

    entries: Mapping[bytes, Value]
    problems: Sequence[str]  #: of the nodes that are lost, and all below them


def salvage_index(store: Store, directory: str, data_folder: str) -> SalvagedIndex | None:
    """Read what is left of the index in `directory`. Blocking.

    Args:
        store: Where.
        directory: Of the database.
        data_folder: The name of the folder in it where a lost root is looked for.

    Returns:
        None if its root is not found. Compressed nodes are found only from an intact manifest.
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
    return NodeReference(DataFileId("", name), last, at - last, height, n_keys)


def _beginning(store: Store, path: str) -> bytes:
    data = bytearray(min(_LOOK_BYTES, store.size(path)))
    file = store.open_data_file(path)
    try:
        file.read_at(0, [memoryview(data)])
    finally:
        file.close()

    return bytes(data)
