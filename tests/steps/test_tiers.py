"""Tiers: steps are saved into the nearest, copied on to the root, and never lost on the way."""

from __future__ import annotations

import errno
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.abc import TaskGroup

import penstock
from penstock.config import Config, TierOptions
from penstock.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    OlderStepError,
    PathError,
    SaveCancelledError,
    SpecError,
    StepExistsError,
    StorageError,
)
from penstock.handlers import LocalStore
from penstock.steps import CheckpointManager, Disk, EverySteps, KeepLast, Never
from penstock.testing import FaultyStore, Hang

pytestmark = pytest.mark.anyio

AssertSame = Callable[[Any, Any], None]


def state(fill: int = 1) -> dict[str, Any]:
    return {"w": np.full((1 << 18,), fill, np.float32), "b": np.full(3, fill), "n": fill}


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    store = FaultyStore(LocalStore())
    yield store
    assert store.open_files == 0


class Paths:
    """A tier, a root, and how a manager over both is opened."""

    def __init__(self, folder: Path) -> None:
        self.tier, self.root = folder / "nvme" / "run", folder / "bucket" / "run"

    def open(self, store: FaultyStore | None = None, **options: Any) -> CheckpointManager:
        tier = {name: options.pop(name) for name in ("keep", "save_when") if name in options}
        options = {name.removeprefix("root_"): value for name, value in options.items()}
        return CheckpointManager(self.root, tiers=Disk(self.tier, **tier), store=store, **options)

    def steps(self) -> tuple[list[int], list[int]]:
        """The steps of the tier, and those of the root."""
        found = [
            sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
            for folder in (self.tier, self.root)
        ]
        return found[0], found[1]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path)


async def begin(manager: CheckpointManager, step: int, **options: Any) -> penstock.SaveFuture:
    save = await manager.save(step, state(step), **options)
    assert save is not None
    return save


async def release(hang: Hang) -> None:
    """Let a hanging operation go on, once all else waits for it."""
    await anyio.wait_all_tasks_blocked()
    hang.release()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_a_step_is_kept_in_the_tier_and_then_durable_in_the_root(
    paths: Paths, assert_same: AssertSame
) -> None:
    async with paths.open() as manager:
        save = await begin(manager, 3, metrics={"loss": 0.5})
        await save.kept()
        assert manager.latest_step() == 3
        assert paths.steps()[0] == [3]

        report = await save
        assert (report.path, save.path) == (str(paths.root / "3"), str(paths.root / "3"))
        assert report.staged_s <= report.kept_s <= report.durable_s
        assert report.superseded_by is None

    assert paths.steps() == ([3], [3])
    assert files(paths.tier / "3") == files(paths.root / "3")
    async with CheckpointManager(paths.root, read_only=True) as reader:
        assert_same(await reader.restore(), state(3))
        assert (await reader.metadata()).metrics == {"loss": 0.5}


async def test_a_step_that_is_kept_outlives_a_root_that_does_not_answer(
    paths: Paths, store: FaultyStore, assert_same: AssertSame
) -> None:
    hang = store.hang_on("create_long_file")
    async with paths.open(store) as manager:
        save = await begin(manager, 1)
        await save.kept()
        assert save.milestone is penstock.Milestone.KEPT
        assert not save.done
        assert_same(await manager.restore(), state(1))  # from the tier
        hang.release()
        await save

    assert paths.steps() == ([1], [1])


async def test_a_root_that_is_slower_than_saves_takes_the_newest(paths: Paths, store: FaultyStore) -> None:
    hang = store.hang_on("create_long_file")
    async with paths.open(store, keep=5) as manager:
        first = await begin(manager, 1)
        await first.kept()
        await hang.wait_reached()
        later = [await begin(manager, step) for step in (2, 3, 4)]
        for save in later:
            await save.kept()

        hang.release()
        reports = [await save for save in (first, *later)]

    newest = str(paths.root / "4")
    assert [report.superseded_by for report in reports] == [None, newest, newest, None]
    assert paths.steps() == ([1, 2, 3, 4], [1, 4])


async def test_a_tier_drops_no_step_that_is_still_to_be_copied(paths: Paths, store: FaultyStore) -> None:
    hang = store.hang_on("create_long_file")
    async with paths.open(store, keep=1) as manager:
        first = await begin(manager, 1)
        await first.kept()
        await hang.wait_reached()
        second = await begin(manager, 2)
        await second.kept()
        third = await begin(manager, 3)
        await third.kept()
        assert 1 in paths.steps()[0]  # it is being copied
        assert 3 in paths.steps()[0]  # it waits
        hang.release()
        await third
        await manager.wait()
        assert paths.steps() == ([3], [1, 3])


