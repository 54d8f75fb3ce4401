"""Large writes past the page cache: which bytes take that way, and that they arrive by any."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import tempfile
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.handlers.stores.large_files import IOS, MIB, SHARED_MEMORY, aligned, content, takes_direct_io

from penstock.errors import ConfigError, StorageError
from penstock.handlers import LocalStore
from penstock.handlers.stores import data_file
from penstock.handlers.stores.data_file import (
    DIRECT_FROM,
    PAGE,
    Arena,
    Io,
    LocalDataFile,
    cut,
    memory_alignment,
    open_direct,
    parts_of,
)
from penstock.handlers.stores.regular_files import Descriptor
from penstock.kernel import Transfers


@contextmanager
def file_size_limit(nbytes: int) -> Generator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# What is decided

offsets = st.integers(0, 3 * PAGE) | st.integers(0, 5).map(lambda n: n * PAGE)
sizes = st.integers(0, 3 * DIRECT_FROM) | st.integers(0, 900).map(lambda n: n * PAGE)


@given(offsets, sizes, st.sampled_from([PAGE, MIB, 2 * MIB]))
def test_only_whole_pages_of_large_requests_go_directly(offset: int, nbytes: int, block: int) -> None:
    parts = parts_of(offset, nbytes, block)

    assert sum(part.nbytes for part in parts) == nbytes
    assert all(part.nbytes > 0 for part in parts)
    at, direct_bytes = offset, 0
    for part in parts:
        if part.direct:
            assert at % PAGE == part.nbytes % PAGE == 0
            assert part.nbytes <= block
            direct_bytes += part.nbytes
        at += part.nbytes

    whole = max(0, (offset + nbytes) // PAGE - -(-offset // PAGE)) * PAGE
    assert direct_bytes == (whole if whole >= DIRECT_FROM else 0)


@given(st.lists(st.binary(max_size=20)), st.data())
def test_views_are_cut_anywhere(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    marks = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    limits = [0, *marks, len(whole)]
    sizes = [end - start for start, end in itertools.pairwise(limits)]

    runs = list(cut([memoryview(part) for part in parts if part], sizes))

    assert [b"".join(run) for run in runs] == [whole[start:end] for start, end in itertools.pairwise(limits)]


def test_a_store_refuses_another_way() -> None:
    io: Io = "both"  # type: ignore[assignment]  # what a caller without a type checker may write
    with pytest.raises(ConfigError, match=r"store\.io: must be one of auto, direct, buffered, not 'both'"):
        LocalStore(io=io)


# Writing


@pytest.mark.parametrize("io", IOS)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_what_threads_write_anywhere_is_what_lies_there(io: Io, seed: int) -> None:
    rng = random.Random(seed)
    whole = content(rng.randrange(6 * MIB, 10 * MIB), seed)
    cuts = {rng.randrange(len(whole)) for _ in range(4)}
    cuts |= {rng.randrange(len(whole) // PAGE) * PAGE for _ in range(4)}
    cuts |= {at + rng.randrange(3 * PAGE) for at in list(cuts) if at + 3 * PAGE < len(whole)}
    limits = sorted({0, *cuts, len(whole)})
    requests = list(itertools.pairwise(limits))
    rng.shuffle(requests)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data")
        with closing(LocalStore(io=io).create_data_file(str(path))) as data:
            if rng.random() < 0.5:
                data.allocate(len(whole) + rng.randrange(MIB))

            def write(request: tuple[int, int]) -> None:
                start, end = request
                middle = (start + end) // 2
                buffers = (memoryview(whole)[start:middle], memoryview(whole)[middle:end])
                data.write_at(start, buffers)

            with ThreadPoolExecutor(4) as threads:
                list(threads.map(write, requests))

            data.sync()
            is_direct = io == "direct" or (io == "auto" and takes_direct_io(Path(folder)))

        assert path.read_bytes() == whole
        direct = sum(
            part.nbytes
            for start, end in requests
            for part in parts_of(start, end - start, MIB)
            if part.direct and is_direct
        )
        assert data.transfers == Transfers(direct, len(whole) - direct)


@pytest.mark.parametrize("shift", [0, 1, 64, 512, 1024])
def test_memory_that_is_aligned_as_the_disk_asks_is_written_without_a_copy(disk: Path, shift: int) -> None:
    source = aligned(3 * MIB, shift)
    source[:] = content(3 * MIB)
    arena = Arena()
    with closing(LocalDataFile(str(disk / "data"), "auto", arena)) as data:
        data.write_at(0, [source])
        wanted = data._direct.memory_align
        assert wanted <= PAGE
        assert arena.idle_bytes == (arena.block_bytes if shift % wanted else 0)
        assert data.transfers == Transfers(3 * MIB, 0)

    assert (disk / "data").read_bytes() == source


def test_memory_is_copied_where_the_disk_asks_for_more_than_it_says(disk: Path) -> None:
    source = aligned(3 * MIB, 1)
    source[:] = content(3 * MIB)
    arena = Arena()
    with closing(LocalDataFile(str(disk / "data"), "auto", arena)) as data:
        data._direct.opened()
        data._direct.memory_align = 1
        data.write_at(0, [source])
        assert arena.idle_bytes == arena.block_bytes
        assert data.transfers == Transfers(3 * MIB, 0)
        assert data._direct.memory_align == PAGE

    assert (disk / "data").read_bytes() == source


def test_what_is_no_file_of_a_disk_asks_for_pages() -> None:
    with closing(Descriptor("/dev/zero", os.O_RDONLY)) as zero:
        assert memory_alignment(zero.number) == PAGE


def test_buffers_of_any_size_are_gathered(disk: Path) -> None:
    whole = content(2 * MIB)
    with closing(LocalStore().create_data_file(str(disk / "data"))) as data:
        data.write_at(10, [memoryview(whole)[at : at + 1000] for at in range(0, len(whole), 1000)])
        assert data.transfers.direct_bytes == 2 * MIB - PAGE

    assert (disk / "data").read_bytes() == bytes(10) + whole


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no file system in memory here")
def test_memory_is_no_disk() -> None:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        store, path = LocalStore(), f"{folder}/data"
        with closing(store.create_data_file(path)) as data:
            data.allocate(3 * MIB)
            data.write_at(0, [memoryview(content(2 * MIB))])
            data.sync()
        with closing(store.open_data_file(path)) as file:
            into = aligned(2 * MIB)
            file.read_at(0, [into])

        assert into == content(2 * MIB)
        assert data.transfers == file.transfers == Transfers(0, 2 * MIB)


def test_a_file_system_that_refuses_is_written_to_through_the_page_cache(disk: Path) -> None:
    arena = Arena()
    arena.enter()
    with arena.block() as block:  # the only one, and from here on it does not begin on a page
        whole = block
    arena._free[:] = [np.concatenate([whole, whole])[1 : 1 + arena.block_bytes]]
    source = content(5 * MIB)
    with closing(LocalDataFile(str(disk / "data"), "direct", arena)) as data:
        data.write_at(100, [memoryview(source)])
        data.sync()
        assert data.transfers == Transfers(0, 5 * MIB)
        data.write_at(0, [aligned(2 * MIB)])  # it is not asked again
        assert data.transfers.direct_bytes == 0

    assert (disk / "data").read_bytes()[2 * MIB :] == source[2 * MIB - 100 :]


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY])
def test_a_file_that_cannot_be_opened_directly_is_not(disk: Path, flags: int) -> None:
    with closing(Descriptor("/dev/zero", flags)) as zero:
        assert open_direct(zero, flags, "direct") is None

    path = disk / "data"
    path.touch()
    with closing(Descriptor(str(path), flags)) as file:
        direct = open_direct(file, flags, "auto")
        assert direct is not None
        direct.close()
        assert open_direct(file, flags, "buffered") is None
        path.unlink()
        assert open_direct(file, flags, "auto") is None
        path.touch()  # another one
        assert open_direct(file, flags, "auto") is None


def test_a_direct_write_that_fails_is_an_error(disk: Path) -> None:
    reader, writer = os.pipe()  # writing to one at an offset fails
    with closing(LocalStore().create_data_file(str(disk / "data"))) as data:
        direct = data._direct.opened()
        assert direct is not None
        os.dup2(writer, direct.number, inheritable=False)
        with pytest.raises(StorageError) as caught:
            data.write_at(0, [aligned(2 * MIB)])

    assert (caught.value.operation, caught.value.errno) == ("write", errno.ESPIPE)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("io", IOS)
def test_a_file_that_grows_too_large_is_an_error(tmp_path: Path, io: Io) -> None:
    with closing(LocalStore(io=io).create_data_file(str(tmp_path / "data"))) as data:
        with file_size_limit(2 * MIB + 100), pytest.raises(StorageError) as caught:
            data.write_at(0, [memoryview(content(8 * MIB))])
        with file_size_limit(2 * MIB + 100), pytest.raises(StorageError) as too:
            data.allocate(9 * MIB)

    assert (caught.value.operation, caught.value.errno) == ("write", errno.EFBIG)
    assert (too.value.operation, too.value.errno) == ("allocate", errno.EFBIG)


@pytest.mark.parametrize("io", IOS)
def test_room_that_was_not_needed_is_given_back(tmp_path: Path, io: Io) -> None:
    path = tmp_path / "data"
    with closing(LocalStore(io=io).create_data_file(str(path))) as data:
        data.allocate(3 * MIB)
        data.write_at(0, [memoryview(content(2 * MIB + 5))])
        data.allocate(4 * MIB)
        data.sync()
        assert path.stat().st_size == 2 * MIB + 5
        data.write_at(4 * MIB, [memoryview(b"more")])
        data.allocate(MIB)
        data.sync()

    assert path.stat().st_size == 4 * MIB + 4
    assert path.read_bytes()[: 2 * MIB + 5] == content(2 * MIB + 5)


def test_room_is_reserved_at_once(disk: Path) -> None:
    with closing(LocalStore().create_data_file(str(disk / "data"))) as data:
        for _ in range(2):
            data.allocate(4 * MIB)
            assert (disk / "data").stat().st_blocks * 512 >= 4 * MIB
            data.sync()
            assert (disk / "data").stat().st_blocks == 0


def test_room_that_nobody_has_is_an_error(tmp_path: Path) -> None:
    data = LocalStore().create_data_file(str(tmp_path / "data"))
    with closing(data), pytest.raises(StorageError) as caught:
        data.allocate(2**62)

    assert caught.value.errno in {errno.ENOSPC, errno.EFBIG}


def test_where_no_room_can_be_reserved_nothing_is() -> None:
    with closing(os.fdopen(os.open(os.devnull, os.O_WRONLY), "wb")) as null:
        assert not data_file.allocate(null.fileno(), 0, MIB)


def test_a_lost_file_reserves_nothing(tmp_path: Path) -> None:
    with closing(LocalStore().create_data_file(str(tmp_path / "data"))) as data:
        data._lost = StorageError("fsync", "x", "gone", errno.EIO)
        with pytest.raises(StorageError, match="an earlier fsync failed"):
            data.allocate(MIB)


# The arena


def test_as_many_blocks_as_threads_and_none_once_nobody_writes() -> None:
    arena, together = Arena(), threading.Barrier(3)
    arena.enter()
    arena.enter()

    def use(_: int) -> int:
        with arena.block() as block:
            together.wait(10)
            return block.ctypes.data

    with ThreadPoolExecutor(3) as threads:
        first = set(threads.map(use, range(3)))
        again = set(threads.map(use, range(3)))

    assert len(first) == 3
    assert again == first
    assert all(address % PAGE == 0 for address in first)
    assert arena.idle_bytes == 3 * arena.block_bytes
    arena.leave()
    assert arena.idle_bytes == 3 * arena.block_bytes
    arena.leave()
    assert arena.idle_bytes == 0


def test_a_block_that_comes_back_late_is_not_kept() -> None:
    arena = Arena()
    arena.enter()
    with arena.block():
        arena.leave()

    assert arena.idle_bytes == 0


def test_the_files_of_a_store_share_one_arena(disk: Path) -> None:
    store = LocalStore()
    files = [store.create_data_file(str(disk / name)) for name in "ab"]
    for file in files:
        file.write_at(0, [aligned(2 * MIB, 1)])

    assert store._arena.idle_bytes == store._arena.block_bytes
    files[0].close()
    files[0].close()
    assert store._arena.idle_bytes == store._arena.block_bytes
    files[1].close()
    assert store._arena.idle_bytes == 0
