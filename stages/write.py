"""Writes pieces into data files, at positions of its own choosing, and makes the files durable."""

from __future__ import annotations

__all__ = ("Write",)

import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import TypeAlias, final

from anyio import Lock, create_task_group
from crc32c import crc32c

from penstock.kernel.capabilities import FormattedLayout, ItemsLayout
from penstock.kernel.messages import Leaf, Pack, Piece, StagedBatch, Written, WrittenBatch, WrittenPack
from penstock.kernel.protocols import DataFile
from penstock.kernel.run import SaveRun
from penstock.kernel.stage import Actor
from penstock.stages.closing import closing
from penstock.stages.encode import check_encoded, saved_by_encoding
from penstock.stages.transfers import tell_transfers
from penstock.stages.write_chunk_files import ChunkFileWriter

ALIGNED_FROM = 2**20  # chunks this large begin on a page, for direct and mapped reads
PAGE = 4096
CACHE_LINE = 64  # where jax wants a buffer to begin that it uses in place; see `restore(mmap=True)`


@final
@dataclass(frozen=True, slots=True)
class Write:
    """Takes `StagedBatch`es, yields `WrittenBatch`es, and releases every lease it was handed.

    The chunks of a save lie one after another in a few data files; a chunk is whole in one file,
    wherever its pieces come from. After the last piece each file is synced once. How many bytes went
    past the page cache and how many through it is told by the event `data.written`. What third-party
    handlers write in the background is waited for here. A layout may want each chunk in a file of its
    own; then `write_chunk_files` does the work.

    Attributes:
        concurrency: Batches written at once, each by a thread.
        file_bytes: A data file that has grown to this size is followed by another one.
    """

    concurrency: int = field(default=4, metadata={"positive": True})
    file_bytes: int = field(default=2 * 2**30, metadata={"positive": True})

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save. Its files are closed on the way out, whatever happened."""
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
        "_placing",
        "_run",
    )

    def __init__(self, run: SaveRun, file_bytes: int) -> None:
        self._run = run
        self._file_bytes = file_bytes
        self._files: list[_OpenFile] = []
        self._filling: dict[str, _OpenFile] = {}  # by the folder that its name is relative to
        self._folder = run.layout.folder if isinstance(run.layout, ItemsLayout) else _no_folder
        self._only_folder = run.layout.only_folder if isinstance(run.layout, ItemsLayout) else ""
        self._chunks: dict[tuple[int, tuple[int, ...]], tuple[_OpenFile, int]] = {}
        self._placing = Lock()

    async def __call__(self, batch: StagedBatch, /) -> WrittenBatch:
        try:
            async with self._placing:  # a chunk is placed once, though workers hold pieces of it at once
                placed = [await self._place(piece) for piece in batch.pieces]
                packs = [
                    (pack, await self._reserve(pack.nbytes, folder))
                    for whole in batch.packs
                    for folder, pack in self._by_folder(whole)
                ]

            done = WrittenBatch(batch.leaves)
            if placed or packs:
                done = await self._run.threads.run(_write, batch.leaves, placed, packs)

            for pending in batch.pending:
                await pending.wait()
        finally:
            batch.release()

        self._run.progress.advance(len(batch.leaves), done.nbytes + saved_by_encoding(batch))
        return done

    async def finish(self) -> AsyncIterator[WrittenBatch]:
        async with create_task_group() as syncing:
            for opened in self._files:
                syncing.start_soon(self._run.threads.run, opened.file.sync)

        return
        yield

    def files(self) -> Iterator[DataFile]:
        """Every file that was opened."""
        return (opened.file for opened in self._files)

    async def _place(self, piece: Piece) -> _Placed:
        """Find the place of a piece; the first piece of a chunk reserves the whole of it."""
        check_encoded(piece)
        whole, folder = piece.chunk_nbytes, self._folder(piece.leaf)
        if piece.nbytes == whole:
            target, base = await self._reserve(whole, folder)
            return _Placed(piece, target, base)

        key = (piece.leaf.index, piece.chunk)
        if key not in self._chunks:
            self._chunks[key] = await self._reserve(whole, folder)

        target, base = self._chunks[key]
        return _Placed(piece, target, base + piece.start)

    def _by_folder(self, pack: Pack) -> Iterator[tuple[str, Pack]]:
        if self._only_folder is not None:
            yield self._only_folder, pack
            return

        at = 0
        for folder, group in groupby(pack.leaves, self._folder):
            leaves = tuple(group)
            end = at + sum([leaf.spec.nbytes for leaf in leaves])
            yield folder, Pack(leaves, pack.data[at:end])
            at = end

    async def _reserve(self, nbytes: int, folder: str) -> _Place:
        target = self._filling.get(folder)
        if target is None or target.end >= self._file_bytes:
            target = self._filling[folder] = await self._open_file(folder)

        step = PAGE if nbytes >= ALIGNED_FROM else CACHE_LINE if nbytes >= PAGE else 1
        base = -(-target.end // step) * step
        target.end = base + nbytes
        return target, base

    async def _open_file(self, folder: str) -> _OpenFile:
        name = os.path.join(folder, self._run.layout.data_file())
        await self._run.workspace.open(os.path.dirname(name))
        return await self._run.threads.run(self._create, name)

    def _create(self, name: str) -> _OpenFile:
        # Kept by the thread that opened it: a task that is cancelled meanwhile would lose it unclosed.
        run = self._run
        file = run.store.create_data_file(run.workspace.path(name))
        placed = sum([opened.end for opened in self._files])
        opened = _OpenFile(name, file)
        self._files.append(opened)
        # What large chunks skip to begin on a page is not counted: the file grows by it in the end.
        left = run.progress.bytes_total - placed
        if left >= ALIGNED_FROM and run.preallocate:
            file.allocate(min(left, self._file_bytes))

        return opened


def _no_folder(_: Leaf) -> str:
    return ""


def _write(
    leaves: tuple[Leaf, ...], placed: Sequence[_Placed], packs: Sequence[tuple[Pack, _Place]]
) -> WrittenBatch:
    for run in _adjacent(placed):
        run[0].target.file.write_at(run[0].offset, [entry.piece.data for entry in run])

    for pack, (target, offset) in packs:
        target.file.write_at(offset, [pack.data])

    written = tuple(
        Written(
            entry.piece.leaf.index,
            entry.piece.chunk,
            entry.piece.start,
            entry.target.name,
            entry.offset,
            entry.piece.nbytes,
            crc32c(entry.piece.data),
            entry.piece.coded,
        )
        for entry in placed
    )
    return WrittenBatch(leaves, written, tuple([_written(pack, *place) for pack, place in packs]))


def _written(pack: Pack, target: _OpenFile, offset: int) -> WrittenPack:
    ends = list(accumulate([leaf.spec.nbytes for leaf in pack.leaves]))
    checksums = tuple([crc32c(pack.data[start:end]) for start, end in zip([0, *ends], ends, strict=False)])
    return WrittenPack(pack.leaves, target.name, offset, pack.nbytes, checksums)


def _adjacent(placed: Sequence[_Placed]) -> Iterator[list[_Placed]]:
    """Yield runs of pieces that follow each other in one file, so that each is one write."""
    run: list[_Placed] = []
    for entry in placed:
        if run and (
            entry.target is not run[-1].target or entry.offset != run[-1].offset + run[-1].piece.nbytes
        ):
            yield run
            run = []

        run.append(entry)

    if run:
        yield run
