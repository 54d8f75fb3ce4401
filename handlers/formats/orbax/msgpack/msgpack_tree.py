"""The tree that early Orbax kept in one msgpack file: values, or placeholders for arrays elsewhere.

Array bytes are read from the file only when needed, and a hostile file is refused before it takes memory.

Source:
    ORBAX_FORMAT.md §1.9.
"""

from __future__ import annotations

__all__ = ("PackedLeaf", "read_tree")

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, final

from penstock.handlers.dtypes import numpy_dtype, storable
from penstock.handlers.formats.common.chunk_regions import is_beyond_memory
from penstock.handlers.formats.common.key_paths import MOST_LEVELS, KeyPathBudget, show_key_path
from penstock.handlers.formats.orbax.chunks.embedded_arrays import PackedArray, Run, number
from penstock.handlers.formats.orbax.msgpack.chunked_values import CHUNKED, MOST_AXES, joined
from penstock.handlers.formats.orbax.msgpack.cursor import Cursor, Kind, Token
from penstock.kernel.errors import CorruptCheckpointError, TruncatedDataError, UnsupportedFormatError
from penstock.kernel.protocols.leaf import KeyKind, KeyPath
from penstock.kernel.protocols.stores import Store

_TELLING: Final = 6  # bytes of the head of an array: its size, its type and how many axes it has
_LONGEST: Final = 64  # bytes of such a head, with few axes
_ELSEWHERE: Final = ("PLACEHOLDER://", "AGGREGATED://")
_MARKERS: Final = {Kind.ARRAY: "List", Kind.MAP: "Dict"}


class _Extension(IntEnum):
    ARRAY = 1
    COMPLEX = 2
    SCALAR = 3
    TUPLE = 4


@final
@dataclass(frozen=True, slots=True)
class PackedLeaf:
    """A leaf of the file. Its value is an array, a text or an empty container, or lies elsewhere."""

    keys: KeyPath
    kinds: tuple[KeyKind, ...]
    typestr: str  #: as in `_METADATA`; all that is known of a value that lies elsewhere
    array: PackedArray | None = None
    text: str | None = None
    elsewhere: bool = False  #: the value lies in an array of its own


def read_tree(store: Store, path: str) -> list[PackedLeaf]:
    """Read the structure and the single numbers of the msgpack file at `path`, in its order.

    Raises:
        CorruptCheckpointError: If it is no msgpack, or not what Orbax would have written.
        UnsupportedFormatError: If it holds a value that penstock cannot represent in a tree.
    """
    size = store.size(path)
    file = store.open_data_file(path)
    try:
        reader = _Reader(path, Cursor(path, file, size))
        reader.node((), ())
        if not reader.cursor.done:
            raise reader.cursor.corrupt(f"goes on behind its tree, which ends at byte {reader.cursor.at}")
    finally:
        file.close()

    return reader.leaves


class _Head(NamedTuple):
    """The head of an array. Arrays of one shape and dtype have equal heads."""

    data: bytes  #: up to the first byte of its elements
    nbytes: int
    array: PackedArray


