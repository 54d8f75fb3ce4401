from __future__ import annotations

import asyncio

import anyio
import pytest
from anyio import CancelScope, create_task_group, fail_after, wait_all_tasks_blocked

from penstock.errors import ConfigError, LeaseTooLargeError
from penstock.kernel import ByteLease, MemoryRegulator
from penstock.kernel.memory.bounded_cache import BoundedCache

pytestmark = pytest.mark.anyio


@pytest.fixture
def memory() -> MemoryRegulator:
    return MemoryRegulator(10)


class Line:
    """Tasks that want bytes, and the order in which they get them."""

    def __init__(self, memory: MemoryRegulator) -> None:
        self.memory = memory
        self.order: list[str] = []
        self.leases: dict[str, ByteLease] = {}

    async def want(
        self, name: str, nbytes: int, *, prioritised: bool = False, oversize: bool = False
    ) -> None:
        """Keep the lease."""
        lease = await self.memory.acquire(nbytes, prioritised=prioritised, admit_oversize=oversize)
        self.order.append(name)
        self.leases[name] = lease

    async def pass_through(self, name: str, nbytes: int) -> None:
        """Give the lease back at once."""
        with await self.memory.acquire(nbytes):
            self.order.append(name)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_is_positive(limit: int) -> None:
    with pytest.raises(ConfigError, match=rf"^memory\.limit_bytes: must be positive, not {limit}"):
        MemoryRegulator(limit)


async def test_the_whole_limit_can_be_leased(memory: MemoryRegulator) -> None:
    with await memory.acquire(10) as lease:
        assert lease.nbytes == 10
        assert memory.statistics().leased == 10

    assert memory.statistics().leased == 0


async def test_more_than_the_limit_is_refused_at_once(memory: MemoryRegulator) -> None:
    held = await memory.acquire(5)
    with pytest.raises(LeaseTooLargeError, match=r"^asked for 11 bytes of a budget of 10$") as caught:
        await memory.acquire(11)

    assert (caught.value.nbytes, caught.value.limit) == (11, 10)
    held.release()


async def test_waiters_are_served_in_order_even_if_a_later_one_would_fit(memory: MemoryRegulator) -> None:
    line = Line(memory)
    held = await memory.acquire(8)
    with fail_after(20):
        async with create_task_group() as tasks:
            tasks.start_soon(line.pass_through, "big", 9)
            await wait_all_tasks_blocked()
            tasks.start_soon(line.pass_through, "small", 2)
            await wait_all_tasks_blocked()
            assert memory.statistics().tasks_waiting == 2
            held.release()

    assert line.order == ["big", "small"]
    assert memory.statistics().leased == 0


async def test_one_release_lets_in_all_that_fit(memory: MemoryRegulator) -> None:
    line = Line(memory)
    held = await memory.acquire(10)
    with fail_after(20):
        async with create_task_group() as tasks:
            for name, nbytes in (("a", 3), ("b", 3), ("c", 4), ("d", 1)):
                tasks.start_soon(line.want, name, nbytes)
                await wait_all_tasks_blocked()
            held.release()
            await wait_all_tasks_blocked()
            # In which order tasks wake that were let in together is the event loop's affair.
            assert sorted(line.order) == ["a", "b", "c"]
            line.leases["b"].release()

    assert line.order[3:] == ["d"]
    assert memory.statistics().leased == 8


async def test_the_prioritised_wait_before_the_others_and_in_order_among_themselves(
    memory: MemoryRegulator,
) -> None:
    line = Line(memory)
    held = await memory.acquire(10)
    with fail_after(20):
        async with create_task_group() as tasks:
            for name, nbytes, prioritised in (("x", 6, False), ("a", 6, True), ("b", 1, True)):

                async def want(
                    name: str = name, nbytes: int = nbytes, prioritised: bool = prioritised
                ) -> None:
                    await line.want(name, nbytes, prioritised=prioritised)

                tasks.start_soon(want)
                await wait_all_tasks_blocked()
            held.release()
            await wait_all_tasks_blocked()
            assert sorted(line.order) == ["a", "b"]
            line.leases["a"].release()

    assert line.order[2:] == ["x"]


async def test_a_prioritised_newcomer_that_fits_does_not_wait_for_the_others(memory: MemoryRegulator) -> None:
    line = Line(memory)
    held = await memory.acquire(6)
    with fail_after(20):
        async with create_task_group() as tasks:
            tasks.start_soon(line.want, "big", 8)
            await wait_all_tasks_blocked()
            (await memory.acquire(3, prioritised=True)).release()
            assert line.order == []
            held.release()

    assert line.order == ["big"]


async def test_nobody_overtakes_a_prioritised_waiter(memory: MemoryRegulator) -> None:
    line = Line(memory)
    held = await memory.acquire(6)

    async def first() -> None:
        await line.want("first", 8, prioritised=True)

    with fail_after(20):
        async with create_task_group() as tasks:
            tasks.start_soon(first)
            await wait_all_tasks_blocked()
            tasks.start_soon(line.want, "small", 3)
            await wait_all_tasks_blocked()
            assert line.order == []
            held.release()
            await wait_all_tasks_blocked()
            assert line.order == ["first"]
            line.leases["first"].release()

    assert line.order == ["first", "small"]


