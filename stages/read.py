"""Fills host buffers from storage."""

from __future__ import annotations

__all__ = ("OpenFiles", "Read", "damage_of_shared", "fill_shared", "put_in_order", "read_twice")

import itertools
import os
import resource
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import add, attrgetter, gt
from threading import Lock
from typing import Any, ClassVar, Final, TypeAlias, TypeVar, final

import numpy as np
from crc32c import crc32c

from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import ChecksumError, TruncatedDataError
from penstock.kernel.memory.buffers import scratch_memory
from penstock.kernel.memory.byte_account import ByteLease
from penstock.kernel.messages.restore import HostBatch, PlannedBatch, ReadBatch
from penstock.kernel.options import fit_fields
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.kernel.pipeline.together import MANY, at_once, together
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_handlers import FilesHandler, ReadLeaf, ReadLeaves
from penstock.kernel.protocols.reads import (
    CheckedRead,
    DirectRead,
    DriverRead,
    ScatterRead,
    SharedRead,
    TileRead,
)
from penstock.kernel.protocols.stores import ReadableFile, Store, SummedReads
from penstock.stages.files import closing, log_transfers
from penstock.stages.messages.batching import adjacent
from penstock.stages.planning.leaf_reads import check_plain

FileRead: TypeAlias = DirectRead | ScatterRead | CheckedRead | SharedRead | TileRead
"""A read that needs no driver; a tile may have been brought its drivers' part already."""

_Infos: TypeAlias = Callable[[int], ParamInfo]
"""Where a leaf stands, by the number that its reads have."""

LARGE = 2**20  #: bytes; a larger read gains nothing by being joined with its neighbours


