"""`_PENSTOCK_INTEGRITY`: the checksums of pieces and of documents, for restore and for `verify`.

A file of penstock's own, which Orbax ignores: a msgpack map of a version and, for each data file, the
offsets, lengths and checksums of its pieces as three columns, by ascending offset. Columns, because a
list for each of 100,000 pieces would take longer than writing the pieces. Version 1 had lists. Where a part
of a piece can be of use, two more columns say what is known of its blocks; a reader that does not know them
compares whole pieces.

Besides these, and optional, since 0.1 wrote neither: the digest of every document, and what
`_CHECKPOINT_METADATA` says, which others may rewrite.
"""

from __future__ import annotations

__all__ = (
    "Checksum",
    "Checksums",
    "Digest",
    "Integrity",
    "bytes_on_medium",
    "columns",
    "columns_of",
    "decode",
    "decode_documents",
    "digest_of",
    "digest_of_file",
    "encode",
    "encode_files",
    "problem_of_holes",
    "range_crc32c",
    "running_of",
    "with_documents",
    "without_documents",
)

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from struct import unpack
from typing import Any, Final, NamedTuple, TypeAlias, TypeGuard, cast, final, overload

import msgpack
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from penstock.handlers.formats.untrusted import MOST_BYTES, check_inside
from penstock.kernel.concurrency.brief_steps import STEP_BYTES, joined
from penstock.kernel.errors import CorruptCheckpointError, UnsupportedFormatError
from penstock.kernel.memory.memory_limit import FREE_BYTES, MOST_EXPANSION
from penstock.kernel.protocols.reads import RunningChecksums
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Document, RunningSums, WrittenLeaves

COLUMNS: Final[dict[str, np.dtype[Any]]] = {
    "offsets": np.dtype("<u8"),
    "nbytes": np.dtype("<u8"),
    "crc32c": np.dtype("<u4"),
}
"""The columns as they are stored."""

BLOCKS: Final = ("block_bytes", np.dtype("<u4"))
RUNNING: Final = ("running", np.dtype("<u4"))
"""Two more, where a part of a piece can be of use: see `Written.running`; of the second `n_running` a row."""

Column: TypeAlias = npt.NDArray[Any]
_Numbers: TypeAlias = npt.NDArray[np.int64]
_Table: TypeAlias = tuple[_Numbers, _Numbers, _Numbers, _Numbers, npt.NDArray[np.uint32]]
"""The columns of `Checksums`, of which the last is longer or shorter than the others."""

_NONE: Final = np.zeros(0, np.uint32)


@final
class Checksum(NamedTuple):
    """The checksum of a range of a data file."""

    offset: int  #: bytes from the start of the file
    nbytes: int
    crc32c: int


