"""The tier in memory of a job of several processes, which are tasks here. The keepers are real."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.keeper.conftest import RunningKeeper, Start
from tests.steps.job_of_managers import COUNT, each, opened
from tests.steps.joint_steps import (
    Options,
    check,
    check_whole,
    finished,
    killed,
    known,
    save,
    steps,
)

from penstock import CheckpointManager, JobOptions
from penstock.cli import main
from penstock.config import Config, StoreOptions
from penstock.errors import PeerFailedError, StorageError
from penstock.handlers.stores.keeper.keeper_options import KeeperOptions
from penstock.steps import Disk, Memory

pytestmark = [pytest.mark.process, pytest.mark.timeout(240), pytest.mark.anyio]


def with_keepers(keepers: Sequence[RunningKeeper], **more: Any) -> Options:
    """Return options for managers whose hosts have these keepers; further processes are on the last."""

    def options(index: int) -> dict[str, Any]:
        socket = keepers[min(index, len(keepers) - 1)].socket
        config = Config(store=StoreOptions(keeper=KeeperOptions(socket=socket)))
        return {"tiers": Memory(), "config": config, **more}

    return options


@pytest.fixture
def keepers(start: Start) -> list[RunningKeeper]:
    """Two hosts: the first process is alone on one, the others share the other."""
    return [start(), start()]


def held(keeper: RunningKeeper) -> list[str]:
    return sorted(step.path for step in keeper.store().status().steps)


async def test_a_step_is_kept_in_the_keepers_of_all_hosts(
    keepers: list[RunningKeeper], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    async with opened(root, with_keepers(keepers)) as managers:
        await finished(managers, 1, 2, 3)
        await each(managers, lambda manager: manager.wait())
        await check(managers, 3)
        await check(managers, 1)  # in the root alone

    assert held(keepers[0]) == [f"process/0/local{root}/{step}" for step in (2, 3)]
    assert held(keepers[1]) == [
        f"process/{index}/local{root}/{step}" for index in range(1, COUNT) for step in (2, 3)
    ]
    for step in (1, 2, 3):
        await check_whole(root / str(step), step)
    for keeper in keepers:
        keeper.store().stop()  # all of it is elsewhere


async def killed_when_kept(root: Path, keepers: Sequence[RunningKeeper], step: int) -> None:
    """Save a step that comes to no root: that fails until all processes are killed."""
    root.parent.mkdir(exist_ok=True)
    async with killed(root, with_keepers(keepers)) as managers:
        root.rename(aside := root.with_name("aside"))
        root.write_text("in the way")
        for future in await save(managers, step):
            await future.kept()

    root.unlink()
    aside.rename(root)


@pytest.mark.parametrize("numbers", [pytest.param((0, 1, 2), marks=pytest.mark.slow), (2, 0, 1)])
async def test_after_all_were_killed_the_step_is_found_wherever_it_is(
    keepers: list[RunningKeeper], tmp_path: Path, numbers: tuple[int, ...]
) -> None:
    """Also if the processes have other numbers, and so those on a host find parts of others there."""
    root = tmp_path / "run"
    async with opened(root, with_keepers(keepers)) as managers:
        await finished(managers, 1)

    await killed_when_kept(root, keepers, 2)
    assert steps(root) == [1]
    options = with_keepers([*keepers, keepers[1]])
    async with opened(root, lambda index: options(numbers[index])) as managers:
        assert known(managers) == [[1, 2]] * COUNT
        await check(managers, 2)
        await finished(managers, 3)
        await each(managers, lambda manager: manager.wait())

    assert steps(root) == [1, 2, 3]
    await check_whole(root / "2", 2)
    await check_whole(root / "3", 3)


async def test_what_was_in_keepers_alone_is_lost_with_them_and_an_older_step_is_found(
    keepers: list[RunningKeeper], start: Start, tmp_path: Path
) -> None:
    """Also if one of them is left: its part alone is no step."""
    root = tmp_path / "run"
    async with opened(root, with_keepers(keepers)) as managers:
        await finished(managers, 1)

    await killed_when_kept(root, keepers, 2)
    keepers[0].kill()
    async with opened(root, with_keepers([start(), keepers[1]])) as managers:
        assert known(managers) == [[1]] * COUNT
        await check(managers, 1)
        await finished(managers, 2)
        await check(managers, 2)

    await check_whole(root / "2", 2)


async def test_one_process_alone_finds_what_several_have_left_on_its_host(
    start: Start, tmp_path: Path
) -> None:
    root, keeper = tmp_path / "run", start()
    await killed_when_kept(root, [keeper], 2)
    options = with_keepers([keeper])(0)
    async with CheckpointManager(root, **options) as manager:
        assert list(manager.all_steps()) == [2]

    await check_whole(root / "2", 2)
    assert held(keeper) == []


async def pulled(keeper: RunningKeeper, target: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run `penstock keeper pull` on the host of a keeper."""
    monkeypatch.setenv("PENSTOCK_STORE__KEEPER__SOCKET", keeper.socket)
    return await anyio.to_thread.run_sync(main, ["keeper", "pull", str(target)])