@final
class _Reader:
    __slots__ = ("_budget", "_heads", "_path", "cursor", "leaves")

    def __init__(self, path: str, cursor: Cursor) -> None:
        self._path = path
        self._heads: dict[bytes, _Head] = {}
        self._budget = KeyPathBudget(path)
        self.cursor = cursor
        self.leaves: list[PackedLeaf] = []

    def node(self, keys: KeyPath, kinds: tuple[KeyKind, ...]) -> None:
        """Read one value, which may be a whole tree."""
        if len(keys) > MOST_LEVELS:
            raise UnsupportedFormatError(self._path, f"is nested more than {MOST_LEVELS} levels deep")

        begin = self.cursor.at
        array = self._like_another()
        if array is not None:
            self._add(PackedLeaf(keys, kinds, "np.ndarray", array))
            return

        try:
            token = self.cursor.token()
            if token.kind is Kind.MAP and token.size:
                self._map(token.size, keys, kinds)
            elif token.kind is Kind.ARRAY and token.size:
                self._items(token.size, keys, kinds, KeyKind.SEQUENCE)
            elif token.kind is Kind.EXTENSION:
                with self.cursor.inside(token.size):
                    self._extension(token, keys, kinds, begin)
            else:
                self._add(self._leaf(token, keys, kinds))
        except CorruptCheckpointError as error:
            if error.key_path is not None or not keys or isinstance(error, TruncatedDataError):
                raise
            raise type(error)(error.path, error.problem, key_path=show_key_path(keys, kinds)) from error

    def _map(self, n_pairs: int, keys: KeyPath, kinds: tuple[KeyKind, ...]) -> None:
        first, seen = len(self.leaves), set[str]()
        for _ in range(n_pairs):
            token = self.cursor.token()
            if token.kind not in (Kind.TEXT, Kind.NUMBER) or type(token.value) not in (str, int):
                raise self.cursor.corrupt(f"a key before byte {self.cursor.at} is neither a text nor an int")

            key = str(token.value)
            if key in seen:
                raise self.cursor.corrupt(f"the key {key!r} occurs twice")
            seen.add(key)
            self.node((*keys, key), (*kinds, KeyKind.MAPPING))

        if CHUNKED in seen:
            self.leaves[first:] = [self._joined(self.leaves[first:], keys, kinds)]

    def _items(self, count: int, keys: KeyPath, kinds: tuple[KeyKind, ...], kind: KeyKind) -> None:
        for at in range(count):
            self.node((*keys, str(at)), (*kinds, kind))

    def _leaf(self, token: Token, keys: KeyPath, kinds: tuple[KeyKind, ...]) -> PackedLeaf:
        match token.kind:
            case Kind.NIL:
                return PackedLeaf(keys, kinds, "None")
            case Kind.ARRAY | Kind.MAP:
                return PackedLeaf(keys, kinds, _MARKERS[token.kind])
            case Kind.TEXT if token.value.startswith(_ELSEWHERE):
                return PackedLeaf(keys, kinds, "np.ndarray", elsewhere=True)
            case Kind.TEXT:
                return PackedLeaf(keys, kinds, "string", text=token.value)
            case Kind.NUMBER:
                array = number(self._path, token.value)
                assert array is not None, "msgpack has no wider ints"
                return PackedLeaf(keys, kinds, "scalar", array)
            case _:
                raise UnsupportedFormatError(
                    self._path, "holds bytes as a leaf, which penstock does not support"
                )

    def _extension(self, token: Token, keys: KeyPath, kinds: tuple[KeyKind, ...], begin: int) -> None:
        match token.value:
            case _Extension.ARRAY:
                self._add(PackedLeaf(keys, kinds, "np.ndarray", self._array(begin)))
            case _Extension.COMPLEX:
                real, imaginary = self._numbers("a complex number", 2)
                self._add(PackedLeaf(keys, kinds, "scalar", number(self._path, complex(real, imaginary))))
            case _Extension.SCALAR:
                array = self._array()
                if array.shape:
                    raise self.cursor.corrupt(f"a numpy scalar has the shape {array.shape}")
                self._add(PackedLeaf(keys, kinds, "scalar", array))
            case _Extension.TUPLE:
                count = self._sized("a tuple", Kind.ARRAY)
                if count:
                    self._items(count, keys, kinds, KeyKind.TUPLE)
                else:
                    self._add(PackedLeaf(keys, kinds, "Tuple"))
            case code:
                self.cursor.skip(token.size)
                raise UnsupportedFormatError(
                    self._path, f"holds a msgpack extension of type {code}; known are 1 to 4"
                )

    def _like_another(self) -> PackedArray | None:
        """Read an array whose head equals an earlier one, byte for byte; None if there is no such head."""
        ahead = self.cursor.peek(_LONGEST)
        head = self._heads.get(ahead[:_TELLING])
        if head is None or not ahead.startswith(head.data):
            return None

        length = len(head.data) + head.nbytes
        if not self.cursor.holds(length):
            return None

        run = Run(0, head.array.runs[0].count, self.cursor.at + len(head.data))
        self.cursor.skip(length)
        return PackedArray(self._path, head.array.shape, head.array.dtype, (run,))

    def _array(self, begin: int | None = None) -> PackedArray:
        """Read the shape, the dtype's name and the head of the bytes; the bytes stay in the file.

        Args:
            begin: Where the array began, if others with an equal head may follow.
        """
        if self._sized("an array", Kind.ARRAY) != 3:
            raise self.cursor.corrupt("an array is not stored as shape, dtype and bytes")

        n_axes = self._sized("the shape of an array", Kind.ARRAY)
        if n_axes > MOST_AXES:
            raise UnsupportedFormatError(self._path, f"an array has {n_axes} axes; most are {MOST_AXES}")

        shape = tuple([self._size() for _ in range(n_axes)])
        dtype = self.cursor.token().value
        if type(dtype) is not str:
            raise self.cursor.corrupt(f"the dtype of an array is {dtype!r}, not a name")
        if not storable(dtype):
            raise UnsupportedFormatError(
                self._path, f"an array of type {dtype!r}, which penstock does not read"
            )

        nbytes = self._sized("the content of an array", Kind.BINARY)
        if is_beyond_memory(shape, numpy_dtype(dtype).itemsize):
            raise self.cursor.corrupt(f"the shape of an array is beyond any memory: {shape}"[:200])

        count = math.prod(shape)
        if nbytes != count * numpy_dtype(dtype).itemsize:
            raise self.cursor.corrupt(f"an array {dtype}{list(shape)} has {nbytes} bytes")

        runs = (Run(0, count, self.cursor.at),) if count else ()
        array = PackedArray(self._path, shape, dtype, runs)
        head = self.cursor.since(begin) if begin is not None and runs else b""
        if _TELLING < len(head) <= _LONGEST:
            self._heads[head[:_TELLING]] = _Head(head, nbytes, array)

        self.cursor.skip(nbytes)
        return array

    def _numbers(self, what: str, count: int) -> list[float]:
        found = [self.cursor.token() for _ in range(self._sized(what, Kind.ARRAY, count))]
        if not all(token.kind is Kind.NUMBER for token in found):
            raise self.cursor.corrupt(f"{what} is not made of numbers")

        return [token.value for token in found]

    def _size(self) -> int:
        size = self.cursor.token().value
        if type(size) is not int or size < 0:
            raise self.cursor.corrupt(f"an axis of an array has the length {size!r}")

        return size

    def _sized(self, what: str, kind: Kind, size: int | None = None) -> int:
        """Take the head of something that must be of `kind`; return how much follows."""
        token = self.cursor.token()
        if token.kind is not kind or size not in (None, token.size):
            raise self.cursor.corrupt(f"{what} is not stored as one (before byte {self.cursor.at})")

        return token.size

    def _joined(self, members: list[PackedLeaf], keys: KeyPath, kinds: tuple[KeyKind, ...]) -> PackedLeaf:
        """Make one array from a record of chunks."""
        array = joined(self._path, [(leaf.keys[len(keys) :], leaf.array) for leaf in members])
        return PackedLeaf(keys, kinds, "np.ndarray", array)

    def _add(self, leaf: PackedLeaf) -> None:
        self._budget.spend(leaf.keys)
        self.leaves.append(leaf)
