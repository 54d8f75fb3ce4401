"""Writes each chunk into a file of its own, for a layout that names them."""

from __future__ import annotations

__all__ = ("ChunkFileWriter",)

import os
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias, final

from penstock.kernel.errors import PipelineError
from penstock.kernel.messages.save import Piece, StagedBatch, WrittenBatch
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.layouts import FormattedLayout
from penstock.kernel.protocols.stores import DataFile
from penstock.kernel.protocols.written import Written
from penstock.kernel.storage.byte_placement import placement_of
from penstock.stages.files.block_checksums import block_bytes_of, summed
from penstock.stages.files.free_space import naming_leaf
from penstock.stages.messages.planned_leaves import check_encoded, saved_by_encoding

_Chunk: TypeAlias = tuple[int, tuple[int, ...]]


@dataclass(slots=True)
class _OpenFile:
    """The file of a chunk that is not completely written."""

    file: DataFile
    absent_bytes: int


@final
class ChunkFileWriter:
    """The actor of one save. A file is made durable, and closed, once its last byte was written.

    Args:
        run: Of the save.
        layout: Names the file of every chunk.
    """

    __slots__ = ("_all", "_document_bytes", "_folders", "_layout", "_lock", "_open", "_run")

    def __init__(self, run: SaveRun, layout: FormattedLayout) -> None:
        self._run = run
        self._layout = layout
        self._document_bytes = placement_of(run.store).document_bytes
        self._open: dict[_Chunk, _OpenFile] = {}
        self._all: list[DataFile] = []
        self._folders: set[str] = set()
        self._lock = Lock()

    async def __call__(self, batch: StagedBatch, /) -> WrittenBatch:
        try:
            await self._run.workspace.open()
            written = await self._run.threads.run(self._write, batch)
            for pending in batch.pending:
                await pending.wait()
        finally:
            batch.release()

        done = WrittenBatch(batch.leaves, written, handled=batch.pending, plan=batch.plan)
        self._run.progress.advance(len(batch.leaves), done.nbytes + saved_by_encoding(batch))
        return done

    async def finish(self) -> AsyncIterator[WrittenBatch]:
        return
        yield

    def files(self) -> Iterable[DataFile]:
        """Every file that was opened for a large chunk."""
        return self._all

    def _write(self, batch: StagedBatch) -> tuple[Written, ...]:
        return tuple(map(self._write_piece, batch.parts()))

    def _write_piece(self, piece: Piece) -> Written:
        check_encoded(piece)
        leaf = piece.leaf
        name = self._layout.chunk_file(leaf, piece.chunk)
        if name is None:
            raise PipelineError(f"the layout names no file for chunk {piece.chunk} of {leaf.info.key_path}")

        path = self._run.workspace.path(name)
        with naming_leaf(leaf):
            self._make_folder(os.path.dirname(name))
            if piece.nbytes == piece.chunk_nbytes and piece.nbytes < self._document_bytes:
                self._run.store.write_file(path, bytes(piece.data))
            else:
                self._write_part(piece, path)

        checksum, running = summed(piece, block_bytes_of(self._run))
        place = name, piece.start, piece.nbytes
        return Written(leaf.index, piece.chunk, piece.start, *place, checksum, piece.coded, running)

    def _write_part(self, piece: Piece, path: str) -> None:
        chunk = (piece.leaf.index, piece.chunk)
        with self._lock:
            opened = self._open.get(chunk)
            if opened is None:
                opened = _OpenFile(self._run.store.create_data_file(path), piece.chunk_nbytes)
                self._open[chunk] = opened
                self._all.append(opened.file)

        opened.file.write_at(piece.start, [piece.data])
        with self._lock:
            opened.absent_bytes -= piece.nbytes
            if opened.absent_bytes:
                return

            del self._open[chunk]

        opened.file.sync()
        opened.file.close()

    def _make_folder(self, folder: str) -> None:
        # Creating it twice is harmless, but no worker may go on before it exists.
        if folder not in self._folders:
            self._run.workspace.make_directory(folder)
            self._folders.add(folder)
