"""Writes pieces into data files, at positions of its own choosing, and makes the files durable."""

from __future__ import annotations

__all__ = ("Write",)

import os
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import ClassVar, TypeAlias, final

from anyio import Lock, create_task_group
from crc32c import crc32c

from penstock.kernel.messages.leaves import Leaf, in_columns
from penstock.kernel.messages.save import Pack, Piece, StagedBatch, WrittenBatch, WrittenPack
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.protocols.layouts import FormattedLayout, ItemsLayout
from penstock.kernel.protocols.stores import DataFile, WholeWrites
from penstock.kernel.protocols.written import Written
from penstock.kernel.reports.statistics import Advice
from penstock.kernel.storage.byte_placement import placement_of
from penstock.stages.files.block_checksums import block_bytes_of, summed
from penstock.stages.files.chunk_files import ChunkFileWriter
from penstock.stages.files.file_closing import closing
from penstock.stages.files.free_space import naming_leaf
from penstock.stages.files.transfer_log import tell_transfers
from penstock.stages.messages.batching import adjacent
from penstock.stages.messages.planned_leaves import check_encoded, saved_by_encoding


@final
@dataclass(frozen=True, slots=True)
class Write:
    """Takes `StagedBatch`es, yields `WrittenBatch`es, and releases every lease it was handed.

    The chunks of a save lie one after another in a few data files; a chunk is whole in one file,
    wherever its pieces come from. Each file is synced once: after the last piece, or earlier if there are
    many. The event `data.written` says how many bytes bypassed the page cache and how many went through it.
    Background writes of third-party handlers are waited for here. If the layout wants each chunk in a file
    of its own, `write_chunk_files` does the work.

    Attributes:
        concurrency: Batches written at once, each by a thread.
        file_bytes: A data file that has grown to this size is followed by another one. None for the size
            that the store prefers.
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
        layout = run.layout
        writer: _Writer | ChunkFileWriter = _Writer(run, self.file_bytes)
        if isinstance(layout, FormattedLayout) and not layout.save_format.ocdbt:
            writer = ChunkFileWriter(run, layout)

        async with closing(run.threads, writer.files):
            yield writer

        tell_transfers(run.events, "data.written", list(writer.files()))


@dataclass(slots=True)
class _OpenFile:
    """A data file being filled."""

    name: str  #: relative to the checkpoint
    file: DataFile
    end: int = 0
    due: int = 0  #: bytes that are placed in it but not yet written


_Place: TypeAlias = tuple[_OpenFile, int]
"""A file, and an offset in it."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A piece with where it goes."""

    piece: Piece
    target: _OpenFile
    offset: int


