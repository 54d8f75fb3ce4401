"""`penstock keeper pull`: a step that a keeper holds comes to another place. Parts: test_joint_memory.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from tests.keeper.conftest import RunningKeeper, Start

import penstock
from penstock.cli import main
from penstock.steps import CheckpointManager, Memory, Never

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

AssertSame = Callable[[Any, Any], None]
Read = pytest.CaptureFixture[str]


def state(fill: int) -> dict[str, Any]:
    return {"w": np.full(300_000, fill, np.float32), "n": fill}


@pytest.fixture
def keeper(start: Start, monkeypatch: pytest.MonkeyPatch) -> RunningKeeper:
    keeper = start()
    monkeypatch.setenv("PENSTOCK_STORE__KEEPER__SOCKET", keeper.socket)
    return keeper


def keep(root: Path, *steps: int) -> None:
    """Save steps into memory alone."""

    async def save() -> None:
        async with CheckpointManager(root, tiers=Memory(keep=3), save_when=Never()) as manager:
            for step in steps:
                save = await manager.save(step, state(step))
                assert save is not None
                await save.kept()

    anyio.run(save)


def pull(*arguments: object) -> int:
    return main(["keeper", "pull", *map(str, arguments)])


def test_the_newest_step_comes_to_another_place(
    keeper: RunningKeeper, tmp_path: Path, assert_same: AssertSame
) -> None:
    keep(tmp_path / "run", 1, 2)
    assert pull(tmp_path / "safe") == 0

    assert [path.name for path in (tmp_path / "safe").iterdir()] == ["2"]
    assert penstock.sync.verify(tmp_path / "safe" / "2").intact
    assert_same(penstock.sync.restore(tmp_path / "safe" / "2"), state(2))
    assert {step.is_elsewhere for step in keeper.store().status().steps} == {False}  # in a place of no run


def test_what_is_brought_to_its_root_may_go_from_the_keeper(
    keeper: RunningKeeper, tmp_path: Path, assert_same: AssertSame
) -> None:
    root = tmp_path / "run"
    keep(root, 1, 2)
    assert pull("--step", 1, root) == 0

    assert_same(penstock.sync.restore(root / "1"), state(1))
    elsewhere = {step.path[-1]: step.is_elsewhere for step in keeper.store().status().steps}
    assert elsewhere == {"1": True, "2": False}


def test_a_step_of_one_of_several_runs_is_named(keeper: RunningKeeper, tmp_path: Path, capsys: Read) -> None:
    for name in ("one", "two"):
        keep(tmp_path / name, 1)

    assert pull(tmp_path / "safe") == 1
    said = capsys.readouterr().err
    assert f"choose one by --run: {tmp_path}/one, {tmp_path}/two" in said
    assert pull("--run", tmp_path / "two", "--dry-run", tmp_path / "safe") == 0
    assert f"step 1 of {tmp_path}/two would be copied" in capsys.readouterr().out
    assert not (tmp_path / "safe").exists()
    assert pull("--run", tmp_path / "two", tmp_path / "safe") == 0
    assert (tmp_path / "safe" / "1").is_dir()


def test_what_is_not_there_or_in_the_way_is_an_error(
    keeper: RunningKeeper, tmp_path: Path, capsys: Read
) -> None:
    root = tmp_path / "run"
    assert pull(tmp_path / "safe") == 1
    assert "holds no step" in capsys.readouterr().err
    keep(root, 1)
    assert pull("--run", tmp_path / "other", tmp_path / "safe") == 1
    assert f"holds no step of {tmp_path}/other" in capsys.readouterr().err
    assert pull("--step", 5, tmp_path / "safe") == 1
    assert "has no step 5 (its steps: 1)" in capsys.readouterr().err
    (tmp_path / "safe" / "1").mkdir(parents=True)
    assert pull(tmp_path / "safe") == 1
    assert "safe/1" in capsys.readouterr().err
