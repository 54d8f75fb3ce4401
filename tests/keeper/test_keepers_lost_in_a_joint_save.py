"""A keeper of a job that is lost in the middle of a save: the save goes on to the next tier in all."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.keeper.conftest import RunningKeeper, Start
from tests.keeper.relay import Relay, When
from tests.steps.job_of_managers import COUNT, Managers, each, opened

import penstock
from penstock import CheckpointManager, JobOptions, PerProcess, SaveFuture
from penstock.config import Config, StoreOptions
from penstock.handlers.stores.keeper.keeper_options import KeeperOptions
from penstock.kernel import Milestone
from penstock.steps import Disk, KeepAll, Memory

pytestmark = [pytest.mark.process, pytest.mark.timeout(600), pytest.mark.anyio]

AssertSame = Callable[[Any, Any], None]
SIZE = 300_000
FROZEN = [np.full(SIZE, 7 + index, np.float32) for index in range(COUNT)]
"""Parts that do not change from step to step, and so are linked."""


def state(step: int, index: int) -> dict[str, Any]:
    own = PerProcess({"p": np.full(SIZE, 10 * step + index, np.float32), "f": FROZEN[index]})
    return {"w": np.full(1 << 16, step, np.float32), "n": step, "own": own}


@dataclass
class Hosts:
    """A keeper for each process; that of one of them is reached through a relay, and may be lost."""

    keepers: list[RunningKeeper]
    relay: Relay
    sockets: list[str]
    loser: int
    answer_s: float = 10.0

    def lose(self) -> None:
        """Kill it."""
        self.keepers[self.loser].kill()
        self.relay.close()

    def options(self, folder: Path) -> Callable[[int], dict[str, Any]]:
        """Return what each manager is made with: memory, a disk of its own, and a root that all see."""

        def of(index: int) -> dict[str, Any]:
            disk = folder / f"disk{index}"
            keeper = KeeperOptions(socket=self.sockets[index], answer_s=self.answer_s)
            config = Config(store=StoreOptions(keeper=keeper), job=JobOptions(local_root=os.fspath(disk)))
            return {"config": config, "tiers": [Memory(), Disk(disk / "near")], "keep": KeepAll()}

        return of


Begin = Callable[[int], Hosts]


@pytest.fixture
def begin(start: Start, short_folder: Path) -> Begin:
    def begin(loser: int) -> Hosts:
        keepers = [start(limit_bytes=2**26) for _ in range(COUNT)]
        path = str(Path(tempfile.mkdtemp(dir=short_folder)) / "relay")
        sockets = [keeper.socket for keeper in keepers]
        relay = Relay(path, sockets[loser])
        sockets[loser] = path
        return Hosts(keepers, relay, sockets, loser)

    return begin


async def staged(managers: Managers, step: int) -> list[SaveFuture]:
    """Begin a save in all, and overwrite the state once it is staged, as a training does that donates it."""

    async def one(manager: CheckpointManager) -> SaveFuture:
        given = state(step, managers.index(manager))
        save = await manager.save(step, given)
        assert save is not None
        given["w"][:] = -1
        given["own"].value["p"][:] = -1
        return save

    return await each(managers, one)


async def check(managers: Managers, step: int, assert_same: AssertSame) -> None:
    async def one(manager: CheckpointManager) -> None:
        index = managers.index(manager)
        found = await manager.restore(step, like=state(0, index), verify=True)
        expected = state(step, index)
        assert_same({**found, "own": found["own"].value}, {**expected, "own": expected["own"].value})

    await each(managers, one)


async def check_root(path: Path, step: int, assert_same: AssertSame) -> None:
    assert (await penstock.verify(path)).intact
    found = await penstock.restore(path)
    assert_same(found["w"], state(step, 0)["w"])
    for index in range(COUNT):
        own = state(step, index)["own"].value
        assert_same(found["own"][f"process_{index}-of-{COUNT}"], own)


def parts_of(hosts: Hosts, step: int) -> list[str]:
    """Return the parts of a step in the keepers that live."""
    living = [keeper for keeper in hosts.keepers if keeper.process.poll() is None]
    found = [each.path for keeper in living for each in keeper.store().status().steps]
    return [path for path in found if path.endswith(f"/{step}")]


async def save_with_a_loss(
    folder: Path, hosts: Hosts, n: int, when: When, strike: Callable[[], object], assert_same: AssertSame
) -> int:
    """Save two steps, and lose a keeper at the nth question of the second; return how many were asked."""
    async with opened(folder / "run", hosts.options(folder)) as managers:
        for save in await staged(managers, 1):
            await save

        await each(managers, lambda manager: manager.wait())
        hosts.relay.strike_at(n, when, strike)
        saves = await staged(managers, 2)
        for save in saves:
            await save.kept()

        n_asked = hosts.relay.n_asked
        for save in saves:
            report = await save
            assert report.staged_s <= report.kept_s <= report.durable_s

        await each(managers, lambda manager: manager.wait())
        assert [list(manager.all_steps()) for manager in managers] == [[1, 2]] * COUNT
        await check(managers, 2, assert_same)
        for save in await staged(managers, 3):
            await save

        await each(managers, lambda manager: manager.wait())
        await check(managers, 3, assert_same)
        assert [manager.saving for manager in managers] == [()] * COUNT

    for step in (1, 2, 3):
        await check_root(folder / f"run/{step}", step, assert_same)

    for keeper in hosts.keepers:
        if keeper.process.poll() is None:
            keeper.send(signal.SIGCONT)

    left = parts_of(hosts, 3)
    assert len(left) in {0, COUNT}, f"a step is kept by all or by none: {left}"
    return n_asked


APART = 27
"""So many questions are between those of a case at which the keeper is lost, so that none takes minutes."""


BRIEFLY = (1, 10, 19)
"""The first questions of the cases that are not slow."""


def every_question(loser: int, when: When, *but: int) -> list[Any]:
    questions = [first for first in range(1, APART + 1) if first not in but]
    return [pytest.param(loser, when, first, marks=pytest.mark.slow) for first in questions]


@pytest.mark.parametrize(
    ("loser", "when", "first"),
    [
        *[(1, "before", first) for first in BRIEFLY],
        *every_question(0, "before"),
        *every_question(1, "before", *BRIEFLY),
        *every_question(1, "after"),
    ],
)
async def test_a_save_of_a_job_goes_on_to_the_next_tier_when_a_keeper_is_killed_at_any_question(
    begin: Begin, tmp_path: Path, assert_same: AssertSame, loser: int, when: When, first: int
) -> None:
    n, n_asked = first, 10**9
    while n <= n_asked:
        hosts = begin(loser)
        asked = await save_with_a_loss(tmp_path / str(n), hosts, n, when, hosts.lose, assert_same)
        n_asked = asked if n > asked else n_asked
        for keeper in hosts.keepers:
            keeper.kill()

        hosts.relay.close()
        n += APART

    assert n > 20, "the questions of a save are visited"


async def test_a_save_of_a_job_goes_on_when_a_keeper_stands_still(
    begin: Begin, tmp_path: Path, assert_same: AssertSame
) -> None:
    hosts = begin(2)
    hosts.answer_s = 0.5
    await save_with_a_loss(
        tmp_path, hosts, 12, "before", lambda: hosts.keepers[2].send(signal.SIGSTOP), assert_same
    )


async def test_a_step_that_all_have_kept_outlives_a_keeper_as_long_as_the_job_lives(
    begin: Begin, tmp_path: Path, assert_same: AssertSame
) -> None:
    hosts = begin(1)
    async with opened(tmp_path / "run", hosts.options(tmp_path)) as managers:
        saves, seen = await staged(managers, 1), list[str]()

        def lose(save: SaveFuture) -> None:
            seen.append(save.status)
            hosts.lose()

        saves[1].add_done_callback(lose, milestone=Milestone.KEPT)
        for save in saves:
            await save

        await check(managers, 1, assert_same)

    assert seen == ["kept"], "nothing was copied before the keeper was lost"
    await check_root(tmp_path / "run/1", 1, assert_same)


async def test_a_keeper_that_comes_back_is_used_again_by_the_job(
    begin: Begin, start: Start, tmp_path: Path, assert_same: AssertSame
) -> None:
    hosts = begin(1)
    hosts.sockets[1] = hosts.keepers[1].socket
    async with opened(tmp_path / "run", hosts.options(tmp_path)) as managers:
        for save in await staged(managers, 1):
            await save

        hosts.keepers[1].kill()
        for save in await staged(managers, 2):
            await save

        await each(managers, lambda manager: manager.wait())
        assert parts_of(hosts, 2) == [], "no part is left of what one process could not keep"
        hosts.keepers[1] = start(limit_bytes=2**26, socket=hosts.sockets[1])
        for save in await staged(managers, 3):
            await save

        await each(managers, lambda manager: manager.wait())
        assert len(parts_of(hosts, 3)) == COUNT
        await check(managers, 3, assert_same)


async def test_what_overtakes_a_stranded_step_fulfils_it_in_all_processes(
    begin: Begin, tmp_path: Path, assert_same: AssertSame
) -> None:
    hosts = begin(0)
    async with opened(tmp_path / "run", hosts.options(tmp_path)) as managers:
        for save in await staged(managers, 1):
            await save

        hosts.lose()
        saves = [save for step in (2, 3, 4) for save in await staged(managers, step)]
        reports = [await save for save in saves]
        assert {report.superseded_by for report in reports} <= {
            None,
            *[str(tmp_path / f"run/{step}") for step in (3, 4)],
        }
        await each(managers, lambda manager: manager.wait())
        assert [parts_of(hosts, step) for step in (2, 3, 4)] == [[]] * 3
        await check(managers, 4, assert_same)

    await check_root(tmp_path / "run/4", 4, assert_same)


@pytest.mark.parametrize(
    ("loser", "when", "n"),
    [
        *[(1, "before", n) for n in (8, 13, 14)],
        *every_question(0, "before"),
        *every_question(1, "before", 8, 13, 14),
    ],
)
async def test_a_job_is_opened_without_a_keeper_that_is_killed_at_any_question(
    begin: Begin, tmp_path: Path, assert_same: AssertSame, loser: int, when: When, n: int
) -> None:
    hosts = begin(loser)
    hosts.relay.strike_at(n, when, hosts.lose)
    async with opened(tmp_path / "run", hosts.options(tmp_path)) as managers:
        for save in await staged(managers, 1):
            await save

        await check(managers, 1, assert_same)

    await check_root(tmp_path / "run/1", 1, assert_same)


async def test_with_a_disk_that_takes_nothing_either_the_step_is_kept_in_the_root(
    begin: Begin, tmp_path: Path, assert_same: AssertSame
) -> None:
    hosts, near = begin(1), tmp_path / "disk0" / "near"
    async with opened(tmp_path / "run", hosts.options(tmp_path)) as managers:
        for save in await staged(managers, 1):
            await save

        await each(managers, lambda manager: manager.wait())
        shutil.rmtree(near)
        near.write_bytes(b"")
        hosts.lose()
        for save in await staged(managers, 2):
            await save.kept()
            await save

        await check_root(tmp_path / "run/2", 2, assert_same)