@final
@dataclass(frozen=True, eq=False)
class Checksums(Sequence[Checksum]):
    """The checksums of one data file, by ascending offset."""

    offsets: Column
    nbytes: Column
    crc32c: Column
    block_bytes: Column | None = None  #: 0 where nothing is known of blocks; None if that is nowhere
    running: Column | None = None  #: `n_running` of each piece, one after another

    @classmethod
    def of(cls, pieces: Iterable[tuple[int, int, int]]) -> Checksums:
        """Put (offset, bytes, crc32c) into columns."""
        rows = sorted(pieces)
        columns = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(
            *[np.array(column, dtype) for column, dtype in zip(columns, COLUMNS.values(), strict=True)]
        )

    @overload
    def __getitem__(self, index: int, /) -> Checksum: ...
    @overload
    def __getitem__(self, index: slice, /) -> tuple[Checksum, ...]: ...
    def __getitem__(self, index: int | slice, /) -> Checksum | tuple[Checksum, ...]:
        if isinstance(index, slice):
            return tuple([self[at] for at in range(len(self))[index]])

        return Checksum(int(self.offsets[index]), int(self.nbytes[index]), int(self.crc32c[index]))

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Checksum]:
        columns = (self.offsets.tolist(), self.nbytes.tolist(), self.crc32c.tolist())
        return map(Checksum._make, zip(*columns, strict=True))

    def running_of(self, at: int) -> RunningChecksums | None:
        """Return the checksums of the blocks of piece `at`; None if it has none."""
        found = self._running_of(at)
        return None if found is None else RunningChecksums(found[0], cast("Sequence[int]", found[1]))

    def written_running(self, at: int) -> RunningSums | None:
        """The running checksums as they were when the piece was written."""
        found = self._running_of(at)
        return None if found is None else RunningSums(found[0], found[1].tobytes())

    def _running_of(self, at: int) -> tuple[int, Column] | None:
        if self.block_bytes is None or self.running is None or not self.block_bytes[at]:
            return None

        start, stop = int(self._ends[at - 1]) if at else 0, int(self._ends[at])
        return int(self.block_bytes[at]), self.running[start:stop]

    @cached_property
    def _ends(self) -> Column:
        """Return the end in `running` of the blocks of each piece."""
        assert self.block_bytes is not None
        return np.cumsum(n_running(self.nbytes, self.block_bytes))

    def from_offset(self, offset: int) -> int:
        """The number of the first piece that begins at or after `offset`."""
        return int(self.offsets.searchsorted(np.uint64(offset)))  # the function takes twice as long

    def exactly(self, offsets: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The checksum of each of many ranges; -1 of one that is not just a piece."""
        starts, sizes = offsets.astype(np.uint64), nbytes.astype(np.uint64)
        at = np.minimum(np.searchsorted(self.offsets, starts), max(len(self) - 1, 0))
        if not len(self):
            return np.full(len(at), -1, np.int64)

        same = (self.offsets[at] == starts) & (self.nbytes[at] == sizes)
        return np.where(same, self.crc32c[at].astype(np.int64), -1)

    def have_blocks(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return whether anything is known of the blocks of the pieces that begin at many offsets."""
        if self.block_bytes is None:
            return np.zeros(len(offsets), np.bool_)

        return self.block_bytes[np.searchsorted(self.offsets, offsets.astype(np.uint64))] > 0


def n_running(nbytes: Column, block_bytes: Column) -> npt.NDArray[np.int64]:
    """The number of blocks but the last in each piece; 0 where `block_bytes` is 0."""
    has = (block_bytes > 0) & (nbytes > 0)
    counts = np.zeros(len(has), np.int64)
    counts[has] = (nbytes[has].astype(np.int64) - 1) // block_bytes[has].astype(np.int64)
    return counts


def running_of(running: Column, nbytes: Column, block_bytes: Column, rows: npt.NDArray[np.int64]) -> Column:
    """Select the checksums of the blocks of the pieces in `rows`, in that order."""
    if not len(running):
        return running

    counts = n_running(nbytes, block_bytes)
    starts, chosen = np.cumsum(counts) - counts, counts[rows]
    moved = np.repeat(starts[rows] - (np.cumsum(chosen) - chosen), chosen)
    return running[moved + np.arange(len(moved))]


def columns(pieces: Sequence[tuple[int, int, int]], before: Checksums | None = None) -> dict[str, bytes]:
    """Encode the pieces of a data file: offset, bytes, and crc32c of each.

    Args:
        pieces: At least one, in any order.
        before: What was recorded of the first of them, in this order: what it says of blocks is kept.
    """
    offsets, lengths, sums = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
    blocks, running = np.zeros(len(offsets), np.int64), _NONE
    if before is not None and before.block_bytes is not None and before.running is not None:
        blocks[: len(before)] = before.block_bytes
        running = before.running

    return _pack_columns([(offsets, lengths, sums, blocks, running)])


def columns_of(batches: Iterable[WrittenLeaves]) -> dict[str, dict[str, bytes]]:
    """Encode where everything is that was written, by data file."""
    many: dict[str, list[_Table]] = {}
    for batch in batches:
        table = batch.written
        file, *numbers = map(
            np.asarray, (table.file, table.offset, table.nbytes, table.crc32c, table.block_bytes)
        )
        _, nbytes, _, block_bytes = numbers
        running = np.frombuffer(table.running, RUNNING[1])
        order = np.argsort(file, kind="stable")
        found, starts = np.unique(file[order], return_index=True)
        groups = np.split(order, starts[1:]) if len(order) else ()
        for number, rows in zip(found.tolist(), groups, strict=True):
            offset, length, crc32c, blocks = (column[rows] for column in numbers)
            sums = running_of(running, nbytes, block_bytes, rows)
            many.setdefault(table.files[int(number)], []).append((offset, length, crc32c, blocks, sums))

    # One after another: to forget all tables of thousands of files at the end would take some 10 ms.
    return {file: _pack_columns(many.pop(file)) for file in list(many)}


def _pack_columns(tables: Sequence[_Table]) -> dict[str, bytes]:
    """Encode the pieces of one data file."""
    *numbers, running = tables[0]
    if len(tables) > 1:
        *numbers, running = map(np.concatenate, zip(*tables, strict=True))
        running = running.astype(np.uint32)

    offsets, nbytes, _, blocks = numbers
    order = np.argsort(offsets, kind="stable")
    named = zip((*COLUMNS.items(), BLOCKS), numbers, strict=True)
    packed = {name: column[order].astype(dtype).tobytes() for (name, dtype), column in named}
    if not len(running):
        del packed[BLOCKS[0]]
        return packed

    packed[RUNNING[0]] = running_of(running, nbytes, blocks, order).astype(RUNNING[1]).tobytes()
    return packed


VERSION: Final = 2

_DEPTH_OF_COLUMNS: Final = 2  # in the document, in its files
_LONG_BYTES: Final = b"\xc6"  # msgpack's mark of bytes of which the length takes 32 bits


@final
class Digest(NamedTuple):
    """The length and the checksum of a document."""

    nbytes: int
    crc32c: int


def digest_of(data: bytes) -> Digest:
    """Return the digest of a document's content."""
    return Digest(len(data), crc32c(data))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Integrity:
    """The decoded document."""

    files: Mapping[str, Checksums] = field(default_factory=dict[str, Checksums])
    """The pieces of each data file, relative to the directory."""
    digests: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  #: of leaves, by stored name
    documents: Mapping[str, Digest] = field(default_factory=dict[str, Digest])
    """Of each document, relative to the directory."""
    about: Mapping[str, object] = field(default_factory=dict[str, object])
    """The content of `_CHECKPOINT_METADATA`; see `checkpoint_metadata.content_of`."""


def encode(
    batches: Iterable[WrittenLeaves],
    digests: Mapping[str, bytes],
    documents: Iterable[Document] = (),
    about: Mapping[str, object] | None = None,
) -> bytes:
    """Encode the document.

    Args:
        batches: Where every piece is.
        digests: Of leaves, by stored name.
        documents: All others of the directory.
        about: What `_CHECKPOINT_METADATA` says, if it is among them.
    """
    return encode_files(
        columns_of(batches), digests, {one.path: digest_of(one.data) for one in documents}, about
    )


def encode_files(
    files: Mapping[str, Mapping[str, bytes]],
    digests: Mapping[str, bytes],
    documents: Mapping[str, Digest],
    about: Mapping[str, object] | None = None,
) -> bytes:
    """Encode the document from the columns of each data file; see `encode`."""
    members: dict[str, object] = {"version": VERSION, "files": files}
    if digests:
        members["digests"] = dict(digests)
    if documents:
        members["documents"] = _encoded(documents)
    if about:
        members["about"] = dict(about)

    return _packed(members)


def with_documents(
    path: str,
    data: bytes | None,
    documents: Mapping[str, Digest],
    about: Mapping[str, object] | None = None,
) -> bytes:
    """Return the document with other digests of documents; a new one if there is no `data`.

    Args:
        path: Of the document, for the error.
        data: Its content.
        documents: All that are to be recorded.
        about: What `_CHECKPOINT_METADATA` says; by default what was recorded of it.

    Raises:
        CorruptCheckpointError: If it is malformed.
    """
    empty: dict[str, object] = {"version": VERSION, "files": {}}
    members = empty if data is None else _members(path, data)[0]
    said = {} if about is None else {"about": dict(about)}
    return _packed({**members, "documents": _encoded(documents) if documents else {}, **said})


def without_documents(path: str, data: bytes, is_left_out: Callable[[str], bool]) -> bytes:
    """Return the document without the digests of some documents.

    Raises:
        CorruptCheckpointError: As `decode`.
    """
    kept = {name: digest for name, digest in decode(path, data).documents.items() if not is_left_out(name)}
    return _packed({**_members(path, data)[0], "documents": _encoded(kept) if kept else {}})


def _packed(members: Mapping[str, object]) -> bytes:
    """Encode the document, of which there may be many MiB, in steps; see `brief_steps`."""
    pieces: list[bytes] = []
    _add_packed(pieces, members, msgpack.Packer())
    return joined(pieces)


def _add_packed(pieces: list[bytes], value: object, packer: msgpack.Packer, depth: int = 0) -> None:
    """Add the pieces of a value: each file's columns at once, unless they are long."""
    if _is_long(value):
        pieces += _LONG_BYTES + len(value).to_bytes(4, "big"), value
        return

    members = cast("dict[str, object]", value) if isinstance(value, dict) else None
    if members is None or (depth >= _DEPTH_OF_COLUMNS and not any(map(_is_long, members.values()))):
        pieces.append(packer.pack(cast("Any", value)))
        return

    pieces.append(packer.pack_map_header(len(members)))
    for name, each in members.items():
        pieces.append(packer.pack(name))
        _add_packed(pieces, each, packer, depth + 1)


def _is_long(value: object) -> TypeGuard[bytes]:
    return type(value) is bytes and len(value) > STEP_BYTES


def _encoded(documents: Mapping[str, Digest]) -> dict[str, object]:
    nbytes, sums = zip(*documents.values(), strict=True)
    return {
        "names": list(documents),
        "nbytes": np.array(nbytes, "<u8").tobytes(),
        "crc32c": np.array(sums, "<u4").tobytes(),
    }


def decode(path: str, data: bytes) -> Integrity:
    """Read the document.

    Raises:
        CorruptCheckpointError: If it is malformed.
        UnsupportedFormatError: If a later penstock wrote it.
    """
    members, version = _members(path, data)
    files = _as_map(path, members.get("files"))
    for file in files:
        check_inside(path, file)

    digests = _as_map(path, members.get("digests", {}))
    if not {bytes}.issuperset(map(type, digests.values())):
        raise CorruptCheckpointError(path, "has a digest that is no bytes")
    if version == 1:
        found: Mapping[str, Checksums] = {file: _listed(path, file, pieces) for file, pieces in files.items()}
    else:
        found = _Recorded({file: _checked(path, file, found) for file, found in files.items()})

    return Integrity(
        found,
        cast("dict[str, bytes]", digests),
        _documents(path, members),
        _as_map(path, members.get("about", {})),
    )


def decode_documents(path: str, data: bytes) -> Mapping[str, Digest]:
    """Read the digests of documents alone, and skip those of data files. Quick.

    Raises:
        CorruptCheckpointError: If it is malformed.
        UnsupportedFormatError: If a later penstock wrote it.
    """
    return _documents(path, _members(path, data)[0])


def _members(path: str, data: bytes) -> tuple[dict[str, object], int]:
    """Return what the document has, and its version."""
    if not data:
        raise CorruptCheckpointError(path, "is empty")
    try:
        document: object = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise CorruptCheckpointError(path, f"is not msgpack: {str(error) or type(error).__name__}") from error

    members = _as_map(path, document)
    version = members.get("version")
    if type(version) is int and version > VERSION:
        raise UnsupportedFormatError(path, f"is of version {version}; this penstock reads {VERSION}")
    if type(version) is not int or version < 1:
        raise CorruptCheckpointError(path, f"is of version {version!r}, not {VERSION}")

    return members, version


def _documents(path: str, members: Mapping[str, object]) -> Mapping[str, Digest]:
    columns = _as_map(path, members.get("documents", {}))
    if not columns:
        return {}

    names, nbytes, sums = (columns.get(name) for name in ("names", "nbytes", "crc32c"))
    listed = cast("list[object]", names) if isinstance(names, list) else [None]
    if not {str}.issuperset(map(type, listed)) or type(nbytes) is not bytes or type(sums) is not bytes:
        raise CorruptCheckpointError(path, "has documents that are no names and columns")
    if (len(nbytes), len(sums)) != (8 * len(listed), 4 * len(listed)):
        raise CorruptCheckpointError(path, f"has {len(listed)} documents, and columns of other lengths")

    for name in cast("list[str]", listed):
        check_inside(path, name)

    rows = zip(unpack(f"<{len(listed)}Q", nbytes), unpack(f"<{len(listed)}I", sums), strict=True)
    return dict(zip(cast("list[str]", listed), map(Digest._make, rows), strict=True))


@final
class _Recorded(Mapping[str, Checksums]):
    """Checksums by file, made when asked for, since there may be a file for each leaf. Thread-safe."""

    __slots__ = ("_columns", "_made")

    def __init__(self, columns: Mapping[str, tuple[bytes, ...]]) -> None:
        self._columns = columns
        self._made: dict[str, Checksums] = {}

    def __getitem__(self, file: str) -> Checksums:
        made = self._made.get(file)
        if made is None:
            made = self._made[file] = Checksums(*map(np.frombuffer, self._columns[file], _STORED))

        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


_STORED: Final = (*COLUMNS.values(), BLOCKS[1], RUNNING[1])
"""The types of the columns of `_Recorded`."""


def _as_map(path: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict) or not {str}.issuperset(map(type, cast("dict[object, object]", value))):
        raise CorruptCheckpointError(path, "is not a map of a version and files")

    return cast("dict[str, object]", value)


def _checked(path: str, file: str, value: object) -> tuple[bytes, ...]:
    columns: list[bytes] = []
    lengths: list[int] = []
    members = cast("dict[object, object]", value) if isinstance(value, dict) else _as_map(path, value)
    for name, dtype in COLUMNS.items():
        column = members.get(name)
        if type(column) is not bytes or len(column) % dtype.itemsize:
            raise CorruptCheckpointError(path, f"{file!r} has {name} that are no column of numbers")

        columns.append(column)
        lengths.append(len(column) // dtype.itemsize)

    if not lengths[0] == lengths[1] == lengths[2]:
        shown = f"{lengths[0]}, {lengths[1]} and {lengths[2]} entries"
        raise CorruptCheckpointError(path, f"{file!r} has columns of {shown}")
    has_blocks = BLOCKS[0] in members or RUNNING[0] in members
    if lengths[0] > 1 or has_blocks:
        pieces = Checksums(*map(np.frombuffer, columns, _STORED))
        _check_apart(path, file, pieces)
        if has_blocks:
            columns += _checked_blocks(path, file, members, pieces)

    return tuple(columns)


def _checked_blocks(
    path: str, file: str, members: Mapping[Any, object], pieces: Checksums
) -> tuple[bytes, bytes]:
    """Return the columns about blocks, if they fit the pieces."""
    sizes, running = members.get(BLOCKS[0]), members.get(RUNNING[0])
    if type(sizes) is bytes and type(running) is bytes and len(sizes) == BLOCKS[1].itemsize * len(pieces):
        block_bytes = np.frombuffer(sizes, BLOCKS[1])
        if not np.any(pieces.nbytes[block_bytes > 0] > MOST_BYTES):
            # As many as 64 bits can hold, and no more than there are: a wrong sum cannot come out right.
            counts = n_running(pieces.nbytes, block_bytes)
            if float(counts.sum(dtype=np.float64)) * RUNNING[1].itemsize == len(running):
                return sizes, running

    raise CorruptCheckpointError(path, f"{file!r} has columns of blocks that do not fit its pieces")


def _check_apart(path: str, file: str, pieces: Checksums) -> None:
    """Raise unless pieces are in order and apart: else a small file could be read any number of times."""
    offsets, gaps = pieces.offsets, pieces.offsets[1:] - pieces.offsets[:-1]
    if np.any(offsets[1:] < offsets[:-1]):
        raise CorruptCheckpointError(path, f"{file!r} has offsets that are not in ascending order")
    if np.any(pieces.nbytes[:-1] > gaps):
        raise CorruptCheckpointError(path, f"{file!r} has pieces that lie in one another")


def _listed(path: str, file: str, value: object) -> Checksums:
    pieces = cast("list[object]", value) if isinstance(value, list) else [None]
    found = Checksums.of([_checksum(path, file, piece) for piece in pieces])
    _check_apart(path, file, found)
    return found


def _checksum(path: str, file: str, value: object) -> tuple[int, int, int]:
    numbers = cast("list[object]", value) if isinstance(value, list) else []
    match numbers:
        case [int(offset), int(nbytes), int(crc)] if (
            0 <= offset < 1 << 64 and 0 <= nbytes < 1 << 64 and 0 <= crc < 1 << 32
        ):
            return offset, nbytes, crc
        case _:
            raise CorruptCheckpointError(path, f"{file!r} has an entry {value!r}: not offset, length, crc32c")


# Files of any length are summed with this much memory, which is not of the budget.
_BLOCK_BYTES: Final = 4 * 2**20


def problem_of_holes(store: Store, path: str, nbytes: int) -> str:
    """Return why `nbytes` of a file full of holes are not read; empty if they may be. Blocking."""
    if nbytes <= FREE_BYTES or store.kind(path) != "file":
        return ""

    stored = bytes_on_medium(store, [path])
    if nbytes <= MOST_EXPANSION * stored:
        return ""

    return f"takes {stored} bytes on the medium, and {nbytes} would be compared: it is not read"


def bytes_on_medium(store: Store, paths: Iterable[str]) -> int:
    """Return the bytes of all files together, without holes where the store knows these. Blocking."""
    return sum(store.data_sizes(paths))


def digest_of_file(store: Store, path: str) -> Digest:
    """Return the digest of a file, which is read block by block. Blocking."""
    nbytes = store.size(path)
    return Digest(nbytes, range_crc32c(store, path, 0, nbytes))


def range_crc32c(store: Store, path: str, offset: int, nbytes: int) -> int:
    """Return the crc32c of a range of a file, which is read block by block. Blocking."""
    block = memoryview(bytearray(min(nbytes, _BLOCK_BYTES)))
    found, end = 0, offset + nbytes
    file = store.open_data_file(path)
    try:
        for at in range(offset, end, _BLOCK_BYTES):
            part = block[: min(len(block), end - at)]
            file.read_at(at, [part])
            found = crc32c(part, found)
    finally:
        file.close()

    return found
