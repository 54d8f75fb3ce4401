"""A third party's work that never ends: the save that it belongs to ends all the same."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from anyio import CancelScope, Event
from tests.stages.stage_rig import Parcel, ParcelHandler, with_parcels

from penstock import Checkpointer, SaveFuture
from penstock.config import Config, StoppingOptions
from penstock.errors import HandlerFailedError, PipelineError, SaveCancelledError, StorageError
from penstock.handlers import LocalStore, default_handlers
from penstock.kernel import ParamInfo, Waitable
from penstock.pipelines import save_pipeline
from penstock.testing import FaultyStore, Hang

pytestmark = pytest.mark.anyio

TREE = {"p": Parcel("text"), "step": 3}


class Hanging:
    """A Checkpointer whose third-party handler hangs, by default while it writes the leaf `p`."""

    def __init__(
        self, undo_s: float = 0.05, where: str = "write", handler: ParcelHandler | None = None
    ) -> None:
        self.handler = ParcelHandler() if handler is None else handler
        self.hang: Hang = self.handler.hang(where, "" if where == "finalize" else "p")
        self.store = FaultyStore(LocalStore())
        registry = with_parcels(default_handlers(entry_points=False), self.handler)
        config = Config(stopping=StoppingOptions(undo_s=undo_s))
        self.checkpointer = Checkpointer(store=self.store, registry=registry, config=config)


async def test_cancelling_a_hung_handler_ends_and_names_the_handler_and_the_key_path(tmp_path: Path) -> None:
    hanging = Hanging()
    saves: list[SaveFuture] = []
    with pytest.raises(
        HandlerFailedError, match=r"\['p'\].*ParcelHandler.*did not end within 0.05 s"
    ) as raised:
        async with hanging.checkpointer as checkpointer:
            saves.append(await checkpointer.save(tmp_path / "new", TREE))
            await hanging.hang.wait_reached()
            saves[0].cancel()

    assert raised.value.key_path == "['p']"
    assert raised.value.handler.endswith("ParcelHandler")
    assert saves[0].exception() is raised.value
    assert hanging.checkpointer.statistics().leased == 0
    assert not os.path.lexists(tmp_path / "new")
    hanging.hang.release()


async def test_no_save_builds_where_a_hung_handler_may_still_write(tmp_path: Path) -> None:
    hanging = Hanging()
    async with hanging.checkpointer as checkpointer:
        save = await checkpointer.save(tmp_path / "new", TREE)
        await hanging.hang.wait_reached()
        save.cancel()
        with pytest.raises(HandlerFailedError):
            await save

        (left,) = os.listdir(tmp_path)
        with pytest.raises(StorageError, match="somebody builds"):
            await (await checkpointer.save(tmp_path / "new", {"step": 4}))
        await (await checkpointer.save(tmp_path / "other", {"step": 4}))  # but elsewhere

        assert sorted(os.listdir(tmp_path)) == sorted([left, "other"])

    hanging.hang.release()
    await _next_save(tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["new", "other"]


async def _next_save(path: Path) -> None:
    """Save as soon as nobody builds there. It is let go of when the handler ends; no collection is needed."""
    async with Checkpointer() as checkpointer:
        while True:
            try:
                await (await checkpointer.save(path, {"step": 5}))
            except StorageError:
                await anyio.lowlevel.checkpoint()
            else:
                return


@pytest.mark.parametrize("where", ["write", "finalize"])
async def test_leaving_the_context_by_cancellation_ends(where: str, tmp_path: Path) -> None:
    hanging = Hanging(where=where)
    with anyio.CancelScope() as scope:
        async with hanging.checkpointer as checkpointer:
            await checkpointer.save(tmp_path / "new", TREE)
            await hanging.hang.wait_reached()
            scope.cancel()

    assert scope.cancelled_caught
    hanging.hang.release()


async def test_a_failure_elsewhere_is_raised_with_the_hang_in_a_note(tmp_path: Path) -> None:
    hanging = Hanging()
    error = StorageError("write", "x", "no room")
    hanging.store.fail_on("data.write_at", error=error)
    with pytest.raises(StorageError) as raised:
        async with hanging.checkpointer as checkpointer:
            await (await checkpointer.save(tmp_path / "new", TREE))

    assert raised.value is error
    notes: list[Any] = error.__notes__
    assert any("ParcelHandler" in note and "['p']" in note for note in notes)
    hanging.hang.release()


async def test_what_ends_in_time_is_waited_for_and_removed(tmp_path: Path) -> None:
    hanging = Hanging(undo_s=30.0)
    async with hanging.checkpointer as checkpointer:
        save = await checkpointer.save(tmp_path / "new", TREE)
        await hanging.hang.wait_reached()
        save.cancel()
        await anyio.lowlevel.checkpoint()
        hanging.hang.release()
        with pytest.raises(SaveCancelledError):
            await save

        assert os.listdir(tmp_path) == []
        await (await checkpointer.save(tmp_path / "new", {"step": 4}))


class TestFinalize:
    async def test_cancelling_a_hung_finalize_ends_and_names_the_handler_and_its_type(
        self, tmp_path: Path
    ) -> None:
        hanging = Hanging(where="finalize")
        saves: list[SaveFuture] = []
        with pytest.raises(
            HandlerFailedError, match=r"'parcel'.*ParcelHandler.*its finalize did not end within 0.05 s"
        ) as raised:
            async with hanging.checkpointer as checkpointer:
                saves.append(await checkpointer.save(tmp_path / "new", TREE))
                await hanging.hang.wait_reached()
                saves[0].cancel()

        assert raised.value.key_path == "finalize of 'parcel'"
        assert raised.value.handler.endswith("ParcelHandler")
        assert saves[0].exception() is raised.value
        assert hanging.checkpointer.statistics().leased == 0
        assert not os.path.lexists(tmp_path / "new")
        hanging.hang.release()

    async def test_no_save_builds_where_a_hung_handler_may_still_write(self, tmp_path: Path) -> None:
        hanging = Hanging(where="finalize")
        async with hanging.checkpointer as checkpointer:
            save = await checkpointer.save(tmp_path / "new", TREE)
            await hanging.hang.wait_reached()
            save.cancel()
            with pytest.raises(HandlerFailedError):
                await save

            (left,) = os.listdir(tmp_path)
            with pytest.raises(StorageError, match="somebody builds"):
                await (await checkpointer.save(tmp_path / "new", {"step": 4}))

            assert os.listdir(tmp_path) == [left]

        hanging.hang.release()
        await _next_save(tmp_path / "new")
        assert os.listdir(tmp_path) == ["new"]

    async def test_what_ends_in_time_is_waited_for_and_removed(self, tmp_path: Path) -> None:
        hanging = Hanging(undo_s=30.0, where="finalize")
        async with hanging.checkpointer as checkpointer:
            save = await checkpointer.save(tmp_path / "new", TREE)
            await hanging.hang.wait_reached()
            save.cancel()
            await anyio.lowlevel.checkpoint()
            assert len(os.listdir(tmp_path)) == 1
            hanging.hang.release()
            with pytest.raises(SaveCancelledError):
                await save

            assert os.listdir(tmp_path) == []
            assert hanging.handler.finalized != []

    async def test_a_slow_finalize_is_waited_for_in_a_save_that_succeeds(self, tmp_path: Path) -> None:
        hanging = Hanging(where="finalize")
        async with hanging.checkpointer as checkpointer:
            save = await checkpointer.save(tmp_path / "new", TREE)
            await hanging.hang.wait_reached()
            await anyio.sleep(0.1)  # longer than `undo_s`, which is for what goes wrong
            hanging.hang.release()
            assert (await save).n_leaves == 2


class Asleep(ParcelHandler):
    """Hangs in its coroutine; if stubborn, shielded from cancellation, as `to_thread.run_sync` is."""

    def __init__(self, *, stubborn: bool) -> None:
        super().__init__()
        self.stubborn = stubborn
        self.begun = Event()
        self.go_on = Event()

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Waitable]:
        self.begun.set()
        with CancelScope(shield=self.stubborn):
            await self.go_on.wait()

        return await super().serialize(values, infos, args)


class TestCoroutine:
    def checkpointer(self, handler: Asleep, undo_s: float = 0.05) -> Checkpointer:
        registry = with_parcels(default_handlers(entry_points=False), handler)
        return Checkpointer(registry=registry, config=Config(stopping=StoppingOptions(undo_s=undo_s)))

    async def test_a_coroutine_that_can_be_cancelled_is_cancelled(self, tmp_path: Path) -> None:
        handler = Asleep(stubborn=False)
        async with self.checkpointer(handler) as checkpointer:
            save = await checkpointer.save(tmp_path / "new", TREE, staging="overlap")
            await handler.begun.wait()
            save.cancel()
            with pytest.raises(SaveCancelledError):
                await save

            assert os.listdir(tmp_path) == []

    async def test_a_save_ends_without_a_coroutine_that_ignores_cancellation(self, tmp_path: Path) -> None:
        handler = Asleep(stubborn=True)
        async with self.checkpointer(handler) as checkpointer:
            save = await checkpointer.save(tmp_path / "new", TREE, staging="overlap")
            await handler.begun.wait()
            save.cancel()
            with pytest.raises(
                HandlerFailedError, match=r"\['p'\].*Asleep.*its serialize did not end within 0.05 s"
            ) as raised:
                await save

            assert raised.value.key_path == "['p']"
            (left,) = os.listdir(tmp_path)
            async with Checkpointer() as another:
                with pytest.raises(StorageError, match="somebody builds"):
                    await (await another.save(tmp_path / "new", {"step": 4}))

            await (await checkpointer.save(tmp_path / "other", {"step": 4}))
            assert sorted(os.listdir(tmp_path)) == sorted([left, "other"])
            handler.go_on.set()  # else leaving would wait for it

        assert os.listdir(tmp_path) == ["other"]
        assert checkpointer.statistics().leased == 0

    async def test_a_cancelled_call_of_save_returns_though_a_coroutine_hangs(self, tmp_path: Path) -> None:
        handler = Asleep(stubborn=True)
        with pytest.raises(HandlerFailedError, match="its serialize did not end"):
            async with self.checkpointer(handler) as checkpointer:
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(checkpointer.save, tmp_path / "new", TREE)
                        await handler.begun.wait()
                        scope.cancel()

                assert scope.cancelled_caught
                handler.go_on.set()  # nobody was told of the failure yet

        assert os.listdir(tmp_path) == []

    async def test_a_failed_save_ends_though_a_coroutine_hangs(self, tmp_path: Path) -> None:
        handler = Asleep(stubborn=True)

        async def fail(_: object) -> None:
            await handler.begun.wait()
            raise ArithmeticError

        pipeline = save_pipeline().insert_after("device_to_host", fail)
        async with self.checkpointer(handler) as checkpointer:
            tree = {"a": Parcel("x"), "b": np.arange(10)}
            save = await checkpointer.save(
                tmp_path / "new",
                tree,
                staging="overlap",
                pipeline=pipeline,
                prioritise=lambda keys: keys == ("b",),  # staged before the other hangs
            )
            with pytest.raises(HandlerFailedError, match="its serialize did not end"):
                await save

            handler.go_on.set()

        assert os.listdir(tmp_path) == []

    async def test_a_coroutine_that_ends_in_time_is_no_second_failure(self, tmp_path: Path) -> None:
        handler = Asleep(stubborn=True)
        async with self.checkpointer(handler, undo_s=30.0) as checkpointer:
            save = await checkpointer.save(tmp_path / "new", TREE, staging="overlap")
            await handler.begun.wait()
            save.cancel()
            await anyio.lowlevel.checkpoint()
            handler.go_on.set()
            with pytest.raises(SaveCancelledError):
                await save

            assert os.listdir(tmp_path) == []

    async def test_a_hung_coroutine_is_noted_on_the_error_of_the_block(self, tmp_path: Path) -> None:
        handler = Asleep(stubborn=True)
        with pytest.raises(ArithmeticError) as raised:
            async with self.checkpointer(handler) as checkpointer:
                save = await checkpointer.save(tmp_path / "new", TREE, staging="overlap")
                save.add_done_callback(lambda _: handler.go_on.set())
                await handler.begun.wait()
                raise ArithmeticError

        assert "its serialize did not end" in raised.value.__notes__[0]
        assert os.listdir(tmp_path) == []


def test_something_that_a_coroutine_awaits_is_cancelled_by_others(tmp_path: Path) -> None:
    class Unlucky(ParcelHandler):
        async def serialize(
            self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
        ) -> Sequence[Waitable]:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
            return []

    async def main() -> None:
        registry = with_parcels(default_handlers(entry_points=False), Unlucky())
        async with Checkpointer(registry=registry) as checkpointer:
            await (await checkpointer.save(tmp_path / "new", TREE))

    with pytest.raises(PipelineError, match="ended early: something it awaited was cancelled"):
        asyncio.run(main())

    assert os.listdir(tmp_path) == []
