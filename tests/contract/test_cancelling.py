"""A save or a restore that is cancelled at any of its await points leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import anyio
import pytest
from anyio.lowlevel import current_token
from tests.contract.scenarios import (
    RESTORINGS,
    SAVINGS,
    Place,
    no_task_is_left,
    numbers_in,
)
from tests.contract.stepping import Steps, acting_at
from tests.open_files import open_below

from penstock.errors import SaveCancelledError

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

Work: TypeAlias = Callable[[], Awaitable[object]]
Way: TypeAlias = Callable[[Work, int], Awaitable[Steps]]


async def by_scope(work: Work, at: int) -> Steps:
    """Do the work, and cancel the scope around it before the at-th step."""
    with anyio.CancelScope() as scope, acting_at(at, scope.cancel) as steps:
        await work()

    return steps


async def natively(work: Work, at: int) -> Steps:
    """The same with asyncio's own `Task.cancel`."""
    task = asyncio.ensure_future(work())
    with acting_at(at, task.cancel) as steps:
        await asyncio.wait([task])

    if not task.cancelled():
        task.result()

    return steps


def ways() -> dict[str, Way]:
    """How work can be cancelled on this event loop."""
    on_trio = current_token().backend_class.__module__.endswith("trio")
    return {"scope": by_scope} if on_trio else {"scope": by_scope, "native": natively}


EVERY_POINT = "every point"
"""The plain kind once more: all its await points in each sweep."""


def points(kind: str, way: int) -> range:
    """Which await points to visit: each in one of three sweeps, or all."""
    return range(1, 10_000) if kind == EVERY_POINT else range(1 + way, 10_000, 3)


def sweeps(kind: str) -> list[tuple[Way, range]]:
    """The sweeps to do on this event loop; that on trio is the third."""
    offset = 2 * (len(ways()) == 1)
    return [(way, points(kind, offset + at)) for at, way in enumerate(ways().values())]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [*SAVINGS, EVERY_POINT])
async def test_a_save_cancelled_at_any_await_point_leaves_nothing_behind(folder: Path, kind: str) -> None:
    place = Place(folder, SAVINGS.get(kind, SAVINGS["plain"]))
    await place.prepare()

    async def save() -> None:
        async with place.open() as checkpointer:
            await (await place.save(checkpointer, 2))

    for way, visited in sweeps(kind):
        published: list[bool] = []
        for at in visited:
            with no_task_is_left():
                steps = await way(save, at)

            published.append(await place.check(2))
            if not steps.reached:
                break
            await place.check_next_save(read=at % 10 == 0)

        assert len(published) > 20
        assert published[0] is False
        assert published[-2:] == [True, True], "cancelled after the publication, and not at all"
        await place.check_next_save(read=True)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["plain", "codec", "directories", "third party", EVERY_POINT])
async def test_a_save_that_its_future_cancels_at_any_step_leaves_nothing_behind(
    folder: Path, kind: str
) -> None:
    place = Place(folder, SAVINGS.get(kind, SAVINGS["plain"]))
    await place.prepare()
    at, cancelled = 0, True
    async with place.open() as checkpointer:
        for at in points(kind, 2 * (len(ways()) == 1)):
            save = await place.save(checkpointer, 2, staging="overlap")
            with acting_at(at, save.cancel) as steps:
                try:
                    await save
                    cancelled = False
                except SaveCancelledError:
                    cancelled = True
                await checkpointer.wait()

            # The same Checkpointer goes on: nothing of a cancelled save is in its way.
            assert await place.check(2) is not cancelled
            if not steps.reached:
                break
            await (await place.save(checkpointer, 9))
            place.before["new"] = place.found_new()
            del place.made[1:]

    assert at > 40
    assert not cancelled


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [*RESTORINGS, EVERY_POINT])
async def test_a_restore_cancelled_at_any_await_point_holds_nothing(folder: Path, kind: str) -> None:
    restoring = RESTORINGS.get(kind, RESTORINGS["plain"])
    place = Place(folder, restoring.saving)
    await place.prepare()
    found: list[set[int]] = []

    async def restore() -> None:
        async with place.open() as checkpointer:
            found.append(numbers_in(await checkpointer.restore(place.new, **restoring.keywords())))

    for way, visited in sweeps(kind):
        found.clear()
        at = 0
        for at in visited:
            with no_task_is_left():
                steps = await way(restore, at)

            # Before Python 3.13 a mapping has a descriptor until it is collected: see below.
            assert await place.check(2, files=kind != "mmap") is False
            if not steps.reached:
                break
            place.made.clear()

        assert at > 40
        assert found[-1] == {1}
        gc.collect()
        assert open_below(folder) == []
