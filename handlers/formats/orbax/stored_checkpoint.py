"""An opened Orbax checkpoint: its leaves, and the reads that fetch any part of them.

`OrbaxCheckpoint` is the `StoredCheckpoint` of this format. Below it, in the order in which it asks: the
parts of a leaf as they were written, codec, metadata and bytes of a leaf on the medium, and the whole chunks
of many small leaves at once.
"""

from __future__ import annotations

__all__ = (
    "ChunkBox",
    "OrbaxCheckpoint",
    "StoredArray",
    "chunk_boxes",
    "codec_of",
    "whole_parts",
)

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.formats.integrity import Checksum, Checksums, bytes_on_medium
from penstock.handlers.formats.leaf_table import StoredArray, StoredLeaves
from penstock.handlers.formats.orbax.discovery import disk_mark
from penstock.handlers.formats.orbax.embedded_arrays import PackedArray, packed_reads
from penstock.handlers.formats.orbax.file_names import MANIFEST
from penstock.handlers.formats.region_reads import (
    NONE,
    Bounds,
    StoredChunk,
    append_zeros_to_each,
    chunk_reads,
    chunks_in,
    covers_others,
    cut_at_pieces,
    intersect,
    merge_direct,
    recorded_crc32c,
    shape_of,
    with_checksums,
)
from penstock.handlers.formats.zarr import (
    ArrayFormat,
    codec_to_decode,
    grid_indices,
    opaque_codec,
    prefix_of,
)
from penstock.handlers.ocdbt.index import Index
from penstock.handlers.ocdbt.wire_format import Indirect, Inline, Value
from penstock.kernel.codecs import Codec
from penstock.kernel.errors import (
    CorruptCheckpointError,
    NotOnThisDiskError,
)
from penstock.kernel.memory.buffers import scratch_memory
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.reads import (
    Destination,
    DirectRead,
    DriverRead,
    OpaqueChunk,
    Read,
    ScatterRead,
    WholeChunks,
)
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import DiskMark, Written
from penstock.kernel.rectangles import rectangles

if TYPE_CHECKING:
    from penstock.handlers.formats.orbax.tensorstore_reads import ArrayDriver


MOST_CHUNKS: Final = 1024
"""Chunks that a driver reads at once: it takes a kilobyte or more for each, however small they are."""


