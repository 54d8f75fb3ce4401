from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from anyio import create_task_group
from anyio.lowlevel import checkpoint
from jax.sharding import NamedSharding
from tests.stages.stage_rig import (
    Gather,
    Parcel,
    ParcelHandler,
    Rig,
    cancel_in,
    run_stages,
    save_stages,
    with_parcels,
)

from penstock.errors import DeletedLeafError, HandlerFailedError
from penstock.handlers import ArrayHandler
from penstock.kernel import Actor, LeafBatch, StagedBatch, TreeToSave, run_pipeline
from penstock.kernel.memory.buffers import MAPPED_FROM, UsedMemory
from penstock.kernel.pipeline import FunctionStage
from penstock.pipelines import save_pipeline
from penstock.stages import DeviceToHost, Flatten
from penstock.stages.device_to_host import PACKED_BELOW, moved

pytestmark = pytest.mark.anyio

BOTH_WAYS = pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])


def copy_from_devices(rig: Rig) -> None:
    """Treat CPU devices like any other: their arrays are copied, and the copies are leased."""
    rig.registry = rig.registry.copy()
    rig.registry.register(jax.Array, ArrayHandler(alias_host=False), override=True)


BOTH_ORDERS = pytest.mark.parametrize("first", [False, True], ids=["as copied", "copies first"])


async def staged(rig: Rig, tree: object, *after: Any, first: bool = False) -> list[StagedBatch]:
    return await save_stages(rig.save_run(), tree, Flatten(), DeviceToHost(copies_first=first), *after)


def content(batches: list[StagedBatch]) -> dict[str, bytes]:
    """Return the staged bytes of each leaf: all pieces of all chunks, in order."""
    found: dict[str, bytes] = {}
    for batch in batches:
        for extents in batch.extents:
            if extents.chunk is None:
                assert not found.keys() & {leaf.info.name for leaf in extents.leaves}
            for piece in extents:
                name = piece.leaf.info.name
                found[name] = found.get(name, b"") + bytes(piece.data)

    return found


@dataclass(frozen=True)
class Leases:
    """A later stage: records the leased bytes when a batch arrives, and then releases the lease."""

    rig: Rig
    seen: list[int]

    @property
    def concurrency(self) -> int:
        return 1

    @asynccontextmanager
    async def open(self, run: object, /) -> AsyncGenerator[Actor]:
        async def note(batch: StagedBatch) -> StagedBatch:
            self.seen.append(batch.staged.nbytes if batch.staged is not None else 0)
            await checkpoint()
            batch.release()
            return batch

        yield note


async def test_every_byte_arrives_once_and_every_leaf_is_said_to_be_complete_once(rig: Rig) -> None:
    numbers = np.arange(5, dtype=np.float32)
    tree = {
        "a": numbers,
        "b": jnp.arange(7, dtype=jnp.int8),
        "n": None,
        "s": "text",
        "z": np.ones((0, 3), np.float32),
    }

    batches = await staged(rig, tree)

    assert content(batches) == {"a": numbers.tobytes(), "b": bytes(range(7))}
    assert [leaf.info.name for batch in batches for leaf in batch.leaves] == ["a", "b", "n", "s", "z"]
    assert all(leaf.value is None for batch in batches for leaf in batch.leaves)
    assert all(leaf.value is None for batch in batches for each in batch.extents for leaf in each.leaves)


async def test_copied_leaves_are_leased_and_aliased_ones_cost_nothing(rig: Rig) -> None:
    seen: list[int] = []
    tree = {"a": np.ones(10, np.uint8), "b": jnp.ones(PACKED_BELOW + 1, jnp.int8)}
    await staged(rig, tree, Leases(rig, seen))

    assert sum(seen) == 10
    assert rig.memory.statistics().peak == 10


async def test_an_aliased_leaf_is_staged_though_the_budget_is_taken(rig: Rig) -> None:
    rig.limit(100)
    lease = await rig.memory.acquire(100)

    batches = await staged(rig, {"a": jnp.zeros(1000, jnp.int8)})

    assert content(batches) == {"a": bytes(1000)}
    lease.release()


@BOTH_ORDERS
@pytest.mark.parametrize("on_device", [False, True], ids=["numpy", "device"])
async def test_a_leaf_larger_than_the_budget_streams_through_it(
    rig: Rig, on_device: bool, first: bool
) -> None:
    copy_from_devices(rig)
    rig.limit(1000)
    values = np.arange(5000, dtype=np.uint16)
    seen: list[int] = []

    tree = {"a": jnp.asarray(values) if on_device else values}
    batches = await staged(rig, tree, Leases(rig, seen), first=first)

    assert content(batches) == {"a": values.tobytes()}
    assert len(batches) >= 10
    assert max(seen) <= 1000
    assert 500 < rig.memory.statistics().peak <= 1000
    assert [leaf.info.name for batch in batches for leaf in batch.leaves] == ["a"]
    assert batches[-1].leaves != ()
    assert rig.events == []


