"""A leaf that is written in blocks and read in slabs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from penstock.errors import StorageError
from penstock.handlers.leaves.blocks import HostRegion
from penstock.handlers.leaves.spill import Spill
from penstock.handlers.stores.data_file import PAGE, cached_bytes, takes_direct_io
from penstock.kernel.memory.buffers import anonymous_memory

Bounds: TypeAlias = tuple[tuple[int, int], ...]

VALUES = np.arange(7 * 33 * 20, dtype=np.uint16).reshape(7, 33, 20)
WHOLE: Bounds = ((0, 7), (0, 33), (0, 20))


def block_of(values: npt.NDArray[np.uint16], bounds: Bounds) -> memoryview:
    part = values[tuple([slice(lo, hi) for lo, hi in bounds])]
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data


def filled(spill: Spill, bounds: Bounds, piece_bytes: int = 1 << 20) -> npt.NDArray[np.uint16]:
    region = HostRegion(bounds, np.dtype(np.uint16))
    spill.fill(region, piece_bytes)
    return np.asarray(region.array())


@pytest.mark.thinned(2)
@pytest.mark.parametrize("block", [(7, 33, 20), (1, 1, 1), (7, 8, 20), (3, 33, 7), (2, 5, 3)])
@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
def test_any_region_is_what_the_blocks_were_made_of(
    block: tuple[int, ...], piece_bytes: int, tmp_path: Path
) -> None:
    asked: list[Bounds] = []

    def read(bounds: Bounds) -> memoryview:
        asked.append(bounds)
        return block_of(VALUES, bounds)

    spill = Spill(WHOLE, 2, block, str(tmp_path), read)
    for bounds in (((0, 7), (0, 33), (0, 20)), ((2, 3), (0, 33), (0, 20)), ((1, 6), (7, 30), (3, 19))):
        wanted = VALUES[tuple([slice(lo, hi) for lo, hi in bounds])]
        assert np.array_equal(filled(spill, bounds, piece_bytes), wanted)

    assert len(asked) == len(set(asked))  # each block is made once
    assert list(tmp_path.iterdir()) == []  # the file has no name


def on_a_page(data: memoryview) -> memoryview:
    """Return the same bytes in memory that may be written past the page cache."""
    memory = anonymous_memory(len(data))
    memory[:] = data
    return memory


@pytest.mark.parametrize("on_pages", [False, True])
def test_whole_pages_pass_by_the_page_cache(tmp_path: Path, on_pages: bool) -> None:
    values = np.arange(64 * 1024 * 21, dtype=np.uint32).astype(np.uint16).reshape(64, 1024, 21)
    whole: Bounds = ((0, 64), (0, 1024), (0, 21))

    def read(bounds: Bounds) -> memoryview:
        data = block_of(values, bounds)
        return on_a_page(data) if on_pages else data

    spill = Spill(whole, 2, (64, 411, 21), str(tmp_path), read)
    for bounds in (whole, ((3, 9), (0, 1024), (0, 21)), ((1, 63), (400, 1001), (2, 20))):
        wanted = values[tuple([slice(lo, hi) for lo, hi in bounds])]
        assert np.array_equal(filled(spill, bounds), wanted)
        assert np.array_equal(filled(spill, bounds, 100_000), wanted)

    cached = cached_bytes(spill._file, 0, values.nbytes)
    if not takes_direct_io(spill._file) or cached is None:
        pytest.skip("the temporary folder is on no disk that direct transfers are used for")
    if on_pages:
        assert cached <= 3 * PAGE  # the last of each block


def test_a_part_of_a_leaf_makes_the_blocks_of_that_part_alone(tmp_path: Path) -> None:
    asked: list[Bounds] = []

    def read(bounds: Bounds) -> memoryview:
        asked.append(bounds)
        return block_of(VALUES, bounds)

    spill = Spill(((3, 7), (5, 33), (0, 20)), 2, (3, 16, 20), str(tmp_path), read)
    for bounds in (((4, 7), (6, 33), (2, 20)), ((3, 7), (5, 33), (0, 20))):
        wanted = VALUES[tuple([slice(lo, hi) for lo, hi in bounds])]
        assert np.array_equal(filled(spill, bounds), wanted)

    assert sorted(asked) == [
        ((lo, hi), columns, (0, 20)) for lo, hi in ((3, 6), (6, 7)) for columns in ((5, 21), (21, 33))
    ]


def test_threads_that_ask_at_once_make_the_blocks_together(tmp_path: Path) -> None:
    both = Barrier(2)

    def read(bounds: Bounds) -> memoryview:
        both.wait(timeout=20)  # so no thread makes all of them
        return block_of(VALUES, bounds)

    spill = Spill(WHOLE, 2, (7, 33, 10), str(tmp_path), read)
    with ThreadPoolExecutor(2) as threads:
        halves = list(threads.map(lambda rows: filled(spill, (rows, (0, 33), (0, 20))), [(0, 4), (4, 7)]))

    assert np.array_equal(np.concatenate(halves), VALUES)


def test_a_block_that_cannot_be_made_fails_all_who_ask(tmp_path: Path) -> None:
    both = Barrier(2)

    def read(bounds: Bounds) -> memoryview:
        both.wait(timeout=20)
        if bounds[2][0]:
            raise StorageError("read", "source", "is gone")

        return block_of(VALUES, bounds)

    spill = Spill(WHOLE, 2, (7, 33, 10), str(tmp_path), read)

    def said(_: int) -> str:
        with pytest.raises(StorageError) as raised:
            filled(spill, ((0, 7), (0, 33), (0, 20)))

        return raised.value.problem

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(said, range(2))) == ["is gone"] * 2

    assert said(0) == "is gone"


def test_a_directory_that_is_not_there_is_named() -> None:
    spill = Spill(WHOLE, 2, (7, 33, 10), "/not/there", lambda bounds: block_of(VALUES, bounds))
    with pytest.raises(StorageError, match="/not/there"):
        filled(spill, ((0, 7), (0, 33), (0, 20)))
