"""The msgpack files of early Orbax: a tree of values, or of placeholders for arrays elsewhere.

Array bytes are read from the file only when needed, and a hostile file is refused before it takes memory:
a `TokenCursor` reads one token at a time from a window of the file. `read_tree` reads the tree; `packed_spec`
describes a leaf of it.

Source:
    ORBAX_FORMAT.md §1.9; the msgpack specification.
"""

from __future__ import annotations

__all__ = ("CHUNKED", "PackedLeaf", "packed_spec", "read_tree")

import math
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from struct import Struct
from typing import Any, Final, NamedTuple, final

from penstock.handlers.dtypes import numpy_dtype, storable
from penstock.handlers.formats.leaf_table import MOST_LEVELS, KeyPathBudget, show_key_path
from penstock.handlers.formats.orbax.embedded_arrays import ElementRun, PackedArray, number
from penstock.handlers.formats.orbax.file_names import LEGACY_MSGPACK
from penstock.handlers.formats.orbax.tree_metadata import TreeDocument
from penstock.handlers.formats.untrusted import is_beyond_memory
from penstock.kernel.errors import CorruptCheckpointError, TruncatedDataError, UnsupportedFormatError
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafSpec
from penstock.kernel.protocols.stores import ReadableFile, Store

# One read brings many small values; the bytes of large arrays are skipped.
_WINDOW_BYTES: Final = 64 * 1024
_MOST_TEXT_BYTES: Final = 64 * 2**20  # it is held in memory; a file may be a hole for the most part


class TokenKind(Enum):
    """The kinds of a token."""

    NIL = auto()
    NUMBER = auto()
    TEXT = auto()
    BINARY = auto()
    ARRAY = auto()
    MAP = auto()
    EXTENSION = auto()


class Token(NamedTuple):
    """One msgpack value, or the head of one."""

    kind: TokenKind
    value: Any = None  #: of a number or text; of an extension its type
    size: int = 0  #: items that follow, pairs that follow, or bytes that follow and were not taken


# By first byte: the kind of value, and how to read the bytes after it.
_NUMBERS: Final = {
    0xCA: Struct(">f"),
    0xCB: Struct(">d"),
    0xCC: Struct(">B"),
    0xCD: Struct(">H"),
    0xCE: Struct(">I"),
    0xCF: Struct(">Q"),
    0xD0: Struct(">b"),
    0xD1: Struct(">h"),
    0xD2: Struct(">i"),
    0xD3: Struct(">q"),
}
_SIZED: Final = {
    0xC4: (TokenKind.BINARY, Struct(">B")),
    0xC5: (TokenKind.BINARY, Struct(">H")),
    0xC6: (TokenKind.BINARY, Struct(">I")),
    0xC7: (TokenKind.EXTENSION, Struct(">B")),
    0xC8: (TokenKind.EXTENSION, Struct(">H")),
    0xC9: (TokenKind.EXTENSION, Struct(">I")),
    0xD9: (TokenKind.TEXT, Struct(">B")),
    0xDA: (TokenKind.TEXT, Struct(">H")),
    0xDB: (TokenKind.TEXT, Struct(">I")),
    0xDC: (TokenKind.ARRAY, Struct(">H")),
    0xDD: (TokenKind.ARRAY, Struct(">I")),
    0xDE: (TokenKind.MAP, Struct(">H")),
    0xDF: (TokenKind.MAP, Struct(">I")),
}
_CONSTANTS: Final = {
    0xC0: Token(TokenKind.NIL),
    0xC2: Token(TokenKind.NUMBER, value=False),
    0xC3: Token(TokenKind.NUMBER, value=True),
}
_SIGNED_BYTE: Final = Struct(">b")


