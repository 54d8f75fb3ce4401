"""Tiers of a job whose processes are tasks here: kept by all or by none, and brought to the root by all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, final

import numpy as np
import pytest
from anyio import create_task_group, fail_after, to_thread, wait_all_tasks_blocked
from tests.handlers.coordinators.test_joint_operation import Watched
from tests.object_server import BUCKET, CREDENTIALS, object_server
from tests.steps.job_of_managers import COUNT, each, opened
from tests.steps.joint_steps import (
    Options,
    check,
    check_whole,
    finished,
    killed,
    known,
    save,
    state,
    steps,
)

import penstock
from penstock import CheckpointManager, JobOptions, SaveFuture
from penstock.config import Config, StoreOptions
from penstock.errors import (
    CoordinationError,
    PeerFailedError,
    SaveCancelledError,
    SpecError,
    StorageError,
)
from penstock.handlers import LocalStore
from penstock.handlers.stores.buckets import S3Options
from penstock.kernel.protocols import KeyValues
from penstock.steps import Disk
from penstock.steps.tier_record import TierRecord, write_record
from penstock.testing import FaultyStore, Hang

pytestmark = pytest.mark.anyio


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    """The disk of each process, on a machine of its own: no two are called alike."""
    found = [tmp_path / f"disk of {name}" for name in "abcdefgh"[:COUNT]]
    for disk in found:
        disk.mkdir()

    return found


def on(disks: Sequence[Path], keep: int = 2, more: Options = lambda _: {}) -> Options:
    """Return options for managers that have a tier on a disk each, and one root."""

    def options(index: int) -> dict[str, Any]:
        job = JobOptions(local_root=os.fspath(disks[index]))
        tiers = Disk(disks[index] / "run", keep=keep)
        return {"tiers": tiers, "config": Config(job=job), **more(index)}

    return options


def shared(tier: Path, more: Options = lambda _: {}) -> Options:
    """Return options for managers with a tier that all of them see."""
    return lambda index: {"tiers": Disk(tier), **more(index)}


def flip(data: Path) -> None:
    """Change a bit of what its process alone has."""
    found = bytearray(data.read_bytes())
    found[found.index((5).to_bytes(8, "little") * 300) + 800] ^= 1
    data.write_bytes(found)


async def keep(root: Path, disks: Sequence[Path], *, durable: int, kept: int) -> None:
    """Save one step that comes to the root, and one that does not, since all are killed before."""
    async with opened(root, on(disks)) as managers:
        await finished(managers, durable)

    stores = [FaultyStore(LocalStore()) for _ in disks]
    hangs = [store.hang_on("create_long_file") for store in stores]

    async def release() -> None:
        await wait_all_tasks_blocked()  # all else is over
        for hang in hangs:
            hang.release()

    async with (
        create_task_group() as tasks,
        killed(root, on(disks, more=lambda index: {"store": stores[index]})) as managers,
    ):
        for future in await save(managers, kept):
            await future.kept()

        for hang in hangs:
            await hang.wait_reached()

        tasks.start_soon(release)

    assert [steps(disk / "run") for disk in disks] == [[durable, kept]] * COUNT
    assert steps(root) == [durable]


async def test_a_step_is_kept_on_all_disks_and_then_whole_in_the_root(
    disks: list[Path], tmp_path: Path
) -> None:
    root = tmp_path / "bucket"
    async with opened(root, on(disks)) as managers:
        futures = await save(managers, 1)
        for future in futures:
            await future.kept()

        assert [steps(disk / "run") for disk in disks] == [[1]] * COUNT
        reports = [await future for future in futures]
        assert [report.path for report in reports] == [str(root / "1")] * COUNT
        await finished(managers, 2, 3)
        await each(managers, lambda manager: manager.wait())
        assert known(managers) == [[1, 2, 3]] * COUNT
        await check(managers, 3)
        await check(managers, 1)  # in the root alone

    assert [steps(disk / "run") for disk in disks] == [[2, 3]] * COUNT
    assert steps(root) == [1, 2, 3]
    for step in (1, 2, 3):
        await check_whole(root / str(step), step)


async def test_a_tier_that_all_see_is_copied_by_all(tmp_path: Path) -> None:
    root, tier = tmp_path / "bucket", tmp_path / "lustre"
    stores = [FaultyStore(LocalStore()) for _ in range(COUNT)]
    async with opened(root, shared(tier, lambda index: {"store": stores[index]})) as managers:
        await finished(managers, 1, 2)
        await check(managers, 2)

    assert steps(tier) == steps(root) == [1, 2]
    for step in (1, 2):
        await check_whole(root / str(step), step)
    for store in stores:
        written = [str(call.path) for call in store.operations if call.name == "create_long_file"]
        assert any(str(root) in path for path in written)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("operation", ["data.sync", "publish"])
@pytest.mark.parametrize("who", [0, COUNT - 1])
async def test_what_one_process_cannot_keep_is_kept_by_none(
    disks: list[Path], tmp_path: Path, operation: str, who: int
) -> None:
    stores = [FaultyStore(LocalStore()) for _ in disks]
    root = tmp_path / "bucket"
    async with opened(root, on(disks, more=lambda index: {"store": stores[index]})) as managers:
        await finished(managers, 1)
        await each(managers, lambda manager: manager.wait())
        n_before = len([call for call in stores[who].operations if call.name == operation])
        stores[who].fail_on(operation, n_before + 1)

        async def fail(manager: CheckpointManager) -> BaseException:
            with pytest.raises((StorageError, PeerFailedError)) as failed:  # noqa: PT012  # whichever hears of it when
                future = await manager.save(2, state(2, managers.index(manager)))
                assert future is not None
                await future.kept()

            return failed.value

        told = await each(managers, fail)
        assert isinstance(told.pop(who), StorageError)
        assert {type(error) for error in told} == {PeerFailedError}
        assert known(managers) == [[1]] * COUNT
        assert [steps(disk / "run") for disk in disks] == [[1]] * COUNT
        await finished(managers, 2, 3)
        await check(managers, 3)

    assert [steps(disk / "run") for disk in disks] == [[2, 3]] * COUNT
    await check_whole(root / "2", 2)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("operation", "who"),
    [
        *[(operation, who) for operation in ("create_long_file", "data.sync") for who in (0, COUNT - 1)],
        ("write_file", 0),
        ("publish", 0),
    ],
)
async def test_a_copy_that_one_process_cannot_make_is_made_by_all_later(
    disks: list[Path], tmp_path: Path, operation: str, who: int
) -> None:
    root = tmp_path / "bucket"
    stores = [FaultyStore(LocalStore()) for _ in disks]
    refused = StorageError("write", str(root), "no route to host", errno.EHOSTUNREACH)
    fails_there = [operation == "create_long_file" and index == who for index in range(COUNT)]
    hangs = [
        store.hang_on("create_long_file", then=refused if fails else None)
        for store, fails in zip(stores, fails_there, strict=True)
    ]
    async with opened(root, on(disks, more=lambda index: {"store": stores[index]})) as managers:
        futures = await save(managers, 1)
        for hang in hangs:
            await hang.wait_reached()

        if operation != "create_long_file":
            called = [call.name for call in stores[who].operations]
            stores[who].fail_on(operation, called.count(operation) + 1, refused)
        for hang in hangs:
            hang.release()

        async def wait(manager: CheckpointManager) -> BaseException:
            with pytest.raises((StorageError, PeerFailedError)) as failed:
                await manager.wait()

            return failed.value

        told = await each(managers, wait)
        assert told[who] is refused or isinstance(told[who], StorageError)
        assert not (root / "1").exists()
        assert [await future for future in futures]  # the second try
        await check(managers, 1)

    await check_whole(root / "1", 1)
    assert [name for name in os.listdir(root) if name.startswith("1.")] == []


@pytest.mark.parametrize("who", [0, COUNT - 1])
async def test_a_tier_that_fails_again_and_again_in_one_process_is_passed_by_in_all(
    disks: list[Path], tmp_path: Path, who: int
) -> None:
    root, broken = tmp_path / "bucket", disks[who] / "second"

    def options(index: int) -> dict[str, Any]:
        tiers = [Disk(disks[index] / "run", keep=3), Disk(disks[index] / "second", keep=3)]
        return {**on(disks)(index), "tiers": tiers}

    async with opened(root, options) as managers:
        shutil.rmtree(broken)
        broken.write_bytes(b"")
        futures = await save(managers, 1)
        await each(managers, lambda manager: manager.wait())
        assert [(await future).path for future in futures] == [str(root / "1")] * COUNT
        broken.unlink()
        await finished(managers, 2)
        await check(managers, 2)

    assert [steps(disk / "second") for disk in disks] == [[2]] * COUNT
    for step in (1, 2):
        await check_whole(root / str(step), step)


def hang_first_copy(disks: Sequence[Path]) -> tuple[Options, list[Hang]]:
    """Return options for managers whose first copy to the root hangs in each process."""
    stores = [FaultyStore(LocalStore()) for _ in disks]
    hangs = [store.hang_on("create_long_file") for store in stores]
    return on(disks, keep=5, more=lambda index: {"store": stores[index]}), hangs


async def test_a_root_that_is_slow_takes_the_newest_step_of_all(disks: list[Path], tmp_path: Path) -> None:
    root = tmp_path / "bucket"
    options, hangs = hang_first_copy(disks)
    async with opened(root, options) as managers:
        futures = await save(managers, 1)
        for hang in hangs:
            await hang.wait_reached()

        for step in (2, 3, 4):
            later = await save(managers, step)
            for future in later:
                await future.kept()

            futures += later

        for hang in hangs:
            hang.release()

        reports = [await future for future in futures]

    newest = str(root / "4")
    superseded = [[report.superseded_by for report in reports[at::COUNT]] for at in range(COUNT)]
    assert superseded == [[None, newest, newest, None]] * COUNT
    assert steps(root) == [1, 4]
    await check_whole(root / "4", 4)


@final
class DisturbedKeyValues(Watched):
    """The service as one process sees it: the first call about one key is late, or fails.

    Args:
        service: The service itself.
        about: What is in that key.
        fails: Whether it fails; otherwise it waits for `go_on`.
    """

    def __init__(self, service: KeyValues, about: str, *, fails: bool = False) -> None:
        super().__init__(service, "no key has this")
        self.about, self._fails = about, fails
        self.reached, self._going = Event(), Event()

    def go_on(self) -> None:
        self._going.set()

    def put(self, key: str, value: bytes, replace: bool, /) -> bool:
        self._disturb(key)
        return super().put(key, value, replace)

    def wait(self, key: str, timeout_s: float, /) -> bytes | None:
        self._disturb(key)
        return super().wait(key, timeout_s)

    def _disturb(self, key: str) -> None:
        if self.about not in key or self.reached.is_set():
            return

        self.reached.set()
        if self._fails:
            raise CoordinationError("the service is away for a moment")

        assert self._going.wait(20)


async def test_a_step_that_is_kept_while_the_others_hear_of_the_one_before_waits_its_turn(
    disks: list[Path], tmp_path: Path
) -> None:
    late: list[DisturbedKeyValues] = []

    def seen(index: int, service: KeyValues) -> KeyValues:
        if index:
            return service

        late.append(DisturbedKeyValues(service, "promote 1/1"))
        return late[0]

    with fail_after(20):
        async with opened(tmp_path / "bucket", on(disks, keep=5), seen=seen) as managers:
            futures = await save(managers, 1)
            await to_thread.run_sync(late[0].reached.wait)
            later = await save(managers, 2)
            for future in later:
                await future.kept()

            late[0].go_on()
            for future in (*futures, *later):
                await future

    assert steps(tmp_path / "bucket") == [1, 2]
    await check_whole(tmp_path / "bucket" / "2", 2)


async def test_a_step_that_is_saved_again_before_its_turn_is_known_by_its_save(
    disks: list[Path], tmp_path: Path
) -> None:
    """One process hears late that the later save is kept, when all others copy it already."""
    root, (options, hangs) = tmp_path / "bucket", hang_first_copy(disks)
    kept: list[DisturbedKeyValues] = []
    told: list[DisturbedKeyValues] = []

    def seen(index: int, service: KeyValues) -> KeyValues:
        if index != 1:
            return service

        kept.append(DisturbedKeyValues(service, "disturbed later"))
        told.append(DisturbedKeyValues(kept[0], "promote 2/1"))
        return told[0]

    async def again(manager: CheckpointManager) -> SaveFuture:
        found = await manager.save(1, {**state(1, managers.index(manager)), "n": 7}, overwrite=True)
        assert found is not None
        return found

    with fail_after(20):
        async with opened(root, options, seen=seen) as managers:
            futures = await save(managers, 0)
            for hang in hangs:
                await hang.wait_reached()

            older = await save(managers, 1)
            for future in older:
                await future.kept()

            kept[0].about = "/result"
            newer = await each(managers, again)
            await to_thread.run_sync(kept[0].reached.wait)
            for future in (newer[0], newer[2]):
                await future.kept()

            for hang in hangs:
                hang.release()

            await to_thread.run_sync(told[0].reached.wait)
            told[0].go_on()
            await wait_all_tasks_blocked()
            kept[0].go_on()
            for future in (*futures, *older, *newer):
                await future

    assert (await penstock.verify(root / "1")).intact
    assert (await penstock.restore(root / "1"))["n"] == 7


async def test_a_step_that_is_kept_after_a_newer_one_is_left_out_by_all_or_by_none(
    disks: list[Path], tmp_path: Path
) -> None:
    stores = [FaultyStore(LocalStore()) for _ in disks]
    hangs = [store.hang_on("create_data_file") for store in stores]
    late: list[DisturbedKeyValues] = []

    def seen(index: int, service: KeyValues) -> KeyValues:
        if not index:
            return service

        late.append(DisturbedKeyValues(service, "promote 1/1"))
        return late[-1]

    options = on(disks, keep=5, more=lambda index: {"store": stores[index]})
    with fail_after(20):
        async with opened(tmp_path / "bucket", options, seen=seen) as managers:
            older = await save(managers, 1)
            for hang in hangs:
                await hang.wait_reached()

            newer = await save(managers, 2)
            for each_late in late:
                await to_thread.run_sync(each_late.reached.wait)
            for hang in hangs:
                hang.release()
            for future in older:  # in the others before they hear that the newer one has its turn
                await future.kept()
            for each_late in late:
                each_late.go_on()
            for future in (*older, *newer):
                await future

    assert steps(tmp_path / "bucket") == [1, 2]


@pytest.mark.parametrize("process", [0, 1])
async def test_a_decision_that_one_process_does_not_hear_or_tell_is_asked_for_again(
    disks: list[Path], tmp_path: Path, process: int
) -> None:
    def seen(index: int, service: KeyValues) -> KeyValues:
        return DisturbedKeyValues(service, "promote 1/1", fails=True) if index == process else service

    with fail_after(20):
        async with opened(tmp_path / "bucket", on(disks, keep=5), seen=seen) as managers:
            await finished(managers, 1, 2)

    assert steps(tmp_path / "bucket") == [1, 2]


async def test_who_cancels_a_kept_step_waits_no_longer_and_the_others_get_it(
    disks: list[Path], tmp_path: Path
) -> None:
    root = tmp_path / "bucket"
    options, hangs = hang_first_copy(disks)
    async with opened(root, options) as managers:
        futures = await save(managers, 1)
        for hang in hangs:
            await hang.wait_reached()

        futures[1].cancel()
        with pytest.raises(SaveCancelledError):
            await futures[1]

        for hang in hangs:
            hang.release()
        for future in (futures[0], futures[2]):
            await future

        await finished(managers, 2)

    assert steps(root) == [1, 2]
    await check_whole(root / "1", 1)


async def test_a_step_that_is_overwritten_is_copied_anew(disks: list[Path], tmp_path: Path) -> None:
    root = tmp_path / "bucket"
    async with opened(root, on(disks)) as managers:
        await finished(managers, 1, 2)

        async def overwrite(manager: CheckpointManager) -> None:
            index = managers.index(manager)
            future = await manager.save(2, state(7, index), overwrite=True)
            assert future is not None
            await future

        await each(managers, overwrite)
        assert known(managers) == [[1, 2]] * COUNT

    await check_whole(root / "2", 7)
    async with opened(root, on(disks)) as managers:
        await each(managers, lambda manager: manager.wait())

    await check_whole(root / "2", 7)


async def test_a_step_that_is_deleted_is_gone_everywhere(disks: list[Path], tmp_path: Path) -> None:
    root = tmp_path / "bucket"
    async with opened(root, on(disks)) as managers:
        await finished(managers, 1, 2)
        await each(managers, lambda manager: manager.delete(1))
        assert known(managers) == [[2]] * COUNT
        await check(managers, 2)

    assert [steps(disk / "run") for disk in disks] == [[2]] * COUNT
    assert steps(root) == [2]


async def test_after_all_were_killed_the_newest_step_is_brought_to_the_root(
    disks: list[Path], tmp_path: Path
) -> None:
    root = tmp_path / "bucket"
    await keep(root, disks, durable=1, kept=5)
    async with opened(root, on(disks)) as managers:
        assert known(managers) == [[1, 5]] * COUNT
        await check(managers, 5)
        await each(managers, lambda manager: manager.wait())

    assert steps(root) == [1, 5]
    await check_whole(root / "5", 5)
    identity = os.stat(root / "5").st_ino
    async with opened(root, on(disks)) as managers:  # and it knows its own result
        await each(managers, lambda manager: manager.wait())

    assert os.stat(root / "5").st_ino == identity


async def test_processes_that_have_other_numbers_find_the_newest_step_in_the_root(
    disks: list[Path], tmp_path: Path
) -> None:
    root = tmp_path / "bucket"
    await keep(root, disks, durable=1, kept=5)
    moved = [*disks[1:], disks[0]]
    async with opened(root, on(moved)) as managers:
        assert known(managers) == [[1, 5]] * COUNT
        assert steps(root) == [1, 5]  # at once: none of them could restore its part where it is
        await check(managers, 5)
        await finished(managers, 6)
        await check(managers, 6)

    await check_whole(root / "5", 5)
    assert [steps(disk / "run") for disk in disks] == [[6]] * COUNT


async def test_parts_are_found_on_the_disks_of_other_processes_of_a_machine(tmp_path: Path) -> None:
    """A job comes back with its processes on other machines, so none finds its own part."""
    root, elsewhere = tmp_path / "bucket", tmp_path / "other"
    machines = [tmp_path / "a", tmp_path / "b"]
    own = [machines[0] / "p0", machines[0] / "p1", *[machines[1] / f"p{index}" for index in range(2, COUNT)]]
    moved = [machines[1] / "p0", *[machines[0] / f"p{index}" for index in range(1, COUNT)]]
    for disk in {*own, *moved}:
        disk.mkdir(parents=True)

    await keep(root, own, durable=1, kept=5)
    of_other_run = machines[0] / "p9" / "run"
    shutil.copytree(own[1] / "run", of_other_run)
    write_record(LocalStore(), str(of_other_run), TierRecord(str(elsewhere)))
    async with opened(root, on(moved)) as managers:
        assert known(managers) == [[1, 5]] * COUNT
        await check(managers, 5)

    await check_whole(root / "5", 5)
    assert [steps(disk / "run") for disk in own] == [[]] * COUNT, "what is in the root is of no use there"
    assert 5 in steps(of_other_run)


async def test_parts_on_disks_are_put_together_in_a_bucket(
    disks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)

    root = f"s3://{BUCKET}/run"
    with object_server() as server:

        def options(disks: Sequence[Path]) -> Options:
            store = StoreOptions(s3=S3Options(endpoint=server.endpoint))

            def of(index: int) -> dict[str, Any]:
                given = on(disks)(index)
                config = replace(given["config"], store=store)
                return {**given, "root": root, "config": config, "save_when": 4}  # 5 is on disks alone

            return of

        async with opened(Path(root), options(disks)) as managers:
            await finished(managers, 4, 5)

        async with opened(Path(root), options([*disks[1:], disks[0]])) as managers:
            assert known(managers) == [[4, 5]] * COUNT

        monkeypatch.setenv("PENSTOCK_STORE__S3__ENDPOINT", server.endpoint)
        found = await penstock.restore(f"{root}/5")

    for index in range(COUNT):
        own = found["own"][f"process_{index}-of-{COUNT}"]
        np.testing.assert_array_equal(own["p"], state(5, index)["own"].value["p"])


async def test_a_step_is_whole_over_all_tiers_together(disks: list[Path], tmp_path: Path) -> None:
    """One process has lost its near tier, and the others have lost the far one."""
    root = tmp_path / "bucket"

    def options(index: int) -> dict[str, Any]:
        tiers = [Disk(disks[index] / "near"), Disk(disks[index] / "far")]
        return {"tiers": tiers, "config": Config(job=JobOptions(local_root=os.fspath(disks[index])))}

    async with opened(root, options) as managers:
        await finished(managers, 1, 2)

    shutil.rmtree(root / "2")
    shutil.rmtree(disks[0] / "near" / "2")
    for disk in disks[1:]:
        shutil.rmtree(disk / "far" / "2")

    async with opened(root, options) as managers:
        assert known(managers) == [[1, 2]] * COUNT
        await check(managers, 2)

    await check_whole(root / "2", 2)


async def test_a_step_of_which_a_disk_is_lost_does_not_count(disks: list[Path], tmp_path: Path) -> None:
    root = tmp_path / "bucket"
    await keep(root, disks, durable=1, kept=5)
    shutil.rmtree(disks[1] / "run")
    async with opened(root, on(disks)) as managers:
        assert known(managers) == [[1]] * COUNT
        await check(managers, 1)
        await finished(managers, 5)  # the same number again, from where training went on
        await check(managers, 5)

    assert [steps(disk / "run") for disk in disks] == [[5]] * COUNT
    await check_whole(root / "5", 5)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("who", [0, COUNT - 1])
async def test_parts_of_which_one_is_damaged_are_not_put_together(
    disks: list[Path], tmp_path: Path, who: int
) -> None:
    root = tmp_path / "bucket"
    await keep(root, disks, durable=1, kept=5)
    (data,) = (disks[who] / "run" / "5" / "default").glob("ocdbt.process_*/d/*")
    flip(data)
    async with opened(root, on([*disks[1:], disks[0]])) as managers:
        assert known(managers) == [[1]] * COUNT
        await check(managers, 1)
        await finished(managers, 5)

    assert steps(root) == [1, 5]
    await check_whole(root / "5", 5)


async def test_a_part_that_is_damaged_where_it_is_is_read_from_the_root(
    disks: list[Path], tmp_path: Path
) -> None:
    root = tmp_path / "bucket"
    async with opened(root, on(disks)) as managers:
        await finished(managers, 5)

    (data,) = (disks[1] / "run" / "5" / "default").glob("ocdbt.process_*/d/*")
    flip(data)
    async with opened(root, on(disks)) as managers:
        await check(managers, 5)


async def test_a_part_is_no_step_of_a_process_alone(disks: list[Path], tmp_path: Path) -> None:
    root = tmp_path / "bucket"
    await keep(root, disks, durable=1, kept=5)
    async with CheckpointManager(root, tiers=Disk(disks[0] / "run")) as manager:
        assert list(manager.all_steps()) == [1]
        future = await manager.save(5, {"x": 1})
        assert future is not None
        await future
        assert await manager.restore() == {"x": 1}

    assert steps(root) == [1, 5]


async def test_what_all_see_cannot_come_before_disks_of_their_own(tmp_path: Path) -> None:
    job = JobOptions(local_root=os.fspath(tmp_path / "own"))
    tiers = (Disk(tmp_path / "shared"), Disk(tmp_path / "own" / "run"))
    with pytest.RaisesGroup(*[SpecError] * COUNT):
        async with opened(tmp_path / "run", lambda _: {"tiers": tiers, "config": Config(job=job)}):
            pass
