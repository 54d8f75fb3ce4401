from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import numpy as np
import pytest
from anyio import CancelScope, create_task_group
from anyio.lowlevel import checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.stages.stage_rig import Parcel, ParcelHandler, Probe, Rig, run_stages, save_stages, with_parcels

from penstock.kernel import (
    DirectRead,
    DriverRead,
    Extents,
    HostBatch,
    LeafSpec,
    MemoryRegulator,
    ParamInfo,
    Piece,
    PlannedBatch,
    Read,
    ReadBatch,
    ReadLeaf,
    ScatterRead,
    StagedBatch,
    StoredLeaf,
    Target,
)
from penstock.kernel.pipeline import FunctionStage
from penstock.stages import DeviceToHost, Flatten, HostToDevice, LimitBytes

pytestmark = pytest.mark.anyio


@dataclass
class Buffer:
    """A destination."""

    nbytes: int
    bounds: tuple[tuple[int, int], ...] = ()
    data: bytearray = field(default_factory=bytearray)

    def fresh(self) -> Buffer:
        raise NotImplementedError

    def view(self) -> memoryview:
        self.data = self.data or bytearray(self.nbytes)
        return memoryview(self.data)


def read_leaf(index: int, sizes: Sequence[int], staging: int = 0, handler: Any = None) -> ReadLeaf:
    """Make a leaf with one read of each size."""
    info = ParamInfo((str(index),), (), f"[{index}]")
    region = Buffer(sum(sizes))
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    reads: tuple[Read, ...] = tuple(
        DirectRead(index, "f", start, size, region, start) for start, size in zip(starts, sizes, strict=True)
    )
    return ReadLeaf(index, StoredLeaf(info, LeafSpec("t")), handler, Target((region,), staging), reads)


def scattered(leaf: ReadLeaf) -> ReadLeaf:
    """Return the same leaf with reads that go through buffers."""
    reads = [ScatterRead(read.leaf, "f", 0, read.nbytes, lambda _: None) for read in leaf.reads]
    return replace(leaf, reads=tuple(reads))


