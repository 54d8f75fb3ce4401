"""A run is read from all of its levels, whichever of them can be seen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import NotACheckpointError
from penstock.handlers import LocalStore
from penstock.handlers.formats.orbax.file_names import REPORTS, TIER
from penstock.handlers.layouts.discovery import look_at
from penstock.steps import CheckpointManager, Disk, EverySteps
from penstock.steps.tier_record import TierRecord, find_checkpoint, levels_of, root_of_tier

pytestmark = pytest.mark.anyio

AssertSame = Callable[[Any, Any], None]


def state(fill: int) -> dict[str, Any]:
    return {"w": np.full(1000, fill, np.float32), "n": fill}


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """The root of a run: steps 0 and 2 are in it; 1, 2 and 3 in its tier."""
    root, near = tmp_path / "run", tmp_path / "near"
    tiers = Disk(near, keep=3)
    async with CheckpointManager(root, save_when=EverySteps(2), tiers=tiers) as manager:
        for step in range(4):
            save = await manager.save(step, state(step))
            assert save is not None
            await save

    return root


def steps(levels: Any) -> dict[str, list[int] | str]:
    return {level.label: level.problem or list(level.steps) for level in levels}


async def test_a_root_names_its_tiers_and_the_levels_are_listed_the_nearest_first(run: Path) -> None:
    levels = levels_of(LocalStore(), str(run))
    assert [level.label for level in levels] == ["disk", "root"]
    assert steps(levels) == {"disk": [1, 2, 3], "root": [0, 2]}
    assert root_of_tier(LocalStore(), str(run.parent / "near")) == str(run)
    assert root_of_tier(LocalStore(), str(run)) is None


async def test_a_copy_of_a_root_has_no_tiers(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "copy")
    assert steps(levels_of(LocalStore(), str(tmp_path / "copy"))) == {"root": [0, 2]}
    assert steps(levels_of(LocalStore(), str(tmp_path / "near"))) == {"root": [1, 2, 3]}


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda near: shutil.rmtree(near), "nothing is there"),
        (lambda near: (near / TIER).unlink(), "nothing is there"),
        (lambda near: (near / TIER).write_bytes(TierRecord("/other").encode()), "serves /other now"),
        (lambda near: (near / TIER).write_text("{"), "serves another root now"),
        (lambda near: (near.rename(near.parent / "moved"), near.write_text("a file")), "nothing is there"),
    ],
)
async def test_a_tier_that_cannot_be_seen_is_a_level_that_says_why(
    run: Path, damage: Callable[[Path], object], problem: str
) -> None:
    damage(run.parent / "near")
    assert steps(levels_of(LocalStore(), str(run))) == {"disk": problem, "root": [0, 2]}


async def test_a_tier_of_another_machine_is_named_with_it_unless_it_is_here_too(run: Path) -> None:
    record = json.loads((run / TIER).read_text())
    (run / TIER).write_text(json.dumps({**record, "host": "node-3"}))
    assert steps(levels_of(LocalStore(), str(run)))["disk"] == [1, 2, 3], "a disk that both machines see"
    shutil.rmtree(run.parent / "near")
    assert steps(levels_of(LocalStore(), str(run)))["disk"] == "on node-3"


@pytest.mark.parametrize(
    "content", ["", "[]", '{"root": 1}', '{"root": "", "tiers": [], "names": [1]}', "[" * 9999]
)
async def test_what_is_no_record_is_none(run: Path, content: str) -> None:
    (run / TIER).write_text(content)
    assert steps(levels_of(LocalStore(), str(run))) == {"root": [0, 2]}


@pytest.mark.parametrize("name", [TIER, REPORTS])
def test_a_root_without_steps_is_no_checkpoint_because_of_a_file_in_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    assert look_at(LocalStore(), str(tmp_path)).kind == "folder"


async def test_a_step_is_found_in_the_nearest_level_that_has_it(run: Path) -> None:
    store, near = LocalStore(), run.parent / "near"

    def found(path: Path, step: int | None = None) -> str:
        return find_checkpoint(store, str(path), step)[1]

    assert found(run) == found(run, 3) == found(run / "3") == str(near / "3")
    assert found(run, 2) == str(near / "2")
    assert found(run / "2") == str(run / "2"), "what is named is taken"
    assert found(run, 0) == str(run / "0")
    for path, step in ((run, 7), (run / "7", None)):
        with pytest.raises(NotACheckpointError):
            found(path, step)


async def test_a_manager_that_only_reads_finds_the_tiers_of_its_root(
    run: Path, assert_same: AssertSame
) -> None:
    async with CheckpointManager(run, read_only=True) as manager:
        assert list(manager.all_steps()) == [0, 1, 2, 3]
        assert_same(await manager.restore(), state(3))

    async with CheckpointManager(run, read_only=True, tiers=()) as manager:
        assert list(manager.all_steps()) == [0, 2]

    shutil.rmtree(run.parent / "near")
    async with CheckpointManager(run, read_only=True) as manager:
        assert list(manager.all_steps()) == [0, 2]
