"""Several calls at the same time: their results, or the first failure as it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from penstock.errors import PipelineError
from penstock.kernel.pipeline.together import together


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
