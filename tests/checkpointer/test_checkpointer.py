"""What a Checkpointer promises to its callers, whatever the store does."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from anyio import CancelScope, Event, create_task_group, to_thread

from penstock import Checkpointer, Progress, SaveFuture
from penstock.checkpointer import pipelines
from penstock.errors import (
    ConfigError,
    DeletedLeafError,
    DestinationExistsError,
    SaveCancelledError,
    StorageError,
)
from penstock.handlers import LocalStore
from penstock.kernel import Hold, Milestone, Pipeline, SaveRun, StoreWrapper
from penstock.stages.device_to_host import PACKED_BELOW
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

AssertSame = Callable[[Any, Any], None]


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(LocalStore())


@pytest.fixture(autouse=True)
def _no_file_is_left_open(store: FaultyStore) -> Iterator[None]:
    yield
    assert store.open_files == 0


def tree(fill: int = 1) -> dict[str, Any]:
    return {"host": np.full(1000, fill), "device": jnp.full(1000, fill), "step": fill}


class Gate:
    """A stage that holds every message back until it is opened."""

    def __init__(self) -> None:
        self.reached = Event()
        self.opened = Event()

    async def __call__(self, message: Any, /) -> Any:
        self.reached.set()
        await self.opened.wait()
        return message


def gated(before: str) -> tuple[Gate, Pipeline[SaveRun]]:
    gate = Gate()
    return gate, pipelines.save_pipeline().insert_before(before, gate, called="gate")


async def ended(save: SaveFuture) -> None:
    """Wait for the end of a save without learning how it ended."""
    over = Event()
    save.add_done_callback(lambda _: over.set())
    await over.wait()


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


class TestMilestones:
    async def test_save_returns_when_staged_and_its_future_is_awaited_at_will(
        self, tmp_path: Path, store: FaultyStore, assert_same: AssertSame
    ) -> None:
        hang = store.hang_on("data.write_at")
        async with Checkpointer(store=store) as checkpointer:
            save = await checkpointer.save(tmp_path / "runs" / "a", tree())
            assert save.milestone is Milestone.STAGED
            assert (save.done, save.status, save.path) == (False, "staged", str(tmp_path / "runs" / "a"))
            assert save.exception() is None

            hang.release()
            report = await save
            assert await save is report
            assert await save.finalized() is report
            assert save.result(0) is report
            assert (save.done, save.status, save.milestone) == (True, "finalized", Milestone.FINALIZED)
            assert (report.path, report.n_leaves, report.nbytes) == (save.path, 3, 8000 + 4000 + 8)
            assert 0 < report.staged_s < report.durable_s
            assert report.peak_leased_bytes == checkpointer.statistics().peak == 8000 + 4000 + 8
            assert [stage.name for stage in report.stages] == list(pipelines.save_pipeline().names)
            assert names(tmp_path / "runs") == ["a"]
            assert_same(await checkpointer.restore(save.path, like=tree(0)), tree())
            assert checkpointer.statistics().leased == 0

    async def test_each_milestone_is_awaited_by_its_name(self, tmp_path: Path, store: FaultyStore) -> None:
        gate, pipeline = gated(before="device_to_host")
        write, document, rename = map(store.hang_on, ("data.write_at", "write_file", "publish"))
        total = 8000 + 4000 + 8
        async with Checkpointer(store=store) as checkpointer:
            save = await checkpointer.save(tmp_path / "a", tree(), staging="overlap", pipeline=pipeline)
            await save.planned()
            assert (save.milestone, save.progress) == (Milestone.PLANNED, Progress(0, 3, 0, total))

            gate.opened.set()
            await save.staged()
            await write.wait_reached()
            assert (save.milestone, save.progress) == (Milestone.STAGED, Progress(0, 3, 0, total))

            write.release()
            await save.written()
            await document.wait_reached()
            assert (save.milestone, save.progress) == (Milestone.WRITTEN, Progress(3, 3, total, total))

            document.release()
            await save.committed()
            await rename.wait_reached()
            assert save.milestone is Milestone.COMMITTED
            assert names(tmp_path) == ["a.orbax-checkpoint-tmp"]

            rename.release()
            await save.finalized()
            assert names(tmp_path) == ["a"]

    async def test_a_callback_is_called_once_at_its_milestone(
        self, tmp_path: Path, store: FaultyStore
    ) -> None:
        hang = store.hang_on("data.write_at")
        seen: list[tuple[str, Milestone | None]] = []
        async with Checkpointer(store=store) as checkpointer:
            save = await checkpointer.save(tmp_path / "a", tree())
            for milestone in reversed(Milestone):
                save.add_done_callback(
                    lambda future, name=milestone.name: seen.append((name, future.milestone)),  # type: ignore[misc]  # mypy cannot infer defaults
                    milestone=milestone,
                )
            save.add_done_callback(lambda _: 1 // 0)
            assert [name for name, _ in seen] == ["STAGED", "PLANNED"]

            hang.release()
            await save
            assert [name for name, _ in seen[2:]] == ["WRITTEN", "COMMITTED", "KEPT", "FINALIZED"]
            assert [at for _, at in seen[2:]] == [
                Milestone.WRITTEN,
                Milestone.COMMITTED,
                Milestone.FINALIZED,  # without tiers it is kept when it is final
                Milestone.FINALIZED,
            ]

    async def test_overlap_returns_before_anything_is_staged(self, tmp_path: Path) -> None:
        gate, pipeline = gated(before="device_to_host")
        state = tree()
        async with Checkpointer() as checkpointer:
            save = await checkpointer.save(tmp_path / "a", state, staging="overlap", pipeline=pipeline)
            assert save.milestone is Milestone.PLANNED
            gate.opened.set()
            await save.staged()
            state["host"][:] = 7
            await save
            assert (await checkpointer.restore(tmp_path / "a"))["host"].tolist() == [1] * 1000

    async def test_a_future_is_awaited_by_many_tasks_and_threads(
        self, tmp_path: Path, store: FaultyStore
    ) -> None:
        hang = store.hang_on("data.write_at")
        reports: list[Any] = []
        async with Checkpointer(store=store) as checkpointer, create_task_group() as waiting:
            save = await checkpointer.save(tmp_path / "a", tree())

            async def wait() -> None:
                reports.append(await save)

            async def wait_in_thread() -> None:
                reports.append(await to_thread.run_sync(save.result, 30))

            for waiter in (wait, wait, wait_in_thread, wait_in_thread):
                waiting.start_soon(waiter)

            with pytest.raises(TimeoutError, match="is staged after 0 s"):
                await to_thread.run_sync(save.result, 0)
            hang.release()

        assert reports == [reports[0]] * 4


class TestSnapshot:
    async def test_what_happens_to_the_state_after_staged_does_not_reach_the_checkpoint(
        self, tmp_path: Path, store: FaultyStore, assert_same: AssertSame
    ) -> None:
        hang = store.hang_on("data.write_at")
        step = jax.jit(lambda x: x + 1, donate_argnums=0)
        sharding = jax.sharding.NamedSharding(
            jax.make_mesh((8,), ("x",)),
            jax.sharding.PartitionSpec("x"),  # type: ignore[no-untyped-call]  # jax's
        )
        state: dict[str, Any] = {
            "deleted": jnp.arange(50_000),
            "donated": jnp.arange(50_000),
            "list": [np.arange(3)],
            "mutated": np.arange(50_000),
            "sharded": jax.device_put(np.arange(800), sharding),
        }
        before = jax.tree.map(np.array, state)
        async with Checkpointer(store=store) as checkpointer:
            metadata = {"step": 1}
            save = await checkpointer.save(tmp_path / "a", state, custom_metadata=metadata)
            state["donated"] = step(state["donated"])
            state["sharded"] = step(state["sharded"])
            state["deleted"].delete()
            state["mutated"] += 1
            state["list"][0][:] = 0
            state["list"].append("new")
            metadata["step"] = 2
            for _ in range(4):
                step(jnp.arange(50_000)).block_until_ready()
            hang.release()
            await save
            like = jax.tree.map(lambda _: np.ndarray, before)
            assert_same(await checkpointer.restore(tmp_path / "a", like=like), before)
            assert (await checkpointer.metadata(tmp_path / "a")).custom_metadata == {"step": 1}

    async def test_an_array_that_is_gone_before_it_is_staged_fails_the_save(self, tmp_path: Path) -> None:
        gate, pipeline = gated(before="device_to_host")
        state = {"kept": jnp.ones(3), "w": jnp.ones(3)}
        async with Checkpointer() as checkpointer:
            save = await checkpointer.save(tmp_path / "a", state, staging="overlap", pipeline=pipeline)
            state["w"].delete()
            gate.opened.set()
            with pytest.raises(DeletedLeafError, match=r"\['w'\].*await save.staged\(\)"):
                await save.staged()
            with pytest.raises(DeletedLeafError):
                await save
            assert checkpointer.statistics().leased == 0

        assert names(tmp_path) == []


class TestCancelling:
    @pytest.mark.parametrize("operation", ["create_data_file", "data.write_at", "data.sync", "write_file"])
    async def test_cancel_undoes_everything(
        self, tmp_path: Path, store: FaultyStore, assert_same: AssertSame, operation: str
    ) -> None:
        async with Checkpointer(store=store) as checkpointer:
            await (await checkpointer.save(tmp_path / "earlier", tree(1)))
            nth = sum(done.name == operation for done in store.operations) + 1
            hang = store.hang_on(operation, nth)
            save = await checkpointer.save(tmp_path / "a", tree(2))
            await hang.wait_reached()
            save.cancel()
            assert not save.done
            hang.release()
            with pytest.raises(SaveCancelledError, match=r"'.*/a' was cancelled"):
                await save
            assert save.status == "failed"
            assert isinstance(save.exception(), SaveCancelledError)
            assert names(tmp_path) == ["earlier"]
            assert checkpointer.statistics().leased == 0
            save.cancel()  # does nothing

            assert_same(await checkpointer.restore(tmp_path / "earlier", like=tree()), tree(1))
            await (await checkpointer.save(tmp_path / "a", tree(3)))
            assert_same(await checkpointer.restore(tmp_path / "a", like=tree()), tree(3))

    async def test_a_cancelled_overwrite_leaves_what_was_there(
        self, tmp_path: Path, assert_same: AssertSame
    ) -> None:
        gate, pipeline = gated(before="commit")
        async with Checkpointer() as checkpointer:
            await (await checkpointer.save(tmp_path / "a", tree(1)))
            save = await checkpointer.save(tmp_path / "a", tree(2), overwrite=True, pipeline=pipeline)
            await gate.reached.wait()
            save.cancel()
            with pytest.raises(SaveCancelledError):
                await save
            assert names(tmp_path) == ["a"]
            assert_same(await checkpointer.restore(tmp_path / "a", like=tree()), tree(1))

    async def test_a_cancel_after_the_commit_changes_nothing(
        self, tmp_path: Path, store: FaultyStore
    ) -> None:
        hang = store.hang_on("publish")
        async with Checkpointer(store=store) as checkpointer:
            save = await checkpointer.save(tmp_path / "a", tree())
            await hang.wait_reached()
            save.cancel()
            hang.release()
            await save

        assert names(tmp_path) == ["a"]

    async def test_a_cancel_from_a_thread_is_heard(self, tmp_path: Path) -> None:
        gate, pipeline = gated(before="commit")
        async with Checkpointer() as checkpointer:
            save = await checkpointer.save(tmp_path / "a", tree(), pipeline=pipeline)
            await gate.reached.wait()
            await to_thread.run_sync(save.cancel)
            with pytest.raises(SaveCancelledError):
                await save

        assert names(tmp_path) == []

    async def test_a_save_that_waits_for_its_turn_can_be_cancelled(self, tmp_path: Path) -> None:
        gate, pipeline = gated(before="commit")
        async with Checkpointer() as checkpointer, create_task_group() as tasks:
            first = await checkpointer.save(tmp_path / "a", tree(1), pipeline=pipeline)
            await gate.reached.wait()

            async def second() -> None:
                with CancelScope() as scope:
                    scope.cancel()
                    await checkpointer.save(tmp_path / "a", tree(2), overwrite=True)
                gate.opened.set()

            tasks.start_soon(second)
            await first
            assert (await checkpointer.restore(tmp_path / "a"))["step"] == 1

    async def test_cancelling_who_waits_for_staged_cancels_the_save(self, tmp_path: Path) -> None:
        gate, pipeline = gated(before="device_to_host")
        async with Checkpointer() as checkpointer, create_task_group() as tasks:
            tasks.start_soon(_call(checkpointer.save, tmp_path / "a", tree(), pipeline=pipeline))
            await gate.reached.wait()
            tasks.cancel_scope.cancel()

        assert checkpointer.statistics().leased == 0
        assert names(tmp_path) == []

    async def test_of_a_save_that_fails_as_its_caller_is_cancelled_nobody_hears(self, tmp_path: Path) -> None:
        reached = Event()

        async def failing(_: Any, /) -> Any:
            reached.set()
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                raise StorageError("write", "elsewhere", "failed just then") from None

        pipeline = pipelines.save_pipeline().insert_before("device_to_host", failing)
        async with Checkpointer() as checkpointer, create_task_group() as tasks:
            tasks.start_soon(_call(checkpointer.save, tmp_path / "a", tree(), pipeline=pipeline))
            await reached.wait()
            tasks.cancel_scope.cancel()

        assert names(tmp_path) == []

    async def test_cancelling_who_waits_for_the_end_does_not(self, tmp_path: Path) -> None:
        gate, pipeline = gated(before="commit")
        async with Checkpointer() as checkpointer:
            save = await checkpointer.save(tmp_path / "a", tree(), pipeline=pipeline)
            await gate.reached.wait()
            with CancelScope() as scope:
                scope.cancel()
                await save
            assert scope.cancelled_caught
            gate.opened.set()
            await save

    async def test_cancelling_a_restore_gives_back_every_byte(
        self, tmp_path: Path, store: FaultyStore
    ) -> None:
        async with Checkpointer(store=store, memory_limit="64KiB") as checkpointer:
            await (await checkpointer.save(tmp_path / "a", tree()))
            hang = store.hang_on("file.read_at")
            async with create_task_group() as tasks:
                tasks.start_soon(_call(checkpointer.restore, tmp_path / "a"))
                await hang.wait_reached()
                tasks.cancel_scope.cancel()
                hang.release()

            assert checkpointer.statistics().leased == 0
            assert store.open_files == 0

    async def test_leaving_on_an_error_cancels_and_the_error_leaves_as_itself(self, tmp_path: Path) -> None:
        gate, pipeline = gated(before="commit")
        error = KeyError("mine")
        checkpointer = Checkpointer()
        saves: list[SaveFuture] = []
        with pytest.raises(KeyError) as caught:  # noqa: PT012  # what happens before the error is what is tested
            async with checkpointer:
                saves.append(await checkpointer.save(tmp_path / "a", tree(), pipeline=pipeline))
                await gate.reached.wait()
                assert names(tmp_path) == ["a.orbax-checkpoint-tmp"]
                raise error

        assert caught.value is error
        assert (error.__context__, error.__cause__) == (None, None)
        assert names(tmp_path) == []
        assert checkpointer.statistics().leased == 0
        with pytest.raises(SaveCancelledError):
            await saves[0]

    @pytest.mark.parametrize("interrupt", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "ctrl-c"])
    async def test_a_keyboard_interrupt_is_raised_ungrouped(
        self, tmp_path: Path, interrupt: BaseException
    ) -> None:
        gate, pipeline = gated(before="commit")

        async def script() -> None:
            async with Checkpointer() as checkpointer:
                await checkpointer.save(tmp_path / "a", tree(), pipeline=pipeline)
                await gate.reached.wait()
                raise interrupt

        with pytest.raises(type(interrupt)) as caught:
            await script()

        assert caught.value is interrupt
        assert names(tmp_path) == []

    async def test_leaving_without_an_error_waits_for_the_saves(
        self, tmp_path: Path, store: FaultyStore
    ) -> None:
        hang = store.hang_on("data.write_at")
        async with create_task_group() as tasks:
            async with Checkpointer(store=store) as checkpointer:
                save = await checkpointer.save(tmp_path / "a", tree())
                tasks.start_soon(_call(_release_when_reached, hang))

            assert save.done

        assert names(tmp_path) == ["a"]

    def test_a_native_cancel_of_the_task_around_it(self, tmp_path: Path) -> None:
        async def main() -> None:
            gate, pipeline = gated(before="commit")

            async def around() -> None:
                async with Checkpointer() as checkpointer:
                    await (await checkpointer.save(tmp_path / "a", tree(), pipeline=pipeline))

            task = asyncio.create_task(around())
            await gate.reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert names(tmp_path) == []

        asyncio.run(main(), debug=True)

    def test_a_native_cancel_of_the_task_that_saves(self, tmp_path: Path) -> None:
        async def main() -> None:
            gate, pipeline = gated(before="device_to_host")
            async with Checkpointer() as checkpointer:
                saving = checkpointer.save(tmp_path / "a", tree(), pipeline=pipeline, staging="copy")
                task = asyncio.create_task(saving)
                await gate.reached.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await checkpointer.wait()
                assert checkpointer.statistics().leased == 0
                assert names(tmp_path) == []
                await (await checkpointer.save(tmp_path / "a", tree()))

        asyncio.run(main(), debug=True)


class TestFailures:
    """A failure in the background is raised exactly once, where it would otherwise go unnoticed."""

    async def fail_unseen(self, checkpointer: Checkpointer, store: FaultyStore, path: Path) -> StorageError:
        error = StorageError("write", str(path), "no")
        nth = sum(operation.name == "data.write_at" for operation in store.operations) + 1
        hang = store.hang_on("data.write_at", nth, then=error)
        save = await checkpointer.save(path, tree())
        hang.release()
        await ended(save)
        assert save.status == "failed"
        return error

    async def test_a_failed_save_that_nobody_awaited_is_raised_once_at_the_next_save(
        self, tmp_path: Path, store: FaultyStore
    ) -> None:
        async with Checkpointer(store=store) as checkpointer:
            error = await self.fail_unseen(checkpointer, store, tmp_path / "a")
            with pytest.raises(StorageError) as caught:
                await checkpointer.save(tmp_path / "b", tree())
            assert caught.value is error
            assert (error.stage, names(tmp_path)) == ("write", [])

            await (await checkpointer.save(tmp_path / "b", tree()))
            await checkpointer.wait()

        assert names(tmp_path) == ["b"]

    async def test_a_failed_save_that_nobody_awaited_is_raised_once_by_wait(
        self, tmp_path: Path, store: FaultyStore
    ) -> None:
        async with Checkpointer(store=store) as checkpointer:
            error = await self.fail_unseen(checkpointer, store, tmp_path / "a")
            with pytest.raises(StorageError) as caught:
                await checkpointer.wait()
            assert caught.value is error
            await checkpointer.wait()

    async def test_a_failed_save_that_nobody_awaited_is_raised_on_leaving(
        self, tmp_path: Path, store: FaultyStore
    ) -> None:
        error = None
        with pytest.raises(StorageError) as caught:
            async with Checkpointer(store=store) as checkpointer:
                error = await self.fail_unseen(checkpointer, store, tmp_path / "a")

        assert caught.value is error

    async def test_on_leaving_none_of_several_is_lost(self, tmp_path: Path, store: FaultyStore) -> None:
        gate, pipeline = gated(before="write")

        async def script() -> None:
            async with Checkpointer(store=store) as checkpointer:
                await checkpointer.save(tmp_path / "a", tree(), pipeline=pipeline)
                await checkpointer.save(tmp_path / "b", tree(), pipeline=pipeline)
                store.fail_on("data.write_at", 1)
                store.fail_on("data.write_at", 2)
                gate.opened.set()

        with pytest.raises(StorageError) as caught:
            await script()

        notes = "\n".join(caught.value.__notes__)
        assert notes.count("failed too: StorageError") == 1
        assert str(tmp_path / "b") in notes

    async def test_a_failed_save_is_noted_on_the_error_of_the_body(
        self, tmp_path: Path, store: FaultyStore
    ) -> None:
        async def script() -> None:
            async with Checkpointer(store=store) as checkpointer:
                await self.fail_unseen(checkpointer, store, tmp_path / "a")
                raise KeyError("mine")

        with pytest.raises(KeyError) as caught:
            await script()

        (note,) = caught.value.__notes__
        assert str(tmp_path / "a") in note
        assert "StorageError" in note

    @pytest.mark.parametrize("how", ["await", "staged", "exception", "result"])
    async def test_a_failure_that_was_looked_at_is_not_raised_again(
        self, tmp_path: Path, store: FaultyStore, how: str
    ) -> None:
        hang = store.hang_on("data.write_at", then=StorageError("write", "x", "no"))
        async with Checkpointer(store=store) as checkpointer:
            save = await checkpointer.save(tmp_path / "a", tree())
            hang.release()
            if how == "exception":
                await ended(save)
                assert isinstance(save.exception(), StorageError)
            else:
                waits: dict[str, Callable[[], Any]] = {
                    "await": save.finalized,
                    "staged": save.written,
                    "result": lambda: to_thread.run_sync(save.result),
                }
                with pytest.raises(StorageError):
                    await waits[how]()
            await (await checkpointer.save(tmp_path / "b", tree()))

    async def test_a_cancelled_save_is_not_raised_to_others(self, tmp_path: Path) -> None:
        gate, pipeline = gated(before="commit")
        async with Checkpointer() as checkpointer:
            save = await checkpointer.save(tmp_path / "a", tree(), pipeline=pipeline)
            await gate.reached.wait()
            save.cancel()
            await ended(save)
            await (await checkpointer.save(tmp_path / "a", tree()))

    async def test_a_clean_up_that_fails_does_not_hide_why_the_save_failed(
        self, tmp_path: Path, store: FaultyStore
    ) -> None:
        store.fail_on("data.write_at", error=StorageError("write", "x", "no space"))
        store.fail_on("discard", 1, StorageError("rmdir", "x", "busy"))
        async with Checkpointer(store=store) as checkpointer:
            with pytest.raises(StorageError, match="no space") as caught:
                await (await checkpointer.save(tmp_path / "a", tree()))
            assert caught.value.__notes__[-1] == "what was written could not be removed: rmdir 'x': busy"
            assert names(tmp_path) == ["a.orbax-checkpoint-tmp"]
            await (await checkpointer.save(tmp_path / "a", tree()))  # removes what is stale

        assert names(tmp_path) == ["a"]

    async def test_the_same_error_can_be_raised_many_times(self, tmp_path: Path, store: FaultyStore) -> None:
        store.hang_on("data.write_at", then=StorageError("write", "x", "no")).release()
        async with Checkpointer(store=store) as checkpointer:
            with pytest.raises(StorageError) as first:
                await (await checkpointer.save(tmp_path / "a", tree()))
            save_error = first.value
            assert str(save_error) == "in stage 'write': write 'x': no"

        assert names(tmp_path) == []


class TestSeveral:
    async def test_saves_to_different_paths_run_at_once(self, tmp_path: Path, store: FaultyStore) -> None:
        hang = store.hang_on("data.write_at")
        async with Checkpointer(store=store) as checkpointer:
            slow = await checkpointer.save(tmp_path / "slow", tree(1))
            await hang.wait_reached()
            await (await checkpointer.save(tmp_path / "fast", tree(2)))
            assert not slow.done
            assert (await checkpointer.restore(tmp_path / "fast"))["step"] == 2
            assert (await checkpointer.metadata(tmp_path / "fast")).nbytes == 12008
            hang.release()
            await slow

        assert names(tmp_path) == ["fast", "slow"]

    async def test_saves_to_one_path_follow_each_other(self, tmp_path: Path, store: FaultyStore) -> None:
        hang = store.hang_on("data.write_at")
        seen: list[int] = []
        async with Checkpointer(store=store) as checkpointer, create_task_group() as tasks:

            async def save_again() -> None:
                second = await checkpointer.save(tmp_path / "x" / ".." / "a", tree(2), overwrite=True)
                assert first.done
                await second
                seen.append((await checkpointer.restore(tmp_path / "a"))["step"])

            first = await checkpointer.save(tmp_path / "a", tree(1), overwrite=True)
            await hang.wait_reached()
            tasks.start_soon(save_again)
            hang.release()
            await first

        assert seen == [2]
        assert names(tmp_path) == ["a"]

    async def test_a_second_save_to_one_path_needs_overwrite(self, tmp_path: Path) -> None:
        async with Checkpointer() as checkpointer:
            await checkpointer.save(tmp_path / "a", tree(1))
            with pytest.raises(DestinationExistsError, match="overwrite=True"):
                await checkpointer.save(tmp_path / "a", tree(2))

        assert names(tmp_path) == ["a"]

    async def test_two_checkpointers_never_build_one_checkpoint(
        self, tmp_path: Path, store: FaultyStore, assert_same: AssertSame
    ) -> None:
        hang = store.hang_on("data.write_at")
        async with Checkpointer(store=store) as first, Checkpointer() as second:
            save = await first.save(tmp_path / "a", tree(1))
            await hang.wait_reached()
            other = await second.save(tmp_path / "a", tree(2))
            with pytest.raises(StorageError, match=r"^in stage '[a-z]+': hold [^:]*: somebody") as caught:
                await other
            assert caught.value.errno == errno.EBUSY
            assert names(tmp_path) == ["a.orbax-checkpoint-tmp"]
            hang.release()
            await save

            assert_same(await second.restore(tmp_path / "a"), tree(1))
            await (await second.save(tmp_path / "a", tree(3), overwrite=True))
            await (await first.save(tmp_path / "a", tree(4), overwrite=True))
            assert (await first.restore(tmp_path / "a"))["step"] == 4

        assert names(tmp_path) == ["a"]

    async def test_one_checkpointer_saves_and_restores_concurrently(self, tmp_path: Path) -> None:
        async with Checkpointer(memory_limit="32KiB") as checkpointer:

            async def work(number: int) -> None:
                path = tmp_path / str(number % 4)
                await (await checkpointer.save(path, tree(number), overwrite=True))
                restored = await checkpointer.restore(path)
                assert restored["step"] % 4 == number % 4
                assert restored["host"].tolist() == [restored["step"]] * 1000

            async with create_task_group() as tasks:
                for number in range(16):
                    tasks.start_soon(work, number)

            statistics = checkpointer.statistics()
            assert (statistics.leased, statistics.tasks_waiting) == (0, 0)
            assert statistics.peak <= statistics.limit == 32 * 1024


class TestOverwriting:
    async def test_a_reader_sees_the_old_or_the_new_one_and_each_complete(self, tmp_path: Path) -> None:
        def states(fill: int) -> dict[str, Any]:
            return {"a": np.full(2000, fill), "text": str(fill), "z": np.full(2000, fill)}

        seen: list[int] = []
        over = Event()
        async with Checkpointer() as writer, Checkpointer() as reader, create_task_group() as tasks:
            await (await writer.save(tmp_path / "a", states(0)))

            async def poll() -> None:
                while not over.is_set():
                    found = await reader.restore(tmp_path / "a")
                    (value,) = {*found["a"].tolist(), int(found["text"]), *found["z"].tolist()}
                    seen.append(value)

            tasks.start_soon(poll)
            for fill in range(1, 11):
                await (await writer.save(tmp_path / "a", states(fill), overwrite=True))
            over.set()

        assert seen == sorted(seen)
        assert names(tmp_path) == ["a"]


class TestMemory:
    @pytest.mark.parametrize("kind", ["numpy", "jax"])
    async def test_a_tree_ten_times_the_budget_with_leaves_above_it(
        self, tmp_path: Path, assert_same: AssertSame, kind: str
    ) -> None:
        convert: Callable[[Any], Any] = np.asarray if kind == "numpy" else jnp.asarray
        rng = np.random.default_rng(0)
        state = {
            "large": convert(rng.integers(0, 2**31, (3, 7, 40_001), np.int32)),
            "middle": [convert(rng.random(50_000, np.float32)) for _ in range(20)],
            "small": [convert(rng.random(100, np.float32)) for _ in range(500)],
        }
        limit = 2**19
        sizes = [leaf.nbytes for leaf in jax.tree.leaves(state)]
        assert sum(sizes) > 10 * limit
        assert max(sizes) > 6 * limit
        async with Checkpointer(memory_limit=limit) as checkpointer:
            report = await (await checkpointer.save(tmp_path / "a", state))
            assert_same(await checkpointer.restore(tmp_path / "a", like=state), state)
            statistics = checkpointer.statistics()
            assert (statistics.leased, statistics.limit) == (0, limit)
            assert report.peak_leased_bytes == statistics.peak <= limit
            large = sum(size for size in sizes if size > PACKED_BELOW)
            assert (statistics.peak > sum(sizes) - large) == (kind == "numpy")

    async def test_a_limit_is_written_as_people_write_it(self) -> None:
        async with Checkpointer(memory_limit="1.5MiB") as checkpointer:
            assert checkpointer.statistics().limit == 3 * 2**19
        with pytest.raises(ConfigError, match="not a number of bytes"):
            Checkpointer(memory_limit="lots")


@pytest.mark.parametrize(("name", "first"), [("z", ["z"]), ("b", ["b"])])
async def test_the_prioritised_are_written_first(tmp_path: Path, name: str, first: list[str]) -> None:
    order: list[str] = []

    async def note(batch: Any, /) -> Any:
        order.extend(leaf.info.name for leaf in batch.leaves)
        return batch

    pipeline = pipelines.save_pipeline().insert_after("device_to_host", note)
    state = {key: np.ones(100) for key in "abyz"}
    async with Checkpointer() as checkpointer:
        save = await checkpointer.save(
            tmp_path / "a", state, prioritise=lambda keys: keys == (name,), pipeline=pipeline
        )
        await save
        restored = await checkpointer.restore(tmp_path / "a", prioritise=lambda keys: keys == (name,))

    assert order[:1] == first
    assert sorted(order) == list("abyz")
    assert restored.keys() == state.keys()


async def _release_when_reached(hang: Any) -> None:
    await hang.wait_reached()
    hang.release()


def _call(function: Callable[..., Any], *args: Any, **options: Any) -> Callable[[], Any]:
    async def call() -> None:
        await function(*args, **options)

    return call


async def test_several_checkpointers_work_in_one_event_loop_one_after_another(tmp_path: Path) -> None:
    """One Checkpointer after another in the same loop, as in a notebook."""
    for number in range(3):
        async with Checkpointer() as checkpointer:
            await (await checkpointer.save(tmp_path / str(number), tree(number)))
        with anyio.fail_after(20):
            await anyio.lowlevel.checkpoint()


class Halt(BaseException):
    """Like `KeyboardInterrupt`, but asyncio's loop survives it."""


