from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from penstock.kernel.memory import buffers
from penstock.kernel.memory.buffers import MAPPED_FROM, anonymous_memory, in_separate_memory

MIB = 2**20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(("huge", "again"), [(False, False), (True, False), (True, True)])
def test_a_buffer_is_zeroed_writable_and_begins_on_a_page(huge: bool, again: bool) -> None:
    memory = anonymous_memory(3 * MIB + 5, huge_pages=huge, used_again=again)
    array = np.frombuffer(memory, np.uint8)

    assert (len(memory), memory.format, memory.readonly) == (3 * MIB + 5, "B", False)
    assert not array.any()
    assert array.ctypes.data % 4096 == 0
    memory[:3] = b"abc"
    assert array[:3].tobytes() == b"abc"


def test_a_buffer_goes_back_to_the_system_with_its_last_view() -> None:
    gc.collect()
    before = resident()
    memory = anonymous_memory(64 * MIB)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1
    part = array[5:10]
    del memory, array
    assert resident() - before > 60 * MIB
    assert part.tolist() == [1] * 5
    del part
    assert resident() - before < 8 * MIB


def test_bytes_are_moved_once_if_they_are_many() -> None:
    small, large = memoryview(b"x" * (MAPPED_FROM - 1)), memoryview(b"y" * MAPPED_FROM)
    assert in_separate_memory(small) is small
    moved = in_separate_memory(large)
    assert moved is not large
    assert moved == large
    assert in_separate_memory(moved[5:]) == moved[5:]
    view = np.frombuffer(moved, np.uint32)[1:].view(np.uint8).data
    assert in_separate_memory(view) is view


def test_a_buffer_larger_than_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        anonymous_memory(1 << 62)


def is_advised(memory: memoryview) -> bool:
    """Return whether the mapping that holds the memory is marked for huge pages."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head:
            start, stop = (int(end, 16) for end in head.split("-"))
            inside = start <= address < stop
        elif inside and head == "VmFlags:":
            return "hg" in line.split()

    raise AssertionError("the memory is in no mapping")


@pytest.mark.parametrize(
    ("order", "in_huge_pages"),
    [("9", False), ("0", False), ("4294967295", True), ("-1", True), ("none", True), (None, True)],
)
def test_memory_that_is_touched_once_is_in_no_huge_pages_where_the_host_gets_free_ones_back(
    order: str | None, in_huge_pages: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "page_reporting_order"
    if order is not None:
        file.write_text(f"{order}\n")

    monkeypatch.setattr(buffers, "_REPORTED", str(file))
    buffers._gives_back_free_blocks.cache_clear()
    try:
        once = anonymous_memory(8 * MIB, huge_pages=True)
        again = anonymous_memory(8 * MIB, huge_pages=True, used_again=True)
        assert is_advised(once) == in_huge_pages
        assert is_advised(again)
    finally:
        buffers._gives_back_free_blocks.cache_clear()
