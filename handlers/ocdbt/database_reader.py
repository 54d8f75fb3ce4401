"""Reads an OCDBT index: every key of the newest version, and the place of its value.

`read_index` reads a whole index or raises. `salvage_index` reads what is left of a damaged one, and finds the
root again if the manifest is lost. Both go through a `Database`, which reads manifests and nodes, compares
each with its checksum, and decodes what is not compressed, such as all that penstock writes; a
`DumpedDatabase` has TensorStore decode the rest.

Source:
    TensorStore's OCDBT page, sections "Manifest format", "Data file table format" and "B+tree node format".
"""

from __future__ import annotations

__all__ = ("Database", "index_bytes", "read_index", "salvage_index")

import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from operator import gt, lt
from typing import Any, Final, NoReturn, final
from urllib.parse import quote, unquote

import numpy as np

from penstock.handlers.ocdbt.index import BYTES_OF_A_KEY, Index, KeyTable, RememberedKeys, Values
from penstock.handlers.ocdbt.wire_format import (
    ENVELOPE_BYTES,
    MANIFEST_MAGIC,
    MAX_KEY_BYTES,
    MAX_NODE_ENTRIES,
    MAX_OFFSET,
    MAX_PATH_BYTES,
    MISSING,
    NODE_MAGIC,
    UNCOMPRESSED,
    ZSTD,
    Cursor,
    Indirect,
    Inline,
    Origin,
    Value,
    path_problem,
    unseal,
)
from penstock.kernel.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    PenstockError,
    StorageError,
    TruncatedDataError,
    UnsupportedByStoreError,
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
MOST_BYTES_OF_KEYS: Final = 2**28
"""Of all keys of an index. Those of a tree of a million leaves have about half of it."""

_MOST_PATH_BYTES: Final = 2**26  # of all rows of a table of data files


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
            return Index(KeyTable([]), [])

        nodes, values = database.leaves(root)

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
        name = _MANIFEST
        while True:
            origin = Origin(os.path.join(self._directory, name), "OCDBT manifest")
            try:
                data = self._store.read_file(origin.path)
            except StorageError as error:
                if name == _MANIFEST and error.errno == errno.ENOENT:
                    raise NotACheckpointError(origin.path, "no OCDBT manifest here") from error

                raise _translated(origin, error) from error

            method, cursor = unseal(origin, MANIFEST_MAGIC, data)
            found = decode_manifest(cursor) if method == UNCOMPRESSED else self._dump().manifest(origin)
            if not found.numbered:
                return found, origin
            if name != _MANIFEST:
                raise origin.corrupt("a numbered manifest that holds no versions")

            names = filter(_NUMBERED_MANIFEST.fullmatch, self._store.list_directory(self._directory))
            name = max(names, default="")
            if not name:
                raise origin.corrupt("refers to numbered manifests, and there is none")

    def leaves(
        self, root: NodeReference, damaged: Callable[[PenstockError], None] = _raise
    ) -> tuple[list[list[bytes]], list[Values]]:
        """Read the leaves below a node, in order: the keys of each, and its values.

        Args:
            root: The node. Reading ends when it has more keys than this says.
            damaged: Called with the error of each node that cannot be read, which is then passed over with
                all that is below it. By default the error is raised.
        """
        nodes: list[list[bytes]] = []
        n_keys = key_bytes = 0
        values: list[Values] = []
        pending = [(root, b"")]
        while pending and n_keys <= root.n_keys:
            reference, prefix = pending.pop()
            try:
                node, where = self.node(reference, prefix)
                keys = node.keys
                key_bytes += sum(map(len, keys)) + (len(prefix) * len(keys) if node.values is None else 0)
                if key_bytes > MOST_BYTES_OF_KEYS:
                    raise where.corrupt(f"keys of more than {MOST_BYTES_OF_KEYS} bytes in all")
                if node.values is not None and nodes and keys[0] <= nodes[-1][-1]:
                    raise where.corrupt(f"key {keys[0]!r} comes after {nodes[-1][-1]!r}")

                # Nodes that overlap could give a small index any number of keys.
                self._unread -= reference.length
                if self._unread < 0:
                    raise where.corrupt("nodes that lie in one another")
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