async def test_copies_of_host_memory_are_all_made_before_the_first_is_passed_on_if_asked(rig: Rig) -> None:
    size = 2 * PACKED_BELOW
    rig.limit(10 * size, piece=size)
    values = np.arange(4 * size, dtype=np.uint8)
    leased: dict[bool, list[int]] = {False: [], True: []}

    for first, seen in leased.items():

        async def note(batch: StagedBatch, seen: list[int] = seen) -> StagedBatch:
            seen.append(rig.memory.statistics().leased // size)
            batch.release()
            return batch

        batches = await staged(rig, {"a": values}, FunctionStage(note), first=first)
        assert content(batches) == {"a": values.tobytes()}

    assert leased[True] == [4, 3, 2, 1]
    assert max(leased[False]) < 4


async def test_all_that_is_on_the_host_is_there_before_the_first_is_passed_on_if_asked(rig: Rig) -> None:
    size = 2 * PACKED_BELOW
    rig.limit(10 * size, piece=size)
    tree = {
        "copied": np.arange(4 * size, dtype=np.uint8),
        "packed": np.ones(10, np.uint8),
        "there": jnp.zeros(2 * size, jnp.int8),
    }
    at_first: dict[bool, int] = {}
    for first in (False, True):
        seen: list[int] = []

        async def note(batch: StagedBatch, seen: list[int] = seen) -> StagedBatch:
            seen.append(rig.memory.statistics().leased)
            batch.release()
            return batch

        assert content(await staged(rig, tree, FunctionStage(note), first=first)).keys() == tree.keys()
        at_first[first] = seen[0]

    assert at_first[True] == 4 * size + 10 > at_first[False]


@BOTH_ORDERS
async def test_a_tree_of_ten_budgets_passes_through_the_whole_pipeline(rig: Rig, first: bool) -> None:
    copy_from_devices(rig)
    rig.limit(4096, piece=1024)
    tree = {f"{at}": np.full(40 * at, at, np.uint8) for at in range(45)}
    tree["large"] = np.arange(5000, dtype=np.uint8)
    assert sum(value.nbytes for value in tree.values()) > 10 * 4096

    pipeline = save_pipeline().configure("device_to_host", copies_first=first)
    result = await run_pipeline(pipeline, rig.save_run(), TreeToSave(tree))

    assert result.value.nbytes == sum(value.nbytes for value in tree.values())
    assert 1024 < rig.memory.statistics().peak <= 4096


async def test_a_single_device_array_of_ten_budgets_passes_through_the_whole_pipeline(rig: Rig) -> None:
    copy_from_devices(rig)
    rig.limit(2048, piece=1000)

    await run_pipeline(save_pipeline(), rig.save_run(), TreeToSave({"a": jnp.zeros((41, 500), jnp.int8)}))

    assert 1000 <= rig.memory.statistics().peak <= 2048


async def test_a_sharded_array_is_one_chunk_a_shard_and_replicas_are_not_copied_twice(rig: Rig) -> None:
    copy_from_devices(rig)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    array = jax.device_put(np.arange(8, dtype=np.uint8), NamedSharding(mesh, cast("Any", jax).P("x")))

    batches = await staged(rig, {"a": array})

    pieces = [piece for batch in batches for piece in batch.parts()]
    assert {piece.chunk: bytes(piece.data) for piece in pieces} == {
        (at,): bytes([2 * at, 2 * at + 1]) for at in range(4)
    }
    assert rig.memory.statistics().peak == 8


async def test_numpy_leaves_may_be_changed_once_they_are_staged(rig: Rig) -> None:
    value = np.arange(100, dtype=np.uint8)
    before = value.tobytes()

    batches = await staged(rig, {"a": value})
    value[:] = 0

    assert content(batches) == {"a": before}


async def test_a_staged_value_is_let_go_of(rig: Rig) -> None:
    array, number = jnp.ones(100), np.ones(100)
    references: list[weakref.ref[Any]] = [weakref.ref(array), weakref.ref(number)]
    message = TreeToSave({"a": array, "n": number})
    del array, number
    await run_stages(
        rig.save_run(), Flatten(), DeviceToHost(), FunctionStage(_forget_aliases), message=message
    )
    with anyio.fail_after(20):  # a worker thread drops its last call some time after it has returned
        while any(reference() is not None for reference in references):
            gc.collect(0)
            await checkpoint()


async def _forget_aliases(batch: StagedBatch) -> object:
    """Keep the pieces that were copied, and drop the aliased ones, as `write` does."""
    batch.release()
    return [extents for extents in batch.extents if extents.cost and extents.chunk is not None]


@BOTH_ORDERS
async def test_staging_waits_while_the_budget_is_taken(rig: Rig, first: bool) -> None:
    rig.limit(100, piece=60)
    values = np.arange(200, dtype=np.uint8)
    batches: list[StagedBatch] = []

    async def keep(batch: StagedBatch) -> object:
        batches.append(batch)
        return None

    async def give_back_one_by_one() -> None:
        released = 0
        while released < 4:
            await checkpoint()
            assert sum(batch.staged.nbytes for batch in batches if batch.staged is not None) <= 100
            if rig.memory.statistics().tasks_waiting or len(batches) == 4:
                batches[released].release()
                released += 1

    async with create_task_group() as tasks:
        tasks.start_soon(give_back_one_by_one)
        await staged(rig, {"a": values}, FunctionStage(keep), first=first)

    assert content(batches) == {"a": values.tobytes()}
    assert rig.memory.statistics().peak <= 100


async def test_a_prioritised_leaf_waits_before_others(rig: Rig) -> None:
    rig.limit(100)
    order: list[str] = []
    leases = [await rig.memory.acquire(100)]

    async def save(name: str, prioritised: bool) -> None:
        run = rig.save_run()
        (batch,) = await save_stages(run, {name: np.ones(80, np.uint8)}, Flatten())
        message: LeafBatch = replace(batch, prioritised=prioritised)

        async def note(staged: StagedBatch) -> StagedBatch:
            order.append(staged.leaves[0].info.name)
            return staged

        await run_stages(run, DeviceToHost(), FunctionStage(note), message=message)

    async with create_task_group() as tasks:
        for waiting, (name, prioritised) in enumerate([("late", False), ("first", True)], start=1):
            tasks.start_soon(save, name, prioritised)
            while rig.memory.statistics().tasks_waiting < waiting:
                await checkpoint()

        leases.pop().release()

    assert order == ["first", "late"]


# Failing and cancelled


@pytest.mark.parametrize("method", ["pieces", "take"])
async def test_a_handler_that_fails_fails_the_stage_and_leases_are_given_back(rig: Rig, method: str) -> None:
    rig.limit(100, piece=40)
    error = rig.scripted(np.ndarray).fail(method, "b")

    with pytest.raises(ArithmeticError) as raised:
        await staged(rig, {name: np.ones(30, np.uint8) for name in "abc"})

    assert raised.value is error


@pytest.mark.parametrize("alias", [False, True], ids=["copied", "aliased"])
async def test_an_array_that_is_deleted_between_planning_and_staging_is_named(rig: Rig, alias: bool) -> None:
    if not alias:
        copy_from_devices(rig)
    arrays = {name: jnp.ones(10) for name in "abc"}

    async def donate(batch: LeafBatch) -> LeafBatch:
        jax.jit(lambda x: x + 1, donate_argnums=0)(arrays["b"])
        assert arrays["b"].is_deleted()
        return batch

    with pytest.raises(DeletedLeafError) as raised:
        await save_stages(rig.save_run(), arrays, Flatten(), FunctionStage(donate), DeviceToHost())

    assert raised.value.key_path == "['b']"
    assert raised.value.stage == "s2"


async def test_an_array_that_is_deleted_while_its_pieces_are_taken_is_named(rig: Rig) -> None:
    copy_from_devices(rig)
    rig.limit(100, piece=20)
    array = jnp.ones(100, jnp.int8)

    async def delete_it(batch: StagedBatch) -> StagedBatch:
        batch.release()
        if not array.is_deleted():
            array.delete()
        return batch

    with pytest.raises(DeletedLeafError) as raised:
        await staged(rig, {"a": array}, FunctionStage(delete_it))

    assert raised.value.key_path == "['a']"


@BOTH_ORDERS
@BOTH_WAYS
@pytest.mark.parametrize("method", ["pieces", "take"])
async def test_cancelled_midway_it_gives_back_its_leases(
    rig: Rig, method: str, native: bool, first: bool
) -> None:
    rig.limit(100, piece=40)
    hang = rig.scripted(np.ndarray).hang(method, "b")

    tree = {name: np.ones(30, np.uint8) for name in "abc"}
    await cancel_in(hang, lambda: staged(rig, tree, first=first), native=native)


async def test_cancelled_while_it_waits_for_the_budget_it_leaves_the_queue(rig: Rig) -> None:
    rig.limit(100)
    with await rig.memory.acquire(50):
        async with create_task_group() as tasks:
            tasks.start_soon(staged, rig, {"a": np.ones(80, np.uint8)})
            while not rig.memory.statistics().tasks_waiting:
                await checkpoint()
            tasks.cancel_scope.cancel()

        assert rig.memory.statistics().tasks_waiting == 0


@BOTH_ORDERS
async def test_a_batch_whose_consumer_fails_is_released(rig: Rig, first: bool) -> None:
    async def fail(batch: StagedBatch) -> object:
        await checkpoint()
        raise ArithmeticError

    rig.limit(100, piece=10)
    with pytest.raises(ArithmeticError):
        await staged(rig, {"a": np.ones(80, np.uint8)}, FunctionStage(fail), first=first)


# Third parties


async def test_a_third_partys_leaf_is_leased_until_it_is_written(rig: Rig) -> None:
    handler = ParcelHandler(size=60)
    rig.registry = with_parcels(rig.registry, handler)
    hang = handler.hang("write", "p")
    leased: list[int] = []

    async def look(batch: StagedBatch) -> StagedBatch:
        leased.append(rig.memory.statistics().leased)
        hang.release()
        (pending,) = batch.pending
        assert pending.writing is not None
        await pending.writing.wait()
        return batch

    (batch,) = await staged(rig, {"p": Parcel("text")}, FunctionStage(look))

    assert leased == [60]
    assert [leaf.info.name for leaf in batch.leaves] == ["p"]
    assert batch.leaves[0].value is None
    assert (rig.temporary / "p").read_text() == "text"
    assert rig.events == []


async def test_a_third_partys_leaf_above_the_budget_is_admitted_alone_with_a_warning(rig: Rig) -> None:
    rig.limit(100)
    handler = ParcelHandler(size=250)
    rig.registry = with_parcels(rig.registry, handler)
    leased: list[int] = []

    async def look(batch: StagedBatch) -> StagedBatch:
        leased.append(rig.memory.statistics().leased)
        for pending in batch.pending:
            assert pending.writing is not None
            await pending.writing.wait()
        batch.release()
        return batch

    await staged(rig, {"a": np.ones(50, np.uint8), "p": Parcel("x"), "q": Parcel("y")}, FunctionStage(look))

    assert sorted(leased) == [50, 500]  # one call of `serialize`, so one lease
    assert rig.events == ["memory.oversize"]


async def test_an_unsplittable_piece_above_the_budget_is_admitted_alone_with_a_warning(rig: Rig) -> None:
    rig.limit(3)  # less than one element

    await staged(rig, {"a": np.ones(2, np.float64), "b": np.ones(3, np.uint8)})

    assert rig.events == ["memory.oversize"] * 2
    assert rig.memory.statistics().peak == 8


async def test_a_third_partys_failure_is_named_and_its_lease_given_back(rig: Rig) -> None:
    handler = ParcelHandler()
    error = handler.fail("serialize", "q")
    rig.registry = with_parcels(rig.registry, handler)

    with pytest.raises(HandlerFailedError, match=r"\['p'\] and 1 more: .*serialize of q") as raised:
        await staged(rig, {"p": Parcel("x"), "q": Parcel("y")}, FunctionStage(_wait))

    assert raised.value.__cause__ is error


async def _wait(batch: StagedBatch) -> StagedBatch:
    for pending in batch.pending:
        assert pending.writing is not None
        await pending.writing.wait()
    return batch


async def test_gather_can_hold_leases_until_the_end(rig: Rig) -> None:
    # A test of the rig itself: leases that are held on purpose are released at the end.
    await save_stages(rig.save_run(), {"a": np.ones(9)}, Flatten(), DeviceToHost(), Gather(release=False))


def test_bytes_move_once_if_they_are_many_and_into_memory_of_those_that_are_gone() -> None:
    memory = UsedMemory(4 * MAPPED_FROM)
    small, large = memoryview(b"x" * (MAPPED_FROM - 1)), memoryview(b"y" * MAPPED_FROM)
    assert moved(small, memory) is small
    there = moved(large, memory)
    assert there is not large
    assert there == large
    view = np.frombuffer(there, np.uint32)[1:].view(np.uint8).data
    assert moved(view, memory) is view
    at = np.frombuffer(there, np.uint8).ctypes.data
    other = moved(large, memory)
    assert np.frombuffer(other, np.uint8).ctypes.data != at, "it is in use"
    del there, view
    assert np.frombuffer(moved(large, memory), np.uint8).ctypes.data == at
