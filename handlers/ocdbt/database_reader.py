"""Read an OCDBT index: every key of the newest version, and where its value lies."""

from __future__ import annotations

__all__ = ("read_index",)

import errno
import os
import re
from typing import TYPE_CHECKING

from penstock.handlers.ocdbt.index_entries import Index, Values
from penstock.handlers.ocdbt.key_cache import KeyTable, RememberedKeys
from penstock.handlers.ocdbt.node_decoding import Manifest, Node, NodeReference, decode_manifest, decode_node
from penstock.handlers.ocdbt.wire_format import (
    ENVELOPE_BYTES,
    MANIFEST_MAGIC,
    NODE_MAGIC,
    UNCOMPRESSED,
    Origin,
    unseal,
)
from penstock.kernel.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    StorageError,
    TruncatedDataError,
)

if TYPE_CHECKING:
    from penstock.handlers.ocdbt.compressed_nodes import DumpedDatabase

_MANIFEST = "manifest.ocdbt"
_NUMBERED_MANIFEST = re.compile(r"manifest\.[0-9a-f]{16}")
# What opening a file fails with when the name is wrong, rather than the medium.
_NO_SUCH_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}


def read_index(directory: str, known: RememberedKeys | None = None) -> Index:
    """Read all keys of the newest version of an OCDBT database, and where their values lie.

    Blocks the calling thread, so that it belongs into a worker thread. What penstock writes is
    uncompressed and decoded here; TensorStore is imported only for a database that it compressed.

    Args:
        directory: The database's directory, which holds `manifest.ocdbt`.
        known: Keys decoded before, and what takes up those decoded now.

    Returns:
        Keys in ascending order. Paths of data files are relative to `directory`, also for values
        that a merge left in the database of another process. That the data files are there and
        long enough is not checked, except for the nodes of the index itself.

    Raises:
        NotACheckpointError: If there is no `manifest.ocdbt`.
        TruncatedDataError: If the manifest, or the file of a node, is too short.
        ChecksumError: If a manifest or node differs from what was written.
        UnsupportedFormatError: If the format is newer than what is known here.
        CorruptCheckpointError: If anything else is wrong with them.
        StorageError: If the medium fails.

    Source:
        TensorStore's OCDBT page, section "Storage format".
    """
    known = RememberedKeys() if known is None else known
    database = _Database(directory, known)
    manifest, origin = database.manifest()
    root = manifest.root
    if root is None:
        return Index(KeyTable.of([]), [])

    nodes: list[list[bytes]] = []
    n_keys = 0
    values: list[Values] = []
    pending = [(root, b"")]
    while pending and n_keys <= root.n_keys:
        reference, prefix = pending.pop()
        node, where = database.node(reference)
        if node.values is None:
            children = [(child.node, prefix + child.key[: child.inherited]) for child in node.children]
            pending.extend(reversed(children))
            continue

        keys = [prefix + key for key in node.keys] if prefix else node.keys
        if nodes and keys[0] <= nodes[-1][-1]:
            raise where.corrupt(f"key {keys[0]!r} comes after {nodes[-1][-1]!r}")

        nodes.append(keys)
        n_keys += len(keys)
        values.append(node.values)

    if n_keys != root.n_keys:
        raise origin.corrupt(f"says {root.n_keys} keys, but the index holds {n_keys}")

    return Index(known.table(nodes), values)


class _Database:
    """The files of one database."""

    def __init__(self, directory: str, known: RememberedKeys) -> None:
        self._directory = directory
        self._known = known
        self._dumped: DumpedDatabase | None = None

    def manifest(self) -> tuple[Manifest, Origin]:
        """Read the manifest that holds the newest version."""
        path = os.path.join(self._directory, _MANIFEST)
        if not os.path.lexists(path):
            raise NotACheckpointError(path, "no OCDBT manifest here")

        manifest, origin = self._manifest(_MANIFEST)
        if not manifest.numbered:
            return manifest, origin

        names = filter(_NUMBERED_MANIFEST.fullmatch, os.listdir(self._directory))
        newest = max(names, default=None)
        if newest is None:
            raise origin.corrupt("refers to numbered manifests, and there is none")

        manifest, origin = self._manifest(newest)
        if manifest.numbered:
            raise origin.corrupt("a numbered manifest that holds no versions")

        return manifest, origin

    def _manifest(self, name: str) -> tuple[Manifest, Origin]:
        origin = Origin(os.path.join(self._directory, name), "OCDBT manifest")
        method, cursor = unseal(origin, MANIFEST_MAGIC, _read(origin))
        if method == UNCOMPRESSED:
            return decode_manifest(cursor), origin

        return self._dump().manifest(origin), origin

    def node(self, reference: NodeReference) -> tuple[Node, Origin]:
        """Read a B+tree node and check that it is of the height that its parent says."""
        path = os.path.join(self._directory, reference.file.path)
        origin = Origin(path, f"B+tree node at byte {reference.offset}")
        if reference.length < ENVELOPE_BYTES:
            raise origin.corrupt(f"{reference.length} bytes cannot hold a node")

        method, cursor = unseal(origin, NODE_MAGIC, _read(origin, reference.offset, reference.length))
        if method == UNCOMPRESSED:
            node = decode_node(cursor, reference.file.base, self._known)
        else:
            node = self._dump().node(origin, reference)

        # Heights that fall by one at each step also rule out cycles.
        if node.height != reference.height:
            raise origin.corrupt(f"height {node.height}, but its parent says {reference.height}")

        return node, origin

    def _dump(self) -> DumpedDatabase:
        if self._dumped is None:
            # Here, because it imports tensorstore, which what penstock wrote never needs.
            from penstock.handlers.ocdbt.compressed_nodes import DumpedDatabase

            self._dumped = DumpedDatabase(self._directory)

        return self._dumped


def _read(origin: Origin, offset: int = 0, length: int | None = None) -> bytes:
    """Read a range of a file, or all of it."""
    path = origin.path
    try:
        with open(path, "rb") as file:
            if length is None:
                return file.read()

            # Asking first keeps a corrupt length from being allocated.
            found = os.fstat(file.fileno()).st_size
            if offset + length > found:
                raise TruncatedDataError(path, offset + length, found)

            file.seek(offset)
            return file.read(length)
    except OSError as error:
        if error.errno in _NO_SUCH_FILE:
            raise CorruptCheckpointError(path, f"{origin.part}: {error.strerror}") from error

        raise StorageError.of("read", path, error) from error
