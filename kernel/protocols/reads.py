"""The reads of a restore, and the memory that they fill.

Parts of a value that need one range with a checksum share its comparison, so that its bytes are read once.
Where the checksums of its blocks are known, blocks that no part needs are not read.
"""

from __future__ import annotations

__all__ = (
    "AdoptsMemory",
    "CheckedRead",
    "Combine",
    "Destination",
    "DirectRead",
    "DriverRead",
    "InRuns",
    "JoinsMemory",
    "OpaqueChunk",
    "Read",
    "RunningChecksums",
    "Runs",
    "ScatterRead",
    "Segment",
    "SharedBuffer",
    "SharedRange",
    "SharedRead",
    "Target",
    "TileRead",
    "WholeChunks",
    "chosen",
    "narrowed",
    "share_checks",
)

import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, ClassVar, Final, Protocol, TypeAlias, TypeVar, final, runtime_checkable

from penstock.kernel.concurrency.brief_steps import as_slice
from penstock.kernel.protocols.capability import Capability
from penstock.kernel.protocols.leaf import LeafSpec

BLOCK_BYTES: Final = 64 * 1024
"""Bytes read at a time of a range that is kept in part."""

SHORT_BYTES: Final = 256 * 1024
"""A shorter range is read by one call: several calls would cost more than the bytes that are not kept."""

Combine: TypeAlias = Callable[[Sequence[tuple[int, int]]], int]
"""Makes the checksum of a range of those of its segments, each with its number of bytes, in order."""


