"""Writes pieces to the places that the layout decided in advance, each leaf whole and in C order."""

from __future__ import annotations

__all__ = ("WriteArranged", "runs_of")

import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from threading import Lock as ThreadLock
from typing import ClassVar, NamedTuple, final

from anyio import Lock
from crc32c import crc32c

from penstock.kernel.errors import PipelineError
from penstock.kernel.messages.save import SavePlan, StagedBatch, WrittenBatch
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.protocols.layouts import ArrangedDigests, ArrangedLayout, Arrangement, WrittenRange
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.store_capabilities import LongFiles, WritableTogether
from penstock.kernel.protocols.stores import DataFile
from penstock.kernel.protocols.written import Written
from penstock.kernel.reports.statistics import Advice
from penstock.stages.files.file_closing import closing
from penstock.stages.files.transfer_log import tell_transfers
from penstock.stages.messages.batching import adjacent
from penstock.stages.messages.planned_leaves import check_planned, plan_of


@final
@dataclass(frozen=True, slots=True)
class WriteArranged:
    """Takes `StagedBatch`es, yields `WrittenBatch`es, and releases every lease it was handed.

    For layouts that are `ArrangedLayout`s. The chunks of a sharded array are brought together. A file is
    created for its first piece. After its last one it gets its head, with the checksums of what was written,
    is synced once, and closed: so only files are open that are partly written. Of several processes that save
    together, each writes its parts into the same files, which the primary has made and completes.

    Attributes:
        concurrency: Batches written at once, each by a thread.
        file_bytes: Not used: the layout decides how large files grow. It is here so that one configuration
            serves every layout.

    Raises:
        PipelineError: If the layout is not an `ArrangedLayout`.
        SpecError: If the layout cannot hold the leaves; nothing was written.
    """

    messages: ClassVar[Messages] = {StagedBatch: WrittenBatch}
    advice: ClassVar[Advice] = Advice(
        work=(
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

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save. Its files are closed at the end, whatever happened."""
        if not isinstance(run.layout, ArrangedLayout):
            raise PipelineError(f"{type(run.layout).__name__} does not say in advance where each leaf lies")

        writer = _Writer(run, run.layout)
        async with closing(run.threads, writer.files):
            yield writer

        tell_transfers(run.events, "data.written", list(writer.files()))


class _Write(NamedTuple):
    """Bytes and their destination; sorts by file and offset."""

    file: str
    offset: int
    data: memoryview


@final
@dataclass(frozen=True, slots=True)
class _Begun:
    """What is known once the plan of the save is."""

    plan: SavePlan
    arrangement: Arrangement
    digests: ArrangedDigests
    files: Mapping[str, _File]


@dataclass(slots=True)
class _File:
    """A file of the arrangement."""

    end: int  #: its length, bytes
    absent_bytes: int = 0  #: of leaves, not written yet
    opened: DataFile | None = None
    is_complete: bool = False


@final
class _Writer:
    __slots__ = ("_all", "_beginning", "_begun", "_layout", "_lock", "_run")

    def __init__(self, run: SaveRun, layout: ArrangedLayout) -> None:
        self._run = run
        self._layout = layout
        self._beginning = Lock()
        self._begun: _Begun | None = None
        self._lock = ThreadLock()  # of the state of files
        self._all: list[DataFile] = []

    async def __call__(self, batch: StagedBatch, /) -> WrittenBatch:
        try:
            begun = await self._begin(batch)
            written = await self._run.threads.run(self._write, begun, batch)
            for pending in batch.pending:
                await pending.wait()
        finally:
            batch.release()

        self._run.progress.advance(len(batch.leaves), sum(part.nbytes for part in written))
        return WrittenBatch(batch.leaves, written, handled=batch.pending, plan=batch.plan)

    async def finish(self) -> AsyncIterator[WrittenBatch]:
        begun = self._begun
        if begun is None:  # no message came: commit reports that
            return
        if self._run.operation is not None:  # the primary completes the files, once all have written
            from penstock.kernel.messages.joint_plan import ArrangedPart  # one process needs nothing of it

            await self._run.threads.run(self._end_part, begun)
            yield WrittenBatch((), plan=begun.plan, arranged=ArrangedPart(begun.arrangement, begun.digests))
            return

        for name, file in begun.files.items():
            if not file.is_complete:  # no leaf in it has bytes; if some are missing, commit says so
                await self._run.threads.run(self._complete, begun, name)

        for document in begun.arrangement.documents:
            path = self._run.workspace.path(document.path)
            await self._run.threads.run(self._run.store.write_file, path, document.data)

    def files(self) -> Iterable[DataFile]:
        """Every file that was opened."""
        return self._all

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
                self._begun = _Begun(plan, arrangement, digests, _files_of(arrangement, plan.specs))

            return self._begun

    def _open(self, begun: _Begun, name: str) -> DataFile:
        """Return a file, which is created for whoever is first."""
        file = begun.files[name]
        with self._lock:
            if file.opened is None:
                file.opened = self._opened(self._run.workspace.path(name), file.end)
                self._all.append(file.opened)
                if self._run.operation is None:
                    file.opened.allocate(file.end)

            return file.opened

    def _opened(self, path: str, nbytes: int) -> DataFile:
        store = self._run.store
        if self._run.operation is None:
            if isinstance(store, LongFiles):
                return store.create_long_file(path, nbytes)

            return store.create_data_file(path)

        assert isinstance(store, WritableTogether), "the plan says that it is"
        return store.open_for_writing(path)

    def _end_part(self, begun: _Begun) -> None:
        """Make durable what this process wrote into files of all."""
        for file in begun.files.values():
            if file.opened is not None:
                file.opened.sync()
                file.opened.close()

    def _count(self, begun: _Begun, name: str, nbytes: int) -> None:
        """Note that so many bytes of leaves are in a file, and complete it if they were the last."""
        file = begun.files[name]
        with self._lock:
            file.absent_bytes -= nbytes
            if file.absent_bytes or not nbytes or self._run.operation is not None:
                return

        self._complete(begun, name)

    def _complete(self, begun: _Begun, name: str) -> None:
        """Write the head of a file, of which all else was written, make the file durable, and close it."""
        file = self._open(begun, name)
        file.write_at(0, [memoryview(begun.digests.head(name))])
        file.sync()
        file.close()
        begun.files[name].is_complete = True

    def _write(self, begun: _Begun, batch: StagedBatch) -> tuple[Written, ...]:
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

            written.append(
                Written(piece.leaf.index, piece.chunk, piece.start, place.file, place.offset, piece.nbytes, 0)
            )

        writes.sort(key=lambda write: write[:2])
        for name, in_one in groupby(writes, attrgetter("file")):
            file = self._open(begun, name)
            for run in adjacent(list(in_one), _one_write):
                file.write_at(run[0].offset, [write.data for write in run])

            digests.add({name: ranges[name]})
            self._count(begun, name, sum([part.nbytes for part in ranges[name]]))

        return tuple(written)


def _files_of(arrangement: Arrangement, specs: Sequence[LeafSpec]) -> Mapping[str, _File]:
    """Return every file of an arrangement, none of them created."""
    files = {head.path: _File(len(head.data)) for head in arrangement.heads}
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
    """Take the checksums of bytes that lie `at` bytes within a leaf, which begins at `first` in its file."""
    done, end = 0, len(data)
    while done < end:
        stop = min(end, done + block_bytes - (at + done) % block_bytes)
        part = data[done:stop]
        yield WrittenRange(first + at + done, stop - done, crc32c(part))
        done = stop


def _one_write(before: _Write, write: _Write) -> bool:
    """Whether a write follows another one in the same file."""
    return write.file == before.file and write.offset == before.offset + len(before.data)
