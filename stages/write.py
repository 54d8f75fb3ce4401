"""Writes pieces to files of the checkpoint, as its layout wants them placed, and makes the files durable."""

from __future__ import annotations

__all__ = ("BLOCK_BYTES", "Write", "block_bytes_for", "block_bytes_of", "runs_of", "summed")

import math
import os
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby
from operator import attrgetter
from threading import Lock as ThreadLock
from typing import ClassVar, Final, NamedTuple, TypeAlias, final

import numpy as np
from anyio import Lock
from anyio.from_thread import check_cancelled
from crc32c import crc32c

from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import PipelineError, StorageError
from penstock.kernel.messages.save import (
    Extents,
    FixedCourse,
    Leaf,
    Leaves,
    Piece,
    SavePlan,
    StagedBatch,
    WrittenBatch,
    in_columns,
)
from penstock.kernel.options import fit_fields
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.kernel.pipeline.together import at_once, together
from penstock.kernel.protocols.layouts import (
    ArrangedDigests,
    ArrangedLayout,
    Arrangement,
    WrittenRange,
    chunk_file_of,
)
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.stores import DataFile, ReadableFile, WholeWrites
from penstock.kernel.protocols.written import COLUMNS, ByIndex, RunningSums, Written, WrittenTable
from penstock.stages.files import closing, log_transfers
from penstock.stages.messages.batching import (
    adjacent,
    check_planned,
    check_planned_together,
    plan_of,
)


