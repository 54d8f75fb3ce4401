"""Writes pieces to the places that the layout decided in advance, each leaf whole and in C order."""

from __future__ import annotations

__all__ = ("WriteArranged", "runs_of")

import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, final

from anyio import Lock, create_task_group
from crc32c import crc32c

from penstock.kernel.errors import PipelineError
from penstock.kernel.messages.save import StagedBatch, WrittenBatch
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.protocols.layouts import ArrangedDigests, ArrangedLayout, Arrangement, WrittenRange
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.stores import DataFile
from penstock.kernel.protocols.written import Written
from penstock.stages.common.batching import adjacent
from penstock.stages.common.planned_leaves import check_planned, plan_of
from penstock.stages.files.file_closing import closing
from penstock.stages.files.transfer_log import tell_transfers


@final
@dataclass(frozen=True, slots=True)
class WriteArranged:
    """Takes `StagedBatch`es, yields `WrittenBatch`es, and releases every lease it was handed.

    For layouts that are `ArrangedLayout`s. The chunks of a sharded array are brought together. After the
    last piece each file gets its head, with the checksums of what was written, and is synced once.

    Attributes:
        concurrency: Batches written at once, each by a thread.
        file_bytes: Not used: the layout decides how large files grow. It is here so that one configuration
            serves every layout.

    Raises:
        PipelineError: If the layout is not an `ArrangedLayout`.
        SpecError: If the layout cannot hold the leaves; nothing was written.
    """

    messages: ClassVar[Messages] = {StagedBatch: WrittenBatch}

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

    arrangement: Arrangement
    digests: ArrangedDigests


@final
class _Writer:
    __slots__ = ("_beginning", "_begun", "_files", "_layout", "_run")

    def __init__(self, run: SaveRun, layout: ArrangedLayout) -> None:
        self._run = run
        self._layout = layout
        self._beginning = Lock()
        self._begun: _Begun | None = None
        self._files: dict[str, DataFile] = {}

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

        async with create_task_group() as completing:
            for name in self._files:
                completing.start_soon(self._run.threads.run, self._complete, begun.digests, name)

        for document in begun.arrangement.documents:
            path = self._run.workspace.path(document.path)
            await self._run.threads.run(self._run.store.write_file, path, document.data)

        return
        yield

    def files(self) -> Iterable[DataFile]:
        """Every file that was opened."""
        return self._files.values()

    async def _begin(self, batch: StagedBatch) -> _Begun:
        """Make the arrangement and every file, once."""
        async with self._beginning:
            if self._begun is None:
                run = self._run
                plan = plan_of([batch])
                arrangement = await run.threads.run(
                    self._layout.arrange, run.path, plan.infos, plan.specs, run.custom_metadata
                )
                await run.workspace.open()
                await run.threads.run(self._create, arrangement, plan.specs)
                self._begun = _Begun(arrangement, self._layout.digests(arrangement, plan.specs))

            return self._begun

    def _create(self, arrangement: Arrangement, specs: Sequence[LeafSpec]) -> None:
        ends = {head.path: len(head.data) for head in arrangement.heads}
        for place, spec in zip(arrangement.places, specs, strict=True):
            if place is not None:
                ends[place.file] = max(ends[place.file], place.offset + spec.nbytes)

        for head in arrangement.heads:
            # Stored by the opening thread: a task cancelled meanwhile would lose the open file.
            file = self._run.store.create_data_file(self._run.workspace.path(head.path))
            self._files[head.path] = file
            file.allocate(ends[head.path])

    def _complete(self, digests: ArrangedDigests, name: str) -> None:
        """Write the head of a file, of which all else was written, and make the file durable."""
        file = self._files[name]
        file.write_at(0, [memoryview(digests.head(name))])
        file.sync()

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
        for run in adjacent(writes, _one_write):
            self._files[run[0].file].write_at(run[0].offset, [write.data for write in run])

        digests.add(ranges)
        return tuple(written)


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
