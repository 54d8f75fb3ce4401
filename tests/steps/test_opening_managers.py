"""Who may open a manager on a root, and what a manager refuses before and after."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
import jax.numpy as jnp
import pytest
from anyio import wait_all_tasks_blocked
from tests.own_files import is_own, listed

import penstock
import penstock.orbax
import penstock.sync
from penstock.errors import (
    ClosedError,
    LinkOutsideError,
    PathError,
    RootInUseError,
    SpecError,
    UnknownMetricError,
)
from penstock.handlers import LocalStore
from penstock.handlers.stores.publishing import (
    WRITER,
    ProcessIdentity,
    StoreClaimFiles,
    WriterHold,
    read_pins,
)
from penstock.kernel import Store
from penstock.steps import CheckpointManager, KeepBest, KeepLast
from penstock.testing import FaultyStore, MemoryStore, lockless_store

pytestmark = pytest.mark.anyio

CRASHES = """
import os, sys, anyio, penstock
from penstock.testing import lockless_store
async def main():
    store = lockless_store() if sys.argv[2] == "without locks" else None
    async with penstock.CheckpointManager(sys.argv[1], store=store) as manager:
        await (await manager.save(1, {"n": 1}))
        print("saved", flush=True)
        sys.stdin.read()
        os._exit(9)
