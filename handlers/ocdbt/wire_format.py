"""The parts that OCDBT manifests and nodes are made of: varints, checksums around a body, and values.

Source:
    TensorStore's OCDBT page, section "Storage format".
"""

from __future__ import annotations

__all__ = (
    "ENVELOPE_BYTES",
    "MANIFEST_MAGIC",
    "MAX_INLINE_BYTES",
    "MAX_KEY_BYTES",
    "MAX_NODE_ENTRIES",
    "MAX_OFFSET",
    "MAX_PATH_BYTES",
    "MISSING",
    "NODE_MAGIC",
    "UNCOMPRESSED",
    "ZSTD",
    "Cursor",
    "Indirect",
    "Inline",
    "Origin",
    "Value",
    "path_problem",
    "seal",
    "unseal",
    "varint",
    "varint_column",
    "varints",
)

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from penstock.kernel.errors import (
    ChecksumError,
    CorruptCheckpointError,
    TruncatedDataError,
    UnsupportedFormatError,
)

MANIFEST_MAGIC = bytes.fromhex("0cdb3a2a")
NODE_MAGIC = bytes.fromhex("0cdb20de")
UNCOMPRESSED = 0
ZSTD = 1
MISSING = 2**64 - 1  #: offset and length of the root of a database without keys
MAX_OFFSET = 2**63 - 1  #: the largest end offset of a node or value; TensorStore's limit
MAX_KEY_BYTES = 65535
MAX_PATH_BYTES = 65535
MAX_NODE_ENTRIES = 1024 * 1024  #: TensorStore rejects larger nodes, although the format names no limit

_HEADER_BYTES = 14  # 4 of magic, 8 of length, 1 of version (0), 1 of compression method
_CHECKSUM_BYTES = 4
ENVELOPE_BYTES = _HEADER_BYTES + _CHECKSUM_BYTES
_UINT64_END = 1 << 64
_FEW = 16  # columns of up to this many numbers are faster to decode one by one
_LONGEST = 9  # bytes of a 63-bit varint


