"""A coordination service that is slow to answer: what was asked takes effect, and is confirmed too late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from anyio import CancelScope, create_task_group, sleep_forever, to_thread
from tests.handlers.coordinators.test_joint_operation import LONG, PATH, Processes, Watched

from penstock.errors import PeerFailedError, PeerSilentError, StorageError
from penstock.handlers.coordinators.job import Job, KeyValueCalls
from penstock.handlers.coordinators.job_coordinator import JobCoordinator
from penstock.handlers.coordinators.joint_operation import JointOperation
from penstock.handlers.coordinators.operation_keys import OperationKeys
from penstock.handlers.coordinators.procedures import MOST_KEPT, Member, come, end, verdict_of
from penstock.kernel.protocols import KeyValues
from penstock.testing import MemoryKeyValues

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

LONGEST_S = 40.0


class SlowService(Watched):
    """A view of a service in which one put is confirmed late, and one delete takes effect late.

    Args:
        service: That all processes share.
        put: Part of the key of which the first put is confirmed late.
        delete: Part of the prefix whose first delete takes effect once a save was begun or ended, or a moment
            later.
    """

    def __init__(self, service: KeyValues, *, put: str = "-", delete: str = "-") -> None:
        super().__init__(service, "no key has this")
        self._slow_put, self._slow_delete = put, delete
        self.puts, self.may_confirm = threading.Event(), threading.Event()
        self.deletes, self.may_delete, self.deleted = threading.Event(), threading.Event(), threading.Event()
        self.asked: list[str] = []

    def put(self, key: str, value: bytes, replace: bool, /) -> bool:
        found = super().put(key, value, replace)
        self.asked.append(f"put {key}")
        if self._slow_put in key and not self.puts.is_set():
            self.puts.set()
            self.may_confirm.wait(LONGEST_S)
        if self.deletes.is_set() and ("/join/" in key or key.endswith("/verdict")):
            self.may_delete.set()

        return found

    def delete(self, prefix: str, /) -> None:
        is_slow = self._slow_delete in prefix and not self.deletes.is_set()
        if is_slow:
            self.deletes.set()
            self.may_delete.wait(0.5)

        super().delete(prefix)
        self.asked.append(f"delete {prefix}")
        if is_slow:
            self.deleted.set()


class Beats(Watched):
    """A view of a service that says when a process has set its heartbeat so often.

    Args:
        service: That all processes share.
        times: How often; the first time, it comes.
        then: Called by whoever sets it for the last time.
    """

    def __init__(self, service: KeyValues, times: int, then: Callable[[], object]) -> None:
        super().__init__(service, "no key has this")
        self._beats_left, self._then = times, then

    def put(self, key: str, value: bytes, replace: bool, /) -> bool:
        found = super().put(key, value, replace)
        if "/at/" in key:
            self._beats_left -= 1
            if not self._beats_left:
                self._then()

        return found


async def test_a_process_whose_arrival_was_not_answered_takes_part() -> None:
    """Not within `call_s`, nor within twenty of them."""
    job, limits = Processes(2), replace(LONG, beat_s=0.1)
    slow = SlowService(job.service, put="/at/1")
    beating = Beats(job.service, 21, slow.may_confirm.set)
    job.coordinators = [
        JobCoordinator(beating, 0, 2, limits),
        JobCoordinator(slow, 1, 2, replace(limits, call_s=0.1)),
    ]
    try:
        await job.run()
    finally:
        slow.may_confirm.set()

    assert job.errors == {}
    assert job.published == [b"part"]


async def test_who_left_an_operation_does_not_come_to_it_again_once_it_is_forgotten() -> None:
    """As it would by what it read before: the primary has begun the next, and hears nothing of it."""
    member, keys = Member(1, (0, 1), limits=LONG), OperationKeys("1")
    job = Job(KeyValueCalls(MemoryKeyValues()), member)
    await job.calls.put(keys.each("at", 0), b"the primary is there")
    assert await job.perform(come(member, keys, b"first"))
    failure = verdict_of(StorageError("write", PATH, "no space"), 1, "write")
    await job.perform(
        end(member, PATH, keys, failure, None, is_local=False, has_begun=False, is_closed=False)
    )
    await job.calls.delete(keys.all)
    assert not await job.perform(come(member, keys, b"first"))
    assert not await job.perform(come(Member(1, (0, 1)), OperationKeys("forgotten"), b"first"))
    await job.calls.put(OperationKeys("2").each("at", 0), b"the primary is there")
    assert await job.perform(come(member, OperationKeys("2"), b"first"))


async def test_a_primary_that_is_cancelled_deletes_first_what_says_that_it_can_be_joined() -> None:
    """Later, it would delete what says so of the next save to that path."""
    job, saving = Processes(2), CancelScope()
    slow = SlowService(job.service, delete="/join/")
    job.coordinators[0] = JobCoordinator(slow, 0, 2, LONG)

    async def begin() -> None:
        with saving:
            await job.take_part(0, PATH, job.save)

    async with create_task_group() as tasks:
        tasks.start_soon(begin)
        tasks.start_soon(job.take_part, 1, PATH, job.save)
        assert await to_thread.run_sync(slow.deletes.wait, LONGEST_S)
        saving.cancel()

    assert isinstance(job.errors[1], PeerFailedError)
    deleted = next(at for at, call in enumerate(slow.asked) if call.startswith("delete penstock/join/"))
    told = next(at for at, call in enumerate(slow.asked) if call.endswith("/verdict"))
    assert deleted < told

    await job.run()
    assert job.errors == {}


async def test_what_is_forgotten_of_a_save_takes_nothing_from_the_next_one_to_that_path() -> None:
    job = Processes(2)
    slow = SlowService(job.service, delete="/join/")
    job.coordinators[0] = JobCoordinator(slow, 0, 2, LONG)

    async def fail(operation: JointOperation) -> None:
        raise StorageError("write", PATH, "Input/output error")

    for number in range(MOST_KEPT):
        await job.take_part(0, f"/run/{number}", fail)

    assert not slow.deletes.is_set()
    async with create_task_group() as tasks:
        tasks.start_soon(job.take_part, 0, "/run/last", fail)  # the first is forgotten now
        assert await to_thread.run_sync(slow.deletes.wait, LONGEST_S)
        async with create_task_group() as saves:
            saves.start_soon(job.take_part, 0, "/run/0", job.save)
            assert await to_thread.run_sync(slow.deleted.wait, LONGEST_S)
            job.errors.clear()
            saves.start_soon(job.take_part, 1, "/run/0", job.save)

    assert [error for error in job.errors.values() if not isinstance(error, StorageError)] == []
    assert job.published == [b"part"]


async def test_who_was_cancelled_before_the_service_answered_hears_what_is_decided_then() -> None:
    service, hearing = MemoryKeyValues(), CancelScope()
    slow = SlowService(service, put="/at/1")
    primary = JobCoordinator(service, 0, 2, LONG).announcements("/run")
    other = JobCoordinator(slow, 1, 2, LONG).announcements("/run")
    assert primary is not None
    assert other is not None

    async def hear() -> None:
        with hearing:
            await other.hear("save 0")

    try:
        await primary.tell("save 1", "yes")
        async with create_task_group() as tasks:
            tasks.start_soon(hear)
            assert await to_thread.run_sync(slow.puts.wait, LONGEST_S)
            hearing.cancel()

        assert await other.hear("save 1") == "yes"
    finally:
        slow.may_confirm.set()

    for each in (other, primary):
        await each.leave()


async def test_a_primary_that_lives_and_decides_nothing_is_given_up() -> None:
    job = Processes(2)
    job.coordinators[1] = JobCoordinator(job.views[1], 1, 2, replace(LONG, write_s=0.1))

    async def never(operation: JointOperation) -> None:
        await operation.compare(b"plan", list)
        await operation.begin("/run/place")
        await operation.parts()
        operation.at("merge")
        await sleep_forever()

    await job.run({0: never})

    assert {type(error) for error in job.errors.values()} == {PeerSilentError}
    assert all(error.processes == (0,) for error in job.errors.values() if isinstance(error, PeerSilentError))
