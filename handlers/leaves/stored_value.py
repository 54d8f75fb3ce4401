"""Leaves of another checkpoint, saved again without being restored first.

A conversion saves a tree of these. It uses no device, and holds no more than one piece of an array in
host memory at a time.
"""

from __future__ import annotations

__all__ = (
    "SourceFiles",
    "StoredValue",
    "StoredValueHandler",
    "chunks_there",
    "different",
    "different_array",
    "read_array",
    "stored_dtype",
    "targets_by_kind",
    "type_name",
    "type_of",
)

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from threading import Lock
from typing import Any, Final, TypeAlias, final

import anyio.from_thread
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from penstock.handlers.dtypes import dtype_name, numpy_dtype
from penstock.handlers.leaves.blocks import HostRegion, boxes
from penstock.handlers.leaves.spill import Spill
from penstock.kernel.concurrency.threads import end_if_cancelled
from penstock.kernel.errors import (
    ChecksumError,
    InvalidLeafError,
    NotOnThisDiskError,
    TreeDifference,
    TruncatedDataError,
    UnsupportedFormatError,
)
from penstock.kernel.memory.buffers import UsedMemory
from penstock.kernel.memory.memory_limit import check_available
from penstock.kernel.protocols.layouts import CutLeaves, StoredCheckpoint
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo, Replicas, StoredLeaf, StoredRows
from penstock.kernel.protocols.leaf_handlers import Leaf, ReadLeaves
from penstock.kernel.protocols.reads import (
    CheckedRead,
    DirectRead,
    DriverRead,
    InRuns,
    OpaqueChunk,
    Read,
    Runs,
    ScatterRead,
    Segment,
    SharedRead,
    Target,
    TileRead,
    share_checks,
)
from penstock.kernel.protocols.stores import ReadableFile, ReadsRuns, Store
from penstock.kernel.protocols.written import PiecePlan

# Planning costs by the chunk: an array of very many tiny chunks is stored anew as one.
_MANY_CHUNKS: Final = 1024
_SMALL_CHUNK: Final = 4096
_GATHER_BYTES: Final = 8 * 2**20
_TILES: Final = 8  #: of what is gathered at once; one fits the cache of a processor, if that is not very much
_SPILLED_FROM: Final = 32  #: times what is gathered at once; smaller leaves are read in runs
_WINDOW: Final = 16384
"""Pieces planned together. What two windows need of one checksummed range is read by both."""

_Bounds: TypeAlias = tuple[tuple[int, int], ...]
_Range: TypeAlias = tuple[str, int, int]  # file, offset, bytes
_Shared: TypeAlias = tuple[int, int, Segment] | None  # offset, bytes; None for a range that is not shared
_Segments: TypeAlias = Sequence[_Shared]


