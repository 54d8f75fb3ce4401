"""Late codecs in a job: each process encodes its part, and the parts become one checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from anyio import create_task_group
from tests.steps.job_of_managers import COUNT, each, opened
from tests.steps.joint_steps import (
    Options,
    check,
    check_whole,
    finished,
    killed,
    save,
    state,
    steps,
)

import penstock
from penstock import JobOptions, SaveFormat
from penstock.config import Config
from penstock.errors import SpecError
from penstock.handlers import LocalStore
from penstock.steps import Disk
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

ENCODED = "_PENSTOCK_ENCODED"
ZSTD = SaveFormat(codec="zstd:1")


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    """The disk of each process, on a machine of its own."""
    found = [tmp_path / f"disk of {name}" for name in "abcdefgh"[:COUNT]]
    for disk in found:
        disk.mkdir()

    return found


def on(disks: Sequence[Path], stores: Sequence[FaultyStore] | None = None, **more: Any) -> Options:
    """Return options for managers with a tier on a disk each; with stores, they encode by themselves."""

    def options(index: int) -> dict[str, Any]:
        job = JobOptions(local_root=os.fspath(disks[index]))
        given: dict[str, Any] = {"tiers": Disk(disks[index] / "run"), "config": Config(job=job)}
        if stores is not None:
            given["store"] = stores[index]

        return {**given, "save_format": ZSTD, **more}

    return options


def shared(tier: Path, **more: Any) -> Options:
    """Return options for managers with a tier that all of them see."""
    return lambda _: {"tiers": Disk(tier), "save_format": ZSTD, **more}


def new_stores() -> list[FaultyStore]:
    return [FaultyStore(LocalStore()) for _ in range(COUNT)]


async def codecs_of(step: Path, name: str = "['w']") -> set[str | None]:
    return {leaf.codec for leaf in (await penstock.metadata(step)).leaves if name in leaf.key_path}


def left_behind(*places: Path) -> list[Path]:
    return [path for place in places for path in place.glob(f"{ENCODED}*")]


async def test_parts_are_kept_plain_and_encoded_on_their_way_to_the_root(
    disks: list[Path], tmp_path: Path
) -> None:
    root, stores = tmp_path / "bucket", new_stores()
    async with opened(root, on(disks, stores)) as managers:
        await finished(managers, 1, 2)
        await check(managers, 2)

    for disk in disks:
        assert await codecs_of(disk / "run/2") == {None}
        assert steps(disk / "run") == [1, 2]

    assert left_behind(*[disk / "run" for disk in disks]) == []
    for step in (1, 2):
        assert await codecs_of(root / f"{step}") == {"zstd:1"}
        await check_whole(root / f"{step}", step)

    assert all(store.open_files == 0 for store in stores)


async def test_orbax_restores_what_the_parts_have_become(disks: list[Path], tmp_path: Path) -> None:
    root = tmp_path / "bucket"
    async with opened(root, on(disks, new_stores())) as managers:
        await finished(managers, 1)

    with ocp.CheckpointManager(root) as theirs:
        found = theirs.restore(1, args=ocp.args.StandardRestore())

    np.testing.assert_array_equal(found["w"], state(1, 0)["w"])
    for index in range(COUNT):
        own = found["own"][f"process_{index}-of-{COUNT}"]
        np.testing.assert_array_equal(own["p"], state(1, index)["own"].value["p"])


async def test_other_processes_encode_if_they_can_reach_the_stores(disks: list[Path], tmp_path: Path) -> None:
    root = tmp_path / "bucket"
    async with opened(root, on(disks)) as managers:
        await finished(managers, 1)

    assert await codecs_of(root / "1") == {"zstd:1"}
    await check_whole(root / "1", 1)


async def test_of_a_tier_that_all_see_each_encodes_a_share(tmp_path: Path) -> None:
    root, tier, stores = tmp_path / "bucket", tmp_path / "lustre", new_stores()
    by_number = {index: {**shared(tier)(index), "store": stores[index]} for index in range(COUNT)}
    async with opened(root, by_number.__getitem__) as managers:
        await finished(managers, 1, 2)
        await check(managers, 2)

    assert await codecs_of(tier / "2") == {None}
    assert await codecs_of(root / "2") == {"zstd:1"}
    assert left_behind(tier) == []
    await check_whole(root / "2", 2)


@pytest.mark.parametrize("is_shared", [False, True], ids=["disks", "shared"])
async def test_a_job_that_is_opened_again_knows_the_steps_that_it_encoded(
    is_shared: bool, disks: list[Path], tmp_path: Path
) -> None:
    root, stores = tmp_path / "bucket", new_stores()
    options = shared(tmp_path / "lustre") if is_shared else on(disks)
    async with opened(root, lambda index: {**options(index), "store": stores[index]}) as managers:
        await finished(managers, 1)

    before = sorted((path, path.stat().st_mtime_ns) for path in (root / "1").rglob("*"))
    async with opened(root, lambda index: {**options(index), "store": stores[index]}) as managers:
        await each(managers, lambda manager: manager.wait())

    assert sorted((path, path.stat().st_mtime_ns) for path in (root / "1").rglob("*")) == before


async def test_a_tier_on_disks_may_have_the_codec_and_hand_its_parts_on(
    disks: list[Path], tmp_path: Path
) -> None:
    root = tmp_path / "bucket"

    def options(index: int) -> dict[str, Any]:
        tiers = [Disk(disks[index] / "fast"), Disk(disks[index] / "run", codec="zstd:1")]
        return {**on(disks)(index), "tiers": tiers, "store": LocalStore()}

    async with opened(root, options) as managers:
        await finished(managers, 1)
        await check(managers, 1)

    for disk in disks:
        assert await codecs_of(disk / "fast/1") == {None}
        assert await codecs_of(disk / "run/1") == {"zstd:1"}

    await check_whole(root / "1", 1)
    async with opened(
        root, lambda index: {**options(index), "tiers": options(index)["tiers"][1:]}
    ) as managers:
        await check(managers, 1)  # from the parts with the codec


async def test_each_level_may_have_a_codec_of_its_own(disks: list[Path], tmp_path: Path) -> None:
    """Steps are encoded from one tier for two levels at a time."""
    root = tmp_path / "bucket"

    def options(index: int) -> dict[str, Any]:
        tiers = [Disk(disks[index] / "fast"), Disk(disks[index] / "run", codec="floats")]
        return {**on(disks)(index), "tiers": tiers, "store": LocalStore()}

    async with opened(root, options) as managers:
        for step in (1, 2, 3):
            for future in await save(managers, step):
                await future.kept()

        await each(managers, lambda manager: manager.wait())

    assert await codecs_of(disks[0] / "run/3") not in ({None}, {"zstd:1"})
    assert await codecs_of(root / "3") == {"zstd:1"}
    assert left_behind(*[disk / "fast" for disk in disks]) == []
    await check_whole(root / "3", 3)


@pytest.mark.parametrize("fails", range(COUNT))
async def test_what_one_process_cannot_encode_all_copy_as_it_is(
    fails: int, disks: list[Path], tmp_path: Path
) -> None:
    root, stores = tmp_path / "bucket", new_stores()
    stores[fails].fail_on("begin_build", 2)  # the first one is that of the save, the third of the copy
    async with opened(root, on(disks, stores)) as managers:
        await finished(managers, 1, 2)

    assert await codecs_of(root / "1") == {None}
    assert await codecs_of(root / "2") == {"zstd:1"}
    assert left_behind(*[disk / "run" for disk in disks]) == []
    for step in (1, 2):
        await check_whole(root / f"{step}", step)


async def test_what_a_killed_job_had_encoded_is_removed_by_the_next(
    disks: list[Path], tmp_path: Path
) -> None:
    root, stores = tmp_path / "bucket", new_stores()
    hangs = [store.hang_on("create_long_file") for store in stores]
    async with create_task_group() as tasks, killed(root, on(disks, stores)) as managers:
        for future in await save(managers, 1):
            await future.kept()

        for hang in hangs:
            await hang.wait_reached()

        for hang in hangs:
            tasks.start_soon(_release, hang)

    for disk in disks:  # which a process that dies has no time to remove
        (disk / "run" / f"{ENCODED}-1-0" / "7").mkdir(parents=True)

    async with opened(root, on(disks, new_stores())) as managers:
        await each(managers, lambda manager: manager.wait())

    assert left_behind(*[disk / "run" for disk in disks]) == []
    assert await codecs_of(root / "1") == {"zstd:1"}
    await check_whole(root / "1", 1)


async def _release(hang: Any) -> None:
    hang.release()


async def test_a_job_that_chooses_codecs_saves_them_at_once(disks: list[Path], tmp_path: Path) -> None:
    """Processes that encode apart from each other would not come to the same choice."""
    root, auto = tmp_path / "bucket", SaveFormat(codec="auto")
    async with opened(root, on(disks, new_stores(), save_format=auto)) as managers:
        await finished(managers, 1)

    found = await codecs_of(root / "1")
    assert found == await codecs_of(disks[0] / "run/1")
    assert found != {None}
    await check_whole(root / "1", 1)
    tiers = Disk(disks[0] / "run", codec="zstd")
    with pytest.RaisesGroup(*[SpecError] * COUNT):
        async with opened(root, on(disks, save_format=auto, tiers=tiers)):
            pass
