from __future__ import annotations

import gc
import sys
import threading
from weakref import ref

import pytest

from penstock.config import LoopOptions
from penstock.event_loop.imports import import_beside_the_loop
from penstock.event_loop.interpreter_settings import (
    NET_ALLOCATIONS,
    SWITCH_INTERVAL_S,
    Ageing,
    count_as_old,
)

pytestmark = pytest.mark.anyio


def is_old(thing: object) -> bool:
    return any(thing is found for found in gc.get_objects(generation=2))


async def test_imports_run_in_a_thread_with_both_settings_changed() -> None:
    seen: list[tuple[int, int, float]] = []
    before = gc.get_threshold(), sys.getswitchinterval()

    def imports() -> None:
        seen.append((threading.get_ident(), gc.get_threshold()[0], sys.getswitchinterval()))

    await import_beside_the_loop(imports, LoopOptions())

    ((thread, threshold, interval),) = seen
    assert thread != threading.get_ident()
    assert threshold == NET_ALLOCATIONS
    assert interval <= SWITCH_INTERVAL_S
    assert (gc.get_threshold(), sys.getswitchinterval()) == before


@pytest.mark.usefixtures("thawed")
async def test_no_young_collection_walks_what_was_imported() -> None:
    module: list[object] = []
    await import_beside_the_loop(lambda: module.append([module]), LoopOptions())

    assert is_old(module[0])


async def test_a_collector_that_is_not_to_be_changed_is_left_alone() -> None:
    module: list[object] = []
    threshold = gc.get_threshold()
    gc.disable()  # or a collection of its own could make it old
    try:
        await import_beside_the_loop(
            lambda: module.extend([[module], gc.get_threshold()]), LoopOptions(pause_collector=False)
        )
        assert not is_old(module[0])
    finally:
        gc.enable()

    assert module[1] == threshold


async def test_an_import_error_is_raised_as_it_is() -> None:
    def imports() -> None:
        raise ImportError("no such module")

    before = gc.get_threshold(), sys.getswitchinterval()
    with pytest.raises(ImportError, match="no such module"):
        await import_beside_the_loop(imports, LoopOptions())

    assert (gc.get_threshold(), sys.getswitchinterval()) == before


def test_what_the_application_froze_stays_frozen(thawed: None) -> None:
    thing: list[object] = [[]]
    gc.freeze()
    count_as_old()

    assert not is_old(thing)  # it would be, had it thawed


def test_frozen_objects_are_counted_once(thawed: None) -> None:
    counts = [0, 0, 7]
    ageing = Ageing(count_frozen=lambda: counts.pop(0))
    for _ in range(4):
        ageing()
    assert counts == []  # and neither was the fourth time, which would be an IndexError

    thing: list[object] = [[]]
    ageing()
    assert not is_old(thing)
    counts.append(0)
    ageing.ask_again()
    ageing()
    assert is_old(thing)


def test_a_collector_that_the_application_disabled_is_left_alone() -> None:
    gc.disable()
    try:
        thing: list[object] = []
        thing.append(thing)
        count_as_old()
        assert not is_old(thing)
    finally:
        gc.enable()


class Node:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.usefixtures("thawed")
def test_garbage_that_became_old_is_found_once_a_quarter_of_all_is_new() -> None:
    gc.collect()
    ageing = Ageing(first=1_000)
    node = Node()
    known = ref(node)
    ageing()
    del node
    ageing()
    assert known() is not None  # it is old, and little is new

    kept: list[list[object]] = []
    n_full = gc.get_stats()[2]["collections"]
    enough = len(gc.get_objects()) // 3 + 2_000
    before = gc.get_threshold()
    gc.set_threshold(2 * enough, *before[1:])
    try:
        kept.extend([[]] for _ in range(enough))
        ageing()
    finally:
        gc.set_threshold(*before)

    assert gc.get_stats()[2]["collections"] == n_full + 1
    assert known() is None
