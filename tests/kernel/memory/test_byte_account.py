"""What a budget is beyond a plain line: fair flows, patience, limits that change or lie within others."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest
from anyio import CancelScope, create_task_group, fail_after, wait_all_tasks_blocked

from penstock.errors import ClosedError, ConfigError, LeaseTooLargeError
from penstock.kernel import ByteLease, MemoryRegulator
from penstock.kernel.memory.byte_account import PATIENCE, ByteAccount, acquire_from_both
from penstock.kernel.memory.memory_limit import MemoryReading

pytestmark = pytest.mark.anyio


async def queue_up(account: ByteAccount, wishes: list[tuple[str, int, bool]], order: list[str]) -> None:
    """Let each wish wait, then grant them one after another; each is given back before the next."""
    held = await account.acquire(account.limit)

    async def want(flow: str, nbytes: int, prioritised: bool) -> None:
        with await account.acquire(nbytes, flow=flow, prioritised=prioritised):
            order.append(flow)
            await anyio.lowlevel.checkpoint()

    with fail_after(20):
        async with create_task_group() as tasks:
            for wish in wishes:
                tasks.start_soon(want, *wish)
                await wait_all_tasks_blocked()
            held.release()


async def test_flows_that_wait_get_equal_bytes() -> None:
    account, order = ByteAccount(12), list[str]()
    # Saves came first and ask for little; restores ask for three times as much each time.
    await queue_up(account, [("save", 4, False)] * 9 + [("restore", 12, False)] * 3, order)

    assert len(order) == 12
    half = order[: order.index("restore", order.index("restore") + 1)]
    assert Counter(half)["save"] == 4  # 3 for the first restore, one that began the turn
    assert account.statistics().leased == 0


async def test_who_did_not_wait_has_no_claim_to_what_others_got_meanwhile() -> None:
    account, order = ByteAccount(10), list[str]()
    held = await account.acquire(10)

    async def want(flow: str, release: anyio.Event) -> None:
        with await account.acquire(10, flow=flow):
            order.append(flow)
            await release.wait()

    with fail_after(20):
        async with create_task_group() as tasks:
            gates = [anyio.Event() for _ in range(8)]
            for gate in gates[:4]:
                tasks.start_soon(want, "old", gate)
                await wait_all_tasks_blocked()
            held.release()
            await wait_all_tasks_blocked()
            gates[0].set()
            await wait_all_tasks_blocked()  # "old" has got 20 bytes while it waited
            for gate in gates[4:]:
                tasks.start_soon(want, "new", gate)
                await wait_all_tasks_blocked()
            for gate in gates:
                gate.set()

    assert order[:2] == ["old", "old"]
    assert order[2:6].count("new") == 2  # turn and turn about, not four "new" in a row


async def test_the_prioritised_do_not_starve_the_rest() -> None:
    account, order = ByteAccount(10), list[str]()
    wishes = [("plain", 10, False)] + [("first", 10, True)] * (2 * PATIENCE)
    await queue_up(account, wishes, order)

    assert order.index("plain") == PATIENCE


async def test_after_the_turn_of_who_waited_the_prioritised_go_first_again() -> None:
    account, order = ByteAccount(10), list[str]()
    wishes = [("plain", 10, False)] * 2 + [("first", 10, True)] * (3 * PATIENCE)
    await queue_up(account, wishes, order)

    assert [at for at, flow in enumerate(order) if flow == "plain"] == [PATIENCE, 2 * PATIENCE + 1]


async def test_what_the_prioritised_got_while_nobody_else_waited_does_not_count() -> None:
    account, order = ByteAccount(10), list[str]()
    await queue_up(account, [("first", 10, True)] * PATIENCE, [])
    await queue_up(account, [("plain", 10, False), ("first", 10, True)], order)

    assert order == ["first", "plain"]


async def test_what_a_flow_got_is_forgotten_when_nobody_waits_any_more() -> None:
    account, order = ByteAccount(10), list[str]()
    await queue_up(account, [("old", 10, False)] * 3, [])
    await queue_up(account, [("new", 10, False)] * 3 + [("old", 10, False)] * 3, order)

    assert order == ["new", "old"] * 3


async def test_seconds_that_were_waited_add_up() -> None:
    account = ByteAccount(10)

    async def wait_once(n_checkpoints: int) -> float:
        held = await account.acquire(10)
        async with create_task_group() as tasks:
            tasks.start_soon(take_and_return)
            for _ in range(n_checkpoints):
                await anyio.lowlevel.checkpoint()
            held.release()

        return account.statistics().waited_s

    async def take_and_return() -> None:
        (await account.acquire(10)).release()

    assert 0 < await wait_once(1000) < await wait_once(10)


async def test_a_limit_of_a_flow_that_rises_lets_in_who_waits_for_it() -> None:
    account = ByteAccount(10)
    account.bound("save", 2)
    held = await account.acquire(2, flow="save")
    leases: list[ByteLease] = []

    async def want() -> None:
        leases.append(await account.acquire(2, flow="save"))

    with fail_after(20):
        async with create_task_group() as tasks:
            tasks.start_soon(want)
            await wait_all_tasks_blocked()
            account.bound("save", 4)

    held.release()
    leases[0].release()
    assert account.statistics("save").leased == 0


def test_a_flow_may_not_have_more_than_there_is() -> None:
    account = ByteAccount(10)
    account.bound("save", 12)
    assert account.limit_of("save") == 10
    account.resize(20)
    assert (account.limit_of("save"), account.limit_of("restore")) == (12, 20)


async def test_two_leases_that_became_one_are_both_empty() -> None:
    inner, outer = ByteAccount(5), ByteAccount(10)
    first, second = await inner.acquire(5), await outer.acquire(5)
    with first.joined(second):
        first.release()
        second.release()
        assert (inner.statistics().leased, outer.statistics().leased) == (5, 5)

    assert (inner.statistics().leased, outer.statistics().leased) == (0, 0)


async def test_a_flow_at_its_own_limit_stands_in_nobody_elses_way() -> None:
    account = ByteAccount(10)
    account.bound("save", 4)
    first = await account.acquire(2, flow="save")
    leases: list[ByteLease] = []

    async def want(flow: str, nbytes: int, prioritised: bool) -> None:
        leases.append(await account.acquire(nbytes, flow=flow, prioritised=prioritised))

    with fail_after(20):
        async with create_task_group() as tasks:
            tasks.start_soon(want, "save", 3, True)
            await wait_all_tasks_blocked()
            tasks.start_soon(want, "save", 1, False)  # would fit, but comes after the one that waits
            await wait_all_tasks_blocked()
            assert account.statistics("save").tasks_waiting == 2
            other = await account.acquire(6, flow="restore")
            other.release()
            assert not leases
            first.release()

    assert sorted(lease.nbytes for lease in leases) == [1, 3]
    assert account.statistics("save").leased == account.statistics().leased == 4
    assert account.statistics("save").peak == 4
    assert account.statistics().peak == 8
    for lease in leases:
        lease.release()


async def test_a_request_larger_than_the_limit_of_its_flow_is_refused_or_alone_in_it() -> None:
    account = ByteAccount(10)
    account.bound("save", 4)
    with pytest.raises(LeaseTooLargeError):
        await account.acquire(5, flow="save")

    held = await account.acquire(5, flow="restore")
    lease = await account.acquire(5, flow="save", admit_oversize=True)
    assert account.statistics("save").leased == 5
    held.release()
    lease.release()


async def test_a_limit_that_falls_lets_nobody_in_until_enough_came_back_and_one_that_rises_does() -> None:
    account = ByteAccount(10)
    first, second = await account.acquire(4), await account.acquire(4)
    account.resize(6)
    got: list[ByteLease] = []

    async def want() -> None:
        got.append(await account.acquire(3))

    with fail_after(20):
        async with create_task_group() as tasks:
            tasks.start_soon(want)
            await wait_all_tasks_blocked()
            assert not got
            first.release()
            await wait_all_tasks_blocked()
            assert not got  # 4 + 3 > 6
            account.resize(7)

    assert [lease.nbytes for lease in got] == [3]
    assert account.limit == 7
    second.release()


async def test_a_lease_from_two_accounts_is_one_lease() -> None:
    inner, outer = ByteAccount(5), ByteAccount(10)
    lease = await acquire_from_both(inner, outer, 5)
    part = lease.split(2)
    assert (inner.statistics().leased, outer.statistics().leased) == (5, 5)
    lease.release()
    lease.release()
    assert (inner.statistics().leased, outer.statistics().leased) == (2, 2)
    part.release()
    assert (inner.statistics().leased, outer.statistics().leased) == (0, 0)


async def test_cancelled_between_two_accounts_it_holds_nothing() -> None:
    inner, outer = ByteAccount(5), ByteAccount(10)
    held = await outer.acquire(10)
    scope = CancelScope()

    async def want() -> None:
        with scope:
            await acquire_from_both(inner, outer, 5)

    with fail_after(20):
        async with create_task_group() as tasks:
            tasks.start_soon(want)
            await wait_all_tasks_blocked()
            assert inner.statistics().leased == 5
            scope.cancel()

    assert inner.statistics().leased == 0
    assert outer.statistics().tasks_waiting == 0
    held.release()


class Fixed:
    """A machine whose figures a test sets."""

    def __init__(self, limit: int, free: int | None = None, pressure: float = 0.0) -> None:
        self.reading = MemoryReading(limit, limit if free is None else free, pressure)

    def read(self) -> MemoryReading:
        return self.reading


MIB, GIB = 2**20, 2**30


async def test_the_regulator_counts_each_account_by_the_name_of_its_option() -> None:
    memory = MemoryRegulator(
        "1MiB",
        save_device_host_concurrent_bytes="256KiB",
        save_concurrent_bytes=10,
        restore_concurrent_bytes=20,
    )
    staged = await memory.acquire(100, flow="save")
    restored = await memory.acquire(50, flow="restore")
    writing = await memory.in_flight("save").acquire(7)
    reading = await memory.in_flight("restore").acquire(8)
    found = memory.statistics()

    assert (found.limit, found.leased) == (MIB, 150)
    accounts = {name: (account.limit, account.leased) for name, account in found.accounts.items()}
    assert accounts == {
        "save_device_host_concurrent_bytes": (256 * 1024, 100),
        "save_concurrent_bytes": (10, 7),
        "restore_concurrent_bytes": (20, 8),
    }
    assert (memory.limit_of("save"), memory.limit_of("restore")) == (256 * 1024, MIB)
    for lease in (staged, restored, writing, reading):
        lease.release()
    assert memory.statistics().leased == 0


async def test_saves_may_stage_as_much_as_there_is_unless_told_otherwise() -> None:
    memory = MemoryRegulator(100)
    assert memory.limit_of("save") == 100
    memory.resize(60)
    assert (memory.limit, memory.limit_of("save")) == (60, 60)
    memory.resize(200)
    assert (memory.limit, memory.limit_of("save")) == (200, 200)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"limit": "many"}, "memory.limit_bytes"),
        ({"limit": 0}, "memory.limit_bytes"),
        ({"limit": 5, "save_concurrent_bytes": 0}, "memory.save_concurrent_bytes"),
        ({"limit": 5, "restore_concurrent_bytes": "1 Mb"}, "memory.restore_concurrent_bytes"),
        ({"limit": 5, "save_device_host_concurrent_bytes": -1}, "memory.save_device_host_concurrent_bytes"),
    ],
)
def test_a_limit_that_is_none_is_refused_by_name(arguments: dict[str, int | str], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        MemoryRegulator(**arguments)  # type: ignore[arg-type]  # the parameters are of several types


def test_auto_is_a_quarter_or_what_is_free_at_present() -> None:
    assert MemoryRegulator("auto", source=Fixed(8 * GIB)).limit == 2 * GIB
    tight = MemoryRegulator("auto", source=Fixed(8 * GIB, free=1 * GIB))
    assert (tight.limit, tight.whole) == (GIB // 2, 2 * GIB)


def test_only_one_thread_at_a_time_may_use_a_regulator() -> None:
    memory = MemoryRegulator(100)

    async def elsewhere() -> None:
        await anyio.to_thread.run_sync(_enter, memory)

    with memory.used(), memory.used(), pytest.raises(ClosedError, match="another thread"):
        anyio.run(elsewhere)

    anyio.run(elsewhere)


def _enter(memory: MemoryRegulator) -> None:
    with memory.used():
        pass


async def test_more_without_waiting_is_granted_if_it_fits_within_the_limit_of_the_flow() -> None:
    account = ByteAccount(10)
    account.bound("save", 6)
    held = await account.acquire(4, flow="save")

    more = account.acquire_nowait(2, flow="save")
    assert more is not None
    assert account.acquire_nowait(1, flow="save") is None
    assert account.acquire_nowait(5, flow="restore") is None
    assert account.leased == 6

    more.release()
    held.release()
    assert account.acquire_nowait(7, flow="save") is None  # not even alone
    assert account.leased == 0


async def test_more_without_waiting_overtakes_nobody() -> None:
    account = ByteAccount(10)
    held = await account.acquire(6)
    async with create_task_group() as tasks:
        tasks.start_soon(account.acquire, 10)
        await wait_all_tasks_blocked()

        assert account.acquire_nowait(1) is None
        assert account.acquire_nowait(0) is not None
        assert account.leased == 6
        held.release()
