"""The collector and the switch interval are changed together, counted, bounded, and put back."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from anyio import create_task_group, fail_after

from penstock.config import LoopOptions
from penstock.event_loop.interpreter_settings import (
    MOST_PERIODS,
    NET_ALLOCATIONS,
    SWITCH_INTERVAL_S,
    Setting,
    calm_interpreter,
    calm_part,
)

pytestmark = pytest.mark.anyio
BOTH = LoopOptions()


@pytest.fixture(autouse=True)
def settings() -> Iterator[tuple[tuple[int, int, int], float]]:
    before = gc.get_threshold(), sys.getswitchinterval()
    yield before
    now = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(*before[0])
    sys.setswitchinterval(before[1])
    assert now == before


def changed() -> tuple[bool, bool]:
    return gc.get_threshold()[0] == NET_ALLOCATIONS, sys.getswitchinterval() <= SWITCH_INTERVAL_S * 1.01


async def test_settings_are_changed_for_the_block_and_the_last_of_several_puts_them_back() -> None:
    with fail_after(20):
        async with create_task_group() as tasks:
            with calm_interpreter(tasks, BOTH):
                assert changed() == (True, True)
                with calm_interpreter(tasks, BOTH):
                    pass
                assert changed() == (True, True)

            assert changed() == (False, False)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
async def test_each_setting_can_be_turned_off(wanted: tuple[bool, bool]) -> None:
    async with create_task_group() as tasks:
        with calm_interpreter(tasks, LoopOptions(*wanted)):
            assert changed() == wanted


async def test_an_error_and_a_cancellation_put_them_back() -> None:
    async with create_task_group() as tasks:
        with pytest.raises(KeyError), calm_interpreter(tasks, BOTH):
            raise KeyError
        assert changed() == (False, False)
        with anyio.CancelScope() as scope, calm_interpreter(tasks, BOTH):
            scope.cancel()
            await anyio.sleep_forever()
        assert changed() == (False, False)


async def test_a_long_operation_gives_the_settings_back_before_its_end() -> None:
    with fail_after(20):
        async with create_task_group() as tasks:
            with calm_interpreter(tasks, BOTH, most_s=0):
                while changed() != (False, False):
                    await anyio.lowlevel.checkpoint()


@pytest.mark.usefixtures("thawed")
async def test_settings_stay_while_objects_are_made_by_the_ten_thousand_but_not_for_ever() -> None:
    period, since, many = 0.02, anyio.current_time(), list[object]()
    with fail_after(20):
        async with create_task_group() as tasks:
            with calm_interpreter(tasks, BOTH, most_s=period):
                while changed() == (True, True):
                    many = [[many] for _ in range(2 * NET_ALLOCATIONS)]
                    await anyio.lowlevel.checkpoint()

    assert anyio.current_time() - since >= MOST_PERIODS * period


async def test_what_somebody_else_sets_meanwhile_stays(
    settings: tuple[tuple[int, int, int], float],
) -> None:
    async with create_task_group() as tasks:
        with calm_interpreter(tasks, BOTH):
            gc.set_threshold(77, 7, 7)
            sys.setswitchinterval(0.02)

        assert gc.get_threshold() == (77, 7, 7)
        assert sys.getswitchinterval() == pytest.approx(0.02)

    gc.set_threshold(*settings[0])
    sys.setswitchinterval(settings[1])


async def test_a_collector_that_is_off_stays_off(settings: tuple[tuple[int, int, int], float]) -> None:
    gc.set_threshold(0)
    async with create_task_group() as tasks:
        with calm_interpreter(tasks, BOTH):
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0

    gc.set_threshold(*settings[0])


async def test_whether_the_collector_is_enabled_is_nobodys_affair_here() -> None:
    gc.disable()
    try:
        async with create_task_group() as tasks:
            with calm_interpreter(tasks, BOTH):
                assert not gc.isenabled()
                gc.enable()
            assert gc.isenabled()
    finally:
        gc.enable()


def test_a_setting_is_changed_once_however_many_want_it() -> None:
    values = [5]
    setting = Setting(lambda: values[-1], values.append, lambda value: value * 10)
    with setting.changed(), setting.changed():
        assert values == [5, 50]
    assert values == [5, 50, 5]
    with setting.changed():
        assert values == [5, 50, 5, 50]


@pytest.fixture
def collected() -> Iterator[list[int]]:
    """The generations of all collections meanwhile."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(note)
    yield generations
    gc.callbacks.remove(note)


@pytest.mark.usefixtures("thawed")
async def test_only_young_collections_run_however_much_is_made(collected: list[int]) -> None:
    made: list[object] = []
    young, counts = -1, (-1, -1, -1)
    gc.collect()
    collected.clear()
    async with create_task_group() as tasks:
        with calm_interpreter(tasks, BOTH):
            made.extend([made] for _ in range(20 * NET_ALLOCATIONS))
            young = gc.get_count()[0]
        counts = gc.get_count()

    assert len(collected) >= 20
    assert set(collected) == {0}
    assert young <= 2 * NET_ALLOCATIONS  # each walks that many and no more
    assert counts[1:] == (0, 0)  # and neither of the others is due
    assert any(made[0] is thing for thing in gc.get_objects(generation=2))


async def test_what_little_is_made_stays_young(collected: list[int]) -> None:
    made: list[object] = []
    gc.collect()
    collected.clear()
    async with create_task_group() as tasks:
        with calm_interpreter(tasks, BOTH):
            made.append([made])

    assert set(collected) <= {0}
    assert not any(made[0] is thing for thing in gc.get_objects(generation=2))


async def test_garbage_that_is_made_meanwhile_is_collected_meanwhile() -> None:
    class Thing: ...

    async with create_task_group() as tasks:
        with calm_interpreter(tasks, BOTH):
            thing: Any = Thing()
            thing.itself, gone = thing, weakref.ref(thing)
            del thing
            made = [[gone] for _ in range(2 * NET_ALLOCATIONS)]
            assert gone() is None
            del made


async def test_a_part_of_an_operation_is_calm_by_itself_and_fails_as_it_does() -> None:
    before = gc.get_threshold()

    async def fail() -> None:
        async with calm_part(BOTH):
            assert gc.get_threshold() != before
            raise KeyError("x")

    with pytest.raises(KeyError):
        await fail()

    assert gc.get_threshold() == before
