"""Operations in which each process publishes on a disk of its own. Each is a task here, with one service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import pytest
from anyio import CancelScope, Event, create_task_group
from anyio.lowlevel import checkpoint

from penstock.config import JobLimits
from penstock.errors import OutcomeUnknownError, PeerFailedError, PeerSilentError, StorageError
from penstock.handlers.coordinators.job_coordinator import JobCoordinator
from penstock.handlers.coordinators.joint_operation import JointOperation
from penstock.testing import MemoryKeyValues, StoppableKeyValues

PATH = "on local disks: run/1"
LONG = JobLimits(join_s=50.0, silence_s=50.0, beat_s=5.0, call_s=5.0)
SHORT = JobLimits(join_s=4.0, silence_s=2.0, beat_s=0.2, call_s=20.0)
COUNT = 3

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

Body = Callable[[JointOperation], Awaitable[None]]


class Disks:
    """A job whose processes are tasks, what each has published, and what came of it."""

    def __init__(self, limits: JobLimits = LONG) -> None:
        self.service = MemoryKeyValues()
        self.views = [StoppableKeyValues(self.service) for _ in range(COUNT)]
        self.job = [JobCoordinator(view, index, COUNT, limits) for index, view in enumerate(self.views)]
        self.published: set[int] = set()
        self.errors: dict[int, BaseException] = {}
        self.failed = Event()

    async def run(self, publish: Mapping[int, Body] | None = None) -> None:
        """Let all take part; some may publish in another way."""
        async with create_task_group() as tasks:
            for index in range(COUNT):
                tasks.start_soon(self.take_part, index, (publish or {}).get(index, self.publish))

    async def publish(self, operation: JointOperation) -> None:
        self.published.add(operation.process_index)
        await operation.all_published()

    async def take_part(self, index: int, publish: Body) -> None:
        operation = self.job[index].operation(PATH, is_local=True)
        assert isinstance(operation, JointOperation)
        try:
            async with operation.running():
                await operation.compare(b"plan", list)
                if operation.is_primary:
                    await operation.begin("")
                    await operation.parts()
                    await operation.decide()
                else:
                    await operation.wait_begun(b"plan", list)
                    await operation.bring(b"")
                    await operation.wait_decided()

                operation.at("publish")
                await publish(operation)
        except Exception as error:
            self.errors[index] = error
            self.failed.set()


async def fail(operation: JointOperation) -> None:
    raise StorageError("rename", "/disk/run/1", "Read-only file system")


async def test_an_operation_on_local_disks_is_over_once_all_have_published() -> None:
    disks, late = Disks(), Event()

    async def publish_late(operation: JointOperation) -> None:
        await late.wait()
        await disks.publish(operation)

    async with create_task_group() as tasks:
        tasks.start_soon(disks.run, {1: publish_late})
        while disks.published != {0, 2}:
            await checkpoint()

        for _ in range(50):
            await checkpoint()

        assert any("/verdict" in key for key in disks.service.keys)  # nobody has left
        late.set()

    assert disks.errors == {}
    assert disks.published == {0, 1, 2}
    assert [key for key in disks.service.keys if "/at/" not in key] == []


@pytest.mark.parametrize("who", range(COUNT))
async def test_who_cannot_publish_ends_it_for_all(who: int) -> None:
    disks = Disks()
    await disks.run({who: fail})
    assert isinstance(disks.errors.pop(who), StorageError)
    assert len(disks.errors) == COUNT - 1
    for error in disks.errors.values():
        assert isinstance(error, PeerFailedError)
        assert (error.processes, error.peer_stage) == ((who,), "publish")
        assert "Read-only file system" in error.reason

    disks.errors.clear()
    await disks.run()
    assert disks.errors == {}


async def test_who_has_published_and_is_cancelled_then_ends_it_for_nobody() -> None:
    disks = Disks()

    left = Event()

    async def leave(operation: JointOperation) -> None:
        with CancelScope() as scope:
            async with create_task_group() as tasks:
                tasks.start_soon(disks.publish, operation)
                while not any("/done/1" in key for key in disks.service.keys):
                    await checkpoint()

                scope.cancel()

        left.set()

    async def wait(operation: JointOperation) -> None:
        await left.wait()
        await disks.publish(operation)

    await disks.run({0: wait, 1: leave})
    assert disks.errors == {}
    assert disks.published == {0, 1, 2}


@pytest.mark.slow  # silence takes its time
async def test_who_falls_silent_before_it_has_published_is_named() -> None:
    disks = Disks(SHORT)

    async def stop(operation: JointOperation) -> None:
        disks.views[2].stop()
        await operation.all_published()

    async def wake() -> None:
        while {0, 1} - disks.errors.keys():
            disks.failed = Event()
            await disks.failed.wait()

        disks.views[2].go_on()

    async with create_task_group() as tasks:
        tasks.start_soon(wake)
        tasks.start_soon(disks.run, {2: stop})

    for index in (0, 1):
        error = disks.errors[index]
        assert isinstance(error, PeerSilentError)
        assert error.processes == (2,)

    assert isinstance(disks.errors[2], PeerSilentError)  # it hears what was decided about it


@pytest.mark.slow
async def test_a_primary_that_falls_silent_then_leaves_the_outcome_unknown() -> None:
    disks = Disks(SHORT)

    async def stop(operation: JointOperation) -> None:
        disks.published.add(0)
        disks.views[0].stop()
        await operation.all_published()

    async def wake() -> None:
        while {1, 2} - disks.errors.keys():
            disks.failed = Event()
            await disks.failed.wait()

        disks.views[0].go_on()

    async with create_task_group() as tasks:
        tasks.start_soon(wake)
        tasks.start_soon(disks.run, {0: stop})

    for index in (1, 2):
        assert isinstance(disks.errors[index], OutcomeUnknownError)
