"""Encodes an OCDBT index: the B+tree nodes of one version, and the manifest that points to their root."""

from __future__ import annotations

__all__ = ("DEFAULT_MAX_NODE_BYTES", "EncodedIndex", "IndexPlan", "Places", "encode_index")

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import ne
from typing import final

import numpy as np
import numpy.typing as npt

from penstock.handlers.ocdbt.btree_encoding import NodeSummary, Places, TreePlan, in_data_files
from penstock.handlers.ocdbt.key_tables import encode_files, key_lengths
from penstock.handlers.ocdbt.value_refs import MAX_INLINE_BYTES, Indirect, Inline, Value
from penstock.handlers.ocdbt.wire_format import (
    MANIFEST_MAGIC,
    MAX_KEY_BYTES,
    MAX_OFFSET,
    MISSING,
    UNCOMPRESSED,
    seal,
    varint,
    varints,
)
from penstock.kernel.concurrency.brief_steps import all_neighbours, drop, integers, rows_in_order
from penstock.kernel.errors import SpecError

DEFAULT_MAX_NODE_BYTES = 8 * 1024 * 1024  #: TensorStore's own default

_SINGLE_MANIFEST = 0
_VERSION_TREE_ARITY_LOG2 = 4
_GENERATION = 1
_NO_FILE = bytes((1, 0, 0))  # a data file table with one file, whose name is empty


@final
@dataclass(frozen=True, slots=True)
class EncodedIndex:
    """An encoded index, ready to be written."""

    nodes: bytes  #: to be written to the node file at the given offset; empty if there are no keys
    manifest: bytes  #: the whole content of `manifest.ocdbt`


@final
class IndexPlan:
    """The part of an uncompressed single-version OCDBT index that does not depend on where values lie.

    Most of the encoding is done here, once for all checkpoints of one tree.

    Args:
        keys: In any order; nearly sorted keys are fastest.
        inline: The value of each key, or None if it lies in a data file.
        lengths: The length of each key's value, in bytes.
        max_node_bytes: Target size of a node. A node may exceed it because of its table of data files,
            because of a single large entry, or because an interior node has at least two children.

    Raises:
        SpecError: If a key is given twice or is longer than 65535 bytes, if an inline value is longer than
            `MAX_INLINE_BYTES`, or if `max_node_bytes` is not a positive 32-bit number.
    """

    __slots__ = ("_max_node_bytes", "_tree")

    def __init__(
        self,
        keys: Sequence[bytes],
        inline: Sequence[bytes | None],
        lengths: Sequence[int] | npt.NDArray[np.int64],
        max_node_bytes: int = DEFAULT_MAX_NODE_BYTES,
    ) -> None:
        if not 0 < max_node_bytes < 1 << 32:
            raise SpecError(f"max_node_bytes {max_node_bytes} is not a positive 32-bit number")

        self._max_node_bytes = max_node_bytes
        self._tree: TreePlan | None = None
        rows = rows_in_order(keys)
        sorted_keys = [keys[row] for row in rows]
        _check_keys(sorted_keys)
        if not rows:
            return

        # Among the keys as given, the n-th whose value lies in a data file has the n-th place.
        is_placed = in_data_files(inline)
        slots, in_order = np.cumsum(is_placed) - 1, np.frombuffer(integers(rows), np.int64)
        sizes = lengths if isinstance(lengths, np.ndarray) else np.frombuffer(integers(lengths), np.int64)
        self._tree = TreePlan(
            sorted_keys,
            [inline[row] for row in rows],
            sizes[in_order],
            slots[in_order[is_placed[in_order]]],
            max_node_bytes,
        )
        drop(sorted_keys)

    def encode(
        self, places: Places, *, node_file: str, node_offset: int, uuid: bytes, commit_time_ns: int
    ) -> EncodedIndex:
        """Encode the index. The nodes and every data file must be durable before the manifest is written.

        Args:
            places: Where the values that are not inline lie, in the order in which their keys were given.
            node_file: The data file that will hold the nodes, relative to the database's directory.
            node_offset: Offset of the first byte of `nodes` in that file.
            uuid: 16 bytes that identify the database.
            commit_time_ns: Nanoseconds since the epoch.

        Returns:
            The nodes, leaves first and root last, and the manifest: one version, generation 1.

        Raises:
            SpecError: If the format does not allow a path, range, offset, uuid or commit time.

        Source:
            TensorStore's OCDBT page, sections "Manifest format", "Data file table format" and "B+tree
            node format". Every base path is left empty, because base paths only matter for nodes in a
            database below this one.
        """
        _check_options(node_offset, uuid, commit_time_ns)
        table = encode_files([node_file])
        tree = self._tree.encode(places, node_file, node_offset) if self._tree else None
        manifest = b"".join(
            (
                uuid,
                varints((_SINGLE_MANIFEST, MAX_INLINE_BYTES, self._max_node_bytes)),
                bytes((_VERSION_TREE_ARITY_LOG2, UNCOMPRESSED)),
                table if tree else _NO_FILE,
                varints((1, _GENERATION)),
                bytes((tree.height if tree else 0,)),
                _root_columns(tree.root if tree else None),
                commit_time_ns.to_bytes(8, "little"),
                varint(0),  # no older versions
            )
        )
        return EncodedIndex(tree.nodes if tree else b"", seal(MANIFEST_MAGIC, manifest))


