"""A keeper that is lost in the middle of a save: the save goes on to the next tier, wherever it was."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.keeper.conftest import RunningKeeper, Start, pages_in_use
from tests.keeper.relay import Relay, When

import penstock
from penstock.kernel import Milestone
from penstock.steps import CheckpointManager, Disk, KeepAll, Memory

pytestmark = [pytest.mark.process, pytest.mark.timeout(400), pytest.mark.anyio]

AssertSame = Callable[[Any, Any], None]
N_MORE = 3
"""Questions after a save, which is kept by then: the keeper is told where the step is."""


def state(fill: int) -> dict[str, Any]:
    return {"w": np.full(400_000, fill, np.float32), "b": np.full(3, fill), "n": fill}


async def staged(manager: CheckpointManager, step: int) -> penstock.SaveFuture:
    """Return a save whose state was overwritten once it was staged, as by a training that donates it."""
    given = state(step)
    save = await manager.save(step, given)
    assert save is not None
    given["w"][:], given["b"][:] = -1, -1
    return save


@pytest.fixture
def relayed(
    start: Start, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], tuple[RunningKeeper, Relay]]:
    """Starts a keeper with a relay before it, which the configuration names."""

    def begin() -> tuple[RunningKeeper, Relay]:
        keeper = start(limit_bytes=2**26)
        path = str(Path(tempfile.mkdtemp(dir=short_folder)) / "relay")
        monkeypatch.setenv("PENSTOCK_STORE__KEEPER__SOCKET", path)
        return keeper, Relay(path, keeper.socket)

    return begin


async def save_with_a_loss(
    root: Path, relay: Relay, n: int, when: When, strike: Callable[[], object], assert_same: AssertSame
) -> int:
    """Save two steps, and lose the keeper at the nth question of the second; return how many were asked."""
    near = root / "near"
    async with CheckpointManager(
        root / "run", tiers=[Memory(), Disk(near, keep=KeepAll())], keep=KeepAll()
    ) as manager:
        await (await staged(manager, 1))
        await manager.wait()
        relay.strike_at(n, when, strike)
        save = await staged(manager, 2)
        await save.kept()
        n_asked = relay.n_asked
        report = await save
        assert report.path == str(root / "run/2")
        assert report.staged_s <= report.kept_s <= report.durable_s
        await manager.wait()
        assert manager.saving == ()
        assert_same(await manager.restore(2, verify=True), state(2))

    for directory in (near, root / "run"):
        assert sorted(path.name for path in directory.iterdir() if path.name.isdigit()) == ["1", "2"]
        assert (await penstock.verify(directory / "2")).intact
        assert_same(await penstock.restore(directory / "2"), state(2))

    return n_asked


@pytest.mark.parametrize(
    ("when", "every"),
    [
        ("before", 3),  # each question needs a keeper of its own
        pytest.param("before", 1, marks=pytest.mark.slow),
        pytest.param("after", 1, marks=pytest.mark.slow),
    ],
)
async def test_a_save_whose_keeper_is_killed_at_any_question_goes_on_to_the_next_tier(
    relayed: Callable[[], tuple[RunningKeeper, Relay]],
    tmp_path: Path,
    assert_same: AssertSame,
    when: When,
    every: int,
) -> None:
    n, n_asked = 1, 10**9
    while n <= n_asked + N_MORE:
        keeper, relay = relayed()

        def strike(keeper: RunningKeeper = keeper, relay: Relay = relay) -> None:
            keeper.kill()
            relay.close()

        asked = await save_with_a_loss(tmp_path / str(n), relay, n, when, strike, assert_same)
        n_asked = asked if n > asked else n_asked
        relay.close()
        n += every

    assert n > 12, "each question of a save is visited"


@pytest.mark.thinned(2)
@pytest.mark.parametrize("n", [6, 12, 18, 24])
async def test_a_save_whose_keeper_stands_still_goes_on_and_the_keeper_removes_its_part(
    relayed: Callable[[], tuple[RunningKeeper, Relay]],
    tmp_path: Path,
    assert_same: AssertSame,
    monkeypatch: pytest.MonkeyPatch,
    n: int,
) -> None:
    monkeypatch.setenv("PENSTOCK_STORE__KEEPER__ANSWER_S", "0.5")
    keeper, relay = relayed()
    await save_with_a_loss(tmp_path, relay, n, "before", lambda: keeper.send(signal.SIGSTOP), assert_same)
    relay.close()
    keeper.send(signal.SIGCONT)
    steps = keeper.store().list_directory(f"/local{tmp_path}/run")
    assert not [name for name in steps if "tmp" in name], "what was built is gone with its connection"


async def test_a_step_that_is_kept_outlives_its_keeper_as_long_as_the_training_lives(
    relayed: Callable[[], tuple[RunningKeeper, Relay]], tmp_path: Path, assert_same: AssertSame
) -> None:
    keeper, relay = relayed()
    seen = list[str]()
    async with CheckpointManager(tmp_path / "run", tiers=Memory()) as manager:
        save = await staged(manager, 1)

        def lose(save: penstock.SaveFuture) -> None:
            seen.append(save.status)
            keeper.kill()
            relay.close()

        save.add_done_callback(lose, milestone=Milestone.KEPT)
        await save
        assert_same(await manager.restore(1), state(1))

    assert seen == ["kept"], "nothing was copied before the keeper was lost"
    assert_same(await penstock.restore(tmp_path / "run/1", verify=True), state(1))


async def test_all_saves_that_are_under_way_when_the_keeper_is_lost_are_fulfilled(
    relayed: Callable[[], tuple[RunningKeeper, Relay]], tmp_path: Path, assert_same: AssertSame
) -> None:
    keeper, relay = relayed()
    async with CheckpointManager(tmp_path / "run", tiers=Memory()) as manager:
        saves = [await staged(manager, step) for step in (1, 2, 3)]
        keeper.kill()
        relay.close()
        reports = [await save for save in saves]
        newer = {None, str(tmp_path / "run/2"), str(tmp_path / "run/3")}
        assert {report.superseded_by for report in reports} <= newer

    assert_same(await penstock.restore(tmp_path / "run/3", verify=True), state(3))


async def test_memory_of_a_stranded_step_goes_when_it_has_arrived(
    relayed: Callable[[], tuple[RunningKeeper, Relay]], tmp_path: Path
) -> None:
    keeper, relay = relayed()
    before = pages_in_use()
    async with CheckpointManager(tmp_path / "run", tiers=Memory()) as manager:
        save = await staged(manager, 1)
        keeper.kill()
        relay.close()
        await save
        assert pages_in_use() <= before


async def test_a_stranded_step_is_kept_once_it_is_at_the_next_tier_whatever_becomes_of_the_root(
    relayed: Callable[[], tuple[RunningKeeper, Relay]], tmp_path: Path, assert_same: AssertSame
) -> None:
    keeper, relay = relayed()
    root, near = tmp_path / "run", tmp_path / "near"
    before = pages_in_use()
    async with CheckpointManager(root, tiers=[Memory(), Disk(near)]) as manager:
        save = await staged(manager, 1)
        keeper.kill()
        relay.close()
        root.rename(aside := tmp_path / "aside")
        root.write_text("in the way")
        await save.kept()
        assert save.status == "kept"
        assert pages_in_use() <= before, "it is on the disk, and needs no memory any more"
        root.unlink()
        aside.rename(root)
        report = await save

    assert report.promoted_s[str(near)] <= report.kept_s < report.promoted_s[str(root)]
    assert_same(await penstock.restore(root / "1", verify=True), state(1))
