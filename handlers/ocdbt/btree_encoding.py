"""Encodes the B+tree nodes of an OCDBT index.

Source:
    TensorStore's OCDBT page, section "B+tree node format".
"""

from __future__ import annotations

__all__ = ("EncodedTree", "Places", "TreePlan", "in_data_files")

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.ocdbt.key_tables import (
    common_prefix,
    encode_files,
    encode_keys,
    key_lengths,
    shared_prefixes,
)
from penstock.handlers.ocdbt.value_refs import MAX_INLINE_BYTES
from penstock.handlers.ocdbt.wire_format import (
    ENVELOPE_BYTES,
    MAX_NODE_ENTRIES,
    MAX_OFFSET,
    NODE_MAGIC,
    seal,
    varint,
    varint_column,
    varints,
)
from penstock.kernel.concurrency.brief_steps import append, joined, parts_of
from penstock.kernel.errors import SpecError

# The most bytes that the varints of one entry take, if each is as long as its field allows.
_LEAF_ENTRY_BYTES = 3 + 3 + 9 + 1 + 5 + 9
_INTERIOR_ENTRY_BYTES = 3 + 3 + 3 + 6 * 9
_NODE_BYTES = ENVELOPE_BYTES + 1 + 3  # the height and the number of entries
_TABLE_BYTES = 40  # a table of one data file with a name of the usual length


@final
@dataclass(frozen=True, slots=True)
class NodeSummary:
    """What a parent records about an encoded node."""

    first_key: bytes
    last_key: bytes
    offset: int  #: in the node file
    nbytes: int
    n_keys: int  #: in the leaves below
    tree_bytes: int  #: bytes of this node and all nodes below
    indirect_bytes: int  #: bytes of the values below that lie in data files


@final
@dataclass(frozen=True, slots=True)
class Places:
    """Where values lie, in columns: value `i` is in `files[file_ids[i]]` at byte `offsets[i]`."""

    files: Sequence[str]  #: distinct paths, relative to the database's directory
    file_ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True)
class EncodedTree:
    """The encoded nodes of a tree."""

    nodes: bytes  #: leaves first, root last
    root: NodeSummary
    height: int  #: height of the root


@final
@dataclass(frozen=True, slots=True)
class _LeafPlan:
    """A leaf, except for the places of its values."""

    first_key: bytes
    last_key: bytes
    n_keys: int
    keys: bytes  #: the encoded columns from the number of entries to the kinds of values
    inline: Sequence[bytes]  #: the inline values; thousands of keys may share one
    placed: npt.NDArray[np.int64]  #: indices into the `Places` of this leaf's values, by ascending key
    indirect_bytes: int


@final
class TreePlan:
    """The part of a tree that does not depend on where its values lie.

    Args:
        keys: At least one key, in ascending order.
        inline: The value of each key, or None if it lies in a data file.
        lengths: The length of each key's value, in bytes; of an inline value, its own.
        slots: For each key whose value lies in a data file, in order: its index into the `Places`.
        max_node_bytes: See `encode_index`.
    """

    __slots__ = ("_lengths", "_max_node_bytes", "leaves")

    def __init__(
        self,
        keys: Sequence[bytes],
        inline: Sequence[bytes | None],
        lengths: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        max_node_bytes: int,
    ) -> None:
        self._max_node_bytes = max_node_bytes
        shared = shared_prefixes(keys)
        is_placed = in_data_files(inline)
        costs = _LEAF_ENTRY_BYTES + key_lengths(keys) + np.where(is_placed, 0, lengths)
        costs[1:] -= shared
        cuts = _cuts(costs, max_node_bytes, at_least=1)
        if lengths[is_placed].sum(dtype=np.float64) >= MAX_OFFSET:  # nodes add them up
            raise SpecError(f"the values in data files have more than {MAX_OFFSET} bytes together")

        placed_before = np.concatenate([[0], np.cumsum(is_placed)])
        self._lengths = np.zeros(len(slots), np.int64)
        self._lengths[slots] = lengths[is_placed]
        self.leaves: list[_LeafPlan] = []
        for i, j in cuts:
            inherited = common_prefix(keys[i], keys[j - 1]) if len(cuts) > 1 else 0
            mine = slots[placed_before[i] : placed_before[j]]
            self.leaves.append(
                _plan_leaf(
                    keys[i:j], shared[i : j - 1], inline[i:j], lengths[i:j], is_placed[i:j], mine, inherited
                )
            )

    def encode(self, places: Places, node_file: str, node_offset: int) -> EncodedTree:
        """Encode every node.

        Args:
            places: Where the values that are not inline lie.
            node_file: The data file that will hold the nodes.
            node_offset: Offset of the first node in that file.

        Raises:
            SpecError: If a value's range is impossible, or a file's path is not a plain relative one.
        """
        _check_places(places, self._lengths)
        encoder = _Encoder(node_file, node_offset, self._max_node_bytes)
        level = [encoder.leaf(leaf, places) for leaf in self.leaves]
        while len(level) > 1:
            level = encoder.parents(level)

        return EncodedTree(encoder.nodes.getvalue(), level[0], encoder.height)


def in_data_files(inline: Sequence[bytes | None]) -> npt.NDArray[np.bool_]:
    """Return for each value whether it lies in a data file."""
    parts = [np.array([value is None for value in part], np.bool_) for part in parts_of(inline)]
    return np.concatenate(parts) if parts else np.empty(0, np.bool_)