@final
class SourceFiles:
    """The files of a checkpoint that is being read; only the last few used are kept open.

    A checkpoint may have more files than a process may open, and opening a file costs more than reading
    a small leaf. Thread-safe; reads of several threads run at the same time.

    Args:
        store: The store that holds the files.
        most: How many files may be open at once.
        gather_bytes: How much of a leaf whose elements change their order is made at a time. Memory of eight
            times as much, with what is in use, is kept to be used again.
        spill_directory: Where temporary files of such leaves are; None for the system's.
    """

    __slots__ = ("_lock", "_most", "_open", "_store", "gather_bytes", "memory", "spill_directory")

    def __init__(
        self,
        store: Store,
        most: int = 32,
        gather_bytes: int = _GATHER_BYTES,
        spill_directory: str | None = None,
    ) -> None:
        self.memory = UsedMemory(8 * gather_bytes)  #: for what is read
        self.gather_bytes = gather_bytes
        self.spill_directory = spill_directory
        self._store = store
        self._most = most
        self._lock = Lock()
        self._open: dict[str, _OpenFile] = {}  # the most recently used one is last

    def read_at(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from the file at `path`. Raises the same errors as `ReadableFile.read_at`."""
        with self._reading(path) as file:
            file.read_at(offset, [buffer])

    @contextmanager
    def _reading(self, path: str) -> Generator[ReadableFile]:
        """Yield an open file, which stays open meanwhile."""
        with self._lock:
            opened = self._open.pop(path, None) or _OpenFile(self._store.open_data_file(path))
            self._open[path] = opened
            opened.n_readers += 1
            n_more = len(self._open) - self._most
            if n_more > 0:
                idle = [known for known, each in self._open.items() if not each.n_readers]
                for known in idle[:n_more]:
                    self._open.pop(known).file.close()

        try:
            yield opened.file
        finally:
            with self._lock:
                opened.n_readers -= 1

    def read_runs(self, path: str, offset: int, runs: Runs, buffer: memoryview) -> bool:
        """Read ranges of a file into the buffer, if that is faster than to read all that they span.

        Returns:
            Whether they were read.
        """
        with self._reading(path) as file:
            if not isinstance(file, ReadsRuns):
                return False

            file.read_runs((offset + at for at in runs.offsets()), runs.nbytes, buffer)
            return True

    def close(self) -> None:
        """Close all open files. Idempotent; called when nobody reads any more."""
        self.memory.clear()
        with self._lock:
            while self._open:
                self._open.popitem()[1].file.close()


@dataclass(slots=True)
class _OpenFile:
    file: ReadableFile
    n_readers: int = 0  #: threads that read now: it is not closed meanwhile


ChosenChunks: TypeAlias = Callable[["StoredValue", LeafSpec], Sequence[int]]
"""Returns the numbers of chunks of a leaf, in C order."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class StoredValue:
    """A leaf with array bytes, and the checkpoint and files that hold it."""

    files: SourceFiles
    checkpoint: StoredCheckpoint
    stored: StoredLeaf
    dtype: str | None = None  #: that it is saved with; None for its own
    chosen: ChosenChunks | None = None  #: those that are saved, the others being somewhere else; None for all

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype of its elements as they are read."""
        return stored_dtype(self.stored)


@final
@dataclass(frozen=True, slots=True)
class StoredValueHandler:
    """Saves a leaf of one checkpoint into another one. Cannot restore.

    The leaf's recorded kind, sharding and PRNG implementation are recorded again. Its chunk shape is kept
    if it divides the array evenly. Bytes with a recorded checksum are verified. Values are cast as in C.

    Of several processes that save together each can read all, so they divide the work as that of a
    replicated array: a large leaf by chunks, of which there are as many as there are processes at least; of
    small ones each process has some.

    Attributes:
        rank: Of this process among those that save together, from 0.
        count: How many these are.
    """

    typestr: str = "stored value"
    rank: int = 0
    count: int = 1

    follows_spec = True  #: see `ChunkingHandler`

    def describe(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], known: dict[Any, LeafSpec]
    ) -> Sequence[LeafSpec]:
        """Return the specs to store for `StoredValue`s: their own, but one whole chunk for uneven chunks.

        Chunks so small that each would take more memory to be planned than it has bytes are not kept, either.

        Raises:
            InvalidLeafError: If a leaf belongs to a third-party handler, which alone can read its files.
        """
        return [self._spec(value, infos[number]) for number, value in enumerate(values)]

    def _spec(self, value: object, info: ParamInfo) -> LeafSpec:
        assert isinstance(value, StoredValue)
        spec = value.stored.spec
        if spec.shape is None:
            raise InvalidLeafError(
                info.key_path,
                f"a {spec.typestr} is stored in files of its own handler, which cannot be converted",
            )

        whole = tuple([size or 1 for size in spec.shape])
        chunks = spec.chunk_shape
        even = _is_cut_from(chunks, whole)
        is_tiny = spec.nbytes > _MANY_CHUNKS * spec.chunk_nbytes and spec.chunk_nbytes < _SMALL_CHUNK
        if is_tiny and value.chosen is None:
            even = False

        write_shape = spec.write_shape if even else None
        if write_shape is None and spec.typestr == "jax.Array":
            write_shape = spec.shape

        spec = replace(spec, chunk_shape=chunks if even else whole, write_shape=write_shape)
        if value.dtype is not None:
            spec = replace(spec, dtype=value.dtype, itemsize=numpy_dtype(value.dtype).itemsize)

        if value.chosen is not None:
            return replace(spec, replicas=Replicas(is_global=True))

        return spec if self.count == 1 else _divided(spec, self.count)

    def nbytes_here(self, value: Any, spec: LeafSpec) -> int:
        """Return how many bytes of a leaf this process writes."""
        return len(self._own_chunks(value, spec)) * spec.chunk_nbytes

    def processes_of(self, value: Any) -> AbstractSet[int]:
        """Return no processes: none has a part that others could not read."""
        return frozenset()

    def _own_chunks(self, value: Any, spec: LeafSpec) -> Sequence[int]:
        """Return the numbers of the chunks that this process writes, in C order."""
        n, replicas = spec.n_chunks, spec.replicas
        assert isinstance(value, StoredValue)
        if value.chosen is not None:
            return value.chosen(value, spec)
        if not replicas.is_global or replicas.writer is None:
            return range(n)
        if replicas.n_writers == 1:
            return range(n if replicas.writer == self.rank else 0)

        return range(n * self.rank // self.count, n * (self.rank + 1) // self.count)

    def chunk_buffers(self, values: Sequence[Any], spec: LeafSpec) -> Sequence[Any]:
        """Read leaves that are one range of a file each; None for any other leaf."""
        if not spec.is_single_chunk:
            return [None] * len(values)

        return [self._buffer(value, spec) for value in values]

    def _buffer(self, value: object, spec: LeafSpec) -> memoryview | None:
        assert isinstance(value, StoredValue)
        if value.dtype is not None:
            return None

        bounds = tuple([(0, size) for size in spec.shape or ()])
        reads = _tiling(_reads(value, bounds, spec.nbytes), spec.nbytes)
        return _take_direct(value, reads[0]) if reads is not None and len(reads) == 1 else None

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[PiecePlan]:
        """Plan the pieces of each chunk: one per read if its bytes are ranges of files, else slabs."""
        value, spec = leaf.value, leaf.spec
        assert isinstance(value, StoredValue)
        if not spec.nbytes:
            return

        planned = _planned(value, spec, self._own_chunks(value, spec), piece_bytes)
        compared: set[_Range] = set()
        while window := list(itertools.islice(planned, _WINDOW)):
            regions = [each for each in window if isinstance(each, _Region)]
            reads = [list(_reads(value, each.bounds, each.read_bytes)) for each in regions]
            scratch = iter([max([read.scratch_nbytes for read in found], default=0) for found in reads])
            segments = iter(_segments(reads))
            first = iter([_first_time(found, compared) for found in reads])
            del reads  # they hold the memory that they fill
            for each in window:
                if isinstance(each, _Region):
                    comparison = _Comparison(next(segments), next(first))
                    take = partial(_take_region, value, each.bounds, each.read_bytes, comparison)
                    cost = _cost(value, each) + next(scratch)
                    yield PiecePlan(each.chunk, each.start, each.nbytes, cost, take)
                else:
                    yield each

    def targets(self, stored: StoredRows, likes: Sequence[Any] | None) -> Sequence[Target | TreeDifference]:
        return [different("type", leaf, self.typestr) for leaf in stored]

    def build(self, leaves: ReadLeaves) -> Sequence[Any]:
        raise NotImplementedError  # there is no target to build from


@final
@dataclass(frozen=True, slots=True)
class _Region:
    """A piece of a chunk that is gathered from what is stored."""

    chunk: tuple[int, ...]
    start: int  #: in the chunk, bytes
    nbytes: int
    bounds: _Bounds
    read_bytes: int  #: what is read of it at a time, at most


_SHARED_FROM: Final = 2**20
"""A smaller leaf is written by one process."""


def _divided(spec: LeafSpec, count: int) -> LeafSpec:
    """Return the spec of a leaf that so many processes write together."""
    if spec.nbytes < _SHARED_FROM:
        return replace(spec, replicas=Replicas(count, is_global=True))

    if spec.n_chunks < count:
        chunk = _cut(spec.chunk_shape, -(-count // spec.n_chunks))
        spec = replace(spec, chunk_shape=chunk, write_shape=None if spec.write_shape is None else chunk)

    n_writers = count if spec.n_chunks >= count else 1
    return replace(spec, replicas=Replicas(count, n_writers, is_global=True))


_FINEST: Final = 16
"""Chunks for each process, at most, into which a leaf is cut so that all have as much."""


def _cut(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Cut a chunk along the first axis that gives as many equal parts, or so many that it hardly matters."""
    for axis, size in enumerate(shape):
        for n_parts in range(count, min(size, _FINEST * count) + 1):
            most = -(-n_parts // count) * count
            if size % n_parts == 0 and most - n_parts <= n_parts // 4:
                return (*shape[:axis], size // n_parts, *shape[axis + 1 :])

    return shape


def _planned(
    value: StoredValue, spec: LeafSpec, chunks: Sequence[int], piece_bytes: int
) -> Iterator[_Region | PiecePlan]:
    """Plan some chunks: one piece for each read if the bytes are ranges of files, else regions."""
    spill = _spilling(value, spec, chunks)
    for chunk in map(partial(_place_of, spec), chunks):
        bounds = _bounds_of(spec, chunk)
        if spec.codec is not None:  # chunks are encoded whole
            yield _Region(chunk, 0, spec.chunk_nbytes, bounds, piece_bytes)
            continue

        size = value.stored_dtype.itemsize
        reads = _tiling(_reads(value, bounds, piece_bytes), spec.chunk_nbytes // spec.itemsize * size)
        if reads is None or (value.dtype is not None and any(read.nbytes % size for read in reads)):
            yield from _slabs(value, spec, chunk, bounds, piece_bytes, spill)
            continue

        for read in reads:
            start, nbytes = read.start, read.nbytes  # which may end within an element, unless it is cast
            if value.dtype is not None:
                start, nbytes = (n // size * spec.itemsize for n in (start, nbytes))

            cost = nbytes if value.dtype is None else nbytes + read.nbytes
            yield PiecePlan(chunk, start, nbytes, cost, partial(_take_direct, value, read))


def _place_of(spec: LeafSpec, number: int) -> tuple[int, ...]:
    """Return the place of a chunk in the grid by its number in C order."""
    place: list[int] = []
    for count in reversed(spec.grid_shape):
        number, at = divmod(number, count)
        place.append(at)

    return tuple(reversed(place))


def _is_cut_from(shape: tuple[int, ...], stored: tuple[int, ...]) -> bool:
    """True if chunks of one shape are parts of single ones of another, or of an array of that shape."""
    return len(shape) == len(stored) and not any(
        outer % inner for inner, outer in zip(shape, stored, strict=True)
    )


def chunks_there(value: StoredValue, spec: LeafSpec) -> Sequence[int]:
    """Return the chunks of a leaf that can be read; the others are on disks of other processes."""
    numbers = range(spec.n_chunks)
    if not _is_cut_from(spec.chunk_shape, value.stored.spec.chunk_shape):
        return numbers  # one might be there in part: to read it says what is missing

    return [number for number in numbers if _is_there(value, _bounds_of(spec, _place_of(spec, number)))]


def _is_there(value: StoredValue, bounds: _Bounds) -> bool:
    try:
        next(_reads(value, bounds, 1), None)
    except NotOnThisDiskError:
        return False

    return True


def _bounds_of(spec: LeafSpec, chunk: tuple[int, ...]) -> _Bounds:
    return tuple([(at * n, at * n + n) for at, n in zip(chunk, spec.chunk_shape, strict=True)])


@final
@dataclass(frozen=True, slots=True)
class _Comparison:
    """The comparisons of a region, in ranges that other regions of its leaf need, too."""

    segments: _Segments  #: for each checked read, in order, its own part of the range; None for all of it
    first: frozenset[_Range]  #: of what its tiles are made of: the ranges that no region before it compares


_NOTHING: Final = _Comparison((), frozenset())


def _first_time(reads: Sequence[Read], compared: set[_Range]) -> frozenset[_Range]:
    """Return the ranges of tiles that were not compared before, and note them.

    A tile of a transposed leaf needs a little of each range, and so does every other. All of it is read and
    compared with the first; the others read what they need. The copy is published when all were read.
    """
    checked = [part for read in reads if isinstance(read, TileRead) for part in read.reads]
    ranges = {_range_of(part) for part in checked if isinstance(part, CheckedRead)}
    found = frozenset(ranges - compared)
    compared |= found
    return found


def _range_of(read: CheckedRead) -> _Range:
    return read.file, read.offset, read.nbytes


def _segments(reads: Sequence[Sequence[Read]]) -> list[_Segments]:
    """Return what each region reads of the ranges that it shares: with other regions, or with itself.

    Only segments are kept: reads hold the memory that they fill. A region may need a range more than once,
    so reads are told apart by their order. The copy is published when all were compared.

    Args:
        reads: Of each region.
    """
    checked = [[read for read in found if isinstance(read, CheckedRead)] for found in reads]
    return [
        [
            (read.offset, read.nbytes, read.segment)
            if isinstance(read, CheckedRead) and read.segment is not None
            else None
            for read in shared
        ]
        for shared in share_checks(checked)
    ]


def _reads(value: StoredValue, bounds: _Bounds, piece_bytes: int) -> Iterator[Read]:
    region = HostRegion(bounds, stored_dtype(value.stored))
    return value.checkpoint.reads(0, value.stored, region, piece_bytes)


def _tiling(reads: Iterable[Read], nbytes: int) -> list[DirectRead] | None:
    """Return the reads if they are file ranges that fill a chunk without gaps, in order; else None."""
    tiling: list[DirectRead] = []
    end = 0
    for read in reads:
        if not isinstance(read, DirectRead) or read.start != end:
            return None

        tiling.append(read)
        end += read.nbytes

    return tiling if end == nbytes else None


def _cost(value: StoredValue, region: _Region) -> int:
    """Return the host bytes that a region takes: its stored bytes, and those of the cast ones."""
    if value.dtype is None:
        return region.nbytes

    return region.nbytes + math.prod([hi - lo for lo, hi in region.bounds]) * value.stored_dtype.itemsize


def _slabs(
    value: StoredValue,
    spec: LeafSpec,
    chunk: tuple[int, ...],
    bounds: _Bounds,
    piece_bytes: int,
    spill: Callable[[], Spill | None],
) -> Iterator[_Region | PiecePlan]:
    """Cut a chunk along its first axis, at the stored chunks' edges, so that each of those is read once.

    A piece holds at least one row of stored chunks, because encoded chunks cannot be cut. It may therefore
    exceed `piece_bytes`; a piece larger than the whole budget is admitted alone.
    """
    dtype = stored_dtype(value.stored)
    stored = value.stored.spec.chunk_shape
    if not bounds:
        yield _Region(chunk, 0, spec.itemsize, bounds, piece_bytes)
        return

    if isinstance(value.checkpoint, CutLeaves) and value.checkpoint.is_cut_freely(value.stored):
        through = spill()
        if through is not None:
            gathered = max(1, value.files.gather_bytes // dtype.itemsize)
            for each in _boxed(spec, chunk, bounds, gathered, piece_bytes):
                take = partial(_take_spilled, value, through, each.bounds, piece_bytes)
                yield PiecePlan(chunk, each.start, each.nbytes, _cost(value, each) + piece_bytes, take)
            return

        most, read_bytes = piece_bytes, piece_bytes
        if _is_gathered(value, bounds, max(1, most // dtype.itemsize), piece_bytes):
            # The wider a piece is, the longer are the runs that it needs of each row, and the fewer times are
            # they come for. So five take the whole budget, while two are made and others written, and a sixth
            # may still be in memory. What is read of one at a time is moved on while it is in a processor's
            # cache.
            tile = max(1, value.files.gather_bytes // _TILES)
            most = max(most, 2 * value.files.gather_bytes - 6 * tile)
            read_bytes = min(read_bytes, tile)

        yield from _boxed(spec, chunk, bounds, max(1, most // dtype.itemsize), read_bytes)
        return

    (first, last), *rest = bounds
    row_bytes = math.prod([hi - lo for lo, hi in rest]) * dtype.itemsize
    step = max(1, piece_bytes // (stored[0] * row_bytes)) * stored[0]
    coded = stored[0] * row_bytes  # what is decoded at once, if it is
    saved_bytes = row_bytes // dtype.itemsize * spec.itemsize  # of a row
    check_available(value.checkpoint.path, max(step * row_bytes, coded), value.stored.info.key_path)
    for at in range(first, last, step):
        rows = (at, min(at + step, last))
        nbytes = (rows[1] - at) * saved_bytes
        yield _Region(chunk, (at - first) * saved_bytes, nbytes, (rows, *rest), piece_bytes)


def _boxed(
    spec: LeafSpec, chunk: tuple[int, ...], bounds: _Bounds, most: int, read_bytes: int
) -> Iterator[_Region]:
    """Cut a chunk into boxes of at most so many elements, in its order."""
    for box in boxes(tuple([hi - lo for lo, hi in bounds]), most):
        place = zip(bounds, box.starts, box.sizes, strict=True)
        part = tuple([(lo + at, lo + at + size) for (lo, _), at, size in place])
        start, nbytes = box.first * spec.itemsize, box.n_elements * spec.itemsize
        yield _Region(chunk, start, nbytes, part, read_bytes)


def _is_gathered(value: StoredValue, bounds: _Bounds, most: int, piece_bytes: int) -> bool:
    """Say whether pieces of a leaf are made of runs far from each other."""
    first = next(_boxed(value.stored.spec, (), bounds, most, piece_bytes))
    reads = list(_reads(value, first.bounds, piece_bytes))
    needed = math.prod([hi - lo for lo, hi in first.bounds]) * value.stored_dtype.itemsize
    tiles = [read for read in reads if isinstance(read, TileRead)]
    parts = [part for tile in tiles for part in tile.reads]
    if any(isinstance(part, DriverRead) or getattr(part, "decoded_nbytes", 0) for part in parts):
        return False  # chunks are decoded whole, and would be for each tile

    return bool(tiles) and sum([read.nbytes for read in reads]) > 2 * needed


def _spilling(value: StoredValue, spec: LeafSpec, chunks: Sequence[int]) -> Callable[[], Spill | None]:
    """Return what makes the temporary file that some chunks go through; one for all of them, or None."""

    @cache
    def spill() -> Spill | None:
        assert isinstance(value.checkpoint, CutLeaves), "others are not spilled"
        size = value.stored_dtype.itemsize
        gathered = max(1, value.files.gather_bytes // size)
        block = value.checkpoint.block_shape(value.stored, max(1, gathered // 2), _SPILLED_FROM * gathered)
        if block is None:
            return None

        corners = [list(zip(*_bounds_of(spec, _place_of(spec, number)), strict=True)) for number in chunks]
        starts = [min(axis) for axis in zip(*[lows for lows, _ in corners], strict=True)]
        stops = [max(axis) for axis in zip(*[highs for _, highs in corners], strict=True)]
        whole = tuple(zip(starts, stops, strict=True))
        block = tuple([min(n, hi - lo) for n, (lo, hi) in zip(block, whole, strict=True)])
        plain, compared, lock = replace(value, dtype=None), set[_Range](), Lock()

        def read(within: _Bounds) -> memoryview:
            reads = list(_reads(plain, within, value.files.gather_bytes))
            with lock:
                first = _first_time(reads, compared)

            del reads  # they hold the memory that they fill
            return _take_region(plain, within, value.files.gather_bytes, _Comparison((), first))

        return Spill(whole, size, block, value.files.spill_directory, read)

    return spill


def _take_spilled(value: StoredValue, spill: Spill, bounds: _Bounds, piece_bytes: int) -> memoryview:
    region = _region(value, bounds)
    spill.fill(region, piece_bytes)
    return _cast(region.view(), value)


def _take_direct(value: StoredValue, read: DirectRead) -> memoryview:
    buffer = value.files.memory.take(read.nbytes)
    _fill(value, read, buffer)
    return _cast(buffer, value)


def _region(value: StoredValue, bounds: _Bounds) -> HostRegion:
    region = HostRegion(bounds, value.stored_dtype)
    if region.nbytes:
        region.adopt(value.files.memory.take(region.nbytes))

    return region


def _take_region(
    value: StoredValue, bounds: _Bounds, piece_bytes: int, comparison: _Comparison = _NOTHING
) -> memoryview:
    region = _region(value, bounds)
    _take(value, value.checkpoint.reads(0, value.stored, region, piece_bytes), comparison)
    return _cast(region.view(), value)


def _take(value: StoredValue, reads: Iterable[Read], comparison: _Comparison) -> None:
    left, segments = set(comparison.first), iter(comparison.segments)
    for read in reads:
        assert not isinstance(read, SharedRead), "a leaf that is read alone shares no read"
        match read:
            case TileRead():
                end_if_cancelled()  # of a piece there may be very many
                for box in read.boxes:
                    box.adopt(value.files.memory.take(box.nbytes))

                for one in read.reads:
                    if isinstance(one, CheckedRead) and _range_of(one) not in left:
                        _take(value, one.parts, _NOTHING)
                        continue
                    if isinstance(one, CheckedRead):
                        left.remove(_range_of(one))

                    _take(value, (one,), _NOTHING)

                read.make()
            case DirectRead():
                _fill(value, read, read.into())
            case ScatterRead(opaque=OpaqueChunk() as opaque):
                problem = f"holds chunks that a stage made opaque: {opaque.codec!r}"
                raise UnsupportedFormatError(read.file, problem, key_path=opaque.key_path)
            case ScatterRead():
                if read.crc32c is None and _take_runs(value, read):
                    continue

                buffer = value.files.memory.take(read.nbytes)
                _fill(value, read, buffer)
                read.scatter(buffer)
            case CheckedRead():
                _fill_checked(value, _of_segment(read, next(segments, None)))
            case DriverRead():
                anyio.from_thread.run(_perform, read)


_FAR: Final = 8192
"""Bytes between the beginnings of two runs. To copy what is between them costs more than a view of each."""
_LONG: Final = 512
"""Bytes of a run. To read such into their place costs less than to copy them once more."""


def _take_runs(value: StoredValue, read: ScatterRead) -> bool:
    """Read what is kept of a range alone, if it is little or goes straight into its place; say if it was."""
    if read.nbytes < 2 * _FAR or not isinstance(read.scatter, InRuns):
        return False

    runs = read.scatter.runs()
    kept = runs.count * runs.nbytes
    is_little = 2 * kept <= read.nbytes and runs.count * _FAR <= read.nbytes
    if not is_little and (runs.into is None or runs.nbytes < _LONG):
        return False

    buffer = value.files.memory.take(kept) if runs.into is None else runs.into()
    if not value.files.read_runs(read.file, read.offset, runs, buffer):
        return False
    if runs.into is None:
        runs.scatter(buffer)

    return True


def read_array(value: StoredValue) -> npt.NDArray[Any]:
    """Return a leaf as an array of NumPy: its elements as they are stored, of a random key its words.

    Blocking. Bytes with a recorded checksum are verified.

    Raises:
        ChecksumError: If they differ.
        UnsupportedFormatError: If a stage made the chunks opaque, or the dtype is not known.
        StorageError: If the medium refuses.
    """
    spec = value.stored.spec
    shape = spec.shape or ()
    bounds = tuple([(0, size) for size in shape])
    data = _take_region(value, bounds, max(spec.nbytes, 1))
    return np.frombuffer(data, value.stored_dtype).reshape(shape)


def _cast(read: memoryview, value: StoredValue) -> memoryview:
    if value.dtype is None:
        return read

    with np.errstate(all="ignore"):
        cast = np.frombuffer(read, value.stored_dtype).astype(numpy_dtype(value.dtype))

    return cast.view(np.uint8).data


async def _perform(read: DriverRead) -> None:
    await read.perform()


def _of_segment(read: CheckedRead, shared: _Shared) -> CheckedRead:
    """Return the read of its own segment, if others need the range, too."""
    if shared is None:
        return read

    offset, nbytes, segment = shared
    return replace(read, offset=offset, nbytes=nbytes, segment=segment)


def _fill_checked(value: StoredValue, read: CheckedRead) -> None:
    """Perform a read that verifies more bytes than it keeps."""

    def read_at(offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            _read_at(value, read.file, offset, buffer)
            offset += len(buffer)

    if read.differs(read.fill(read_at, crc32c)):
        raise _differs(value, read)


def _fill(value: StoredValue, read: DirectRead | ScatterRead, buffer: memoryview) -> None:
    """Perform one read, and verify its checksum if one is recorded."""
    if not read.nbytes:
        return

    _read_at(value, read.file, read.offset, buffer)
    if read.crc32c is not None and crc32c(buffer) != read.crc32c:
        raise _differs(value, read)


def _read_at(value: StoredValue, path: str, offset: int, buffer: memoryview) -> None:
    try:
        value.files.read_at(path, offset, buffer)
    except TruncatedDataError as error:
        key_path = value.stored.info.key_path
        raise TruncatedDataError(error.path, error.needed, error.found, key_path=key_path) from error


def _differs(value: StoredValue, read: DirectRead | ScatterRead | CheckedRead) -> ChecksumError:
    start, end = read.covered if isinstance(read, CheckedRead) else (read.offset, read.offset + read.nbytes)
    problem = f"bytes {start} to {end} differ from those written"
    return ChecksumError(read.file, problem, key_path=value.stored.info.key_path)


def _on_disk(spec: LeafSpec) -> str:
    """Describe the stored leaf, as in `jax.Array float32[8,12]`, `scalar int64[]` or `string`."""
    if spec.shape is None:
        return spec.typestr
    if spec.extended_dtype is not None:
        return f"{spec.typestr} key<{spec.extended_dtype}>{_text(spec.shape[:-1])}"

    return f"{spec.typestr} {spec.dtype}{_text(spec.shape)}"


def different(kind: str, stored: StoredLeaf, in_like: str, found: str = "") -> TreeDifference:
    """Make a `TreeDifference` of `kind`; `found` defaults to a description of the stored leaf."""
    return TreeDifference(kind, stored.info.key_path, in_like, found or _on_disk(stored.spec))


def different_array(stored: StoredLeaf, like: Any, name_of: Callable[[Any], str]) -> TreeDifference | None:
    """Compare a stored leaf with the target array, dtype first. Nothing is ever cast.

    Args:
        stored: The leaf on disk, of any kind.
        like: The target array, or a struct.
        name_of: Names the target's type, for the message.

    Returns:
        The first difference, or None if there is none.
    """
    spec, shape, dtype = stored.spec, like.shape, dtype_name(like.dtype)
    if spec.shape is None:
        return different("type", stored, f"{name_of(like)} {dtype}{_text(shape)}")
    if spec.dtype != dtype:
        return different("dtype", stored, f"{dtype}{_text(shape)}")
    if spec.shape != tuple(shape):
        return different("shape", stored, f"{dtype}{_text(shape)}")

    return None


def targets_by_kind(
    stored: StoredRows,
    likes: Sequence[Any] | None,
    kind_of: Callable[[Any], object],
    target: Callable[[StoredLeaf, Any], Target | TreeDifference],
) -> list[Target | TreeDifference]:
    """Decide once for all leaves of a kind: a tree has many leaves and few kinds of them.

    Args:
        stored: The leaves on disk.
        likes: What each is to be; None for a restore without a target.
        kind_of: What of a `like` its target depends on. It may name what lives as long by its id.
        target: Decides on one leaf, with its `like`, or with None if there are no `likes`.
    """
    known: dict[object, Target | TreeDifference] = {}
    targets: list[Target | TreeDifference] = []
    # A loop, because `map` and `zip` over all leaves would hold the interpreter to their ends.
    for at, spec in enumerate(stored.specs):
        like = None if likes is None else likes[at]
        kind = (id(spec), None if likes is None else kind_of(like))
        found = known.get(kind)
        if found is None:
            found = known[kind] = target(stored[at], like)

        targets.append(found)

    return targets


def stored_dtype(stored: StoredLeaf) -> np.dtype[Any]:
    """The numpy dtype of a stored array.

    Raises:
        UnsupportedFormatError: If this version does not know the dtype.
    """
    try:
        return numpy_dtype(stored.spec.dtype)
    except ValueError as error:
        raise UnsupportedFormatError(
            stored.info.directory or stored.info.name, str(error), key_path=stored.info.key_path
        ) from error


def type_of(value: object) -> type:
    """The restore target itself if it is a type, else its type."""
    return value if isinstance(value, type) else type(value)


def type_name(value: object) -> str:
    """The readable name of a type, or of a value's type: `int`, `numpy.float32`."""
    type_ = type_of(value)
    module = type_.__module__
    return type_.__qualname__ if module == "builtins" else f"{module}.{type_.__qualname__}"


def _text(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