async def test_what_failed_is_tried_again_and_told_when_the_manager_is_left(
    paths: Paths, store: FaultyStore
) -> None:
    refused = StorageError("write", str(paths.root), "no route to host", errno.EHOSTUNREACH)
    store.fail_on("create_long_file", 1, refused)
    async with paths.open(store) as manager:
        save = await begin(manager, 1)
        await save.kept()
        with pytest.raises(StorageError, match="no route"):
            await manager.wait()

        await manager.wait()  # the second try
        assert (await save).superseded_by is None

    assert paths.steps() == ([1], [1])
    store.fail_on("create_long_file", 3, refused)
    store.fail_on("create_long_file", 4, refused)
    with pytest.raises(StorageError, match="no route"):
        async with paths.open(store) as manager:
            save = await begin(manager, 2)

    assert isinstance(save.exception(), StorageError)
    assert paths.steps() == ([1, 2], [1])


async def test_a_run_that_died_before_a_step_was_copied_goes_on_where_it_was(
    paths: Paths, store: FaultyStore, assert_same: AssertSame
) -> None:
    hang = store.hang_on("create_long_file")
    async with anyio.create_task_group() as tasks:
        save = await _killed(paths, store, hang, tasks)
        assert isinstance(save.exception(), SaveCancelledError)

    assert paths.steps() == ([7], [])
    async with paths.open() as manager:
        assert manager.latest_step() == 7
        assert_same(await manager.restore(), state(7))
        await manager.wait()
        assert paths.steps() == ([7], [7])

    async with paths.open() as manager:  # it knows its own result
        await manager.wait()
        with pytest.raises(StepExistsError):
            await manager.save(7, state(7))


async def _killed(paths: Paths, store: FaultyStore, hang: Hang, tasks: TaskGroup) -> penstock.SaveFuture:
    """Keep step 7, and fail while it is copied; return its save."""
    save: penstock.SaveFuture | None = None
    died, raised = RuntimeError("the training failed"), None
    try:
        async with paths.open(store) as manager:
            save = await begin(manager, 7)
            await save.kept()
            await hang.wait_reached()
            tasks.start_soon(release, hang)
            raise died
    except RuntimeError as error:
        raised = error

    assert raised is died
    assert save is not None
    return save


async def test_a_step_that_an_earlier_run_left_in_a_tier_is_named_with_it(
    paths: Paths, store: FaultyStore
) -> None:
    async with paths.open() as manager:
        await (await begin(manager, 7))

    shutil.rmtree(paths.root)  # to begin anew, and the tier was not thought of
    hang = store.hang_on("create_long_file")
    async with paths.open(store) as manager:
        with pytest.raises(
            OlderStepError, match=rf"the latest, 7 \(in the tier {str(paths.tier)!r}"
        ) as older:
            await manager.save(1, state(1))
        with pytest.raises(StepExistsError, match=r"step 7 exists \(in the tier") as exists:
            await manager.save(7, state(7))

        assert older.value.tier == exists.value.tier == str(paths.tier)
        await hang.wait_reached()
        hang.release()
        await manager.wait()
        with pytest.raises(OlderStepError, match="the latest, 7; pass"):  # the root has it, too
            await manager.save(1, state(1))


async def test_a_step_that_is_in_a_tier_alone_is_found_by_its_path_in_the_root(
    paths: Paths, assert_same: AssertSame
) -> None:
    async with paths.open(root_save_when=EverySteps(10)) as manager:
        for step in (10, 11):
            save = await manager.save(step, state(step))
            assert save is not None
            await save

    assert paths.steps() == ([10, 11], [10])
    assert_same(await penstock.restore(paths.root / "11"), state(11))
    assert_same(await penstock.restore(paths.root / "10"), state(10))
    assert_same(await penstock.restore(paths.root), state(11))
    assert (await penstock.metadata(paths.root / "11")).path == str(paths.tier / "11")
    async with penstock.Checkpointer() as checkpointer:
        with pytest.raises(NotACheckpointError, match=f"the run has tiers, where it may be: {paths.tier},"):
            await checkpointer.restore(paths.root / "11")
    with pytest.raises(NotACheckpointError, match="no such step"):
        await penstock.restore(paths.root / "12")


