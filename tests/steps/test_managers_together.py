"""The managers of a job: what one of them decides, all do. Its processes are tasks here, with one service."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from anyio import create_task_group
from tests.own_files import listed
from tests.steps.job_of_managers import COUNT, LIMITS, each, offer, opened, state

from penstock import Checkpointer, CheckpointManager, JobOptions
from penstock.errors import InactiveProcessError, PeerFailedError, PenstockError, StorageError
from penstock.handlers import LocalStore
from penstock.handlers.coordinators import JobCoordinator
from penstock.steps import (
    Always,
    EverySeconds,
    EverySteps,
    KeepLast,
    OnPreemption,
    OnSteps,
    SaveMoment,
    StepNames,
)
from penstock.steps.save_policies import follows_from_step
from penstock.testing import FaultyStore, MemoryKeyValues

pytestmark = pytest.mark.anyio


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
        saved = [step for offered in range(2, 6) for step in await offer(managers, offered)]
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

    assert listed(tmp_path) == ["1", "4", "5"]


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


async def test_what_failed_in_one_process_after_a_save_ends_the_next_save_for_all(tmp_path: Path) -> None:
    class Fails:
        needs: frozenset[Any] = frozenset()

        def keep(self, steps: Any, now_s: float, /) -> Any:
            raise RuntimeError("no")

    told: dict[int, str] = {}
    async with opened(tmp_path, lambda _: {"keep": Fails()}) as managers:
        await offer(managers, 0)
        for manager in managers[1:]:
            await manager.wait()  # by then it has failed in process 0

        async def save(manager: CheckpointManager) -> None:
            try:
                begun = await manager.save(1, state(1))
                assert begun is not None
                await begun  # one may be staged before it hears of the other
            except (RuntimeError, PeerFailedError) as error:
                told[managers.index(manager)] = str(error)

        await each(managers, save)

    assert told.pop(0) == "no"
    assert len(told) == COUNT - 1
    assert all("process 0" in text and "RuntimeError: no" in text for text in told.values())


async def test_a_policy_that_cannot_say_whether_to_save_ends_it_for_all(tmp_path: Path) -> None:
    class Fails:
        def should_save(self, moment: SaveMoment, /) -> bool:
            if moment.step == 1:
                raise LookupError("no such step")

            return True

    told: dict[int, list[str]] = {}
    async with opened(tmp_path, lambda _: {"save_when": Fails()}) as managers:

        async def save(manager: CheckpointManager) -> None:
            try:
                await manager.save(1, state(1))
            except (LookupError, PeerFailedError) as error:
                told[managers.index(manager)] = [type(error).__name__, str(error)]

        await each(managers, save)
        assert await offer(managers, 2) == [2]

    assert told.pop(0)[0] == "LookupError"
    assert len(told) == COUNT - 1
    assert all(
        kind == "PeerFailedError" and "process 0" in text and "no such step" in text
        for kind, text in told.values()
    )


async def test_metrics_that_one_process_cannot_keep_end_the_save_for_all(tmp_path: Path) -> None:
    told: dict[int, str] = {}
    patient = replace(
        LIMITS, silence_s=60.0, beat_s=20.0
    )  # for so long it waits for process 0, which begins the save
    async with opened(tmp_path, lambda _: {}, patient) as managers:

        async def save(manager: CheckpointManager) -> None:
            index = managers.index(manager)
            try:
                future = await manager.save(1, state(1), metrics={"loss": object() if index == 1 else 1.0})
                assert future is not None
                await future  # a process may be staged before it hears of the failure
            except PenstockError as error:
                told[index] = type(error).__name__

        await each(managers, save)

    assert told[0] == told[2] == "PeerFailedError"
    assert told[1] != "PeerFailedError"


async def test_a_base_that_one_process_cannot_read_keeps_nobody_from_saving(tmp_path: Path) -> None:
    """It must not end the save for the others, and then save alone."""
    held = {"x": jnp.arange(2**15)}  # which is the same in both steps
    stores = [FaultyStore(LocalStore()) for _ in range(COUNT)]

    async with opened(tmp_path, lambda index: {"store": stores[index]}) as managers:
        for step in (1, 2):

            async def save(manager: CheckpointManager, step: int = step) -> None:
                future = await manager.save(step, held)
                assert future is not None
                await future

            await each(managers, save)
            asked = [done.name for done in stores[1].operations].count("identity")
            error = StorageError("stat", str(tmp_path / "1"), "Input/output error")
            stores[1].fail_on("identity", asked + 1, error)

        assert [list(manager.all_steps()) for manager in managers] == [[1, 2]] * COUNT


class Blind:
    """Names of steps of which none is found, as in a directory that the network shows late."""

    def name(self, step: int, /) -> str:
        return StepNames().name(step)

    def step(self, name: str, /) -> int | None:
        return None


async def save_elsewhere(root: Path, *steps: int) -> None:
    """Save steps by a process that is not of this job."""
    async with Checkpointer() as checkpointer:
        for step in steps:
            await (await checkpointer.save(root / str(step), state(step)))


async def test_all_know_the_steps_that_process_0_finds(tmp_path: Path) -> None:
    await save_elsewhere(tmp_path, 1, 2, 5)
    async with opened(tmp_path, lambda index: {"names": Blind()} if index else {}) as managers:
        assert [list(manager.all_steps()) for manager in managers] == [[1, 2, 5]] * COUNT
        await save_elsewhere(tmp_path, 7)
        assert [manager.latest_step() for manager in managers] == [5] * COUNT
        await each(managers, lambda manager: manager.reload())
        assert [list(manager.all_steps()) for manager in managers] == [[1, 2, 5, 7]] * COUNT
        for manager in managers:
            assert (await manager.restore())["x"][0] == 7


@pytest.mark.parametrize("who", [0, 2])
async def test_a_root_that_one_process_cannot_open_is_opened_by_none(tmp_path: Path, who: int) -> None:
    service, told = MemoryKeyValues(), dict[int, BaseException]()

    async def open_once(index: int) -> None:
        store = FaultyStore(LocalStore())
        if index == who:
            store.fail_on("make_directory")

        coordinator = JobCoordinator(service, index, COUNT, LIMITS)
        try:
            async with CheckpointManager(tmp_path / "run", coordinator=coordinator, store=store):
                pass
        except PenstockError as error:
            told[index] = error

    async with create_task_group() as tasks:
        for index in range(COUNT):
            tasks.start_soon(open_once, index)

    assert isinstance(told.pop(who), StorageError)
    assert len(told) == COUNT - 1
    for error in told.values():
        assert isinstance(error, PeerFailedError)
        assert (error.processes, error.peer_stage) == ((who,), "open")


async def test_who_only_reads_waits_for_nobody(tmp_path: Path) -> None:
    await save_elsewhere(tmp_path, 3)
    coordinator = JobCoordinator(MemoryKeyValues(), 1, COUNT, LIMITS)
    async with CheckpointManager(tmp_path, coordinator=coordinator, read_only=True) as manager:
        assert manager.latest_step() == 3


async def test_who_takes_no_part_may_only_read(tmp_path: Path) -> None:
    options = JobOptions(active_processes=(0, 2))
    coordinator = JobCoordinator(MemoryKeyValues(), 1, COUNT, LIMITS, options)
    with pytest.raises(InactiveProcessError):
        async with CheckpointManager(tmp_path / "run", coordinator=coordinator):
            pass

    assert not (tmp_path / "run").exists()
    async with CheckpointManager(tmp_path / "run", coordinator=coordinator, read_only=True) as manager:
        assert manager.latest_step() is None