@final
class TokenCursor:
    """Reads tokens one after another. Every size is checked against the file before it is used.

    Args:
        path: Of the file, for errors.
        file: Open.
        size: Of the file, bytes.
    """

    __slots__ = ("_end", "_file", "_path", "_start", "_window", "at")

    def __init__(self, path: str, file: ReadableFile, size: int) -> None:
        self._path = path
        self._file = file
        self._end = size
        self._window = b""
        self._start = 0  # of the window, in the file
        self.at = 0  #: of the next byte, in the file

    @property
    def done(self) -> bool:
        """True if everything was taken."""
        return self.at == self._end

    def token(self) -> Token:
        """Take the next value, but not the content of arrays, maps, extensions and byte strings.

        Raises:
            CorruptCheckpointError: If the file ends before it does, or it is no msgpack.
        """
        first = self._byte()
        if first < 0x80:
            return Token(TokenKind.NUMBER, first)
        if first >= 0xE0:
            return Token(TokenKind.NUMBER, first - 0x100)
        if first < 0xC0:
            if first >= 0xA0:
                return self._sized(TokenKind.TEXT, first & 0x1F)

            return self._sized(TokenKind.MAP if first < 0x90 else TokenKind.ARRAY, first & 0x0F)
        if first in _NUMBERS:
            return Token(TokenKind.NUMBER, self._number(_NUMBERS[first]))
        if first in _SIZED:
            kind, form = _SIZED[first]
            return self._sized(kind, self._number(form))
        if 0xD4 <= first <= 0xD8:
            return self._sized(TokenKind.EXTENSION, 1 << (first - 0xD4))
        if first in _CONSTANTS:
            return _CONSTANTS[first]

        raise self.corrupt(f"byte {self.at - 1} is {first:#x}, which begins no msgpack value")

    def skip(self, nbytes: int) -> None:
        """Skip bytes that a token announced."""
        self.at += nbytes

    def peek(self, nbytes: int) -> bytes:
        """The next bytes, without taking them; fewer where it ends."""
        offset = self.at - self._start
        if not 0 <= offset <= len(self._window) - nbytes:
            if self.at >= self._end:
                return b""

            self._look(nbytes)
            offset = 0

        return self._window[offset : offset + nbytes]

    def holds(self, nbytes: int) -> bool:
        """Return whether this many bytes can follow."""
        return self.at + nbytes <= self._end

    def since(self, at: int) -> bytes:
        """The bytes taken since `begin`, if the window still holds all of them; otherwise nothing."""
        return self._window[at - self._start : self.at - self._start] if at >= self._start else b""

    @contextmanager
    def inside(self, nbytes: int) -> Generator[None]:
        """Check that the block takes exactly `nbytes`.

        Raises:
            CorruptCheckpointError: If what is taken in the `with` is shorter, or wants to be longer.
        """
        outer, self._end = self._end, self.at + nbytes
        yield
        if self.at != self._end:
            raise self.corrupt(f"has {self._end - self.at} bytes too many before byte {self._end}")

        self._end = outer

    def corrupt(self, problem: str) -> CorruptCheckpointError:
        """Make the error that names this file."""
        return CorruptCheckpointError(self._path, problem)

    def _sized(self, kind: TokenKind, size: int) -> Token:
        if kind is TokenKind.EXTENSION:
            value = self._number(_SIGNED_BYTE)
            self._check(size)
            return Token(kind, value, size)

        self._check(2 * size if kind is TokenKind.MAP else size)  # nothing takes less than a byte
        if kind is not TokenKind.TEXT:
            return Token(kind, None, size)

        if size > _MOST_TEXT_BYTES:
            raise self.corrupt(f"a text before byte {self.at} has {size} bytes")
        try:
            return Token(kind, self._take(size).decode())
        except UnicodeDecodeError as error:
            raise self.corrupt(f"a text before byte {self.at} is not UTF-8: {error.reason}") from error

    def _number(self, form: Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _byte(self) -> int:
        offset = self.at - self._start
        if self.at >= self._end or not 0 <= offset < len(self._window):
            return self._take(1)[0]

        self.at += 1
        return self._window[offset]

    def _check(self, nbytes: int) -> None:
        if self.at + nbytes > self._end:
            raise self.corrupt(f"ends at byte {self._end}, but what begins at byte {self.at} is longer")

    def _take(self, nbytes: int) -> bytes:
        self._check(nbytes)
        offset = self.at - self._start
        if not 0 <= offset <= len(self._window) - nbytes:
            self._look(nbytes)
            offset = 0

        self.at += nbytes
        return self._window[offset : offset + nbytes]

    def _look(self, nbytes: int) -> None:
        """Bring at least `nbytes` from here into the window."""
        window = bytearray(min(max(nbytes, _WINDOW_BYTES), self._end - self.at))
        self._file.read_at(self.at, [memoryview(window)])
        self._window, self._start = bytes(window), self.at


_TELLING: Final = 6  # bytes of the head of an array: its size, its type and how many axes it has
_LONGEST: Final = 64  # bytes of such a head, with few axes
_ELSEWHERE: Final = ("PLACEHOLDER://", "AGGREGATED://")
_MARKERS: Final = {TokenKind.ARRAY: "List", TokenKind.MAP: "Dict"}


class _Extension(IntEnum):
    ARRAY = 1
    COMPLEX = 2
    SCALAR = 3
    TUPLE = 4


@final
@dataclass(frozen=True, slots=True)
class PackedLeaf:
    """A leaf of the file. Its value is an array, a text or an empty container, or is elsewhere."""

    keys: KeyPath
    kinds: tuple[KeyKind, ...]
    typestr: str  #: as in `_METADATA`; all that is known of a value that is elsewhere
    array: PackedArray | None = None
    text: str | None = None
    elsewhere: bool = False  #: the value is in an array of its own


def read_tree(store: Store, path: str) -> list[PackedLeaf]:
    """Read the structure and the single numbers of the msgpack file at `path`, in its order.

    Raises:
        CorruptCheckpointError: If it is no msgpack, or not what Orbax would have written.
        UnsupportedFormatError: If it holds a value that penstock cannot represent in a tree.
    """
    size = store.size(path)
    file = store.open_data_file(path)
    try:
        reader = _Reader(path, TokenCursor(path, file, size))
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

    def __init__(self, path: str, cursor: TokenCursor) -> None:
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
            if token.kind is TokenKind.MAP and token.size:
                self._map(token.size, keys, kinds)
            elif token.kind is TokenKind.ARRAY and token.size:
                self._items(token.size, keys, kinds, KeyKind.SEQUENCE)
            elif token.kind is TokenKind.EXTENSION:
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
            if token.kind not in (TokenKind.TEXT, TokenKind.NUMBER) or type(token.value) not in (str, int):
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
            case TokenKind.NIL:
                return PackedLeaf(keys, kinds, "None")
            case TokenKind.ARRAY | TokenKind.MAP:
                return PackedLeaf(keys, kinds, _MARKERS[token.kind])
            case TokenKind.TEXT if token.value.startswith(_ELSEWHERE):
                return PackedLeaf(keys, kinds, "np.ndarray", elsewhere=True)
            case TokenKind.TEXT:
                return PackedLeaf(keys, kinds, "string", text=token.value)
            case TokenKind.NUMBER:
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
                count = self._sized("a tuple", TokenKind.ARRAY)
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

        run = ElementRun(0, head.array.runs[0].count, self.cursor.at + len(head.data))
        self.cursor.skip(length)
        return PackedArray(self._path, head.array.shape, head.array.dtype, (run,))

    def _array(self, begin: int | None = None) -> PackedArray:
        """Read the shape, the dtype's name and the head of the bytes; the bytes stay in the file.

        Args:
            begin: Where the array began, if others with an equal head may follow.
        """
        if self._sized("an array", TokenKind.ARRAY) != 3:
            raise self.cursor.corrupt("an array is not stored as shape, dtype and bytes")

        n_axes = self._sized("the shape of an array", TokenKind.ARRAY)
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

        nbytes = self._sized("the content of an array", TokenKind.BINARY)
        if is_beyond_memory(shape, numpy_dtype(dtype).itemsize):
            raise self.cursor.corrupt(f"the shape of an array is beyond any memory: {shape}"[:200])

        count = math.prod(shape)
        if nbytes != count * numpy_dtype(dtype).itemsize:
            raise self.cursor.corrupt(f"an array {dtype}{list(shape)} has {nbytes} bytes")

        runs = (ElementRun(0, count, self.cursor.at),) if count else ()
        array = PackedArray(self._path, shape, dtype, runs)
        head = self.cursor.since(begin) if begin is not None and runs else b""
        if _TELLING < len(head) <= _LONGEST:
            self._heads[head[:_TELLING]] = _Head(head, nbytes, array)

        self.cursor.skip(nbytes)
        return array

    def _numbers(self, what: str, count: int) -> list[float]:
        found = [self.cursor.token() for _ in range(self._sized(what, TokenKind.ARRAY, count))]
        if not all(token.kind is TokenKind.NUMBER for token in found):
            raise self.cursor.corrupt(f"{what} is not made of numbers")

        return [token.value for token in found]

    def _size(self) -> int:
        size = self.cursor.token().value
        if type(size) is not int or size < 0:
            raise self.cursor.corrupt(f"an axis of an array has the length {size!r}")

        return size

    def _sized(self, what: str, kind: TokenKind, size: int | None = None) -> int:
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


CHUNKED: Final = "__msgpack_chunked_array__"
"""The key that marks a map as such a record. Next to it are `shape` and `chunks`, each by number."""

MOST_AXES: Final = 32  # TensorStore's limit, and numpy's for long


def joined(path: str, members: Sequence[tuple[KeyPath, PackedArray | None]]) -> PackedArray:
    """Make one array of a record of flat chunks.

    Args:
        path: The msgpack file, for errors.
        members: What the record holds: keys from it on, and the value there if it is an array or number.

    Raises:
        CorruptCheckpointError: If chunks are missing, or do not belong together.
    """
    shape = tuple([_size(path, size) for size in _numbered(path, "shape", members)])
    chunks = _numbered(path, "chunks", members)
    if not chunks:
        raise CorruptCheckpointError(path, "an array in chunks has none")
    if len(shape) > MOST_AXES or is_beyond_memory(shape, numpy_dtype(chunks[0].dtype).itemsize):
        raise CorruptCheckpointError(path, f"the shape of an array is beyond any memory: {shape}"[:200])

    runs: list[ElementRun] = []
    first = 0
    for chunk in chunks:
        if len(chunk.shape) != 1 or chunk.dtype != chunks[0].dtype:
            raise CorruptCheckpointError(path, "the chunks of an array are not flat, or of several dtypes")
        runs += [ElementRun(first + run.first, run.count, run.offset) for run in chunk.runs]
        first += chunk.shape[0]

    if first != math.prod(shape):
        raise CorruptCheckpointError(path, f"the chunks of an array {list(shape)} have {first} elements")

    return PackedArray(path, shape, chunks[0].dtype, tuple(runs))


def _numbered(
    path: str, name: str, members: Sequence[tuple[KeyPath, PackedArray | None]]
) -> list[PackedArray]:
    """Return the values below `name`, in the order of their numbers."""
    found: Mapping[KeyPath, PackedArray | None] = {
        keys: array for keys, array in members if keys[:1] == (name,)
    }
    if found == {(name,): None}:
        return []  # an empty container

    arrays: list[PackedArray] = []
    for at in range(len(found)):
        array = found.get((name, str(at)))
        if array is None:
            raise CorruptCheckpointError(path, f"the {name} of an array in chunks lacks number {at}")
        arrays.append(array)

    return arrays


def _size(path: str, number: PackedArray) -> int:
    size = int.from_bytes(number.data or b"", "little", signed=number.dtype == "int64")
    if number.dtype not in ("int64", "uint64") or size < 0:
        raise CorruptCheckpointError(path, "the shape of an array in chunks is not made of sizes")

    return size


def packed_spec(
    directory: str,
    tree: TreeDocument,
    at: int,
    found: PackedLeaf | None,
    sharding: str | None,
    known: dict[tuple[object, ...], LeafSpec],
) -> tuple[LeafSpec, PackedArray | None]:
    """Describe a leaf by its entry and by what the msgpack file has under the same keys.

    Args:
        directory: Of the tree.
        tree: Says that the value is in the file, and of what type it was.
        at: Which leaf of `tree`.
        found: What is there; not a placeholder.
        sharding: What is recorded for the leaf.
        known: Descriptions that leaves share; added to.

    Returns:
        What it is, and where its bytes are if it is an array or number.

    Raises:
        CorruptCheckpointError: If there is nothing, or something of another kind.
    """
    typestr = tree.types[at].typestr
    problem = ""
    if found is None:
        problem = "does not hold this value"
    elif (found.text is None) == (typestr == "string") or (found.array is None) == (found.text is None):
        problem = f"holds a {found.typestr} where a {typestr} was recorded"
    if found is None or problem:
        key_path = show_key_path(tree.keys[at], tree.kinds[at])
        raise CorruptCheckpointError(os.path.join(directory, LEGACY_MSGPACK), problem, key_path=key_path)
    if found.array is None:
        return LeafSpec("string", text=found.text), None

    array = found.array
    shared = (typestr, array.shape, array.dtype, sharding)
    spec = known.get(shared)
    if spec is None:
        spec = known[shared] = LeafSpec(
            typestr=typestr,
            shape=array.shape,
            dtype=array.dtype,
            itemsize=numpy_dtype(array.dtype).itemsize,
            chunk_shape=tuple([n or 1 for n in array.shape]),
            sharding=sharding,
        )

    return spec, array
