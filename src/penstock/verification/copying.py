"""Copies a finished checkpoint from one store to another, file by file, under a byte budget.

The copy knows files only, no leaves: it has the same bytes, whatever wrote them. Each range whose checksum
was recorded is compared on the way, so that damage is not copied. It is published in one step, when all of
it is durable.

The processes of a job copy together: each brings its files, by one operation as in a save. What each of them
has on a disk of its own becomes one checkpoint where all see it.
"""

from __future__ import annotations

__all__ = ("COPY_WORKERS", "CheckpointCopier", "CopySource", "is_same_checkpoint", "lengths_below")

import errno
import hashlib
import heapq
import mmap
import os
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, Final, NamedTuple, final

import msgpack
from anyio import CancelScope, move_on_after
from anyio.from_thread import check_cancelled
from crc32c import crc32c

from penstock.handlers.formats.orbax.checkpoint_documents import documents_of, identity_in_mark
from penstock.handlers.formats.orbax.file_names import COMMIT_MARK
from penstock.handlers.formats.orbax.joined_parts import FileShare, JoinedParts, Move, PartRecord, join_parts
from penstock.handlers.formats.verification import RecordedRange
from penstock.handlers.stores.publishing.paths import temporary_path
from penstock.handlers.stores.publishing.reading import Reading, Snapshots, read_unchanged, reading
from penstock.handlers.stores.publishing.workspace import Workspace
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import (
    ChecksumError,
    CorruptCheckpointError,
    NotAFileError,
    PeerError,
    ReplacedError,
    StorageError,
    TruncatedDataError,
)
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.pipeline.together import at_once, together
from penstock.kernel.protocols.build_place import Overwrite
from penstock.kernel.protocols.coordinator import Operation
from penstock.kernel.protocols.stores import DataFile, Hold, NoHold, ReadableFile, Store
from penstock.kernel.protocols.written import Document
from penstock.stages.files import write_each
from penstock.verification.checkpoint_survey import survey_checkpoint

COPY_WORKERS: Final = 4
"""Blocks on their way at once, each in a thread: one stream alone does not fill a bucket's line."""

MOST_BLOCK: Final = 16 * 2**20
LEAST_BLOCK: Final = 2**16
_SHARE: Final = 4  # of the budget; saves and restores have the rest, however slow the target is
_CLEANING_S: Final = 60.0
_PARTS: Final = "_PENSTOCK_PARTS"
"""Where processes tell the primary what is in their parts, and the primary what each of them brings."""


