from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, final

import anyio
import pytest
import tensorstore as ts
from anyio import CancelScope, Event, create_task_group, to_thread
from anyio.lowlevel import checkpoint

from penstock.errors import ConfigError
from penstock.kernel import Threads
from penstock.kernel.concurrency.threads import LoopHandle, _Call, await_future, mark_own_loop

pytestmark = pytest.mark.anyio

BACKENDS = ("asyncio", "trio")


def in_a_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def open_future(kind: str) -> tuple[object, Any]:
    """Return a future with what keeps it open."""
    if kind == "tensorstore":
        return ts.Promise.new()

    return None, concurrent.futures.Future[None]()


async def test_post_calls_in_the_loop_from_any_thread() -> None:
    loop, called, done = LoopHandle(), list[int](), Event()

    def here() -> None:
        called.append(threading.get_ident())
        done.set()

    thread = in_a_thread(lambda: loop.post(here))
    await done.wait()
    thread.join()

    assert called == [threading.get_ident()]


def test_a_loop_handle_needs_a_running_loop() -> None:
    with pytest.raises(anyio.NoEventLoopError):
        LoopHandle()


@pytest.mark.parametrize("backend", BACKENDS)
def test_posting_to_a_loop_that_has_ended_does_nothing(backend: str) -> None:
    async def handle() -> LoopHandle:
        return LoopHandle()

    loop = anyio.run(handle, backend=backend)

    loop.post(lambda: pytest.fail("called"))


async def test_a_concurrent_future_is_awaited() -> None:
    future = concurrent.futures.Future[str]()
    thread = in_a_thread(lambda: future.set_result("value"))

    assert await await_future(future) == "value"
    assert await await_future(future) == "value"  # already done
    thread.join()


async def test_a_tensorstore_future_is_awaited() -> None:
    promised: tuple[ts.Promise[int], ts.Future[int]] = ts.Promise.new()
    promise, future = promised
    thread = in_a_thread(lambda: promise.set_result(3))

    assert await await_future(future) == 3
    assert await await_future(future) == 3
    thread.join()


async def test_a_tensorstore_read_is_awaited() -> None:
    store = await await_future(
        ts.open(
            {
                "driver": "zarr3",
                "kvstore": {"driver": "memory"},
                "metadata": {"shape": [3], "data_type": "int32"},
                "create": True,
            }
        )
    )
    await await_future(store.write([1, 2, 3]))

    assert (await await_future(store.read())).tolist() == [1, 2, 3]


async def test_the_error_of_a_future_is_raised_as_it_is() -> None:
    boom = OSError("boom")
    future = concurrent.futures.Future[None]()
    thread = in_a_thread(lambda: future.set_exception(boom))
    with pytest.raises(OSError, match="boom") as caught:
        await await_future(future)

    thread.join()
    assert caught.value is boom

    with pytest.raises(ValueError, match=r"NOT_FOUND|not found"):
        await await_future(
            ts.open({"driver": "zarr3", "kvstore": {"driver": "memory", "path": "absent/"}, "open": True})
        )


@pytest.mark.parametrize("kind", ["concurrent", "tensorstore"])
async def test_a_future_that_somebody_else_cancels_is_an_ordinary_error(kind: str) -> None:
    # TensorStore raises asyncio.CancelledError, which on asyncio would end the task in silence and
    # on trio is not even an Exception.
    promise, future = open_future(kind)
    future.cancel()

    with pytest.raises(concurrent.futures.CancelledError):
        await await_future(future)

    del promise


@pytest.mark.parametrize("kind", ["concurrent", "tensorstore"])
async def test_cancelling_the_wait_cancels_the_future(kind: str) -> None:
    promise, future = open_future(kind)
    asked = Event()
    with CancelScope() as scope:
        async with create_task_group() as tasks:

            async def wait() -> None:
                asked.set()
                await await_future(future)

            tasks.start_soon(wait)
            await asked.wait()
            scope.cancel()

    assert scope.cancelled_caught
    assert future.done()
    with pytest.raises((concurrent.futures.CancelledError, asyncio.CancelledError)):
        future.result()

    del promise


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_future_that_completes_after_the_loop_has_ended_harms_nobody(
    backend: str, recwarn: pytest.WarningsRecorder
) -> None:
    future = Stubborn()

    async def give_up() -> None:
        with CancelScope() as scope:
            async with create_task_group() as tasks:
                tasks.start_soon(await_future, future)
                while not future.callbacks:
                    await checkpoint()
                scope.cancel()

    anyio.run(give_up, backend=backend)
    assert future.cancelled
    thread = in_a_thread(future.complete)
    thread.join()

    assert future.raised is None
    assert not recwarn.list


