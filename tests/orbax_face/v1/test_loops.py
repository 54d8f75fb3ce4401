"""With and without an event loop: every name works, and none needs the loop to be patched."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import penstock.orbax.v1 as ocp
from penstock import PenstockError
from penstock.errors import RunningLoopError
from penstock.kernel.memory import auto_memory_limit
from penstock.orbax.v1.operation import BackgroundOperation, begin, budget, share_loop, wait_for


async def test_synchronous_names_work_inside_a_running_loop(tmp_path: Path) -> None:
    tree = {"a": np.arange(5), "b": 1}
    ocp.save(tmp_path / "a", tree)
    ocp.save_checkpointables(tmp_path / "b", {"x": tree})
    ocp.save_async(tmp_path / "c", tree).result()
    ocp.partial.save(tmp_path / "d", tree)
    ocp.partial.finalize(tmp_path / "d")

    for name in ("a", "c", "d"):
        np.testing.assert_array_equal(ocp.load(tmp_path / name)["a"], tree["a"])
    assert ocp.load_checkpointables(tmp_path / "b")["x"]["b"] == 1
    assert ocp.metadata(tmp_path / "a").metadata["b"] == 0
    assert ocp.checkpointables_metadata(tmp_path / "b").metadata["x"]["b"] == 0
    assert ocp.is_orbax_checkpoint(tmp_path / "a")


async def test_responses_are_awaited(tmp_path: Path) -> None:
    tree = {"a": np.arange(5), "b": 1}
    saving: Any = ocp.save_async(tmp_path / "a", tree)
    assert await saving is None
    assert await saving is None  # again
    await ocp.save_checkpointables_async(tmp_path / "b", {"x": tree, "y": {"c": 2}})

    loading = ocp.load_async(tmp_path / "a", {"a": np.ndarray, "b": None})
    np.testing.assert_array_equal((await loading)["a"], tree["a"])
    assert (await ocp.load_checkpointables_async(tmp_path / "b", {"y": None})) == {"y": {"c": 2}}
    assert ocp.load_async(tmp_path / "b", checkpointable_name="y").result() == {"c": 2}
    with pytest.raises(ValueError, match="Could not recognize"):
        await ocp.load_async(tmp_path / "none")


async def test_the_loop_goes_on_while_a_response_is_awaited(tmp_path: Path) -> None:
    turns, before = list[int](), 0

    async def spin() -> None:
        while True:
            turns.append(1)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(spin)
        await ocp.save_async(tmp_path / "a", {"a": np.ones((300, 300))})
        before = len(turns)
        await ocp.load_async(tmp_path / "a")
        tasks.cancel_scope.cancel()

    assert before > 0
    assert len(turns) > before


async def test_a_wait_that_is_cancelled_does_not_stop_the_save(tmp_path: Path) -> None:
    saving: Any = ocp.save_async(tmp_path / "a", {"a": 1})
    with anyio.CancelScope() as scope:
        scope.cancel()
        await saving

    assert await saving is None
    assert ocp.load(tmp_path / "a") == {"a": 1}


async def test_an_operation_can_be_cancelled(tmp_path: Path) -> None:
    ended: list[str] = []

    async def main(operation: BackgroundOperation[None]) -> None:
        operation.mark_begun()
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("ended")

    operation = begin("endless", main)
    await operation.begun()
    operation.cancel()
    with pytest.raises(PenstockError, match="endless was cancelled"):
        await operation

    assert ended == ["ended"]


async def test_what_is_begun_inside_an_operation_shares_its_loop() -> None:
    async def inner(operation: BackgroundOperation[int]) -> int:
        operation.mark_begun()
        await anyio.lowlevel.checkpoint()
        return 5

    async def outer(operation: BackgroundOperation[int]) -> int:
        async with share_loop():
            nested = begin("inner", inner)
            with pytest.raises(RunningLoopError):
                await _later(nested)

            return await nested

    assert await begin("outer", outer) == 5


async def _later(operation: BackgroundOperation[int]) -> None:
    await operation.begun()
    # Not over yet: to wait for it here, in its own loop, would never end.
    operation.result() if not operation.done() else _raise()


def _raise() -> None:
    raise RunningLoopError("was over already")


async def test_a_failure_stops_what_it_hosts() -> None:
    ended: list[str] = []

    async def endless(operation: BackgroundOperation[None]) -> None:
        operation.mark_begun()
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("endless")

    async def outer(operation: BackgroundOperation[None]) -> None:
        async with share_loop():
            await begin("endless", endless).begun()
            raise LookupError("outer")

    with pytest.raises(LookupError, match="outer"):
        await begin("outer", outer)

    assert ended == ["endless"]


def test_without_a_loop_and_in_a_thread_of_the_caller(tmp_path: Path) -> None:
    def failing(operation: BackgroundOperation[int]) -> Awaitable[int]:
        raise LookupError("at once")

    with pytest.raises(LookupError, match="at once"):
        wait_for(begin("failing", failing))

    seen: list[Any] = []
    saving = ocp.save_async(tmp_path / "a", {"a": 1})
    saving.on_complete(seen.append)
    saving.result()
    loading = ocp.load_async(tmp_path / "a")
    assert loading.result() == {"a": 1}
    loading.on_complete(seen.append)
    assert seen == [None, {"a": 1}]
    failed = ocp.load_async(tmp_path / "none")
    failed.on_complete(seen.append)
    with pytest.raises(ValueError, match="Could not recognize"):
        failed.result()
    assert len(seen) == 2


def test_a_save_that_exceeds_its_timeout_is_an_error(tmp_path: Path) -> None:
    context = ocp.Context()
    context.asynchronous.timeout_secs = 0
    with context, pytest.raises(TimeoutError):
        ocp.save(tmp_path / "a", {"a": np.ones((100, 100))})

    assert list(tmp_path.iterdir()) == []


async def test_the_parts_of_an_operation_divide_its_memory() -> None:
    async def part(operation: BackgroundOperation[Any]) -> Any:
        return budget(100), budget(None)

    async def whole(operation: BackgroundOperation[Any]) -> Any:
        async with share_loop(4):
            return await begin("part", part)

    limit, unsaid = await begin("whole", whole)
    assert limit == 25
    assert 0 < unsaid < auto_memory_limit()
    assert (budget(100), budget(None)) == (100, None)
