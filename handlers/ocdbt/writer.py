"""Encode an OCDBT index: the B+tree nodes of one version, and the manifest that points to their root."""

from __future__ import annotations

__all__ = ("DEFAULT_MAX_NODE_BYTES", "EncodedIndex", "encode_index")

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import eq, itemgetter
from typing import final

from penstock.handlers.ocdbt.columns import encode_files
from penstock.handlers.ocdbt.tree import NodeSummary, TreeBuilder
from penstock.handlers.ocdbt.values import MAX_INLINE_BYTES, Value
from penstock.handlers.ocdbt.wire import (
    MANIFEST_MAGIC,
    MAX_KEY_BYTES,
    MAX_OFFSET,
    MISSING,
    UNCOMPRESSED,
    seal,
    varint,
    varints,
)
from penstock.kernel.errors import SpecError

DEFAULT_MAX_NODE_BYTES = 8 * 1024 * 1024  #: TensorStore's own default

_SINGLE_MANIFEST = 0
_VERSION_TREE_ARITY_LOG2 = 4
_GENERATION = 1
_RUN = 8192  # keys sorted at once
_NO_FILE = bytes((1, 0, 0))  # a data file table of one file, whose name is empty


@final
@dataclass(frozen=True, slots=True)
class EncodedIndex:
    """An index, ready to be written."""

    nodes: bytes  #: to be written into the node file at the offset given; empty if there are no keys
    manifest: bytes  #: the whole content of `manifest.ocdbt`


def encode_index(
    entries: Iterable[tuple[bytes, Value]],
    *,
    node_file: str,
    node_offset: int,
    uuid: bytes,
    commit_time_ns: int,
    max_node_bytes: int = DEFAULT_MAX_NODE_BYTES,
) -> EncodedIndex:
    """Encode keys and values as an uncompressed single-version OCDBT index.

    The nodes and every data file must be durable before the manifest is written.

    Args:
        entries: Keys with their values, in any order; nearly sorted is fastest.
        node_file: The data file that will hold the nodes, relative to the database's directory.
        node_offset: Where in it the first byte of `nodes` will lie.
        uuid: 16 bytes that identify the database.
        commit_time_ns: Nanoseconds since the epoch.
        max_node_bytes: Size of a node aimed at. One may exceed it by its table of data files, by a
            single large entry, or in that an interior node has at least two children.

    Returns:
        The nodes, leaves first and root last, and the manifest: one version, generation 1.

    Raises:
        SpecError: If a key is given twice or is longer than 65535 bytes, an inline value is longer
            than `MAX_INLINE_BYTES`, or a path, range, uuid or size is not what the format allows.

    Source:
        TensorStore's OCDBT page, sections "Manifest format", "Data file table format" and "B+tree
        node format". Every base path is left empty: it only matters for nodes that lie in a
        database below this one.
    """
    _check_options(node_offset, uuid, commit_time_ns, max_node_bytes)
    ordered = _ascending(list(entries))
    keys = [key for key, _ in ordered]
    _check_keys(keys)
    tree = TreeBuilder(node_file, node_offset, max_node_bytes)
    root = tree.build(keys, [value for _, value in ordered]) if keys else None

    manifest = b"".join(
        (
            uuid,
            varints((_SINGLE_MANIFEST, MAX_INLINE_BYTES, max_node_bytes)),
            bytes((_VERSION_TREE_ARITY_LOG2, UNCOMPRESSED)),
            encode_files([node_file]) if root else _NO_FILE,
            varints((1, _GENERATION)),
            bytes((tree.height,)),
            _root_columns(root),
            commit_time_ns.to_bytes(8, "little"),
            varint(0),  # no older versions
        )
    )
    return EncodedIndex(b"".join(tree.nodes), seal(MANIFEST_MAGIC, manifest))


def _ascending(entries: list[tuple[bytes, Value]]) -> list[tuple[bytes, Value]]:
    """Sort by key, in steps that each release the interpreter lock soon.

    Sorting 200,000 shuffled keys at once would stall the event loop for 0.2 s; the last merge of two
    runs takes a tenth of that.
    """
    by_key = itemgetter(0)
    runs: list[list[tuple[bytes, Value]]] = [
        sorted(entries[i : i + _RUN], key=by_key) for i in range(0, len(entries), _RUN)
    ]
    while len(runs) > 1:
        runs = [sorted([*runs[i], *chain(*runs[i + 1 : i + 2])], key=by_key) for i in range(0, len(runs), 2)]

    return runs[0] if runs else []


def _root_columns(root: NodeSummary | None) -> bytes:
    if root is None:
        return varints((0, MISSING, MISSING, 0, 0, 0))

    return varints((0, root.offset, root.nbytes, root.n_keys, root.tree_bytes, root.indirect_bytes))


def _check_options(node_offset: int, uuid: bytes, commit_time_ns: int, max_node_bytes: int) -> None:
    if len(uuid) != 16:
        raise SpecError(f"uuid has {len(uuid)} bytes, not 16")
    if not 0 <= commit_time_ns < 1 << 64:
        raise SpecError(f"commit_time_ns {commit_time_ns} is not an unsigned 64-bit number")
    if not 0 < max_node_bytes < 1 << 32:
        raise SpecError(f"max_node_bytes {max_node_bytes} is not a positive 32-bit number")
    if not 0 <= node_offset <= MAX_OFFSET // 2:  # where the nodes end is then within the limit, too
        raise SpecError(f"node_offset {node_offset} is not within a file")


def _check_keys(keys: list[bytes]) -> None:
    """Refuse keys, in ascending order, that no OCDBT database can hold."""
    if any(map(eq, keys, keys[1:])):
        twice = next(a for a, b in pairwise(keys) if a == b)
        raise SpecError(f"key {twice!r} is given twice")

    longest = max(map(len, keys), default=0)
    if longest > MAX_KEY_BYTES:
        raise SpecError(f"a key has {longest} bytes; {MAX_KEY_BYTES} are allowed")
