"""A checkpoint whose documents have been read: its leaves, and how to read each."""

from __future__ import annotations

__all__ = ("OrbaxCheckpoint", "StoredArray")

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, final

from penstock.handlers.formats.common.checksummed_reads import (
    NONE,
    covers_others,
    cut_at_pieces,
    recorded_crc32c,
    with_checksums,
)
from penstock.handlers.formats.common.chunk_regions import (
    Bounds,
    StoredChunk,
    chunk_reads,
    chunks_in,
    intersect,
    merge_direct,
    shape_of,
)
from penstock.handlers.formats.common.integrity import Checksum, Checksums
from penstock.handlers.formats.common.leaf_table import StoredArray, StoredLeaves
from penstock.handlers.formats.common.stored_files import bytes_on_medium
from penstock.handlers.formats.common.zarr_metadata import ArrayFormat, opaque_codec
from penstock.handlers.formats.orbax.chunks.chunk_lookup import Found, found_chunks
from penstock.handlers.formats.orbax.chunks.embedded_arrays import PackedArray, packed_reads
from penstock.handlers.formats.orbax.chunks.written_parts import parts_of
from penstock.handlers.formats.orbax.documents.file_names import MANIFEST
from penstock.handlers.formats.orbax.documents.own_disk import disk_mark
from penstock.handlers.formats.orbax.reading.storage_details import (
    leaf_codec,
    leaf_nbytes,
    leaf_zarr_metadata,
)
from penstock.handlers.formats.orbax.reading.whole_chunks import whole_chunks, whole_parts
from penstock.handlers.ocdbt.index_entries import Index
from penstock.handlers.ocdbt.value_refs import Indirect, Inline, Value
from penstock.kernel.errors import CorruptCheckpointError, NotOnThisDiskError
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

if TYPE_CHECKING:
    from penstock.handlers.formats.orbax.chunks.tensorstore_reads import ArrayDriver

MOST_CHUNKS: Final = 1024
"""Chunks that a driver reads at once: it takes a kilobyte or more for each, however small they are."""


