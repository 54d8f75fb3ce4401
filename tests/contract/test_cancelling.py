"""A save or a restore that is cancelled at any of its await points leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import current_token
from tests.contract.scenarios import RESTORINGS, SAVINGS, Place, no_task_is_left, numbers_in
from tests.contract.stepping import Steps, acting_at

from penstock.kernel.errors import SaveCancelledError
from penstock.kernel.futures import Milestone

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def _unclosed_streams_and_files_are_found() -> Iterator[None]:
    yield
    gc.collect()


async def cancelled_by_scope(work: Callable[[], Awaitable[object]], at: int) -> Steps:
    """Do the work, and cancel the scope around it before the at-th step."""
    with anyio.CancelScope() as scope, acting_at(at, scope.cancel) as steps:
        await work()

    return steps


async def cancelled_natively(work: Callable[[], Awaitable[object]], at: int) -> Steps:
    """The same with asyncio's own `Task.cancel`."""
    task = asyncio.ensure_future(work())
    with acting_at(at, task.cancel) as steps:
        await asyncio.wait([task])

    if not task.cancelled():
        task.result()

    return steps


CANCELS: dict[str, Callable[[Callable[[], Awaitable[object]], int], Awaitable[Steps]]] = {
    "scope": cancelled_by_scope,
    "native": cancelled_natively,
}
ways = pytest.mark.parametrize("way", CANCELS)


def on_trio() -> bool:
    return current_token().backend_class.__module__.endswith("trio")


@ways
@pytest.mark.parametrize("kind", SAVINGS)
async def test_a_save_cancelled_at_any_await_point_leaves_nothing_behind(
    tmp_path: Path, kind: str, way: str
) -> None:
    if way == "native" and on_trio():
        return

    place = Place(tmp_path / "place", SAVINGS[kind])
    await place.prepare()

    async def save() -> None:
        async with place.open() as checkpointer:
            await (await place.save(checkpointer, 2))

    seen: list[int] = []
    at = 1
    while True:
        with no_task_is_left():
            steps = await CANCELS[way](save, at)

        seen.append(await place.check())
        if not steps.reached:
            break
        await place.check_next_save()
        at += 1

    assert at > 50
    assert seen[-1] == 2
    assert set(seen) == {1, 2, 9}, "some were cancelled before the new one was visible, some after"
