"""Fills host buffers from storage."""

from __future__ import annotations

__all__ = ("Read",)

import os
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, TypeAlias, final

from anyio import create_task_group
from anyio.lowlevel import checkpoint_if_cancelled
from crc32c import crc32c

from penstock.kernel.errors import ChecksumError, PipelineError, TruncatedDataError
from penstock.kernel.memory.buffers import anonymous_memory
from penstock.kernel.memory.byte_account import ByteLease
from penstock.kernel.messages.packs import HostPack, ReadLeaf, ReadPack
from penstock.kernel.messages.restore import HostBatch, ReadBatch
from penstock.kernel.messages.save import LeafBatch
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.protocols.files_handler import FilesHandler
from penstock.kernel.protocols.reads import CheckedRead, DirectRead, DriverRead, ScatterRead
from penstock.kernel.protocols.stores import ReadableFile, SummedReads
from penstock.kernel.reports.statistics import Advice
from penstock.stages.files.file_closing import closing
from penstock.stages.files.open_files import OpenFiles
from penstock.stages.files.packed_reads import read_pack
from penstock.stages.files.second_reads import read_twice
from penstock.stages.files.transfer_log import tell_transfers
from penstock.stages.messages.batching import adjacent
from penstock.stages.planning.leaf_reads import check_plain

FileRead: TypeAlias = DirectRead | ScatterRead | CheckedRead

LARGE = 2**20  #: bytes; a larger read gains nothing by being joined with its neighbours