@final
@dataclass(frozen=True, slots=True)
class NodeReference:
    """The place of a B+tree node, and what its parent records about it."""

    file: DataFileId
    offset: int  #: bytes from the start of the file
    length: int  #: bytes, compressed or not
    height: int  #: 0 for a leaf
    n_keys: int  #: in the leaves below
    tree_bytes: int = 0  #: of this node and all below, as recorded; 0 if that is not known


@final
@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of the newest version in a manifest."""

    numbered: bool  #: True if the versions are in `manifest.<16 hex>` files and not in this one
    root: NodeReference | None = None  #: None if there are no keys


@final
@dataclass(frozen=True, slots=True)
class Child:
    """An entry of an interior node."""

    key: bytes  #: the lowest key that the child may hold, relative to this node
    inherited: int  #: how many leading bytes of `key` the child's keys leave out
    node: NodeReference


@final
@dataclass(frozen=True, slots=True)
class Node:
    """A B+tree node: keys and values in a leaf, children in an interior node."""

    height: int
    keys: list[bytes]  #: of a leaf's entries, whole; or of the children, relative to this node
    values: Values | None  #: values of a leaf's keys; None in an interior node
    children: list[Child]  #: empty in a leaf


def decode_manifest(cursor: Cursor) -> Manifest:
    """Decode the body of a manifest.

    Raises:
        CorruptCheckpointError: If it is malformed.
    """
    cursor.take(16)  # uuid
    kind, *_ = cursor.varints(3)  # max_inline_value_bytes, max_decoded_node_bytes: for writers only
    cursor.take(1)  # version_tree_arity_log2
    (method,) = cursor.varints(1)
    if method == ZSTD:
        cursor.take(4)  # level
    elif method != UNCOMPRESSED:
        raise cursor.origin.corrupt(f"compression method {method}")
    if kind > 1:  # 0 has its versions in it, 1 in numbered files
        raise cursor.origin.corrupt(f"manifest kind {kind}")

    if kind:
        cursor.finish()
        return Manifest(numbered=True)

    files = decode_files(cursor, "")
    (count,) = cursor.varints(1)
    if not count:
        raise cursor.origin.corrupt("a manifest without versions")

    generations = cursor.varints(count)
    heights = cursor.take(count)
    newest = _references(cursor, files, count, heights)[-1]
    if sorted(set(generations)) != list(generations):
        raise cursor.origin.corrupt("versions are not in ascending order")

    cursor.take(8 * count)  # commit times
    (n_older,) = cursor.varints(1)
    for _ in range(5):  # generation numbers, file ids, offsets, lengths, numbers of generations
        cursor.varints(n_older)

    cursor.take(9 * n_older)  # commit times, heights
    cursor.finish()
    return Manifest(numbered=False, root=newest)


def _references(
    cursor: Cursor, files: list[DataFileId], count: int, heights: bytes
) -> list[NodeReference | None]:
    """Read the columns that refer to nodes, including the columns of subtree statistics."""
    ids = cursor.varints(count)
    offsets = cursor.varints(count)
    lengths = cursor.varints(count)
    n_keys = cursor.varints(count)
    tree_bytes = cursor.varints(count)
    cursor.varints(count)  # num_indirect_value_bytes
    if max(ids) >= len(files):
        raise cursor.origin.corrupt(f"refers to data file {max(ids)} of {len(files)}")

    rows = zip(offsets, lengths, heights, n_keys, tree_bytes, strict=True)
    return [
        None
        if offset == length == MISSING
        else NodeReference(files[file_id], offset, length, height, keys, below)
        for file_id, (offset, length, height, keys, below) in zip(ids, rows, strict=True)
    ]


def decode_node(
    cursor: Cursor, transitive: str, known: RememberedKeys | None = None, prefix: bytes = b""
) -> Node:
    """Decode the body of a B+tree node.

    Args:
        cursor: At the first byte of the body.
        transitive: The base path of the file that holds the node.
        known: Cache of keys that were decoded before.
        prefix: What the nodes above hold of each key.

    Raises:
        CorruptCheckpointError: If it is malformed.
    """
    (height,) = cursor.take(1)
    files = decode_files(cursor, transitive)
    (count,) = cursor.varints(1)
    if not 0 < count <= MAX_NODE_ENTRIES:
        raise cursor.origin.corrupt(f"{count} entries")

    keys, inherited = decode_keys(cursor, count, interior=height > 0, known=known, prefix=prefix)
    if not height:
        node = Node(0, keys, _values(cursor, files, count), [])
    else:
        references = _references(cursor, files, count, bytes([height - 1]) * count)
        children = [
            Child(key, length, reference)
            for key, length, reference in zip(keys, inherited, references, strict=True)
            if reference
        ]
        if len(children) < count:
            raise cursor.origin.corrupt("a child without a node")

        node = Node(height, keys, None, children)

    cursor.finish()
    return node


def _values(cursor: Cursor, files: list[DataFileId], count: int) -> Values:
    """Read the values of a leaf. An inline value's offset is the length of the inline values before it."""
    lengths, kinds = cursor.column(count), cursor.column(count)
    if kinds.max() > 1:
        raise cursor.origin.corrupt(f"value of kind {kinds.max()}")

    indirect = kinds == 1
    n_indirect = int(np.count_nonzero(indirect))
    ids, offsets = cursor.column(n_indirect), cursor.column(n_indirect)
    used: list[int] = np.unique(ids).tolist()
    if not all(file_id < len(files) and files[file_id].path for file_id in used):
        raise cursor.origin.corrupt("a value in a data file that the node does not name")

    here = np.where(indirect, 0, lengths)
    if here.sum(dtype=np.float64) > MAX_OFFSET:  # before they are added up in 64 bits
        raise cursor.origin.corrupt("inline values that are longer than any file")

    inline, there = cursor.take(int(here.sum())), lengths[indirect]
    beyond = np.flatnonzero(offsets > MAX_OFFSET - there)
    if beyond.size:
        raise cursor.origin.corrupt(f"a value of {there[beyond[0]]} bytes at {offsets[beyond[0]]}")

    places = np.cumsum(here) - here
    places[indirect] = offsets
    numbers = np.full(count, -1, np.int64)
    numbers[indirect] = ids
    return Values([file.path for file in files], inline, numbers, places, lengths)


