"""Whole pipelines: what is on disk and what is held, wherever a save or a restore stops."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from anyio import create_task_group
from tests import collecting

from penstock import Checkpointer
from penstock.errors import (
    IncompleteCheckpointError,
    NotACheckpointError,
    NotDurableError,
    PenstockError,
    StorageError,
)
from penstock.handlers import LocalStore
from penstock.kernel import Milestone, Store
from penstock.pipelines import restore_pipeline, save_pipeline
from penstock.testing import Crash, CrashStore, FaultyStore

pytestmark = pytest.mark.anyio
unclosed_streams_and_files_are_found = collecting.unclosed_streams_and_files_are_found

ASYNCIO_ONLY = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""For sweeps in which the event loop plays no part but to run the stages."""

NEW_OR_OVERWRITE = pytest.mark.parametrize(
    "overwrite", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["new", "overwrite"]
)
"""Overwriting is swept in tests/contract, too."""


def tree_of(number: int) -> dict[str, Any]:
    return {
        "big": np.full(3000, number, np.uint8),
        "jax": jnp.full((4, 5), number, jnp.float32),
        "list": [np.full(7, number, np.int16), None, {}],
        "step": number,
        "text": f"number {number}",
    }


def number_in(tree: Any) -> int:
    """Return the number that a tree of `tree_of` was made from, after checking that it is complete."""
    number: int = tree["step"]
    expected = tree_of(number)
    assert tree.keys() == expected.keys()
    assert tree["text"] == expected["text"]
    assert tree["list"][1:] == [None, {}]
    pairs: list[tuple[Any, Any]] = [
        (tree["list"][0], expected["list"][0]),
        *((tree[key], expected[key]) for key in ("big", "jax")),
    ]
    for value, other in pairs:
        assert (value.shape, value.dtype) == (other.shape, other.dtype)
        assert np.array_equal(value, other)

    return number


@asynccontextmanager
async def opened(store: Store | None = None) -> AsyncGenerator[Checkpointer]:
    """Open a Checkpointer with a tight budget; assert that nothing of it is held when the block ends."""
    async with Checkpointer(store=store, memory_limit=4096, save_pipeline=small_files()) as checkpointer:
        yield checkpointer
        statistics = checkpointer.statistics()
        assert (statistics.leased, statistics.tasks_waiting) == (0, 0)
        assert statistics.peak <= 4096
        assert checkpointer.operations.life._threads is not None
        assert checkpointer.operations.life._threads.busy == 0
        if isinstance(store, FaultyStore):
            assert store.open_files == 0


def small_files() -> Any:
    """Make a save pipeline that writes several files, in several pieces."""
    return save_pipeline().configured(
        {"write": {"file_bytes": 1500}, "limit_bytes": {"in_flight_bytes": 1000}}
    )


async def save(store: Store | None, path: Path, number: int, *, overwrite: bool = False) -> None:
    async with opened(store) as checkpointer:
        await (await checkpointer.save(path, tree_of(number), overwrite=overwrite))


async def number_at(path: Path) -> int | None:
    """Return the number of the tree at `path`, which must be complete; None if there is no checkpoint."""
    async with opened() as checkpointer:
        try:
            return number_in(await checkpointer.restore(path))
        except (NotACheckpointError, IncompleteCheckpointError):  # the latter after a machine stopped
            assert not os.path.lexists(path)
            return None


async def operations_of(work: Callable[[FaultyStore], Awaitable[object]]) -> int:
    """Return the number of store operations of `work` when nothing fails."""
    store = FaultyStore(LocalStore())
    await work(store)
    return len(store.operations)


# The normal course


def test_the_stages_are_those_of_the_architecture_and_milestones_come_in_order() -> None:
    save_slots, restore_slots = save_pipeline(), restore_pipeline()

    assert save_slots.names == (
        *("flatten", "prioritise", "device_to_host", "limit_bytes", "write", "commit", "finalize"),
    )
    assert restore_slots.names == (
        *("locate", "plan", "prioritise", "limit_bytes", "read", "host_to_device", "assemble"),
    )
    of_stages = [each for each in Milestone if each not in (Milestone.KEPT, Milestone.FINALIZED)]
    assert [slot.milestone for slot in save_slots if slot.milestone] == of_stages