@final
class _Writer:
    __slots__ = (
        "_chunks",
        "_file_bytes",
        "_files",
        "_filling",
        "_folder",
        "_only_folder",
        "_own_folder",
        "_placed",
        "_placement",
        "_placing",
        "_preallocate",
        "_run",
        "_unsynced",
    )

    def __init__(self, run: SaveRun, file_bytes: int | None) -> None:
        self._run = run
        self._placement = placement_of(run.store)
        self._file_bytes = self._placement.file_bytes if file_bytes is None else file_bytes
        self._files: list[_OpenFile] = []
        self._unsynced: list[_OpenFile] = []
        self._placed = 0  # bytes of all files
        self._filling: dict[str, _OpenFile] = {}  # by the folder that their names are relative to
        self._folder = run.layout.folder if isinstance(run.layout, ItemsLayout) else _no_folder
        self._only_folder = run.layout.only_folder if isinstance(run.layout, ItemsLayout) else ""
        self._own_folder = ""
        if run.operation is not None and isinstance(run.layout, FormattedLayout):
            self._own_folder = run.layout.process_folder(run.operation.process_index)

        self._chunks: dict[tuple[int, tuple[int, ...]], tuple[_OpenFile, int]] = {}
        self._placing = Lock(fast_acquire=True)
        self._preallocate = True

    async def __call__(self, batch: StagedBatch, /) -> WrittenBatch:
        try:
            done = await self._write_all(batch)
            for pending in batch.pending:
                await pending.wait()
        finally:
            batch.release()

        self._run.progress.advance(len(batch.leaves), done.nbytes + saved_by_encoding(batch))
        return done

    async def _write_all(self, batch: StagedBatch) -> WrittenBatch:
        """Write a batch: all at once, unless that opens many files."""
        loose: list[Piece] = []
        kept = [part for whole in batch.packs for part in self._small_enough(whole, loose)]
        pieces = iter((*batch.pieces, *loose))
        packs = (found for whole in kept for found in self._by_folder(whole))
        done = WrittenBatch(batch.leaves, handled=batch.pending, plan=batch.plan)
        while True:
            # A chunk is placed once, although several workers may hold pieces of it.
            async with self._placing:
                if batch.plan is not None:
                    self._preallocate = batch.plan.sizes_known

                placed, located = await self._place_some(pieces, packs)
            if not placed and not located:
                return done

            blocks = block_bytes_of(self._run)
            some = await self._run.threads.run(
                _write, batch.leaves, placed, located, blocks, self._file_bytes
            )
            done = replace(done, written=done.written + some.written, packs=done.packs + some.packs)
            for entry in placed:
                entry.target.due -= entry.piece.nbytes
            for pack, (target, _) in located:
                target.due -= pack.nbytes

            await self._finish_full()

    async def _place_some(
        self, pieces: Iterator[Piece], packs: Iterator[tuple[str, Pack]]
    ) -> tuple[list[_Placed], list[tuple[Pack, _Place]]]:
        """Find places for the rest of a batch, or as much of it as fits a few new files."""
        most = len(self._files) + self._placement.full_files  # all of them wait to be full
        placed: list[_Placed] = []
        located: list[tuple[Pack, _Place]] = []
        for piece in pieces:
            placed.append(await self._place(piece))
            if len(self._files) >= most:
                return placed, located

        for folder, pack in packs:
            with naming_leaf(pack.leaves[0]):
                located.append((pack, await self._reserve(pack.nbytes, folder)))

            if len(self._files) >= most:
                break

        return placed, located

    async def finish(self) -> AsyncIterator[WrittenBatch]:
        async with create_task_group() as syncing:
            for opened in self._unsynced:
                syncing.start_soon(self._run.threads.run, opened.file.sync)

        return
        yield

    async def _finish_full(self) -> None:
        """Sync and close files that are complete, if there are many of them."""
        filling = [id(opened) for opened in self._filling.values()]
        full = [opened for opened in self._unsynced if opened.due == 0 and id(opened) not in filling]
        if len(full) < self._placement.full_files:
            return

        gone = {id(opened) for opened in full}  # before the first await, so that no other worker does it too
        self._unsynced = [opened for opened in self._unsynced if id(opened) not in gone]
        await self._run.threads.run(_sync_and_close, [opened.file for opened in full])

    def files(self) -> Iterator[DataFile]:
        """Every file that was opened."""
        return (opened.file for opened in self._files)

    async def _place(self, piece: Piece) -> _Placed:
        """Find the place of a piece; the first piece of a chunk reserves the whole of it."""
        check_encoded(piece)
        whole, folder = piece.chunk_nbytes, self._folder(piece.leaf)
        with naming_leaf(piece.leaf):
            if piece.nbytes == whole:
                target, base = await self._reserve(whole, folder)
                return _Placed(piece, target, base)

            key = (piece.leaf.index, piece.chunk)
            if key not in self._chunks:
                self._chunks[key] = await self._reserve(whole, folder)

        target, base = self._chunks[key]
        return _Placed(piece, target, base + piece.start)

    def _small_enough(self, pack: Pack, loose: list[Piece]) -> Iterator[Pack]:
        """Yield a pack without the leaves that are larger than a data file: their chunks go into `loose`."""
        if pack.nbytes <= self._file_bytes or max(pack.sizes) <= self._file_bytes:
            yield pack
            return

        at = first = 0
        for is_large, group in groupby(pack.sizes, lambda size: size > self._file_bytes):
            sizes = list(group)
            part = Pack(pack.leaves[first : first + len(sizes)], pack.data[at : at + sum(sizes)])
            first, at = first + len(sizes), at + sum(sizes)
            if is_large:
                loose.extend(part.pieces())
            else:
                yield part

    def _by_folder(self, pack: Pack) -> Iterator[tuple[str, Pack]]:
        if self._only_folder is not None:
            for part in self._fitting(pack):
                yield self._only_folder, part

            return

        at = 0
        first = 0
        for folder, group in groupby(pack.leaves, self._folder):
            leaves = pack.leaves[first : first + len(list(group))]
            first += len(leaves)
            end = at + sum(in_columns(leaves).sizes)
            for part in self._fitting(Pack(leaves, pack.data[at:end])):
                yield folder, part

            at = end

    def _fitting(self, pack: Pack) -> Iterator[Pack]:
        """Yield the parts of a pack, if it is larger than a data file: each grows one file to its size."""
        if pack.nbytes <= self._file_bytes:
            yield pack
            return

        at = first = end = 0
        for number, size in enumerate(pack.sizes, start=1):
            end += size
            if end - at >= self._file_bytes or number == len(pack.leaves):
                yield Pack(pack.leaves[first:number], pack.data[at:end])
                at, first = end, number

    async def _reserve(self, nbytes: int, folder: str) -> _Place:
        target = self._filling.get(folder)
        if target is None or target.end >= self._file_bytes:
            target = self._filling[folder] = await self._open_file(folder)
            self._unsynced.append(target)  # only once it is filled: until then it would look full

        step = self._placement.step(nbytes)
        base = -(-target.end // step) * step
        self._placed += base + nbytes - target.end
        target.end = base + nbytes
        target.due += nbytes
        return target, base

    async def _open_file(self, folder: str) -> _OpenFile:
        name = os.path.join(folder, self._own_folder, self._run.layout.data_file())
        await self._run.workspace.open(os.path.dirname(name))
        return await self._run.threads.run(self._create, name)

    def _create(self, name: str) -> _OpenFile:
        # Stored by the opening thread: a task cancelled meanwhile would lose the open file.
        run = self._run
        file = run.store.create_data_file(run.workspace.path(name))
        opened = _OpenFile(name, file)
        self._files.append(opened)
        # Gaps before page-aligned chunks are not counted: the file merely grows by them.
        left = run.progress.bytes_total - self._placed
        if left >= self._placement.page_from_bytes and self._preallocate:
            file.allocate(min(left, self._file_bytes))

        return opened


def _no_folder(_: Leaf) -> str:
    return ""


def _sync_and_close(files: Sequence[DataFile]) -> None:
    for file in files:
        file.sync()
        file.close()


def _write(
    leaves: Sequence[Leaf],
    placed: Sequence[_Placed],
    packs: Sequence[tuple[Pack, _Place]],
    block_bytes: int,
    file_bytes: int,
) -> WrittenBatch:
    for run in adjacent(placed, _one_write):
        with naming_leaf(run[0].piece.leaf):
            _write_at(run[0].target, run[0].offset, [entry.piece.data for entry in run], file_bytes)

    for pack, (target, offset) in packs:
        with naming_leaf(pack.leaves[0]):
            _write_at(target, offset, [pack.data], file_bytes)

    written = tuple([_written_piece(entry, block_bytes) for entry in placed])
    return WrittenBatch(leaves, written, tuple([_written(pack, *place) for pack, place in packs]))


def _written_piece(entry: _Placed, block_bytes: int) -> Written:
    piece = entry.piece
    checksum, running = summed(piece, block_bytes)
    place = entry.target.name, entry.offset, piece.nbytes
    return Written(piece.leaf.index, piece.chunk, piece.start, *place, checksum, piece.coded, running)


def _write_at(target: _OpenFile, offset: int, buffers: Sequence[memoryview], file_bytes: int) -> None:
    """Write buffers one after another; if they are the whole of a full file, from where they lie."""
    file, (first, *others) = target.file, buffers
    is_whole = not others and offset == 0 and first.nbytes == target.end >= file_bytes
    if is_whole and isinstance(file, WholeWrites):
        file.write_whole(first)
    else:
        file.write_at(offset, buffers)


def _written(pack: Pack, target: _OpenFile, offset: int) -> WrittenPack:
    data, ends = pack.data, list(accumulate(pack.chunk_sizes))
    checksums = array("I", [crc32c(data[start:end]) for start, end in zip([0, *ends], ends, strict=False)])
    return WrittenPack(pack.leaves, target.name, offset, pack.nbytes, checksums)


def _one_write(before: _Placed, entry: _Placed) -> bool:
    """Whether a piece follows another one in the same file."""
    return entry.target is before.target and entry.offset == before.offset + before.piece.nbytes
