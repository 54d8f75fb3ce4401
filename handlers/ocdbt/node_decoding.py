"""Decodes OCDBT manifests and B+tree nodes, and holds the entries of an index in columns.

`decode_manifest` and `decode_node` decode what is not compressed, such as all that penstock writes.
A `DumpedDatabase` has TensorStore decode the rest. An `Index` joins the leaves: a mapping from key to value
whose values stay in columns.

Source:
    TensorStore's OCDBT page, sections "Manifest format" and "B+tree node format".
"""

from __future__ import annotations

__all__ = (
    "Child",
    "DumpedDatabase",
    "Index",
    "Manifest",
    "Node",
    "NodeReference",
    "Values",
    "decode_manifest",
    "decode_node",
)

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeAlias, final
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt

from penstock.handlers.ocdbt.key_tables import (
    MOST_BYTES_OF_KEYS,
    DataFileId,
    KeyTable,
    RememberedKeys,
    decode_files,
    decode_keys,
)
from penstock.handlers.ocdbt.wire_format import (
    MAX_NODE_ENTRIES,
    MAX_OFFSET,
    MISSING,
    UNCOMPRESSED,
    ZSTD,
    Cursor,
    Indirect,
    Inline,
    Origin,
    Value,
    path_problem,
)
from penstock.kernel.errors import UnsupportedByStoreError
from penstock.kernel.memory.bounded_cache import ByIdentity
from penstock.kernel.protocols.stores import Store

_MANIFEST_KINDS = (0, 1)  # single, numbered


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
    kind = cursor.varint()
    cursor.varints(2)  # max_inline_value_bytes, max_decoded_node_bytes: for writers only
    cursor.byte()  # version_tree_arity_log2
    method = cursor.varint()
    if method == ZSTD:
        cursor.take(4)  # level
    elif method != UNCOMPRESSED:
        raise cursor.origin.corrupt(f"compression method {method}")
    if kind not in _MANIFEST_KINDS:
        raise cursor.origin.corrupt(f"manifest kind {kind}")

    if kind:
        cursor.finish()
        return Manifest(numbered=True)

    files = decode_files(cursor, "")
    count = cursor.varint()
    if not count:
        raise cursor.origin.corrupt("a manifest without versions")

    generations = cursor.varints(count)
    heights = cursor.take(count)
    newest = _references(cursor, files, count, heights)[-1]
    if sorted(set(generations)) != list(generations):
        raise cursor.origin.corrupt("versions are not in ascending order")

    cursor.take(8 * count)  # commit times
    n_older = cursor.varint()
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
    height = cursor.byte()
    files = decode_files(cursor, transitive)
    count = cursor.varint()
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
    lengths = cursor.varints(count)
    kinds = cursor.varints(count)
    if max(kinds) > 1:
        raise cursor.origin.corrupt(f"value of kind {max(kinds)}")

    n_indirect = sum(kinds)
    ids = cursor.varints(n_indirect)
    offsets = cursor.varints(n_indirect)
    if not all(file_id < len(files) and files[file_id].path for file_id in set(ids)):
        raise cursor.origin.corrupt("a value in a data file that the node does not name")

    inline = cursor.take(sum([length for length, kind in zip(lengths, kinds, strict=True) if not kind]))
    lengths_there = compress(lengths, kinds)
    for offset, length in zip(offsets, lengths_there, strict=True):
        if offset + length > MAX_OFFSET:
            raise cursor.origin.corrupt(f"a value of {length} bytes at {offset}")

    sizes = np.fromiter(lengths, np.int64, count)
    indirect = np.fromiter(kinds, np.bool_, count)
    here = np.where(indirect, 0, sizes)
    places = np.cumsum(here) - here
    places[indirect] = np.fromiter(offsets, np.int64, n_indirect)
    numbers = np.full(count, -1, np.int64)
    numbers[indirect] = np.fromiter(ids, np.int64, n_indirect)
    return Values([file.path for file in files], inline, numbers, places, sizes)


# A tree of 100,000 leaves has 200,000 keys. One object per key would take longer to make than the index takes
# to read, and the garbage collector would take longer than both.
Column: TypeAlias = npt.NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """The places of the values of some keys, in the order of the keys."""

    files: list[str]  #: data files, relative to the database's directory
    inline: bytes  #: the values that are stored in the index itself, concatenated
    ids: Column  #: index into `files`, or -1 for a value in `inline`
    offsets: Column  #: bytes from the start of the file, or of `inline`
    lengths: Column  #: bytes

    @classmethod
    def of(cls, values: Iterable[Value]) -> Values:
        """Make columns from single values."""
        files: dict[str, int] = {}
        inline = bytearray()
        rows: list[tuple[int, int, int]] = []
        for value in values:
            if isinstance(value, Inline):
                rows.append((-1, len(inline), len(value.value)))
                inline += value.value
            else:
                rows.append((files.setdefault(value.file, len(files)), value.offset, value.length))

        columns = np.array(rows, np.int64).reshape(-1, 3)
        return cls(list(files), bytes(inline), columns[:, 0], columns[:, 1], columns[:, 2])


