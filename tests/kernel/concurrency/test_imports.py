from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest

from penstock.kernel.concurrency.imports import import_beside_the_loop
from penstock.kernel.concurrency.interpreter_settings import (
    NET_ALLOCATIONS,
    SWITCH_INTERVAL_S,
    count_as_old,
)
from penstock.kernel.config.config import LoopOptions

pytestmark = pytest.mark.anyio


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


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
    gc.freeze()
    frozen = gc.get_freeze_count()
    count_as_old()

    assert gc.get_freeze_count() == frozen


def test_a_collector_that_the_application_disabled_is_left_alone() -> None:
    gc.disable()
    try:
        thing: list[object] = []
        thing.append(thing)
        count_as_old()
        assert not is_old(thing)
    finally:
        gc.enable()