def decode_keys(
    cursor: Cursor, count: int, *, interior: bool, known: RememberedKeys | None = None, prefix: bytes = b""
) -> tuple[list[bytes], Sequence[int]]:
    """Read `count` keys: those of an interior node relative to it, those of a leaf whole.

    Args:
        cursor: At the first byte of the keys.
        count: Number of keys, at least one.
        interior: Whether the node is an interior node, not a leaf.
        known: Cached keys of other nodes; if one has the same keys, its list is returned.
        prefix: What the nodes above hold of the keys of a leaf.

    Returns:
        The keys. For an interior node also how many leading bytes of each key are shared by all keys of the
        child; for a leaf an empty sequence.

    Raises:
        CorruptCheckpointError: If a length is impossible, or the keys are not in ascending order.
    """
    too_long = "a key of {} bytes"
    first = np.zeros(1, np.int64)  # which shares nothing
    shared = np.concatenate([first, cursor.column(count - 1, too_long)])
    suffixes = cursor.column(count, too_long)
    inherited = cursor.varints(count) if interior else ()
    longest = int(suffixes.max())
    if longest > MAX_KEY_BYTES:  # before they are added up in 64 bits
        raise cursor.origin.corrupt(too_long.format(longest))
    if (shared[1:] - suffixes[:-1] > shared[:-1]).any():  # a sum might be too large
        raise cursor.origin.corrupt("a key shares more bytes with the previous key than that key has")

    lengths = shared + suffixes
    if lengths.max() > MAX_KEY_BYTES:
        raise cursor.origin.corrupt(too_long.format(lengths.max()))
    if any(map(gt, inherited, lengths.tolist())):
        raise cursor.origin.corrupt("a child inherits more bytes than its key has")

    before = b"" if interior else prefix
    nbytes = int(lengths.sum()) + len(before) * count
    if nbytes > MOST_BYTES_OF_KEYS:  # most bytes of a key may be those of the one before it
        raise cursor.origin.corrupt(f"keys of {nbytes} bytes, of at most {MOST_BYTES_OF_KEYS}")

    encoded = cursor.take(int(suffixes.sum()))
    stored = (shared.tobytes(), suffixes.tobytes(), encoded, before)
    found = None if known is None else known.nodes.get(stored)
    if found is not None:
        return found, inherited

    keys: list[bytes] = []
    key, position = before, 0
    firsts, ends = (shared + len(before)).tolist(), np.cumsum(suffixes).tolist()
    for first, end in zip(firsts, ends, strict=True):
        key = key[:first] + encoded[position:end]
        position = end
        keys.append(key)

    if not all(map(lt, keys, islice(keys, 1, None))):
        raise cursor.origin.corrupt("keys are not in ascending order")
    if known is not None:
        known.nodes.put(stored, keys, nbytes + BYTES_OF_A_KEY * count)

    return keys, inherited


