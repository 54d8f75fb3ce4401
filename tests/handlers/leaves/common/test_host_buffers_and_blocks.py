"""Where restored bytes go, and how arrays are cut."""

from __future__ import annotations

import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.handlers.leaves.blocks import HostRegion, boxes


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 4096, 1 << 16, (4 << 20) - 1, 4 << 20, (9 << 20) + 1])
def test_a_region_is_aligned_writable_and_whole(nbytes: int) -> None:
    region = HostRegion(((5, 5 + nbytes),), np.dtype(np.int8))
    view = region.view()
    assert (len(view), view.format, view.readonly, view.contiguous) == (nbytes, "B", False, True)
    assert region.nbytes == nbytes == region.array().nbytes
    if nbytes:
        assert region.array().ctypes.data % (4096 if nbytes >= 1 << 16 else 64) == 0
        view[-1] = 7
        assert region.array()[-1] == 7


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_region_is_private_memory() -> None:
    # Shared memory, which is mmap's default, gets no huge pages and takes six times as long to fill.
    region = HostRegion(((0, 8 << 20),), np.dtype(np.int8))
    address = region.array().ctypes.data
    found: list[str] = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, rights, *_ = line.split()
        start, end = (int(limit, 16) for limit in span.split("-"))
        if start <= address < end:
            found.append(rights)

    assert found == ["rw-p"]


def test_joined_regions_lie_on_pages_of_one_allocation_that_lives_as_long_as_any() -> None:
    regions = [HostRegion(((0, nbytes),), np.dtype(np.int8)) for nbytes in (4096, 70_000, 1 << 20)]
    regions[0].join(regions[1:])

    arrays = [region.array() for region in reversed(regions)]
    for value, array in enumerate(arrays):
        array[:] = value

    addresses = [region.array().ctypes.data for region in regions]
    assert [address % 4096 for address in addresses] == [0, 0, 0]
    assert [address - addresses[0] for address in addresses] == [0, 4096, 4096 + 73_728]

    last = arrays[0]
    del arrays, regions
    assert last.nbytes == 1 << 20
    assert not last.any()


def test_a_region_has_the_shape_of_its_bounds() -> None:
    region = HostRegion(((2, 4), (0, 3)), np.dtype(np.float32))
    assert (region.shape, region.nbytes, len(region.view())) == ((2, 3), 24, 24)
    assert region.array() is region.array()
    assert HostRegion.whole((2, 3), np.dtype(np.int8)).bounds == ((0, 2), (0, 3))
    scalar = HostRegion((), np.dtype(np.float64))
    assert (scalar.shape, scalar.nbytes, scalar.array().shape) == ((), 8, ())


def test_a_region_is_allocated_when_it_is_looked_at() -> None:
    region = HostRegion(((0, 1 << 60),), np.dtype(np.int8))
    assert "not allocated" in repr(region)
    small = HostRegion(((0, 4),), np.dtype(np.int8))
    small.view()
    assert repr(small) == "HostRegion(((0, 4),), int8, allocated)"


def test_threads_that_look_at_once_see_one_buffer() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that a missing lock shows
    try:
        with ThreadPoolExecutor(4) as threads:
            for _ in range(200):
                region = HostRegion(((0, 4 << 20),), np.dtype(np.int8))
                seen = threads.map(_look, [region] * 4, [threading.Barrier(4)] * 4)
                assert len(set(seen)) == 1
    finally:
        sys.setswitchinterval(interval)


def _look(region: HostRegion, together: threading.Barrier) -> int:
    together.wait()
    return np.frombuffer(region.view(), np.int8).ctypes.data


@given(st.lists(st.integers(0, 6), max_size=5).map(tuple), st.integers(1, 50))
def test_boxes_cover_an_array_once_in_c_order(shape: tuple[int, ...], most: int) -> None:
    flat = np.arange(math.prod(shape)).reshape(shape)
    at = 0
    sizes: set[tuple[int, ...]] = set()
    for box in boxes(shape, most):
        part = flat[box.slices]
        assert box.first == at
        assert 1 <= box.n_elements == part.size <= most
        assert part.reshape(-1).tolist() == list(range(at, at + part.size))
        at += part.size
        sizes.add(box.sizes)

    assert at == flat.size
    assert len(sizes) <= 2


def test_boxes_are_nearly_as_large_as_they_may_be() -> None:
    assert [box.n_elements for box in boxes((10, 7), 30)] == [28, 28, 14]
    assert [box.n_elements for box in boxes((2, 101), 100)] == [51, 50, 51, 50]
    assert [box.n_elements for box in boxes((), 1)] == [1]
