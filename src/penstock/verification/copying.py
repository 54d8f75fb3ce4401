"""Copies a finished checkpoint from one store to another, file by file, under a byte budget.

The copy knows files only, no leaves: it has the same bytes, whatever wrote them. Each range whose checksum
was recorded is compared on the way, so that damage is not copied. It is published in one step, when all of
it is durable.
"""

from __future__ import annotations

__all__ = ("COPY_WORKERS", "CheckpointCopier", "is_same_checkpoint")

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Final, final

from anyio import CancelScope, create_task_group, move_on_after
from anyio.from_thread import check_cancelled
from crc32c import crc32c

from penstock.handlers.formats.orbax import digest_in_mark
from penstock.handlers.formats.orbax.file_names import COMMIT_MARK
from penstock.handlers.formats.verification import RecordedRange
from penstock.handlers.stores.publishing.paths import temporary_path
from penstock.handlers.stores.publishing.reading import Reading, read_unchanged
from penstock.handlers.stores.publishing.workspace import Workspace
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import ChecksumError, CorruptCheckpointError, TruncatedDataError
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.protocols.build_place import Overwrite
from penstock.kernel.protocols.stores import DataFile, ReadableFile, Store
from penstock.verification.checkpoint_survey import survey_checkpoint

COPY_WORKERS: Final = 4
"""Blocks on their way at once, each in a thread: one stream alone does not fill a bucket's line."""

MOST_BLOCK: Final = 16 * 2**20
LEAST_BLOCK: Final = 2**16
_SHARE: Final = 4  # of the budget; saves and restores have the rest, however slow the target is
_CLEANING_S: Final = 60.0


