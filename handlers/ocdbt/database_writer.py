"""Encodes an OCDBT index: the B+tree nodes of one version, and the manifest that points to their root.

Most of the work depends only on the keys. An `IndexPlan` does it once for all checkpoints of one tree; its
`encode` adds the places of the values, which differ from save to save. An `_Encoder` writes the nodes level
by level.

Source:
    TensorStore's OCDBT page, sections "Manifest format" and "B+tree node format".
"""

from __future__ import annotations

__all__ = (
    "DEFAULT_MAX_NODE_BYTES",
    "EncodedIndex",
    "IndexPlan",
    "Places",
    "encode_index",
    "in_data_files",
    "int64s",
)

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from operator import ne
from typing import Final, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.ocdbt.wire_format import (
    ENVELOPE_BYTES,
    MANIFEST_MAGIC,
    MAX_INLINE_BYTES,
    MAX_KEY_BYTES,
    MAX_NODE_ENTRIES,
    MAX_OFFSET,
    MAX_PATH_BYTES,
    MISSING,
    NODE_MAGIC,
    UNCOMPRESSED,
    Indirect,
    Inline,
    Value,
    path_problem,
    seal,
    varint,
    varint_column,
    varints,
)
from penstock.kernel.concurrency.brief_steps import (
    STEP,
    all_neighbours,
    append,
    drop,
    integers,
    joined,
    rows_in_order,
)
from penstock.kernel.errors import SpecError

DEFAULT_MAX_NODE_BYTES = 8 * 1024 * 1024  #: TensorStore's own default