def contents(batches: list[StagedBatch]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for batch in batches:
        for piece in batch.parts():
            name = piece.leaf.info.name
            assert piece.start == len(found.get(name, b""))
            found[name] = found.get(name, b"") + bytes(piece.data)

    return found


# Saving


@pytest.mark.parametrize("limit", [1, 7, 100, 1000, 10_000])
async def test_bytes_of_a_save_in_flight_never_exceed_the_limit(rig: Rig, limit: int) -> None:
    rig.limit(5000, piece=300)
    tree = {f"{at}": np.full(at * (9 if limit > 1 else 1), at, np.uint8) for at in range(20)}
    probe = Probe()

    batches = await save_stages(rig.save_run(), tree, Flatten(), DeviceToHost(), LimitBytes(limit), probe)

    assert 0 < probe.peak <= limit
    assert contents(batches) == {name: value.tobytes() for name, value in tree.items() if value.size}
    assert sorted(leaf.info.name for batch in batches for leaf in batch.leaves) == sorted(tree)


async def test_a_leaf_is_complete_with_the_last_of_its_bytes_and_not_before(rig: Rig) -> None:
    rig.limit(1 << 20)
    tree = {"a": np.ones(100, np.uint8), "b": np.ones(30, np.uint8)}

    batches = await save_stages(rig.save_run(), tree, Flatten(), DeviceToHost(), LimitBytes(40))

    done = [{leaf.info.name for leaf in batch.leaves} for batch in batches]
    assert done[-1] == {"a", "b"}
    assert not any(done[:-1])


async def test_a_piece_is_cut_along_its_bytes_and_its_lease_goes_with_the_last_part(rig: Rig) -> None:
    run = rig.save_run()
    (batch,) = await save_stages(run, {"a": np.arange(15, dtype=np.uint8)}, Flatten())
    data = memoryview(bytes(range(10)))
    piece = Piece(batch.leaves[0].without_value(), (0,), 5, data, cost=10)
    leases: list[int] = []

    async def look(staged: StagedBatch) -> StagedBatch:
        leases.append(staged.staged.nbytes if staged.staged else 0)
        assert staged.in_flight is not None
        assert staged.in_flight.nbytes == staged.nbytes
        await checkpoint()
        staged.release()
        return staged

    message = StagedBatch(batch.leaves, (Extents.of(piece),), staged=await run.memory.acquire(10))
    batches = await run_stages(run, LimitBytes(4), FunctionStage(look), message=message)

    assert [(part.start, bytes(part.data)) for staged in batches for part in staged.parts()] == [
        (5, bytes([0, 1, 2, 3])),
        (9, bytes([4, 5, 6, 7])),
        (13, bytes([8, 9])),
    ]
    assert leases == [0, 0, 10]


async def test_each_piece_takes_its_own_part_of_the_lease_with_it(rig: Rig) -> None:
    run = rig.save_run()
    (batch,) = await save_stages(run, [np.ones(10, np.uint8)] * 3, Flatten())
    data = memoryview(bytes(10))
    costs = [10, 0, 10]  # the second one is aliased
    pieces = [
        Piece(leaf.without_value(), (0,), 0, data, cost)
        for leaf, cost in zip(batch.leaves, costs, strict=True)
    ]
    leases: list[int] = []

    async def look(staged: StagedBatch) -> StagedBatch:
        leases.append(staged.staged.nbytes if staged.staged else 0)
        staged.release()
        return staged

    message = StagedBatch(batch.leaves, tuple(map(Extents.of, pieces)), staged=await run.memory.acquire(20))
    await run_stages(run, LimitBytes(10), FunctionStage(look), message=message)

    assert leases == costs


async def test_what_weighs_nothing_passes_though_nothing_else_does(rig: Rig) -> None:
    run = rig.save_run()
    handler = ParcelHandler()
    rig.registry = run.registry = with_parcels(rig.registry, handler)
    tree = {"p": Parcel("x"), "n": None, "s": "text", "z": np.ones(0)}

    batches = await save_stages(run, tree, Flatten(), DeviceToHost(), LimitBytes(1))

    assert sorted(leaf.info.name for batch in batches for leaf in batch.leaves) == ["n", "p", "s", "z"]
    assert [leaf.info.name for batch in batches for each in batch.pending for leaf in each.leaves] == ["p"]
    for batch in batches:
        for pending in batch.pending:
            await pending.writing.wait()


@pytest.mark.parametrize("cancelled", [False, True], ids=["failing", "cancelled"])
@pytest.mark.parametrize("saving", [False, True], ids=["restore", "save"])
async def test_stopped_midway_it_gives_back_every_lease(rig: Rig, saving: bool, cancelled: bool) -> None:
    rig.limit(1 << 20, piece=60)
    go = anyio.Event()
    holding: list[Any] = []

    async def hold(batch: Any) -> None:
        holding.append(batch)  # with its bytes in flight, so that the third waits in the stage
        await go.wait()
        raise ArithmeticError

    async def work() -> None:
        last = FunctionStage(hold, concurrency=3)
        if saving:
            tree = [np.ones(60, np.uint8)] * 5
            await save_stages(rig.save_run(), tree, Flatten(), DeviceToHost(), LimitBytes(120), last)
        else:
            leaves = tuple(read_leaf(at, [60], staging=50) for at in range(5))
            await run_stages(rig.restore_run(), LimitBytes(120), last, message=PlannedBatch(leaves))

    async def stop_it(scope: CancelScope) -> None:
        # Two are held, and a third is in the stage. In a save, a fourth is on its way to the stage.
        while len(holding) < 2 or rig.memory.statistics().leased < (240 if saving else 150):
            await checkpoint()

        scope.cancel() if cancelled else go.set()

    failures: list[Exception] = []
    with CancelScope() as scope:
        async with create_task_group() as tasks:
            tasks.start_soon(stop_it, scope)
            try:
                await work()
            except ArithmeticError as error:
                failures.append(error)

    assert len(failures) == (not cancelled)


# Restoring


@pytest.mark.parametrize("limit", [1, 50, 90, 1000])
async def test_bytes_of_a_restore_in_flight_never_exceed_the_limit(rig: Rig, limit: int) -> None:
    run = rig.restore_run()
    leaves = tuple(read_leaf(at, [min(at * 3, limit)] * 5) for at in range(15))
    probe = Probe()

    batches = await run_stages(run, LimitBytes(limit), probe, message=PlannedBatch(leaves))

    assert 0 < probe.peak <= limit
    sent = [read for batch in batches for read in batch.reads]
    assert sent == [read for leaf in leaves for read in leaf.reads]
    for batch in batches:
        assert {read.leaf for read in batch.reads} <= {leaf.index for leaf in batch.leaves}


async def test_a_leafs_staging_lease_goes_with_its_first_read(rig: Rig) -> None:
    leaves = (read_leaf(0, [40, 40, 40], staging=120), read_leaf(1, [5], staging=7), read_leaf(2, [5]))

    batches = await run_stages(rig.restore_run(), LimitBytes(50), message=PlannedBatch(leaves))

    assert [batch.staged is not None for batch in batches] == [True, False, False, True]
    assert [[leaf.index for leaf in batch.leaves] for batch in batches] == [[0], [0], [0], [1, 2]]


async def test_an_indivisible_read_above_the_limit_goes_alone(rig: Rig) -> None:
    async def perform() -> None:
        pass

    small = read_leaf(0, [30])
    large = ReadLeaf(1, small.stored, small.handler, Target(), (DriverRead(1, 500, perform),))
    probe = Probe()

    leaves = (small, large, read_leaf(2, [30]))
    await run_stages(rig.restore_run(), LimitBytes(100), probe, message=PlannedBatch(leaves))

    assert probe.peak == 500


async def test_buffers_that_reads_go_through_are_leased_until_they_are_read(rig: Rig) -> None:
    rig.limit(100)
    leased: list[tuple[int, int]] = []

    async def read(batch: ReadBatch) -> None:
        leased.append((batch.nbytes, rig.memory.statistics().leased))
        await checkpoint()
        batch.release_read()

    leaves = (scattered(read_leaf(0, [60, 70])), read_leaf(1, [90]))
    await run_stages(rig.restore_run(), LimitBytes(1000), FunctionStage(read), message=PlannedBatch(leaves))

    assert leased == [(60, 60), (70, 70), (90, 0)]
    assert rig.memory.statistics().peak <= 100


async def test_of_a_leaf_that_is_staged_the_buffers_are_leased_with_it(rig: Rig) -> None:
    leased: list[tuple[int, int]] = []
    kept: list[ReadBatch] = []

    async def read(batch: ReadBatch) -> None:
        assert batch.scratch is not None
        leased.append((batch.scratch.nbytes, rig.memory.statistics().leased))
        batch.release_read()
        leased.append((0, rig.memory.statistics().leased))
        kept.append(batch)

    leaf = scattered(read_leaf(0, [40, 30], staging=70))
    await run_stages(rig.restore_run(), LimitBytes(50), FunctionStage(read), message=PlannedBatch((leaf,)))

    assert leased == [(40, 140), (0, 100), (30, 100), (0, 70)]
    for batch in kept:
        batch.release()
    assert rig.memory.statistics().leased == 0


async def test_leaves_that_are_staged_without_reads_do_not_all_come_at_once(rig: Rig) -> None:
    """The leaves of third-party handlers have no reads: the handlers read their own files."""
    rig.limit(100)
    leaves = tuple(read_leaf(at, [], staging=60) for at in range(5))
    held: list[int] = []

    async def load(batch: ReadBatch) -> None:
        held.append(rig.memory.statistics().leased)
        batch.release()

    await run_stages(rig.restore_run(), LimitBytes(), FunctionStage(load), message=PlannedBatch(leaves))

    assert held == [60] * 5


async def test_all_restores_share_what_is_in_flight(rig: Rig) -> None:
    rig.memory = MemoryRegulator(1 << 30, restore_concurrent_bytes=100)
    account = rig.memory.in_flight("restore")
    held = await account.acquire(80)
    results: list[ReadBatch] = []
    leased: list[int] = []

    async def look(batch: ReadBatch) -> ReadBatch:
        leased.append(account.statistics().leased)
        return batch

    async def work() -> None:
        message = PlannedBatch((read_leaf(0, [50]),))
        results.extend(
            await run_stages(rig.restore_run(), LimitBytes(), FunctionStage(look), message=message)
        )

    async with create_task_group() as tasks:
        tasks.start_soon(work)
        while not account.statistics().tasks_waiting:
            await checkpoint()

        assert not results
        held.release()

    assert leased == [50]
    assert len(results) == 1


@pytest.mark.parametrize("staging", [0, 50])
async def test_cancelled_while_it_waits_for_what_is_in_flight_it_leases_no_buffer(
    rig: Rig, staging: int
) -> None:
    rig.memory = MemoryRegulator(1 << 30, restore_concurrent_bytes=100)
    account = rig.memory.in_flight("restore")
    scope = CancelScope()

    async def work() -> None:
        with scope:
            leaves = (scattered(read_leaf(0, [50], staging)),)
            await run_stages(rig.restore_run(), LimitBytes(), message=PlannedBatch(leaves))

    with await account.acquire(80):
        async with create_task_group() as tasks:
            tasks.start_soon(work)
            while not account.statistics().tasks_waiting:
                await checkpoint()

            assert rig.memory.statistics().leased == 50 + staging
            scope.cancel()

    assert rig.memory.statistics().leased == 0


async def test_leaves_without_bytes_pass(rig: Rig) -> None:
    leaves = (read_leaf(0, []), read_leaf(1, [0]), read_leaf(2, []))

    batches = await run_stages(rig.restore_run(), LimitBytes(1), message=PlannedBatch(leaves))

    assert [leaf.index for batch in batches for leaf in batch.leaves] == [0, 1, 2]


@dataclass(frozen=True)
class Complete:
    """Stands in for `read`: passes a leaf on, with its lease, once its last read has arrived."""

    came: dict[int, int] = field(default_factory=dict[int, int])
    leases: dict[int, Any] = field(default_factory=dict[int, Any])

    async def __call__(self, batch: ReadBatch) -> HostBatch | None:
        first = batch.leaves[0].index
        if batch.staged is not None:
            self.leases[first] = batch.staged
        await checkpoint()
        for read in batch.reads:
            self.came[read.leaf] = self.came.get(read.leaf, 0) + 1
        batch.release_read()
        if any(self.came.get(leaf.index, 0) < len(leaf.reads) for leaf in batch.leaves):
            return None
        return HostBatch(batch.leaves, staged=self.leases.pop(first, None))


class Nothing:
    """A handler that returns the indices of its leaves as their values."""

    def build(self, leaves: Sequence[ReadLeaf]) -> Sequence[Any]:
        return [leaf.index for leaf in leaves]


@given(
    sizes=st.lists(st.lists(st.integers(0, 60), max_size=5), min_size=1, max_size=12),
    memory=st.integers(1, 200),
    in_flight=st.integers(1, 200),
    batch=st.integers(1, 5),
    workers=st.integers(1, 3),
    buffered=st.sets(st.integers(0, 11)),
    unstaged=st.sets(st.integers(0, 11)),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_staging_leases_of_a_restore_never_deadlock(
    rig: Rig,
    sizes: list[list[int]],
    memory: int,
    in_flight: int,
    batch: int,
    workers: int,
    buffered: set[int],
    unstaged: set[int],
) -> None:
    rig.limit(memory)
    run = rig.restore_run()
    handler = Nothing()
    leaves = [
        read_leaf(at, each, 0 if at in unstaged else sum(each), handler) for at, each in enumerate(sizes)
    ]
    leaves = [scattered(leaf) if at in buffered else leaf for at, leaf in enumerate(leaves)]
    messages = [PlannedBatch(tuple(leaves[at : at + batch])) for at in range(0, len(leaves), batch)]
    complete = FunctionStage(Complete(), workers)

    with anyio.fail_after(10):
        results = await run_many(run, messages, LimitBytes(in_flight), complete, HostToDevice())

    assert sorted(value for result in results for _, value in result.values) == list(range(len(sizes)))
    largest = max(
        (at not in unstaged) * sum(each)
        + (at in buffered) * (max([0, *each]) if at in unstaged else sum(each))
        for at, each in enumerate(sizes)
    )
    assert rig.memory.statistics().peak <= max(memory, largest)
    assert rig.memory.statistics().leased == 0
    assert ("memory.oversize" in rig.events) >= (largest > memory)


async def run_many(run: Any, messages: list[Any], *stages: Any) -> list[Any]:
    async def every(_: object) -> Any:
        for message in messages:
            yield message

    return await run_stages(run, FunctionStage(every), *stages)


@pytest.mark.many_cases
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    memory=st.integers(1, 150),
    piece=st.integers(1, 100),
    in_flight=st.integers(1, 200),
    batch=st.integers(1, 400),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_a_save_of_any_sizes_passes_any_limits(
    rig: Rig, sizes: list[int], memory: int, piece: int, in_flight: int, batch: int
) -> None:
    rig.limit(memory, piece=piece)
    run = rig.save_run()
    run.limits = type(run.limits)(rig.limits.piece_bytes, 3, batch)
    tree = [np.full(size, at, np.uint8) for at, size in enumerate(sizes)]
    probe = Probe(concurrency=2)

    with anyio.fail_after(10):
        stages = (Flatten(), DeviceToHost(), LimitBytes(in_flight), probe, FunctionStage(release))
        batches = await save_stages(run, tree, *stages)

    assert probe.peak <= in_flight
    assert rig.memory.statistics().peak <= memory
    assert sum(batch.nbytes for batch in batches) == sum(sizes)
    assert len([leaf for batch in batches for leaf in batch.leaves]) == len(sizes)


async def release(batch: StagedBatch) -> StagedBatch:
    batch.release()
    return batch


async def test_a_prioritised_restore_waits_for_memory_before_others(rig: Rig) -> None:
    rig.limit(100)
    order: list[int] = []

    async def note(batch: ReadBatch) -> ReadBatch:
        order.extend(leaf.index for leaf in batch.leaves)
        return batch

    async def restore(index: int, prioritised: bool) -> None:
        message = PlannedBatch((read_leaf(index, [5], 80),), prioritised)
        await run_stages(rig.restore_run(), LimitBytes(), FunctionStage(note), message=message)

    lease = await rig.memory.acquire(100)
    async with create_task_group() as tasks:
        for waiting, prioritised in enumerate([False, True], start=1):
            tasks.start_soon(restore, waiting, prioritised)
            while rig.memory.statistics().tasks_waiting < waiting:
                await checkpoint()

        lease.release()

    assert order == [2, 1]