async def test_cancelling_a_holder_returns_its_bytes(memory: MemoryRegulator) -> None:
    async def hold() -> None:
        with await memory.acquire(7):
            await anyio.sleep_forever()

    with fail_after(20):
        async with create_task_group() as tasks:
            tasks.start_soon(hold)
            await wait_all_tasks_blocked()
            assert memory.statistics().leased == 7
            tasks.cancel_scope.cancel()

    assert memory.statistics().leased == 0


@pytest.mark.parametrize("prioritised", [False, True])
async def test_cancelling_the_first_waiter_lets_the_next_one_in(
    memory: MemoryRegulator, prioritised: bool
) -> None:
    line, scope = Line(memory), CancelScope()
    held = await memory.acquire(5)

    async def first() -> None:
        with scope:
            await line.want("first", 8, prioritised=prioritised)

    with fail_after(20):
        async with create_task_group() as tasks:
            tasks.start_soon(first)
            await wait_all_tasks_blocked()
            tasks.start_soon(line.want, "next", 5)
            await wait_all_tasks_blocked()
            scope.cancel()

    assert line.order == ["next"]
    assert memory.statistics().tasks_waiting == 0
    held.release()
    assert memory.statistics().leased == 5


async def test_acquire_is_a_checkpoint_for_cancellation_even_if_bytes_are_free(
    memory: MemoryRegulator,
) -> None:
    with CancelScope() as scope:
        scope.cancel()
        await memory.acquire(1)

    assert scope.cancelled_caught
    assert memory.statistics().leased == 0


async def test_a_grant_and_a_cancelled_scope_in_one_tick_lose_nothing(memory: MemoryRegulator) -> None:
    line, scope = Line(memory), CancelScope()
    held = await memory.acquire(10)

    async def waiter() -> None:
        with scope:
            await line.want("waiter", 6)

    with fail_after(20):
        async with create_task_group() as tasks:
            tasks.start_soon(waiter)
            await wait_all_tasks_blocked()
            held.release()
            scope.cancel()

    # Which of the two wins is the event loop's affair; that nothing is lost is ours.
    for lease in line.leases.values():
        lease.release()
    assert memory.statistics().leased == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("also_waiting", [0, 6])
async def test_a_grant_and_a_native_cancellation_in_one_tick_lose_nothing(
    memory: MemoryRegulator, also_waiting: int
) -> None:
    # AnyIO scopes spare a task whose wait is already over; `asyncio.Task.cancel` does not.
    held = await memory.acquire(10)
    task = asyncio.ensure_future(memory.acquire(6))
    await wait_all_tasks_blocked()
    other = asyncio.ensure_future(memory.acquire(also_waiting))
    await wait_all_tasks_blocked()
    held.release()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    with fail_after(20):
        (await other).release()
    assert memory.statistics().leased == 0
    assert memory.statistics().tasks_waiting == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_native_cancellation_before_the_grant_leaves_the_line(memory: MemoryRegulator) -> None:
    held = await memory.acquire(10)
    task = asyncio.ensure_future(memory.acquire(6))
    await wait_all_tasks_blocked()
    task.cancel()
    held.release()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert memory.statistics().leased == 0
    assert memory.statistics().tasks_waiting == 0


async def test_a_lease_is_given_back_once(memory: MemoryRegulator) -> None:
    first, second = await memory.acquire(4), await memory.acquire(4)
    first.release()
    first.release()

    assert memory.statistics().leased == 4
    assert (first.nbytes, second.nbytes) == (0, 4)
    second.release()


async def test_a_lease_can_be_split_and_its_parts_released_apart(memory: MemoryRegulator) -> None:
    lease = await memory.acquire(10)
    part = lease.split(4)
    assert (lease.nbytes, part.nbytes) == (6, 4)
    assert memory.statistics().leased == 10

    lease.release()
    lease.release()
    assert memory.statistics().leased == 4
    part.split(4).release()
    part.release()
    assert memory.statistics().leased == 0


async def test_more_than_a_lease_holds_cannot_be_split_off(memory: MemoryRegulator) -> None:
    lease = await memory.acquire(3)
    with pytest.raises(LeaseTooLargeError, match=r"^asked for 4 bytes of a budget of 3$"):
        lease.split(4)

    assert lease.nbytes == 3
    lease.release()


@pytest.mark.parametrize("nbytes", [-1, -10])
async def test_a_negative_number_of_bytes_is_refused(memory: MemoryRegulator, nbytes: int) -> None:
    lease = await memory.acquire(3)
    with pytest.raises(ValueError, match="negative"):
        await memory.acquire(nbytes)
    with pytest.raises(ValueError, match="negative"):
        lease.split(nbytes)

    assert memory.statistics().leased == 3
    lease.release()


