"""Several calls at the same time: their results, or the first failure as it is."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread
import pytest

from penstock.errors import PipelineError
from penstock.kernel import Threads
from penstock.kernel.pipeline.together import MANY, at_once, together

LIMIT_S = 20.0


def returning(value: int, after: anyio.Event | None = None) -> Callable[[], Awaitable[int]]:
    async def call() -> int:
        if after is not None:
            await after.wait()

        return value

    return call


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_results_come_in_the_order_of_the_calls(count: int) -> None:
    assert await together([returning(at) for at in range(count)]) == list(range(count))


async def test_calls_run_at_the_same_time() -> None:
    begun = anyio.Event()

    async def begin() -> int:
        begun.set()
        return 2

    with anyio.fail_after(20):
        assert await together([returning(1, begun), begin]) == [1, 2]


@pytest.mark.parametrize("count", [1, 2])
async def test_the_first_failure_is_raised_as_it_is_and_ends_the_others(count: int) -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("waiting")

    async def fail() -> None:
        raise KeyError("the first")

    with anyio.fail_after(20), pytest.raises(KeyError, match="the first") as caught:
        await together([fail, wait][:count])

    assert ended == ["waiting"] * (count - 1)
    assert caught.value.__context__ is None


async def test_a_cancellation_from_outside_ends_all_calls() -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await together([anyio.sleep_forever, anyio.sleep_forever])

    assert scope.cancelled_caught


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_call_that_another_has_cancelled_is_no_quiet_result() -> None:
    import asyncio

    async def be_cancelled() -> int:
        raise asyncio.CancelledError

    with pytest.raises(PipelineError, match="ended early"):
        await together([returning(1), be_cancelled])


async def test_many_blocking_calls_run_in_several_threads_at_once() -> None:
    meeting = threading.Barrier(4)
    threads = Threads()

    def call(number: int) -> int:
        meeting.wait(LIMIT_S)  # for three others: they would never come if one call followed another
        return number * 2

    found = await threads.run(at_once, call, range(MANY), Threads(4))
    assert found == [number * 2 for number in range(MANY)]
    assert threads.busy == 0


@pytest.mark.parametrize("in_worker", [True, False])
async def test_few_blocking_calls_follow_one_another_and_so_do_many_outside_of_a_loop(
    in_worker: bool,
) -> None:
    def calls() -> tuple[list[int], int]:
        count = MANY - 1 if in_worker else 3 * MANY
        return at_once(lambda _: threading.get_ident(), range(count)), threading.get_ident()

    found, here = await Threads().run(calls) if in_worker else calls()
    assert set(found) == {here}


async def test_after_a_failure_no_further_blocking_call_begins() -> None:
    begun: list[int] = []

    def call(number: int) -> None:
        begun.append(number)
        if number == 2:
            raise KeyError("the third")

    with pytest.raises(KeyError, match="the third"):
        await Threads().run(at_once, call, range(MANY), Threads(1))

    assert begun == [0, 1, 2]


async def test_a_cancellation_lets_no_further_blocking_call_begin() -> None:
    begun, go_on = threading.Event(), threading.Event()
    numbers: list[int] = []
    threads = Threads()

    def call(number: int) -> None:
        numbers.append(number)
        begun.set()
        go_on.wait(LIMIT_S)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(threads.run, at_once, call, range(MANY), Threads(1))
        await anyio.to_thread.run_sync(begun.wait, LIMIT_S)
        tasks.cancel_scope.cancel()
        go_on.set()

    assert numbers == [0]
    assert threads.busy == 0