async def test_parts_of_a_job_are_pulled_as_one_checkpoint(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, keeper = tmp_path / "run", start()
    await killed_when_kept(root, [keeper], 2)

    assert await pulled(keeper, tmp_path / "safe", monkeypatch) == 0
    await check_whole(tmp_path / "safe" / "2", 2)


async def test_what_peers_have_sent_is_pulled_where_it_is(
    three_hosts: list[RunningKeeper],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = tmp_path / "run"
    await killed_with_peers(root, three_hosts, 2, peers=2)
    for lost in three_hosts[1:]:
        lost.kill()

    assert await pulled(three_hosts[0], tmp_path / "safe", monkeypatch) == 0
    await check_whole(tmp_path / "safe" / "2", 2)


async def test_a_keeper_that_has_not_all_parts_says_whose_it_lacks(
    keepers: list[RunningKeeper],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await killed_when_kept(tmp_path / "run", keepers, 2)

    assert await pulled(keepers[0], tmp_path / "safe", monkeypatch) == 1
    assert "has parts of step 2, but none of process 1, 2 of 3" in capsys.readouterr().err
    assert not (tmp_path / "safe").exists()


async def test_a_keeper_that_is_lost_between_saves_costs_the_job_none(
    keepers: list[RunningKeeper], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    async with opened(root, with_keepers(keepers)) as managers:
        await finished(managers, 1)
        await each(managers, lambda manager: manager.wait())
        keepers[1].kill()
        await finished(managers, 2, 3)
        assert known(managers) == [[1, 2, 3]] * COUNT
        for step in (1, 2, 3):
            await check(managers, step)

    assert "step.tier_failed" in caplog.text
    assert held(keepers[0]) == [f"process/0/local{root}/1"], "what the others could not keep is removed"
    for step in (1, 2, 3):
        await check_whole(root / str(step), step)


async def test_where_one_host_has_no_keeper_all_save_into_the_next_tier(
    keepers: list[RunningKeeper], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    options = with_keepers(keepers)

    def lacking(index: int) -> dict[str, Any]:
        if index:
            return options(index)

        socket = "/proc/no-such-folder/keeper"
        return {**options(index), "config": Config(store=StoreOptions(keeper=KeeperOptions(socket=socket)))}

    async with opened(root, lacking) as managers:
        await finished(managers, 1)

    assert caplog.text.count("step.tier_absent") == COUNT
    assert held(keepers[1]) == []
    await check_whole(root / "1", 1)


async def test_memory_then_own_disks_then_the_root(keepers: list[RunningKeeper], tmp_path: Path) -> None:
    root = tmp_path / "run"
    options = with_keepers(keepers)

    def tiers(index: int) -> dict[str, Any]:
        given, disk = options(index), tmp_path / f"disk{index}"
        config = Config(job=JobOptions(local_root=os.fspath(disk)), store=given["config"].store)
        return {"config": config, "tiers": [Memory(keep=1), Disk(disk / "run")]}

    async with opened(root, tiers) as managers:
        await finished(managers, 1, 2)
        await each(managers, lambda manager: manager.wait())

    assert [steps(tmp_path / f"disk{index}" / "run") for index in range(COUNT)] == [[1, 2]] * COUNT
    assert held(keepers[0]) == [f"process/0/local{root}/2"]
    keepers[0].kill()  # with all that it had
    keepers[1].kill()
    async with opened(root, tiers) as managers:
        await check(managers, 2)

    await check_whole(root / "2", 2)


@pytest.fixture
def three_hosts(start: Start) -> list[RunningKeeper]:
    return [start() for _ in range(COUNT)]


async def killed_with_peers(root: Path, keepers: Sequence[RunningKeeper], step: int, peers: int = 1) -> None:
    """Save a step that comes to no root, but to other hosts."""

    async def wait(manager: CheckpointManager) -> None:
        with pytest.raises((StorageError, PeerFailedError)):  # that it does not come to the root
            await manager.wait()

    root.mkdir(exist_ok=True)
    async with killed(root, with_keepers(keepers, tiers=Memory(peers=peers))) as managers:
        root.rename(aside := root.with_name("aside"))
        root.write_text("in the way")
        for earlier in (step - 1, step):
            for future in await save(managers, earlier):
                await future.kept()

            await each(managers, wait)

    root.unlink()
    aside.rename(root)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("lost", range(COUNT))
async def test_a_lost_host_costs_no_step_that_its_peer_has(
    three_hosts: list[RunningKeeper], start: Start, tmp_path: Path, lost: int
) -> None:
    root = tmp_path / "run"
    await killed_with_peers(root, three_hosts, 2)
    peer = (lost + 1) % COUNT
    assert held(three_hosts[peer]) == sorted(
        [f"process/{index}/local{root}/{step}" for index in (lost, peer) for step in (1, 2)]
    )
    three_hosts[lost].kill()
    keepers = [keeper if index != lost else start() for index, keeper in enumerate(three_hosts)]
    async with opened(root, with_keepers(keepers, tiers=Memory(peers=1))) as managers:
        assert known(managers) == [[2]] * COUNT
        await check(managers, 2)
        await finished(managers, 3)
        await each(managers, lambda manager: manager.wait())

    await check_whole(root / "2", 2)
    await check_whole(root / "3", 3)


async def test_a_peer_that_does_not_answer_costs_nothing(
    three_hosts: list[RunningKeeper], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    async with opened(root, with_keepers(three_hosts, tiers=Memory(peers=2))) as managers:
        await finished(managers, 1)
        await each(managers, lambda manager: manager.wait())
        for copies in managers[1]._saves._peers.values():
            copies._token = b"of another job"

        await finished(managers, 2)
        await each(managers, lambda manager: manager.wait())

    await check_whole(root / "2", 2)
    assert "step.peer_refused" in caplog.text
    assert "step.peer_failed" in caplog.text
    assert [path for path in held(three_hosts[0]) if path.endswith("/2")] == [
        f"process/{index}/local{root}/2" for index in (0, 2)
    ]


async def test_the_last_step_that_all_have_sent_stays_with_the_peers_until_all_have_sent_a_newer_one(
    three_hosts: list[RunningKeeper], tmp_path: Path
) -> None:
    """A host that is lost meanwhile takes the parts of several processes with it."""
    root = tmp_path / "run"
    at_peer = f"process/2/local{root}/"  # of the last process, in the keeper of the first

    def there() -> list[int]:
        return sorted(int(path.removeprefix(at_peer)) for path in held(three_hosts[0]) if at_peer in path)

    async with opened(root, with_keepers(three_hosts, tiers=Memory(peers=1))) as managers:

        async def saved(step: int) -> None:
            await finished(managers, step)
            await each(managers, lambda manager: manager.wait())

        await saved(1)
        (copies,) = managers[1]._saves._peers.values()
        token, copies._token = copies._token, b"of another job"
        await saved(2)
        assert there() == [1, 2]
        await saved(3)
        assert there() == [1, 3]
        copies._token = token
        await saved(4)
        assert there() == [1, 4], "that all have sent it is known at the next one"
        await saved(5)
        assert there() == [4, 5]


async def test_the_last_step_that_all_have_sent_stays_in_the_keepers_that_it_was_sent_from(
    three_hosts: list[RunningKeeper], start: Start, tmp_path: Path
) -> None:
    """Also if a tier keeps two, and more than two were kept since: the host that is lost is a peer, too."""
    root = tmp_path / "run"
    root.mkdir()
    async with killed(root, with_keepers(three_hosts, tiers=Memory(keep=2, peers=1))) as managers:
        root.rename(aside := root.with_name("aside"))
        root.write_text("in the way")  # so that no step comes to the root

        async def kept_and_sent(step: int) -> None:
            for future in await save(managers, step):
                await future.kept()
            for manager in managers:
                await manager._saves._settle_peers()

        await kept_and_sent(1)
        (copies,) = managers[1]._saves._peers.values()
        copies._token = b"of another job"  # it sends and takes nothing more
        for step in (2, 3, 4, 5):
            await kept_and_sent(step)

        assert {path for path in held(three_hosts[0]) if path.startswith("process/0/")} >= {
            f"process/0/local{root}/{step}" for step in (1, 4, 5)
        }

    root.unlink()
    aside.rename(root)
    three_hosts[1].kill()  # which has the only copies of what process 0 has sent
    keepers = [three_hosts[0], start(), three_hosts[2]]
    async with opened(root, with_keepers(keepers, tiers=Memory(peers=1))) as managers:
        assert known(managers) == [[1]] * COUNT
        await check(managers, 1)

    await check_whole(root / "1", 1)


async def test_peers_on_one_host_are_none(
    keepers: list[RunningKeeper], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    async with opened(root, with_keepers(keepers[1:], tiers=Memory(peers=1))) as managers:
        await finished(managers, 1)

    assert caplog.text.count("step.peers_missing") == COUNT
    assert len(held(keepers[1])) == COUNT
