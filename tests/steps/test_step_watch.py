"""Following a root: each step as it becomes durable."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import jax.numpy as jnp
import pytest

import penstock
from penstock.errors import SpecError, StorageError
from penstock.handlers import LocalStore
from penstock.steps import CheckpointManager, KeepLast, StepNames

pytestmark = pytest.mark.anyio


def publish(root: Path, *steps: int, name: str = "{}") -> None:
    for step in steps:
        folder = root / name.format(step)
        folder.mkdir(parents=True)
        (folder / "_CHECKPOINT_METADATA").write_bytes(b"{}")


async def collect(steps: AsyncIterator[int]) -> list[int]:
    return [step async for step in steps]


async def test_each_step_that_is_there_is_yielded_and_then_the_timeout_ends_it(tmp_path: Path) -> None:
    publish(tmp_path, 5, 10, 15)

    assert await collect(penstock.watch(tmp_path, timeout_s=0)) == [15]
    assert await collect(penstock.watch(tmp_path, after=-1, timeout_s=0)) == [5, 10, 15]
    assert await collect(penstock.watch(tmp_path, after=5, timeout_s=0)) == [10, 15]
    assert await collect(penstock.watch(tmp_path, after=5, latest_only=True, timeout_s=0)) == [15]
    assert await collect(penstock.watch(tmp_path, after=15, timeout_s=0.01, interval_s=0.001)) == []
    assert await collect(penstock.watch(tmp_path / "absent", timeout_s=0)) == []
    with pytest.raises(SpecError):
        penstock.watch(tmp_path, interval_s=0)


async def test_new_steps_come_as_they_are_published(tmp_path: Path) -> None:
    publish(tmp_path / "run", 1)
    seen: list[int] = []
    async for step in penstock.watch(tmp_path / "run", interval_s=0.001):
        seen.append(step)
        if step == 4:
            break

        publish(tmp_path / "run", step + 1)

    assert seen == [1, 2, 3, 4]


async def test_a_root_that_is_not_there_yet(tmp_path: Path) -> None:
    found: list[int] = []

    async def follow() -> None:
        found.extend(
            await collect(penstock.watch(tmp_path / "a" / "b", interval_s=0.001, until=lambda: done))
        )

    done = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        publish(tmp_path / "a" / "b", 7)
        while not found and not done:
            done = True

    assert found == [7]


async def test_a_stop_condition_is_asked_when_nothing_is_new(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2)
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        if len(asked) == 2:
            publish(tmp_path, 3)
        return len(asked) > 3

    assert await collect(penstock.watch(tmp_path, after=0, until=stop, interval_s=0.001)) == [1, 2, 3]


async def test_steps_that_are_overtaken_are_skipped_if_that_is_wanted(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    seen: list[int] = []
    async for step in penstock.watch(tmp_path, latest_only=True, timeout_s=0.01, interval_s=0.001):
        seen.append(step)
        if step == 1:
            publish(tmp_path, 2, 3, 4)

    assert seen == [1, 4]


async def test_a_step_cannot_be_deleted_while_the_body_of_the_loop_runs(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2)
    async with aclosing(penstock.watch(tmp_path, after=0, timeout_s=0)) as steps:
        async for step in steps:
            with pytest.raises(StorageError):
                LocalStore().hold(str(tmp_path / str(step)))

    for step in (1, 2):
        LocalStore().hold(str(tmp_path / str(step))).release()


async def test_unfinished_steps_are_not_yielded(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "_CHECKPOINT_METADATA").write_bytes(b'{"init_timestamp_nsecs": 1}')

    assert await collect(penstock.watch(tmp_path, after=0, timeout_s=0)) == [1]


async def test_steps_with_names_of_the_given_format_are_watched(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2, name="step_{:04}")

    names = StepNames("step", 4)
    assert await collect(penstock.watch(tmp_path, names=names, after=1, timeout_s=0)) == [2]


async def test_a_manager_that_watches_knows_what_it_saw(tmp_path: Path) -> None:
    async with (
        CheckpointManager(tmp_path, keep=KeepLast(1)) as trainer,
        CheckpointManager(tmp_path, read_only=True) as evaluator,
    ):
        seen: list[Any] = []

        async def follow() -> None:
            async for step in evaluator.watch(interval_s=0.001, until=lambda: bool(seen and seen[-1] == 4)):
                restored = await evaluator.restore(step)
                seen.append(restored["n"])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            for step in range(1, 5):
                await trainer.save(step, {"w": jnp.full(10, step), "n": step})
                while step not in seen:
                    await anyio.lowlevel.checkpoint()

        assert seen == [1, 2, 3, 4]
        assert evaluator.latest_step() == 4


async def test_cancelling_ends_the_wait(tmp_path: Path) -> None:
    with anyio.move_on_after(0.05) as scope:
        await collect(penstock.watch(tmp_path))

    assert scope.cancelled_caught


@pytest.mark.skipif(importlib.util.find_spec("watchfiles") is None, reason="needs watchfiles")
async def test_events_wake_the_watcher_long_before_the_interval(tmp_path: Path) -> None:
    program = """
import os, sys, time
time.sleep(1)
os.mkdir(sys.argv[1] + "/tmp"); open(sys.argv[1] + "/tmp/_METADATA", "w").close()
os.rename(sys.argv[1] + "/tmp", sys.argv[1] + "/7")
"""
    since = time.monotonic()
    command = [sys.executable, "-c", program, os.fspath(tmp_path)]
    with subprocess.Popen(command):  # noqa: ASYNC220  # it returns at once
        async for step in penstock.watch(tmp_path, interval_s=25):
            assert step == 7
            break

    assert time.monotonic() - since < 20