@final
@dataclass(frozen=True, slots=True)
class Read:
    """Takes `ReadBatch`es, yields a `HostBatch` whenever leaves are complete.

    In a pipeline without `limit_bytes` it takes `LeafBatch`es.

    Small ranges that follow each other in a file are one read. Bytes whose checksum is known are
    checked. Reads through a driver run concurrently. A handler that keeps files of its own reads its leaves
    itself. The event `data.read` says how many bytes bypassed the page cache and how many went through it.

    Attributes:
        concurrency: Batches read at once, each by a thread; by default one for each processor, from 2
            to 8. A disk is fast only with several requests under way. But first touches of fresh memory keep
            a processor busy, and with more threads than processors the event loop has to wait.
        verify: Whether checksums are compared; a mismatch is a `ChecksumError`.
    """

    messages: ClassVar[Messages] = {ReadBatch: HostBatch, LeafBatch[ReadLeaf]: HostBatch}
    advice: ClassVar[Advice] = Advice(
        work=(
            "If the store can do more at once, raise `[restore.read] concurrency`; if not, read "
            "less: `only=`, or `mmap=True`."
        ),
        memory=("Raise `[memory] limit_bytes` (the argument `memory_limit`), or `restore_concurrent_bytes`."),
    )

    concurrency: int = field(
        default_factory=lambda: min(8, max(2, os.cpu_count() or 1)), metadata={"positive": True}
    )
    verify: bool = True

    @asynccontextmanager
    async def open(self, run: RestoreRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one restore. Its files are closed at the end, whatever happened."""
        reader = _Reader(run, verify=self.verify)
        try:
            async with closing(run.threads, reader.end):
                yield reader

            tell_transfers(run.events, "data.read", reader.files())
        finally:
            reader.release()


@final
class _Reader:
    __slots__ = ("_files", "_outstanding", "_run", "_staged", "_verify")

    def __init__(self, run: RestoreRun, *, verify: bool) -> None:
        self._run = run
        self._verify = verify
        self._files = OpenFiles(run.store)
        self._outstanding: dict[int, int] = {}
        self._staged: dict[int, ByteLease] = {}

    async def __call__(self, batch: ReadBatch | LeafBatch[ReadLeaf], /) -> HostBatch | None:
        if isinstance(batch, LeafBatch) and isinstance(batch.leaves, ReadPack):
            batch = ReadBatch((), (), pack=batch.leaves, plan=batch.plan)
        if isinstance(batch, LeafBatch):  # nothing limits what is in flight
            reads = tuple([read for leaf in batch.leaves for read in leaf.reads])
            batch = ReadBatch(tuple(batch.leaves), reads, handler=batch.handler, plan=batch.plan)
        if batch.handler is not None:
            return await self._load(batch, batch.handler)
        if batch.pack is not None:
            return await self._read_pack(batch, batch.pack)

        self._staged.update(batch.staged)
        for leaf in batch.leaves:
            self._outstanding.setdefault(leaf.index, len(leaf.reads))

        try:
            check_plain(batch.reads)
            await self._perform(batch)
        finally:
            batch.release_read()

        return self._complete(batch)

    async def _load(self, batch: ReadBatch, handler: FilesHandler) -> HostBatch:
        """Have a handler read its leaves from files of its own, one call per directory."""
        by_directory: dict[str, list[ReadLeaf]] = {}
        for leaf in batch.leaves:
            by_directory.setdefault(leaf.info.directory, []).append(leaf)

        ready: list[tuple[int, object]] = []
        try:
            for leaves in by_directory.values():
                values = await handler.load(leaves)
                ready += zip([leaf.index for leaf in leaves], values, strict=True)
                self._run.progress.advance(len(leaves), 0)
        except BaseException:
            batch.release()
            raise

        batch.release_read()
        staged = tuple([lease for _, lease in batch.staged])
        return HostBatch((), tuple(ready), staged, plan=batch.plan)

    async def _read_pack(self, batch: ReadBatch, pack: ReadPack) -> HostBatch:
        def read() -> HostPack:
            with self._files.lent(pack.file) as file:
                return read_twice(file, partial(read_pack, file, pack, verify=self._verify))

        try:
            host = await self._run.threads.run(read)
        finally:
            batch.release_read()

        self._run.progress.advance(len(pack), pack.nbytes)
        staged = tuple([lease for _, lease in batch.staged])
        return HostBatch((), staged=staged, packs=(host,), plan=batch.plan)

    def release(self) -> None:
        """Give back the leases of leaves that were never complete."""
        for lease in self._staged.values():
            lease.release()

    def files(self) -> Iterable[ReadableFile]:
        """Every file that was opened."""
        return self._files.files()

    def end(self) -> Iterable[ReadableFile]:
        """Open no more files, not even in a thread that was left behind; return those to close."""
        return self._files.end()

    async def _perform(self, batch: ReadBatch) -> None:
        names = {leaf.index: leaf.info.key_path for leaf in batch.leaves}
        from_files = [read for read in batch.reads if not isinstance(read, DriverRead)]
        if len(from_files) == len(batch.reads):
            if from_files:
                await self._run.threads.run(self._read_files, from_files, names)

            return

        performed: list[DriverRead] = []
        async with create_task_group() as drivers:
            for read in batch.reads:
                if isinstance(read, DriverRead):
                    drivers.start_soon(_perform, read, performed)

            if from_files:
                await self._run.threads.run(self._read_files, from_files, names)

        # A task group treats a cancellation that it did not request as the quiet end of a task.
        if len(from_files) + len(performed) < len(batch.reads):
            await checkpoint_if_cancelled()  # a cancellation of our own may not have been delivered here yet
            raise PipelineError("a driver's read ended early: something that it awaited was cancelled")

    def _complete(self, batch: ReadBatch) -> HostBatch | None:
        for read in batch.reads:
            self._outstanding[read.leaf] -= 1

        whole = tuple(leaf for leaf in batch.leaves if self._outstanding.get(leaf.index) == 0)
        for leaf in whole:
            del self._outstanding[leaf.index]

        self._run.progress.advance(sum([leaf.ends_leaf for leaf in whole]), batch.nbytes)
        if not whole and batch.leaves:
            return None

        staged = tuple(self._staged.pop(leaf.index) for leaf in whole if leaf.index in self._staged)
        return HostBatch(whole, staged=staged, plan=batch.plan)

    def _read_files(self, reads: Iterable[FileRead], names: dict[int, str]) -> None:
        by_file: dict[str, list[DirectRead | ScatterRead]] = defaultdict(list)
        for read in reads:
            if not isinstance(read, CheckedRead):
                by_file[read.file].append(read)
            elif not self._verify:
                by_file[read.file].extend(read.parts)
            elif read.is_short:
                by_file[read.file].append(read.at_once())
            else:
                self._read_checked(read, names)

        for path, wanted in by_file.items():
            wanted.sort(key=lambda read: read.offset)
            with self._files.lent(path) as file:
                for run in adjacent(wanted, _one_read):
                    read_twice(file, partial(self._read_run, file, run, names))

    def _read_checked(self, read: CheckedRead, names: dict[int, str]) -> None:
        with self._files.lent(read.file) as file:
            read_twice(file, partial(self._fill_checked, file, read, names))

    def _fill_checked(self, file: ReadableFile, read: CheckedRead, names: dict[int, str]) -> None:
        try:
            found = read.fill(file.read_at, crc32c)
        except TruncatedDataError as error:
            raise TruncatedDataError(
                error.path, error.needed, error.found, key_path=names[read.leaf]
            ) from error

        if read.differs(found):
            raise _differs(read, names)

    def _read_run(
        self, file: ReadableFile, run: Sequence[DirectRead | ScatterRead], names: dict[int, str]
    ) -> None:
        buffers = [read.into() if isinstance(read, DirectRead) else _scratch(read.nbytes) for read in run]
        try:
            found = self._fill(file, run, buffers)
        except TruncatedDataError as error:
            cut = next((read for read in run if read.offset + read.nbytes > error.found), run[-1])
            raise TruncatedDataError(
                error.path, error.needed, error.found, key_path=names[cut.leaf]
            ) from error

        for read, buffer, summed in zip(run, buffers, found, strict=True):
            if summed != (read.crc32c if self._verify else None):
                raise _differs(read, names)
            if isinstance(read, ScatterRead):
                read.scatter(buffer)

    def _fill(
        self, file: ReadableFile, run: Sequence[DirectRead | ScatterRead], buffers: Sequence[memoryview]
    ) -> list[int | None]:
        """Fill the buffers, and return the checksum of each whose bytes are to be compared."""
        compared = [self._verify and read.crc32c is not None for read in run]
        if compared[0] and run[0].nbytes >= LARGE and isinstance(file, SummedReads):
            return [file.read_summed(run[0].offset, buffers[0])]  # a large read is alone

        file.read_at(run[0].offset, buffers)
        return [crc32c(buffer) if is_one else None for buffer, is_one in zip(buffers, compared, strict=True)]


async def _perform(read: DriverRead, performed: list[DriverRead]) -> None:
    await read.perform()
    performed.append(read)


def _differs(read: FileRead, names: dict[int, str]) -> ChecksumError:
    start, end = read.covered if isinstance(read, CheckedRead) else (read.offset, read.offset + read.nbytes)
    problem = f"bytes {start} to {end} differ from those written"
    return ChecksumError(read.file, problem, key_path=names[read.leaf])


def _one_read(before: DirectRead | ScatterRead, read: DirectRead | ScatterRead) -> bool:
    """Whether a read follows another one in the file, and both are small."""
    return read.offset == before.offset + before.nbytes and max(read.nbytes, before.nbytes) < LARGE


def _scratch(nbytes: int) -> memoryview:
    """Return memory for bytes that are scattered later, page-aligned for a large read."""
    if nbytes < LARGE:
        return memoryview(bytearray(nbytes))

    return anonymous_memory(nbytes)