def _plan_leaf(
    keys: Sequence[bytes],
    shared: npt.NDArray[np.int64],
    inline: Sequence[bytes | None],
    lengths: npt.NDArray[np.int64],
    is_placed: npt.NDArray[np.bool_],
    placed: npt.NDArray[np.int64],
    inherited: int,
) -> _LeafPlan:
    """Encode the known columns of one leaf, leaving out the first `inherited` bytes of every key."""
    values = [value for value in inline if value is not None]
    longest = key_lengths(values).max(initial=0)
    if longest > MAX_INLINE_BYTES:
        raise SpecError(f"an inline value has {longest} bytes; {MAX_INLINE_BYTES} are allowed")

    columns = (
        varint(len(keys)),
        *encode_keys(keys, shared, inherited),
        varint_column(lengths),
        is_placed.tobytes(),
    )
    indirect_bytes = int(lengths[is_placed].sum())
    return _LeafPlan(keys[0], keys[-1], len(keys), b"".join(columns), values, placed, indirect_bytes)


@final
class _Encoder:
    """Encodes nodes, level by level from the leaves up."""

    def __init__(self, node_file: str, node_offset: int, max_node_bytes: int) -> None:
        self.nodes = BytesIO()  # whose content is taken without a copy, unlike that of joined pieces
        self.height = 0  #: height of the level encoded last
        self._table = encode_files([node_file])
        self._next_offset = node_offset
        self._max_node_bytes = max_node_bytes

    def leaf(self, plan: _LeafPlan, places: Places) -> NodeSummary:
        file_ids = places.file_ids[plan.placed]
        used = sorted(map(int, np.unique(file_ids)), key=lambda id_: places.files[id_])
        ranks = np.zeros(len(places.files) + 1, np.int64)
        ranks[used] = np.arange(len(used))
        columns = (
            b"\0",  # the height of a leaf
            encode_files([places.files[id_] for id_ in used]),
            plan.keys,
            varint_column(ranks[file_ids]),
            varint_column(places.offsets[plan.placed]),
            joined(plan.inline),
        )
        return self._append(columns, plan.first_key, plan.last_key, plan.n_keys, 0, plan.indirect_bytes)

    def parents(self, children: list[NodeSummary]) -> list[NodeSummary]:
        """Encode the next level."""
        self.height += 1
        keys = [child.first_key for child in children]
        shared = shared_prefixes(keys)
        costs = _INTERIOR_ENTRY_BYTES + key_lengths(keys)
        costs[1:] -= shared
        # With at least two children per node, each level has fewer nodes than the one below, however small
        # the nodes should be.
        cuts = _cuts(costs, self._max_node_bytes, at_least=2)
        if len(cuts) == 1:
            return [self._interior(children, shared, inherited=0)]

        return [
            self._interior(
                children[i:j], shared[i : j - 1], inherited=common_prefix(keys[i], children[j - 1].last_key)
            )
            for i, j in cuts
        ]

    def _interior(
        self, children: list[NodeSummary], shared: npt.NDArray[np.int64], inherited: int
    ) -> NodeSummary:
        """Encode one interior node, leaving out the first `inherited` bytes of every key."""
        keys = [child.first_key for child in children]
        prefixes, suffix_lengths, suffixes = encode_keys(keys, shared, inherited)
        n_keys = [child.n_keys for child in children]
        tree_bytes = [child.tree_bytes for child in children]
        indirect_bytes = [child.indirect_bytes for child in children]
        columns = (
            bytes((self.height,)),
            self._table,
            varint(len(children)),
            prefixes,
            suffix_lengths,
            varints([common_prefix(child.first_key, child.last_key) - inherited for child in children]),
            suffixes,
            bytes(len(children)),  # file id 0: the table has only one file
            varints([child.offset for child in children]),
            varints([child.nbytes for child in children]),
            varints(n_keys),
            varints(tree_bytes),
            varints(indirect_bytes),
        )
        last_key = children[-1].last_key
        return self._append(columns, keys[0], last_key, sum(n_keys), sum(tree_bytes), sum(indirect_bytes))

    def _append(
        self, columns: Sequence[bytes], first: bytes, last: bytes, n_keys: int, below: int, indirect: int
    ) -> NodeSummary:
        node = seal(NODE_MAGIC, b"".join(columns))
        append(self.nodes, node)
        offset = self._next_offset
        self._next_offset += len(node)
        return NodeSummary(first, last, offset, len(node), n_keys, below + len(node), indirect)


def _cuts(costs: npt.NDArray[np.int64], max_node_bytes: int, at_least: int) -> list[tuple[int, int]]:
    """Divide the entries of a level into nodes of about the target size; return (start, stop) ranges."""
    ends = np.cumsum(costs)
    cuts: list[tuple[int, int]] = []
    start, before = 0, 0
    while start < len(costs):
        room = before + max_node_bytes - _NODE_BYTES - _TABLE_BYTES
        fitting = int(np.searchsorted(ends, room, side="right"))  # the first that does not fit any more
        stop = min(max(fitting, start + at_least), start + MAX_NODE_ENTRIES, len(costs))
        cuts.append((start, stop))
        start, before = stop, int(ends[stop - 1])

    return cuts


def _check_places(places: Places, lengths: npt.NDArray[np.int64]) -> None:
    """Raise `SpecError` for a value whose range no OCDBT database can store."""
    offsets: npt.NDArray[Any] = places.offsets
    bad = np.flatnonzero((offsets < 0) | (lengths < 0) | (offsets > MAX_OFFSET - lengths))
    if bad.size:
        at = int(bad[0])
        file = places.files[int(places.file_ids[at])]
        raise SpecError(f"{lengths[at]} bytes at {offsets[at]} are not a possible range of {file!r}")