# A database has one version, as TensorStore writes a new one: a single manifest, of generation 1.
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
    """The part of an uncompressed single-version OCDBT index that does not depend on where values are.

    Most of the encoding is done here, once for all checkpoints of one tree.

    Args:
        keys: In any order; nearly sorted keys are fastest.
        inline: The value of each key, or None if it is in a data file.
        lengths: The length of each key's value, in bytes.
        max_node_bytes: Target size of a node. A node may exceed it because of its table of data files,
            because of a single large entry, or because an interior node has at least two children.

    Raises:
        SpecError: If a key is given twice or is longer than 65535 bytes, if an inline value is longer than
            `MAX_INLINE_BYTES`, or if `max_node_bytes` is not a positive 32-bit number.
    """

    __slots__ = ("_leaves", "_lengths", "_max_node_bytes")

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
        self._leaves: list[_LeafPlan] = []
        self._lengths = np.zeros(0, np.int64)  #: of the values in data files, in the order of their places
        rows = rows_in_order(keys)
        sorted_keys = [keys[row] for row in rows]
        if not all_neighbours(ne, sorted_keys):
            twice = next(a for a, b in pairwise(sorted_keys) if a == b)
            raise SpecError(f"key {twice!r} is given twice")

        longest = int64s(map(len, sorted_keys)).max(initial=0)
        if longest > MAX_KEY_BYTES:
            raise SpecError(f"a key has {longest} bytes; {MAX_KEY_BYTES} are allowed")
        if not rows:
            return

        # Among the keys as given, the n-th whose value is in a data file has the n-th place.
        is_placed, order = in_data_files(inline), int64s(rows)
        slots = (np.cumsum(is_placed) - 1)[order]
        is_placed = is_placed[order]
        slots = slots[is_placed]
        sizes = lengths if isinstance(lengths, np.ndarray) else int64s(lengths)
        sizes = sizes[order]
        if sizes[is_placed].sum(dtype=np.float64) >= MAX_OFFSET:  # nodes add them up
            raise SpecError(f"the values in data files have more than {MAX_OFFSET} bytes together")

        self._lengths = np.zeros(len(slots), np.int64)
        self._lengths[slots] = sizes[is_placed]
        shared = shared_prefixes(sorted_keys)
        costs = _LEAF_ENTRY_BYTES + int64s(map(len, sorted_keys)) + np.where(is_placed, 0, sizes)
        costs[1:] -= shared
        cuts = _cuts(costs, max_node_bytes, at_least=1)
        values = [inline[row] for row in rows]
        placed_before = np.concatenate([[0], np.cumsum(is_placed)])
        for i, j in cuts:
            self._leaves.append(
                _plan_leaf(
                    sorted_keys[i:j],
                    shared[i : j - 1],
                    values[i:j],
                    sizes[i:j],
                    is_placed[i:j],
                    slots[placed_before[i] : placed_before[j]],
                    inherited=common_prefix(sorted_keys[i], sorted_keys[j - 1]) if len(cuts) > 1 else 0,
                )
            )

        drop(sorted_keys)

    def encode(
        self, places: Places, *, node_file: str, node_offset: int, uuid: bytes, commit_time_ns: int
    ) -> EncodedIndex:
        """Encode the index. The nodes and every data file must be durable before the manifest is written.

        Args:
            places: Where the values that are not inline are, in the order in which their keys were given.
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
        if len(uuid) != 16:
            raise SpecError(f"uuid has {len(uuid)} bytes, not 16")
        if not 0 <= commit_time_ns < 1 << 64:
            raise SpecError(f"commit_time_ns {commit_time_ns} is not an unsigned 64-bit number")
        if not 0 <= node_offset <= MAX_OFFSET // 2:  # the end of the nodes is then within the limit, too
            raise SpecError(f"node_offset {node_offset} is not within a file")

        offsets, lengths = places.offsets, self._lengths
        bad = np.flatnonzero((offsets < 0) | (lengths < 0) | (offsets > MAX_OFFSET - lengths))
        if bad.size:
            at = int(bad[0])
            file = places.files[int(places.file_ids[at])]
            raise SpecError(f"{lengths[at]} bytes at {offsets[at]} are not a possible range of {file!r}")

        encoder = _Encoder(node_file, node_offset, self._max_node_bytes)
        level = [encoder.leaf(leaf, places) for leaf in self._leaves]
        while len(level) > 1:
            level = encoder.parents(level)

        root = level[0] if level else _NO_ROOT
        manifest = b"".join(
            (
                uuid,
                varints((_SINGLE_MANIFEST, MAX_INLINE_BYTES, self._max_node_bytes)),
                bytes((_VERSION_TREE_ARITY_LOG2, UNCOMPRESSED)),
                encoder.table if level else _NO_FILE,
                varints((1, _GENERATION)),
                bytes((encoder.height,)),
                varints((0, root.offset, root.nbytes, root.n_keys, root.tree_bytes, root.indirect_bytes)),
                commit_time_ns.to_bytes(8, "little"),
                varint(0),  # no older versions
            )
        )
        return EncodedIndex(encoder.nodes.getvalue(), seal(MANIFEST_MAGIC, manifest))


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


# The most bytes that the varints of one entry take, if each is as long as its field allows.
_LEAF_ENTRY_BYTES = 3 + 3 + 9 + 1 + 5 + 9
_INTERIOR_ENTRY_BYTES = 3 + 3 + 3 + 6 * 9
_NODE_BYTES = ENVELOPE_BYTES + 1 + 3  # the height and the number of entries
_TABLE_BYTES = 40  # a table of one data file with a name of the usual length


@final
@dataclass(frozen=True, slots=True)
class NodeSummary:
    """The record of an encoded node in its parent."""

    first_key: bytes
    last_key: bytes
    offset: int  #: in the node file
    nbytes: int
    n_keys: int  #: in the leaves below
    tree_bytes: int  #: bytes of this node and all nodes below
    indirect_bytes: int  #: bytes of the values below that are in data files


_NO_ROOT: Final = NodeSummary(b"", b"", MISSING, MISSING, 0, 0, 0)
"""The record of the root of an index without keys."""


@final
@dataclass(frozen=True, slots=True)
class Places:
    """The places of values, in columns: value `i` is in `files[file_ids[i]]` at byte `offsets[i]`."""

    files: Sequence[str]  #: distinct paths, relative to the database's directory
    file_ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


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


def int64s(numbers: Iterable[int]) -> npt.NDArray[np.int64]:
    """Return a column of numbers, which `integers` makes in steps."""
    return np.frombuffer(integers(numbers), np.int64)


def in_data_files(inline: Sequence[bytes | None]) -> npt.NDArray[np.bool_]:
    """Return for each value whether it is in a data file."""
    found = np.empty(len(inline), np.bool_)
    for at in range(0, len(inline), STEP):
        found[at : at + STEP] = [value is None for value in inline[at : at + STEP]]

    return found


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
    longest = int64s(map(len, values)).max(initial=0)
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
        self.table = encode_files([node_file])  #: of the data files of interior nodes and of the manifest
        self._next_offset = node_offset
        self._max_node_bytes = max_node_bytes

    def leaf(self, plan: _LeafPlan, places: Places) -> NodeSummary:
        file_ids = places.file_ids[plan.placed]
        used: list[int] = sorted(np.unique(file_ids).tolist(), key=places.files.__getitem__)
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
        costs = _INTERIOR_ENTRY_BYTES + int64s(map(len, keys))
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
            self.table,
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


# The columns of sorted keys, which nodes and tables of data files begin with. A key is written without what
# it shares with the one before.
_USUAL_BYTES: Final = 1024  # of a key


def common_prefix(a: bytes, b: bytes) -> int:
    """Return how many leading bytes two keys share."""
    # The lowest differing bit is in the first differing byte. Two conversions and an xor cost a tenth of
    # comparing byte by byte.
    difference = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    shorter = min(len(a), len(b))
    if not difference:
        return shorter

    return min(((difference & -difference).bit_length() - 1) >> 3, shorter)


def shared_prefixes(keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Return, for every key but the first, how many leading bytes it shares with the previous one.

    A few thousand keys at once are laid out as a table of bytes, if they are of a usual length.
    """
    found = np.zeros(max(len(keys) - 1, 0), np.int64)
    for at in range(0, len(found), STEP):
        part = keys[at : at + STEP + 1]
        sizes = int64s(map(len, part))
        width = int(sizes.max())
        if width > _USUAL_BYTES:
            found[at : at + STEP] = [common_prefix(a, b) for a, b in pairwise(part)]
            continue

        table = np.array(part, f"S{max(width, 1)}").view(np.uint8).reshape(len(part), -1)
        differ = table[1:] != table[:-1]
        first = np.where(differ.any(axis=1), differ.argmax(axis=1), width)
        found[at : at + STEP] = np.minimum(first, np.minimum(sizes[1:], sizes[:-1]))

    return found


