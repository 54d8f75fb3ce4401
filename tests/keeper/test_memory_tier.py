"""The tier in memory: what a killed training finds again, and what a lost keeper costs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from anyio import to_thread
from tests.keeper.conftest import RunningKeeper, Start
from tests.object_server import BUCKET, CREDENTIALS, object_server

import penstock
from penstock.errors import SpecError
from penstock.handlers import LocalStore
from penstock.handlers.formats.orbax.file_names import ENCODED, TIER
from penstock.handlers.stores.keeper.messages import StatusAnswer, TakeOver
from penstock.handlers.stores.publishing.writer_hold import WRITER
from penstock.keeper import tree
from penstock.keeper.finishing import Finishers
from penstock.steps import CheckpointManager, Disk, Memory
from penstock.testing import FaultyStore

pytestmark = [pytest.mark.process, pytest.mark.timeout(240), pytest.mark.anyio]

AssertSame = Callable[[Any, Any], None]


def state(fill: int) -> dict[str, Any]:
    return {"w": np.full(300_000, fill, np.float32), "n": fill}


@pytest.fixture
def keeper(start: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningKeeper]:
    """The keeper that the configuration names."""
    keeper = start()
    monkeypatch.setenv("PENSTOCK_STORE__KEEPER__SOCKET", keeper.socket)
    yield keeper
    keeper.send(signal.SIGCONT)


def steps(root: Path) -> list[int]:
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdigit())


async def begin(manager: CheckpointManager, step: int) -> penstock.SaveFuture:
    save = await manager.save(step, state(step))
    assert save is not None
    return save


async def test_a_step_is_kept_in_memory_and_then_in_the_root(
    keeper: RunningKeeper, tmp_path: Path, assert_same: AssertSame
) -> None:
    root = tmp_path / "run"
    async with CheckpointManager(root, tiers="memory") as manager:
        for step in (1, 2, 3):
            save = await begin(manager, step)
            await save.kept()
            report = await save

        assert report.path == str(root / "3")
        assert_same(await manager.restore(3, mmap=True, verify=True), state(3))
        await manager.wait()

    status = keeper.store().status()
    assert [step.path for step in status.steps] == [f"local{root}/{step}" for step in (2, 3)]
    assert steps(root) == [1, 2, 3]
    keeper.store().stop()  # all of it is elsewhere


async def until_ready(keeper: RunningKeeper, nbytes: int) -> StatusAnswer:
    """Return the status once so many bytes are ready."""
    while True:
        status = await to_thread.run_sync(keeper.store().status)
        if status.pool_bytes >= nbytes:
            return status


async def test_the_first_step_goes_into_pages_that_were_made_when_the_manager_was_opened(
    keeper: RunningKeeper, tmp_path: Path, assert_same: AssertSame
) -> None:
    async with CheckpointManager(tmp_path / "run", tiers=Memory(step_bytes="1172KiB")) as manager:
        fresh = (await until_ready(keeper, 1_200_000)).fresh_bytes
        await (await begin(manager, 1)).kept()
        assert keeper.store().status().reused_bytes == fresh
        assert_same(await manager.restore(1, verify=True), state(1))


async def test_a_new_keeper_makes_as_many_pages_ready_as_the_newest_step_in_the_root_has(
    keeper: RunningKeeper, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with CheckpointManager(tmp_path / "run", tiers=Memory()) as manager:
        await begin(manager, 1)

    new = start()
    monkeypatch.setenv("PENSTOCK_STORE__KEEPER__SOCKET", new.socket)
    async with CheckpointManager(tmp_path / "run", tiers=Memory()) as manager:
        await until_ready(new, 1_200_000)
        await (await begin(manager, 2)).kept()

    assert new.store().status().reused_bytes >= 1_200_000


async def test_a_manager_is_opened_whatever_is_wrong_with_the_newest_step_in_the_root(
    keeper: RunningKeeper, tmp_path: Path
) -> None:
    """As where what a killed job has left in a step is being removed."""
    async with CheckpointManager(tmp_path / "run") as manager:
        await begin(manager, 1)

    (tmp_path / "run" / "1" / "gone").symlink_to(tmp_path / "nothing")
    async with CheckpointManager(tmp_path / "run", tiers=Memory()) as manager:
        await (await begin(manager, 2)).kept()


async def test_a_keeper_that_can_make_no_more_pages_takes_the_steps_that_fit(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = start(limit_bytes=6 * 2**20)
    monkeypatch.setenv("PENSTOCK_STORE__KEEPER__SOCKET", small.socket)
    async with CheckpointManager(tmp_path / "run", tiers=Memory(step_bytes=2**40)) as manager:
        for step in (1, 2, 3):
            await (await begin(manager, step)).kept()

    assert small.store().status().kept_bytes >= 2_400_000


@pytest.mark.parametrize("step_bytes", [0, -1, "many", True])
def test_a_step_of_no_possible_length_is_refused(step_bytes: Any) -> None:
    with pytest.raises(SpecError, match="step_bytes of a tier in memory"):
        Memory(step_bytes=step_bytes)


TRAINING = """
import anyio, sys
import numpy as np
from penstock.steps import CheckpointManager, Memory
from penstock.handlers import LocalStore

