"""`penstock tune --failures`: from a run, or from figures, to a configuration."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import penstock
from penstock.cli import main
from penstock.steps import CheckpointManager, Disk, EverySteps


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["tune", "--failures", *arguments]) == 0
    return capsys.readouterr().out


def row(text: str, tier: str) -> list[str]:
    return next(
        line.split("\t")
        for line in text.splitlines()
        if line.startswith(f"{tier}\t") and len(line.split("\t")) > 3
    )


def configuration(text: str) -> dict[str, Any]:
    """What the last lines are as a file."""
    lines = text.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("[["))
    return tomllib.loads("\n".join(lines[first:]))


async def train(root: Path, near: Path) -> None:
    async with CheckpointManager(root, tiers=Disk(near), save_when=EverySteps(20)) as manager:
        for step in range(0, 60, 10):
            await manager.save(step, {"w": np.zeros(1000, np.float32)})
            await manager.wait()

        await manager.restore(like={"w": np.zeros(1000, np.float32)})


def test_the_figures_of_a_run_are_those_of_its_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, near = tmp_path / "run", tmp_path / "near"
    anyio.run(train, root, near)

    text = said(capsys, str(root), "--hosts", "2000")

    _, _, steps, save, copy, restore, *_ = row(text, "disk")
    assert int(steps) >= 1
    assert not any(each.startswith("(") for each in (save, copy, restore))
    _, _, of_root, save, copy, restore, *_ = row(text, "root")
    assert int(of_root) % int(steps) == 0
    assert save == "(2 s)"  # what a copy takes from the training is in no report
    assert copy.endswith(" s")
    assert not copy.startswith("(")
    assert restore == "(5 min)"
    assert configuration(text)["tier"] == [{"path": str(near), "save_every": int(steps)}]
    assert f"save_when={of_root})" in text


def test_what_is_printed_is_read_as_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "--hosts", "10000", "--step-time", "1300ms")
    (tmp_path / "penstock.toml").write_text(text[text.index("[[tier]]") :])

    (tier,) = penstock.Config.load(tmp_path / "penstock.toml", environ={}).tier
    assert (tier.kind, tier.peers, tier.save_every) == ("memory", 1, 33)


def test_given_figures_hold_and_are_marked_as_known(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(
        capsys, "--hosts", "100", "--tiers", "disk,root", "--costs", "disk:save=1s,copy=3s",
        "--restart", "1min", "--kinds", "process=50,site=50", "--rate", "10", "--seed", "5",
    )  # fmt: skip

    assert row(text, "disk")[3:6] == ["1 s", "3 s", "(30 s)"]
    assert "# disk each" in text
    assert "--step-time" in text


def test_the_same_seed_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--hosts", "5000", "--tiers", "memory,root", "--seed")
    assert said(capsys, *arguments, "1") == said(capsys, *arguments, "1") != said(capsys, *arguments, "2")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--failures"], "needs --hosts"),
        (["--failures", "--hosts", "0"], "0 hosts"),
        (["--failures", "--hosts", "9", "--rate", "-1"], "-1.0 failures"),
        (["--failures", "--hosts", "9", "--tiers", "memory,rot"], "'root'"),
        (["--failures", "--hosts", "9", "--tiers", "peers,root"], "right after it"),
        (["--failures", "--hosts", "9", "--tiers", "root,root"], "each tier once"),
        (["--failures", "--hosts", "9", "--tiers", "memory"], "no step survives"),
        (["--failures", "--hosts", "9", "--costs", "root=2s"], "root:save=2s"),
        (["--failures", "--hosts", "9", "--costs", "root:svae=2s"], "'save'"),
        (["--failures", "--hosts", "9", "--costs", "rot:save=2s"], "'root'"),
        (["--failures", "--hosts", "9", "--costs", "root:save=soon"], "number of seconds"),
        (["--failures", "--hosts", "9", "--kinds", "host=50"], "add up to 1"),
        (["--failures", "--hosts", "9", "--kinds", "hots=100"], "'host"),
        (["--failures", "--hosts", "9", "--step-time", "0s"], "takes more than 0.0 s"),
        (["--failures", "--hosts", "9", "--costs", "root:save=0s,copy=0s"], "no best interval"),
        (["--failures", "--hosts", "9", "--like", "run"], "--like is for measuring"),
        (["--failures", "--hosts", "9", "nowhere"], "no directory"),
        (["store", "--hosts", "9"], "--hosts is for --failures"),
        ([], "--failures"),
    ],
)
def test_what_does_not_fit_is_an_error(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *arguments]) == 1
    assert problem in capsys.readouterr().err