@final
@dataclass(frozen=True, slots=True)
class Read:
    """Takes `ReadBatch`es, yields a `HostBatch` whenever leaves are complete.

    In a pipeline without `limit_bytes` it takes `PlannedBatch`es.

    Small ranges that follow each other in a file are one read. Bytes whose checksum is known are
    checked. Reads through a driver run concurrently. A handler that keeps its own files reads its leaves
    itself. The event `data.read` says how many bytes bypassed the page cache and how many went through it.

    Attributes:
        concurrency: Batches read at once, each by a thread; by default one for each processor, from 2
            to 8. A disk is fast only with several requests under way. But first touches of fresh memory keep
            a processor busy, and with more threads than processors the event loop has to wait.
        verify: Whether checksums are compared; a mismatch is a `ChecksumError`.
    """

    messages: ClassVar[Messages] = {ReadBatch: HostBatch, PlannedBatch: HostBatch}
    advice: ClassVar[Advice] = Advice(
        busy=(
            "If the store can do more at once, raise `[restore.read] concurrency`; if not, read "
            "less: `only=`, or `mmap=True`."
        ),
        memory_wait=(
            "Raise `[memory] limit_bytes` (the argument `memory_limit`), or `restore_concurrent_bytes`."
        ),
    )

    concurrency: int = field(
        default_factory=lambda: min(8, max(2, os.cpu_count() or 1)), metadata={"positive": True}
    )
    verify: bool = True

    def __post_init__(self) -> None:
        fit_fields(self, "read")

    @asynccontextmanager
    async def open(self, run: RestoreRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one restore. Its files are closed at the end, whatever happened."""
        files = OpenFiles(run.store)
        # Of many files on a disk several threads would wait for the interpreter more than for bytes.
        aside = Threads(self.concurrency if run.store.over_network else 1)
        reader = _Reader(run, files, aside, verify=self.verify)
        try:
            async with closing(run.threads, files.end):
                yield reader

            log_transfers(run.events, "data.read", files.opened)
        finally:
            reader.release()


@final
class _Reader:
    __slots__ = ("_aside", "_files", "_outstanding", "_run", "_staged", "_verify")

    def __init__(self, run: RestoreRun, files: OpenFiles, aside: Threads, *, verify: bool) -> None:
        self._run = run
        self._aside = aside  #: read the files of a batch with many of them, for all batches
        self._verify = verify
        self._files = files
        self._outstanding: dict[int, int] = {}
        self._staged: dict[int, ByteLease] = {}

    async def __call__(self, batch: ReadBatch | PlannedBatch, /) -> HostBatch | None:
        leaves = ReadLeaves.of(batch.leaves)
        if isinstance(batch, PlannedBatch):  # nothing limits what is in flight
            batch = ReadBatch(leaves, leaves.reads, handler=batch.handler, plan=batch.plan)
        if batch.handler is not None:
            return await self._load(batch, batch.handler)

        unit = leaves.indices[0] if leaves else None
        if unit is not None:
            # Counted, since the workers may end the batches of a unit in any order.
            self._outstanding.setdefault(unit, len(leaves.reads))
            if batch.staged is not None:
                self._staged[unit] = batch.staged

        try:
            check_plain(batch.reads)
            await self._perform(batch, leaves)
        finally:
            batch.release_read()

        if unit is None:  # the batch brings the plan
            return HostBatch((), plan=batch.plan)

        # Leaves are passed on once all of their reads were performed, which may come in several batches.
        self._outstanding[unit] -= len(batch.reads)
        is_whole = not self._outstanding[unit]
        self._run.progress.advance(leaves.n_ended if is_whole else 0, batch.nbytes)
        if not is_whole:
            return None

        del self._outstanding[unit]
        return HostBatch(leaves, staged=self._staged.pop(unit, None), plan=batch.plan)

    async def _load(self, batch: ReadBatch, handler: FilesHandler) -> HostBatch:
        """Have a handler read its leaves from its own files, one call per directory."""
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
        return HostBatch((), tuple(ready), batch.staged, plan=batch.plan)

    def release(self) -> None:
        """Give back the leases of leaves that were never complete."""
        for lease in self._staged.values():
            lease.release()

    async def _perform(self, batch: ReadBatch, leaves: ReadLeaves) -> None:
        from_files = [
            read for read in batch.reads if not isinstance(read, DriverRead) and not _is_there(read)
        ]
        with_drivers = [read for read in from_files if isinstance(read, TileRead) and read.drivers]
        wanted = [read for read in batch.reads if isinstance(read, DriverRead)]
        if not wanted and not with_drivers:
            if from_files:
                await self._run.threads.run(self._read_files, from_files, leaves.info)

            return

        if with_drivers:  # what a tile is made of must all be there
            from_files = [read for read in from_files if read not in with_drivers]
        wanted += [driver for tile in with_drivers for driver in tile.drivers]
        reads: list[Callable[[], Awaitable[object]]] = [read.perform for read in wanted]
        if from_files:
            reads.append(partial(self._run.threads.run, self._read_files, from_files, leaves.info))

        await together(reads)
        if with_drivers:
            await self._run.threads.run(self._read_files, with_drivers, leaves.info)

    def _read_files(self, reads: Iterable[FileRead], infos: _Infos) -> None:
        by_file: dict[str, list[DirectRead | ScatterRead]] = defaultdict(list)
        for read in reads:
            if isinstance(read, SharedRead):
                with self._files.use(read.file) as file:
                    read_twice(self._run.store, partial(fill_shared, file, read, infos, verify=self._verify))
            elif isinstance(read, TileRead):
                self._read_files([one for one in read.reads if not isinstance(one, DriverRead)], infos)
                read.make()
            elif not isinstance(read, CheckedRead):
                by_file[read.file].append(read)
            elif not self._verify:
                by_file[read.file].extend(read.parts)
            elif read.is_short:
                by_file[read.file].append(read.at_once())
            else:
                self._read_checked(read, infos)

        scratch = _Scratch()

        def read_file(path: str) -> None:
            wanted = sorted(by_file[path], key=attrgetter("offset"))
            own = scratch if self._aside.limit == 1 or len(by_file) < MANY else _Scratch()
            with self._files.use(path) as file:
                for run in adjacent(wanted, _one_read):
                    read_twice(self._run.store, partial(self._read_run, file, run, own, infos))

        at_once(read_file, list(by_file), self._aside)

    def _read_checked(self, read: CheckedRead, infos: _Infos) -> None:
        with self._files.use(read.file) as file:
            read_twice(self._run.store, partial(self._fill_checked, file, read, infos))

    def _fill_checked(self, file: ReadableFile, read: CheckedRead, infos: _Infos) -> None:
        try:
            found = read.fill(file.read_at, crc32c)
        except TruncatedDataError as error:
            raise _in_leaf(error, infos(read.leaf)) from error

        if read.differs(found):
            raise _differs(read, infos)

    def _read_run(
        self,
        file: ReadableFile,
        run: Sequence[DirectRead | ScatterRead],
        scratch: _Scratch,
        infos: _Infos,
    ) -> None:
        buffers = [read.into() if isinstance(read, DirectRead) else scratch.of(read.nbytes) for read in run]
        compared = [self._verify and read.crc32c is not None for read in run]
        found: list[int | None]
        try:
            if compared[0] and run[0].nbytes >= LARGE and isinstance(file, SummedReads):
                found = [file.read_summed(run[0].offset, buffers[0])]  # a large read is alone
            else:
                file.read_at(run[0].offset, buffers)
                pairs = zip(buffers, compared, strict=True)
                found = [crc32c(buffer) if is_one else None for buffer, is_one in pairs]
        except TruncatedDataError as error:
            cut = next((read for read in run if read.offset + read.nbytes > error.found), run[-1])
            raise _in_leaf(error, infos(cut.leaf)) from error

        for read, buffer, summed in zip(run, buffers, found, strict=True):
            if summed != (read.crc32c if self._verify else None):
                raise _differs(read, infos)
            if isinstance(read, ScatterRead):
                read.scatter(buffer)


@final
class _Scratch:
    """Memory for the bytes of one batch that are scattered, one large read after another.

    Fresh memory for each would cost as much as the copy from the page cache: the system zeroes it.
    """

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def of(self, nbytes: int) -> memoryview:
        """Return memory for one read. A large one has it until the next is asked for."""
        if nbytes < LARGE:
            return memoryview(bytearray(nbytes))
        if nbytes > len(self._memory):
            self._memory = scratch_memory(nbytes)

        return self._memory[:nbytes]


def _in_leaf(error: TruncatedDataError, info: ParamInfo) -> TruncatedDataError:
    """Return the error of a file that ends too early with the leaf that is cut off."""
    return TruncatedDataError(error.path, error.needed, error.found, key_path=info.key_path)


def _differs(read: DirectRead | ScatterRead | CheckedRead, infos: _Infos) -> ChecksumError:
    start, end = read.covered if isinstance(read, CheckedRead) else (read.offset, read.offset + read.nbytes)
    problem = f"bytes {start} to {end} differ from those written"
    return ChecksumError(read.file, problem, key_path=infos(read.leaf).key_path)


def _one_read(before: DirectRead | ScatterRead, read: DirectRead | ScatterRead) -> bool:
    """True if a read follows another one in the file, and both are small."""
    return read.offset == before.offset + before.nbytes and max(read.nbytes, before.nbytes) < LARGE


SHARE: Final = 16
"""One restore keeps 1/SHARE of the files open that its process may: each may take two descriptors, and other
restores and saves run at the same time."""

MOST: Final = 256


@dataclass(slots=True)
class _Open:
    file: ReadableFile | None = None  #: None until it is opened
    users: int = 0
    opening: Lock = field(default_factory=Lock)


@final
class OpenFiles:
    """Opens files when they are read. A checkpoint may have more of them than a process may open.

    Beyond `most`, the file is closed that was not used for the longest time. Thread-safe; blocking.

    Args:
        store: Where the files are.
        most: How many stay open; by default a part of what the process may open.

    Attributes:
        opened: Every file that was opened, closed ones included.
    """

    __slots__ = ("_is_over", "_lock", "_most", "_open", "_store", "opened")

    def __init__(self, store: Store, most: int | None = None) -> None:
        self._store = store
        if most is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            most = MOST if soft == resource.RLIM_INFINITY else max(2, min(MOST, soft // SHARE))

        self._most = most
        self._lock = Lock()
        self._is_over = False
        self._open: dict[str, _Open] = {}  # the one used last is last
        self.opened: list[ReadableFile] = []

    @contextmanager
    def use(self, path: str) -> Generator[ReadableFile]:
        """Open the file at `path`, and keep it open as long as the block lasts.

        Raises:
            StorageError: If it cannot be opened, or another one cannot be closed.
        """
        with self._lock:
            entry = self._open.pop(path, None)
            if entry is None:
                entry = _Open()
                if (n_over := len(self._open) - self._most + 1) > 0:
                    idle = [path for path, entry in self._open.items() if not entry.users]
                    for unused in idle[:n_over]:
                        if (file := self._open.pop(unused).file) is not None:
                            file.close()

            entry.users += 1
            self._open[path] = entry
        try:
            with entry.opening:  # of one file: others are opened meanwhile, which may take a request each
                if entry.file is None:
                    entry.file = self._opened(path)

            yield entry.file
        finally:
            with self._lock:
                entry.users -= 1

    def _opened(self, path: str) -> ReadableFile:
        file = self._store.open_data_file(path)
        with self._lock:
            self.opened.append(file)
            if self._is_over:
                file.close()

        return file

    def end(self) -> Sequence[ReadableFile]:
        """Stop keeping files open, also for abandoned threads; return all."""
        self._is_over = True  # without the lock: such a thread may hold it
        return list(self.opened)


def _is_there(read: FileRead) -> bool:
    """True if it brings leaves whose bytes are in memory already: those of a mapped file."""
    return isinstance(read, SharedRead) and read.buffer.is_filled


GAP: Final = 4096
"""Bytes. A gap of up to this size between two leaves is read too: that is cheaper than another call."""


def fill_shared(file: ReadableFile, read: SharedRead, infos: _Infos, *, verify: bool) -> None:
    """Read the bytes of all leaves into one buffer, each in C order, in however many chunks it is stored.

    Raises:
        TruncatedDataError: If the file ends too early; names the first leaf that is cut off.
        ChecksumError: If bytes differ from those that were written; names the leaf.
    """
    order: Sequence[int] = range(len(read.leaves))
    if any(map(gt, read.offsets, read.offsets[1:])):
        order = sorted(order, key=read.offsets.__getitem__)

    runs = list(_runs(read, order))
    data = np.empty(sum([stop - start for start, stop, _ in runs]), np.uint8).data
    starts = [0] * len(read.leaves)
    at = 0
    for start, stop, numbers in runs:
        if stop > start:
            try:
                file.read_at(start, [data[at : at + stop - start]])
            except TruncatedDataError as error:
                ends = map(add, read.offsets, read.sizes)
                cut = next((number for number, end in enumerate(ends) if end > error.found), -1)
                raise _in_leaf(error, infos(read.leaves[cut])) from error

        for number in numbers:
            starts[number] = read.offsets[number] - start + at

        at += stop - start

    if verify and (damage := damage_of_shared(read, data, starts, infos)) is not None:
        raise damage

    put_in_order(read.specs, data, starts)
    read.buffer.fill(data, starts)


def damage_of_shared(
    read: SharedRead, data: memoryview, starts: Sequence[int], infos: _Infos
) -> ChecksumError | None:
    """Return the error of the first leaf whose bytes are not those that were written; None if all are.

    Args:
        read: The leaves.
        data: Has their bytes.
        starts: Where those of each begin in it.
        infos: Says where a leaf stands, by its index.
    """
    rows = zip(starts, read.sizes, read.crc32cs, strict=True)
    for number, (start, nbytes, expected) in enumerate(rows):
        if crc32c(data[start : start + nbytes]) != expected and expected >= 0:
            offset = read.offsets[number]
            problem = f"bytes {offset} to {offset + nbytes} differ from those written"
            return ChecksumError(read.file, problem, key_path=infos(read.leaves[number]).key_path)

    return None


def _runs(read: SharedRead, order: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield ranges of the file, each with the leaves that are in it."""
    start = stop = 0
    numbers: list[int] = []
    for number in order:
        offset = read.offsets[number]
        if not numbers:
            start = offset
        elif not stop <= offset <= stop + GAP:
            yield start, stop, numbers
            start, numbers = offset, []

        numbers.append(number)
        stop = offset + read.sizes[number]

    yield start, stop, numbers


T = TypeVar("T")


def read_twice(store: Store, read: Callable[[], T]) -> T:
    """Return `read()`; if what it read does not fit its checksum, call it once more. Blocking.

    Args:
        store: Where it was read from. If that did not take a network, the first answer counts.
        read: Reads and compares. It may be called twice.

    Raises:
        ChecksumError: If the second time it does not fit, either.
    """
    try:
        return read()
    except ChecksumError:
        if not store.over_network:
            raise

    return read()


# Elements are only moved, so any type of the right size works; numpy copies integers fastest.
_MOVED_AS: Final = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def put_in_order(specs: Sequence[LeafSpec], data: memoryview, starts: Sequence[int]) -> None:
    """Rearrange the bytes of leaves in place: from chunk after chunk to the whole array in C order. Blocking.

    Leaves of one spec that follow each other are rearranged in one step.

    Args:
        specs: Of the leaves, whose chunks tile them evenly.
        data: Holds the chunks of each leaf, one after another in C order of the grid.
        starts: Where each leaf begins in `data`.
    """
    at = 0
    for _, group in itertools.groupby(specs, key=id):
        stop = at + len(list(group))
        spec, first, nbytes = specs[at], starts[at], specs[at].nbytes
        if spec.chunk_shape != spec.shape and not _is_in_order(spec):
            if list(starts[at:stop]) == list(range(first, first + nbytes * (stop - at), nbytes)):
                _rearrange(spec, data[first : first + nbytes * (stop - at)])
            else:
                for start in starts[at:stop]:
                    _rearrange(spec, data[start : start + nbytes])

        at = stop


def _is_in_order(spec: LeafSpec) -> bool:
    """True if chunk after chunk is C order: on axes before the last that is cut, chunks have one element."""
    last = max([axis for axis, n in enumerate(spec.grid_shape) if n > 1], default=0)
    return all(size == 1 for size in spec.chunk_shape[:last])


def _rearrange(spec: LeafSpec, data: memoryview) -> None:
    """Rearrange leaves of one spec that follow each other."""
    dtype: np.dtype[Any] = _MOVED_AS.get(spec.itemsize) or np.dtype(f"V{spec.itemsize}")
    n_axes = len(spec.chunk_shape)
    stored = np.frombuffer(data, dtype).reshape(-1, *spec.grid_shape, *spec.chunk_shape)
    pairs = [axis for at in range(1, n_axes + 1) for axis in (at, n_axes + at)]
    np.frombuffer(data, dtype)[:] = stored.transpose(0, *pairs).reshape(-1)
