"""Commands look at all levels of a run, and never fail because one of them is not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import anyio
import numpy as np
import pytest

from penstock import SaveFormat
from penstock.cli import main
from penstock.handlers import LocalStore
from penstock.steps import CheckpointManager, Disk, EverySteps
from penstock.testing import FaultyStore


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The root of a run: steps 0 and 2 are in it; 1, 2 and 3 in its tier."""

    async def save() -> None:
        tiers = Disk(tmp_path / "near", keep=3)
        async with CheckpointManager(tmp_path / "run", save_when=EverySteps(2), tiers=tiers) as manager:
            for step in range(4):
                save = await manager.save(step, {"w": np.full(1000, step)}, metrics={"loss": 9 - step})
                assert save is not None
                await save

    anyio.run(save)
    return tmp_path / "run"


Read = pytest.CaptureFixture[str]


def rows(capsys: Read) -> list[list[str]]:
    return [line.split("\t") for line in capsys.readouterr().out.splitlines()]


def test_ls_says_where_each_step_is(run: Path, capsys: Read) -> None:
    assert main(["ls", str(run)]) == 0
    where = [(row[0], row[-1]) for row in rows(capsys)]
    assert where == [("0", "root"), ("1", "disk"), ("2", "disk root"), ("3", "disk")]

    assert main(["ls", "--json", "--best", "loss", str(run)]) == 0
    document = json.loads(capsys.readouterr().out)
    near = str(run.parent / "near")
    assert document["tiers"] == [{"label": "disk", "path": near, "steps": [1, 2, 3], "problem": None}]
    assert [step["where"] for step in document["steps"] if step["is_best"]] == [["disk"]]


def test_ls_of_a_run_whose_root_has_no_step_yet_lists_those_of_its_tiers(run: Path, capsys: Read) -> None:
    shutil.rmtree(run / "0")
    shutil.rmtree(run / "2")
    assert main(["ls", str(run)]) == 0
    assert [(row[0], row[-1]) for row in rows(capsys)] == [("1", "disk"), ("2", "disk"), ("3", "disk")]
    assert main(["verify", str(run)]) == 0


def test_a_tier_that_is_gone_fails_no_command(run: Path, capsys: Read) -> None:
    shutil.rmtree(run.parent / "near")
    for command in ("ls", "show", "du", "cat", "verify", "gc", "doctor"):
        assert main([command, str(run)]) == 0, command

    assert main(["ls", "--json", str(run)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["tiers"][0]["problem"] == "nothing is there"
    assert [step["name"] for step in document["steps"]] == ["0", "2"]


def test_a_step_that_is_in_a_tier_alone_is_shown_and_compared(run: Path, capsys: Read) -> None:
    assert main(["cat", f"{run}/3"]) == 0
    assert "['w']" in capsys.readouterr().out
    assert main(["show", str(run), "--step", "1"]) == 0
    assert main(["diff", f"{run}/3", f"{run}/1"]) == 1
    assert main(["diff", str(run), "3"]) == 0, "the latest is step 3"


def test_sizes_and_codecs_are_those_of_the_root(tmp_path: Path, capsys: Read) -> None:
    """Steps are plain in the tier."""

    async def save() -> None:
        form, store = SaveFormat(codec="zstd:1"), FaultyStore(LocalStore())  # which no other process has
        tiers = Disk(tmp_path / "near")
        async with CheckpointManager(tmp_path / "run", tiers=tiers, save_format=form, store=store) as manager:
            await manager.save(1, {"w": np.zeros(100_000)})

    anyio.run(save)
    for path in (tmp_path / "run", tmp_path / "run" / "1"):
        assert main(["du", str(path)]) == 0
        assert int(rows(capsys)[0][0]) < 1000
        assert main(["show", str(path)]) == 0
        assert rows(capsys)[0][-1] == "zstd:1"

    assert main(["ls", str(tmp_path / "run")]) == 0
    assert int(rows(capsys)[0][2]) < 10_000


def test_verify_finds_damage_in_a_tier(run: Path, capsys: Read) -> None:
    assert main(["verify", str(run)]) == 0
    data = next(path for path in (run.parent / "near" / "3").rglob("*") if path.parent.name == "d")
    data.write_bytes(bytes(data.stat().st_size))
    assert main(["verify", "--json", str(run)]) == 1
    document = json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))
    assert document["status"] == "intact"
    assert [tier["status"] for tier in document["tiers"]] == ["damaged"]


def test_gc_removes_what_was_left_in_a_tier(run: Path) -> None:
    left = run.parent / "near" / "9.orbax-checkpoint-tmp"
    left.mkdir()
    assert main(["gc", str(run)]) == 0
    assert not left.exists()


def test_doctor_names_the_tiers_and_what_they_have(run: Path, capsys: Read) -> None:
    assert main(["doctor", str(run)]) == 0
    facts = {row[0]: row[1:] for row in rows(capsys)}
    assert facts["tier disk"] == [str(run.parent / "near"), "ok", "newest step 3"]
    assert facts["root"] == [str(run), "ok", "newest step 2, of 3"]