def varint(number: int) -> bytes:
    """Encode a non-negative integer, seven bits per byte, lowest bits first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7

    encoded.append(number)
    return bytes(encoded)


def varints(numbers: Sequence[int]) -> bytes:
    """Encode a column of non-negative integers, one varint after the other."""
    if max(numbers, default=0) < 0x80:
        return bytes(numbers)

    # Lengths and file ids repeat, so each distinct number is encoded only once.
    encoded = {number: varint(number) for number in set(numbers)}
    return b"".join([encoded[number] for number in numbers])


def varint_column(numbers: npt.NDArray[np.int64]) -> bytes:
    """Encode a column of non-negative integers as `varints` does, but vectorised."""
    if not numbers.size or numbers.max() < 0x80:
        return numbers.astype(np.uint8).tobytes()

    bits = np.frexp(numbers.astype(np.float64))[1]
    widths = np.maximum((bits + 6) // 7, 1)
    # A float may round up to the next power of two, which has one bit too many.
    widths -= (widths > 1) & (numbers >> np.minimum(7 * (widths - 1), 63) == 0)
    ends = np.cumsum(widths)
    starts = ends - widths
    encoded = np.empty(int(ends[-1]), np.uint8)
    for at in range(int(widths.max())):
        rows = np.flatnonzero(widths > at)
        more = (widths[rows] > at + 1).astype(np.int64) << 7
        encoded[starts[rows] + at] = (numbers[rows] >> (7 * at)) & 0x7F | more

    return encoded.tobytes()


def path_problem(path: str) -> str | None:
    """Return why `path` must not name a data file, or None if it may.

    Checkpoints may come from untrusted sources, so an index must not refer to files outside its directory.
    """
    if "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
        return f"data file path {path!r} is not a plain relative path"

    return None


def seal(magic: bytes, body: bytes) -> bytes:
    """Add the header before an uncompressed body, and the checksum after it."""
    length = (ENVELOPE_BYTES + len(body)).to_bytes(8, "little")
    head = b"".join((magic, length, bytes((0, UNCOMPRESSED))))
    checksum = crc32c(body, crc32c(head)).to_bytes(_CHECKSUM_BYTES, "little")
    return b"".join((head, body, checksum))


@final
@dataclass(frozen=True, slots=True)
class Origin:
    """The file and the part of it that bytes came from, for error messages."""

    path: str  #: the file
    part: str  #: the part of the file, like `B+tree node at byte 0`

    def corrupt(self, problem: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(self.path, f"{self.part}: {problem}")


def unseal(origin: Origin, magic: bytes, data: bytes) -> tuple[int, Cursor]:
    """Check the header and the checksum.

    Args:
        origin: Where `data` came from.
        magic: The four bytes that `data` must start with.
        data: A whole manifest or node, and nothing else.

    Returns:
        The compression method, `UNCOMPRESSED` or `ZSTD`, and a cursor at the body.

    Raises:
        TruncatedDataError: If bytes are missing at the end.
        ChecksumError: If the checksum does not match.
        UnsupportedFormatError: If the checksum matches, but the version or compression method is unknown.
        CorruptCheckpointError: If the magic is wrong, or there are extra bytes.
    """
    if len(data) < ENVELOPE_BYTES:
        raise TruncatedDataError(origin.path, ENVELOPE_BYTES, len(data))
    if data[:4] != magic:
        raise origin.corrupt(f"starts with {data[:4].hex()}, not {magic.hex()}")

    length = int.from_bytes(data[4:12], "little")
    if length > len(data):
        raise TruncatedDataError(origin.path, length, len(data))
    if length < len(data):
        raise origin.corrupt(f"{len(data)} bytes, but its header says {length}")

    end = length - _CHECKSUM_BYTES
    if crc32c(memoryview(data)[:end]) != int.from_bytes(data[end:], "little"):
        raise ChecksumError(origin.path, f"{origin.part}: checksum mismatch")

    cursor = Cursor(origin, data, 12, end)
    version, method = cursor.varints(2)
    if version != 0:
        raise UnsupportedFormatError(origin.path, f"{origin.part}: OCDBT format version {version}")
    if method not in (UNCOMPRESSED, ZSTD):
        raise UnsupportedFormatError(origin.path, f"{origin.part}: compression method {method}")

    return method, cursor


def _long_varints(data: bytes, start: int, end: int, count: int) -> tuple[int, npt.NDArray[np.int64]] | None:
    """Read a column of varints of at most 63 bits each.

    Returns:
        The end of the column and the numbers; None if it must be decoded one by one, because it is cut
        short or a number is longer.
    """
    encoded = np.frombuffer(data, np.uint8, min(end - start, count * _LONGEST), start)
    ends = np.flatnonzero(encoded < 0x80)[:count] + 1
    if len(ends) < count:
        return None

    starts = np.concatenate([[0], ends[:-1]])
    sizes = ends - starts
    if sizes.max() > _LONGEST:
        return None

    numbers = np.zeros(count, np.int64)
    for at in range(int(sizes.max())):
        there = np.flatnonzero(sizes > at)
        numbers[there] |= (encoded[starts[there] + at] & 0x7F).astype(np.int64) << (7 * at)

    return start + int(ends[-1]), numbers


@final
class Cursor:
    """Reads the fields of a body in order. Malformed bytes raise `CorruptCheckpointError`."""

    __slots__ = ("_data", "_end", "_position", "origin")

    def __init__(self, origin: Origin, data: bytes, position: int, end: int) -> None:
        self.origin = origin
        self._data = data
        self._position = position
        self._end = end

    def take(self, nbytes: int) -> bytes:
        start, self._position = self._position, self._position + nbytes
        if self._position > self._end:
            raise self.origin.corrupt(f"its body ends {self._position - self._end} bytes too early")

        return self._data[start : self._position]

    def varints(self, count: int) -> Sequence[int]:
        """Read a column of `count` varints."""
        short = self.take(count)  # no varint is shorter than a byte, so this also bounds `count`
        if short.isascii():
            return short  # each number is one byte: the bytes are the numbers

        position = self._position - count
        if count > _FEW and (found := _long_varints(self._data, position, self._end, count)):
            self._position, column = found
            listed: list[int] = column.tolist()
            return listed

        numbers: list[int] = []
        for _ in range(count):
            number = shift = 0
            byte = 0x80
            while byte & 0x80:
                if shift > 63:
                    raise self.origin.corrupt("a number of more than 64 bits")
                if position == self._end:
                    raise self.origin.corrupt("its body ends within a number")

                byte = self._data[position]
                position += 1
                number |= (byte & 0x7F) << shift
                shift += 7

            if number >= _UINT64_END:
                raise self.origin.corrupt("a number of more than 64 bits")

            numbers.append(number)

        self._position = position
        return numbers

    def column(self, count: int, problem: str = "a number of {}") -> npt.NDArray[np.int64]:
        """Read a column of `count` varints of at most 63 bits; `problem` says that one is larger."""
        start = self._position
        short = self.take(count)
        if short.isascii():
            return np.frombuffer(short, np.uint8).astype(np.int64)

        found = _long_varints(self._data, start, self._end, count)
        if found is not None:
            self._position, column = found
            return column

        self._position = start
        numbers = self.varints(count)
        if max(numbers) > MAX_OFFSET:
            raise self.origin.corrupt(problem.format(max(numbers)))

        return np.array(numbers, np.int64)

    def finish(self) -> None:
        """Check that no bytes are left over."""
        if self._position != self._end:
            raise self.origin.corrupt(f"{self._end - self._position} bytes left over")


#: The longest value stored in the index itself, in bytes, as Orbax configures it.
MAX_INLINE_BYTES = 1024


@final
@dataclass(frozen=True, slots=True)
class Inline:
    """A value that is stored in the index itself."""

    value: bytes


@final
@dataclass(frozen=True, slots=True)
class Indirect:
    """A value that is stored in a data file."""

    file: str  #: relative to the database's directory, like `d/<32 hex>` or `ocdbt.process_0/d/<32 hex>`
    offset: int  #: bytes from the start of the file
    length: int  #: bytes


Value: TypeAlias = Inline | Indirect