@final
class CopySource(NamedTuple):
    """A finished checkpoint, or a part of one."""

    store: Store
    path: str


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
            path: A finished checkpoint, a directory or a file.
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
        return await read_unchanged(self.source, self.threads, path, copying, self._hold, Snapshots())

    def _hold(self, path: str) -> Hold:
        """Hold what is copied, or it might be published without files that were deleted meanwhile."""
        try:
            return self.source.hold_reading(path)
        except StorageError as error:
            if error.errno == errno.EBUSY:
                raise

            return NoHold()  # a file, or a medium without holds

    async def _copy(
        self,
        path: str,
        destination: str,
        overwrite: bool,
        on_progress: Callable[[int], object],
        reading: Reading,
    ) -> int:
        run, source = self.threads.run, CopySource(reading.store, path)
        files = await run(_files_of, source, self.target.placement.document_bytes)
        place = self._place(destination, overwrite, file=files.only)
        try:
            await place.open()
            progress = _Progress(on_progress)
            await self._fill(place, files, progress)
            await run(files.write_documents, self.target, place, progress)
            await reading.end()
            await place.publish()
        except BaseException:
            with move_on_after(_CLEANING_S, shield=True):
                await place.discard()

            raise
        finally:
            place.release()

        return files.nbytes

    async def copy_together(
        self,
        operation: Operation,
        sources: Mapping[int, CopySource],
        destination: str,
        *,
        processes: Sequence[int] = (),
        overwrite: bool = False,
        prepare: Callable[[], Awaitable[object]],
    ) -> int:
        """Copy a checkpoint together with the other processes of a job; all call it, and all or none succeed.

        On disks of their own each copies its part. Otherwise the parts of all become one checkpoint; or all
        see the source, and each copies some of its files.

        Args:
            operation: On the destination, not joined yet.
            sources: What this process brings: parts, by the process that saved them, or the checkpoint.
            destination: Where it goes.
            processes: Who saved the parts; none if they are no parts.
            overwrite: As for `copy`.
            prepare: Called first, when the others hear of a failure.

        Returns:
            The bytes that this process copied.

        Raises:
            PeerError: If another process failed, or did not come.
            CorruptCheckpointError: As `copy`; also if a part is missing.
            PenstockError: As `copy`.

        Cancellation:
            The others hear of it. Nothing is left at the destination.
        """
        place = self._place(destination, overwrite, joins=not operation.publishes)
        try:
            async with operation.running(place.take_back), AsyncExitStack() as held:
                operation.at("prepare")
                await prepare()
                readings = [
                    await held.enter_async_context(reading(source.store, self.threads, source.path))
                    for source in sources.values()
                ]

                async def end_reading() -> None:
                    for each in readings:
                        await each.end()

                files = await self._copy_share(operation, place, sources, processes, end_reading)
                if operation.is_primary:
                    await end_reading()

                operation.at("publish")
                await operation.publish(place.publish)
        except BaseException as error:
            with move_on_after(_CLEANING_S, shield=True):
                await place.discard()
                if isinstance(error, PeerError):  # on local disks it counts only if all have published
                    await place.withdraw()

            raise
        finally:
            place.release()

        return files.nbytes

    async def _copy_share(
        self,
        operation: Operation,
        place: Workspace,
        sources: Mapping[int, CopySource],
        processes: Sequence[int],
        end_reading: Callable[[], Awaitable[object]],
    ) -> _Files:
        """Copy what this process brings; return when all have, and nothing is left but to publish.

        Then no process but the primary reads sources any more: once that has published, they may be removed.
        """
        run, small = self.threads.run, self.target.placement.document_bytes
        found = {index: await run(_files_of, source, small) for index, source in sources.items()}
        joins = bool(processes) and not operation.is_local
        parts: dict[int, PartRecord] = {}
        if joins:
            parts = {
                index: await run(PartRecord.read, source.store, source.path, found[index].lengths)
                for index, source in sources.items()
            }

        own = next(iter(found.values()), _Files())
        listing = () if processes else sorted(own.lengths.items())  # all see it, and see the same
        plan = repr((operation.path, sorted(processes), listing))

        async def begin(_: Mapping[int, bytes]) -> tuple[str, bytes]:
            if not operation.is_local and not operation.is_alone:
                place.build_below(operation.identity)

            await place.open()
            return place.path(""), b""

        operation.at("agree")
        digest = hashlib.sha256(plan.encode("utf-8", "surrogatepass")).digest()
        await operation.agree(digest, lambda: [f"the copy\t{plan}"], begin, enter=place.enter)
        operation.at("write")
        if joins:
            files = await self._joined(operation, place, found, parts, processes)
        elif operation.is_local:
            files = own
        else:
            files = own.divided(operation.processes.index(operation.process_index), len(operation.processes))

        progress = _Progress()
        await self._fill(place, files, progress)
        if operation.is_local:
            await run(files.write_documents, self.target, place, progress)

        async def bring() -> bytes:
            await end_reading()
            return b""  # all that it has to say is at the place

        async def merge(_: Mapping[int, bytes]) -> None:
            if not operation.is_local:
                await run(self.target.remove_tree, place.path(_parts_folder(operation)))
                await run(files.write_documents, self.target, place, progress)

        operation.at("commit")
        await operation.commit(bring, merge)
        return files

    async def _joined(
        self,
        operation: Operation,
        place: Workspace,
        found: Mapping[int, _Files],
        parts: Mapping[int, PartRecord],
        processes: Sequence[int],
    ) -> _Files:
        """Tell the primary what is in the parts here; return what is to be brought of them.

        What is told may be many MiB, so it is in files, which are removed before all is published.
        """
        run, target, folder = self.threads.run, self.target, _parts_folder(operation)

        def tell() -> None:
            place.make_directory(folder)
            for index, part in parts.items():
                target.write_file(place.path(f"{folder}/{index}"), part.encoded())

        def decide() -> JoinedParts:
            known = dict(parts)
            for index in processes:
                if index not in known:
                    file = place.path(f"{folder}/{index}")
                    if operation.is_alone or target.kind(file) is None:
                        raise CorruptCheckpointError(
                            place.final, f"no process has the part of process {index}"
                        )

                    known[index] = PartRecord.decoded(file, target.read_file(file))

            if len({part.save for part in known.values()}) > 1:  # one of them was saved again just now
                raise ReplacedError(place.final)

            joined = join_parts(known, time.time_ns())
            for index in processes:
                if index not in parts:
                    target.write_file(place.path(f"{folder}/{index}-brings"), _encoded(joined.shares[index]))

            return joined

        def hear(index: int) -> Mapping[str, FileShare]:
            file = place.path(f"{folder}/{index}-brings")
            return _decoded(file, target.read_file(file))

        if not operation.is_primary:
            await run(tell)

        await operation.meet("told")
        joined = await run(decide) if operation.is_primary else None
        await operation.meet("chosen")
        data: dict[str, _Data] = {}
        for index, files in found.items():
            shares = joined.shares[index] if joined is not None else await run(hear, index)
            data |= files.needed(shares)

        documents = () if joined is None else joined.documents
        names = {*data, *[document.path for document in documents]}
        nbytes = sum([len(document.data) for document in documents])
        return _Files(_directories_of(names), data, lambda: documents, nbytes)

    def _place(
        self, destination: str, overwrite: bool, *, joins: bool = False, file: str | None = None
    ) -> Workspace:
        at_once = self.target.directories is not None
        replaces: Overwrite = overwrite and (True if at_once else "delete-first")
        beside = temporary_path(destination)
        return Workspace(
            self.target, self.threads, destination, beside, overwrite=replaces, joins=joins, file=file
        )

    async def _fill(self, place: Workspace, files: _Files, progress: _Progress) -> None:
        """Write the data, durably."""
        block = min(MOST_BLOCK, max(self.memory.limit // (_SHARE * COPY_WORKERS), LEAST_BLOCK))
        lengths = [data.share.nbytes for data in files.data.values()]
        block = min(block, max([LEAST_BLOCK, *lengths]), self.memory.limit)
        n_workers = min(COPY_WORKERS, sum([-(-nbytes // block) for nbytes in lengths]))
        transfer = _Transfer(self.target, place, files, block, progress)
        run = self.threads.run

        def copy() -> None:
            # A bytearray would be filled with zeros first, and all other threads would wait for that.
            transfer.copy_blocks(memoryview(mmap.mmap(-1, block)))

        async def work() -> None:
            lease = await self.memory.acquire(block)
            try:
                await run(copy)
            finally:
                lease.release()

        await run(transfer.make_directories)
        try:
            await together([work] * n_workers)
            await run(transfer.finish_data)
        finally:
            with CancelScope(shield=True):
                await run(transfer.close)


def is_same_checkpoint(store: Store, path: str, other_store: Store, other: str) -> bool:
    """True if two checkpoints have one content, as far as their marks say; one without digests may. Blocking.

    A mark has the digest of the record of all documents and data. With another codec it has that of the
    checkpoint it was made of, too, which counts then.

    Raises:
        StorageError: If a medium refuses.
    """
    marks = [
        found.read_files([os.path.join(at, COMMIT_MARK)])[0]
        for found, at in ((store, path), (other_store, other))
    ]
    digests = [None if mark is None else identity_in_mark(mark) for mark in marks]
    return None in digests or digests[0] == digests[1]


def _parts_folder(operation: Operation) -> str:
    return f"{_PARTS}-{operation.identity}"


def _encoded(shares: Mapping[str, FileShare]) -> bytes:
    return msgpack.packb({name: [share.nbytes, *share.moves] for name, share in shares.items()})


def _decoded(path: str, data: bytes) -> Mapping[str, FileShare]:
    try:
        told: dict[str, Any] = msgpack.unpackb(data)
        return {
            name: FileShare(int(nbytes), tuple([Move(*map(int, move)) for move in moves]))
            for name, (nbytes, *moves) in told.items()
        }
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise CorruptCheckpointError(path, f"does not say what is to be brought: {error}") from error


def _directories_of(names: Iterable[str]) -> list[str]:
    """Return the directories that files are in, each before those below it."""
    found: set[str] = set()
    for name in names:
        folder = os.path.dirname(name)
        while folder and folder not in found:
            found.add(folder)
            folder = os.path.dirname(folder)

    return sorted(found)


@final
class _Progress:
    """Adds up the bytes that threads have copied.

    Args:
        on_progress: Called with the bytes copied so far.
    """

    def __init__(self, on_progress: Callable[[int], object] = lambda _: None) -> None:
        self._on_progress = on_progress
        self._turn = Lock()
        self._done = 0

    def add(self, nbytes: int) -> None:
        """Note that so many more are copied."""
        with self._turn:
            self._done += nbytes
            self._on_progress(self._done)


@final
@dataclass(frozen=True, slots=True)
class _Block:
    """A part of a data file that one worker copies, with the ranges in it whose checksums are known."""

    name: str  #: of the file, in the checkpoint
    start: int
    end: int
    ranges: Sequence[RecordedRange] = ()
    shift: int = 0  #: how much further on it comes to be in the file that is written


@final
@dataclass(frozen=True, slots=True)
class _Data:
    """A data file that is copied, or what is needed of it."""

    source: CopySource
    share: FileShare
    ranges: Sequence[RecordedRange] = ()  #: of all of the file, by ascending offset


@final
@dataclass(frozen=True, slots=True)
class _Files:
    """The files of a checkpoint that this process copies."""

    directories: Sequence[str] = ()  #: in it, each before those below it
    data: Mapping[str, _Data] = field(default_factory=dict[str, _Data])  #: what is copied in blocks
    documents: Callable[[], Iterable[Document]] = tuple[Document, ...]
    """Reads the other files, one after another, in the order in which they are written. Blocking."""
    document_bytes: int = 0  #: of these
    lengths: Mapping[str, int] = field(default_factory=dict[str, int])  #: of all files, where they are
    source: CopySource | None = None  #: where that is, if it is one place
    only: str | None = None  #: the file that is the checkpoint; None for a directory

    @property
    def nbytes(self) -> int:
        """Of all."""
        return self.document_bytes + sum([data.share.nbytes for data in self.data.values()])

    def divided(self, number: int, count: int) -> _Files:
        """Return what one of several processes copies that all see them: the largest files go first."""
        loads = [(0, each) for each in range(count)]
        mine: dict[str, _Data] = {}
        for name in sorted(self.data, key=lambda name: (-self.lengths[name], name)):
            load, least = loads[0]
            heapq.heapreplace(loads, (load + self.lengths[name], least))
            if least == number:
                mine[name] = self.data[name]

        return replace(self, data=mine, document_bytes=self.document_bytes if number == 0 else 0)

    def needed(self, shares: Mapping[str, FileShare]) -> Mapping[str, _Data]:
        """Return what is needed of these files."""
        assert self.source is not None, "a part is in one place"
        known, alone = self.data, _Data(self.source, FileShare(0, ()))  # a small file has no checksum
        return {name: replace(known.get(name, alone), share=share) for name, share in shares.items()}

    def blocks(self, most: int) -> Iterator[_Block]:
        """Yield what is to be copied in blocks of at most so many bytes; a longer range is one block."""
        for name, data in self.data.items():
            moves = data.share.moves
            for first, last, to in [move for move in moves if move.start < move.end] or moves[:1]:
                at, behind = (
                    bisect_left(data.ranges, edge, key=lambda found: found.checksum.offset)
                    for edge in (first, last)
                )
                start, ranges, end = first, list[RecordedRange](), first
                for part in _parts(name, (first, last), data.ranges[at:behind], most):
                    if end > start and part.end - start > most:
                        yield _Block(name, start, end, ranges, to - first)
                        start, ranges = end, []

                    ranges.extend(part.ranges)
                    end = part.end

                yield _Block(name, start, end, ranges, to - first)

    def write_documents(self, target: Store, place: Workspace, progress: _Progress) -> None:
        """Write the other files, each durably, the mark last; then make all names durable. Blocking."""

        def write(document: Document) -> None:
            check_cancelled()
            target.write_file(place.path(document.path), document.data)
            progress.add(len(document.data))

        write_each(self.documents(), write)
        at_once(lambda name: target.sync_directory(place.path(name)), [*reversed(self.directories), ""])


def _parts(
    name: str, within: tuple[int, int], ranges: Sequence[RecordedRange], most: int
) -> Iterator[_Block]:
    """Yield a file in parts that can be copied apart: ranges that overlap together, and what is in none."""
    start = end = within[0]
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

    yield from [_Block(name, at, min(at + most, within[1])) for at in range(end, within[1], most)]


def _files_of(source: CopySource, document_bytes: int) -> _Files:
    """List a checkpoint, with the checksums that were recorded of it. Blocking.

    Raises:
        CorruptCheckpointError: If a document is damaged, or a file is shorter than it was.
        LinkOutsideError: If a link leads out of it, and the store does not allow that.
        NotAFileError: If it has a pipe, a socket or a device.
        StorageError: If the medium refuses.
    """
    store, path = source
    only = os.path.basename(path) if store.kind(path) == "file" else None
    if only is not None:
        source = CopySource(store, os.path.dirname(path))

    ranges = _recorded_ranges(store, path, source.path)
    directories, files = list[str](), dict[str, int]()
    if only is None:
        store.check_links(path, path)  # also in what belongs to no item
        _list_below(store, path, "", directories, files)
    else:
        files[only] = store.file_sizes([path])[0] or 0

    for name, found in ranges.items():
        last = max(each.checksum.offset + each.checksum.nbytes for each in found)
        if last > files.get(name, 0):
            raise TruncatedDataError(os.path.join(source.path, name), last, files.get(name, 0))

    data = {
        name: _Data(source, FileShare(size, (Move(0, size, 0),)), ranges.get(name, ()))
        for name, size in files.items()
        if size >= document_bytes or name in ranges
    }
    documents = sorted(
        files.keys() - data.keys(), key=lambda name: (os.path.basename(name) == COMMIT_MARK, name)
    )

    def read() -> Iterator[Document]:
        for name, found in documents_of(store, source.path, {name: files[name] for name in documents}):
            if found is None:
                found = store.read_file(os.path.join(source.path, name))  # which raises

            yield Document(name, found)

    nbytes = sum([files[name] for name in documents])
    return _Files(directories, data, read, nbytes, files, source, only)


def _recorded_ranges(store: Store, path: str, base: str) -> Mapping[str, Sequence[RecordedRange]]:
    """Return what was recorded of each file of a checkpoint, by its name below `base`, once it has no damage.

    Raises:
        CorruptCheckpointError: If a document is damaged.
    """
    survey = survey_checkpoint(store, path)
    for finding in survey.findings:
        if finding.kind != "unchecked":  # what has no checksum, as of other programs, is copied as it is
            leaf = next(iter(finding.key_paths), None)
            raise CorruptCheckpointError(finding.file, finding.problem, key_path=leaf)

    ranges: dict[str, list[RecordedRange]] = {}
    for found in sorted(survey.ranges, key=lambda found: found.checksum.offset):
        ranges.setdefault(os.path.relpath(found.file, base), []).append(found)

    return ranges


def lengths_below(store: Store, path: str) -> Mapping[str, int]:
    """Return the length of every file in a directory, by its name in it. Blocking."""
    files = dict[str, int]()
    _list_below(store, path, "", [], files)
    return files


def _list_below(store: Store, path: str, folder: str, directories: list[str], files: dict[str, int]) -> None:
    names = sorted(store.list_directory(os.path.join(path, folder) if folder else path))
    inner = [os.path.join(folder, name) for name in names]
    for name, size in zip(inner, store.file_sizes([os.path.join(path, name) for name in inner]), strict=True):
        there = os.path.join(path, name)
        if size is not None and size >= 0:
            files[name] = size
            continue

        kind = None if size is None else store.kind(there)
        if kind is None:
            raise CorruptCheckpointError(there, "is listed and not there: perhaps a link to nothing")
        if kind != "directory":
            raise NotAFileError(there, "a pipe, a socket or a device")

        directories.append(name)
        _list_below(store, path, name, directories, files)


@final
@dataclass(slots=True)
class _FileUnderWay:
    """A data file that is open from its first block to its last: a checkpoint may have thousands."""

    absent_bytes: int  #: that are still to be copied
    opened: tuple[ReadableFile, DataFile] | None = None
    opening: Lock = field(default_factory=Lock)

    def close(self) -> None:
        """Close it, if it was opened."""
        if self.opened is not None:
            with closing(self.opened[0]):
                self.opened[1].close()


@final
class _Transfer:
    """The data of one copy under way. Its methods block, and are called in threads.

    Args:
        target: Where it goes.
        place: Where the copy is built.
        files: What is copied.
        most: Bytes of a block.
        progress: Of the copy.
    """

    def __init__(
        self, target: Store, place: Workspace, files: _Files, most: int, progress: _Progress
    ) -> None:
        self._target, self._place = target, place
        self._files, self._progress = files, progress
        self._blocks = files.blocks(most)
        self._turn = Lock()  # of what threads share below
        self._under_way: dict[str, _FileUnderWay] = {}
        self._folders: set[str] = set()

    def copy_blocks(self, buffer: memoryview) -> None:
        """Copy blocks until none is left; several threads do so at once, each with a buffer."""
        while (found := self._next()) is not None:
            block, file = found
            with file.opening:  # of one file; others are opened meanwhile, which may take a request each
                if file.opened is None:
                    file.opened = self._opened(block.name)

            self._copy_block(block, *file.opened, buffer)
            with self._turn:
                file.absent_bytes -= block.end - block.start
                is_last = not file.absent_bytes
            if is_last:
                file.opened[1].sync()
                with self._turn:
                    del self._under_way[block.name]

                file.close()

    def _next(self) -> tuple[_Block, _FileUnderWay] | None:
        with self._turn:
            if (block := next(self._blocks, None)) is None:
                return None

            file = self._under_way.get(block.name)
            if file is None:
                moves = self._files.data[block.name].share.moves
                file = self._under_way[block.name] = _FileUnderWay(
                    sum([move.end - move.start for move in moves])
                )
                self._folders.add(os.path.dirname(block.name))

            return block, file

    def _opened(self, name: str) -> tuple[ReadableFile, DataFile]:
        data = self._files.data[name]
        store, path = data.source
        reading = store.open_data_file(os.path.join(path, name))
        try:
            writing = self._target.create_long_file(self._place.path(name), data.share.nbytes)
        except BaseException:
            reading.close()
            raise

        try:
            writing.allocate(data.share.nbytes)
        except BaseException:
            with closing(reading), closing(writing):
                raise

        return reading, writing

    def _copy_block(
        self, block: _Block, reading: ReadableFile, writing: DataFile, buffer: memoryview
    ) -> None:
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

            writing.write_at(at + block.shift, [part])
            self._progress.add(len(part))

        for found, total in zip(block.ranges, sums, strict=True):
            if total != found.checksum.crc32c:
                leaf = next(iter(found.key_paths), None)
                raise ChecksumError(found.file, "the bytes are not those that were written", key_path=leaf)

    def finish_data(self) -> None:
        """Make the names of data files durable that are in directories."""
        folders = sorted(self._folders - {""})
        at_once(lambda folder: self._target.sync_directory(self._place.path(folder)), folders)

    def close(self) -> None:
        """Close the files that are still open, as after a failure."""
        with ExitStack() as stack:
            for file in self._under_way.values():
                stack.callback(file.close)

    def make_directories(self) -> None:
        """Make the directories."""
        for name in self._files.directories:
            self._place.make_directory(name)