@final
@dataclass(frozen=True, eq=False)
class OrbaxCheckpoint:
    """An Orbax checkpoint, opened. Immutable; may be used from several threads."""

    store: Store  #: where it lies
    path: str  #: of the checkpoint: as it was asked for, or the latest step there
    directory: str  #: what holds the tree: `path`, or an item in it
    leaves: StoredLeaves
    custom_metadata: Mapping[str, Any] | None
    committed_at_ns: int | None
    uses_ocdbt: bool
    all_chunks_written: bool  #: a missing chunk is an error, and not an array full of zeros
    checksums: Mapping[str, Checksums]  #: by data file; empty if Orbax wrote it
    index: Index  #: where every chunk lies
    digests: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  #: of leaves, by stored name
    tree_custom_metadata: object = None  #: the caller's metadata stored with the tree: any JSON
    root_custom_metadata: Mapping[str, Any] | None = None  #: of the directory of steps it was found in
    started_at_ns: int | None = None  #: when its save began
    uses_zarr3: bool = False  #: as it is recorded of the tree

    @property
    def has_checksums(self) -> bool:
        """Whether penstock wrote it, and so recorded checksums."""
        return bool(self.checksums)

    def without_checksums(self) -> OrbaxCheckpoint:
        """Return it as if none were recorded; see `ChecksummedCheckpoint`."""
        return replace(self, checksums={})

    def expected_crc32c(self, file: str) -> Sequence[Checksum]:
        """Return the recorded checksums of a data file, by ascending offset; empty if there are none.

        Args:
            file: Relative to `directory`.
        """
        return tuple(self.checksums.get(file, ()))

    def codec(self, number: int) -> str | None:
        """Describe the codecs of a leaf's chunks; see `StorageDetails`."""
        return leaf_codec(self.leaves, number)

    def stored_nbytes(self, number: int) -> int:
        """Count the stored bytes of a leaf's chunks; see `StorageDetails`."""
        return leaf_nbytes(self.leaves, self.index, number)

    def zarr_metadata(self, number: int) -> Mapping[str, Any] | None:
        """Return the document of a leaf's array; see `ZarrDetails`."""
        return leaf_zarr_metadata(self.leaves, number)

    def stored_bytes(self, store: Store) -> int:
        """Count the bytes of all files with array bytes; see `StoredSize`."""
        files = [os.path.join(self.directory, file) for file in self.index.files]
        packed = {each.file for each in self.leaves.table.details.values() if isinstance(each, PackedArray)}
        return self.index.inline_nbytes + bytes_on_medium(store, [*files, *sorted(packed)])

    def parts(self, numbers: Sequence[int], leaves: Sequence[int]) -> Sequence[Sequence[Written]]:
        """Say where the bytes of some leaves lie; see `StoredCheckpoint.parts`."""
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

        A chunk that lies in the index itself is a `ScatterRead` of 0 bytes of the manifest.
        """
        array = stored.detail
        bounds = region.bounds
        if not all(start < stop for start, stop in bounds):
            return iter(())
        if isinstance(array, PackedArray):
            return packed_reads(index, array, region, piece_bytes)
        if not isinstance(array, StoredArray):
            return iter(())
        codec = None if array.format.plain else opaque_codec(array.format)
        if codec is not None:
            opaque = self._opaque_reads(index, stored, array, region, codec)
            return with_checksums(opaque, self._recorded, piece_bytes)
        if not array.format.plain:
            return self._coded_reads(index, stored, array, region, piece_bytes)

        reads = merge_direct(self._plain_reads(index, stored, array, region, piece_bytes))
        return with_checksums(reads, self._recorded, piece_bytes)

    def whole_chunks(self, numbers: Sequence[int]) -> WholeChunks:
        """Say where leaves lie that are one raw chunk each; see `PackedCheckpoint.whole_chunks`."""
        return whole_chunks(self.leaves, self.index, self._recorded, self.directory, numbers)

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
                recorded = self._recorded.get(file, NONE)
                if covers_others(recorded, value.offset, nbytes):
                    problem = f"has a checksum of the chunk at byte {value.offset} together with other bytes"
                    raise CorruptCheckpointError(file, problem, key_path=stored.info.key_path)
                if nbytes == region.nbytes and bounds == _bounds_of(start, shape):
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
        boxes = [
            (found, self._decoded(leaf, stored, array, region, found))
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
        box: Found,
        piece_bytes: int,
    ) -> Iterator[Read]:
        """Fill chunks that were never written: each read fills any number of them from one element."""
        for chunks in _parts(box.chunks, max(1, piece_bytes // stored.spec.chunk_nbytes)):
            yield self._driver_read(leaf, stored, array, region, chunks, absent=True)

    def _decoded(
        self, leaf: int, stored: StoredLeaf, array: StoredArray, region: Destination, found: Found
    ) -> ScatterRead | None:
        """Read a chunk with a codec and decode it; None if its checksum is not known."""
        form, value, index = array.format, found.value, found.start
        if not isinstance(value, Indirect):
            return None

        file = os.path.join(self.directory, value.file)
        crc32c = recorded_crc32c(self._recorded.get(file, NONE), value.offset, value.length)
        if crc32c is None:
            return None

        start = tuple(map(int.__mul__, index, form.chunk_shape))
        chunk = StoredChunk(file, value.offset, start, form.chunk_shape, stored.spec.itemsize)
        decode = partial(self._decode, form, chunk, region, stored.info.key_path)
        held = value.length + stored.spec.chunk_nbytes  # TensorStore has a copy of the stored bytes, too
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
    ) -> Iterator[Found]:
        """Look up the chunks of a part of the grid, which must be of `nbytes` if that is given.

        With `only_here`, those that another process has on its own disk are left out.

        Raises:
            CorruptCheckpointError: If one is of another size, or missing where all were written.
            NotOnThisDiskError: If one is missing because another process has it on its own disk.
        """
        for found in found_chunks(self.index, array, grid):
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
        """Whose part it is, if each process saved to a disk of its own."""
        return disk_mark(self.store, self.directory)

    @cached_property
    def _recorded(self) -> Mapping[str, Checksums]:
        """The checksums by absolute file name, as reads name files."""
        return {os.path.join(self.directory, file): found for file, found in self.checksums.items()}

    @cached_property
    def _driver(self) -> ArrayDriver:
        # Here, because it imports tensorstore, which plain chunks never need.
        from penstock.handlers.formats.orbax.chunks.tensorstore_reads import ArrayDriver

        return ArrayDriver(self.store, self.directory, ocdbt=self.uses_ocdbt)

    @cached_property
    def _decode(self) -> Callable[[ArrayFormat, StoredChunk, Destination, str, memoryview], None]:
        # Here, for the same reason.
        from penstock.handlers.formats.orbax.chunks.decoded_chunks import decode_into

        return decode_into


def _bounds_of(start: tuple[int, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple([(at, at + n) for at, n in zip(start, shape, strict=True)])


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


def _spread(leaf: int, chunk: StoredChunk, region: Destination, key_path: str, data: memoryview) -> None:
    """Bring the part of a chunk that lies in a region there; `data` is the chunk."""
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
