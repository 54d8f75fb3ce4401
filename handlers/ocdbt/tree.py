"""Encode the B+tree nodes of an OCDBT index.

Source:
    TensorStore's OCDBT page, section "B+tree node format".
"""

from __future__ import annotations

__all__ = ("NodeSummary", "TreeBuilder")

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from penstock.handlers.ocdbt.columns import common_prefix, encode_files, encode_keys, shared_prefixes
from penstock.handlers.ocdbt.values import MAX_INLINE_BYTES, Indirect, Inline, Value
from penstock.handlers.ocdbt.wire import (
    ENVELOPE_BYTES,
    MAX_NODE_ENTRIES,
    MAX_OFFSET,
    NODE_MAGIC,
    seal,
    varint,
    varints,
)
from penstock.kernel.errors import SpecError

# The most that the varints of one entry take, when every one of them is as long as its field allows.
_LEAF_ENTRY_BYTES = 3 + 3 + 9 + 1 + 5 + 9
_INTERIOR_ENTRY_BYTES = 3 + 3 + 3 + 6 * 9
_NODE_BYTES = ENVELOPE_BYTES + 1 + 3  # with height and number of entries


@final
@dataclass(frozen=True, slots=True)
class NodeSummary:
    """An encoded node, as its parent refers to it."""

    first_key: bytes
    last_key: bytes
    offset: int  #: in the node file
    nbytes: int
    n_keys: int  #: in the leaves below
    tree_bytes: int  #: of this node and all below
    indirect_bytes: int  #: of the values in data files, below


@final
class TreeBuilder:
    """Encodes the nodes of one tree, level by level from the leaves up."""

    def __init__(self, node_file: str, node_offset: int, max_node_bytes: int) -> None:
        self.nodes: list[bytes] = []  #: encoded, leaves first, root last
        self.height = 0  #: of the level built last
        self._table = encode_files([node_file])
        self._next_offset = node_offset
        self._max_node_bytes = max_node_bytes

    def build(self, keys: list[bytes], values: list[Value]) -> NodeSummary:
        """Encode all nodes and return the root."""
        shared = shared_prefixes(keys)
        costs = [
            _LEAF_ENTRY_BYTES + len(key) - common + (len(value.value) if isinstance(value, Inline) else 0)
            for key, common, value in zip(keys, [0, *shared], values, strict=True)
        ]
        cuts = self._cuts(costs, at_least=1)
        if len(cuts) == 1:
            return self._leaf(keys, shared, values, inherited=0)

        level: list[NodeSummary] = []
        for i, j in cuts:
            inherited = common_prefix(keys[i], keys[j - 1])
            level.append(self._leaf(keys[i:j], shared[i : j - 1], values[i:j], inherited))

        while len(level) > 1:
            self.height += 1
            level = self._parents(level)

        return level[0]

    def _parents(self, children: list[NodeSummary]) -> list[NodeSummary]:
        keys = [child.first_key for child in children]
        shared = shared_prefixes(keys)
        costs = [
            _INTERIOR_ENTRY_BYTES + len(key) - common for key, common in zip(keys, [0, *shared], strict=True)
        ]
        # With two children at least, every level is shorter than the one below, however small a node
        # is to be.
        cuts = self._cuts(costs, at_least=2)
        if len(cuts) == 1:
            return [self._interior(children, shared, inherited=0)]

        return [
            self._interior(
                children[i:j], shared[i : j - 1], inherited=common_prefix(keys[i], children[j - 1].last_key)
            )
            for i, j in cuts
        ]

    def _cuts(self, costs: list[int], at_least: int) -> list[tuple[int, int]]:
        """Divide a level into nodes of the size aimed at, as ranges of its entries."""
        starts = [0]
        total = _NODE_BYTES + len(self._table)
        for i, cost in enumerate(costs):
            total += cost
            n_entries = i - starts[-1]
            if n_entries >= MAX_NODE_ENTRIES or (total > self._max_node_bytes and n_entries >= at_least):
                starts.append(i)
                total = _NODE_BYTES + len(self._table) + cost

        return list(pairwise([*starts, len(costs)]))

    def _leaf(self, keys: list[bytes], shared: list[int], values: list[Value], inherited: int) -> NodeSummary:
        """Encode one leaf, leaving out the first `inherited` bytes of every key."""
        references = [value for value in values if isinstance(value, Indirect)]
        files = sorted({reference.file for reference in references})
        ids = {file: i for i, file in enumerate(files)}
        offsets = [reference.offset for reference in references]
        lengths = [len(value.value) if isinstance(value, Inline) else value.length for value in values]
        inline = [value.value for value in values if isinstance(value, Inline)]
        _check_values(references, inline)

        columns = (
            b"\0",  # the height of a leaf
            encode_files(files),
            varint(len(keys)),
            *encode_keys(keys, shared, inherited),
            varints(lengths),
            bytes([isinstance(value, Indirect) for value in values]),
            varints([ids[reference.file] for reference in references]),
            varints(offsets),
            *inline,
        )
        indirect_bytes = sum([reference.length for reference in references])
        return self._append(columns, keys[0], keys[-1], len(keys), 0, indirect_bytes)

    def _interior(self, children: list[NodeSummary], shared: list[int], inherited: int) -> NodeSummary:
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
            bytes(len(children)),  # the one file of the table
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
        self.nodes.append(node)
        offset = self._next_offset
        self._next_offset += len(node)
        return NodeSummary(first, last, offset, len(node), n_keys, below + len(node), indirect)


def _check_values(references: list[Indirect], inline: list[bytes]) -> None:
    """Refuse values that no OCDBT database, or not this one, can hold."""
    longest = max(map(len, inline), default=0)
    if longest > MAX_INLINE_BYTES:
        raise SpecError(f"an inline value has {longest} bytes; {MAX_INLINE_BYTES} are allowed")

    for reference in references:
        offset, length = reference.offset, reference.length
        if offset < 0 or length < 0 or offset + length > MAX_OFFSET:
            raise SpecError(f"{length} bytes at {offset} are no range of {reference.file!r}")