class Destination(Protocol):
    """A host buffer for one rectangular part of a global array, allocated on first access."""

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) along each axis of the global array."""
        ...

    @property
    def nbytes(self) -> int: ...

    def view(self) -> memoryview:
        """The buffer: writable, contiguous, C order, as bytes. Thread-safe."""
        ...

    def fresh(self) -> Destination:
        """Return another buffer for the same part."""
        ...


@runtime_checkable
class AdoptsMemory(Capability, Protocol):
    """A `Destination` that can use memory of others, which may be filled already."""

    @property
    def nbytes(self) -> int: ...

    def adopt(self, memory: memoryview) -> None:
        """Use these bytes instead of its own memory. Called before the first access."""
        ...


@runtime_checkable
class JoinsMemory(Capability, Protocol):
    """A `Destination` that can have its memory in one allocation with others of its class."""

    @property
    def nbytes(self) -> int: ...

    def join(self, others: Sequence[Any], /) -> None:
        """Put this one and the others, in order, into one allocation. Called before the first access to any.

        It is freed when none of them is used any more.
        """
        ...


@final
@dataclass(frozen=True, slots=True, eq=False)
class WholeChunks:
    """The places of leaves of one raw chunk each, in columns of one length (except `files`)."""

    files: Sequence[str]  #: absolute
    ids: Sequence[int]  #: index in `files`; -1 for a leaf that has to be read in another way
    offsets: Sequence[int]  #: bytes from the start of the file
    crc32cs: Sequence[int]  #: of the bytes as they were written; -1 if it is not known


@dataclass(frozen=True, slots=True)
class Target:
    """The regions that a handler needs read for a leaf. One may stand for many leaves until it is `fresh`."""

    regions: tuple[Destination, ...] = ()  #: distinct parts of the global array; together all that is needed
    staging_bytes: int = 0  #: host bytes that are freed once the value is built (0 if the value keeps them)
    detail: object = None  #: the handler's own, for `build`
    packable: bool = False
    """True if the leaf may share a buffer with others: all its bytes in C order are what `build` needs."""

    def fresh(self) -> Target:
        """Return the same with regions for one leaf alone."""
        return replace(self, regions=tuple([region.fresh() for region in self.regions]))


@dataclass(frozen=True, slots=True)
class DirectRead:
    """A range of a file that goes unchanged to one place in the destination."""

    scratch_nbytes: ClassVar[int] = 0  #: host bytes next to the destination

    leaf: int
    file: str  #: absolute
    offset: int
    nbytes: int
    region: Destination
    start: int  #: offset in the region's bytes
    crc32c: int | None = None  #: of these bytes as they were written, if that is known

    def into(self) -> memoryview:
        """The memory that the bytes go to; allocates the region on first use."""
        return self.region.view()[self.start : self.start + self.nbytes]


@dataclass(frozen=True, slots=True)
class OpaqueChunk:
    """An opaque range: its bytes are meaningless until a stage undoes what the save did."""

    codec: str  #: the name the saving stage gave it
    name: str  #: stored name of the leaf
    key_path: str
    chunk: tuple[int, ...]
    start: int = 0  #: offset in the chunk, bytes: it is always all of it


@final
@dataclass(frozen=True, slots=True)
class Runs:
    """The places, within its range, of the bytes that a scattered read keeps."""

    shape: tuple[int, ...]  #: how many there are along each axis
    strides: tuple[int, ...]  #: bytes from one to the next along each axis
    nbytes: int  #: of each
    scatter: Callable[[memoryview], None]  #: takes them alone, one after another in C order
    into: Callable[[], memoryview] | None = None  #: where they go, if they follow each other there, too

    @property
    def count(self) -> int:
        """Their number."""
        return math.prod(self.shape)

    def offsets(self) -> Iterator[int]:
        """Yield where each begins, from the beginning of the range."""
        if not self.shape:
            yield 0
            return

        stride = self.strides[-1]
        for index in itertools.product(*map(range, self.shape[:-1])):
            first = sum(map(int.__mul__, index, self.strides))
            yield from range(first, first + stride * self.shape[-1], stride)


@runtime_checkable
class InRuns(Capability, Protocol):
    """A `ScatterRead.scatter` that knows which bytes of the range it keeps."""

    def runs(self) -> Runs:
        """Return them."""
        ...


@dataclass(frozen=True, slots=True)
class ScatterRead:
    """A range of a file that is spread over a destination (another sharding than the stored one)."""

    leaf: int
    file: str  #: absolute
    offset: int
    nbytes: int
    scatter: Callable[[memoryview], None]  #: blocking; copies out of the buffer it is given
    crc32c: int | None = None  #: of these bytes as they were written, if that is known
    opaque: OpaqueChunk | None = None  #: set if `scatter` needs bytes other than those stored
    decoded_nbytes: int = 0  #: host bytes that `scatter` holds next to the buffer, to decode it

    @property
    def scratch_nbytes(self) -> int:
        """Host bytes next to the destination."""
        return self.nbytes + self.decoded_nbytes


@final
class SharedRange:
    """A range of a file that several reads bring, a segment each. Thread-safe.

    Args:
        offset: Where the range begins in the file.
        sizes: Bytes of each segment, in order.
        crc32c: Of the whole range as it was written.
        combine: Makes the checksum of the range of those of its segments.
    """

    __slots__ = ("_combine", "_crc32c", "_found", "_lock", "_sizes", "offset")

    def __init__(self, offset: int, sizes: Sequence[int], crc32c: int, combine: Combine) -> None:
        self.offset = offset
        self._sizes = tuple(sizes)
        self._crc32c = crc32c
        self._combine = combine
        self._lock = Lock()
        self._found: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return sum(self._sizes)

    def differs(self, number: int, crc32c: int) -> bool:
        """Note the checksum of a segment; say, once all are known, whether the range is damaged."""
        with self._lock:
            self._found[number] = crc32c
            if len(self._found) < len(self._sizes):
                return False

        found = [(self._found[at], nbytes) for at, nbytes in enumerate(self._sizes)]
        return self._combine(found) != self._crc32c


@final
@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a shared range that a read brings."""

    whole: SharedRange
    number: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class RunningChecksums:
    """Running checksums, from which that of any blocks of a range follows."""

    block_bytes: int  #: of each block but the last, which may be shorter
    crc32cs: Sequence[int]  #: of the first block, the first two, and so on; without that of the whole range


