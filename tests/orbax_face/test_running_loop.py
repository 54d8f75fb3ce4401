"""Inside a running event loop: synchronous calls work, coroutines are coroutines, nothing is left behind."""

from __future__ import annotations

import gc
import re
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from anyio import create_task_group, to_thread

import penstock
import penstock.orbax as ocp
from penstock.blocking import LoopThread, run_sync


def threads_of_ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock.orbax"]


async def test_synchronous_calls_work_inside_a_running_loop(tmp_path: Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", {"a": np.arange(3)})
        np.testing.assert_array_equal(checkpointer.restore(tmp_path / "one")["a"], np.arange(3))
        assert checkpointer.metadata(tmp_path / "one").item_metadata["a"].shape == (3,)
    with ocp.StandardCheckpointer() as standard:
        standard.save(tmp_path / "two", {"a": np.arange(3)})
        standard.wait_until_finished()
        np.testing.assert_array_equal(standard.restore(tmp_path / "two")["a"], np.arange(3))


async def test_async_save_is_a_coroutine_and_the_tree_may_change_when_it_returns(tmp_path: Path) -> None:
    handler = ocp.PyTreeCheckpointHandler()
    array = np.arange(1000)
    futures: Any = await handler.async_save(tmp_path, args=ocp.args.PyTreeSave({"a": array}))
    array[:] = 0
    for future in futures:
        await to_thread.run_sync(future.result)

    np.testing.assert_array_equal(handler.restore(tmp_path)["a"], np.arange(1000))
    handler.close()


async def test_a_handler_inside_a_handler_s_coroutine(tmp_path: Path) -> None:
    inner = ocp.PyTreeCheckpointHandler()

    class Outer(ocp.AsyncCheckpointHandler):
        async def async_save(self, directory: Any, item: Any) -> Any:
            inner.save(directory, args=ocp.args.PyTreeSave(item))  # synchronous, in a coroutine
            return await inner.async_save(directory, args=ocp.args.PyTreeSave(item))

        def save(self, directory: Any, item: Any) -> None:
            raise NotImplementedError

        def restore(self, directory: Any) -> Any:
            return inner.restore(directory)

    with ocp.AsyncCheckpointer(Outer()) as checkpointer:
        checkpointer.save(tmp_path / "one", {"a": 1})
        checkpointer.wait_until_finished()
        assert checkpointer.restore(tmp_path / "one") == {"a": 1}
    inner.close()


def test_closing_ends_the_thread_and_using_again_begins_another(tmp_path: Path) -> None:
    before = len(threads_of_ours())
    handler = ocp.PyTreeCheckpointHandler()
    assert len(threads_of_ours()) == before
    for _ in range(2):
        handler.save(tmp_path, args=ocp.args.PyTreeSave({"a": 1}))
        assert len(threads_of_ours()) == before + 1
        handler.close()
        assert len(threads_of_ours()) == before


def test_a_handler_that_is_forgotten_ends_its_thread(tmp_path: Path) -> None:
    handler = ocp.PyTreeCheckpointHandler()
    before = set(threads_of_ours())
    handler.save(tmp_path, args=ocp.args.PyTreeSave({"a": 1}))
    [thread] = set(threads_of_ours()) - before
    del handler
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_a_resource_that_cannot_be_opened_says_why() -> None:
    def fail() -> Any:
        raise OSError("no such thing")

    loop: LoopThread[None] = LoopThread(fail)
    with pytest.raises(OSError, match="no such thing"):
        loop.call(lambda resources: None)  # type: ignore[arg-type,return-value]  # never called
    loop.close()


def test_calls_into_a_loop_begin_in_their_order_and_see_what_their_caller_does() -> None:
    seen: list[str] = []
    variable: ContextVar[str] = ContextVar("variable")

    async def note(_: None) -> None:
        seen.append(variable.get())

    async def begin_many() -> None:
        async with create_task_group() as tasks:
            for name in "abc":
                variable.set(name)
                tasks.start_soon(loop.acall, note)

    with LoopThread(nullcontext[None]) as loop:
        anyio.run(begin_many)

    assert seen == ["a", "b", "c"]


def test_a_call_from_the_thread_of_the_loop_is_refused() -> None:
    async def call_again(_: None) -> None:
        loop.call(call_again)

    with LoopThread(nullcontext[None]) as loop, pytest.raises(RuntimeError, match="would wait for itself"):
        loop.call(call_again)


def test_a_call_that_its_caller_gives_up_is_cancelled() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def wait(_: None) -> None:
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    async def give_up() -> None:
        async with create_task_group() as tasks:
            tasks.start_soon(loop.acall, wait)
            await to_thread.run_sync(begun.wait)
            tasks.cancel_scope.cancel()

    with LoopThread(nullcontext[None]) as loop:
        anyio.run(give_up)
        assert ended.wait(20)


def test_a_call_where_no_loop_runs_blocks_and_an_interrupt_cancels_it() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def wait(_: None) -> None:
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    async def answer(_: None) -> int:
        return 42

    def interrupt() -> None:
        begun.wait(20)
        signal.pthread_kill(main, signal.SIGINT)

    main, interrupting = threading.get_ident(), threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with LoopThread(nullcontext[None]) as loop:
            assert run_sync(loop.acall, answer, needs_loop=False) == 42
            interrupting.start()
            with pytest.raises(KeyboardInterrupt):
                run_sync(loop.acall, wait, needs_loop=False)

            interrupting.join()
            assert ended.wait(20)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_as_soon_as_a_call_has_begun_cancels_it() -> None:
    main = threading.get_ident()

    async def wait(_: None, ended: threading.Event) -> None:
        try:
            signal.pthread_kill(main, signal.SIGINT)
            await anyio.sleep_forever()
        finally:
            ended.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with LoopThread(nullcontext[None]) as loop:
            for _ in range(500):  # in some of them before its caller waits
                ended = threading.Event()
                with pytest.raises(KeyboardInterrupt):
                    loop.call(wait, ended)
                assert ended.wait(20)
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_waits_for_a_loop_although_it_was_to_need_none_says_so() -> None:
    class Waiting:
        def __await__(self) -> Generator[None]:
            yield

    async def wait() -> None:
        await Waiting()

    with pytest.raises(RuntimeError, match="waits for one"):
        run_sync(wait, needs_loop=False)


class OwnSave(ocp.PyTreeCheckpointHandler):
    async def async_save(self, *args: Any, **kwargs: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        return await super().async_save(*args, **kwargs)


@contextmanager
def loops_made() -> Generator[list[str]]:
    """Note what makes event loops in this thread."""
    made: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name == "new_event_loop":
            made.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        yield made
    finally:
        sys.setprofile(None)


def test_trees_and_json_are_staged_without_an_event_loop(tmp_path: Path) -> None:
    items = ocp.CompositeCheckpointHandler(
        tree=ocp.PyTreeCheckpointHandler(), about=ocp.JsonCheckpointHandler()
    )
    args = ocp.args.Composite(
        tree=ocp.args.PyTreeSave({"a": np.arange(3)}), about=ocp.args.JsonSave({"step": 1})
    )
    with ocp.AsyncCheckpointer(items) as checkpointer:
        with loops_made() as made:
            checkpointer.save(tmp_path / "one", args=args)

        found = checkpointer.restore(tmp_path / "one")

    assert not made
    np.testing.assert_array_equal(found["tree"]["a"], np.arange(3))
    assert found["about"] == {"step": 1}


def test_a_subclass_with_a_coroutine_of_its_own_gets_an_event_loop(tmp_path: Path) -> None:
    with ocp.AsyncCheckpointer(OwnSave()) as checkpointer:
        with loops_made() as made:
            checkpointer.save(tmp_path / "one", {"a": np.arange(3)})

        np.testing.assert_array_equal(checkpointer.restore(tmp_path / "one")["a"], np.arange(3))

    assert made


def test_of_items_that_are_staged_without_a_loop_none_stays_if_another_fails(tmp_path: Path) -> None:
    items = ocp.CompositeCheckpointHandler(tree=ocp.PyTreeCheckpointHandler(), z=ocp.JsonCheckpointHandler())
    args = ocp.args.Composite(
        tree=ocp.args.PyTreeSave({"a": np.arange(3)}), z=ocp.args.JsonSave({"step": object()})
    )
    with ocp.AsyncCheckpointer(items) as checkpointer:
        with pytest.raises(ValueError, match="JSON"):
            checkpointer.save(tmp_path / "one", args=args)

        assert list(tmp_path.iterdir()) == []


async def test_run_sync_returns_and_raises_what_the_coroutine_does() -> None:
    async def double(number: int) -> int:
        if number < 0:
            raise ValueError("negative")
        return 2 * number

    assert run_sync(double, 2) == 4
    with pytest.raises(ValueError, match="negative"):
        run_sync(double, -1)


def test_a_failure_in_the_background_is_raised_once(tmp_path: Path) -> None:
    class Failing(ocp.AsyncCheckpointHandler):
        async def async_save(self, directory: Any, item: Any) -> Any:
            async def fail() -> None:
                raise RuntimeError("no room")

            return [ocp.future.CommitFutureAwaitingContractedSignals(fail())]

        def save(self, directory: Any, item: Any) -> None:
            raise NotImplementedError

        def restore(self, directory: Any) -> Any:
            raise NotImplementedError

    checkpointer = ocp.AsyncCheckpointer(Failing())
    checkpointer.save(tmp_path / "one", 1)
    with pytest.raises(RuntimeError, match="no room"):
        checkpointer.wait_until_finished()

    checkpointer.check_for_errors()
    checkpointer.close()
    assert list(tmp_path.iterdir()) == []


def test_work_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    release = threading.Event()

    class Slow(ocp.AsyncCheckpointHandler):
        async def async_save(self, directory: Any, item: Any) -> Any:
            return [self]

        def result(self, timeout: float | None = None) -> None:
            if not release.wait(0):
                raise TimeoutError("still at it")

        def cancel(self) -> None:
            release.set()

        def save(self, directory: Any, item: Any) -> None:
            raise NotImplementedError

        def restore(self, directory: Any) -> Any:
            raise NotImplementedError

    checkpointer = ocp.AsyncCheckpointer(Slow(), timeout_secs=1)
    checkpointer.save(tmp_path / "one", 1)
    with pytest.raises(TimeoutError, match="0/1 futures"):
        checkpointer.wait_until_finished()

    checkpointer.close()
    assert list(tmp_path.iterdir()) == []


def test_threads_and_loops_of_blocking_callers_begin_in_one_place() -> None:
    folder = Path(penstock.__file__).parent
    starts = re.compile(r"\b(Thread|ThreadPoolExecutor|BlockingPortal|start_blocking_portal|anyio\.run)\(")
    found = {
        str(path.relative_to(folder))
        for path in [folder / "sync.py", *folder.glob("blocking/*.py"), *folder.glob("orbax/**/*.py")]
        if starts.search(path.read_text())
    }
    assert found == {"blocking/background.py", "blocking/loop_thread.py"}