@final
@dataclass(frozen=True, slots=True)
class DataFileId:
    """One row of a data file table. Both paths are empty in a database without keys."""

    base: str  #: prefix of all paths in the nodes that this file holds
    path: str  #: relative to the database's directory


def decode_files(cursor: Cursor, transitive: str) -> list[DataFileId]:
    """Read a data file table.

    Args:
        cursor: At the first byte of the table.
        transitive: The base path of the file that holds the table, as recorded by the parent node.

    Raises:
        CorruptCheckpointError: If a length is impossible, or a path is not a plain relative one.
    """
    (count,) = cursor.varints(1)
    prefixes = (0, *cursor.varints(count - 1)) if count else ()
    suffixes = cursor.varints(count)
    bases = cursor.varints(count)
    files: list[DataFileId] = []
    path = b""
    base_before = path_bytes = 0
    for prefix, suffix, base in zip(prefixes, suffixes, bases, strict=True):
        length = prefix + suffix
        if prefix > len(path) or base > length or length > MAX_PATH_BYTES:
            raise cursor.origin.corrupt("impossible lengths in the table of data files")
        if prefix > min(base, base_before) and base != base_before:
            raise cursor.origin.corrupt("a data file shares part of another's name but not its base")

        base_before = base
        path_bytes += len(transitive) + length
        if path_bytes > _MOST_PATH_BYTES:  # most bytes of a path may be those of the one before it
            raise cursor.origin.corrupt(f"a table of data files of more than {_MOST_PATH_BYTES} bytes")

        path = path[:prefix] + cursor.take(suffix)
        try:
            file = DataFileId(transitive + path[:base].decode(), transitive + path.decode())
        except UnicodeDecodeError as error:
            raise cursor.origin.corrupt(f"data file path {path!r} is not UTF-8") from error

        # In a database without keys, the root refers to a file whose name is empty.
        if path and (problem := path_problem(file.path)):
            raise cursor.origin.corrupt(problem)

        files.append(file)

    return files