anyio.run(main)
"""


def state(step: int = 0) -> dict[str, Any]:
    return {"w": jnp.full(3, step, jnp.float32)}


class Full:
    """A disk on which nobody can make the directory that a writer of a root holds."""

    def __init__(self, number: int) -> None:
        self.is_full = True
        self.fits: Callable[[], bool] = lambda: False
        self.store = FaultyStore(LocalStore())
        make = self.store.make_directory

        def make_directory(path: str) -> None:
            if path.endswith(WRITER) and self.is_full and not self.fits():
                raise penstock.errors.StorageError("mkdir", path, os.strerror(number), number)

            make(path)

        self.store.make_directory = make_directory  # type: ignore[method-assign]  # of this one alone


async def pinned(root: Path, steps: list[int]) -> None:
    """Wait until exactly these pins are told."""
    with anyio.fail_after(10):
        while sorted(read_pins(LocalStore(), str(root))) != steps:
            await wait_all_tasks_blocked()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where it can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    options = "size=1m,nr_inodes=100"
    command = [mount or "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    if mount is None or os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("nothing can be mounted here")

    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(ballast: Path) -> None:
    """Make directories until no more fit."""
    ballast.mkdir()
    with suppress(OSError):
        for number in range(1000):
            (ballast / str(number)).mkdir()

    with pytest.raises(OSError, match="No space left"):
        (ballast / "one more").mkdir()


async def save(manager: CheckpointManager, step: int, **options: Any) -> None:
    future = await manager.save(step, state(step), **options)
    assert future is not None
    await future


class TestOneWriter:
    async def test_a_second_manager_is_refused_unless_it_only_reads(self, tmp_path: Path) -> None:
        async with CheckpointManager(tmp_path) as manager:
            await save(manager, 1)
            with pytest.raises(RootInUseError, match="another CheckpointManager") as caught:
                await CheckpointManager(tmp_path).__aenter__()

            assert caught.value.root == str(tmp_path)
            async with CheckpointManager(tmp_path, read_only=True) as reader:
                assert reader.latest_step() == 1
                await reader.restore()
            await save(manager, 2)

        assert listed(tmp_path) == ["1", "2"]
        async with CheckpointManager(tmp_path) as manager:
            await save(manager, 3)

    async def test_a_manager_that_fails_leaves_its_root_to_the_next(self, tmp_path: Path) -> None:
        (tmp_path / "metadata").write_text("a file")
        with pytest.raises(Exception, match="metadata"):
            await CheckpointManager(tmp_path, metadata={"a": 1}).__aenter__()

        (tmp_path / "metadata").unlink()
        with pytest.raises(ZeroDivisionError):
            async with CheckpointManager(tmp_path):
                _ = 1 // 0

        async with CheckpointManager(tmp_path) as manager:
            await save(manager, 1)

    @pytest.mark.parametrize("kind", ["with locks", "without locks"])
    def test_a_writer_that_crashed_holds_nothing(self, kind: str, tmp_path: Path) -> None:
        def manager() -> CheckpointManager:
            return CheckpointManager(tmp_path, store=lockless_store() if kind == "without locks" else None)

        command = [sys.executable, "-c", CRASHES, str(tmp_path), kind]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == b"saved\n"
            with pytest.raises(RootInUseError) as caught:
                anyio.run(manager().__aenter__)

            assert (f"process {process.pid} of" in caught.value.more) is (kind == "without locks")
            process.stdin.close()

        async def resume() -> None:
            async with manager() as opened:
                assert opened.latest_step() == 1
                await save(opened, 2)

        assert process.returncode == 9
        assert (tmp_path / WRITER).is_dir()
        anyio.run(resume)
        assert listed(tmp_path) == ["1", "2"]

    @pytest.mark.parametrize("kind", ["no flock", "no holds"])
    async def test_without_locks_a_second_manager_is_refused(self, kind: str, tmp_path: Path) -> None:
        store: Store = MemoryStore() if kind == "no holds" else lockless_store()
        store.make_directory(str(tmp_path))
        async with CheckpointManager(tmp_path, store=store) as manager:
            await save(manager, 1)
            with pytest.raises(RootInUseError, match="another CheckpointManager") as caught:
                await CheckpointManager(tmp_path, store=store).__aenter__()

            claim = WRITER if kind == "no holds" else f".{WRITER}.penstock-claim"
            assert f"process {os.getpid()} of " in caught.value.more
            assert caught.value.more.endswith(f"if that has ended, remove {tmp_path}/{claim}")
            assert caught.value.more in str(caught.value)
            async with CheckpointManager(tmp_path, store=store, read_only=True) as reader:
                assert reader.latest_step() == 1
            await save(manager, 2)

        async with CheckpointManager(tmp_path, store=store) as manager:
            await save(manager, 3)

        there = {name for name in store.list_directory(str(tmp_path)) if not is_own(name)}
        assert there == {"1", "2", "3"}

    async def test_the_claim_of_another_machine_refuses_until_it_is_removed(self, tmp_path: Path) -> None:
        store, elsewhere = MemoryStore(), ProcessIdentity("far", "m", "b", "n", 7, "1")
        files = StoreClaimFiles(store)
        files.create(str(tmp_path / WRITER), elsewhere.encode())
        with pytest.raises(RootInUseError, match=rf"process 7 of far; if that has ended, remove .*/{WRITER}"):
            await CheckpointManager(tmp_path, store=store).__aenter__()

        files.remove(str(tmp_path / WRITER))
        async with CheckpointManager(tmp_path, store=store) as manager:
            await save(manager, 1)

    async def test_where_nothing_can_be_written_a_manager_opens_and_reads(self, tmp_path: Path) -> None:
        async with CheckpointManager(tmp_path) as manager:
            await save(manager, 1)

        async with CheckpointManager(tmp_path, store=Full(errno.ENOSPC).store) as manager:
            assert manager.latest_step() == 1
            with pytest.raises(penstock.errors.StorageError, match="No space left"):
                await manager.save(2, state())
            with pytest.raises(penstock.errors.StorageError, match="No space left"):
                await manager.delete(1)

        assert listed(tmp_path) == ["1"]

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EPERM, errno.EACCES])
    async def test_who_could_not_hold_the_root_neither_saves_nor_deletes_beside_another(
        self, tmp_path: Path, number: int
    ) -> None:
        full = Full(number)
        async with CheckpointManager(tmp_path, store=full.store, keep=KeepLast(1)) as first:
            full.is_full = False
            async with CheckpointManager(tmp_path) as second:
                await save(second, 1)
                await first.reload()
                with pytest.raises(RootInUseError):
                    await first.save(2, state())
                with pytest.raises(RootInUseError):
                    await first.delete(1)
                assert first.all_steps() == (1,)
                await save(second, 2)

            await first.reload()
            await save(first, 3)
            with pytest.raises(RootInUseError):
                await CheckpointManager(tmp_path).__aenter__()

        assert listed(tmp_path) == ["3"]

    async def test_what_crashed_saves_left_is_removed_first_which_makes_room_for_the_hold(
        self, tmp_path: Path
    ) -> None:
        left, full = tmp_path / "1.orbax-checkpoint-tmp", Full(errno.ENOSPC)
        left.mkdir()
        full.fits = lambda: not left.exists()
        async with CheckpointManager(tmp_path, store=full.store):
            with pytest.raises(RootInUseError):
                await CheckpointManager(tmp_path).__aenter__()

    async def test_pins_of_who_does_not_hold_the_root_are_told_once_it_does(self, tmp_path: Path) -> None:
        full = Full(errno.ENOSPC)
        async with CheckpointManager(tmp_path, store=full.store) as first:
            first.pin(7)
            async with CheckpointManager(tmp_path) as second:
                second.pin(9)
                full.is_full = False
                await wait_all_tasks_blocked()
                await pinned(tmp_path, [9])

            await save(first, 1)
            await pinned(tmp_path, [7])

    async def test_a_hold_whose_directory_another_program_removed_is_taken_again(
        self, tmp_path: Path
    ) -> None:
        async with CheckpointManager(tmp_path) as first:
            shutil.rmtree(tmp_path / WRITER)
            async with CheckpointManager(tmp_path):
                with pytest.raises(RootInUseError):
                    await first.save(1, state())

            await save(first, 1)
            with pytest.raises(RootInUseError):
                await CheckpointManager(tmp_path).__aenter__()

    async def test_on_a_real_disk_that_was_full_when_it_was_opened(self, small_disk: Path) -> None:
        root, ballast = small_disk / "run", small_disk / "ballast"
        root.mkdir()
        fill(ballast)
        async with CheckpointManager(root, keep=KeepLast(1)) as first:
            shutil.rmtree(ballast)
            async with CheckpointManager(root) as second:
                await save(second, 1)
                with pytest.raises(RootInUseError):
                    await first.save(2, state())

            await first.reload()
            await save(first, 2)

        assert listed(root) == ["2"]

    def test_an_orbax_manager_deletes_once_another_writer_has_ended(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        ocp: Any = penstock.orbax
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        with ocp.CheckpointManager(tmp_path, options=options) as manager:
            writer = WriterHold(LocalStore(), str(tmp_path))
            writer.take()
            for step in (1, 2):
                manager.save(step, args=ocp.args.StandardSave(state()))
                manager.wait_until_finished()
            with pytest.raises(RootInUseError):
                manager.delete(2)
            assert listed(tmp_path) == ["1", "2"]
            assert "step.not_deleted" in caplog.text
            writer.release()
            manager.save(3, args=ocp.args.StandardSave(state()))
            manager.wait_until_finished()

        assert listed(tmp_path) == ["3"]

    @pytest.mark.parametrize("background", [False, True])
    def test_orbax_managers_delete_in_turns_and_leave_steps_alone_in_the_root(
        self, background: bool, tmp_path: Path
    ) -> None:
        ocp: Any = penstock.orbax
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=background)
        with ExitStack() as managers:
            for step in (1, 2, 3):
                manager = managers.enter_context(ocp.CheckpointManager(tmp_path, options=options))
                manager.save(step, args=ocp.args.StandardSave(state()))
                manager.wait_until_finished()
                assert os.listdir(tmp_path) == [str(step)]

            manager.delete(3)
            assert os.listdir(tmp_path) == []

    def test_a_save_that_fails_leaves_nothing_in_a_root_of_orbax(self, tmp_path: Path) -> None:
        ocp: Any = penstock.orbax
        with ocp.CheckpointManager(tmp_path) as manager:
            with pytest.raises(ValueError, match="JSON"):
                manager.save(1, args=ocp.args.JsonSave({"a": object()}))
            assert os.listdir(tmp_path) == []

    def test_orbax_lets_several_save_and_that_is_logged_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        ocp: Any = penstock.orbax
        with ocp.CheckpointManager(tmp_path) as manager:
            writer = WriterHold(LocalStore(), str(tmp_path))
            writer.take()
            for step in (1, 2, 3):
                manager.save(step, args=ocp.args.StandardSave(state()))
            with pytest.raises(RootInUseError):
                WriterHold(LocalStore(), str(tmp_path)).take()
            writer.release()

        assert caplog.text.count("step.root_in_use") == 1
        assert listed(tmp_path) == ["1", "2", "3"]


class TestRoots:
    def test_orbax_opens_a_checkpoint_as_an_empty_root_and_that_is_logged(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        ocp: Any = penstock.orbax
        penstock.sync.save(tmp_path / "one", state())
        for root, times in ((tmp_path, 0), (tmp_path / "one", 1)):
            with ocp.CheckpointManager(root) as manager:
                assert list(manager.all_steps()) == []

            assert caplog.text.count("step.root_is_checkpoint") == times

        penstock.sync.restore(tmp_path / "one")

    @pytest.mark.parametrize("read_only", [False, True])
    async def test_a_checkpoint_is_no_root(self, read_only: bool, tmp_path: Path) -> None:
        await penstock.save(tmp_path / "one", state())
        with pytest.raises(PathError, match="is itself a checkpoint"):
            await CheckpointManager(tmp_path / "one", read_only=read_only).__aenter__()

        assert not (tmp_path / "one" / WRITER).exists()
        with pytest.raises(PathError, match="is itself a checkpoint"):
            await anext(penstock.watch(tmp_path / "one"))

        await penstock.restore(tmp_path / "one")

    async def test_links_that_lead_out_show_nothing_of_what_they_lead_to(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret.json"
        secret.write_text('{"password": 7}')
        root = tmp_path / "run"
        async with CheckpointManager(root, metadata={"a": 1}) as manager:
            await save(manager, 1, metrics={"loss": 1.0})

        for file, ask in (("1/metrics/metrics", "metadata"), ("metadata/_ROOT_METADATA", "root_metadata")):
            kept = (root / file).read_bytes()
            (root / file).unlink()
            (root / file).symlink_to(secret)
            async with CheckpointManager(root, read_only=True) as manager:
                with pytest.raises(LinkOutsideError, match="secret"):
                    await getattr(manager, ask)()

            (root / file).unlink()
            (root / file).write_bytes(kept)

    async def test_a_manager_that_is_not_open_refuses_calls(self, tmp_path: Path) -> None:
        manager = CheckpointManager(tmp_path)
        for ask in (manager.latest_step, manager.all_steps, lambda: manager.should_save(1)):
            with pytest.raises(ClosedError):
                ask()


class TestMisspeltMetrics:
    async def test_the_first_save_is_refused_and_names_the_nearest(self, tmp_path: Path) -> None:
        keep = KeepLast(1) | KeepBest(2, "accurracy", "max")
        async with CheckpointManager(tmp_path, keep=keep) as manager:
            with pytest.raises(UnknownMetricError, match="did you mean 'accuracy'") as caught:
                await manager.save(1, state(), metrics={"accuracy": 0.5, "eval": {"loss": 1.0}})

            assert caught.value.known == ("accuracy", "eval/loss")
            assert manager.all_steps() == ()

        assert listed(tmp_path) == []

    async def test_a_metric_that_is_only_missing_is_logged_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with CheckpointManager(tmp_path, keep=KeepBest(1, "eval_loss")) as manager:
            for step in (1, 2, 3):
                await save(manager, step, metrics={"train_loss": 1.0 / step})

            assert manager.all_steps() == (1, 2, 3)
            for step, loss in ((4, 1.0), (5, 2.0)):
                await save(manager, step, metrics={"eval_loss": loss})
            await save(manager, 6)
            await manager.wait()
            assert manager.all_steps() == (1, 2, 3, 4, 6)  # step 5 is not the best

        assert caplog.text.count("step.metric_missing") == 1

    async def test_the_best_step_by_a_misspelt_name_is_an_error(self, tmp_path: Path) -> None:
        async with CheckpointManager(tmp_path, metric="eval/Loss") as manager:
            assert await manager.best_step("Loss") is None  # there are no steps
            await save(manager, 1)
            assert await manager.best_step("Loss") is None  # there are no metrics
            await save(manager, 2, metrics={"loss": 1.0, "eval": {"loss": float("nan")}})
            with pytest.raises(UnknownMetricError, match="'Loss'; did you mean 'loss'") as caught:
                await manager.best_step("Loss")
            with pytest.raises(UnknownMetricError, match="did you mean 'eval/loss'"):
                await manager.best_step()

            assert caught.value.known == ("eval/loss", "loss")
            assert await manager.best_step("eval/loss") is None  # which is not finite
            assert await manager.best_step("accuracy") is None  # which may come later
            assert await manager.best_step(lambda metrics: metrics.get("Loss")) is None

    async def test_the_best_step_is_ranked_as_the_manager_says_or_as_the_call_does(
        self, tmp_path: Path
    ) -> None:
        async with CheckpointManager(tmp_path, metric="loss", mode="max") as manager:
            for step, loss in ((1, 1.0), (2, 3.0), (3, 2.0)):
                await save(manager, step, metrics={"loss": loss})

            assert await manager.best_step() == 2
            assert await manager.best_step(mode="min") == 1
            assert await manager.best_step("loss") == 1
            for mode in ("minimum", "Min", ""):
                with pytest.raises(SpecError, match="mode must be 'min' or 'max'"):
                    await manager.best_step("loss", mode)  # type: ignore[arg-type]
            with pytest.raises(SpecError, match="metric is a name"):
                await manager.best_step(3)  # type: ignore[arg-type]

    async def test_a_metric_that_comes_later_counts_from_then_on(self, tmp_path: Path) -> None:
        keep = KeepBest(1, "eval/loss", without_metric=False)
        async with CheckpointManager(tmp_path, keep=keep) as manager:
            await save(manager, 1)  # without any metrics
            await save(manager, 2, metrics={"eval": {"loss": float("nan")}})

        async with CheckpointManager(tmp_path, keep=keep) as manager:
            await save(manager, 3, metrics={"other": 1.0})  # step 2 has it
            await save(manager, 4, metrics={"eval/loss": 1.0})
            await manager.wait()
            assert list(manager.all_steps()) == [4]

    def test_a_misspelt_metric_of_an_orbax_manager_is_logged(self, tmp_path: Path) -> None:
        ocp: Any = penstock.orbax
        options = ocp.CheckpointManagerOptions(preservation_policy=KeepBest(2, "los"))
        with ocp.CheckpointManager(tmp_path, options=options) as manager:
            with pytest.raises(UnknownMetricError, match="did you mean 'loss'"):
                manager.save(1, args=ocp.args.StandardSave(state()), metrics={"loss": 1.0})

            assert list(manager.all_steps()) == []
            assert manager.save(1, args=ocp.args.StandardSave(state()), metrics={"los": 1.0})
