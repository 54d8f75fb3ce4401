"""Large reads: whatever way the bytes come, they are those of the file."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.handlers.stores.large_files import IOS, MIB, aligned, content

from penstock.errors import TruncatedDataError
from penstock.handlers import LocalStore
from penstock.handlers.stores import data_file
from penstock.handlers.stores.data_file import BLOCK, PAGE, WINDOW, Io, LocalReadableFile
from penstock.kernel import Transfers


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    with path.open("wb") as file:
        file.write(content(4 * MIB + 77))
        file.flush()
        os.fsync(file.fileno())

    return path


def forget(path: Path) -> None:
    """Have the system drop what it keeps of a file."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if data_file.cached_bytes(file.fileno(), 0, 4 * MIB) != 0:
            pytest.skip("the system does not forget, or does not say")


def read(file: LocalReadableFile, offset: int, *buffers: memoryview) -> bytes:
    file.read_at(offset, buffers)
    return b"".join(buffers)


@pytest.mark.parametrize("io", IOS)
@settings(max_examples=25)
@given(data=st.data())
def test_whatever_is_read_is_what_lies_there(io: Io, data: st.DataObject) -> None:
    whole = content(4 * MIB + 77)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data")
        path.write_bytes(whole)
        if data.draw(st.booleans(), "forgotten"):
            os.sync()
            with path.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 2 * MIB, os.POSIX_FADV_DONTNEED)

        with closing(LocalStore(io=io).open_data_file(str(path))) as file:
            total = 0
            for _ in range(3):
                offset = data.draw(st.sampled_from([0, 1, PAGE, 5 * PAGE, 5 * PAGE + 9, MIB + 3]))
                shift = data.draw(st.sampled_from([offset % PAGE, 0, 64]))
                small = data.draw(st.integers(0, 3 * PAGE))
                left = len(whole) - offset - small
                large = data.draw(st.sampled_from([left, left - 77, 2 * MIB, MIB - 1]))
                buffers = memoryview(bytearray(small)), aligned(large, (shift + small) % PAGE)
                assert read(file, offset, *buffers) == whole[offset : offset + small + large]
                again = aligned(large, shift)
                assert file.read_summed(offset, again) == crc32c(again)
                assert again == whole[offset : offset + large]
                total += small + 2 * large

            transfers = file.transfers
            assert transfers.direct_bytes + transfers.buffered_bytes == total
            assert io != "buffered" or transfers.direct_bytes == 0


@pytest.mark.parametrize("offset", [0, 5])
def test_what_is_not_cached_is_read_directly_and_what_is_is_copied(
    disk: Path, path: Path, offset: int
) -> None:
    forget(path)
    into = aligned(3 * MIB, offset)
    with closing(LocalStore().open_data_file(str(path))) as file:
        assert read(file, offset, into) == content(4 * MIB + 77)[offset:][: 3 * MIB]
        direct = 3 * MIB if not offset else 3 * MIB - PAGE
        assert file.transfers == Transfers(direct, 3 * MIB - direct)

        path.read_bytes()
        read(file, offset, into)
        assert file.transfers.direct_bytes == direct

    with closing(LocalStore(io="direct").open_data_file(str(path))) as file:
        read(file, offset, into)
        assert file.transfers.direct_bytes == direct

    forget(path)
    with closing(LocalStore(io="buffered").open_data_file(str(path))) as file:
        read(file, offset, into)
        assert file.transfers == Transfers(0, 3 * MIB)


@pytest.mark.parametrize("step", [100, 101, 5000, 40_000, 2**20], ids=lambda step: f"every {step}")
def test_runs_are_read_in_order_however_far_from_each_other(path: Path, step: int) -> None:
    offsets = range(0, 4 * MIB - 100, step)  # of the nearest, several calls bring all
    into = memoryview(bytearray(100 * len(offsets)))
    with closing(LocalStore().open_data_file(str(path))) as file:
        assert isinstance(file, LocalReadableFile)
        file.read_runs(offsets, 100, into)
        assert file.transfers.buffered_bytes == len(into)

    whole = content(4 * MIB + 77)
    assert into == b"".join([whole[at : at + 100] for at in offsets])


def test_runs_near_to_each_other_and_far_are_read_together(path: Path) -> None:
    offsets = [5, 10, 17, 2 * MIB, 2 * MIB + 40, 4 * MIB + 72]
    into = memoryview(bytearray(30))
    with closing(LocalStore().open_data_file(str(path))) as file:
        assert isinstance(file, LocalReadableFile)
        file.read_runs(iter(offsets), 5, into)
        whole = content(4 * MIB + 77)
        assert into == b"".join([whole[at : at + 5] for at in offsets])
        with pytest.raises(TruncatedDataError):
            file.read_runs([*offsets[:-1], 4 * MIB + 73], 5, into)


