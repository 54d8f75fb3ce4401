"""The system calls themselves: the same bytes one after another in one file, nothing else."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c
from tests.bench.contenders.files import sync
from tests.bench.contenders.protocol import Saved
from tests.bench.results import Operation
from tests.bench.trees import State

from penstock.kernel.memory.buffers import anonymous_memory, huge_pages_are_cheap

MIB = 2**20
BUFFERED_CHUNK = 8 * MIB
DIRECT_CHUNK = 4 * MIB
IN_FLIGHT = 8
MOST_BUFFERS = 1024  # of one call, IOV_MAX of Linux
PAGE = 4096
Bytes = npt.NDArray[np.uint8]


@final
class Buffered:
    """pwritev from the arrays' memory, then fsync; preadv from a warm cache, into memory as ours."""

    label = checkpoint = "raw buffered"
    operations = frozenset({Operation.SAVE, Operation.RESTORE_NUMPY})

    def __init__(self, n_writers: int, n_readers: int) -> None:
        self._n_writers, self._n_readers = n_writers, n_readers

    def save(self, path: Path, state: State) -> Saved:
        views = host_bytes(state)
        calls = list(gathered(views, BUFFERED_CHUNK))
        file = create(path, 0)
        try:
            os.posix_fallocate(file, 0, sum(view.size for view in views))
            in_threads(self._n_writers, calls, lambda call: write_all(file, *call))
            os.fsync(file)
        finally:
            os.close(file)

        sync(path)
        return Saved()

    def restore(self, path: Path, target: State) -> Bytes:
        file = os.open(path / "raw", os.O_RDONLY)
        try:
            into = fresh(os.fstat(file).st_size)
            calls = chunks(into, BUFFERED_CHUNK)
            in_threads(self._n_readers, calls, lambda call: read_all(file, *call))
        finally:
            os.close(file)

        return into

    def metadata(self, path: Path) -> object:
        raise NotImplementedError

    def leaves(self, restored: Bytes, state: State) -> Iterator[Any]:
        return cut(restored, state)


@final
class Direct:
    """O_DIRECT from an aligned arena, with checksums or not; cold reads, eight in flight."""

    def __init__(self, n_writers: int, *, checksums: bool = False) -> None:
        self.label = self.checkpoint = "raw O_DIRECT, crc32c" if checksums else "raw O_DIRECT"
        self.operations = frozenset({Operation.SAVE} if checksums else {Operation.SAVE, Operation.COLD_NUMPY})
        self._checksums = checksums
        self._arenas = [mmap.mmap(-1, DIRECT_CHUNK) for _ in range(n_writers)]  # made once, and reused

    def save(self, path: Path, state: State) -> Saved:
        views = host_bytes(state)
        total = sum(view.size for view in views)
        padded = -(-total // PAGE) * PAGE
        calls = list(gathered(views, DIRECT_CHUNK, most=len(views) + 1))
        free = list(self._arenas)
        file = create(path, os.O_DIRECT)

        def write(call: tuple[int, list[Bytes]]) -> None:
            offset, buffers = call
            arena = free.pop()
            filled = fill(np.frombuffer(arena, np.uint8), buffers)
            if self._checksums:
                crc32c(np.frombuffer(arena, np.uint8, filled).data)

            write_all(file, offset, [np.frombuffer(arena, np.uint8, -(-filled // PAGE) * PAGE)])
            free.append(arena)

        try:
            os.posix_fallocate(file, 0, padded)
            in_threads(len(self._arenas), calls, write)
            os.ftruncate(file, total)
            os.fsync(file)
        finally:
            os.close(file)

        sync(path)
        return Saved()

    def restore(self, path: Path, target: State) -> Bytes:
        file = os.open(path / "raw", os.O_RDONLY | os.O_DIRECT)
        try:
            size = os.fstat(file).st_size
            into = fresh(-(-size // PAGE) * PAGE)
            calls = chunks(into, DIRECT_CHUNK)
            in_threads(IN_FLIGHT, calls, lambda call: read_all(file, call[0], call[1], size))
        finally:
            os.close(file)

        return into[:size]

    def metadata(self, path: Path) -> object:
        raise NotImplementedError

    def leaves(self, restored: Bytes, state: State) -> Iterator[Any]:
        return cut(restored, state)


def host_bytes(state: State) -> list[Bytes]:
    """The bytes of each leaf where they are; a copy only of what is spread over devices."""
    return [np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8) for leaf in state.leaves]


def create(path: Path, flags: int) -> int:
    path.mkdir()
    return os.open(path / "raw", os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o644)


def gathered(
    views: Sequence[Bytes], size: int, most: int = MOST_BUFFERS
) -> Iterator[tuple[int, list[Bytes]]]:
    """Yield offset and buffers of calls of `size` bytes, fewer only if they have `most` buffers."""
    offset, filled = 0, 0
    buffers: list[Bytes] = []
    for view in views:
        at = 0
        while at < view.size:
            part = view[at : at + size - filled]
            buffers.append(part)
            at, filled = at + part.size, filled + part.size
            if filled == size or len(buffers) == most:
                yield offset, buffers
                offset, filled, buffers = offset + filled, 0, []

    if buffers:
        yield offset, buffers


def chunks(into: Bytes, size: int) -> list[tuple[int, list[Bytes]]]:
    return [(at, [into[at : at + size]]) for at in range(0, into.size, size)]


def fill(arena: Bytes, buffers: Sequence[Bytes]) -> int:
    """Copy the buffers one after another, and return how many bytes that is."""
    at = 0
    for buffer in buffers:
        arena[at : at + buffer.size] = buffer
        at += buffer.size

    return at


def write_all(file: int, offset: int, buffers: list[Bytes]) -> None:
    written = os.pwritev(file, [buffer.data for buffer in buffers], offset)
    if written != sum(buffer.size for buffer in buffers):
        raise OSError(f"a short write, of {written} bytes")


def read_all(file: int, offset: int, buffers: list[Bytes], end: int | None = None) -> None:
    read = os.preadv(file, [buffer.data for buffer in buffers], offset)
    wanted = sum(buffer.size for buffer in buffers)
    if read != (wanted if end is None else min(wanted, end - offset)):
        raise OSError(f"a short read, of {read} bytes")


def in_threads(n: int, calls: Sequence[Any], perform: Callable[[Any], None]) -> None:
    """Perform the calls in order, by `n` threads; raise the first failure."""
    left = iter(calls)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        while not failures:
            with lock:
                call = next(left, None)

            if call is None:
                return
            try:
                perform(call)
            except BaseException as error:  # raised below
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(n)]
    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join()

    if failures:
        raise failures[0]


def fresh(size: int) -> Bytes:
    """Memory as penstock's restores have it: in huge pages, but where their first touch is dear."""
    whole = np.frombuffer(anonymous_memory(size + 2 * MIB, huge_pages=huge_pages_are_cheap()), np.uint8)
    start = -whole.ctypes.data % (2 * MIB)
    return whole[start : start + size]


def cut(restored: Bytes, state: State) -> Iterator[Any]:
    """The leaves out of the bytes."""
    at = 0
    for leaf in state.leaves:
        yield restored[at : at + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
        at += leaf.nbytes
