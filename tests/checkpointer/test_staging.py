"""What STAGED and DURABLE promise, tested with donated arrays and with stores that are inspected."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast, final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from anyio import Event, create_task_group, fail_after, to_thread
from anyio.lowlevel import checkpoint
from tests.checkpointer.test_checkpointer import gated, names

import penstock
from penstock import Checkpointer, RestoreReport
from penstock.checkpointer import pipelines
from penstock.errors import DeletedLeafError
from penstock.handlers import LocalStore
from penstock.kernel import DataFile, Milestone, Store, StoreWrapper
from penstock.kernel.pipeline import Staging
from penstock.reports.report import stage_table
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

STEPS = 200
EVERY = 10


@partial(cast("Any", jax).jit, donate_argnums=0)
def train_step(state: dict[str, Any]) -> dict[str, Any]:
    """Overwrites all of its input buffers, if the runtime allows it."""
    return {"w": state["w"] * 1.01 + state["b"], "b": state["b"] + 1, "small": state["small"] + 1}


def begin() -> dict[str, Any]:
    return {"w": jnp.ones((64, 1024)), "b": jnp.zeros(1024), "small": jnp.zeros(3, jnp.int32)}


class TestTraining:
    @pytest.mark.thinned(2)
    @pytest.mark.timeout(120)
    @pytest.mark.parametrize("staging", ["copy", "overlap"])
    async def test_each_checkpoint_of_200_donating_steps_is_the_state_at_its_step(
        self, tmp_path: Path, staging: Staging
    ) -> None:
        state, host = begin(), np.zeros(100_000)
        expected: dict[int, Any] = {}
        saves: list[penstock.SaveFuture] = []
        async with Checkpointer(memory_limit="1MiB") as checkpointer:
            for step in range(STEPS):
                if step % EVERY == 0:
                    expected[step] = jax.tree.map(np.array, {"jax": state, "host": host})
                    tree = {"jax": state, "host": host}
                    save = await checkpointer.save(tmp_path / str(step), tree, staging=staging)
                    saves.append(save)
                    del tree
                    if staging == "overlap":
                        await save.staged()

                state = train_step(state)
                host += 1

            for save in saves:
                await save

            for step, wanted in expected.items():
                like = jax.tree.map(lambda _: np.ndarray, wanted)
                found = await checkpointer.restore(tmp_path / str(step), like=like)
                assert jax.tree.all(jax.tree.map(np.array_equal, found, wanted)), step

            assert checkpointer.statistics().leased == 0


class TestDeferredLeaves:
    """The leaves of a save with `staging="overlap"`, from the call to STAGED."""

    async def test_deferred_leaves_are_held_and_the_caller_may_drop_them(self, tmp_path: Path) -> None:
        gate, pipeline = gated(before="device_to_host")
        async with Checkpointer() as checkpointer:
            tree = {"x": jnp.arange(100_000), "y": np.arange(100_000)}
            save = await checkpointer.save(tmp_path / "a", tree, staging="overlap", pipeline=pipeline)
            del tree
            gate.opened.set()
            await save
            found = await checkpointer.restore(tmp_path / "a")
            assert found["x"].tolist() == found["y"].tolist() == list(range(100_000))

    @pytest.mark.parametrize("end", ["delete", "donate"])
    async def test_a_deferred_leaf_that_was_deleted_fails_its_own_save_by_name(
        self, tmp_path: Path, end: str
    ) -> None:
        gate, pipeline = gated(before="device_to_host")
        tree = {"kept": jnp.ones(3), "w": [jnp.ones(50_000)]}
        async with Checkpointer() as checkpointer:
            other = await checkpointer.save(tmp_path / "other", {"x": jnp.ones(3)})
            save = await checkpointer.save(tmp_path / "a", tree, staging="overlap", pipeline=pipeline)
            if end == "delete":
                tree["w"][0].delete()  # type: ignore[index]  # a tree of several types
            else:
                cast("Any", jax).jit(lambda x: x + 1, donate_argnums=0)(tree["w"][0])  # type: ignore[index]
            gate.opened.set()
            with pytest.raises(DeletedLeafError, match=r"\['w'\]\[0\]") as caught:
                await save.staged()
            assert caught.value.key_path == "['w'][0]"
            assert save.exception() is caught.value
            await other
            assert checkpointer.statistics().leased == 0

        assert names(tmp_path) == ["other"]


class TestNumpyLeaves:
    async def test_staged_waits_for_the_budget_and_not_for_the_disk_when_that_is_large(
        self, tmp_path: Path
    ) -> None:
        store = FaultyStore(LocalStore())
        hang = store.hang_on("data.write_at")
        leaves = {f"x{at}": np.full(50_000, at) for at in range(10)}  # 400 kB each
        async with (
            Checkpointer(store=store, memory_limit="1MiB") as checkpointer,
            create_task_group() as tasks,
        ):
            saves: list[penstock.SaveFuture] = []
            returned = Event()

            async def save() -> None:
                saves.append(await checkpointer.save(tmp_path / "a", leaves))
                returned.set()

            tasks.start_soon(save)
            await hang.wait_reached()
            with fail_after(10):  # what does not fit waits
                while not checkpointer.statistics().tasks_waiting:
                    await to_thread.run_sync(lambda: None)

            assert not returned.is_set()
            hang.release()
            await returned.wait()  # until something has been written, and is then copied
            for leaf in leaves.values():
                leaf[:] = -1

            await saves[0]
            found = await checkpointer.restore(tmp_path / "a")
            assert {name: set(leaf.tolist()) for name, leaf in found.items()} == {
                f"x{at}": {at} for at in range(10)
            }
            assert checkpointer.statistics().peak <= 2**20


class TestStates:
    """Each milestone can be awaited, polled, observed by a callback, and seen in the progress."""

    async def test_every_state_is_told_in_every_way(self, tmp_path: Path) -> None:
        gates = {name: gated(before=name)[0] for name in ("flatten", "device_to_host", "write", "commit")}
        pipeline = pipelines.save_pipeline()
        for name, gate in gates.items():
            pipeline = pipeline.insert_before(name, gate, called=f"before {name}")

        tree = {"x": np.zeros(100), "y": np.zeros(50)}
        called: list[str] = []
        async with Checkpointer() as checkpointer, create_task_group() as tasks:
            saves: list[penstock.SaveFuture] = []
            started = Event()

            async def save() -> None:
                saves.append(
                    await checkpointer.save(tmp_path / "a", tree, staging="overlap", pipeline=pipeline)
                )
                started.set()

            tasks.start_soon(save)
            await gates["flatten"].reached.wait()
            gates["flatten"].opened.set()
            await started.wait()
            future = saves[0]
            for milestone in Milestone:
                future.add_done_callback(
                    lambda found, at=milestone: called.append(at.name),  # type: ignore[misc]  # a default
                    milestone=milestone,
                )

            assert (future.milestone, future.status) == (Milestone.PLANNED, "planned")
            assert (future.progress.leaves_total, future.progress.bytes_total) == (2, 1200)
            await future.planned()
            gates["device_to_host"].opened.set()
            await future.staged()
            assert (future.status, future.progress.bytes_done, future.done) == ("staged", 0, False)
            gates["write"].opened.set()
            await future.written()
            assert (future.progress.leaves_done, future.progress.bytes_done) == (2, 1200)
            assert not (tmp_path / "a").exists()
            gates["commit"].opened.set()
            await future.committed()
            report = await future.finalized()
            assert (future.done, future.status, report.n_leaves) == (True, "finalized", 2)

        assert called == [milestone.name for milestone in Milestone]


@final
class Watched(StoreWrapper):
    """Wraps a store, and calls `look` after each of its operations."""

    def __init__(self, inner: Store, look: Callable[[str], None]) -> None:
        super().__init__(inner)
        self._look = look

    def call(self, operation: str, *given: Any, **options: Any) -> Any:
        answer = super().call(operation, *given, **options)
        self._look(operation)
        return WatchedFile(answer, self._look) if operation == "create_data_file" else answer


@final
class WatchedFile:
    """Wraps a file, and calls `look` after each of its operations."""

    def __init__(self, inner: DataFile, look: Callable[[str], None]) -> None:
        self._inner = inner
        self._look = look

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            answer = found(*arguments)
            self._look(name)
            return answer

        return call


class TestTwoSaves:
    async def test_overwriting_never_leaves_a_moment_without_a_good_checkpoint(self, tmp_path: Path) -> None:
        path, seen, lock = tmp_path / "a", list[tuple[str, int]](), threading.Lock()
        async with Checkpointer() as checkpointer:
            await (await checkpointer.save(path, {"x": np.full(5000, 1), "n": 1}))

        with ThreadPoolExecutor(1) as pool:

            def look(operation: str) -> None:
                with lock:
                    found = pool.submit(penstock.sync.restore, path).result()
                    assert set(found["x"].tolist()) == {found["n"]}
                    seen.append((operation, found["n"]))

            store = Watched(LocalStore(), look)
            async with Checkpointer(store=store) as checkpointer:
                await (await checkpointer.save(path, {"x": np.full(5000, 2), "n": 2}, overwrite=True))

        numbers = [number for _, number in seen]
        assert numbers == sorted(numbers)
        assert {1, 2} == set(numbers)
        assert {"write_at", "sync", "write_file", "discard"} <= {operation for operation, _ in seen}


async def test_reports_tell_waiting_for_memory_from_work(tmp_path: Path) -> None:
    tree = {name: np.arange(2**18, dtype=np.float32) for name in "abcdefgh"}  # 8 MiB, copied to be staged
    reports: list[RestoreReport] = []
    store = FaultyStore(LocalStore())
    hang = store.hang_on("data.write_at")  # or all might be written as fast as it is copied
    async with Checkpointer(
        store=store, memory_limit="2MiB", restore_concurrent_bytes="1MiB"
    ) as checkpointer:
        save = await checkpointer.save(tmp_path / "c", tree, staging="overlap")
        with fail_after(20):
            while not checkpointer.statistics().tasks_waiting:
                await checkpoint()

        hang.release()
        saved = await save
        await checkpointer.restore(tmp_path / "c", on_report=reports.append)

    waited = {stage.name: stage.memory_wait_s for stage in saved.stages}
    assert waited["device_to_host"] > 0
    assert waited["flatten"] == waited["write"] == waited["finalize"] == 0
    waited = {stage.name: stage.memory_wait_s for stage in reports[0].stages}
    assert waited["limit_bytes"] > 0
    assert waited["read"] == waited["assemble"] == 0
    assert stage_table(saved.stages) in str(saved)
    assert stage_table(reports[0].stages) in str(reports[0])