async def train(root):
    async with CheckpointManager(root, tiers=Memory(keep=2)) as manager:
        for step in range((manager.latest_step() or 0) + 1, 1000):
            state = {"w": np.full(300_000, step, np.float32), "n": step}
            await (await manager.save(step, state)).kept()
            print(step, flush=True)

anyio.run(train, sys.argv[1])
"""


def killed_after(
    n_kept: int, *arguments: Path | str, script: str = TRAINING, environ: Mapping[str, str] = os.environ
) -> int:
    """Train until so many steps were kept, and kill the training; return the last that it called kept."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as training:
        assert training.stdout is not None
        kept = next(step for line in training.stdout if (step := int(line)) == n_kept)
        training.kill()
        return max([kept, *map(int, training.stdout.read().split())])


async def test_a_killed_training_loses_no_step_that_was_kept(
    keeper: RunningKeeper, tmp_path: Path, assert_same: AssertSame
) -> None:
    root = tmp_path / "run"
    kept = killed_after(5, root)
    async with CheckpointManager(root, tiers="memory") as manager:
        latest = manager.latest_step()
        assert latest in (kept, kept + 1)  # the last one may have been kept, and not told
        assert_same(await manager.restore(), state(latest))
        await manager.wait()

    assert steps(root)[-1] == latest


async def test_a_keeper_finishes_the_saves_of_a_killed_training(
    keeper: RunningKeeper, tmp_path: Path, assert_same: AssertSame
) -> None:
    root = tmp_path / "run"
    kept = killed_after(3, root)
    async for step in penstock.watch(root, timeout_s=100):
        if step >= kept:
            break

    async with CheckpointManager(root, read_only=True) as manager:
        latest = manager.latest_step()
        assert latest in (kept, kept + 1)
        assert_same(await manager.restore(), state(latest))


async def test_a_keeper_finishes_saves_with_the_codec_that_the_killed_training_had(
    keeper: RunningKeeper, tmp_path: Path, assert_same: AssertSame
) -> None:
    root, form = tmp_path / "run", "save_format=SaveFormat(codec='zstd:1')"
    script = f"from penstock import SaveFormat\n{TRAINING}".replace("tiers=", f"{form}, tiers=")
    kept = killed_after(3, root, script=script)
    async for step in penstock.watch(root, timeout_s=100):
        if step >= kept:
            break

    async with CheckpointManager(root, read_only=True, tiers=()) as manager:
        latest = manager.latest_step()
        assert latest in (kept, kept + 1)
        assert_same(await manager.restore(), state(latest))

    leaves = (await penstock.metadata(root / str(latest))).leaves
    assert {leaf.codec for leaf in leaves if leaf.nbytes > 100} == {"zstd:1"}
    async with CheckpointManager(root, tiers="memory") as manager:  # which knows that step
        await manager.wait()
        assert (await penstock.verify(root)).intact


TO_A_BUCKET = """
import anyio, sys
import numpy as np
from penstock import Config
from penstock.steps import CheckpointManager, Memory

async def train(root, endpoint):
    config = Config.load(arguments={"store": {"s3": {"endpoint": endpoint}}})
    async with CheckpointManager(root, tiers=Memory(keep=2), config=config) as manager:
        for step in range(1, 1000):
            await (await manager.save(step, {"n": step, "w": np.full(1000, step)})).kept()
            print(step, flush=True)

anyio.run(train, *sys.argv[1:])
"""


