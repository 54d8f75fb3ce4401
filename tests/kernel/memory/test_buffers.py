from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from penstock.kernel.memory import buffers
from penstock.kernel.memory.buffers import (
    MAPPED_FROM,
    UsedMemory,
    anonymous_memory,
    huge_pages_are_cheap,
    is_mapped,
    make_pages,
)

MIB = 2**20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("huge", [False, True])
def test_a_buffer_is_zeroed_writable_and_begins_on_a_page(huge: bool) -> None:
    memory = anonymous_memory(3 * MIB + 5, huge_pages=huge)
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


def test_pages_are_made_at_once_and_hold_what_they_held() -> None:
    gc.collect()
    before = resident()
    memory = anonymous_memory(64 * MIB)
    memory[40 * MIB] = 7
    make_pages(memory[5:-5])  # neither end is on a page

    kernel = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if kernel >= (5, 14):  # before, nothing is done
        assert resident() - before > 60 * MIB
    array = np.frombuffer(memory, np.uint8)
    assert (array.nonzero()[0].tolist(), array[40 * MIB]) == ([40 * MIB], 7)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 8191])
def test_memory_of_no_whole_page_is_left_as_it_is(nbytes: int) -> None:
    memory = memoryview(bytearray(b"x" * nbytes))
    make_pages(memory)
    assert memory == b"x" * nbytes


def test_bytes_are_known_to_be_in_a_mapping_through_any_view() -> None:
    memory = anonymous_memory(MAPPED_FROM)
    assert is_mapped(memory[5:])
    assert is_mapped(np.frombuffer(memory, np.uint32)[1:].view(np.uint8).data)
    assert not is_mapped(memoryview(b"x"))


def test_a_buffer_larger_than_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        anonymous_memory(1 << 62)


@pytest.mark.parametrize(
    ("order", "are_cheap"),
    [("9", False), ("0", False), ("4294967295", True), ("-1", True), ("none", True), (None, True)],
)
def test_huge_pages_are_dear_where_the_host_gets_free_ones_back(
    order: str | None, are_cheap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "page_reporting_order"
    if order is not None:
        file.write_text(f"{order}\n")

    monkeypatch.setattr(buffers, "_REPORTED", str(file))
    huge_pages_are_cheap.cache_clear()
    try:
        assert huge_pages_are_cheap() == are_cheap
    finally:
        huge_pages_are_cheap.cache_clear()


def address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def test_memory_is_used_again_when_its_last_view_is_gone_and_not_before() -> None:
    used = UsedMemory(4 * MIB)
    first = used.take(2 * MIB)
    at, part = address(first), first[5:10]
    del first
    assert address(used.take(2 * MIB)) != at  # a part of it is still seen

    del part
    again = used.take(2 * MIB)
    assert address(again) == at
    assert len(again) == 2 * MIB
    assert not again.readonly


def test_what_is_kept_gives_way_to_what_is_asked_for() -> None:
    used = UsedMemory(6 * MIB)
    gc.collect()
    before = resident()
    for nbytes, times in [(2 * MIB, 3), (5 * MIB, 1), (2 * MIB, 3), (3 * MIB, 2)]:
        taken = [used.take(nbytes) for _ in range(times)]
        for at in range(times):
            np.frombuffer(taken[at], np.uint8)[:] = 1

        assert resident() - before < 8 * MIB
        del taken


def test_memory_that_is_given_back_while_another_thread_takes_some_is_not_lost() -> None:
    used = UsedMemory(4 * MIB)
    first, second = used.take(2 * MIB), used.take(2 * MIB)
    places = {address(first), address(second)}
    with used._lock:
        del first  # as the collector may do at any time

    del second
    assert {address(each) for each in (used.take(2 * MIB), used.take(2 * MIB))} <= places


def test_no_more_memory_is_kept_than_was_said() -> None:
    used = UsedMemory(4 * MIB)
    gc.collect()
    before = resident()
    taken = [used.take(2 * MIB) for _ in range(8)]
    for at in range(8):
        taken[at][:] = bytes(2 * MIB)

    assert resident() - before > 15 * MIB
    del taken
    assert resident() - before < 6 * MIB
    used.clear()
    assert resident() - before < 2 * MIB
    kept = used.take(2 * MIB)
    kept[:] = bytes(2 * MIB)
    del kept
    assert resident() - before < 2 * MIB  # after `clear`, nothing is kept
