"""Operations of several processes, each a task with a view of one service in memory."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Generator, Mapping
from functools import partial

import pytest
from anyio import CancelScope, Event, create_task_group, to_thread
from anyio.lowlevel import checkpoint

from penstock.config import JobLimits
from penstock.errors import (
    OutcomeUnknownError,
    PeerError,
    PeerFailedError,
    PeerSilentError,
    PlansDifferError,
    StorageError,
)
from penstock.handlers.coordinators.job_coordinator import JobCoordinator
from penstock.handlers.coordinators.joint_operation import JointOperation
from penstock.kernel.protocols import KeyValues
from penstock.testing import MemoryKeyValues, StoppableKeyValues

PATH = "/run/step_1"
SHORT = JobLimits(join_s=4.0, silence_s=4.0, beat_s=0.2, call_s=20.0)
LONG = JobLimits(join_s=50.0, silence_s=50.0, beat_s=5.0, call_s=5.0)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

BESIDE = b"\0beside\0"
Body = Callable[[JointOperation], Awaitable[None]]


class Processes:
    """A job whose processes are tasks, and what came of each."""

    def __init__(self, count: int, limits: JobLimits = LONG) -> None:
        self.service = MemoryKeyValues()
        self.views = [StoppableKeyValues(self.service) for _ in range(count)]
        self.coordinators = [
            JobCoordinator(view, index, count, limits) for index, view in enumerate(self.views)
        ]
        self.errors: dict[int, BaseException] = {}
        self.published: list[bytes] = []
        self.said: dict[int, bytes] = {}  #: to the primary by index, and to the others by the negative one
        self._error_came = Event()

    async def run(self, bodies: Mapping[int, Body] | None = None, *, path: str = PATH) -> None:
        """Let every process take part, but for those whose body is given instead."""
        self.errors.clear()
        async with create_task_group() as tasks:
            for index in range(len(self.coordinators)):
                tasks.start_soon(self.take_part, index, path, (bodies or {}).get(index, self.save))

    async def save(
        self, operation: JointOperation, *, plan: bytes = b"plan", leaf: str = "x\tfloat32"
    ) -> None:
        """Do what a save does."""
        index = operation.process_index
        said = await operation.compare(plan, lambda: [leaf], bytes([index]))
        if operation.is_primary:
            self.said.update(said)
            await operation.begin("/run/place", BESIDE)
        else:
            place, self.said[-index] = await operation.wait_begun(plan, lambda: [leaf])
            assert place == "/run/place"

        operation.at("write")
        await self.end(operation, b"part")

    async def end(self, operation: JointOperation, part: bytes) -> None:
        """Do what a save does once its data is written."""
        if not operation.is_primary:
            await operation.bring(part)
            await operation.wait_decided()
            await operation.wait_published()
            return

        parts = await operation.parts()
        await operation.decide()
        self.published.append(b"".join(parts.values()))
        await operation.tell_published()

    async def take_part(self, index: int, path: str, body: Body) -> None:
        operation = self.coordinators[index].operation(path)
        assert isinstance(operation, JointOperation)
        try:
            async with operation.running():
                await body(operation)
        except Exception as error:
            self.errors[index] = error
            self._error_came.set()
            self._error_came = Event()

    async def wait_errors(self, count: int) -> None:
        """Wait until so many processes have failed."""
        while len(self.errors) < count:
            await self._error_came.wait()

    async def run_and_wake(self, bodies: Mapping[int, Body]) -> None:
        """Run, and wake the processes that are stopped once two others have failed."""

        async def wake() -> None:
            await self.wait_errors(2)
            self.go_on()

        async with create_task_group() as tasks:
            tasks.start_soon(wake)
            tasks.start_soon(self.run, bodies)

    def go_on(self) -> None:
        for view in self.views:
            view.go_on()


@pytest.fixture(params=[2, 4, 8])
def processes(request: pytest.FixtureRequest) -> Generator[Processes]:
    job = Processes(request.param)
    yield job
    job.go_on()


async def test_alltake_part_and_the_primary_publishes(processes: Processes) -> None:
    await processes.run()

    assert processes.errors == {}
    assert processes.published == [b"part" * (len(processes.views) - 1)]


async def test_what_is_said_beside_plans_and_place_is_heard(processes: Processes) -> None:
    await processes.run()

    others = range(1, len(processes.views))
    assert processes.said == {index: bytes([index]) for index in others} | {
        -index: BESIDE for index in others
    }


async def test_a_finished_operation_leaves_no_keys_in_the_service(processes: Processes) -> None:
    for step in range(5):
        await processes.run(path=f"/run/step_{step}")

    assert len(processes.service.keys) <= 2  # a heartbeat that was under way


async def test_the_calls_are_few_and_do_not_grow(processes: Processes) -> None:
    await processes.run()

    for index, coordinator in enumerate(processes.coordinators):
        beats = 3  # one at once, and the calls that look around
        assert sum(coordinator.calls.values()) <= (16 if index == 0 else 13) + beats, coordinator.calls


async def test_the_parts_are_in_order_of_the_processes() -> None:
    job = Processes(4)

    async def save(index: int, operation: JointOperation) -> None:
        await operation.compare(b"plan", list)
        await (operation.begin("/run/place") if operation.is_primary else operation.wait_begun(b"plan", list))
        await job.end(operation, bytes([index]))

    await job.run({index: partial(save, index) for index in range(4)})

    assert job.published == [b"\1\2\3"]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("who", [0, 1, -1])
@pytest.mark.parametrize(
    "when", ["before it agrees", "before it begins", "before it brings", "after it brought"]
)
async def test_who_fails_ends_it_for_all(processes: Processes, who: int, when: str) -> None:
    who %= len(processes.views)

    async def fail(operation: JointOperation) -> None:
        operation.at("write")
        if when != "before it agrees":
            await operation.compare(b"plan", list)
        if when in ("before it brings", "after it brought"):
            await (operation.begin("/run/place") if who == 0 else operation.wait_begun(b"plan", list))
        if when == "after it brought" and who != 0:
            await operation.bring(b"part")

        raise StorageError("write", "/run/place/d/1", "Input/output error")

    await processes.run({who: fail})

    if when == "after it brought" and who != 0:  # it may have failed when all was published
        assert set(processes.errors) >= {who}
        assert processes.published or len(processes.errors) == len(processes.views)
        return

    assert processes.published == []
    assert isinstance(processes.errors.pop(who), StorageError)
    assert len(processes.errors) == len(processes.views) - 1
    for error in processes.errors.values():
        assert isinstance(error, PeerFailedError)
        assert error.processes == (who,)
        assert error.peer_stage == "write"
        assert "Input/output error" in error.reason


async def test_after_a_failure_the_same_path_can_be_saved(processes: Processes) -> None:
    async def fail(operation: JointOperation) -> None:
        raise StorageError("write", "x", "no")

    await processes.run({1: fail})
    assert processes.published == []
    await processes.run()

    assert processes.errors == {}
    assert len(processes.published) == 1


async def test_who_is_cancelled_ends_it_for_all(processes: Processes) -> None:
    async def alone() -> None:
        with CancelScope() as scope:
            operation = processes.coordinators[1].operation(PATH)
            assert isinstance(operation, JointOperation)
            async with operation.running():
                scope.cancel()
                await Event().wait()

    async with create_task_group() as tasks:
        tasks.start_soon(alone)
        for index in range(len(processes.views)):
            if index != 1:
                tasks.start_soon(processes.take_part, index, PATH, processes.save)

    assert len(processes.errors) == len(processes.views) - 1
    for error in processes.errors.values():
        assert isinstance(error, PeerFailedError)
        assert (error.processes, error.reason) == ((1,), "it was cancelled")


async def test_plans_that_differ_are_told_leaf_by_leaf(processes: Processes) -> None:
    odd = len(processes.views) - 1

    async def other(operation: JointOperation) -> None:
        await processes.save(operation, plan=b"other", leaf="y\tint8")

    await processes.run({odd: other})

    assert len(processes.errors) == len(processes.views)
    for error in processes.errors.values():
        assert isinstance(error, PlansDifferError)
        assert error.processes == (odd,)
        assert error.differences == (
            f"x: process 0 has float32, process {odd} has nothing",
            f"y: process 0 has nothing, process {odd} has int8",
        )


async def test_nobody_passes_before_all_have_met(processes: Processes) -> None:
    here: list[int] = []

    async def meet(index: int, operation: JointOperation) -> None:
        await operation.compare(b"plan", list)
        await (operation.begin("/run/place") if index == 0 else operation.wait_begun(b"plan", list))
        here.append(index)
        await operation.meet("here")
        assert len(here) == len(processes.views)
        await operation.meet("there")
        await processes.end(operation, b"part")

    await processes.run({index: partial(meet, index) for index in range(len(processes.views))})

    assert processes.errors == {}


async def test_who_fails_before_all_have_met_ends_it_for_all(processes: Processes) -> None:
    async def meet(index: int, operation: JointOperation) -> None:
        await operation.compare(b"plan", list)
        await (operation.begin("/run/place") if index == 0 else operation.wait_begun(b"plan", list))
        if index == 1:
            raise StorageError("read", "/run/d/1", "Input/output error")

        await operation.meet("here")
        raise AssertionError("it went on without process 1")

    await processes.run({index: partial(meet, index) for index in range(len(processes.views))})

    assert isinstance(processes.errors.pop(1), StorageError)
    for error in processes.errors.values():
        assert isinstance(error, PeerFailedError)
        assert error.processes == (1,)


async def test_operations_begun_in_opposite_order_do_not_cross() -> None:
    job = Processes(2)

    async def both(index: int, paths: tuple[str, str]) -> None:
        async with create_task_group() as tasks:
            for path in paths:
                tasks.start_soon(job.take_part, index, path, job.save)

    async with create_task_group() as tasks:
        tasks.start_soon(both, 0, ("/a", "/b"))
        tasks.start_soon(both, 1, ("/b", "/a"))

    assert job.errors == {}
    assert len(job.published) == 2


@pytest.mark.slow  # silence takes its time
async def test_a_process_that_never_comes_is_named() -> None:
    job = Processes(4, SHORT)
    async with create_task_group() as tasks:
        for index in (0, 1, 3):
            tasks.start_soon(job.take_part, index, PATH, job.save)

    assert set(job.errors) == {0, 1, 3}
    for error in job.errors.values():
        assert isinstance(error, PeerSilentError)
        assert error.seen == {2: None}


@pytest.mark.slow  # silence takes its time
async def test_a_process_that_comes_late_hears_what_became_of_the_operation() -> None:
    job = Processes(3, SHORT)
    async with create_task_group() as tasks:
        for index in (0, 1):
            tasks.start_soon(job.take_part, index, PATH, job.save)

    await job.take_part(2, PATH, job.save)
    late = job.errors[2]

    assert isinstance(late, PeerSilentError)
    assert late.processes == (2,)
    await job.run()
    assert job.errors == {}


@pytest.mark.slow
@pytest.mark.parametrize("who", [1, 2])
async def test_a_process_that_falls_silent_is_named_with_its_stage(who: int) -> None:
    job = Processes(3, SHORT)

    async def stop(operation: JointOperation) -> None:
        await operation.compare(b"plan", list)
        await operation.wait_begun(b"plan", list)
        operation.at("write")
        while b"write" not in job.service.under(f"penstock/{operation.identity}/at/")[str(who)]:
            await checkpoint()  # until a heartbeat has said so

        job.views[who].stop()
        await operation.bring(b"part")

    await job.run_and_wake({who: stop})

    assert job.published == []
    for error in job.errors.values():
        assert isinstance(error, PeerSilentError)
        assert error.seen == {who: "write"}


@pytest.mark.slow  # silence takes its time
async def test_a_primary_that_falls_silent_is_blamed_by_the_others_and_publishes_nothing() -> None:
    job = Processes(3, SHORT)

    async def stop(operation: JointOperation) -> None:
        await operation.compare(b"plan", list)
        await operation.begin("/run/place")
        await operation.parts()
        job.views[0].stop()
        await operation.decide()
        job.published.append(b"wrong")

    await job.run_and_wake({0: stop})

    assert job.published == []
    for index in (1, 2):
        error = job.errors[index]
        assert isinstance(error, PeerSilentError)
        assert error.processes == (0,)
    assert isinstance(job.errors[0], PeerError)


@pytest.mark.slow  # silence takes its time
async def test_a_primary_that_falls_silent_with_the_service_may_still_publish() -> None:
    job = Processes(3, SHORT)

    async def stop(operation: JointOperation) -> None:
        await operation.compare(b"plan", list)
        operation.at("write")
        await operation.begin("/run/place")
        seen: set[bytes] = set()
        while len(seen) < 3:  # heartbeats that say so: the others hear one of them
            beat = job.service.under(f"penstock/{operation.identity}/at/")["0"]
            seen |= {beat} if b"write" in beat else set()
            await checkpoint()

        for view in job.views:
            view.stop()

        await operation.parts()

    await job.run_and_wake({0: stop})

    for index in (1, 2):
        error = job.errors[index]
        assert isinstance(error, OutcomeUnknownError)
        assert (error.processes, error.peer_stage) == ((0,), "write")


@pytest.mark.slow  # silence takes its time
async def test_silence_after_the_verdict_leaves_the_outcome_unknown() -> None:
    job = Processes(3, SHORT)

    async def stop(operation: JointOperation) -> None:
        await operation.compare(b"plan", list)
        await operation.begin("/run/place")
        await operation.parts()
        await operation.decide()
        job.views[0].stop()
        job.published.append(b"right")
        await operation.tell_published()

    await job.run_and_wake({0: stop})

    assert set(job.errors) == {1, 2}
    for error in job.errors.values():
        assert isinstance(error, OutcomeUnknownError)
        assert error.path == PATH


async def test_a_primary_that_cannot_publish_after_the_verdict_says_so(processes: Processes) -> None:
    async def fail(operation: JointOperation) -> None:
        await operation.compare(b"plan", list)
        await operation.begin("/run/place")
        await operation.parts()
        await operation.decide()
        operation.at("finalize")
        raise StorageError("rename", PATH, "Read-only file system")

    await processes.run({0: fail})

    assert isinstance(processes.errors.pop(0), StorageError)
    assert len(processes.errors) == len(processes.views) - 1
    for error in processes.errors.values():
        assert isinstance(error, PeerFailedError)
        assert (error.processes, error.peer_stage) == ((0,), "finalize")


@pytest.mark.slow  # silence takes its time
async def test_who_has_not_brought_its_part_knows_that_nothing_is_published() -> None:
    job = Processes(3, SHORT)

    async def stop(operation: JointOperation) -> None:
        await operation.compare(b"plan", list)
        for view in job.views:
            view.stop()

        await operation.begin("/run/place")

    await job.run_and_wake({0: stop})

    for index in (1, 2):
        error = job.errors[index]
        assert isinstance(error, PeerSilentError)
        assert error.processes == (0,)


@pytest.mark.slow  # silence takes its time
@pytest.mark.parametrize("can", [True, False])
async def test_what_was_taken_back_from_a_silent_primary_is_known_to_be_unpublished(can: bool) -> None:
    job = Processes(3, SHORT)
    asked: list[int] = []

    async def stop(operation: JointOperation) -> None:
        await operation.compare(b"plan", list)
        await operation.begin("/run/place")
        await operation.parts()
        await operation.decide()
        job.views[0].stop()
        await operation.tell_published()

    async def other(index: int) -> None:
        async def take_back() -> bool:
            asked.append(index)
            return can

        operation = job.coordinators[index].operation(PATH)
        assert isinstance(operation, JointOperation)
        with pytest.raises((PeerSilentError, OutcomeUnknownError)) as raised:
            async with operation.running(take_back):
                await job.save(operation)

        error = raised.value
        assert isinstance(error, PeerSilentError) is can
        assert isinstance(error, PeerSilentError | OutcomeUnknownError)
        assert error.processes == (0,)
        if len(asked) == 2:
            job.go_on()

    async with create_task_group() as tasks:
        for index in (1, 2):
            tasks.start_soon(other, index)
        tasks.start_soon(job.take_part, 0, PATH, stop)

    assert sorted(asked) == [1, 2]


async def test_a_primary_that_fails_waits_for_nobody_who_has_not_come() -> None:
    job = Processes(3, JobLimits(join_s=500.0, silence_s=500.0, beat_s=5.0, call_s=500.0))

    async def fail(operation: JointOperation) -> None:
        raise StorageError("write", PATH, "Input/output error")

    async with create_task_group() as tasks:
        tasks.start_soon(job.take_part, 0, PATH, fail)
        tasks.start_soon(job.take_part, 1, PATH, job.save)

    assert isinstance(job.errors[0], StorageError)
    assert isinstance(job.errors[1], PeerFailedError)


@pytest.mark.parametrize("who", [0, 1, 2])
async def test_who_refuses_to_take_part_tells_the_others_why(who: int) -> None:
    job = Processes(3, LONG)
    operation = job.coordinators[who].operation(PATH)
    assert isinstance(operation, JointOperation)
    async with create_task_group() as tasks:
        for index in {0, 1, 2} - {who}:
            tasks.start_soon(job.take_part, index, PATH, job.save)

        await operation.refuse(StorageError("write", PATH, "Input/output error"))

    assert job.published == []
    assert set(job.errors) == {0, 1, 2} - {who}
    for error in job.errors.values():
        assert isinstance(error, PeerFailedError)
        assert error.processes == (who,)
        assert "Input/output error" in str(error)


class Watched:
    """A service that says when somebody waits for a key, for the first time or for a later one."""

    def __init__(self, service: KeyValues, part: str, times: int = 1) -> None:
        self._service, self._part, self._left, self.waited_for = service, part, times, threading.Event()

    def wait(self, key: str, timeout_s: float, /) -> bytes | None:
        if self._part in key:
            self._left -= 1
            if self._left <= 0:
                self.waited_for.set()

        return self._service.wait(key, timeout_s)

    def put(self, key: str, value: bytes, replace: bool, /) -> bool:
        return self._service.put(key, value, replace)

    def under(self, prefix: str, /) -> Mapping[str, bytes]:
        return self._service.under(prefix)

    def count(self, key: str, /) -> int:
        return self._service.count(key)

    def delete(self, prefix: str, /) -> None:
        self._service.delete(prefix)


class HeldLook(Watched):
    """A service whose first list of keys comes when it is let go."""

    def __init__(self, service: KeyValues) -> None:
        super().__init__(service, "no key has this")
        self.looks, self.may_go_on = threading.Event(), threading.Event()

    def under(self, prefix: str, /) -> Mapping[str, bytes]:
        if not self.looks.is_set():
            self.looks.set()
            self.may_go_on.wait(60.0)

        return super().under(prefix)


class LookedAt(Watched):
    """A service that says when somebody looks who has brought a part."""

    def __init__(self, service: KeyValues) -> None:
        super().__init__(service, "no key has this")
        self.looked = threading.Event()

    def under(self, prefix: str, /) -> Mapping[str, bytes]:
        if prefix.endswith("/part/"):
            self.looked.set()

        return super().under(prefix)


@pytest.mark.slow  # silence takes its time
async def test_who_falls_silent_once_it_has_brought_its_part_is_not_needed_and_hears_the_end() -> None:
    job = Processes(3, SHORT)
    looking = LookedAt(job.service)
    job.coordinators[0] = JobCoordinator(looking, 0, 3, SHORT)

    async def stop(operation: JointOperation) -> None:
        await operation.compare(b"plan", list)
        await operation.wait_begun(b"plan", list)
        await operation.bring(b"1")
        job.views[1].stop()
        await operation.wait_decided()
        await operation.wait_published()

    async def write_for_long(operation: JointOperation) -> None:
        await operation.compare(b"plan", list)
        await operation.wait_begun(b"plan", list)
        assert await to_thread.run_sync(looking.looked.wait, 60.0)  # process 1 is silent for too long
        await job.end(operation, b"2")
        job.go_on()

    await job.run({1: stop, 2: write_for_long})

    assert job.errors == {}
    assert job.published == [b"12"]


async def test_a_primary_that_is_cancelled_while_it_joins_tells_who_found_its_operation() -> None:
    job, joining = Processes(2), CancelScope()
    held = HeldLook(job.service)
    job.coordinators[0] = JobCoordinator(held, 0, 2, LONG)

    async def begin() -> None:
        with joining:
            await job.take_part(0, PATH, job.save)

    try:
        async with create_task_group() as tasks:
            tasks.start_soon(begin)
            assert await to_thread.run_sync(held.looks.wait, 20.0)
            joining.cancel()
            await job.take_part(1, PATH, job.save)
    finally:
        held.may_go_on.set()

    error = job.errors[1]
    assert isinstance(error, PeerFailedError)
    assert (error.processes, error.reason) == ((0,), "it was cancelled")

    await job.run()
    assert not job.errors
    assert job.published == [b"part"]


async def test_the_primary_ends_a_failed_one_only_when_nobody_is_in_it_any_more() -> None:
    """It is about to remove what the others may still write into."""
    job, cleaned_up, was_in_it = Processes(3), Event(), False
    watched = Watched(job.service, "/left_here")
    job.coordinators[0] = JobCoordinator(watched, 0, 3, LONG)

    async def fail(operation: JointOperation) -> None:
        await operation.compare(b"plan", lambda: ["x\tfloat32"])
        await operation.wait_begun(b"plan", lambda: ["x\tfloat32"])  # so all are in it
        raise StorageError("write", PATH, "Input/output error")

    async def clean_up(operation: JointOperation) -> None:
        try:
            await job.save(operation)
        finally:
            with CancelScope(shield=True):
                await cleaned_up.wait()

    async with create_task_group() as tasks:
        tasks.start_soon(job.run, {1: fail, 2: clean_up})
        await to_thread.run_sync(watched.waited_for.wait, 20.0)
        was_in_it = 0 not in job.errors
        cleaned_up.set()

    assert was_in_it
    assert {index: type(error) for index, error in job.errors.items()} == {
        0: PeerFailedError,
        1: StorageError,
        2: PeerFailedError,
    }
    assert len(job.service.keys) <= 2


async def test_a_new_coordinator_does_not_join_the_one_that_failed_before_all_had_come() -> None:
    """What says which to join is still there: one process never came."""
    limits = JobLimits(join_s=50.0, silence_s=50.0, beat_s=0.05, call_s=1.0)
    job = Processes(3, limits)

    async def fail(operation: JointOperation) -> None:
        raise StorageError("write", PATH, "Input/output error")

    async with create_task_group() as tasks:
        tasks.start_soon(job.take_part, 0, PATH, fail)
        tasks.start_soon(job.take_part, 1, PATH, job.save)

    assert {index: type(error) for index, error in job.errors.items()} == {
        0: StorageError,
        1: PeerFailedError,
    }
    job.errors.clear()
    looking, begun = Watched(job.service, "/join/", times=2), Watched(job.service, "/plan_here")
    job.coordinators[:2] = [JobCoordinator(begun, 0, 3, limits), JobCoordinator(looking, 1, 3, limits)]
    looked_again = False
    async with create_task_group() as tasks:
        tasks.start_soon(job.take_part, 1, PATH, job.save)
        looked_again = await to_thread.run_sync(looking.waited_for.wait, 20.0)
        tasks.start_soon(job.take_part, 0, PATH, job.save)
        await to_thread.run_sync(begun.waited_for.wait, 20.0)
        tasks.start_soon(job.take_part, 2, PATH, job.save)

    assert looked_again
    assert job.errors == {}
    assert len(job.published) == 1


async def test_who_comes_to_one_that_all_have_left_waits_for_the_next(processes: Processes) -> None:
    """The primary takes back what says which to join, once nobody need hear how it ended."""

    async def fail(operation: JointOperation) -> None:
        while len(processes.service.under(f"penstock/{operation.identity}/at/")) < len(processes.views):
            await checkpoint()

        raise StorageError("write", PATH, "Input/output error")

    await processes.run({0: fail})

    assert [key for key in processes.service.keys if "/at/" not in key] == []