@final
@dataclass(frozen=True, slots=True)
class Write:
    """Takes `StagedBatch`es, yields `WrittenBatch`es, and releases every lease it was handed.

    The layout decides where the bytes go:

    - Most write the chunks of a save one after another into a few data files.
    - A layout that names a file for each chunk gets such files.
    - An `ArrangedLayout`, such as that of safetensors, knows the place of every leaf in advance.

    A file is synced once: after its last piece, or earlier if there are many. The event `data.written` says
    how many bytes bypassed the page cache and how many went through it. Background writes of third-party
    handlers are waited for here.

    Attributes:
        concurrency: Batches written at once, each by a thread.
        file_bytes: A data file that has grown to this size is followed by another one. None for the size
            that the store prefers. Of no use to a layout that names its files.
    """

    messages: ClassVar[Messages] = {StagedBatch: WrittenBatch}
    advice: ClassVar[Advice] = Advice(
        busy=(
            "If the store can do more at once, raise `[save.write] concurrency`; if not, write less: "
            '`[format] codec = "auto"`, or `base=` for what did not change.'
        ),
        few_bytes=(
            "There is little to write, so it is the store's own time for each file: save less often, or to a "
            "faster `[store]`."
        ),
    )

    concurrency: int = field(default=4, metadata={"positive": True})
    file_bytes: int | None = field(default=None, metadata={"positive": True})

    def __post_init__(self) -> None:
        fit_fields(self, "write")

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save. Its files are closed at the end, whatever happened."""
        arrays, places = run.layout.arrays, run.layout.places
        writer: _Writer
        if places is not None:
            # Of several processes each writes into files that the primary makes and completes.
            writer = (_OwnArrangedFiles if run.operation.is_alone else _SharedArrangedFiles)(run, places)
        elif arrays is not None and not arrays.save_format.ocdbt:
            writer = _ChunkFiles(run, Threads(self.concurrency))
        else:
            writer = _DataFiles(run, self.file_bytes)

        # As the list is at the end: also a file is closed that a thread opens which was left.
        async with closing(run.threads, writer.files.copy):
            yield writer

        log_transfers(run.events, "data.written", writer.files)


class _Writer(ABC):
    """The actor of one save: a placement of its bytes in files, which it opens and writes.

    Args:
        run: The save.
    """

    def __init__(self, run: SaveRun) -> None:
        self._run = run
        self.files: list[DataFile] = []  #: all that were opened

    async def __call__(self, batch: StagedBatch, /) -> WrittenBatch:
        try:
            # Progress counts the bytes of arrays, so a chunk that is encoded counts with its last bytes.
            nbytes = 0
            for extents in batch.extents:
                _check_encoded(extents)
                if extents.coded is None:
                    nbytes += len(extents.data)
                elif extents.start + len(extents.data) == extents.coded:
                    nbytes += extents.leaves[0].spec.chunk_nbytes

            table = await self._written(batch)
            for pending in batch.pending:
                # Only now: a handler writes in the background while arrays are written here.
                if pending.writing is not None:
                    await pending.writing.wait()
        finally:
            batch.release()

        self._run.progress.advance(len(batch.leaves), nbytes)
        return WrittenBatch(batch.leaves, table, handled=batch.pending, plan=batch.plan)

    @abstractmethod
    async def _written(self, batch: StagedBatch) -> WrittenTable:
        """Write a batch, which keeps its leases; return where its bytes are."""

    @abstractmethod
    def finish(self) -> AsyncIterator[WrittenBatch]:
        """Make durable what is not, once the last batch was written."""


def _check_encoded(extents: Extents) -> None:
    """Refuse to write an unencoded chunk whose metadata will say that it is encoded.

    Raises:
        PipelineError: If it is such a chunk.
    """
    if extents.coded is not None:
        return

    for number, spec in enumerate(extents.specs):
        if spec.codec is not None:
            key_path = extents.leaves[number].info.key_path
            problem = f"has the codec {spec.codec}, but the pipeline has no stage `encode`"
            error = PipelineError(f"{key_path} {problem}")
            error.key_path = key_path
            raise error


@dataclass(slots=True)
class _DataFile:
    """A data file being filled."""

    name: str  #: relative to the checkpoint
    file: DataFile
    end: int = 0
    due: int = 0  #: bytes that are placed in it but not yet written


@dataclass(frozen=True, slots=True)
class _Placed:
    """Extents with where they go, one after another."""

    extents: Extents
    target: _DataFile
    offset: int


@final
class _DataFiles(_Writer):
    """Chunks follow one another in a few data files, each whole in one, wherever its pieces come from."""

    def __init__(self, run: SaveRun, file_bytes: int | None) -> None:
        super().__init__(run)
        self._placement = run.store.placement
        self._file_bytes = self._placement.file_bytes if file_bytes is None else file_bytes
        self._unsynced: list[_DataFile] = []
        self._placed = 0  # bytes of all files
        self._filling: dict[str, _DataFile] = {}  # by the folder that their names are relative to
        self._on_course: dict[int, _DataFile] = {}  # by number, if what goes where was decided in advance
        self._own_folder = run.own_folder
        self._chunks: dict[tuple[int, tuple[int, ...]], tuple[_DataFile, int]] = {}
        self._placing = Lock(fast_acquire=True)
        self._preallocate = True

    async def _written(self, batch: StagedBatch) -> WrittenTable:
        """Write a batch: all at once, unless that opens many files."""
        specs = _specs_of(batch) if batch.plan is None else batch.plan.specs
        if batch.plan is not None:
            self._preallocate = batch.plan.sizes_known
            for extents in batch.extents:
                # A stage may have changed these leaves alone; `commit` sees those of the batch.
                if extents.leaves is not batch.leaves:
                    check_planned_together(in_columns(extents.leaves), batch.plan)

        run = self._run
        tables: list[WrittenTable] = []
        free: Sequence[Extents] = batch.extents
        if batch.plan is not None and batch.plan.course is not None:
            # Where an encoded chunk goes is never decided in advance: its length was not known.
            placed_before = [extents for extents in free if extents.coded is None]
            free = [extents for extents in free if extents.coded is not None]
            tables += await self._written_on_course(placed_before, batch.plan, batch.plan.course)

        parts = self._parts(free)
        while True:
            async with self._placing:  # a chunk is placed once, although several workers may hold parts of it
                placed = await self._place(parts)
            if not placed:
                break

            tables += await run.threads.run(_write_placed, run, specs, placed, self._file_bytes)
            for entry in placed:
                entry.target.due -= len(entry.extents.data)

            if len(self._unsynced) >= self._placement.full_files:
                await self._finish_full()

        return tables[0] if len(tables) == 1 else await run.threads.run(_joined, tables, specs)

    async def _written_on_course(
        self, extents: Sequence[Extents], plan: SavePlan, course: FixedCourse
    ) -> list[WrittenTable]:
        """Write extents where it was decided in advance."""
        run = self._run
        found = list(_on_course(extents, plan, course))
        async with self._placing:
            for number in sorted({number for number, _, _ in found} - self._on_course.keys()):
                await run.workspace.open(os.path.dirname(course.files[number]))
                await run.threads.run(self._open_on_course, course, number)

        placed = [_Placed(part, self._on_course[number], offset) for number, offset, part in found]
        return await run.threads.run(_write_placed, run, plan.specs, placed, self._file_bytes)

    def _open_on_course(self, course: FixedCourse, number: int) -> None:
        """Open a data file, which an interrupted save may have begun."""
        path = self._run.workspace.path(course.files[number])
        again = _opened_again(self._run, path)
        file = again or self._run.store.create_data_file(path)
        self.files.append(file)
        opened = self._on_course[number] = _DataFile(course.files[number], file, course.file_bytes[number])
        self._unsynced.append(opened)
        if again is None and course.file_bytes[number] >= self._placement.page_from_bytes:
            file.allocate(course.file_bytes[number])

    def _parts(self, given: Sequence[Extents]) -> Iterator[tuple[str, Extents]]:
        """Yield all extents in parts that go to one file each, with the folder of the file."""
        folders = self._run.layout.folders
        only_folder = "" if folders is None else folders.only_folder
        for extents in given:
            if folders is None or only_folder is not None:
                found = [(only_folder or "", extents)]
            elif extents.chunk is not None:
                found = [(folders.folder(extents.leaves[0]), extents)]
            else:
                runs = [(name, len(list(same))) for name, same in groupby(extents.leaves, folders.folder)]
                ends = accumulate([n_leaves for _, n_leaves in runs])
                found = [(name, part) for (name, _), part in zip(runs, extents.divided(ends), strict=True)]

            for folder, part in found:
                if part.chunk is not None or len(part.data) <= self._file_bytes:
                    yield folder, part
                else:
                    for fitting in self._fitting(part):
                        yield folder, fitting

    def _fitting(self, extents: Extents) -> Iterator[Extents]:
        """Yield the parts of what is larger than a data file, each of which grows one file to its size.

        Of a leaf that is larger than a file, each chunk is a part.
        """
        ends: list[int] = []
        nbytes = 0
        for number, size in enumerate(extents.sizes):
            if size > self._file_bytes and nbytes:
                ends.append(number)

            nbytes += size
            if nbytes >= self._file_bytes:
                ends.append(number + 1)
                nbytes = 0

        if not ends or ends[-1] < len(extents.leaves):
            ends.append(len(extents.leaves))

        for part in extents.divided(ends):
            if len(part.leaves) == 1 and part.nbytes > self._file_bytes:
                yield from map(Extents.of, part)
            else:
                yield part

    async def _place(self, parts: Iterator[tuple[str, Extents]]) -> list[_Placed]:
        """Find places for the rest of a batch, or as much of it as fits a few new files.

        Of a chunk that comes in parts, the first one reserves the whole.
        """
        most = len(self.files) + self._placement.full_files  # all of them wait to be full
        placed: list[_Placed] = []
        for folder, extents in parts:
            with _naming_leaf(extents.leaves):
                if extents.chunk is None or extents.holds_whole_chunks:
                    target, base = await self._reserve(len(extents.data), folder)
                else:
                    key = (extents.leaves[0].index, extents.chunk)
                    if key not in self._chunks:
                        self._chunks[key] = await self._reserve(extents.chunk_nbytes, folder)

                    target, base = self._chunks[key]

            placed.append(_Placed(extents, target, base + extents.start))
            if len(self.files) >= most:
                break

        return placed

    async def _reserve(self, nbytes: int, folder: str) -> tuple[_DataFile, int]:
        """Return a file with room for so many bytes, and the offset where they go."""
        run, target = self._run, self._filling.get(folder)
        if target is None or target.end >= self._file_bytes:
            name = os.path.join(folder, self._own_folder, run.layout.data_file())
            await run.workspace.open(os.path.dirname(name))
            target = await run.threads.run(self._create, name, folder)
            self._unsynced.append(target)  # only once it is filled: until then it would look full

        step = self._placement.step(nbytes)
        base = -(-target.end // step) * step
        self._placed += base + nbytes - target.end
        target.end = base + nbytes
        target.due += nbytes
        return target, base

    def _create(self, name: str, folder: str) -> _DataFile:
        # Noted by the opening thread: a task cancelled meanwhile would lose the open file. And before what
        # else may fail: another worker, which is not cancelled yet, would create the file again, and its
        # error, that the file exists, could be taken for the first.
        run = self._run
        file = run.store.create_data_file(run.workspace.path(name))
        self.files.append(file)
        target = self._filling[folder] = _DataFile(name, file)
        # Gaps before page-aligned chunks are not counted: the file merely grows by them.
        left = run.progress.bytes_total - self._placed
        if left >= self._placement.page_from_bytes and self._preallocate:
            file.allocate(min(left, self._file_bytes))

        return target

    async def _finish_full(self) -> None:
        """Sync and close files that are complete, if there are many of them."""
        filling = [id(opened) for opened in self._filling.values()]
        full = [opened for opened in self._unsynced if opened.due == 0 and id(opened) not in filling]
        if len(full) < self._placement.full_files:
            return

        gone = {id(opened) for opened in full}  # before the first await, so that no other worker does it too
        self._unsynced = [opened for opened in self._unsynced if id(opened) not in gone]
        await self._run.threads.run(_sync_and_close, [opened.file for opened in full])

    async def finish(self) -> AsyncIterator[WrittenBatch]:
        await together([partial(self._run.threads.run, opened.file.sync) for opened in self._unsynced])
        return
        yield


def _opened_again(run: SaveRun, path: str) -> DataFile | None:
    """Open what an interrupted save has begun; None if it has not. Blocking."""
    files = run.store.shared_files
    return None if files is None or run.store.kind(path) is None else files.open_for_writing(path)


def _on_course(
    given: Iterable[Extents], plan: SavePlan, course: FixedCourse
) -> Iterator[tuple[int, int, Extents]]:
    """Yield all extents in parts that are one range of a file each: its number, the offset, the extents."""
    for extents in given:
        if extents.chunk is not None:
            parts: Iterable[Extents] = (extents,)
        elif len(extents.leaves) == 1 and plan.specs[extents.leaves[0].index].n_chunks == 1:
            parts = (extents,)
        else:
            parts = extents.divided(_ends_of_ranges(in_columns(extents.leaves), course))

        for part in parts:
            first = part.leaves[0]
            if part.chunk is None and course.stride[first.index] != first.spec.chunk_nbytes:
                whole = [Extents.of(piece) for piece in part]
            else:
                whole = [part]

            for each in whole:
                index, spec = each.leaves[0].index, each.leaves[0].spec
                number = 0
                for at, size in zip(each.chunk or (), spec.grid_shape, strict=False):
                    number = number * size + at

                offset = course.offset[index] + number * course.stride[index] + each.start
                yield course.file[index], offset, each


def _ends_of_ranges(leaves: Leaves, course: FixedCourse) -> Iterator[int]:
    """Yield how many leaves come before each one that does not follow the one before it in its file."""
    end: tuple[int, int] | None = None
    for number, (index, spec) in enumerate(zip(leaves.indices, leaves.specs, strict=True)):
        file, offset = course.file[index], course.offset[index]
        is_dense = course.stride[index] == spec.chunk_nbytes
        if number and ((file, offset) != end or not is_dense):
            yield number

        end = (file, offset + spec.nbytes) if is_dense else None

    yield len(leaves)


def _sync_and_close(files: Sequence[DataFile]) -> None:
    for file in files:
        file.sync()
        file.close()


def _specs_of(batch: StagedBatch) -> ByIndex[LeafSpec]:
    """Return the specs of the leaves of a batch that has lost its plan."""
    parts = (batch.leaves, *[extents.leaves for extents in batch.extents])
    return {leaf.index: leaf.spec for part in parts for leaf in part}


def _write_placed(
    run: SaveRun, specs: ByIndex[LeafSpec], placed: Sequence[_Placed], file_bytes: int
) -> list[WrittenTable]:
    for entries in adjacent(placed, _is_next):
        target, offset = entries[0].target, entries[0].offset
        first, *others = buffers = [entry.extents.data for entry in entries]
        # The whole of a full file is written from where it is.
        is_whole = not others and offset == 0 and first.nbytes == target.end >= file_bytes
        with _naming_leaf(entries[0].extents.leaves):
            if is_whole and isinstance(target.file, WholeWrites):
                target.file.write_whole(first)
            else:
                target.file.write_at(offset, buffers)

    tables: list[WrittenTable] = []
    rows: list[Written] = []
    for entry in placed:
        if entry.extents.chunk is None:
            tables.append(_table_of(entry, specs))
        else:
            (piece,) = entry.extents
            rows.append(_row_of(piece, entry.target.name, entry.offset, run))

    if rows:  # to put a row alone into columns would take as long as to write it
        tables.append(WrittenTable.of(rows, specs))

    return tables


def _row_of(piece: Piece, file: str, offset: int, run: SaveRun) -> Written:
    """Return the place and the checksums of a piece, for which every byte is read."""
    checksum, running = summed(piece, block_bytes_of(run))
    place = file, offset, piece.nbytes
    return Written(piece.leaf.index, piece.chunk, piece.start, *place, checksum, piece.coded, running)


def _table_of(entry: _Placed, specs: ByIndex[LeafSpec]) -> WrittenTable:
    """Return where the chunks of leaves are: one after another in a file."""
    leaves, data, offset = in_columns(entry.extents.leaves), entry.extents.data, entry.offset
    sizes = leaves.chunk_sizes
    ends = list(accumulate(sizes))
    counts = {number: spec.n_chunks for number, spec in {id(spec): spec for spec in leaves.specs}.items()}
    n_chunks = np.array([counts[id(spec)] for spec in leaves.specs], np.int64)
    zeros = np.broadcast_to(np.int64(0), len(sizes))  # takes no memory, of which there is much for each row
    before = np.repeat(np.cumsum(n_chunks) - n_chunks, n_chunks)
    return WrittenTable(
        specs=specs,
        files=[entry.target.name],
        leaf=np.repeat(np.array(leaves.indices, np.int64), n_chunks),
        chunk=zeros if (n_chunks == 1).all() else np.arange(len(sizes)) - before,
        start=zeros,
        file=zeros,
        offset=np.array(ends, np.int64) - sizes + offset,
        nbytes=np.array(sizes, np.int64),
        crc32c=np.array(
            [crc32c(data[start:end]) for start, end in zip([0, *ends], ends, strict=False)], np.int64
        ),
        coded=np.broadcast_to(np.int64(-1), len(sizes)),
        block_bytes=zeros,
    )


def _joined(tables: Sequence[WrittenTable], specs: ByIndex[LeafSpec]) -> WrittenTable:
    """Return the rows of all tables in one."""
    if not tables:
        return WrittenTable.of((), specs)

    starts = accumulate([len(table.files) for table in tables], initial=0)
    columns = {name: [getattr(table, name) for table in tables] for name in COLUMNS}
    columns["file"] = [file + np.int64(start) for file, start in zip(columns["file"], starts, strict=False)]
    return WrittenTable(
        specs=specs,
        files=[file for table in tables for file in table.files],
        running=b"".join([table.running for table in tables]),
        **{name: np.concatenate(parts) for name, parts in columns.items()},
    )


def _is_next(before: _Placed, entry: _Placed) -> bool:
    """True if extents follow others in the same file."""
    return entry.target is before.target and entry.offset == before.offset + before.extents.nbytes


_Chunk: TypeAlias = tuple[int, tuple[int, ...]]


@dataclass(slots=True)
class _ChunkFile:
    """The file of a chunk that is not completely written."""

    file: DataFile
    absent_bytes: int


@final
class _ChunkFiles(_Writer):
    """Each chunk is a file, which is made durable and closed once its last byte was written."""

    def __init__(self, run: SaveRun, aside: Threads) -> None:
        super().__init__(run)
        self._aside = aside  #: write the files of a batch with many of them, for all batches
        self._document_bytes = run.store.placement.document_bytes
        self._open: dict[_Chunk, _ChunkFile] = {}
        self._folders: set[str] = set()
        self._lock = ThreadLock()

    async def _written(self, batch: StagedBatch) -> WrittenTable:
        await self._run.workspace.open()
        return await self._run.threads.run(self._write, batch)

    async def finish(self) -> AsyncIterator[WrittenBatch]:
        return
        yield

    def _write(self, batch: StagedBatch) -> WrittenTable:
        specs = _specs_of(batch) if batch.plan is None else batch.plan.specs
        course = None if batch.plan is None else batch.plan.course
        write = partial(self._write_piece, course=course)
        return WrittenTable.of(at_once(write, list(batch.parts()), self._aside), specs)

    def _write_piece(self, piece: Piece, course: FixedCourse | None) -> Written:
        leaf = piece.leaf
        name = chunk_file_of(self._run.layout, leaf, piece.chunk)
        if name is None:
            raise PipelineError(f"the layout names no file for chunk {piece.chunk} of {leaf.info.key_path}")

        path, folder = self._run.workspace.path(name), os.path.dirname(name)
        with _naming_leaf((leaf,)):
            # Creating it twice is harmless, but no worker may go on before it exists.
            if folder not in self._folders:
                self._run.workspace.make_directory(folder)
                self._folders.add(folder)

            if piece.nbytes == piece.chunk_nbytes and piece.nbytes < self._document_bytes:
                self._run.store.write_file(path, bytes(piece.data))
            else:
                done = () if course is None else course.done.get(piece.leaf.index, {}).get(piece.chunk, ())
                self._write_part(piece, path, sum([stop - start for start, stop in done]))

        return _row_of(piece, name, piece.start, self._run)

    def _write_part(self, piece: Piece, path: str, done_bytes: int) -> None:
        chunk = (piece.leaf.index, piece.chunk)
        with self._lock:
            opened = self._open.get(chunk)
            if opened is None:
                file = (_opened_again(self._run, path) if done_bytes else None) or (
                    self._run.store.create_data_file(path)
                )
                opened = _ChunkFile(file, piece.chunk_nbytes - done_bytes)
                self._open[chunk] = opened
                self.files.append(opened.file)

        opened.file.write_at(piece.start, [piece.data])
        with self._lock:
            opened.absent_bytes -= piece.nbytes
            if opened.absent_bytes:
                return

            del self._open[chunk]

        opened.file.sync()
        opened.file.close()


class _Write(NamedTuple):
    """Bytes and their destination; sorts by file and offset."""

    file: str
    offset: int
    data: memoryview


@final
@dataclass(frozen=True, slots=True)
class _Begun:
    """The arrangement of a save, once its plan is known."""

    plan: SavePlan
    arrangement: Arrangement
    digests: ArrangedDigests
    files: Mapping[str, _ArrangedFile]


@dataclass(slots=True)
class _ArrangedFile:
    """A file of the arrangement."""

    end: int  #: its length, bytes
    absent_bytes: int = 0  #: of leaves, not written yet
    opened: DataFile | None = None
    is_complete: bool = False


class _ArrangedFiles(_Writer):
    """Each leaf is whole and in C order where its layout said in advance, as are chunks of a sharded one."""

    def __init__(self, run: SaveRun, layout: ArrangedLayout) -> None:
        super().__init__(run)
        self._layout = layout
        self._beginning = Lock()
        self._begun: _Begun | None = None
        self._goes_on = False  # with what an interrupted save has written
        self._lock = ThreadLock()  # of the state of files

    async def _written(self, batch: StagedBatch) -> WrittenTable:
        begun = await self._begin(batch)
        return await self._run.threads.run(self._write, begun, batch)

    @abstractmethod
    def _open_file(self, path: str, file: _ArrangedFile) -> DataFile:
        """Open a file, and note it in `files` and as `file.opened` before anything else can fail.

        Or else another thread would create it again, and its error could be taken for the first.
        """

    @abstractmethod
    def _complete(self, begun: _Begun, name: str) -> None:
        """Complete a file of whose leaves this process has written every byte."""

    async def _begin(self, batch: StagedBatch) -> _Begun:
        """Make the arrangement, once."""
        async with self._beginning:
            if self._begun is None:
                run = self._run
                plan = plan_of([batch])
                arrangement = await run.threads.run(
                    self._layout.arrange, run.path, plan.infos, plan.specs, run.custom_metadata
                )
                await run.workspace.open()
                digests = self._layout.digests(arrangement, plan.specs)
                begun = _Begun(plan, arrangement, digests, _files_of(arrangement, plan.specs))
                self._goes_on = plan.kept is not None
                if plan.kept is not None:
                    await run.threads.run(self._take_up, begun, plan.kept)

                self._begun = begun

            return self._begun

    def _take_up(self, begun: _Begun, kept: WrittenBatch) -> None:
        """Count what an interrupted save has written, and take its checksums. Blocking."""
        for name, rows in groupby(sorted(kept.written, key=attrgetter("file")), attrgetter("file")):
            parts = list(rows)
            begun.files[name].absent_bytes -= sum([part.nbytes for part in parts])
            file = self._run.store.open_data_file(self._run.workspace.path(name))
            try:
                for part in parts:
                    self._take_up_part(begun, file, part)
            finally:
                file.close()

    def _take_up_part(self, begun: _Begun, file: ReadableFile, part: Written) -> None:
        spec, offset = begun.plan.specs[part.leaf], part.offset
        for at, lo, hi in runs_of(spec, part.chunk, part.start, part.nbytes):
            for start in range(lo, hi, BLOCK_BYTES):
                check_cancelled()
                read = memoryview(bytearray(min(BLOCK_BYTES, hi - start)))
                file.read_at(offset + at + start - lo, [read])
                found = _summed(read, offset, at + start - lo, begun.digests.block_bytes)
                begun.digests.add({part.file: list(found)})

    def _open(self, begun: _Begun, name: str) -> DataFile:
        """Return a file, which the first caller opens."""
        file = begun.files[name]
        with self._lock:
            if file.opened is None:
                return self._open_file(self._run.workspace.path(name), file)

            return file.opened

    def _count(self, begun: _Begun, name: str, nbytes: int) -> None:
        """Note that so many bytes of leaves are in a file, and complete it if they were the last."""
        file = begun.files[name]
        with self._lock:
            file.absent_bytes -= nbytes
            if file.absent_bytes or not nbytes:
                return

        self._complete(begun, name)

    def _write(self, begun: _Begun, batch: StagedBatch) -> WrittenTable:
        arrangement, digests = begun.arrangement, begun.digests
        writes: list[_Write] = []
        written: list[Written] = []
        ranges: dict[str, list[WrittenRange]] = {}
        for piece in batch.parts():
            check_planned(piece.leaf, plan_of([batch]))
            place = arrangement.places[piece.leaf.index]
            assert place is not None, "only leaves with array bytes have pieces"
            in_file = ranges.setdefault(place.file, [])
            for at, lo, hi in runs_of(piece.leaf.spec, piece.chunk, piece.start, piece.nbytes):
                data = piece.data[lo:hi]
                writes.append(_Write(place.file, place.offset + at, data))
                in_file += _summed(data, place.offset, at, digests.block_bytes)

            # Of use to a save that goes on with this one, and to nobody else.
            checksum = 0 if begun.plan.course is None else crc32c(piece.data)
            where = piece.start, place.file, place.offset, piece.nbytes, checksum
            written.append(Written(piece.leaf.index, piece.chunk, *where))

        writes.sort(key=lambda write: write[:2])
        for name, in_one in groupby(writes, attrgetter("file")):
            file = self._open(begun, name)
            for run in adjacent(list(in_one), _is_next_write):
                file.write_at(run[0].offset, [write.data for write in run])

            digests.add({name: ranges[name]})
            self._count(begun, name, sum([part.nbytes for part in ranges[name]]))

        return WrittenTable.of(written, begun.plan.specs)


@final
class _OwnArrangedFiles(_ArrangedFiles):
    """A file is created for its first piece. After its last one it gets its head, with the checksums of all.

    So only files are open that are partly written.
    """

    def _open_file(self, path: str, file: _ArrangedFile) -> DataFile:
        again = _opened_again(self._run, path) if self._goes_on else None
        file.opened = opened = again or self._run.store.create_long_file(path, file.end)
        self.files.append(opened)
        if again is None:
            opened.allocate(file.end)

        return opened

    def _complete(self, begun: _Begun, name: str) -> None:
        """Write the head of a file, of which all else was written, make the file durable, and close it."""
        file = self._open(begun, name)
        file.write_at(0, [memoryview(begun.digests.head(name))])
        file.sync()
        file.close()
        begun.files[name].is_complete = True

    async def finish(self) -> AsyncIterator[WrittenBatch]:
        begun = self._begun
        if begun is None:  # no message came: commit reports that
            return

        for name, file in begun.files.items():
            if not file.is_complete:  # no leaf in it has bytes; if some are missing, commit says so
                await self._run.threads.run(self._complete, begun, name)

        for document in begun.arrangement.documents:
            path = self._run.workspace.path(document.path)
            await self._run.threads.run(self._run.store.write_file, path, document.data)

        return
        yield


@final
class _SharedArrangedFiles(_ArrangedFiles):
    """Of several processes each writes its parts into files that the primary has made, at full length.

    The primary completes them at the commit, once all have written.
    """

    def _open_file(self, path: str, file: _ArrangedFile) -> DataFile:
        files = self._run.store.shared_files
        assert files is not None, "the plan says so"
        file.opened = opened = files.open_for_writing(path)
        self.files.append(opened)
        return opened

    def _complete(self, begun: _Begun, name: str) -> None:
        """Do nothing: the checksums of the others go into its head."""

    async def finish(self) -> AsyncIterator[WrittenBatch]:
        from penstock.kernel.messages.joint_plan import ArrangedPart  # one process needs nothing of it

        begun = self._begun
        if begun is None:  # no message came: commit reports that
            return

        await self._run.threads.run(self._end_part, begun)
        yield WrittenBatch((), plan=begun.plan, arranged=ArrangedPart(begun.arrangement, begun.digests))

    def _end_part(self, begun: _Begun) -> None:
        """Make durable what this process wrote into files of all."""
        for file in begun.files.values():
            if file.opened is not None:
                file.opened.sync()
                file.opened.close()


def _files_of(arrangement: Arrangement, specs: Sequence[LeafSpec]) -> Mapping[str, _ArrangedFile]:
    """Return every file of an arrangement, none of them created."""
    files = {head.path: _ArrangedFile(len(head.data)) for head in arrangement.heads}
    for place, spec in zip(arrangement.places, specs, strict=True):
        if place is not None:
            file = files[place.file]
            file.end = max(file.end, place.offset + spec.nbytes)
            file.absent_bytes += spec.nbytes

    return files


def runs_of(spec: LeafSpec, chunk: Sequence[int], start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Split a range of a chunk into runs that are contiguous in the whole array. Pure.

    Args:
        spec: Of the leaf.
        chunk: Grid index of the chunk.
        start: Where the range begins, bytes from the start of the chunk.
        nbytes: Its length.

    Yields:
        Offset in the whole array, and where in the range the bytes begin and end.
    """
    shape, chunk_shape = spec.shape or (), spec.chunk_shape
    outer = len(shape)
    while outer and chunk_shape[outer - 1] == shape[outer - 1]:
        outer -= 1
    outer = max(outer - 1, 0)  # the axes before it are stepped through

    run_bytes = math.prod(chunk_shape[outer:]) * spec.itemsize
    strides = [math.prod(shape[axis + 1 :]) * spec.itemsize for axis in range(len(shape))]
    base = sum(at * n * stride for at, n, stride in zip(chunk, chunk_shape, strides, strict=True))
    done = 0
    while done < nbytes:
        row, within = divmod(start + done, run_bytes)
        offset = base + within
        for axis in reversed(range(outer)):
            row, index = divmod(row, chunk_shape[axis])
            offset += index * strides[axis]

        end = min(done + run_bytes - within, nbytes)
        yield offset, done, end
        done = end