async def test_saves_are_finished_with_the_options_and_the_environment_of_the_training(
    keeper: RunningKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"s3://{BUCKET}/run"
    with object_server() as server:  # which neither the keeper's environment nor a file knows
        environ = {**os.environ, **CREDENTIALS}
        kept = killed_after(3, root, server.endpoint, script=TO_A_BUCKET, environ=environ)

        for name, value in {**CREDENTIALS, "PENSTOCK_STORE__S3__ENDPOINT": server.endpoint}.items():
            monkeypatch.setenv(name, value)
        step = 0
        async for step in penstock.watch(root, timeout_s=100, interval_s=0.2):  # the last one
            if step >= kept:
                break

        assert (await penstock.restore(f"{root}/{step}"))["n"] == step >= kept


async def test_a_new_training_is_not_kept_out_by_what_finishes_the_last_one(
    keeper: RunningKeeper, tmp_path: Path, assert_same: AssertSame
) -> None:
    root = tmp_path / "run"
    for n_kept in (2, 4, 6):  # each is killed, and the next one comes at once
        kept = killed_after(n_kept, root)
        async with CheckpointManager(root, tiers="memory") as manager:
            latest = manager.latest_step()
            assert latest in (kept, kept + 1)
            assert_same(await manager.restore(), state(latest))

    assert steps(root)[-1] == latest


@dataclass
class Owing:
    """Stands for the directories of a keeper that has a step which no other tier has."""

    n_asked: int = 0

    def owes(self, path: str) -> bool:
        self.n_asked += 1
        return True


@pytest.mark.parametrize("n_checkpoints", range(0, 12, 2))
async def test_what_finishes_saves_is_gone_when_another_manager_has_come_at_whichever_moment(
    n_checkpoints: int,
) -> None:
    """Also while its process is being started."""
    finishers = Finishers(cast("tree.Tree", Owing()), "/nowhere")
    before = children()
    async with anyio.create_task_group() as tasks:
        finishers.start("local/run", tasks)
        for _ in range(n_checkpoints):
            await anyio.lowlevel.checkpoint()

        await finishers.take_over(TakeOver("local/run", {}, "/"), os.getpid())
        assert children() == before


def children() -> set[str]:
    """Return the processes that this one, in any of its threads, has started."""
    return {child for task in Path("/proc/self/task").iterdir() for child in read_children(task)}


def read_children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:  # the thread has ended
        return []


def test_the_keeper_knows_the_names_that_managers_use() -> None:
    assert (tree.WRITER, tree.TIER_FILE, tree.ENCODED) == (WRITER, TIER, ENCODED)


async def test_a_lost_keeper_costs_no_save(
    keeper: RunningKeeper, tmp_path: Path, assert_same: AssertSame, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    async with CheckpointManager(root, tiers="memory") as manager:
        await (await begin(manager, 1))
        keeper.kill()
        await (await begin(manager, 2))
        assert_same(await manager.restore(1), state(1))  # from the root
        assert_same(await manager.restore(2), state(2))
        assert list(manager.all_steps()) == [1, 2]

    assert "step.tier_failed" in caplog.text
    assert steps(root) == [1, 2]


async def test_a_disk_between_takes_what_a_lost_keeper_cannot(keeper: RunningKeeper, tmp_path: Path) -> None:
    near, root = tmp_path / "near", tmp_path / "run"
    async with CheckpointManager(root, tiers=[Memory(), Disk(near)]) as manager:
        await (await begin(manager, 1))
        keeper.send(signal.SIGSTOP)
        keeper.kill()
        save = await begin(manager, 2)
        assert (await save).path == str(root / "2")

    assert steps(root) == steps(near) == [1, 2]


async def test_neither_a_lost_keeper_nor_a_disk_that_takes_nothing_keeps_a_step_from_the_root(
    keeper: RunningKeeper, tmp_path: Path
) -> None:
    near, root = tmp_path / "near", tmp_path / "run"
    async with CheckpointManager(root, tiers=[Memory(), Disk(near)]) as manager:
        await (await begin(manager, 1))
        shutil.rmtree(near)
        near.write_bytes(b"")
        keeper.send(signal.SIGSTOP)
        keeper.kill()
        save = await begin(manager, 2)
        await save.kept()  # where no memory and no disk keeps it, that is in the root
        assert (await save).path == str(root / "2")
        near.unlink()

    assert steps(root) == [1, 2]


async def test_without_a_keeper_the_manager_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PENSTOCK_STORE__KEEPER__SOCKET", "/proc/no-such-folder/keeper")
    async with CheckpointManager(tmp_path / "run", tiers="memory") as manager:
        await (await begin(manager, 1))

    assert "step.tier_absent" in caplog.text
    assert steps(tmp_path / "run") == [1]


async def test_memory_is_not_in_a_store_of_the_caller(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", tiers="memory", store=FaultyStore(LocalStore()))
    with pytest.raises(SpecError, match="leave out store="):
        await manager.__aenter__()