@final
@dataclass(frozen=True, slots=True)
class CheckpointCopier:
    """Copies checkpoints from one store to another, or within one.

    Args:
        source: Where they are.
        target: Where they go.
        threads: For blocking calls; `COPY_WORKERS` of them are used at once.
        memory: Leases the blocks, which take a quarter of it at most.
    """

    source: Store
    target: Store
    threads: Threads
    memory: MemoryRegulator

    async def copy(
        self,
        path: str,
        destination: str,
        *,
        overwrite: bool = False,
        on_progress: Callable[[int], object] = lambda _: None,
    ) -> int:
        """Copy the checkpoint at `path` to `destination`, where it appears in one step, durable.

        While it is copied, no penstock on this machine deletes the source. If that is replaced meanwhile, the
        new one is copied.

        Args:
            path: A finished checkpoint, a directory.
            destination: Where it goes.
            overwrite: Replace what is there. A store that cannot do that in one step deletes it first.
            on_progress: Called with the bytes copied so far, in a worker thread.

        Returns:
            The bytes copied.

        Raises:
            CorruptCheckpointError: If the source is damaged; a `ChecksumError` for its data.
            DestinationExistsError: If something is at the destination.
            InUseError: If another process builds there.
            ReplacedError: If the source was replaced again and again.
            StorageError: If a medium refuses.

        Cancellation:
            Nothing is left at the destination.
        """
        copying = partial(self._copy, path, destination, overwrite, on_progress)
        return await read_unchanged(self.source, self.threads, path, copying)

    async def _copy(
        self,
        path: str,
        destination: str,
        overwrite: bool,
        on_progress: Callable[[int], object],
        reading: Reading,
    ) -> int:
        files = await self.threads.run(_files_of, reading.store, path, self.target.placement.document_bytes)
        at_once = self.target.directories is not None
        replaces: Overwrite = overwrite and (True if at_once else "delete-first")
        place = Workspace(
            self.target, self.threads, destination, temporary_path(destination), overwrite=replaces
        )
        try:
            await place.open()
            block = min(MOST_BLOCK, max(self.memory.limit // (_SHARE * COPY_WORKERS), LEAST_BLOCK))
            block = min(block, self.memory.limit)
            await self._fill(
                _Transfer(reading.store, self.target, path, place, files, block, on_progress), block
            )
            await reading.end()
            await place.publish()
        except BaseException:
            with move_on_after(_CLEANING_S, shield=True):
                await place.discard()

            raise
        finally:
            place.release()

        return files.nbytes

    async def _fill(self, transfer: _Transfer, block: int) -> None:
        """Write the data, then the documents, the mark last; each kind is durable before the next begins."""
        run, failures = self.threads.run, list[Exception]()

        async def work(others: CancelScope) -> None:
            lease = await self.memory.acquire(block)
            try:
                await run(transfer.copy_blocks, memoryview(bytearray(block)))
            except Exception as error:  # raised below, as it is and not in a group
                failures.append(error)
                others.cancel()
            finally:
                lease.release()

        await run(transfer.make_directories)
        try:
            async with create_task_group() as workers:
                for _ in range(COPY_WORKERS):
                    workers.start_soon(work, workers.cancel_scope)

            if failures:
                raise failures[0]

            await run(transfer.finish_data)
        finally:
            failures.clear()  # their tracebacks refer to this frame
            with CancelScope(shield=True):
                await run(transfer.close)

        await run(transfer.copy_documents)


def is_same_checkpoint(store: Store, path: str, other_store: Store, other: str) -> bool:
    """True if two checkpoints have one content, as far as their marks say; one without digests may. Blocking.

    A mark has the digest of the record of all documents and data.

    Raises:
        StorageError: If a medium refuses.
    """
    marks = [
        found.read_files([os.path.join(at, COMMIT_MARK)])[0]
        for found, at in ((store, path), (other_store, other))
    ]
    digests = [None if mark is None else digest_in_mark(mark) for mark in marks]
    return None in digests or digests[0] == digests[1]


@final
@dataclass(frozen=True, slots=True)
class _Block:
    """A part of a data file that one worker copies, with the ranges in it whose checksums are known."""

    name: str  #: of the file, in the checkpoint
    start: int
    end: int
    ranges: Sequence[RecordedRange] = ()


@final
@dataclass(frozen=True, slots=True)
class _Files:
    """The files of a checkpoint."""

    directories: Sequence[str]  #: in it, each before those below it
    data: Mapping[str, int]  #: name to length of what is copied in blocks
    documents: Sequence[str]  #: the other files, in the order in which they are written
    nbytes: int  #: of all
    ranges: Mapping[str, Sequence[RecordedRange]]  #: by file, by ascending offset

    def blocks(self, most: int) -> Iterator[_Block]:
        """Yield what is to be copied in blocks of at most so many bytes; a longer range is one block."""
        for name, nbytes in self.data.items():
            start, ranges, end = 0, list[RecordedRange](), 0
            for part in _parts(name, nbytes, self.ranges.get(name, ()), most):
                if end > start and part.end - start > most:
                    yield _Block(name, start, end, ranges)
                    start, ranges = end, []

                ranges.extend(part.ranges)
                end = part.end

            yield _Block(name, start, end, ranges)


def _parts(name: str, nbytes: int, ranges: Sequence[RecordedRange], most: int) -> Iterator[_Block]:
    """Yield a file in parts that can be copied apart: ranges that overlap together, and what is in none."""
    start = end = 0
    together: list[RecordedRange] = []
    for found in ranges:
        first = found.checksum.offset
        if first >= end:
            if together:
                yield _Block(name, start, end, together)

            yield from [_Block(name, at, min(at + most, first)) for at in range(end, first, most)]
            start, together = first, []

        together.append(found)
        end = max(end, first + found.checksum.nbytes)

    if together:
        yield _Block(name, start, end, together)

    yield from [_Block(name, at, min(at + most, nbytes)) for at in range(end, nbytes, most)]


def _files_of(store: Store, path: str, document_bytes: int) -> _Files:
    """List a checkpoint, with the checksums that were recorded of it. Blocking.

    Raises:
        CorruptCheckpointError: If a document is damaged, or a file is shorter than it was.
        StorageError: If the medium refuses.
    """
    survey = survey_checkpoint(store, path)
    for finding in survey.findings:
        if finding.kind != "unchecked":  # what has no checksum, as of other programs, is copied as it is
            leaf = next(iter(finding.key_paths), None)
            raise CorruptCheckpointError(finding.file, finding.problem, key_path=leaf)

    ranges: dict[str, list[RecordedRange]] = {}
    for found in sorted(survey.ranges, key=lambda found: found.checksum.offset):
        ranges.setdefault(os.path.relpath(found.file, path), []).append(found)

    directories, files = list[str](), dict[str, int]()
    _list_below(store, path, "", directories, files)
    for name, found_there in ranges.items():
        last = max(found.checksum.offset + found.checksum.nbytes for found in found_there)
        if last > files.get(name, 0):
            raise TruncatedDataError(os.path.join(path, name), last, files.get(name, 0))

    data = {name: size for name, size in files.items() if size >= document_bytes or name in ranges}
    documents = sorted(
        files.keys() - data.keys(), key=lambda name: (os.path.basename(name) == COMMIT_MARK, name)
    )
    return _Files(directories, data, documents, sum(files.values()), ranges)


def _list_below(store: Store, path: str, folder: str, directories: list[str], files: dict[str, int]) -> None:
    names = sorted(store.list_directory(os.path.join(path, folder)))
    inner = [os.path.join(folder, name) for name in names]
    for name, size in zip(inner, store.file_sizes([os.path.join(path, name) for name in inner]), strict=True):
        if size == -1:
            directories.append(name)
            _list_below(store, path, name, directories, files)
        elif size is not None:
            files[name] = size


@final
class _Transfer:
    """One copy under way. Its methods block, and are called in threads.

    Args:
        source: A store, or a snapshot of the checkpoint.
        target: Where it goes.
        path: The checkpoint.
        place: Where the copy is built.
        files: Of the checkpoint.
        most: Bytes of a block.
        on_progress: Called with the bytes copied so far.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        path: str,
        place: Workspace,
        files: _Files,
        most: int,
        on_progress: Callable[[int], object],
    ) -> None:
        self._source, self._target = source, target
        self._path, self._place = path, place
        self._files, self._on_progress = files, on_progress
        self._blocks = files.blocks(most)
        self._turn = Lock()  # of what threads share below
        self._open: dict[str, tuple[ReadableFile, DataFile]] = {}
        self._done = 0

    def copy_blocks(self, buffer: memoryview) -> None:
        """Copy blocks until none is left; several threads do so at once, each with a buffer."""
        while (block := self._next()) is not None:
            self._copy_block(block, buffer)

    def _next(self) -> _Block | None:
        with self._turn:
            block = next(self._blocks, None)
            if block is not None and block.name not in self._open:
                nbytes = self._files.data[block.name]
                reading = self._source.open_data_file(os.path.join(self._path, block.name))
                try:
                    writing = self._target.create_long_file(self._place.path(block.name), nbytes)
                except BaseException:
                    reading.close()
                    raise

                self._open[block.name] = reading, writing
                writing.allocate(nbytes)

            return block

    def _copy_block(self, block: _Block, buffer: memoryview) -> None:
        reading, writing = self._open[block.name]
        sums = [0] * len(block.ranges)
        for at in range(block.start, block.end, len(buffer)):
            check_cancelled()
            part = buffer[: min(len(buffer), block.end - at)]
            reading.read_at(at, [part])
            for number, found in enumerate(block.ranges):
                first = max(found.checksum.offset - at, 0)
                last = min(found.checksum.offset + found.checksum.nbytes - at, len(part))
                if first < last:
                    sums[number] = crc32c(part[first:last], sums[number])

            writing.write_at(at, [part])
            self._advance(len(part))

        for found, total in zip(block.ranges, sums, strict=True):
            if total != found.checksum.crc32c:
                leaf = next(iter(found.key_paths), None)
                raise ChecksumError(found.file, "the bytes are not those that were written", key_path=leaf)

    def _advance(self, nbytes: int) -> None:
        with self._turn:
            self._done += nbytes
            self._on_progress(self._done)

    def finish_data(self) -> None:
        """Make the data files durable."""
        for _, writing in self._open.values():
            check_cancelled()
            writing.sync()

    def close(self) -> None:
        """Close all files."""
        with ExitStack() as closing:
            for reading, writing in self._open.values():
                closing.callback(reading.close)
                closing.callback(writing.close)

    def make_directories(self) -> None:
        """Make the directories."""
        for name in self._files.directories:
            self._place.make_directory(name)

    def copy_documents(self) -> None:
        """Copy the other files, each durably, the mark last; then make all names durable."""
        for name in self._files.documents:
            check_cancelled()
            data = self._source.read_file(os.path.join(self._path, name))
            self._target.write_file(self._place.path(name), data)
            self._advance(len(data))

        for name in (*reversed(self._files.directories), ""):
            self._target.sync_directory(self._place.path(name))