@final
class DumpedDatabase:
    """Reads the manifests and nodes of one database with `tensorstore.ocdbt.dump`.

    TensorStore exposes no decompressor, but it can dump what it decoded.

    Every method blocks, and raises `CorruptCheckpointError` if TensorStore cannot decode the bytes.

    Raises:
        UnsupportedByStoreError: If TensorStore cannot read the store.
    """

    def __init__(self, store: Store, directory: str) -> None:
        spec = store.kvstore_spec(directory)
        if spec is None:
            raise UnsupportedByStoreError("read with TensorStore", directory, store, "a kvstore_spec")

        self._spec = spec

    def manifest(self, origin: Origin) -> Manifest:
        """Read the newest manifest. TensorStore itself finds the newest of numbered ones."""
        versions = self._dump(origin, None).get("versions")
        if not versions:
            raise origin.corrupt("a manifest without versions")

        newest = versions[-1]
        if "location" not in newest["root"]:
            return Manifest(numbered=False, root=None)

        return Manifest(numbered=False, root=_reference(origin, newest["root"], newest["root_height"]))

    def node(self, origin: Origin, reference: NodeReference, prefix: bytes) -> Node:
        """Read a B+tree node; `prefix` is what the nodes above hold of each key."""
        base, path = reference.file.base, reference.file.path
        where = f"{quote(base)}:{quote(path[len(base) :])}:{reference.offset}:{reference.length}"
        dumped = self._dump(origin, f"btreenode:{where}")
        height, entries = dumped["height"], dumped["entries"]
        keys = [entry["key"] for entry in entries]
        if not height:
            if sum(map(len, keys)) + len(prefix) * len(keys) > MOST_BYTES_OF_KEYS:
                raise origin.corrupt(f"keys of more than {MOST_BYTES_OF_KEYS} bytes")

            keys = [prefix + key for key in keys] if prefix else keys
            return Node(0, keys, Values.of([_value(origin, entry) for entry in entries]), [])

        children = [
            Child(
                entry["key"],
                len(entry["subtree_common_prefix"]),
                _reference(origin, entry, height - 1),
            )
            for entry in entries
        ]
        return Node(height, keys, None, children)

    def _dump(self, origin: Origin, node: str | None) -> dict[str, Any]:
        # Here, because a database that penstock wrote never needs it.
        import tensorstore as ts

        try:
            base = ts.KvStore.open(self._spec).result()
            dumped: dict[str, Any] = ts.ocdbt.dump(base, node).result()
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            raise origin.corrupt(f"TensorStore cannot decode it: {error}") from error

        return dumped


def _value(origin: Origin, entry: dict[str, Any]) -> Value:
    if "inline_value" in entry:
        return Inline(entry["inline_value"])

    file, offset, length = _location(origin, entry["indirect_value"])
    return Indirect(file.path, offset, length)


def _reference(origin: Origin, entry: dict[str, Any], height: int) -> NodeReference:
    file, offset, length = _location(origin, entry["location"])
    about = entry["statistics"]
    return NodeReference(file, offset, length, height, about["num_keys"], about["num_tree_bytes"])


def _location(origin: Origin, location: str) -> tuple[DataFileId, int, int]:
    """Parse `kind:base:path:offset:length`, where base and path are percent-encoded."""
    _, base, relative, offset, length = location.split(":")
    try:
        # Unlike in the encoded form, the base is complete here: it includes the transitive part.
        base, relative = unquote(base, errors="strict"), unquote(relative, errors="strict")
    except UnicodeDecodeError as error:
        raise origin.corrupt(f"data file path of {location!r} is not UTF-8") from error

    file = DataFileId(base, base + relative)
    if problem := path_problem(file.path):
        raise origin.corrupt(problem)

    return file, int(offset), int(length)


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
    """Read the intact part of the index in `directory`. Blocking.

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

        nodes, values = database.leaves(root, note)

    return SalvagedIndex(Index(KeyTable([key for keys in nodes for key in keys]), values), problems)


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
    """Return the last node of a file that holds nothing but nodes after the first one, by their lengths."""
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