@final
class Index(Mapping[bytes, Value]):
    """All keys of a database, each with its `Value`. Immutable.

    Args:
        table: The keys.
        parts: Their values, in the order of the keys; each part covers the next few keys.
    """

    __slots__ = ("_inline", "_keys", "files", "ids", "lengths", "offsets", "rows")

    def __init__(self, table: KeyTable, parts: Iterable[Values]) -> None:
        files: dict[str, int] = {}
        inline = bytearray()
        known: dict[bytes, int] = {}  # each distinct inline value once: arrays are of few kinds
        none = np.zeros(0, np.int64)
        ids, offsets, lengths = [none], [none], [none]
        for part in parts:
            numbers = np.array([*[files.setdefault(file, len(files)) for file in part.files], -1], np.int64)
            here = np.flatnonzero(part.ids < 0)
            found: list[int] = []
            for start, nbytes in zip(part.offsets[here].tolist(), part.lengths[here].tolist(), strict=True):
                value = part.inline[start : start + nbytes]
                at = known.get(value)
                if at is None:
                    at = known[value] = len(inline)
                    inline += value

                found.append(at)

            places = part.offsets.copy()
            places[here] = found
            ids.append(numbers[part.ids])
            offsets.append(places)
            lengths.append(part.lengths)

        self._keys = table.keys
        self.rows = table.rows  #: the row of each key
        self.files = list(files)  #: data files, relative to the database's directory
        self.ids = np.concatenate(ids)  #: index into `files`; -1 if inline
        self.offsets = np.concatenate(offsets)
        self.lengths = np.concatenate(lengths)
        self._inline = bytes(inline)

    @classmethod
    def of(cls, values: Mapping[bytes, Value]) -> Index:
        """Make an index from a mapping of a few keys."""
        ordered = sorted(values)
        return cls(KeyTable.of(ordered), [Values.of([values[key] for key in ordered])])

    def __getitem__(self, key: bytes) -> Value:
        return self.value(self.rows[key])

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def keys_in_order(self) -> Sequence[bytes]:
        """All keys, in ascending order: that of their rows."""
        return self._keys

    def rows_below(self, prefix: bytes) -> range:
        """Return the rows of the keys that begin with `prefix`, which is empty or ends with a slash."""
        if not prefix:
            return range(len(self._keys))

        behind = prefix[:-1] + bytes([prefix[-1] + 1])
        return range(bisect_left(self._keys, prefix), bisect_left(self._keys, behind))

    def value(self, row: int) -> Value:
        """Return the value of one row."""
        file, offset, length = int(self.ids[row]), int(self.offsets[row]), int(self.lengths[row])
        if file < 0:
            return Inline(self._inline[offset : offset + length])

        return Indirect(self.files[file], offset, length)

    def inline_values(self, rows: list[int]) -> list[bytes | None]:
        """Return the inline values of many rows; None for a value in a data file."""
        ids, offsets = self.ids[rows], self.offsets[rows]
        ends = offsets + self.lengths[rows]
        inline = self._inline
        return [
            inline[start:end] if file < 0 else None
            for file, start, end in zip(ids.tolist(), offsets.tolist(), ends.tolist(), strict=True)
        ]

    @property
    def inline_nbytes(self) -> int:
        """Bytes of all values that are stored in the index itself."""
        return int(self.lengths[self.ids < 0].sum())

    def content_key(self) -> Hashable:
        """Return a value that is equal for two indices with the same keys and the same inline values.

        Keys are the same if their table is the same object. Places in data files are not compared.
        """
        inline = self.ids < 0
        places = self.offsets[inline].tobytes(), self.lengths[inline].tobytes()
        return ByIdentity(self.rows), self._inline, inline.tobytes(), places

    def needed(self) -> dict[str, int]:
        """Return the least length of each data file, in bytes."""
        there = self.ids >= 0
        ends = np.zeros(len(self.files), np.int64)
        np.maximum.at(ends, self.ids[there], (self.offsets + self.lengths)[there])
        return dict(zip(self.files, ends.tolist(), strict=True))


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
