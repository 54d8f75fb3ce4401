"""The columns that an OCDBT node begins with: sorted keys without what they share, and its data files.

`encode_keys` and `encode_files` write them, `decode_keys` and `decode_files` read them. `RememberedKeys`
keeps the keys of recent trees, because a checkpoint of the next step has the same ones.

Source:
    TensorStore's OCDBT page, sections "Data file table format" and "B+tree node format".
"""

from __future__ import annotations

__all__ = (
    "MOST_BYTES_OF_KEYS",
    "DataFileId",
    "KeyTable",
    "RememberedKeys",
    "common_prefix",
    "decode_files",
    "decode_keys",
    "encode_files",
    "encode_keys",
    "key_lengths",
    "shared_prefixes",
)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from operator import add, gt, lt
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.ocdbt.wire_format import (
    MAX_KEY_BYTES,
    MAX_PATH_BYTES,
    Cursor,
    path_problem,
    varint,
    varint_column,
)
from penstock.kernel.concurrency.brief_steps import STEP, lengths_of
from penstock.kernel.errors import SpecError
from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity

MOST_BYTES_OF_KEYS: Final = 2**28
"""Of all keys of an index. Those of a tree of a million leaves have about half of it."""

_USUAL_BYTES: Final = 1024

_MOST_PATH_BYTES: Final = 2**26  # of all rows of a table of data files


def common_prefix(a: bytes, b: bytes) -> int:
    """Return how many leading bytes two keys share."""
    # The lowest differing bit is in the first differing byte. Two conversions and an xor cost a tenth of
    # comparing byte by byte.
    difference = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    shorter = min(len(a), len(b))
    if not difference:
        return shorter

    return min(((difference & -difference).bit_length() - 1) >> 3, shorter)


def key_lengths(keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Return the length of every key."""
    return np.frombuffer(lengths_of(keys), np.int64)


def shared_prefixes(keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Return, for every key but the first, how many leading bytes it shares with the previous one.

    A few thousand keys at once are laid out as a table of bytes, if they are of a usual length.
    """
    found = np.zeros(max(len(keys) - 1, 0), np.int64)
    for at in range(0, len(found), STEP):
        part = keys[at : at + STEP + 1]
        sizes = key_lengths(part)
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

    return varint_column(shared - inherited), varint_column(key_lengths(keys) - starts), b"".join(suffixes)


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
    shared = cursor.varints(count - 1)
    suffixes = cursor.varints(count)
    inherited = cursor.varints(count) if interior else ()
    lengths = list(map(add, (0, *shared), suffixes))
    if any(map(gt, shared, lengths)):
        raise cursor.origin.corrupt("a key shares more bytes with the previous key than that key has")
    if max(lengths) > MAX_KEY_BYTES:
        raise cursor.origin.corrupt(f"a key of {max(lengths)} bytes")
    if any(map(gt, inherited, lengths)):
        raise cursor.origin.corrupt("a child inherits more bytes than its key has")

    before = b"" if interior else prefix
    nbytes = sum(lengths) + len(before) * count
    if nbytes > MOST_BYTES_OF_KEYS:  # most bytes of a key may be those of the one before it
        raise cursor.origin.corrupt(f"keys of {nbytes} bytes, of at most {MOST_BYTES_OF_KEYS}")

    encoded = cursor.take(sum(suffixes))
    stored = (tuple(shared), tuple(suffixes), encoded, before)
    found = None if known is None else known.nodes.get(stored)
    if found is not None:
        return found, inherited

    keys: list[bytes] = []
    key, position = before, 0
    for first, suffix in zip((0, *shared), suffixes, strict=True):
        key = key[: len(before) + first] + encoded[position : position + suffix]
        position += suffix
        keys.append(key)

    if not all(map(lt, keys, islice(keys, 1, None))):
        raise cursor.origin.corrupt("keys are not in ascending order")
    if known is not None:
        known.nodes.put(stored, keys, _nbytes(keys))

    return keys, inherited


@final
@dataclass(frozen=True, slots=True)
class DataFileId:
    """One row of a data file table. Both paths are empty in a database without keys."""

    base: str  #: prefix of all paths in the nodes that this file holds
    path: str  #: relative to the database's directory


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


def decode_files(cursor: Cursor, transitive: str) -> list[DataFileId]:
    """Read a data file table.

    Args:
        cursor: At the first byte of the table.
        transitive: The base path of the file that holds the table, as recorded by the parent node.

    Raises:
        CorruptCheckpointError: If a length is impossible, or a path is not a plain relative one.
    """
    count = cursor.varint()
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


StoredKeys: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], bytes, bytes]
"""Keys in their stored form: lengths of prefixes and suffixes, all suffixes, and what is before each key."""

_SLICE: Final = 8192  # keys: a millisecond or less
_BYTES_OF_A_KEY: Final = 100  # overhead of a key and its row, without the key's text


@final
@dataclass(frozen=True, slots=True, eq=False)
class KeyTable:
    """The keys of a database, in ascending order. It is shared, so it must not be changed."""

    keys: list[bytes]
    rows: Mapping[bytes, int]  #: position of each key in `keys`

    @classmethod
    def of(cls, keys: list[bytes]) -> KeyTable:
        """Make the table of some keys, which must be in ascending order."""
        rows: dict[bytes, int] = {}
        for start in range(0, len(keys), _SLICE):  # one long call would hold the interpreter
            part = keys[start : start + _SLICE]
            rows.update(zip(part, range(start, start + len(part)), strict=True))

        return cls(keys, rows)


@final
@dataclass(frozen=True, slots=True, eq=False)
class RememberedKeys:
    """Remembers the keys of the last few nodes and databases. Thread-safe.

    A node is recognised by all bytes of its stored keys. Nodes with equal keys share one list, and databases
    with the same lists share one table.
    """

    nodes: BoundedCache[StoredKeys, list[bytes]] = field(default_factory=lambda: BoundedCache(16), init=False)
    _tables: BoundedCache[ByIdentity, KeyTable] = field(default_factory=lambda: BoundedCache(2), init=False)

    @property
    def caches(self) -> Sequence[BoundedCache[Any, Any]]:
        """See `Caching`."""
        return (self._tables, self.nodes)

    def table(self, nodes: list[list[bytes]]) -> KeyTable:
        """Return the table of a database, given the keys of each of its nodes in order."""
        identity = ByIdentity(*nodes)
        found = self._tables.get(identity)
        if found is None:
            found = KeyTable.of([key for keys in nodes for key in keys])
            self._tables.put(identity, found, _nbytes(found.keys))

        return found


def _nbytes(keys: list[bytes]) -> int:
    return sum(map(len, keys)) + _BYTES_OF_A_KEY * len(keys)