async def test_no_bytes_are_granted_at_once_whoever_waits(memory: MemoryRegulator) -> None:
    line = Line(memory)
    held = await memory.acquire(10)
    async with create_task_group() as tasks:
        tasks.start_soon(line.want, "waiter", 1)
        await wait_all_tasks_blocked()
        with anyio.move_on_after(1):
            (await memory.acquire(0)).release()
            line.order.append("nothing")
        held.release()

    assert line.order == ["nothing", "waiter"]


async def test_no_bytes_are_granted_when_all_are_leased(memory: MemoryRegulator) -> None:
    held = await memory.acquire(10)
    with fail_after(20):
        (await memory.acquire(0)).release()

    assert memory.statistics().leased == 10
    held.release()


async def test_what_exceeds_the_limit_is_admitted_alone(memory: MemoryRegulator) -> None:
    line = Line(memory)
    held = await memory.acquire(1)

    async def oversize() -> None:
        await line.want("huge", 25, oversize=True)

    with fail_after(20):
        async with create_task_group() as tasks:
            tasks.start_soon(oversize)
            await wait_all_tasks_blocked()
            tasks.start_soon(line.want, "small", 1)
            await wait_all_tasks_blocked()
            assert line.order == []
            held.release()
            await wait_all_tasks_blocked()
            assert line.order == ["huge"]
            assert memory.statistics().leased == 25
            line.leases["huge"].release()

    assert line.order == ["huge", "small"]
    assert memory.statistics().peak == 25


async def test_statistics_tell_what_is_leased_was_leased_and_waits(memory: MemoryRegulator) -> None:
    line = Line(memory)
    first, second = await memory.acquire(4), await memory.acquire(5)
    first.release()
    found = memory.statistics()
    assert (found.limit, found.leased, found.peak, found.tasks_waiting, found.waited_s) == (10, 5, 9, 0, 0.0)

    with fail_after(20):
        async with create_task_group() as tasks:
            tasks.start_soon(line.want, "waiter", 6)
            await wait_all_tasks_blocked()
            assert memory.statistics().tasks_waiting == 1
            second.release()

    found = memory.statistics()
    assert (found.leased, found.peak, found.tasks_waiting) == (6, 9, 0)
    assert found.waited_s > 0
    assert memory.limit == 10


async def test_many_tasks_that_come_and_are_cancelled_leave_nothing_behind(memory: MemoryRegulator) -> None:
    finished = list[int]()

    async def work(i: int) -> None:
        with await memory.acquire(1 + i % 10, prioritised=i % 3 == 0) as lease:
            assert memory.statistics().leased <= 10
            with lease.split(lease.nbytes // 2):
                await anyio.lowlevel.checkpoint()
        finished.append(i)

    async def cancelled_on_the_way(i: int) -> None:
        with anyio.CancelScope() as scope:
            async with create_task_group() as inner:
                inner.start_soon(work, i)
                for _ in range(i % 4):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()

    with fail_after(10):
        async with create_task_group() as tasks:
            for i in range(300):
                tasks.start_soon(work if i % 2 else cancelled_on_the_way, i)

    assert set(range(1, 300, 2)) <= set(finished)
    assert memory.statistics().leased == 0
    assert memory.statistics().tasks_waiting == 0
    assert memory.statistics().peak <= 10


class TestCaches:
    @staticmethod
    def filled(*sizes: int) -> BoundedCache[int, str]:
        cache = BoundedCache[int, str](10)
        for at, nbytes in enumerate(sizes):
            cache.put(at, "kept", nbytes)

        return cache

    async def test_caches_give_way_to_a_lease(self) -> None:
        memory, cache = MemoryRegulator(100), self.filled(20, 30, 10)
        with memory.counting([cache]):
            with await memory.acquire(40):
                assert memory.statistics().cached == 60
            with await memory.acquire(41):
                assert (memory.statistics().cached, len(cache)) == (40, 2)  # the one used longest ago went
            with await memory.acquire(200, admit_oversize=True):
                assert memory.statistics().cached == 0

    async def test_what_has_grown_since_is_freed_on_demand(self) -> None:
        memory, first, other = MemoryRegulator(100), self.filled(), self.filled(5)
        counting = memory.counting([first]), memory.counting([first, other])
        with counting[0], counting[1], await memory.acquire(60):
            first.put(1, "kept", 50)
            memory.free_caches()
            assert (first.nbytes, other.nbytes) == (0, 5)
            assert memory.statistics().cached == 5

    async def test_caches_of_a_closed_checkpointer_do_not_count(self) -> None:
        memory, cache = MemoryRegulator(100), self.filled(60)
        with memory.counting([cache]):
            pass
        with await memory.acquire(100):
            assert (memory.statistics().cached, len(cache)) == (0, 1)

    async def test_caches_do_not_give_way_to_a_lease_that_is_refused(self) -> None:
        memory, cache = MemoryRegulator(100), self.filled(50)
        with memory.counting([cache]), await memory.acquire(45):
            assert memory.acquire_nowait(60) is None
            assert memory.statistics().cached == 50

            lease = memory.acquire_nowait(20, flow="save")
            assert lease is not None
            assert memory.statistics().cached == 0
            lease.release()
