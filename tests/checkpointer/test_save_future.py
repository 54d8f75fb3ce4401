from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
import pytest
from anyio import CancelScope, Event, create_task_group, from_thread
from hypothesis import given
from hypothesis import strategies as st

from penstock import Progress, SaveFuture, SaveReport
from penstock.blocking import LoopHandle
from penstock.checkpointer.save_future import SavePromise
from penstock.errors import RunningLoopError, StorageError
from penstock.kernel import LOGGER_NAME, Milestone

pytestmark = pytest.mark.anyio

T = TypeVar("T")

REPORT = SaveReport("/c", 3, 24)
LAST = Milestone.FINALIZED


def promised(cancel: Callable[[], object] = lambda: None) -> SavePromise:
    return SavePromise("/c", cancel, lambda: Progress(1, 3, 8, 24))


def boom() -> StorageError:
    return StorageError("write", "/c", "boom")


class Background:
    """Calls something in a thread of its own and keeps what came of it."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.value: object = None
        self.error: BaseException | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:
            self.error = error

    def join(self) -> object:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.value


@contextmanager
def saving_elsewhere(backend: str = "asyncio") -> Generator[tuple[SavePromise, Callable[..., Any]]]:
    """A promise made in a loop of another thread, and how to call something there."""
    with from_thread.start_blocking_portal(backend) as portal:
        yield portal.call(promised), portal.call


async def test_a_new_save_has_reached_nothing() -> None:
    future = promised().future

    assert (future.path, future.milestone, future.status, future.done) == ("/c", None, "starting", False)
    assert future.progress == Progress(1, 3, 8, 24)
    assert future.exception() is None
    assert repr(future) == "<SaveFuture '/c' starting>"


async def test_a_future_is_awaited_any_number_of_times_before_and_after_the_end() -> None:
    promise, reports = promised(), list[SaveReport]()

    async def wait() -> None:
        reports.append(await promise.future)

    async with create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert reports == []
        promise.finish(REPORT)

    assert reports == [REPORT] * 3
    assert await promise.future is REPORT
    assert await promise.future.finalized() is REPORT
    assert promise.future.result() is REPORT  # over, so it does not block
    assert (promise.future.status, promise.future.done) == ("finalized", True)
    assert promise.future.milestone is LAST


async def test_each_milestone_is_awaited_by_name_and_a_later_one_implies_it() -> None:
    promise = promised()
    future, passed = promise.future, list[str]()

    async def wait(name: str) -> None:
        await getattr(future, name)()
        passed.append(name)

    async with create_task_group() as tasks:
        for name in ("planned", "staged", "written", "committed", "finalized"):
            tasks.start_soon(wait, name)
        await anyio.wait_all_tasks_blocked()

        promise.reach(Milestone.PLANNED)
        await anyio.wait_all_tasks_blocked()
        assert passed == ["planned"]
        assert (future.milestone, future.status) == (Milestone.PLANNED, "planned")

        promise.reach(Milestone.WRITTEN)
        promise.reach(Milestone.STAGED)  # late, and no step back
        await anyio.wait_all_tasks_blocked()
        assert sorted(passed) == ["planned", "staged", "written"]
        assert future.milestone is Milestone.WRITTEN
        promise.finish(REPORT)

    assert len(passed) == 5


async def test_the_last_milestone_comes_with_the_report_and_not_before() -> None:
    promise = promised()
    promise.reach(LAST)

    assert not promise.future.done
    assert promise.future.milestone is Milestone.KEPT
    promise.finish(REPORT)
    assert await promise.future is REPORT


async def test_a_wait_is_a_checkpoint_also_for_what_is_passed() -> None:
    promise = promised()
    promise.finish(REPORT)

    with CancelScope() as scope:
        scope.cancel()
        await promise.future.planned()

    assert scope.cancelled_caught


async def test_a_failure_is_raised_for_what_was_not_reached() -> None:
    promise, error = promised(), boom()
    promise.reach(Milestone.STAGED)
    seen = list[BaseException]()

    async def wait() -> None:
        with pytest.raises(StorageError) as caught:
            await promise.future
        seen.append(caught.value)

    async with create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        promise.fail(error)

    assert seen == [error]
    await promise.future.staged()
    with pytest.raises(StorageError):
        await promise.future.written()
    with pytest.raises(StorageError):
        promise.future.result()
    assert promise.future.exception() is error
    assert (promise.future.status, promise.future.done) == ("failed", True)
    assert promise.future.milestone is Milestone.STAGED


async def test_the_traceback_of_a_failure_does_not_grow_with_every_await() -> None:
    promise = promised()
    try:
        raise boom()
    except StorageError as error:
        promise.fail(error)

    lengths = set[int]()
    for _ in range(4):
        with pytest.raises(StorageError) as caught:
            await promise.future
        lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))

    assert len(lengths) == 1


async def test_a_failure_is_unseen_until_somebody_was_told() -> None:
    async def awaits(promise: SavePromise) -> None:
        with pytest.raises(StorageError):
            await promise.future

    async def results(promise: SavePromise) -> None:
        with pytest.raises(StorageError):
            promise.future.result()

    async def asks(promise: SavePromise) -> None:
        promise.future.exception()

    async def marks(promise: SavePromise) -> None:
        promise.mark_seen()

    for tell in (awaits, results, asks, marks):
        promise, error = promised(), boom()
        promise.reach(Milestone.STAGED)
        assert promise.error_unseen is None
        promise.fail(error)
        await promise.future.staged()  # passed, so it tells nothing of the failure
        assert promise.future.status == "failed"
        assert promise.error_unseen is error
        await tell(promise)
        assert promise.error_unseen is None


async def test_a_waiter_cancelled_as_the_save_fails_was_not_told() -> None:
    promise, waiting, caught = promised(), Event(), list[bool]()

    async def wait(scope: CancelScope) -> None:
        with scope:
            waiting.set()
            await promise.future
        caught.append(scope.cancelled_caught)

    scope = CancelScope()
    async with create_task_group() as tasks:
        tasks.start_soon(wait, scope)
        await waiting.wait()
        scope.cancel()
        promise.fail(boom())

    assert caught == [True]
    assert promise.error_unseen is not None


async def test_cancelling_a_wait_does_not_cancel_the_save_and_leaves_no_waiter() -> None:
    cancelled = list[bool]()
    promise = promised(lambda: cancelled.append(True))
    for _ in range(3):
        with anyio.move_on_after(0):
            await promise.future

    assert cancelled == []
    assert promise.waiting == []
    promise.finish(REPORT)
    assert await promise.future is REPORT


async def test_cancel_asks_the_kernel_unless_the_save_is_over() -> None:
    asked = list[int]()
    promise = promised(lambda: asked.append(threading.get_ident()))

    promise.future.cancel()
    Background(promise.future.cancel).join()
    assert len(asked) == 2
    assert asked[0] == threading.get_ident() != asked[1]
    assert not promise.future.done

    promise.fail(boom())
    promise.future.cancel()
    assert len(asked) == 2


async def test_nothing_changes_after_the_end() -> None:
    finished, failed, error = promised(), promised(), boom()
    finished.finish(REPORT)
    finished.fail(error)
    failed.reach(Milestone.STAGED)
    failed.fail(error)
    failed.fail(boom())
    failed.reach(Milestone.WRITTEN)
    failed.finish(REPORT)

    assert await finished.future is REPORT
    assert (finished.future.status, finished.error_unseen) == ("finalized", None)
    assert failed.future.exception() is error
    assert failed.future.milestone is Milestone.STAGED
    with pytest.raises(StorageError):
        await failed.future


async def test_callbacks_come_once_at_their_milestone_or_at_a_failure() -> None:
    promise, calls = promised(), list[tuple[str, SaveFuture]]()

    def note(name: str) -> Callable[[SaveFuture], None]:
        return lambda future: calls.append((name, future))

    future = promise.future
    future.add_done_callback(note("staged"), milestone=Milestone.STAGED)
    promise.future.add_done_callback(note("done"))
    promise.reach(Milestone.PLANNED)
    assert calls == []
    promise.reach(Milestone.STAGED)
    assert calls == [("staged", future)]
    promise.future.add_done_callback(note("late"), milestone=Milestone.PLANNED)
    assert [name for name, _ in calls] == ["staged", "late"]
    promise.reach(Milestone.WRITTEN)
    promise.fail(boom())
    assert [name for name, _ in calls] == ["staged", "late", "done"]
    promise.future.add_done_callback(note("after"))
    assert [name for name, _ in calls] == ["staged", "late", "done", "after"]


async def test_a_callback_that_raises_is_logged_and_hinders_nobody(caplog: pytest.LogCaptureFixture) -> None:
    promise, calls = promised(), list[str]()

    def fail(future: SaveFuture) -> None:
        raise RuntimeError("callback")

    promise.future.add_done_callback(fail)
    promise.future.add_done_callback(lambda _: calls.append("next"))
    with caplog.at_level(logging.ERROR, LOGGER_NAME):
        promise.finish(REPORT)
        promise.future.add_done_callback(fail)

    assert calls == ["next"]
    assert await promise.future is REPORT
    assert [record.message.partition(" ")[0] for record in caplog.records] == ["save.callback_failed"] * 2
    assert all(record.exc_info and record.exc_info[0] is RuntimeError for record in caplog.records)


async def test_a_callback_may_add_another() -> None:
    promise, calls = promised(), list[str]()
    promise.future.add_done_callback(
        lambda future: future.add_done_callback(lambda _: calls.append("inner")), milestone=Milestone.STAGED
    )

    promise.reach(Milestone.STAGED)
    assert calls == []
    promise.finish(REPORT)
    assert calls == ["inner"]


async def test_result_in_the_thread_of_the_loop_is_refused_while_it_would_block() -> None:
    promise = promised()
    with pytest.raises(RunningLoopError, match="await"):
        promise.future.result()
    with pytest.raises(RunningLoopError):
        promise.future.result(0.1)

    promise.finish(REPORT)
    assert promise.future.result(0) is REPORT


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_thread_waits_for_the_result(backend: str) -> None:
    with saving_elsewhere(backend) as (promise, call):
        with pytest.raises(TimeoutError, match="is starting after 0 s"):
            promise.future.result(timeout=0)
        call(promise.reach, Milestone.STAGED)
        with pytest.raises(TimeoutError, match=r"is staged after 0\.01 s"):
            promise.future.result(timeout=0.01)
        assert promise.waiting == []

        waiting = Background(promise.future.result)
        call(promise.finish, REPORT)
        assert waiting.join() is REPORT
        assert promise.future.result() is REPORT


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_thread_gets_the_failure(backend: str) -> None:
    error = boom()
    with saving_elsewhere(backend) as (promise, call):
        waiting = Background(lambda: promise.future.result(timeout=5))
        call(promise.fail, error)
        waiting.join()

    assert waiting.error is error
    assert promise.error_unseen is None


@pytest.mark.parametrize("saver", ["asyncio", "trio"])
@pytest.mark.parametrize("waiter", ["asyncio", "trio"])
def test_a_future_is_awaited_from_another_loop_in_another_thread(saver: str, waiter: str) -> None:
    with saving_elsewhere(saver) as (promise, call):
        staged = threading.Event()

        async def wait() -> SaveReport:
            await promise.future.staged()
            staged.set()
            assert await promise.future is REPORT
            return await promise.future

        waiting = Background(lambda: anyio.run(wait, backend=waiter))
        assert not staged.is_set()
        call(promise.reach, Milestone.STAGED)
        assert staged.wait(5)
        call(promise.finish, REPORT)
        assert waiting.join() is REPORT


@pytest.mark.parametrize("waiter", ["asyncio", "trio"])
def test_a_waiter_whose_loop_has_ended_does_not_disturb_the_save(waiter: str) -> None:
    async def handle() -> LoopHandle:
        return LoopHandle()

    # What a loop leaves behind that is torn down while somebody waits in it.
    gone = anyio.run(handle, backend=waiter)
    with saving_elsewhere() as (promise, call), promise.future._waking(LAST, lambda: gone.post(int)):
        call(promise.finish, REPORT)
        assert promise.future.result() is REPORT


async def test_a_waiter_that_comes_as_the_milestone_is_passed_is_woken() -> None:
    # As when another thread looks, finds it not passed, and only then begins to wait.
    promise, woken = promised(), list[bool]()
    promise.reach(Milestone.STAGED)

    with promise.future._waking(Milestone.STAGED, lambda: woken.append(True)):
        assert woken == [True]


def test_a_natively_cancelled_waiter_leaves_the_save_alone() -> None:
    async def main() -> None:
        promise = promised(lambda: pytest.fail("the save was cancelled"))

        async def wait() -> SaveReport:
            return await promise.future

        task = asyncio.ensure_future(wait())
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        promise.finish(REPORT)
        assert await promise.future is REPORT

    anyio.run(main, backend="asyncio")


Step = tuple[str, Milestone]


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["reach", "finish", "fail", "watch"]), st.sampled_from(Milestone)),
        max_size=14,
    )
)
def test_whatever_the_order_every_watcher_is_told_once_and_as_soon_as_it_can_be(steps: list[Step]) -> None:
    promise = promised()
    reached, failed = 0, False
    watched = list[tuple[Milestone, list[tuple[int, bool]]]]()

    def watch(milestone: Milestone) -> None:
        told = list[tuple[int, bool]]()
        watched.append((milestone, told))
        promise.future.add_done_callback(
            lambda future: told.append((int(future.milestone or 0), future.status == "failed")),
            milestone=milestone,
        )

    for kind, milestone in steps:
        if kind == "watch":
            watch(milestone)
        elif kind == "reach":
            promise.reach(milestone)
            reached = reached if failed else max(reached, min(milestone, Milestone.KEPT))
        elif kind == "finish":
            promise.finish(REPORT)
            reached = reached if failed else LAST
        else:
            promise.fail(boom())
            failed = failed or reached < LAST

        assert int(promise.future.milestone or 0) == reached
        assert promise.future.done == (failed or reached == LAST)
        assert (promise.future.status == "failed") == failed
        for at, told in watched:
            assert len(told) == (1 if failed or reached >= at else 0)

    for at, told in watched:
        for seen, had_failed in told:
            assert seen >= at or had_failed