async def test_what_is_saved_is_restored_under_a_budget_smaller_than_a_leaf(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    tree: dict[str, Any] = {"large": np.arange(50_000, dtype=np.uint8), "small": jnp.ones(3)}
    async with opened() as checkpointer:
        report = await (await checkpointer.save(path, tree))
        restored = await checkpointer.restore(path, like=tree)

    assert np.array_equal(restored["large"], tree["large"])
    assert report.nbytes == 50_012
    assert report.n_leaves == 2


@pytest.mark.parametrize("name", ["limit_bytes", "prioritise"])
async def test_a_pipeline_works_without_an_optional_stage(tmp_path: Path, name: str) -> None:
    saving, restoring = save_pipeline().without(name), restore_pipeline().without(name)
    async with Checkpointer(save_pipeline=saving, restore_pipeline=restoring) as checkpointer:
        await (await checkpointer.save(tmp_path / "ckpt", tree_of(3)))
        assert number_in(await checkpointer.restore(tmp_path / "ckpt")) == 3
        assert number_in(await checkpointer.restore(tmp_path / "ckpt", like=tree_of(4))) == 3


async def test_numpy_leaves_may_be_changed_once_a_save_is_staged(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore())
    held = store.hang_on("data.write_at")
    state = tree_of(5)
    async with Checkpointer(store=store) as checkpointer:
        future = await checkpointer.save(tmp_path / "ckpt", state)
        assert future.milestone == Milestone.STAGED
        for value in (state["big"], state["list"][0]):
            value[:] = 0
        state["jax"].delete()
        held.release()
        await future

        assert number_in(await checkpointer.restore(tmp_path / "ckpt")) == 5


async def test_prioritised_leaves_are_read_first_and_the_tree_is_the_same(tmp_path: Path) -> None:
    await save(None, tmp_path / "ckpt", 6)
    async with opened() as checkpointer:
        restored = await checkpointer.restore(tmp_path / "ckpt", prioritise=lambda keys: keys[0] == "step")

    assert number_in(restored) == 6


async def test_nothing_is_visible_before_the_save_is_durable(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore())
    held = store.hang_on("publish")
    async with opened(store) as checkpointer:
        future = await checkpointer.save(tmp_path / "ckpt", tree_of(1))
        await held.wait_reached()
        assert not os.path.lexists(tmp_path / "ckpt")
        held.release()
        await future

    assert await number_at(tmp_path / "ckpt") == 1


# Wherever it stops


def begin(path: Path, old: Path | None) -> None:
    """Empty the directory of `path`; then copy `old` to `path` if it is given."""
    LocalStore().remove_tree(str(path.parent))
    path.parent.mkdir()
    if old is not None:
        shutil.copytree(old, path)


async def check_afterwards(path: Path, before: int | None, after: int, *, published: bool) -> None:
    """Assert that `path` holds the whole old or the whole new state, and that the next save works."""
    assert await number_at(path) == (after if published else before)
    await check_next_save(path)


async def check_next_save(path: Path) -> None:
    async with opened() as checkpointer:
        await (await checkpointer.save(path, tree_of(99), overwrite=True))
        assert number_in(await checkpointer.restore(path)) == 99

    assert os.listdir(path.parent) == [path.name]


def publishing(store: FaultyStore) -> int:
    """Return the number of the operation that published, from 1; one past the last if none did."""
    names = [operation.name for operation in store.operations]
    found = [names.index(name) + 1 for name in ("publish", "exchange") if name in names]
    return min(found, default=len(names) + 1)


@NEW_OR_OVERWRITE
@pytest.mark.sweep
@pytest.mark.parametrize("fault", ["fail", "tear"])
@pytest.mark.timeout(240)
@ASYNCIO_ONLY
async def test_a_save_whose_kth_operation_fails_leaves_the_old_state_or_the_new(
    tmp_path: Path, fault: str, overwrite: bool
) -> None:
    path = tmp_path / "sweep" / "ckpt"

    async def work(store: FaultyStore) -> None:
        await save(store, path, 2, overwrite=overwrite)

    old = tmp_path / "old"
    await save(None, old, 1)
    begin(path, old if overwrite else None)
    n_operations = await operations_of(work)
    for k in range(1, n_operations + 1):
        begin(path, old if overwrite else None)
        store = FaultyStore(LocalStore())
        error = StorageError("any", "path", f"operation {k}", 5)
        store.fail_at(k, error) if fault == "fail" else store.tear_at(k, error)

        failure: list[StorageError] = []
        try:
            await work(store)
        except StorageError as raised:
            failure.append(raised)

        published = k > publishing(store)
        if published:
            # The old checkpoint stays under the temporary name until the next save, since the exchange
            # may not be durable yet. A save does not fail because the old checkpoint cannot be removed.
            if store.operations[k - 1].name == "discard":
                assert failure == []
            else:
                (not_durable,) = failure
                assert isinstance(not_durable, NotDurableError)
                assert not_durable.__context__ is error
                assert (not_durable.older is not None) == overwrite
        else:
            assert failure == [error]
            assert set(os.listdir(path.parent)) <= {"ckpt"}
        await check_afterwards(path, 1 if overwrite else None, 2, published=published)


@pytest.mark.sweep
@NEW_OR_OVERWRITE
@pytest.mark.timeout(240)
async def test_a_save_that_is_cancelled_in_its_kth_operation_leaves_the_old_state_or_the_new(
    tmp_path: Path, overwrite: bool
) -> None:
    path = tmp_path / "sweep" / "ckpt"

    async def work(store: FaultyStore) -> None:
        await save(store, path, 2, overwrite=overwrite)

    old = tmp_path / "old"
    await save(None, old, 1)
    begin(path, old if overwrite else None)
    n_operations = await operations_of(work)
    for k in range(1, n_operations + 1):
        begin(path, old if overwrite else None)
        store = FaultyStore(LocalStore())
        hang = store.hang_at(k)

        async with create_task_group() as tasks:
            tasks.start_soon(work, store)
            await hang.wait_reached()
            tasks.cancel_scope.cancel()
            hang.release()

        names = [operation.name for operation in store.operations]
        published = "exchange" in names if overwrite else "publish" in names
        assert os.listdir(path.parent) == (["ckpt"] if overwrite or published else [])
        assert store.open_files == 0
        await check_afterwards(path, 1 if overwrite else None, 2, published=published)


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.timeout(240)
@ASYNCIO_ONLY
async def test_a_machine_that_stops_after_the_kth_change_has_the_old_state_or_the_new(
    tmp_path: Path, overwrite: bool
) -> None:
    root = tmp_path / "sweep"
    path = root / "ckpt"
    old = tmp_path / "old"
    await save(None, old, 1)
    seen: set[int | None] = set()
    k = 0
    while True:
        begin(path, old if overwrite else None)
        store = CrashStore(LocalStore(), root)
        store.stop_after(k)
        try:
            await save(store, path, 2, overwrite=overwrite)
        except (Crash, NotDurableError):  # the latter after a crash in its last sync
            finished = False
        else:
            finished = True

        store.lose_power()
        found = await number_at(path)
        assert found in ({2} if finished else {1 if overwrite else None, 2})
        seen.add(found)
        await check_next_save(path)
        if finished:
            break
        k += 1

    assert k > 10
    assert seen == {1 if overwrite else None, 2}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", ["fail", "cancel"])
@pytest.mark.timeout(240)
async def test_a_restore_that_stops_in_its_kth_operation_holds_nothing(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "ckpt"
    await save(None, path, 1)

    async def work(store: FaultyStore) -> None:
        async with opened(store) as checkpointer:
            await checkpointer.restore(path)

    untouched = FaultyStore(LocalStore())
    await work(untouched)
    names = [operation.name for operation in untouched.operations]
    holds = {k for k, name in enumerate(names, start=1) if name == "hold_reading"}
    assert holds == {1}
    for k in range(1, len(names) + 1):
        store = FaultyStore(LocalStore())
        if fault == "fail":
            error = StorageError("any", "path", f"operation {k}", 5)
            store.fail_at(k, error)
            # A checkpoint that cannot be protected from deletion can still be read.
            can_go_on = nullcontext() if k in holds else pytest.raises(PenstockError)
            with can_go_on as raised:
                await work(store)
            assert raised is None or raised.value is error
        else:
            hang = store.hang_at(k)
            async with create_task_group() as tasks:
                tasks.start_soon(work, store)
                await hang.wait_reached()
                tasks.cancel_scope.cancel()
                hang.release()

        assert store.open_files == 0

    assert await number_at(path) == 1


async def test_two_saves_and_a_restore_share_one_budget(tmp_path: Path) -> None:
    await save(None, tmp_path / "old", 1)
    restored: list[int] = []
    async with opened() as checkpointer:

        async def save_one(number: int) -> None:
            await (await checkpointer.save(tmp_path / f"{number}", tree_of(number)))

        async def restore_one() -> None:
            restored.append(number_in(await checkpointer.restore(tmp_path / "old")))

        async with create_task_group() as tasks:
            for number in (2, 3, 4):
                tasks.start_soon(save_one, number)
                tasks.start_soon(restore_one)

        assert restored == [1, 1, 1]
        for number in (2, 3, 4):
            assert number_in(await checkpointer.restore(tmp_path / f"{number}")) == number


async def test_a_full_disk_is_said_to_be_one_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    await save(None, tmp_path / "ckpt", 1)
    store = FaultyStore(LocalStore())
    store.fail_on("data.write_at", 2, StorageError.of("write", "x", OSError(28, "No space left on device")))

    with pytest.raises(StorageError, match="No space left") as raised:
        await save(store, tmp_path / "ckpt", 2, overwrite=True)

    assert raised.value.errno == 28
    assert raised.value.stage == "write"
    assert os.listdir(tmp_path) == ["ckpt"]
    assert await number_at(tmp_path / "ckpt") == 1
