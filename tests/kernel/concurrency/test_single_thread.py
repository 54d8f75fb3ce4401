"""Calls that one and the same thread makes."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from anyio import CancelScope, create_task_group, fail_after
from anyio.lowlevel import checkpoint
from tests.stages.stage_rig import cancel_in

from penstock.kernel.concurrency.threads import one_thread
from penstock.testing import Hang, Operation

pytestmark = pytest.mark.anyio


async def test_all_calls_are_made_by_one_thread_in_order() -> None:
    made: list[tuple[int, int]] = []

    def call(at: int) -> int:
        made.append((at, threading.get_ident()))
        return at * 2

    results: list[int] = []

    async def ask(at: int) -> None:
        results.append(await thread.run(call, at))

    async with one_thread() as thread:
        async with create_task_group() as tasks:
            for at in range(20):
                tasks.start_soon(ask, at)

        assert await thread.run(call, 20) == 40

    assert sorted(results) == [at * 2 for at in range(20)]
    assert {ident for _, ident in made} == {made[0][1]} != {threading.get_ident()}
    assert made[-1][0] == 20


async def test_without_a_call_there_is_no_thread() -> None:
    before = threading.active_count()
    async with one_thread():
        assert threading.active_count() <= before


async def test_what_a_call_raises_is_raised_and_the_next_one_works() -> None:
    def fail() -> None:
        raise ArithmeticError("once")

    async with one_thread() as thread:
        with pytest.raises(ArithmeticError, match="once"):
            await thread.run(fail)

        assert await thread.run(len, "abc") == 3


async def test_what_a_call_returned_is_not_kept() -> None:
    class Thing:
        pass

    async with one_thread() as thread:
        thing = await thread.run(Thing)
        known = weakref.ref(thing)
        del thing
        with fail_after(20):
            while known() is not None:  # the thread is about to forget it
                gc.collect()
                await checkpoint()


@pytest.mark.parametrize("native", [False, True])
async def test_a_call_that_has_begun_is_waited_for(native: bool) -> None:
    hang = Hang()
    ended: list[str] = []

    def slow() -> None:
        hang.hold(Operation("slow", ""))
        ended.append("slow")

    async def work() -> None:
        async with one_thread() as thread:
            await thread.run(slow)

    await cancel_in(hang, work, native=native)

    assert ended == ["slow"]


async def test_who_is_cancelled_goes_on_when_the_call_has_ended() -> None:
    hang, scope = Hang(), CancelScope()
    ended: list[str] = []

    def slow() -> None:
        hang.hold(Operation("slow", ""))
        ended.append("slow")

    async def ask() -> None:
        with scope:
            await thread.run(slow)

        ended.append("asked")

    async with one_thread() as thread, create_task_group() as tasks:
        tasks.start_soon(ask)
        await hang.wait_reached()
        scope.cancel()
        for _ in range(20):
            await checkpoint()

        hang.release()

    assert ended == ["slow", "asked"]


async def test_a_call_that_has_not_begun_never_is() -> None:
    hang = Hang()
    ended: list[str] = []
    async with one_thread() as thread, create_task_group() as tasks:
        tasks.start_soon(thread.run, hang.hold, Operation("slow", ""))
        await hang.wait_reached()
        scope = CancelScope()
        with scope:
            scope.cancel()
            await thread.run(ended.append, "never")

        assert scope.cancelled_caught
        hang.release()

    assert ended == []


async def test_a_failure_of_the_block_ends_the_thread() -> None:
    made: list[str] = []

    async def fail() -> None:
        async with one_thread() as thread:
            await thread.run(made.append, "before")
            raise ArithmeticError

    with pytest.raises(ExceptionGroup) as raised:
        await fail()

    assert raised.group_contains(ArithmeticError)
    assert made == ["before"]
