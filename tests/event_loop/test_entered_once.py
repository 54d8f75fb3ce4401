"""Entering once, and tasks whose context raises errors as they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest

from penstock.errors import ClosedError
from penstock.event_loop.entered_once import EnteredOnce, own_tasks

pytestmark = pytest.mark.anyio


def raise_it(failure: BaseException | None) -> None:
    if failure is not None:
        raise failure


async def test_a_shared_context_is_entered_and_left_one_time() -> None:
    seen: list[str] = []

    @asynccontextmanager
    async def live() -> AsyncGenerator[None]:
        seen.append("in")
        yield
        seen.append("out")

    entered = EnteredOnce("Thing")
    await entered.enter(live)
    with pytest.raises(ClosedError, match="a Thing can be entered once"):
        await entered.enter(live)
    await entered.leave(None, None, None)

    assert seen == ["in", "out"]


async def test_a_failure_cancels_the_tasks_and_is_raised_as_it_is() -> None:
    ended: list[bool] = []

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    async def live() -> None:
        async with own_tasks(raise_it) as tasks:
            tasks.start_soon(work)
            await anyio.lowlevel.checkpoint()
            raise KeyError("body")

    with pytest.raises(KeyError, match="body"):  # and not a group of one
        await live()

    assert ended == [True]


async def test_without_a_failure_the_tasks_are_awaited_and_what_is_left_to_say_is_raised() -> None:
    done = anyio.Event()

    def raise_another(failure: BaseException | None) -> None:
        assert failure is None
        assert done.is_set()
        raise KeyError("unseen")

    async def work() -> None:
        await anyio.lowlevel.checkpoint()
        done.set()

    async def live() -> None:
        async with own_tasks(raise_another) as tasks:
            tasks.start_soon(work)

    with pytest.raises(KeyError, match="unseen"):
        await live()


async def test_a_shared_context_lets_a_cancellation_pass() -> None:
    told: list[BaseException | None] = []
    with anyio.CancelScope() as scope:
        async with own_tasks(told.append):
            scope.cancel()
            await anyio.sleep_forever()

    assert scope.cancelled_caught
    assert told == []