async def test_an_interrupt_within_a_save_is_what_the_save_ends_with(tmp_path: Path) -> None:
    """A thread may be waiting for the save, and sees only how the save ends."""
    saves: list[SaveFuture] = []

    async def interrupt(_: object) -> None:
        raise Halt

    pipeline = pipelines.save_pipeline().insert_before("write", interrupt)

    async def main() -> None:
        async with Checkpointer() as checkpointer:
            saves.append(
                await checkpointer.save(tmp_path / "a", tree(), staging="overlap", pipeline=pipeline)
            )
            await anyio.sleep_forever()

    with pytest.raises((Halt, BaseExceptionGroup)):
        await main()

    assert saves[0].done
    assert isinstance(saves[0].exception(), Halt)


async def test_the_time_of_staging_is_when_the_tree_was_staged(tmp_path: Path) -> None:
    gate, pipeline = gated(before="write")
    async with Checkpointer() as checkpointer:
        save = await checkpointer.save(tmp_path / "a", tree(), pipeline=pipeline)
        since = time.perf_counter()
        for _ in range(300):
            await anyio.lowlevel.checkpoint()

        held_s = time.perf_counter() - since
        gate.opened.set()
        report = await save

    assert 0 < report.staged_s < report.durable_s - held_s


async def test_wait_is_for_every_save(tmp_path: Path) -> None:
    gate, pipeline = gated(before="commit")
    async with Checkpointer() as checkpointer, create_task_group() as tasks:
        first = await checkpointer.save(tmp_path / "a", tree())
        second = await checkpointer.save(tmp_path / "b", tree(), pipeline=pipeline)

        async def go_on() -> None:
            await ended(first)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()

            gate.opened.set()

        tasks.start_soon(go_on)
        await checkpointer.wait()
        assert second.done


class UnclosableHold(Hold):
    """A hold that ends with an error, as one whose descriptor cannot be closed."""

    def __init__(self, held: Hold) -> None:
        self._held = held

    def release(self) -> None:
        self._held.release()
        raise StorageError("release", "somewhere", "injected", errno.EIO)


class UnclosableHolds(StoreWrapper):
    def make_held(self, path: str) -> Hold:
        return UnclosableHold(super().make_held(path))


async def test_a_lock_that_cannot_be_closed_does_not_fail_a_save_that_is_durable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = UnclosableHolds(LocalStore())
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(tmp_path / "c", {"a": np.ones(3)}))
        assert (await checkpointer.restore(tmp_path / "c"))["a"].tolist() == [1, 1, 1]

    assert "save.left_behind" in caplog.text
    assert "injected" in caplog.text
