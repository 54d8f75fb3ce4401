"""Decodes uncompressed OCDBT manifests and B+tree nodes.

Source:
    TensorStore's OCDBT page, sections "Manifest format" and "B+tree node format".
"""

from __future__ import annotations

__all__ = ("Child", "Manifest", "Node", "NodeReference", "decode_manifest", "decode_node")

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import final

import numpy as np

from penstock.handlers.ocdbt.index_entries import Values
from penstock.handlers.ocdbt.key_cache import RememberedKeys
from penstock.handlers.ocdbt.key_tables import DataFile, decode_files, decode_keys
from penstock.handlers.ocdbt.wire_format import (
    MAX_NODE_ENTRIES,
    MAX_OFFSET,
    MISSING,
    UNCOMPRESSED,
    ZSTD,
    Cursor,
)

_MANIFEST_KINDS = (0, 1)  # single, numbered


@final
@dataclass(frozen=True, slots=True)
class NodeReference:
    """Where a B+tree node lies, and what its parent records about it."""

    file: DataFile
    offset: int  #: bytes from the start of the file
    length: int  #: bytes, compressed or not
    height: int  #: 0 for a leaf
    n_keys: int  #: in the leaves below
    tree_bytes: int = 0  #: of this node and all below, as recorded; 0 if that is not known


@final
@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest records about the newest version."""

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

    numbered = bool(kind)
    root = None if numbered else _newest_root(cursor)
    cursor.finish()
    return Manifest(numbered, root)


def _newest_root(cursor: Cursor) -> NodeReference | None:
    files = decode_files(cursor, "")
    count = cursor.varint()
    if not count:
        raise cursor.origin.corrupt("a manifest without versions")

    generations = cursor.varints(count)
    heights = cursor.take(count)
    root = _references(cursor, files, count, heights)[-1]
    if sorted(set(generations)) != list(generations):
        raise cursor.origin.corrupt("versions are not in ascending order")

    cursor.take(8 * count)  # commit times
    n_older = cursor.varint()
    for _ in range(5):  # generation numbers, file ids, offsets, lengths, numbers of generations
        cursor.varints(n_older)

    cursor.take(9 * n_older)  # commit times, heights
    return root


def _references(
    cursor: Cursor, files: list[DataFile], count: int, heights: bytes
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


def _values(cursor: Cursor, files: list[DataFile], count: int) -> Values:
    """Read the values of a leaf."""
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

    return _in_columns([file.path for file in files], inline, lengths, kinds, ids, offsets)


def _in_columns(
    files: list[str],
    inline: bytes,
    lengths: Sequence[int],
    kinds: Sequence[int],
    ids: Sequence[int],
    offsets: Sequence[int],
) -> Values:
    """Make the columns; an inline value's offset is the total length of the inline values before it."""
    sizes = np.fromiter(lengths, np.int64, len(lengths))
    indirect = np.fromiter(kinds, np.bool_, len(kinds))
    here = np.where(indirect, 0, sizes)
    places = np.cumsum(here) - here
    places[indirect] = np.fromiter(offsets, np.int64, len(offsets))
    numbers = np.full(len(sizes), -1, np.int64)
    numbers[indirect] = np.fromiter(ids, np.int64, len(ids))
    return Values(files, inline, numbers, places, sizes)
