"""The manager: what it saves, keeps, deletes and restores."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.own_files import listed

import penstock
from penstock.errors import (
    ClosedError,
    NotACheckpointError,
    OlderStepError,
    SpecError,
    StepExistsError,
    StorageError,
)
from penstock.handlers import LocalStore
from penstock.items import Json, RandomKey
from penstock.steps import (
    CheckpointManager,
    EverySteps,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    KeepSteps,
    Never,
    OnPreemption,
    StepInfo,
    StepNames,
    WhenIdle,
)
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

AssertSame = Callable[[Any, Any], None]
TMP = ".orbax-checkpoint-tmp"


def state(fill: int = 1) -> dict[str, Any]:
    return {"w": jnp.full((4, 5), fill, jnp.float32), "host": np.full(3, fill), "n": fill}


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    store = FaultyStore(LocalStore())
    yield store
    assert store.open_files == 0


def _none() -> Any:
    raise AssertionError("it was not saved")


def there(root: Path) -> list[str]:
    return listed(root)


async def fill(manager: CheckpointManager, *steps: int, **metrics: float) -> None:
    for step in steps:
        save = await manager.save(step, state(step), metrics=metrics or None)
        assert save is not None
        await save


async def test_a_run_that_saves_and_one_that_resumes(tmp_path: Path, assert_same: AssertSame) -> None:
    root = tmp_path / "run"
    async with CheckpointManager(root, metadata={"model": "small"}) as manager:
        assert (manager.latest_step(), list(manager.all_steps())) == (None, [])
        with pytest.raises(NotACheckpointError):
            await manager.restore()

        save = await manager.save(3, state(3), metrics={"loss": jnp.float32(0.5)}, custom_metadata={"lr": 1})
        assert save is not None
        assert manager.latest_step() is None
        await save
        assert manager.latest_step() == 3  # from the moment on that the save is durable
        await manager.save(10, state(10))

    async with CheckpointManager(root, metadata={"model": "other"}) as manager:
        assert list(manager.all_steps()) == [3, 10]
        assert_same(await manager.restore(like=state()), state(10))
        assert (await manager.restore(3))["n"] == 3
        about = await manager.metadata(3)
        assert (about.step, about.metrics, about.custom_metadata) == (3, {"loss": 0.5}, {"lr": 1})
        assert about.tree["w"].shape == (4, 5)
        assert about.committed_at_ns is not None
        assert (await manager.metadata()).step == 10
        assert await manager.root_metadata() == {"model": "small"}
        with pytest.raises(NotACheckpointError):
            await manager.restore(4)
        with pytest.raises(NotACheckpointError):
            await manager.metadata(4)

    assert there(root) == ["10", "3", "metadata"]


async def test_an_older_or_existing_step_is_refused_unless_overwritten(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path) as manager:
        await fill(manager, 5)
        with pytest.raises(StepExistsError):
            await manager.save(5, state(6))
        with pytest.raises(OlderStepError):
            await manager.save(4, state(4))

        save = await manager.save(7, state(7))
        with pytest.raises(StepExistsError):  # it is being saved
            await manager.save(7, state(7), overwrite=True)
        with pytest.raises(OlderStepError):
            await manager.save(6, state(6), force=True)

        assert save is not None
        await save
        for step, fill_with in ((5, 55), (4, 44)):
            again = await manager.save(step, state(fill_with), overwrite=True)
            assert again is not None
            await again
            assert (await manager.restore(step))["n"] == fill_with

        assert list(manager.all_steps()) == [4, 5, 7]

    assert there(tmp_path) == ["4", "5", "7"]


@pytest.mark.parametrize("step", [-1, 10**18, "7", 1.5, None])
async def test_what_is_no_step_is_refused(tmp_path: Path, step: Any) -> None:
    async with CheckpointManager(tmp_path) as manager:
        with pytest.raises(SpecError):
            await manager.save(step, state())

        save = await manager.save(np.int64(7), state())
        assert save is not None
        await save
        assert manager.all_steps() == (7,)


async def test_the_policy_decides_and_force_overrules(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path, save_when=EverySteps(10)) as manager:
        assert [step for step in range(25) if manager.should_save(step)] == [0, 10, 20]
        assert await manager.save(7, state()) is None
        assert await manager.save(8, state(), force=True) is not None
        assert not manager.should_save(0)  # older than what is being saved
        assert manager.should_save(10)

    assert there(tmp_path) == ["8"]


async def test_continuous_saving_waits_for_the_previous_save(tmp_path: Path, store: FaultyStore) -> None:
    hang = store.hang_on("data.write_at")
    async with CheckpointManager(tmp_path, save_when=WhenIdle(), store=store) as manager:
        first = await manager.save(1, state(1))
        assert first is not None
        assert manager.saving == (1,)
        assert await manager.save(2, state(2)) is None
        hang.release()
        await first
        assert await manager.save(3, state(3)) is not None

    assert there(tmp_path) == ["1", "3"]


async def test_steps_that_are_not_kept_go_when_a_new_one_is_durable(tmp_path: Path) -> None:
    keep = KeepLast(2) | KeepEvery(10) | KeepSteps({3})
    async with CheckpointManager(tmp_path, keep=keep) as manager:
        await fill(manager, *range(1, 14))
        await manager.wait()
        assert list(manager.all_steps()) == [3, 10, 12, 13]
        assert there(tmp_path) == ["10", "12", "13", "3"]

    async with CheckpointManager(tmp_path, keep=KeepLast(1)) as manager:
        assert there(tmp_path) == ["10", "12", "13", "3"]  # opening deletes nothing
        await fill(manager, 14)

    assert there(tmp_path) == ["14"]


async def test_a_step_that_was_overtaken_goes_as_any_other(tmp_path: Path, store: FaultyStore) -> None:
    """Its save began first and ends last: nobody asked for an older step."""
    hang = store.hang_on("data.write_at")
    async with CheckpointManager(tmp_path, keep=KeepLast(1), store=store) as manager:
        first = await manager.save(1, state(1))
        await hang.wait_reached()
        await fill(manager, 2)
        hang.release()
        assert first is not None
        await first
        await manager.wait()
        assert list(manager.all_steps()) == [2]
        again = await manager.save(1, state(1), overwrite=True)  # on purpose
        assert again is not None
        await again
        await manager.wait()
        assert list(manager.all_steps()) == [1, 2]

    assert there(tmp_path) == ["1", "2"]


async def test_the_best_are_kept_and_named(tmp_path: Path) -> None:
    losses = [3.0, 1.0, math.nan, 2.0, -math.inf, 1.0]
    async with CheckpointManager(tmp_path, keep=KeepBest(2, "loss", without_metric=False)) as manager:
        for step, loss in enumerate(losses):
            await fill(manager, step, loss=loss)

        await manager.wait()
        assert list(manager.all_steps()) == [1, 5]
        assert await manager.best_step() == 5
        assert await manager.best_step("loss", "max") == 5
        assert await manager.best_step("accuracy") is None

    async with CheckpointManager(tmp_path, metric=lambda metrics: -metrics["loss"], mode="max") as manager:
        assert await manager.best_step() == 5

    async with CheckpointManager(tmp_path) as manager:
        with pytest.raises(SpecError):
            await manager.best_step()


async def test_the_last_durable_step_stays_whatever_the_policy_says(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path, keep=KeepSteps(())) as manager:
        await fill(manager, 1, 2)
        await manager.wait()
        assert there(tmp_path) == ["2"]


async def test_no_step_is_deleted_before_the_new_one_is_durable(tmp_path: Path, store: FaultyStore) -> None:
    async with CheckpointManager(tmp_path, keep=KeepLast(1), store=store) as manager:
        await fill(manager, 1)
        store.fail_on("publish", 2)
        save = await manager.save(2, state(2))
        assert save is not None
        with pytest.raises(StorageError):
            await save

        await manager.wait()
        assert there(tmp_path) == ["1"]
        assert list(manager.all_steps()) == [1]
        assert (await manager.restore())["n"] == 1


async def test_an_overwritten_older_step_is_not_deleted_at_once(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path, keep=KeepLast(1)) as manager:
        await fill(manager, 5)
        save = await manager.save(3, state(3), overwrite=True)
        assert save is not None
        await save
        await manager.wait()
        assert there(tmp_path) == ["3", "5"]
        await fill(manager, 6)
        await manager.wait()
        assert there(tmp_path) == ["6"]


async def test_pinned_steps_stay(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path, keep=KeepLast(1)) as manager:
        manager.pin(1)
        await fill(manager, 1, 2, 3)
        await manager.wait()
        assert there(tmp_path) == ["1", "3"]
        manager.unpin(1)
        await fill(manager, 4)
        await manager.wait()
        assert there(tmp_path) == ["4"]


async def test_deleted_steps_can_be_moved_to_a_folder(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path, keep=KeepLast(1), trash="old") as manager:
        await fill(manager, 1, 2)
        await manager.wait()
        again = await manager.save(1, state(11), overwrite=True)
        assert again is not None
        await again
        await manager.delete(1)
        assert there(tmp_path) == ["2", "old"]
        assert (await manager.checkpointer.restore(tmp_path / "old" / "1"))["n"] == 11

    with pytest.raises(SpecError):
        CheckpointManager(tmp_path, trash="7")


async def test_delete(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path) as manager:
        await fill(manager, 1, 2)
        await manager.delete(2)
        assert there(tmp_path) == ["1"]
        assert list(manager.all_steps()) == [1]
        with pytest.raises(NotACheckpointError):
            await manager.delete(2)

        await fill(manager, 2)
        assert (await manager.restore())["n"] == 2


async def test_a_step_that_cannot_be_deleted_is_still_there(tmp_path: Path, store: FaultyStore) -> None:
    async with CheckpointManager(tmp_path, store=store) as manager:
        await fill(manager, 1, 2)
        store.fail_on("rename", 1)
        with pytest.raises(StorageError):
            await manager.delete(1)

        assert list(manager.all_steps()) == [1, 2]
        assert (await manager.restore(1))["n"] == 1
        await manager.delete(1)

    assert there(tmp_path) == ["2"]


async def test_a_step_is_not_deleted_while_it_is_read(tmp_path: Path, store: FaultyStore) -> None:
    async with CheckpointManager(tmp_path, store=store, keep=KeepLast(1)) as manager:
        await fill(manager, 1)
        hang = store.hang_on("file.read_at")
        read: list[Any] = []

        async def restore() -> None:
            read.append(await manager.restore(1))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(restore)
            await hang.wait_reached()
            await fill(manager, 2)
            await manager.wait()  # does not wait for readers
            assert list(manager.all_steps()) == [2]
            assert there(tmp_path) == ["1", "2"]
            hang.release()

        assert read[0]["n"] == 1
        await manager.wait()
        assert there(tmp_path) == ["2"]


async def test_what_was_being_read_is_deleted_a_little_later(tmp_path: Path, store: FaultyStore) -> None:
    async with CheckpointManager(tmp_path, store=store) as manager:
        await fill(manager, 1, 2)
        held = LocalStore().hold_reading(str(tmp_path / "1"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(manager.delete, 1)
            while [operation.name for operation in store.operations].count("hold") < 5:
                await anyio.lowlevel.checkpoint()

            held.release()

        assert there(tmp_path) == ["2"]


async def test_what_crashed_saves_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (f"7{TMP}", f"8{TMP}-17", f"deleted_3{TMP}", f"other{TMP}", "7", "notes", f"9{TMP}"):
        (tmp_path / name).mkdir()

    alive = LocalStore().hold(str(tmp_path / f"9{TMP}"))
    async with CheckpointManager(tmp_path, read_only=True):
        assert len(there(tmp_path)) == 7
    async with CheckpointManager(tmp_path, clean=False):
        assert len(there(tmp_path)) == 7
    async with CheckpointManager(tmp_path):
        assert there(tmp_path) == ["7", f"9{TMP}", "notes", f"other{TMP}"]

    alive.release()


async def test_several_items(tmp_path: Path, assert_same: AssertSame) -> None:
    key = jax.random.key(7)
    items = penstock.Composite(
        params={"w": jnp.ones(3)}, opt={"mu": jnp.zeros(3)}, config=Json({"a": [1, None]}), rng=RandomKey(key)
    )
    async with CheckpointManager(tmp_path) as manager:
        save = await manager.save(1, items, metrics={"loss": 1.0})
        assert save is not None
        await save
        found = await manager.restore()
        assert isinstance(found, penstock.Composite)
        assert sorted(found) == ["config", "opt", "params", "rng"]
        assert_same(found["params"], {"w": jnp.ones(3)})
        assert found["config"] == {"a": [1, None]}
        assert bool(jnp.all(found["rng"] == key))

        like = penstock.Composite(params={"w": jnp.zeros(3)}, config=...)
        part = await manager.restore(1, like=like)
        assert sorted(part) == ["config", "params"]
        assert_same(part["params"], {"w": jnp.ones(3)})
        assert_same(await manager.restore(1, item="opt"), {"mu": jnp.zeros(3)})
        about = await manager.metadata(1)
        assert sorted(about.items) == ["config", "opt", "params", "rng"]
        assert about.metrics == {"loss": 1.0}
        with pytest.raises(SpecError):
            await manager.save(2, penstock.Composite(metrics={"w": 1}), metrics={"loss": 1.0})


def links(root: Path, step: int) -> set[int]:
    return {file.stat().st_nlink for file in (root / str(step)).rglob("d/*") if file.stat().st_size > 10_000}


@pytest.mark.parametrize("several", [False, True])
async def test_unchanged_arrays_are_linked_and_every_step_is_whole(
    tmp_path: Path, assert_same: AssertSame, several: bool
) -> None:
    frozen = {f"a{at}": jnp.full(20_000, at, jnp.float32) for at in range(4)}

    def items(step: int) -> Any:
        moving = {"n": jnp.full(100, step)}
        return penstock.Composite(frozen=frozen, moving=moving) if several else {**frozen, **moving}

    async with CheckpointManager(tmp_path) as manager:
        kept: list[int] = []
        for step in range(1, 5):
            save = await manager.save(step, items(step))
            assert save is not None
            kept.append((await save).nbytes_kept)

        assert kept == [0, 320_000, 320_000, 320_000]
        assert links(tmp_path, 4) == {4}
        for gone in (1, 4, 2):
            await manager.delete(gone)
            for step in manager.all_steps():
                found = await manager.restore(step)
                assert_same(dict(found), dict(items(step)))
                report = await manager.checkpointer.verify(
                    tmp_path / str(step), item="frozen" if several else None
                )
                assert report.intact

    async with CheckpointManager(tmp_path) as manager:
        restored = await manager.restore(3)
        save = await manager.save(9, restored)
        assert save is not None
        assert (await save).nbytes_kept >= 320_000
        alone = await manager.save(10, items(10), base=None)
        assert alone is not None
        assert (await alone).nbytes_kept == 0

    async with CheckpointManager(tmp_path, link=False) as manager:
        await manager.restore(10)
        save = await manager.save(11, items(11))
        assert save is not None
        assert (await save).nbytes_kept == 0


async def test_names_of_items_do_not_lead_to_the_wrong_arrays(tmp_path: Path) -> None:
    one, two = jnp.full(30_000, 1.0), jnp.full(30_000, 2.0)
    async with CheckpointManager(tmp_path) as manager:
        first = await manager.save(1, penstock.Composite({"a": {"b.c": one}, "a.b": {"d": two}}))
        assert first is not None
        await first
        # `restore` knows two arrays called `w` now, of two items of one step.
        await manager.save(2, penstock.Composite(x={"w": one}, y={"w": two}))
        await manager.wait()
        found = await manager.restore(2)
        third = await manager.save(3, penstock.Composite(x={"w": found["y"]["w"]}, y={"w": found["y"]["w"]}))
        assert third is not None
        assert (await third).nbytes_kept == two.nbytes
        fourth = await manager.save(4, {"w": found["y"]["w"]})
        assert fourth is not None
        await fourth
        again = await manager.restore(3)
        assert float(again["x"]["w"][0]) == float(again["y"]["w"][0]) == 2.0
        assert float((await manager.restore(4))["w"][0]) == 2.0
        found = await manager.restore(1)
        assert (float(found["a"]["b.c"][0]), float(found["a.b"]["d"][0])) == (1.0, 2.0)


async def test_digests_link_what_is_equal(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path) as manager:
        for step, several in ((1, False), (2, False), (11, True), (12, True)):
            tree: Any = {"w": np.arange(50_000)}
            items = penstock.Composite(one=tree, two={"v": np.ones(4000)}) if several else tree
            save = await manager.save(step, items, compare="digest")
            assert save is not None
            report = await save
            assert bool(report.nbytes_kept) is (step in (2, 12))


async def test_a_base_that_is_gone_or_damaged_is_not_needed(tmp_path: Path) -> None:
    tree = {"w": jnp.full(30_000, 1.0)}
    async with CheckpointManager(tmp_path) as manager:
        await (await manager.save(1, tree) or _none())
        LocalStore().remove_tree(str(tmp_path / "1"))
        assert (await (await manager.save(2, tree) or _none())).nbytes_kept == 0
        (tmp_path / "2" / "default" / "manifest.ocdbt").write_bytes(b"no")
        assert (await (await manager.save(3, tree) or _none())).nbytes_kept == 0
        assert float((await manager.restore(3))["w"][0]) == 1.0


async def test_preemption_saves_the_next_step_once(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path, save_when=OnPreemption()) as manager:
        assert not manager.should_save(1)
        os.kill(os.getpid(), signal.SIGTERM)
        while not manager.preempted:
            await anyio.lowlevel.checkpoint()

        assert manager.should_save(2)
        assert await manager.save(2, state(2)) is not None
        assert not manager.should_save(3)
        assert manager.preempted

    assert there(tmp_path) == ["2"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_without_a_preemption_policy_signals_are_left_alone(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path, save_when=Never()) as manager:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        manager.preempt()
        assert manager.preempted


async def test_steps_have_the_names_of_the_given_format(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path, names=StepNames("step", 4)) as manager:
        await fill(manager, 1, 20)
        assert there(tmp_path) == ["step_0001", "step_0020"]
        assert (await manager.restore(1))["n"] == 1

    async with CheckpointManager(tmp_path) as manager:
        assert list(manager.all_steps()) == []


async def test_reload_sees_what_others_did(tmp_path: Path) -> None:
    async with (
        CheckpointManager(tmp_path) as writer,
        CheckpointManager(tmp_path, read_only=True) as reader,
    ):
        await fill(writer, 1, 2)
        assert list(reader.all_steps()) == []
        await reader.reload()
        assert list(reader.all_steps()) == [1, 2]
        with pytest.raises(SpecError):
            await reader.save(3, state())
        with pytest.raises(SpecError):
            await reader.delete(1)
        assert not reader.should_save(3)


async def test_opening_lists_the_root_once_and_looks_at_one_step(tmp_path: Path, store: FaultyStore) -> None:
    for step in range(300):
        (tmp_path / str(step)).mkdir()

    (tmp_path / "299" / "_CHECKPOINT_METADATA").write_bytes(b"{}")
    async with CheckpointManager(tmp_path, store=store, read_only=True) as manager:
        assert list(manager.all_steps()) == list(range(300))

    assert len(store.operations) < 10


async def test_steps_under_their_own_names_count_when_they_are_finished(tmp_path: Path) -> None:
    for step, ended in ((1, 5), (2, None), (3, None)):
        about: dict[str, Any] = {
            "init_timestamp_nsecs": 4,
            "commit_timestamp_nsecs": ended,
            "custom_metadata": {},
        }
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / "_CHECKPOINT_METADATA").write_text(json.dumps(about))

    (tmp_path / "4").write_text("a file")
    async with CheckpointManager(tmp_path, read_only=True) as manager:
        assert list(manager.all_steps()) == [1]


class Broken:
    needs: frozenset[Any] = frozenset()

    def keep(self, steps: Any, now_s: float, /) -> set[int]:
        raise ZeroDivisionError


async def test_a_policy_that_fails_is_told_and_deletes_nothing(tmp_path: Path) -> None:
    broken: KeepPolicy = Broken()
    async with CheckpointManager(tmp_path, keep=broken) as manager:
        await fill(manager, 1)
        with pytest.raises(ZeroDivisionError):
            await manager.wait()
        await manager.wait()
        assert there(tmp_path) == ["1"]

    async def use(root: Path) -> None:
        async with CheckpointManager(root, keep=broken) as manager:
            await fill(manager, 1)

    with pytest.raises(ZeroDivisionError):
        await use(tmp_path / "b")


async def test_metrics_that_are_none_of_json_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path) as manager:
        none: list[Any] = [[1.0], 3, "x"]
        for value in (jnp.zeros(2), object(), "0.5", np.str_("0.5"), b"1", None, [1.0], 10**400, 1j):
            none += [{"loss": value}, {"eval": {"loss": value}}]
        for metrics in none:
            with pytest.raises(SpecError, match="metric"):
                await manager.save(1, state(), metrics=metrics)
        assert manager.saving == ()
        assert there(tmp_path) == []
        numbers = {"a": np.float32(0.5), "b": {"c": jnp.int32(2)}, "d": True, "e": Fraction(1, 4), "f": 3}
        await (await manager.save(1, state(), metrics={**numbers, "g": math.nan}) or _none())
        found = dict((await manager.metadata(1)).metrics or {})
        assert math.isnan(found.pop("g"))
        assert found == {"a": 0.5, "b": {"c": 2.0}, "d": True, "e": 0.25, "f": 3}


async def test_damaged_metrics_count_as_none(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path, keep=KeepBest(1, "loss", without_metric=True)) as manager:
        await fill(manager, 1, loss=1.0)
        await manager.wait()
        (tmp_path / "1" / "metrics" / "metrics").write_bytes(b"{")
        await manager.reload()
        assert await manager.best_step() is None
        await fill(manager, 2, loss=2.0)
        await manager.wait()
        assert list(manager.all_steps()) == [1, 2]


async def test_a_manager_that_is_not_open_does_nothing(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with pytest.raises(ClosedError):
        await manager.save(1, state())
    async with manager:
        await fill(manager, 1)
        await manager.close()
        with pytest.raises(ClosedError):
            await manager.save(2, state())
    with pytest.raises(ClosedError):
        async with manager:
            pass
    with pytest.raises(SpecError):
        CheckpointManager(tmp_path, checkpointer=penstock.Checkpointer(), memory_limit=1)


async def test_leaving_on_an_error_cancels_and_raises_that_error(tmp_path: Path, store: FaultyStore) -> None:
    hang = store.hang_on("data.write_at")

    async def use() -> None:
        async with CheckpointManager(tmp_path, store=store) as manager:
            await manager.save(1, state())
            hang.release()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await use()

    assert there(tmp_path) in ([], ["1"])


async def test_a_failed_save_that_nobody_awaited_is_raised(tmp_path: Path, store: FaultyStore) -> None:
    store.fail_on("data.sync")
    with pytest.raises(StorageError):
        async with CheckpointManager(tmp_path, store=store) as manager:
            await manager.save(1, state())

    assert there(tmp_path) == []


async def test_a_checkpointer_can_be_shared(tmp_path: Path, store: FaultyStore) -> None:
    async with penstock.Checkpointer(store=store) as checkpointer:
        async with (
            CheckpointManager(tmp_path / "a", checkpointer=checkpointer) as one,
            CheckpointManager(tmp_path / "b", checkpointer=checkpointer) as two,
        ):
            await one.save(1, state(1))
            await two.save(2, state(2))

        assert (await checkpointer.restore(tmp_path / "b"))["n"] == 2
        hang = store.hang_on("data.write_at", 3)

        async def use() -> None:
            async with CheckpointManager(tmp_path / "a", checkpointer=checkpointer) as manager:
                await manager.save(2, state(2))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await use()

        hang.release()
        await checkpointer.wait()
        assert there(tmp_path / "a") == ["1"]


def test_the_sync_twin(tmp_path: Path, assert_same: AssertSame) -> None:
    keep = KeepLast(2) | KeepBest(1, "loss")
    options: dict[str, Any] = {
        "keep": keep,
        "save_when": EverySteps(2) | OnPreemption(),
        "metadata": {"a": 1},
    }
    with penstock.sync.CheckpointManager(tmp_path, **options) as manager:
        for step in range(9):
            assert manager.should_save(step) is (step % 2 == 0)
            save = manager.save(step, state(step), metrics={"loss": abs(step - 3.5)})
            assert (save is not None) is (step % 2 == 0)
            if save is not None:
                save.result(30)

        manager.wait()
        assert (list(manager.all_steps()), manager.latest_step(), manager.best_step()) == ([4, 6, 8], 8, 4)
        assert manager.best_step("loss", "max") == 8
        assert_same(manager.restore(like=state()), state(8))
        assert manager.metadata(4).metrics == {"loss": 0.5}
        assert (manager.root_metadata(), manager.root) == ({"a": 1}, str(tmp_path))
        assert [step for step in manager.watch(after=4, timeout_s=0)] == [6, 8]  # noqa: C416  # it is an iterator
        manager.pin(4)
        manager.unpin(4)
        manager.delete(4)
        manager.reload()
        assert list(manager.all_steps()) == [6, 8]
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.preempted
        assert manager.should_save(9)
        manager.preempt()
        manager.close()
        with pytest.raises(ClosedError):
            manager.restore()

    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert next(iter(penstock.sync.watch(tmp_path, timeout_s=0))) == 8
    with pytest.raises(ClosedError):
        manager.latest_step()


def test_infos_of_steps_are_values() -> None:
    assert StepInfo(1, 2.0) == StepInfo(1, 2.0)
