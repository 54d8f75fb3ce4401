"""Steps through a msgpack file without reading its long byte strings.

Source:
    The msgpack specification.
"""

from __future__ import annotations

__all__ = ("Cursor", "Kind", "Token")

from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum, auto
from struct import Struct
from typing import Any, Final, NamedTuple, final

from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.protocols.stores import ReadableFile

_WINDOW_BYTES: Final = 64 * 1024
_MOST_TEXT_BYTES: Final = 64 * 2**20  # it is held in memory; a file may be a hole for the most part


class Kind(Enum):
    """What a token is."""

    NIL = auto()
    NUMBER = auto()
    TEXT = auto()
    BINARY = auto()
    ARRAY = auto()
    MAP = auto()
    EXTENSION = auto()


class Token(NamedTuple):
    """One msgpack value, or the head of one."""

    kind: Kind
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
    0xC4: (Kind.BINARY, Struct(">B")),
    0xC5: (Kind.BINARY, Struct(">H")),
    0xC6: (Kind.BINARY, Struct(">I")),
    0xC7: (Kind.EXTENSION, Struct(">B")),
    0xC8: (Kind.EXTENSION, Struct(">H")),
    0xC9: (Kind.EXTENSION, Struct(">I")),
    0xD9: (Kind.TEXT, Struct(">B")),
    0xDA: (Kind.TEXT, Struct(">H")),
    0xDB: (Kind.TEXT, Struct(">I")),
    0xDC: (Kind.ARRAY, Struct(">H")),
    0xDD: (Kind.ARRAY, Struct(">I")),
    0xDE: (Kind.MAP, Struct(">H")),
    0xDF: (Kind.MAP, Struct(">I")),
}
_CONSTANTS: Final = {
    0xC0: Token(Kind.NIL),
    0xC2: Token(Kind.NUMBER, value=False),
    0xC3: Token(Kind.NUMBER, value=True),
}
_SIGNED_BYTE: Final = Struct(">b")


@final
class Cursor:
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
        """Whether everything was taken."""
        return self.at == self._end

    def token(self) -> Token:
        """Take the next value, but not the content of arrays, maps, extensions and byte strings.

        Raises:
            CorruptCheckpointError: If the file ends before it does, or it is no msgpack.
        """
        first = self._byte()
        if first < 0x80:
            return Token(Kind.NUMBER, first)
        if first >= 0xE0:
            return Token(Kind.NUMBER, first - 0x100)
        if first < 0xC0:
            if first >= 0xA0:
                return self._sized(Kind.TEXT, first & 0x1F)

            return self._sized(Kind.MAP if first < 0x90 else Kind.ARRAY, first & 0x0F)
        if first in _NUMBERS:
            return Token(Kind.NUMBER, self._number(_NUMBERS[first]))
        if first in _SIZED:
            kind, form = _SIZED[first]
            return self._sized(kind, self._number(form))
        if 0xD4 <= first <= 0xD8:
            return self._sized(Kind.EXTENSION, 1 << (first - 0xD4))
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
        """Whether this many bytes can follow."""
        return self.at + nbytes <= self._end

    def since(self, at: int) -> bytes:
        """The bytes taken since `begin`, if the window still holds all of them; otherwise nothing."""
        return self._window[at - self._start : self.at - self._start] if at >= self._start else b""

    @contextmanager
    def inside(self, nbytes: int) -> Generator[None]:
        """Check that what is taken in the block is exactly `nbytes` long.

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

    def _sized(self, kind: Kind, size: int) -> Token:
        if kind is Kind.EXTENSION:
            value = self._number(_SIGNED_BYTE)
            self._check(size)
            return Token(kind, value, size)

        self._check(2 * size if kind is Kind.MAP else size)  # nothing takes less than a byte
        if kind is not Kind.TEXT:
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