def encode_index(
    entries: Iterable[tuple[bytes, Value]],
    *,
    node_file: str,
    node_offset: int,
    uuid: bytes,
    commit_time_ns: int,
    max_node_bytes: int = DEFAULT_MAX_NODE_BYTES,
) -> EncodedIndex:
    """Encode keys and values as an index in one step; see `IndexPlan` and `IndexPlan.encode`."""
    rows = list(entries)
    references = [value for _, value in rows if isinstance(value, Indirect)]
    for reference in references:
        offset, length = reference.offset, reference.length
        if offset < 0 or length < 0 or offset + length > MAX_OFFSET:
            raise SpecError(f"{length} bytes at {offset} are not a possible range of {reference.file!r}")

    files = list(dict.fromkeys(reference.file for reference in references))
    ids = {file: at for at, file in enumerate(files)}
    plan = IndexPlan(
        [key for key, _ in rows],
        [value.value if isinstance(value, Inline) else None for _, value in rows],
        [len(value.value) if isinstance(value, Inline) else value.length for _, value in rows],
        max_node_bytes,
    )
    places = Places(
        files,
        np.array([ids[reference.file] for reference in references], np.int64),
        np.array([reference.offset for reference in references], np.int64),
    )
    return plan.encode(
        places, node_file=node_file, node_offset=node_offset, uuid=uuid, commit_time_ns=commit_time_ns
    )


def _root_columns(root: NodeSummary | None) -> bytes:
    if root is None:
        return varints((0, MISSING, MISSING, 0, 0, 0))

    return varints((0, root.offset, root.nbytes, root.n_keys, root.tree_bytes, root.indirect_bytes))


def _check_options(node_offset: int, uuid: bytes, commit_time_ns: int) -> None:
    if len(uuid) != 16:
        raise SpecError(f"uuid has {len(uuid)} bytes, not 16")
    if not 0 <= commit_time_ns < 1 << 64:
        raise SpecError(f"commit_time_ns {commit_time_ns} is not an unsigned 64-bit number")
    if not 0 <= node_offset <= MAX_OFFSET // 2:  # the end of the nodes is then within the limit, too
        raise SpecError(f"node_offset {node_offset} is not within a file")


def _check_keys(keys: Sequence[bytes]) -> None:
    """Raise `SpecError` for keys that no OCDBT database can hold. They must be in ascending order."""
    if not all_neighbours(ne, keys):
        twice = next(a for a, b in pairwise(keys) if a == b)
        raise SpecError(f"key {twice!r} is given twice")

    longest = key_lengths(keys).max(initial=0)
    if longest > MAX_KEY_BYTES:
        raise SpecError(f"a key has {longest} bytes; {MAX_KEY_BYTES} are allowed")
