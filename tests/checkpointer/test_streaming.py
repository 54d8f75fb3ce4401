"""Restoring a part of a checkpoint, and streaming it leaf by leaf."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import jax.numpy as jnp
import numpy as np
import pytest

import penstock
from penstock.errors import (
    ClosedError,
    HandlerFailedError,
    NotACheckpointError,
    SpecError,
    StorageError,
    StructureMismatchError,
)
from penstock.handlers import LocalStore
from penstock.pipelines import restore_pipeline
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

AssertSame = Callable[[Any, Any], None]
BIG = 300_000


def tree() -> dict[str, Any]:
    small = {f"s{at:03}": jnp.full(20, at, jnp.float32) for at in range(60)}
    large = [np.full(BIG, at, np.float32) for at in range(4)]
    return {
        "params": {"w": jnp.ones((8, 9)), "small": small},
        "opt": large,
        "n": 7,
        "name": "x",
        "none": None,
    }


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    store = FaultyStore(LocalStore())
    yield store
    assert store.open_files == 0


async def saved(path: Path) -> Path:
    await penstock.save(path, tree())
    return path


def flat(tree: Any, keys: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if isinstance(tree, (dict, list)):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {path: leaf for key, value in pairs for path, leaf in flat(value, (*keys, str(key))).items()}

    return {keys: tree}


@pytest.mark.parametrize(
    ("only", "wanted"),
    [
        ("params", {"params"}),
        (["params.small.s00*", "n"], {"params", "n"}),
        (["opt.1", "opt.3"], {"opt"}),
        (lambda keys: keys[0] in ("n", "none"), {"n", "none"}),
    ],
)
async def test_only_some_leaves_are_restored(tmp_path: Path, only: Any, wanted: set[str]) -> None:
    path = await saved(tmp_path / "a")
    async with penstock.Checkpointer() as checkpointer:
        whole = flat(await checkpointer.restore(path))
        found = await checkpointer.restore(path, only=only)
        assert set(found) == wanted
        for keys, leaf in flat(found).items():
            at = keys if keys[0] != "opt" or len(wanted) > 1 or len(flat(found)) == 4 else None
            if at is not None:
                assert np.array_equal(leaf, whole[at])


async def test_a_part_is_restored_onto_a_target_and_nothing_else_is_read(
    tmp_path: Path, store: FaultyStore, assert_same: AssertSame
) -> None:
    path = await saved(tmp_path / "a")
    reports: list[Any] = []
    async with penstock.Checkpointer(store=store) as checkpointer:
        like = {"params": tree()["params"]}
        found = await checkpointer.restore(path, like=like, only="params", on_report=reports.append)
        assert_same(found, like)
        assert reports[0].nbytes == 8 * 9 * 4 + 60 * 80
        with pytest.raises(StructureMismatchError):
            await checkpointer.restore(path, like=tree(), only="params")
        with pytest.raises(SpecError, match="parms"):
            await checkpointer.restore(path, only=["params", "parms"])
        with pytest.raises(SpecError):
            await checkpointer.restore(path, only=lambda _: False)


async def test_every_leaf_comes_once(tmp_path: Path, assert_same: AssertSame) -> None:
    path = await saved(tmp_path / "a")
    async with penstock.Checkpointer() as checkpointer:
        found = {keys: value async for keys, value in checkpointer.stream(path)}
        whole = flat(await checkpointer.restore(path))
        assert_same({".".join(k): v for k, v in found.items()}, {".".join(k): v for k, v in whole.items()})
        like = {keys: value async for keys, value in checkpointer.stream(path, like=tree(), only=None)}
        assert_same(
            {".".join(k): v for k, v in like.items()}, {".".join(k): v for k, v in flat(tree()).items()}
        )
        part = [keys async for keys, _ in checkpointer.stream(path, only="opt")]
        assert sorted(part) == [("opt", str(at)) for at in range(4)]


async def test_values_come_in_order(tmp_path: Path) -> None:
    path = await saved(tmp_path / "a")
    async with penstock.Checkpointer() as checkpointer:
        order = ["opt.2", "params.small.s01*", "n", "params"]
        names = [".".join(keys) async for keys, _ in checkpointer.stream(path, order=order)]
        assert names[0] == "opt.2"
        assert sorted(names[1:11]) == [f"params.small.s01{at}" for at in range(10)]
        assert names[11] == "n"
        assert {name.partition(".")[0] for name in names[12:63]} == {"params"}
        assert len(names) == 68

        by_name = [keys async for keys, _ in checkpointer.stream(path, order=lambda keys: keys)]
        assert by_name == sorted(by_name)
        with pytest.raises(HandlerFailedError):
            async for _ in checkpointer.stream(path, order=lambda keys: 1 / 0):
                pass


async def test_a_value_that_is_not_taken_holds_the_others_back(tmp_path: Path, store: FaultyStore) -> None:
    path = tmp_path / "a"
    await penstock.save(path, [np.full(BIG, at, np.float32) for at in range(40)])
    pipeline = restore_pipeline().configure("limit_bytes", in_flight_bytes=4 * BIG)
    async with penstock.Checkpointer(store=store) as checkpointer:
        stream = checkpointer.stream(path, order=lambda keys: int(keys[0]), pipeline=pipeline)
        keys, value = await anext(stream)
        assert (keys, value[0]) == (("0",), 0)
        await anyio.wait_all_tasks_blocked()
        reads = [one.name for one in store.operations].count("file.read_at")
        await anyio.wait_all_tasks_blocked()
        assert [one.name for one in store.operations].count("file.read_at") <= max(reads, 8) < 20
        rest = [int(keys[0]) async for keys, _ in stream]
        assert rest == list(range(1, 40))
        assert checkpointer.statistics().leased == 0


async def test_leaving_early_stops_the_reading(tmp_path: Path, store: FaultyStore) -> None:
    path = await saved(tmp_path / "a")
    async with penstock.Checkpointer(store=store) as checkpointer:
        async with checkpointer.stream(path) as stream:
            await anext(stream)

        assert (store.open_files, checkpointer.statistics().leased) == (0, 0)
        with pytest.raises(ClosedError):
            await anext(stream)

        async for _ in checkpointer.stream(path):
            break

        gc.collect()
        while store.open_files:
            await anyio.lowlevel.checkpoint()

        unused = checkpointer.stream(path)
        await unused.aclose()
        await unused.aclose()
        left = checkpointer.stream(path)
        await anext(left)

    with pytest.raises(ClosedError):
        await anext(left)


async def test_cancelling_the_taker_stops_nothing_but_the_wait(tmp_path: Path, store: FaultyStore) -> None:
    path = await saved(tmp_path / "a")
    async with penstock.Checkpointer(store=store) as checkpointer:
        hang = store.hang_on("file.read_at")
        stream = checkpointer.stream(path, only="params.w")
        with anyio.move_on_after(0.05) as scope:
            await anext(stream)

        assert scope.cancelled_caught
        hang.release()
        assert [keys async for keys, _ in stream] == [("params", "w")]


async def test_failures_are_raised_where_the_value_would_be(tmp_path: Path, store: FaultyStore) -> None:
    path = await saved(tmp_path / "a")
    async with penstock.Checkpointer(store=store) as checkpointer:
        with pytest.raises(NotACheckpointError):
            await anext(checkpointer.stream(tmp_path / "b"))

        store.fail_on("file.read_at")
        stream = checkpointer.stream(path)
        with pytest.raises(StorageError):
            async for _ in stream:
                pass
        with pytest.raises(ClosedError):
            await anext(stream)

        replaced = checkpointer.stream(path)
        await anext(replaced)
        await (await checkpointer.save(path, {"other": 1}, overwrite=True))
        with pytest.raises(StorageError, match="was replaced while it was being read"):
            async for _ in replaced:
                pass

        assert checkpointer.statistics().leased == 0


async def test_a_replaced_checkpoint_is_noticed_before_another_batch_is_given(tmp_path: Path) -> None:
    path = tmp_path / "a"
    await penstock.save(path, {str(at): np.full(BIG, 1.0, np.float32) for at in range(20)})
    seen: list[float] = []

    async def take_all() -> None:
        async for _, value in stream:
            seen.append(value[0])

    # So little is read ahead that most leaves are still unread when the checkpoint is replaced.
    async with penstock.Checkpointer(memory_limit="4MiB") as checkpointer:
        stream = checkpointer.stream(path, order=[str(at) for at in range(20)])
        seen.append((await anext(stream))[1][0])
        await penstock.save(
            path, {str(at): np.full(BIG, 2.0, np.float32) for at in range(20)}, overwrite=True
        )
        with pytest.raises(StorageError, match="was replaced while it was being read"):
            await take_all()

        assert checkpointer.statistics().leased == 0

    assert set(seen) == {1.0}
    assert len(seen) < 10


async def test_a_stream_of_a_replaced_checkpoint_raises_replaced_error(tmp_path: Path) -> None:
    path = tmp_path / "a"
    await penstock.save(path, {"only": np.ones(3)})
    store = FaultyStore(LocalStore())
    hang = store.hang_on("file.read_at", then=StorageError("read", "there", "gone"))
    async with penstock.Checkpointer(store=store) as checkpointer:
        stream = checkpointer.stream(path)

        async def replace() -> None:
            await hang.wait_reached()
            path.rename(tmp_path / "before")
            await penstock.save(path, {"another": 1})
            hang.release()

        async def read() -> None:
            with pytest.raises(StorageError, match="was replaced while it was being read") as raised:
                await anext(stream)

            assert "gone" in str(raised.value.__context__)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(replace)
            tasks.start_soon(read)


async def test_a_stream_raises_other_read_errors_unchanged(tmp_path: Path) -> None:
    path = await saved(tmp_path / "a")
    store = FaultyStore(LocalStore())
    error = StorageError("read", "there", "no such luck")
    store.fail_on("file.read_at", error=error)
    async with penstock.Checkpointer(store=store) as checkpointer:
        with pytest.raises(StorageError) as raised:
            async for _ in checkpointer.stream(path):
                pass

    assert raised.value is error


def test_the_sync_twin_streams(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "a", tree())
    with penstock.sync.Checkpointer() as checkpointer:
        names = [".".join(keys) for keys, _ in checkpointer.stream(tmp_path / "a", order=["n"])]
        assert names[0] == "n"
        assert len(names) == 68