def _summed(data: memoryview, first: int, at: int, block_bytes: int) -> Iterator[WrittenRange]:
    """Take the checksums of bytes that are `at` bytes within a leaf, which begins at `first` in its file."""
    done, end = 0, len(data)
    while done < end:
        stop = min(end, done + block_bytes - (at + done) % block_bytes)
        part = data[done:stop]
        yield WrittenRange(first + at + done, stop - done, crc32c(part))
        done = stop


def _is_next_write(before: _Write, write: _Write) -> bool:
    """True if a write follows another one in the same file."""
    return write.file == before.file and write.offset == before.offset + len(before.data)


BLOCK_BYTES: Final = 64 * 1024
"""What a restore may read more than it needs at each end of a range. A larger chunk is no part of a pack."""

MOST_BLOCKS: Final = 2**22
"""Of a checkpoint: every process that restores it reads 4 bytes for each."""


def block_bytes_of(run: SaveRun) -> int:
    """Return the bytes of a block of what a save writes."""
    return block_bytes_for(run.progress.bytes_total * len(run.operation.processes))


def block_bytes_for(nbytes: int) -> int:
    """Return the bytes of a block: more in a large checkpoint, so that all sums take 16 MiB at most."""
    block_bytes = BLOCK_BYTES
    # Every process of every restore reads the sums, so they may not grow with the checkpoint.
    while nbytes > block_bytes * MOST_BLOCKS:
        block_bytes *= 2

    return block_bytes


def summed(piece: Piece, block_bytes: int) -> tuple[int, RunningSums | None]:
    """Return the crc32c of a piece, and what is recorded of its blocks, if it is not encoded and has several.

    The sum is carried on from block to block, so no byte is summed twice. Blocking.
    """
    data = piece.data
    # A part of an encoded chunk cannot be decoded, so it never needs a sum of its own.
    if piece.coded is not None or len(data) <= block_bytes:
        return crc32c(data), None

    sums, found = array("I"), 0
    for start in range(0, len(data), block_bytes):
        # The interpreter is kept: to wait for it again after these few microseconds would take longer.
        found = crc32c(data[start : start + block_bytes], found, gil_release_mode=0)
        sums.append(found)

    # The last one is the sum of the whole piece, which is recorded anyway.
    del sums[-1]
    if sys.byteorder == "big":
        sums.byteswap()

    return found, RunningSums(block_bytes, sums.tobytes())


@contextmanager
def _naming_leaf(leaves: Sequence[Leaf]) -> Generator[None]:
    """Have a `StorageError` of the block name the first of the leaves that were being written."""
    try:
        yield
    except StorageError as error:
        if error.key_path is None:
            error.key_path = leaves[0].info.key_path
        raise