@dataclass(frozen=True, slots=True)
class CheckedRead:
    """A range of a file that is read whole, since its checksum covers all of it, and kept in part.

    It is read block by block, so its length costs no memory. If others keep parts of the same range, each
    reads a segment of it, and the last one compares.
    """

    leaf: int
    file: str  #: absolute
    offset: int
    nbytes: int
    crc32c: int  #: of the whole range as it was written
    parts: tuple[DirectRead | ScatterRead, ...]  #: what is kept, by offset; without checksums of their own
    combine: Combine | None = None  #: for checksums of this kind; None if the range cannot be shared
    segment: Segment | None = None  #: set if this is not the whole range that the checksum covers
    running: RunningChecksums | None = None  #: if they are known; see `narrowed`

    @property
    def scratch_nbytes(self) -> int:
        """Host bytes next to the destination: a block, and the longest part that is scattered."""
        if self.is_short:
            return self.nbytes

        return min(self.nbytes, BLOCK_BYTES) + max([part.scratch_nbytes for part in self.parts], default=0)

    @property
    def is_short(self) -> bool:
        """True if it should be read by one call, as `at_once` does."""
        return self.segment is None and self.nbytes < SHORT_BYTES

    @property
    def covered(self) -> tuple[int, int]:
        """The beginning and the end in the file of the range that the checksum covers."""
        whole = self if self.segment is None else self.segment.whole
        return whole.offset, whole.offset + whole.nbytes

    def at_once(self) -> ScatterRead:
        """Return the same as one scattered read of the whole range. Not for a segment."""
        spread = partial(_spread, self.parts, self.offset)
        return ScatterRead(self.leaf, self.file, self.offset, self.nbytes, spread, self.crc32c)

    def differs(self, crc32c: int) -> bool:
        """Say whether bytes with this checksum are not those that were written.

        Of a segment that is known only once all segments were read: the last one to ask is answered.
        """
        if self.segment is None:
            return crc32c != self.crc32c

        return self.segment.whole.differs(self.segment.number, crc32c)

    def fill(
        self,
        read_at: Callable[[int, Sequence[memoryview]], None],
        checksum: Callable[[memoryview, int], int],
    ) -> int:
        """Read the range or segment, fill the destinations, and return its checksum, for `differs`. Blocking.

        Args:
            read_at: Reads the file, as `ReadableFile.read_at` does.
            checksum: Continues a crc32c with more bytes.
        """
        block = memoryview(bytearray(min(self.nbytes, BLOCK_BYTES)))
        at, sum_, end = self.offset, 0, self.offset + self.nbytes
        for part in (*self.parts, None):
            start = end if part is None else part.offset
            assert start <= end, "what is kept is in the range"
            while at < start:
                gap = block[: min(len(block), start - at)]
                read_at(at, [gap])
                sum_, at = checksum(gap, sum_), at + len(gap)
            if part is None:
                break

            data = part.into() if isinstance(part, DirectRead) else memoryview(bytearray(part.nbytes))
            read_at(part.offset, [data])
            sum_ = checksum(data[at - part.offset :], sum_)  # parts may overlap
            at = max(at, part.offset + part.nbytes)
            if isinstance(part, ScatterRead):
                part.scatter(data)

        return sum_


@dataclass(frozen=True, slots=True)
class DriverRead:
    """A read that another library's driver performs (TensorStore, for chunks with a codec)."""

    leaf: int
    nbytes: int
    perform: Callable[[], Awaitable[None]]  #: returns when the destination is filled
    decoded_nbytes: int = 0  #: of the chunks that it decodes, if those are more

    @property
    def scratch_nbytes(self) -> int:
        """Host bytes next to the destination: what the driver decodes."""
        return max(self.nbytes, self.decoded_nbytes)