def test_each_window_takes_the_way_that_suits_it(disk: Path) -> None:
    path = disk / "data"
    path.write_bytes(content(WINDOW) + content(WINDOW, 1))
    os.sync()
    with path.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), WINDOW, WINDOW, os.POSIX_FADV_DONTNEED)
        if data_file.cached_bytes(opened.fileno(), WINDOW, WINDOW) != 0:
            pytest.skip("the system does not forget, or does not say")

    into = aligned(2 * WINDOW)
    with closing(LocalStore().open_data_file(str(path))) as file:
        file.read_at(0, [into])

    assert file.transfers == Transfers(WINDOW, WINDOW)
    assert into == content(WINDOW) + content(WINDOW, 1)


def test_memory_off_the_page_is_filled_through_the_page_cache(disk: Path, path: Path) -> None:
    with closing(LocalStore(io="direct").open_data_file(str(path))) as file:
        assert read(file, 0, aligned(2 * MIB, 64)) == content(4 * MIB + 77)[: 2 * MIB]
        assert file.transfers == Transfers(0, 2 * MIB)
        read(file, 0, aligned(2 * MIB))  # which says nothing about other memory
        assert file.transfers == Transfers(2 * MIB, 2 * MIB)


@pytest.mark.parametrize("another", [False, True], ids=["gone", "another one"])
def test_a_file_that_cannot_be_opened_directly_is_read_through_the_page_cache(
    path: Path, *, another: bool
) -> None:
    """The second descriptor is opened by the name, where by then nothing or something else may lie."""
    with closing(LocalStore(io="direct").open_data_file(str(path))) as file:
        path.unlink()
        if another:
            path.write_bytes(content(4 * MIB, 1))
        for times in (1, 2):
            assert read(file, MIB, aligned(2 * MIB)) == content(4 * MIB + 77)[MIB : 3 * MIB]
            assert file.transfers == Transfers(0, times * 2 * MIB)

        assert file._direct.is_refused, "it would be tried each time"


def test_a_direct_read_that_fails_is_made_through_the_page_cache(disk: Path, path: Path) -> None:
    reader, writer = os.pipe()  # reading from one at an offset fails
    with closing(LocalStore(io="direct").open_data_file(str(path))) as file:
        read(file, 0, aligned(2 * MIB))
        assert file.transfers == Transfers(2 * MIB, 0)
        direct = file._direct.opened()
        assert direct is not None
        os.dup2(reader, direct.number, inheritable=False)
        for _ in range(2):
            assert read(file, MIB, aligned(2 * MIB)) == content(4 * MIB + 77)[MIB : 3 * MIB]

        assert file.transfers == Transfers(2 * MIB, 4 * MIB)
        assert file._direct.is_refused, "it would be tried each time"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("offset", [0, 2 * MIB, 2 * MIB + 3])
def test_a_file_that_ends_early_says_where(path: Path, io: Io, offset: int) -> None:
    file = LocalStore(io=io).open_data_file(str(path))
    with closing(file), pytest.raises(TruncatedDataError) as caught:
        file.read_at(offset, [aligned(5 * MIB, offset % PAGE), memoryview(bytearray(9))])

    assert (caught.value.needed, caught.value.found) == (offset + 5 * MIB + 9, 4 * MIB + 77)


@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("offset", [0, 2 * MIB, 2 * MIB + 3])
def test_a_file_that_ends_early_has_no_sum(path: Path, io: Io, offset: int) -> None:
    file = LocalStore(io=io).open_data_file(str(path))
    with closing(file), pytest.raises(TruncatedDataError) as caught:
        file.read_summed(offset, aligned(5 * MIB, offset % PAGE))

    assert (caught.value.needed, caught.value.found) == (offset + 5 * MIB, 4 * MIB + 77)


def test_what_is_summed_comes_from_the_page_cache_in_blocks(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return system(descriptor, buffers, offset)

    system = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    with closing(LocalStore(io="buffered").open_data_file(str(path))) as file:
        file.read_summed(0, aligned(4 * MIB + 77))

    assert sizes == [BLOCK, BLOCK, 77]


def test_what_is_summed_comes_directly_in_one_call(disk: Path, path: Path) -> None:
    whole = content(4 * MIB + 77)
    with closing(LocalStore(io="direct").open_data_file(str(path))) as file:
        assert file.read_summed(0, aligned(4 * MIB)) == crc32c(whole[: 4 * MIB])
        assert file.transfers == Transfers(direct_bytes=4 * MIB)


def test_threads_read_one_file_directly_at_once(path: Path) -> None:
    whole = content(4 * MIB + 77)
    file = LocalStore(io="direct").open_data_file(str(path))
    with closing(file), ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda at: read(file, at * MIB, aligned(MIB)), range(4)))

    assert b"".join(found) == whole[: 4 * MIB]