@final
@dataclass(frozen=True, eq=False)
class OrbaxCheckpoint:
    """An Orbax checkpoint, opened. Immutable; may be used from several threads."""

    store: Store  #: where it is
    path: str  #: of the checkpoint: as it was asked for, or the latest step there
    directory: str  #: what holds the tree: `path`, or an item in it
    leaves: StoredLeaves
    custom_metadata: Mapping[str, Any] | None
    committed_at_ns: int | None
    uses_ocdbt: bool
    all_chunks_written: bool  #: a missing chunk is an error, and not an array full of zeros
    checksums: Mapping[str, Checksums]  #: by data file; empty if Orbax wrote it
    index: Index  #: where every chunk is
    digests: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  #: of leaves, by stored name
    tree_custom_metadata: object = None  #: the caller's metadata stored with the tree: any JSON
    root_custom_metadata: Mapping[str, Any] | None = None  #: of the directory of steps it was found in
    started_at_ns: int | None = None  #: when its save began
    uses_zarr3: bool = False  #: as it is recorded of the tree

    @property
    def has_checksums(self) -> bool:
        """True if penstock wrote it, and so recorded checksums."""
        return bool(self.checksums)

    def without_checksums(self) -> OrbaxCheckpoint:
        """Return the checkpoint as if it had no checksums; see `ChecksummedCheckpoint`."""
        return replace(self, checksums={})

    def expected_crc32c(self, file: str) -> Sequence[Checksum]:
        """Return the recorded checksums of a data file, by ascending offset; empty if there are none.

        Args:
            file: Relative to `directory`.
        """
        return tuple(self.checksums.get(file, ()))

    def codec(self, number: int) -> str | None:
        """Describe the codecs of a leaf's chunks; see `StorageDetails`."""
        array = _array(self.leaves, number)
        return codec_of(array.format) if isinstance(array, StoredArray) else None

    def stored_nbytes(self, number: int) -> int:
        """Count the stored bytes of a leaf's chunks; see `StorageDetails`."""
        array = _array(self.leaves, number)
        if isinstance(array, PackedArray):
            return array.nbytes
        if array is None:
            return 0

        grid, rows = array.format.grid_shape, self.index.table.rows
        if math.prod(grid) > len(self.index):  # a grid may be as large as its document says
            found = [row for _, row in stored_rows(self.index, array, tuple([(0, n) for n in grid]))]
        else:
            keys = [array.prefix + array.format.chunk_key(at) for at in itertools.product(*map(range, grid))]
            found = [rows[key] for key in map(str.encode, keys) if key in rows]

        return sum([max(0, nbytes) for nbytes in self.index.lengths[found].tolist()])

    def zarr_metadata(self, number: int) -> Mapping[str, Any] | None:
        """Return the document of a leaf's array; see `ZarrDetails`."""
        array = _array(self.leaves, number)
        return array.format.metadata if isinstance(array, StoredArray) else None

    def stored_bytes(self, store: Store) -> int:
        """Count the bytes of all files with array bytes; see `StoredSize`."""
        files = [os.path.join(self.directory, file) for file in self.index.files]
        packed = {each.file for each in self.leaves.table.details.values() if isinstance(each, PackedArray)}
        return self.index.inline_nbytes + bytes_on_medium(store, [*files, *sorted(packed)])

    def parts(self, numbers: Sequence[int], leaves: Sequence[int]) -> Sequence[Sequence[Written]]:
        """Say where the bytes of some leaves are; see `StoredCheckpoint.parts`."""
        together = whole_parts(self.leaves, self.index, self.checksums, numbers, leaves)
        return [
            self._parts(number, leaf) if found is None else found
            for number, leaf, found in zip(numbers, leaves, together, strict=True)
        ]

    def _parts(self, number: int, leaf: int) -> Sequence[Written]:
        stored = self.leaves[number]
        array = stored.detail
        if not isinstance(array, StoredArray) or not array.format.plain:
            return ()

        return parts_of(self._grid(stored, array), self.checksums, leaf)

    def _grid(self, stored: StoredLeaf, array: StoredArray) -> Iterator[tuple[tuple[int, ...], Value | None]]:
        grid = tuple([(0, n) for n in array.format.grid_shape])
        for found in self._chunks(stored, array, grid, stored.spec.chunk_nbytes, only_here=True):
            yield found.start, found.value

    def reads(self, index: int, stored: StoredLeaf, region: Destination, piece_bytes: int) -> Iterator[Read]:
        """Plan the reads that fill `region`; see `StoredCheckpoint.reads`.

        A chunk that is in the index itself is a `ScatterRead` of 0 bytes of the manifest.
        """
        array = stored.detail
        if not region.nbytes:
            return iter(())
        if isinstance(array, PackedArray):
            return packed_reads(index, array, region, piece_bytes)
        if not isinstance(array, StoredArray):
            return iter(())
        codec = None if array.format.plain else opaque_codec(array.format)
        if codec is not None:
            opaque = self._opaque_reads(index, stored, array, region, codec)
            return with_checksums(opaque, self.checksums, piece_bytes, self.directory)
        if not array.format.plain:
            return self._coded_reads(index, stored, array, region, piece_bytes)

        reads = merge_direct(self._plain_reads(index, stored, array, region, piece_bytes))
        return with_checksums(reads, self.checksums, piece_bytes, self.directory)

    def whole_chunks(self, numbers: Sequence[int]) -> WholeChunks:
        """Look up chunks and the checksums of their bytes; see `PackedCheckpoint.whole_chunks`.

        A leaf is left out (the caller handles it separately) unless all of its chunks have the right length
        and follow each other in one data file, in C order of its grid; and also if a chunk was written in
        several pieces, each with its own checksum.
        """
        chosen = np.asarray(numbers, np.int64)
        rows, counts = self.leaves.table.chunk_rows.of(chosen)
        stored = np.flatnonzero(counts)  # others have nothing in the columns of chunks
        ids, offsets, crc32cs = (np.full(len(chosen), default, np.int64) for default in (-1, 0, -1))
        files = [os.path.join(self.directory, file) for file in self.index.files]
        if len(stored):
            counts = counts[stored]
            of_leaves = np.cumsum(counts) - counts  # the first chunk of each
            sizes = np.repeat(_chunk_nbytes(self.leaves, chosen[stored]), counts)
            found, firsts = _follow_each_other(self.index, rows, sizes, counts), rows[of_leaves]
            there = np.where(found, self.index.ids[firsts], -1)
            sums = np.full(len(stored), -1, np.int64)
            for number, file in enumerate(self.index.files):
                if file in self.checksums:
                    mine, chunks = (
                        np.flatnonzero(there == number),
                        np.flatnonzero(np.repeat(there == number, counts)),
                    )
                    known = self.checksums[file].exactly(self.index.offsets[rows[chunks]], sizes[chunks])
                    is_one_each = len(mine) == len(chunks)
                    sums[mine] = known if is_one_each else _joined(known, sizes[chunks], counts[mine])
                    there[mine[sums[mine] < 0]] = -1

            ids[stored], offsets[stored], crc32cs[stored] = there, self.index.offsets[firsts], sums

        return WholeChunks(files, ids.tolist(), offsets.tolist(), crc32cs.tolist())

    def _plain_reads(
        self, leaf: int, stored: StoredLeaf, array: StoredArray, region: Destination, piece_bytes: int
    ) -> Iterator[Read]:
        bounds, shape, itemsize = region.bounds, array.format.chunk_shape, stored.spec.itemsize
        nbytes = stored.spec.chunk_nbytes
        for found in self._chunks(stored, array, chunks_in(bounds, shape), nbytes):
            value = found.value
            start = tuple(map(int.__mul__, found.start, shape))
            if value is None:
                yield from self._absent_reads(leaf, stored, array, region, found, piece_bytes)
            elif isinstance(value, Inline):
                yield from self._inline_reads(leaf, value, StoredChunk("", 0, start, shape, itemsize), region)
            else:
                file = os.path.join(self.directory, value.file)
                recorded = self.checksums.get(value.file, NONE)
                if covers_others(recorded, value.offset, nbytes):
                    problem = f"has a checksum of the chunk at byte {value.offset} together with other bytes"
                    raise CorruptCheckpointError(file, problem, key_path=stored.info.key_path)
                whole = tuple([(at, at + n) for at, n in zip(start, shape, strict=True)])
                if nbytes == region.nbytes and bounds == whole:
                    yield DirectRead(leaf, file, value.offset, nbytes, region, 0)
                    continue

                chunk = StoredChunk(file, value.offset, start, shape, itemsize)
                for piece in cut_at_pieces(chunk, bounds, recorded):
                    yield from chunk_reads(leaf, piece, region, piece_bytes)

    def _inline_reads(
        self, leaf: int, value: Inline, chunk: StoredChunk, region: Destination
    ) -> Iterator[ScatterRead]:
        file = os.path.join(self.directory, MANIFEST)
        for read in chunk_reads(leaf, chunk, region, len(value.value)):
            data = memoryview(value.value)[read.offset : read.offset + read.nbytes]
            yield ScatterRead(leaf, file, 0, 0, partial(_fill, read, data))

    def _coded_reads(
        self, leaf: int, stored: StoredLeaf, array: StoredArray, region: Destination, piece_bytes: int
    ) -> Iterator[Read]:
        """Read stored chunks and decode what was compared; a driver reads those without a checksum."""
        chunk_shape = array.format.chunk_shape
        grid = chunks_in(region.bounds, chunk_shape)
        codec = self._codec_to_decode(stored, array)
        boxes = [
            (found, self._decoded(leaf, stored, array, region, found, codec))
            for found in self._chunks(stored, array, grid, None)
        ]
        if any(read is not None or found.value is None for found, read in boxes):
            for found, read in boxes:
                if found.value is None:
                    yield from self._absent_reads(leaf, stored, array, region, found, piece_bytes)
                else:
                    yield read or self._driver_read(leaf, stored, array, region, found.chunks)

            return

        most = min(max(1, piece_bytes // stored.spec.chunk_nbytes), MOST_CHUNKS)
        for chunks in _parts(grid, most):
            yield self._driver_read(leaf, stored, array, region, chunks)

    def _absent_reads(
        self,
        leaf: int,
        stored: StoredLeaf,
        array: StoredArray,
        region: Destination,
        box: ChunkBox,
        piece_bytes: int,
    ) -> Iterator[Read]:
        """Fill chunks that were never written: each read fills any number of them from one element."""
        for chunks in _parts(box.chunks, max(1, piece_bytes // stored.spec.chunk_nbytes)):
            yield self._driver_read(leaf, stored, array, region, chunks, absent=True)

    def _codec_to_decode(self, stored: StoredLeaf, array: StoredArray) -> Codec | None:
        try:
            return codec_to_decode(array.format)
        except (ValueError, KeyError, TypeError) as error:
            problem = f"the options of the codec of {stored.info.name!r} are wrong: {error}"
            raise CorruptCheckpointError(self.directory, problem, key_path=stored.info.key_path) from error

    def _decoded(
        self,
        leaf: int,
        stored: StoredLeaf,
        array: StoredArray,
        region: Destination,
        found: ChunkBox,
        codec: Codec | None,
    ) -> ScatterRead | None:
        """Read a chunk with a codec and decode it; None if TensorStore reads it, without a checksum."""
        form, value, index = array.format, found.value, found.start
        if not isinstance(value, Indirect):
            return None

        file = os.path.join(self.directory, value.file)
        crc32c = recorded_crc32c(self.checksums.get(value.file, NONE), value.offset, value.length)
        if crc32c is None and codec is None:
            return None

        start = tuple(map(int.__mul__, index, form.chunk_shape))
        chunk = StoredChunk(file, value.offset, start, form.chunk_shape, stored.spec.itemsize)
        held = stored.spec.chunk_nbytes
        if codec is None:
            decode = partial(self._decode, form, chunk, region, stored.info.key_path)
            held += value.length  # TensorStore has a copy of the stored bytes, too
        else:
            decode = partial(_decode_by, codec, leaf, chunk, region, stored.info.key_path)
        return ScatterRead(leaf, file, value.offset, value.length, decode, crc32c, decoded_nbytes=held)

    def _opaque_reads(
        self, leaf: int, stored: StoredLeaf, array: StoredArray, region: Destination, codec: str
    ) -> Iterator[Read]:
        """Read whole opaque chunks; their content is scattered after a stage has decoded it."""
        form, info = array.format, stored.info
        for found in self._chunks(stored, array, chunks_in(region.bounds, form.chunk_shape), None):
            value, index = found.value, found.start
            if not isinstance(value, Indirect):
                problem = f"chunk {index} of an opaque leaf is in no data file"
                raise CorruptCheckpointError(self.directory, problem, key_path=info.key_path)

            start = tuple(map(int.__mul__, index, form.chunk_shape))
            chunk = StoredChunk("", 0, start, form.chunk_shape, stored.spec.itemsize)
            spread = partial(_spread, leaf, chunk, region, info.key_path)
            file = os.path.join(self.directory, value.file)
            opaque = OpaqueChunk(codec, info.name, info.key_path, index)
            yield ScatterRead(leaf, file, value.offset, value.length, spread, opaque=opaque)

    def _driver_read(
        self,
        leaf: int,
        stored: StoredLeaf,
        array: StoredArray,
        region: Destination,
        chunks: Bounds,
        *,
        absent: bool = False,
    ) -> DriverRead:
        """Read a box of chunks, given as ranges of their indices, or fill it if none was ever written."""
        form = array.format
        covered = tuple([(lo * n, hi * n) for (lo, hi), n in zip(chunks, form.chunk_shape, strict=True)])
        part = intersect(region.bounds, covered)
        nbytes = stored.spec.itemsize * math.prod(shape_of(part))
        decoded = 0 if absent else stored.spec.chunk_nbytes * math.prod(shape_of(chunks))
        read = self._driver.fill if absent else self._driver.read
        perform = partial(read, form, array.prefix, stored.info.key_path, region, part)
        return DriverRead(leaf, nbytes, perform, decoded)

    def _chunks(
        self,
        stored: StoredLeaf,
        array: StoredArray,
        grid: Bounds,
        nbytes: int | None,
        *,
        only_here: bool = False,
    ) -> Iterator[ChunkBox]:
        """Look up the chunks of a part of the grid, which must be of `nbytes` if that is given.

        With `only_here`, those that another process has on its own disk are left out.

        Raises:
            CorruptCheckpointError: If one is of another size, or missing where all were written.
            NotOnThisDiskError: If one is missing because another process has it on its own disk.
        """
        for found in chunk_boxes(self.index, array, grid):
            value, problem = found.value, ""
            if value is None and self.all_chunks_written:
                problem, mark = "is missing", self._mark
                if mark is not None and only_here:
                    continue
                if mark is not None:
                    key_path = stored.info.key_path
                    raise NotOnThisDiskError(self.directory, key_path, mark.process, mark.processes)
            elif value is not None:
                size = len(value.value) if isinstance(value, Inline) else value.length
                if size < 0:
                    problem = "is not a file"
                elif nbytes not in (None, size):
                    problem = f"has {size} bytes, not {nbytes}"
            if problem:
                key = array.prefix + array.format.chunk_key(found.start)
                problem = f"chunk {key!r} {problem}"
                raise CorruptCheckpointError(self.directory, problem, key_path=stored.info.key_path)

            yield found

    @cached_property
    def _mark(self) -> DiskMark | None:
        """The mark of the process that saved this part; None if not every process saved to its local disk."""
        return disk_mark(self.store, self.directory)

    @cached_property
    def _driver(self) -> ArrayDriver:
        # Here, because it imports tensorstore, which plain chunks never need.
        from penstock.handlers.formats.orbax.tensorstore_reads import ArrayDriver

        return ArrayDriver(self.store, self.directory, ocdbt=self.uses_ocdbt)

    @cached_property
    def _decode(self) -> Callable[[ArrayFormat, StoredChunk, Destination, str, memoryview], None]:
        # Here, for the same reason.
        from penstock.handlers.formats.orbax.tensorstore_reads import decode_into

        return decode_into


def _parts(grid: Bounds, limit: int) -> Iterator[Bounds]:
    """Cut a range of chunk indices into parts of at most `limit` chunks, along the first axes first."""
    extent = shape_of(grid)
    count = 1
    for n in extent:
        count *= n
    axis = next((axis for axis, n in enumerate(extent) if n > 1), None)
    if count <= limit or axis is None:
        yield grid
        return

    start, stop = grid[axis]
    step = max(1, limit * extent[axis] // count)
    for at in range(start, stop, step):
        yield from _parts((*grid[:axis], (at, min(at + step, stop)), *grid[axis + 1 :]), limit)


def _decode_by(
    codec: Codec, leaf: int, chunk: StoredChunk, region: Destination, key_path: str, stored: memoryview
) -> None:
    """Decode a chunk into `region`: at once where it is whole and in one piece there, or through memory.

    Raises:
        CorruptCheckpointError: If it cannot be decoded.
    """
    nbytes = math.prod(chunk.shape) * chunk.itemsize
    decoded = replace(chunk, offset=0)
    first = next(chunk_reads(leaf, decoded, region, nbytes))
    is_whole = isinstance(first, DirectRead) and first.nbytes == nbytes
    memory = first.into() if isinstance(first, DirectRead) and is_whole else scratch_memory(nbytes)
    try:
        codec.decode(stored, memory)
    except Exception as error:  # a third party's code, on bytes that may be damaged
        where = f"bytes {chunk.offset} to {chunk.offset + len(stored)}"
        problem = f"{where} cannot be decoded as {codec.text}: {error}"
        raise CorruptCheckpointError(chunk.file, problem, key_path=key_path) from error

    if not is_whole:
        _spread(leaf, decoded, region, key_path, memory)


def _spread(leaf: int, chunk: StoredChunk, region: Destination, key_path: str, data: memoryview) -> None:
    """Copy the part of a chunk that is in a region into it; `data` is the chunk."""
    nbytes = math.prod(chunk.shape) * chunk.itemsize
    if len(data) != nbytes:
        problem = f"an opaque chunk was decoded to {len(data)} bytes, not {nbytes}"
        raise CorruptCheckpointError(chunk.file, problem, key_path=key_path)

    for read in chunk_reads(leaf, chunk, region, nbytes):
        _fill(read, data[read.offset : read.offset + read.nbytes], data)


def _fill(read: DirectRead | ScatterRead, data: memoryview, _: memoryview) -> None:
    """Perform a read whose bytes are in memory."""
    if isinstance(read, DirectRead):
        read.into()[:] = data
    else:
        read.scatter(data)


def parts_of(
    chunks: Iterable[tuple[tuple[int, ...], Value | None]], checksums: Mapping[str, Checksums], leaf: int
) -> tuple[Written, ...]:
    """Find the checksummed parts that tile every chunk.

    Args:
        chunks: Each with where it is; None if it was never written.
        checksums: By data file, by ascending offset.
        leaf: What to put into `Written.leaf`.

    Returns:
        The parts, or nothing if a chunk is in another way: in the index, or without a checksum.
    """
    found: list[Written] = []
    for index, value in chunks:
        if not isinstance(value, Indirect):
            return ()

        recorded = checksums.get(value.file, NONE)
        at, stop = value.offset, value.offset + value.length
        for number in range(recorded.from_offset(at), len(recorded)):
            if at >= stop:
                break

            part = recorded[number]
            if part.offset != at:
                return ()

            start, running = at - value.offset, recorded.written_running(number)
            found.append(
                Written(leaf, index, start, value.file, at, part.nbytes, part.crc32c, running=running)
            )
            at += part.nbytes

        if at != stop:
            return ()

    return tuple(found)


# Parts of a zarr v3 codec chain that only order bytes and do not encode them.
_TRANSPARENT: Final = frozenset({"bytes", "sharding_indexed"})
_LEVELS: Final = ("cname", "level", "clevel")  # options that are part of a codec's description


def codec_of(form: ArrayFormat) -> str | None:
    """Describe the codecs of an array's chunks, in order: `zstd:3`, `blosc:lz4:5`, `shuffle+zlib:6`.

    None if there was no codec. The order of bytes and axes, and inner chunks, do not count as one.
    """
    if form.plain:
        return None

    metadata = form.metadata
    if form.version == 2:
        steps = [*_dicts(metadata.get("filters")), *_dicts([metadata.get("compressor")])]
        return "+".join([_text(step.get("id"), step) for step in steps]) or None

    return "+".join(_chain(metadata.get("codecs"))) or None


def _array(leaves: StoredLeaves, number: int) -> StoredArray | PackedArray | None:
    form = leaves.table.formats[number]
    if form is not None:
        return StoredArray(form, prefix_of(".".join(leaves.keys[number])))

    detail = leaves.table.details.get(number)
    return detail if isinstance(detail, StoredArray | PackedArray) else None


def _chain(codecs: object) -> Iterator[str]:
    for step in _dicts(codecs):
        name, options = step.get("name"), step.get("configuration")
        inner = cast("dict[str, Any]", options) if isinstance(options, dict) else {}
        if name == "sharding_indexed":
            yield from _chain(inner.get("codecs"))
        elif name not in _TRANSPARENT:
            yield _text(name, inner)


def _text(name: object, options: dict[str, Any]) -> str:
    found = [options[key] for key in _LEVELS if type(options.get(key)) in (str, int)]
    return ":".join(map(str, [name, *found]))


def _dicts(values: object) -> list[dict[str, Any]]:
    found = cast("list[object]", values) if isinstance(values, list) else []
    return [cast("dict[str, Any]", value) for value in found if isinstance(value, dict)]


_Column = npt.NDArray[np.int64]


def whole_parts(
    leaves: StoredLeaves,
    index: Index,
    recorded: Mapping[str, Checksums],
    numbers: Sequence[int],
    indices: Sequence[int],
) -> list[tuple[Written, ...] | None]:
    """Look up chunks that were each written in one part.

    Args:
        leaves: Of the checkpoint.
        index: Where their chunks are.
        recorded: Checksums by data file.
        numbers: Which of `leaves`.
        indices: What to put into `Written.leaf`, for each of them.

    Returns:
        None for a leaf that the caller handles separately: one of its chunks is in the index, is missing,
        is encoded or of a wrong length, or was written in several pieces or with checksums of blocks.
    """
    chosen = np.asarray(numbers, np.int64)
    rows, counts = leaves.table.chunk_rows.of(chosen)
    found: list[tuple[Written, ...] | None] = [None] * len(chosen)
    stored = np.flatnonzero(counts)
    if not len(stored):
        return found

    ends = np.cumsum(counts[stored])
    sizes = np.repeat(_chunk_nbytes(leaves, chosen[stored]), counts[stored])
    sums = _recorded_sums(index, recorded, rows, sizes)
    columns: list[list[int]] = [
        column.tolist() for column in (index.ids[rows], index.offsets[rows], sizes, sums)
    ]
    chunks: list[tuple[int, ...]] = list(zip(*columns, strict=True))
    known = np.flatnonzero(np.logical_and.reduceat(sums >= 0, ends - counts[stored]))
    grids: dict[int, list[tuple[int, ...]]] = {}  # by the identity of the format, which many leaves share
    there: list[tuple[int, int]] = list(zip(stored[known].tolist(), ends[known].tolist(), strict=True))
    for at, end in there:
        form = leaves.table.formats[numbers[at]]
        assert form is not None, "it has rows"
        if id(form) not in grids:
            grids[id(form)] = list(grid_indices([(0, n) for n in form.grid_shape]))

        grid, leaf = grids[id(form)], indices[at]
        found[at] = tuple(
            [
                Written(leaf, chunk, 0, index.files[file], offset, nbytes, crc32c)
                for chunk, (file, offset, nbytes, crc32c) in zip(
                    grid, chunks[end - len(grid) : end], strict=True
                )
            ]
        )

    return found


def _recorded_sums(index: Index, recorded: Mapping[str, Checksums], rows: _Column, sizes: _Column) -> _Column:
    """The checksum of each chunk; -1 of one that is not just a piece with the right length, or has blocks."""
    sums = np.full(len(rows), -1, np.int64)
    ids, right = index.ids[rows], (index.lengths[rows] == sizes) & (sizes > 0)
    for number, file in enumerate(index.files):
        here = np.flatnonzero((ids == number) & right)
        known, offsets = recorded.get(file, NONE), index.offsets[rows[here]]
        found = known.exactly(offsets, sizes[here])
        whole = np.flatnonzero(found >= 0)
        found[whole[known.have_blocks(offsets[whole])]] = -1
        sums[here] = found

    return sums


def _chunk_nbytes(leaves: StoredLeaves, numbers: _Column) -> _Column:
    chosen: list[int] = numbers.tolist()
    column = leaves.specs
    specs = [column[at] for at in chosen]
    known = {id(spec): spec.chunk_nbytes for spec in {id(spec): spec for spec in specs}.values()}
    return np.array([known[id(spec)] for spec in specs], np.int64)


def _follow_each_other(index: Index, rows: _Column, sizes: _Column, counts: _Column) -> npt.NDArray[np.bool_]:
    """Return whether all chunks of a leaf have their sizes, and are one after another in one data file."""
    starts = np.cumsum(counts) - counts
    firsts, before = rows[starts], np.cumsum(sizes) - sizes
    expected = np.repeat(index.offsets[firsts] - before[starts], counts) + before
    right: npt.NDArray[np.bool_] = (
        (index.lengths[rows] == sizes)
        & (sizes > 0)
        & (index.ids[rows] == np.repeat(index.ids[firsts], counts))
        & (index.offsets[rows] == expected)
    )
    return np.logical_and.reduceat(right, starts)


def _joined(crc32cs: _Column, sizes: _Column, counts: _Column) -> _Column:
    """The checksum of each leaf, from those of its chunks; -1 if one is not known."""
    if not len(counts):
        return counts

    starts, ends = np.cumsum(counts) - counts, np.cumsum(counts)
    n_behind = np.repeat(ends, counts) - np.arange(len(sizes)) - 1  # chunks of the same leaf
    moved = append_zeros_to_each(np.maximum(crc32cs, 0).astype(np.uint32), n_behind * sizes)
    known = np.logical_and.reduceat(crc32cs >= 0, starts)
    return np.where(known, np.bitwise_xor.reduceat(moved, starts).astype(np.int64), -1)


@final
class ChunkBox(NamedTuple):
    """A stored chunk, or a box of chunks of which none is stored."""

    start: tuple[int, ...]  #: index of the chunk, or of the first one in the box
    shape: tuple[int, ...]  #: of the box, in chunks; all 1 for a stored chunk
    value: Value | None  #: where the chunk is; None for the box

    @property
    def chunks(self) -> Bounds:
        """The box as ranges of chunk indices."""
        return tuple([(at, at + n) for at, n in zip(self.start, self.shape, strict=True)])


def chunk_boxes(index: Index, array: StoredArray, grid: Bounds) -> Iterator[ChunkBox]:
    """Yield the stored chunks of a part of an array's grid, and boxes of absent ones; together they tile it.

    Args:
        index: Where all chunks are.
        array: Whose keys to look up.
        grid: Ranges of chunk indices, none of them empty.
    """
    extent, lows = shape_of(grid), [low for low, _ in grid]
    ones = (1,) * len(grid)
    if extent == ones:  # as of nearly every leaf: there is nothing to tile
        row = index.table.rows.get((array.prefix + array.format.chunk_key(lows)).encode())
        yield ChunkBox(tuple(lows), ones, None if row is None else index.value(row))
        return

    done = 0  # chunks passed so far, in C order
    for at, row in stored_rows(index, array, grid):
        flat = 0
        for i, low, n in zip(at, lows, extent, strict=True):
            flat = flat * n + i - low

        yield from _boxes(extent, lows, done, flat)
        yield ChunkBox(at, ones, index.value(row))
        done = flat + 1

    yield from _boxes(extent, lows, done, math.prod(extent))


def _boxes(extent: tuple[int, ...], lows: list[int], first: int, stop: int) -> Iterator[ChunkBox]:
    for _, start, shape in rectangles(extent, first, stop):
        yield ChunkBox(tuple(map(int.__add__, start, lows)), shape, None)


def stored_rows(index: Index, array: StoredArray, grid: Bounds) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield index and row of every chunk that is stored, in C order."""
    rows = index.rows_below(array.prefix.encode())
    if math.prod(shape_of(grid)) <= 2 * len(rows):
        get = index.table.rows.get
        for at in grid_indices(grid):
            row = get((array.prefix + array.format.chunk_key(at)).encode())
            if row is not None:
                yield at, row

        return

    keys = index.keys_in_order
    there: list[tuple[tuple[int, ...], int]] = []
    for row in rows:
        found = array.format.chunk_index(keys[row][len(array.prefix.encode()) :])
        if found is not None and all(lo <= i < hi for i, (lo, hi) in zip(found, grid, strict=True)):
            there.append((found, row))

    yield from sorted(there)