def encode_keys(
    keys: Sequence[bytes], shared: npt.NDArray[np.int64], inherited: int
) -> tuple[bytes, bytes, bytes]:
    """Encode the keys of a node as lengths of prefixes, lengths of suffixes, and suffixes.

    Args:
        keys: At least one key, in ascending order.
        shared: Their `shared_prefixes`.
        inherited: How many leading bytes to leave out; all keys share them, and the parent node holds them.
    """
    starts = np.concatenate([np.array([inherited], np.int64), shared])
    suffixes: list[bytes] = []
    for at in range(0, len(keys), STEP):
        firsts: list[int] = starts[at : at + STEP].tolist()
        rows = zip(keys[at : at + STEP], firsts, strict=True)
        suffixes.append(b"".join([key[start:] for key, start in rows]))

    return (
        varint_column(shared - inherited),
        varint_column(int64s(map(len, keys)) - starts),
        b"".join(suffixes),
    )


def encode_files(paths: Sequence[str]) -> bytes:
    """Encode a data file table.

    Every base path is left empty, because base paths only matter for nodes in a database below this one.

    Raises:
        SpecError: If a path is not a plain relative one, or is too long.
    """
    for path in paths:
        if problem := path_problem(path):
            raise SpecError(problem)

    try:
        encoded = [path.encode() for path in paths]
    except UnicodeEncodeError as error:
        raise SpecError(f"data file path {error.object!r} cannot be encoded as UTF-8") from error
    if too_long := [path for path in encoded if len(path) > MAX_PATH_BYTES]:
        raise SpecError(f"data file path of {len(too_long[0])} bytes; {MAX_PATH_BYTES} are allowed")
    if not encoded:
        return varint(0)

    prefixes, lengths, suffixes = encode_keys(encoded, shared_prefixes(encoded), inherited=0)
    return b"".join((varint(len(paths)), prefixes, lengths, bytes(len(paths)), suffixes))