async def test_a_copy_of_a_root_has_none_of_its_tiers(paths: Paths, tmp_path: Path) -> None:
    async with paths.open(root_save_when=EverySteps(10)) as manager:
        for step in (10, 11):
            save = await manager.save(step, state(step))
            assert save is not None
            await save

    copy = tmp_path / "copy"
    shutil.copytree(paths.root, copy)
    assert (await penstock.restore(copy))["n"] == 10
    with pytest.raises(NotACheckpointError, match=r"the latest is 10\)$"):
        await penstock.restore(copy / "11")


async def test_each_tier_has_policies(paths: Paths) -> None:
    async with paths.open(save_when=EverySteps(2), keep=KeepLast(3), root_save_when=EverySteps(4)) as manager:
        saved = [step for step in range(1, 11) if await manager.save(step, state(step)) is not None]
        await manager.wait()

    assert saved == [2, 4, 6, 8, 10]
    assert paths.steps()[0] == [6, 8, 10]
    assert 8 in paths.steps()[1]
    assert set(paths.steps()[1]) <= {4, 8}


async def test_a_step_that_only_the_tier_wants_is_finalized_there(paths: Paths) -> None:
    async with paths.open(root_save_when=Never()) as manager:
        report = await (await begin(manager, 1))
        assert report.path == str(paths.tier / "1")
        await manager.wait()

    assert paths.steps() == ([1], [])


async def test_three_levels_each_get_the_steps(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("memory", "disk", "root")]
    tiers = [Disk(folders[0], keep=1), Disk(folders[1], keep=2)]
    async with CheckpointManager(folders[2], tiers=tiers, keep=3) as manager:
        for step in range(4):
            await (await begin(manager, step))

        await manager.wait()
        assert list(manager.all_steps()) == [1, 2, 3]

    there = [[int(path.name) for path in folder.iterdir() if path.name.isdigit()] for folder in folders]
    assert [sorted(steps) for steps in there] == [[3], [2, 3], [1, 2, 3]]


async def test_a_tier_that_fails_again_and_again_is_passed_by(
    tmp_path: Path, assert_same: AssertSame
) -> None:
    near, broken, root = tmp_path / "near", tmp_path / "broken", tmp_path / "bucket"

    def steps(folder: Path) -> list[str]:
        return sorted(path.name for path in folder.iterdir() if path.name.isdigit())

    async with CheckpointManager(root, tiers=[Disk(near), Disk(broken)]) as manager:
        shutil.rmtree(broken)
        broken.write_bytes(b"")  # as a disk that takes nothing any more
        save = await begin(manager, 1)
        await manager.wait()  # raises nothing: the step is where it is to be in the end
        report = await save
        assert report.path == str(root / "1")
        assert str(broken) not in report.promoted_s

        broken.unlink()
        await (await begin(manager, 2))
        assert steps(broken) == ["2"]

    assert steps(near) == steps(root) == ["1", "2"]
    async with CheckpointManager(root, read_only=True, tiers=()) as reader:
        assert_same(await reader.restore(1), state(1))


async def test_leaving_the_manager_waits_until_a_step_has_passed_a_tier_by(tmp_path: Path) -> None:
    near, broken, root = tmp_path / "near", tmp_path / "broken", tmp_path / "bucket"
    async with CheckpointManager(root, tiers=[Disk(near), Disk(broken)]) as manager:
        shutil.rmtree(broken)
        broken.write_bytes(b"")
        save = await begin(manager, 1)
        await save.kept()

    assert (await save).path == str(root / "1")


async def test_a_root_that_fails_is_not_passed_by(tmp_path: Path) -> None:
    near, broken, root = tmp_path / "near", tmp_path / "broken", tmp_path / "bucket"

    async with CheckpointManager(root, tiers=[Disk(near), Disk(broken)]) as manager:
        for folder in (broken, root):
            shutil.rmtree(folder)
            folder.write_bytes(b"")

        save = await begin(manager, 1)
        with pytest.raises(StorageError, match="bucket"):
            await manager.wait()

        save.cancel()

    with pytest.raises(SaveCancelledError):
        await save


