"""The managers of a job: what one of them decides, all do. Its processes are tasks here, with one service."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio import create_task_group

from penstock import CheckpointManager
from penstock.kernel.config.job_limits import JobLimits
from penstock.kernel.coordination.job_coordinator import JobCoordinator
from penstock.steps import (
    Always,
    EverySeconds,
    EverySteps,
    KeepLast,
    OnPreemption,
    OnSteps,
    SaveMoment,
)
from penstock.steps.save_policies import follows_from_step
from penstock.testing.memory_key_values import MemoryKeyValues

LIMITS = JobLimits(join_s=30.0, write_s=30.0, silence_s=30.0, beat_s=0.2, call_s=5.0)
COUNT = 3

pytestmark = pytest.mark.anyio

Managers = list[CheckpointManager]


def state(step: int) -> dict[str, Any]:
    return {"x": np.full(5, step)}


@asynccontextmanager
async def opened(root: Path, options: Callable[[int], dict[str, Any]]) -> AsyncGenerator[Managers]:
    """Open the manager of each process with options of its own."""
    service, managers = MemoryKeyValues(), Managers()
    async with AsyncExitStack() as stack:
        for index in range(COUNT):
            coordinator = JobCoordinator(service, index, COUNT, LIMITS)
            manager = CheckpointManager(root, coordinator=coordinator, **options(index))
            managers.append(await stack.enter_async_context(manager))

        yield managers

    assert [key for key in service.keys if "/join/" not in key and "/at/" not in key] == []


async def each(managers: Managers, do: Callable[[CheckpointManager], Awaitable[Any]]) -> list[Any]:
    """Let all of them do something at once; return what each of them got."""
    found: list[Any] = [None] * len(managers)

    async def one(index: int) -> None:
        found[index] = await do(managers[index])

    async with create_task_group() as tasks:
        for index in range(len(managers)):
            tasks.start_soon(one, index)

    return found


async def offer(managers: Managers, *steps: int) -> list[int]:
    """Offer steps to all; return those that were saved, which must be the same for all."""

    async def one(manager: CheckpointManager) -> list[int]:
        saved: list[int] = []
        for step in steps:
            save = await manager.save(step, state(step))
            if save is not None:
                await save
                saved.append(step)

        return saved

    first, *others = await each(managers, one)
    assert all(found == first for found in others)
    return list(first)


class Says:
    """A policy of which nothing is known."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps

    def should_save(self, moment: SaveMoment, /) -> bool:
        return moment.step in self._steps


@pytest.mark.parametrize(
    ("policy", "follows"),
    [
        (Always() | EverySteps(3) & OnSteps([4]), True),
        (EverySteps(3) | OnPreemption(), False),
        (EverySeconds(3), False),
        (Says(3), False),
    ],
)
def test_what_is_known_to_follow_from_the_step(policy: Any, follows: bool) -> None:
    assert follows_from_step(policy) is follows


async def test_process_0_decides_what_is_saved(tmp_path: Path) -> None:
    async with opened(tmp_path, lambda index: {"save_when": Says(2 + index, 5 + index)}) as managers:
        assert await offer(managers, *range(10)) == [2, 5]
        assert [manager.latest_step() for manager in managers] == [5] * COUNT


@pytest.mark.parametrize("who", range(COUNT))
async def test_a_preemption_of_one_is_seen_by_all_after_the_same_step(tmp_path: Path, who: int) -> None:
    policy = EverySteps(100) | OnPreemption()
    async with opened(tmp_path, lambda _: {"save_when": policy, "sigterm": False}) as managers:
        assert await offer(managers, 0, 1) == [0]
        managers[who].preempt()
        assert not any(manager.preempted for manager in managers)  # the others would not know
        saved = await offer(managers, *range(2, 6))
        assert saved in ([2], [3])  # process 0 may have decided on step 2 before it heard
        assert all(manager.preempted for manager in managers)


async def test_process_0_decides_what_stays(tmp_path: Path) -> None:
    def options(index: int) -> dict[str, Any]:
        return {"keep": KeepLast(2 + index)}

    async with opened(tmp_path, options) as managers:
        managers[0].pin(1)
        managers[1].pin(2)
        await offer(managers, *range(6))
        await each(managers, lambda manager: manager.wait())
        assert [list(manager.all_steps()) for manager in managers] == [[1, 4, 5]] * COUNT

    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "4", "5"]


async def test_a_policy_that_fails_in_process_0_keeps_nobody_waiting(tmp_path: Path) -> None:
    class Fails:
        needs: frozenset[Any] = frozenset()

        def keep(self, steps: Any, now_s: float, /) -> Any:
            raise RuntimeError("no")

    async with opened(tmp_path, lambda _: {"keep": Fails()}) as managers:
        await offer(managers, 0)
        for manager in managers[1:]:
            await manager.wait()
        with pytest.raises(RuntimeError, match="no"):
            await managers[0].wait()