@final
class Stubborn:
    """A future that takes no notice of being cancelled."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []
        self.cancelled = False
        self.raised: BaseException | None = None

    def add_done_callback(self, callback: Callable[[Any], None], /) -> None:
        self.callbacks.append(callback)

    def cancel(self) -> bool:
        self.cancelled = True
        return False

    def result(self) -> None:
        return None

    def complete(self) -> None:
        try:
            for callback in self.callbacks:
                callback(self)
        except BaseException as error:
            self.raised = error


@final
class Counting:
    """An awaitable that counts how often the loop comes back to it."""

    def __init__(self, awaitable: Coroutine[Any, Any, Any]) -> None:
        self.steps = 0
        self._inner = awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        value: Any = None
        while True:
            self.steps += 1
            try:
                asked = self._inner.send(value)
            except StopIteration as end:
                return end.value
            while True:
                try:
                    value = yield asked
                    break
                except BaseException as error:
                    self.steps += 1
                    asked = self._inner.throw(error)


async def test_waiting_for_a_future_leaves_the_loop_idle() -> None:
    # No polling: while the future is open, the waiting task is never stepped.
    future = Stubborn()
    counting, at_first = Counting(await_future(future)), 0

    async def wait() -> None:
        await counting

    async with create_task_group() as tasks:
        tasks.start_soon(wait)
        for _ in range(100):
            await checkpoint()
        at_first = counting.steps
        for _ in range(100):
            await checkpoint()
        assert counting.steps == at_first
        future.complete()

    assert counting.steps <= at_first + 2


async def test_a_call_runs_in_another_thread_and_its_result_or_error_comes_back() -> None:
    threads = Threads(2)

    assert await threads.run(threading.get_ident) != threading.get_ident()
    assert await threads.run(divmod, 7, 3) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(divmod, 7, 0)

    assert threads.busy == 0


async def test_a_call_that_its_waiter_leaves_keeps_its_thread_busy_until_it_is_over() -> None:
    threads, begun, go_on = Threads(1), Event(), threading.Event()
    loop = LoopHandle()

    def work() -> int:
        loop.post(begun.set)
        go_on.wait(60)
        return 3

    call = threads.call_once(work)
    async with create_task_group() as tasks:
        tasks.start_soon(call)
        await begun.wait()
        tasks.cancel_scope.cancel()

    assert threads.busy == 1
    go_on.set()
    assert await call() == 3
    assert threads.busy == 0


async def test_a_call_that_a_cancelled_waiter_did_not_begin_is_begun_by_another() -> None:
    threads, go_on = Threads(1), threading.Event()
    call = threads.call_once(lambda: 3)
    first, found = CancelScope(), list[int]()

    async def wait_first() -> None:
        with first:
            await call()

    async def wait_second() -> None:
        found.append(await call())

    async with create_task_group() as tasks:
        tasks.start_soon(threads.run, go_on.wait, 60)
        await checkpoint()
        tasks.start_soon(wait_first)
        tasks.start_soon(wait_second)
        await anyio.wait_all_tasks_blocked()
        first.cancel()
        go_on.set()

    assert found == [3]
    assert threads.busy == 0


async def test_more_threads_may_be_busy_once_that_is_allowed_and_never_fewer() -> None:
    threads, all_there = Threads(1), threading.Barrier(3)
    threads.allow(3)
    threads.allow(2)

    async with create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(threads.run, all_there.wait, 30)

    assert threads.busy == 0


@pytest.mark.parametrize("limit", [1, 3])
async def test_no_more_threads_are_busy_than_the_limit(limit: int) -> None:
    threads, present, most = Threads(limit), 0, 0
    lock, full, go_on = threading.Lock(), Event(), threading.Event()
    loop = LoopHandle()

    def work() -> None:
        nonlocal present, most
        with lock:
            present += 1
            most = max(most, present)
            if present == limit:
                loop.post(full.set)
        go_on.wait(60)
        with lock:
            present -= 1

    async with create_task_group() as tasks:
        for _ in range(3 * limit):
            tasks.start_soon(threads.run, work)

        await full.wait()
        for _ in range(50):
            await checkpoint()
        assert threads.busy == limit
        go_on.set()

    assert most == limit
    assert threads.busy == 0


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_is_not_positive_is_refused(limit: int) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        Threads(limit)


async def test_a_cancelled_call_is_waited_for() -> None:
    threads, begun, over = Threads(), Event(), list[bool]()
    loop, go_on = LoopHandle(), threading.Event()

    def work() -> None:
        loop.post(begun.set)
        go_on.wait(60)
        over.append(True)

    async def call(scope: CancelScope) -> None:
        with scope:
            await threads.run(work)
            await checkpoint()

        assert over == [True]

    scope = CancelScope()
    async with create_task_group() as tasks:
        tasks.start_soon(call, scope)
        await begun.wait()
        scope.cancel()
        for _ in range(20):
            await checkpoint()
        assert threads.busy == 1
        assert over == []
        go_on.set()

    assert scope.cancelled_caught
    assert threads.busy == 0


def test_a_natively_cancelled_call_is_waited_for_however_often_it_is_cancelled() -> None:
    # asyncio's own Task.cancel goes through AnyIO's shield.
    async def main() -> None:
        threads, begun, over = Threads(), Event(), list[bool]()
        loop, go_on = LoopHandle(), threading.Event()

        def work() -> None:
            loop.post(begun.set)
            go_on.wait(60)
            over.append(True)

        task = asyncio.ensure_future(threads.run(work))
        await begun.wait()
        for _ in range(3):
            task.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not task.done()

        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert over == [True]

    anyio.run(main, backend="asyncio")


def test_a_call_that_is_natively_cancelled_before_it_begins_never_does() -> None:
    async def main() -> None:
        threads, begun, called = Threads(1), Event(), list[int]()
        loop, go_on = LoopHandle(), threading.Event()

        def work() -> None:
            loop.post(begun.set)
            go_on.wait(60)

        first = asyncio.ensure_future(threads.run(work))
        await begun.wait()
        second = asyncio.ensure_future(threads.run(called.append, 1))
        for _ in range(5):
            await asyncio.sleep(0)

        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        go_on.set()
        await first
        assert called == []
        assert threads.busy == 0

    anyio.run(main, backend="asyncio")


async def test_a_call_that_was_given_up_does_not_begin_later() -> None:
    called = list[int]()
    call = _Call(called.append, (1,))
    await call.wait_over()

    call()
    assert called == []


def test_a_call_cancelled_in_both_ways_is_waited_for_without_spinning() -> None:
    async def main() -> None:
        threads, begun, scope = Threads(), Event(), CancelScope()
        loop, go_on = LoopHandle(), threading.Event()

        def work() -> None:
            loop.post(begun.set)
            go_on.wait(60)

        counting = Counting(threads.run(work))

        async def run() -> None:
            with scope:
                await counting

        task = asyncio.ensure_future(run())
        await begun.wait()
        task.cancel()
        scope.cancel()
        for _ in range(50):
            await asyncio.sleep(0)

        assert not task.done()
        assert counting.steps < 10
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    anyio.run(main, backend="asyncio")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_brief_call_needs_no_thread_in_a_loop_of_penstock_s_own(backend: str) -> None:
    async def elsewhere() -> tuple[int, int]:
        return threading.get_ident(), await Threads().run_briefly(threading.get_ident)

    async def at_home() -> tuple[int, int]:
        mark_own_loop()
        loop, ran = await to_thread.run_sync(anyio.run, elsewhere)  # where the mark is known, too
        assert loop != ran
        return await elsewhere()

    loop, ran = anyio.run(elsewhere, backend=backend)
    assert loop != ran
    assert len(set(anyio.run(at_home, backend=backend))) == 1