async def test_a_step_that_is_damaged_in_the_tier_is_read_from_the_root_and_never_copied(
    paths: Paths, store: FaultyStore, assert_same: AssertSame
) -> None:
    async with paths.open(store) as manager:
        await (await begin(manager, 1))
        _flip(paths.tier / "1")
        assert_same(await manager.restore(1), state(1))
        hang = store.hang_on("create_long_file", 2)
        save = await begin(manager, 2)
        await save.kept()
        await hang.wait_reached()
        _flip(paths.tier / "2")
        hang.release()
        with pytest.raises(CorruptCheckpointError):
            await save

        with pytest.raises(CorruptCheckpointError):
            await manager.restore(2)

    assert paths.steps()[1] == [1]


def _flip(step: Path) -> None:
    """Flip a bit in the middle of the longest file of a step, which is that of the arrays."""
    file = max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    with file.open("r+b") as writing:
        writing.write(data)


async def test_an_overwritten_step_replaces_that_of_the_root(paths: Paths, assert_same: AssertSame) -> None:
    async with paths.open() as manager:
        await (await begin(manager, 1))
        save = await manager.save(1, state(9), overwrite=True)
        assert save is not None
        await save

    async with CheckpointManager(paths.root, read_only=True) as reader:
        assert_same(await reader.restore(1), state(9))


async def test_a_save_can_be_cancelled_after_it_was_kept(paths: Paths, store: FaultyStore) -> None:
    hang = store.hang_on("create_long_file")
    async with paths.open(store) as manager:
        save = await begin(manager, 1)
        await save.kept()
        await hang.wait_reached()
        save.cancel()
        await release(hang)
        with pytest.raises(SaveCancelledError):
            await save

        await manager.wait()

    assert paths.steps() == ([1], [])


async def test_a_step_is_deleted_wherever_it_is(paths: Paths, store: FaultyStore) -> None:
    async with paths.open(store) as manager:
        await (await begin(manager, 1))
        hang = store.hang_on("create_long_file", 2)
        save = await begin(manager, 2)
        await save.kept()
        await hang.wait_reached()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(release, hang)
            await manager.delete(2)

        with pytest.raises(NotACheckpointError):
            await save

        await manager.delete(1)
        assert list(manager.all_steps()) == []

    assert paths.steps() == ([], [])


async def test_a_tier_that_is_full_is_left_out(paths: Paths, store: FaultyStore) -> None:
    full = StorageError("mkdir", str(paths.tier), "no space left on device", errno.ENOSPC)
    async with paths.open(store) as manager:
        store.fail_on("check_writable", 1, full)
        first = await begin(manager, 1)
        second = await begin(manager, 2)
        assert (await first).path == str(paths.root / "1")
        await second

    assert paths.steps() == ([2], [1, 2])


async def test_a_tier_serves_one_root(paths: Paths, tmp_path: Path) -> None:
    async with paths.open() as manager:
        await (await begin(manager, 1))

    other = CheckpointManager(tmp_path / "another", tiers=Disk(paths.tier))
    with pytest.raises(PathError, match=f"is a tier of {paths.root}"):
        await other.__aenter__()

    found = json.loads((paths.tier / "_PENSTOCK_TIER.json").read_text())
    written = {
        "root": str(paths.root),
        "tiers": [str(paths.tier)],
        "names": [None, None],
        "host": socket.gethostname(),
    }
    assert found == written
    assert json.loads((paths.root / "_PENSTOCK_TIER.json").read_text()) == written


@pytest.mark.parametrize("tiers", [3, "disk", [3], ["/nvme"]])
def test_what_is_no_tier_is_refused(tiers: Any, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="tier"):
        CheckpointManager(tmp_path, tiers=tiers)


@pytest.mark.parametrize("where", ["", "inside", "../run"])
def test_tiers_and_root_are_apart(where: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="apart"):
        CheckpointManager(tmp_path / "run", tiers=Disk(tmp_path / "run" / where))


async def test_a_manager_that_is_given_no_tiers_has_those_of_its_configuration(paths: Paths) -> None:
    config = Config(tier=(TierOptions(path=str(paths.tier), keep_last=1, save_every=2),))
    async with CheckpointManager(paths.root, config=config, save_when=EverySteps(3)) as manager:
        for step in range(7):
            save = await manager.save(step, state(step))
            if save is not None:
                await save

    assert paths.steps() == ([6], [0, 3, 6])
    async with CheckpointManager(paths.root, config=config, tiers=()) as manager:
        await begin(manager, 9)

    assert paths.steps() == ([6], [0, 3, 6, 9])