@final
class SharedBuffer:
    """Memory with the bytes of many leaves; their values are copies. Filled once.

    Or a mapped file, which is read-only; values may keep views of that.

    Attributes:
        data: The bytes of all leaves, each leaf in C order.
        starts: The offset of each leaf's bytes in `data`.
        is_filled: Whether the leaves were read.
    """

    __slots__ = ("data", "is_filled", "starts")

    def __init__(self) -> None:
        self.data = memoryview(b"")
        self.starts: Sequence[int] = ()
        self.is_filled = False

    def fill(self, data: memoryview, starts: Sequence[int]) -> None:
        """Take the bytes that were read."""
        self.data, self.starts, self.is_filled = data, starts, True


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SharedRead:
    """Small leaves, each a range of one file, that are read into one buffer. Columns of one length."""

    scratch_nbytes: ClassVar[int] = 0  #: host bytes next to the buffer

    leaves: Sequence[int]
    file: str  #: absolute
    specs: Sequence[LeafSpec]
    offsets: Sequence[int]  #: bytes from the start of the file
    sizes: Sequence[int]  #: bytes
    crc32cs: Sequence[int]  #: of the bytes as they were written; -1 where it is not known
    buffer: SharedBuffer = field(default_factory=SharedBuffer)

    @property
    def leaf(self) -> int:
        """The first of the leaves."""
        return self.leaves[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(self.sizes)

    def part(self, numbers: Sequence[int]) -> SharedRead:
        """Return the read of some of the leaves, into a buffer of their own unless they were read."""
        buffer = SharedBuffer()
        if self.buffer.is_filled:
            buffer.fill(self.buffer.data, chosen(self.buffer.starts, numbers))

        return SharedRead(
            leaves=chosen(self.leaves, numbers),
            file=self.file,
            specs=chosen(self.specs, numbers),
            offsets=chosen(self.offsets, numbers),
            sizes=chosen(self.sizes, numbers),
            crc32cs=chosen(self.crc32cs, numbers),
            buffer=buffer,
        )


@final
@dataclass(frozen=True, slots=True, eq=False)
class TileRead:
    """Reads into memory of their own, of all of which together a part of a destination is made.

    They are performed one after another, and then `make` is called.
    """

    leaf: int
    reads: tuple[DirectRead | ScatterRead | CheckedRead | DriverRead, ...]
    make: Callable[[], None]  #: blocking; fills the destination, and frees what was read
    made_nbytes: int  #: host bytes of what is read, and of what is made on the way
    boxes: tuple[AdoptsMemory, ...] = ()  #: where the reads go: who performs them may give them memory

    @property
    def nbytes(self) -> int:
        """Bytes to be read."""
        return sum([read.nbytes for read in self.reads])

    @property
    def scratch_nbytes(self) -> int:
        """Host bytes next to the destination."""
        return self.made_nbytes + max([read.scratch_nbytes for read in self.reads], default=0)

    @property
    def drivers(self) -> tuple[DriverRead, ...]:
        """Those of its reads that a driver performs."""
        return tuple([read for read in self.reads if isinstance(read, DriverRead)])


Read: TypeAlias = DirectRead | ScatterRead | CheckedRead | DriverRead | SharedRead | TileRead

T = TypeVar("T")


def chosen(column: Sequence[T], numbers: Sequence[int]) -> Sequence[T]:
    """Return some of a column, by number. A range of a range stays one."""
    neighbours = as_slice(numbers)
    return [column[at] for at in numbers] if neighbours is None else column[neighbours]


def _spread(parts: Sequence[DirectRead | ScatterRead], start: int, data: memoryview) -> None:
    """Copy the kept parts of a range from its bytes, which begin at `start`, to their destinations."""
    for part in parts:
        found = data[part.offset - start : part.offset - start + part.nbytes]
        if isinstance(part, DirectRead):
            part.into()[:] = found
        else:
            part.scatter(found)


def share_checks(groups: Sequence[Sequence[Read]]) -> list[tuple[Read, ...]]:
    """Cut each range of which several reads keep a part into segments, one for each of them.

    A range is compared when the last of its segments was read. So the value that is made of the groups must
    not be given to anybody before all of them were.

    Args:
        groups: The reads of each part of one value, to be performed in any order.

    Returns:
        The same groups. A part of a range that is not kept is read once, with the segment that it is in.
    """
    found = [list(group) for group in groups]
    users: dict[tuple[str, int, int, int], list[tuple[int, int]]] = {}
    for number, group in enumerate(groups):
        for at, read in enumerate(group):
            if isinstance(read, CheckedRead) and read.segment is None:
                key = (read.file, read.offset, read.nbytes, read.crc32c)
                users.setdefault(key, []).append((number, at))

    for places in users.values():
        reads = [read for number, at in places if isinstance(read := groups[number][at], CheckedRead)]
        combine = reads[0].combine
        if len(reads) > 1 and combine is not None:
            order = sorted(range(len(reads)), key=lambda at: reads[at].parts[0].offset)
            for at, segment in zip(order, _segments([reads[at] for at in order], combine), strict=True):
                number, place = places[at]
                found[number][place] = segment

    return list(map(tuple, found))


def narrowed(reads: Sequence[Read]) -> tuple[Read, ...]:
    """Leave out the unused blocks of each range, if the checksums of its blocks are known.

    What remains in one piece is one read, so there may be more of them than before. Do this after reads were
    joined and shared, since those need whole ranges.
    """
    if not any(isinstance(read, TileRead) or _has_blocks(read) for read in reads):
        return tuple(reads)

    return tuple([part for read in reads for part in _without_gaps(read)])


def _has_blocks(read: Read) -> bool:
    return isinstance(read, CheckedRead) and read.running is not None


def _without_gaps(read: Read) -> Iterator[Read]:
    if isinstance(read, TileRead):
        inner: Any = tuple([part for one in read.reads for part in _without_gaps(one)])
        yield replace(read, reads=inner)
        return

    if not isinstance(read, CheckedRead) or read.segment is not None or read.running is None:
        yield read
        return

    kept: list[DirectRead | ScatterRead] = []
    first = last = 0  # blocks
    for part in sorted(read.parts, key=lambda part: part.offset):
        begins, ends = _blocks(read, read.running, [part])
        if kept and begins > last:
            yield _of_blocks(read, read.running, first, last, kept)
            kept = []

        first, last = (first, max(last, ends)) if kept else (begins, ends)
        kept.append(part)

    yield _of_blocks(read, read.running, first, last, kept)


def _blocks(
    read: CheckedRead, running: RunningChecksums, parts: Sequence[DirectRead | ScatterRead]
) -> tuple[int, int]:
    """Return the first block that parts need, and the one after the last."""
    start = min([part.offset for part in parts]) - read.offset
    stop = max([part.offset + part.nbytes for part in parts]) - read.offset
    return start // running.block_bytes, -(-stop // running.block_bytes)


def _of_blocks(
    read: CheckedRead,
    running: RunningChecksums,
    first: int,
    last: int,
    parts: Sequence[DirectRead | ScatterRead],
) -> Read:
    """Read some blocks, for these parts."""
    start, nbytes, crc32c = _range(read, running, first, last)
    only = parts[0]
    if len(parts) == 1 and (only.offset, only.nbytes) == (start, nbytes):
        return replace(only, crc32c=crc32c)

    return replace(read, offset=start, nbytes=nbytes, crc32c=crc32c, parts=tuple(parts), running=None)


def _range(read: CheckedRead, running: RunningChecksums, first: int, last: int) -> tuple[int, int, int]:
    """Return where some blocks begin in the file, how many bytes they are, and their checksum."""
    start = first * running.block_bytes
    nbytes = min(last * running.block_bytes, read.nbytes) - start
    before = int(running.crc32cs[first - 1]) if first else 0
    up_to = int(running.crc32cs[last - 1]) if last <= len(running.crc32cs) else read.crc32c
    combine = read.combine
    assert combine is not None, "who knows checksums of blocks can combine them"
    # Of two ranges: the checksum of the first, moved by the length of the second, xor that of the second.
    return read.offset + start, nbytes, up_to ^ combine([(before, start), (0, nbytes)])


def _segments(reads: Sequence[CheckedRead], combine: Combine) -> Iterator[CheckedRead]:
    """Give each read of a range the bytes up to the end of its part; the last one gets all that follow.

    The range is cut down to the blocks between the first and the last byte that is kept.
    """
    start, nbytes, crc32c = reads[0].offset, reads[0].nbytes, reads[0].crc32c
    if reads[0].running is not None:
        blocks = _blocks(reads[0], reads[0].running, [part for read in reads for part in read.parts])
        start, nbytes, crc32c = _range(reads[0], reads[0].running, *blocks)

    end = start + nbytes
    edges = [start]
    for read in reads:
        edges.append(max(edges[-1], *[part.offset + part.nbytes for part in read.parts]))

    edges[-1] = end
    sizes = [stop - at for at, stop in itertools.pairwise(edges)]
    whole = SharedRange(start, sizes, crc32c, combine)
    for number, (read, at, nbytes) in enumerate(zip(reads, edges[:-1], sizes, strict=True)):
        yield replace(read, offset=at, nbytes=nbytes, segment=Segment(whole, number))
