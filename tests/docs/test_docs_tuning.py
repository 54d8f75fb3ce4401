"""docs/howto/tune-a-cluster.md is followed, with a limit of time that lets no candidate begin."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.cli import main
from penstock.reports.diagnosis import GAIN
from penstock.tuning import ROUNDS, SURE

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "tune-a-cluster.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_command_of_the_page_writes_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    penstock.sync.save("run/100", {"w": np.zeros(1000, np.float32)})
    command = blocks("console")[0].removeprefix("$ penstock ").replace("10min", "0s")

    assert main(shlex.split(command)) == 0
    written = (tmp_path / "penstock.toml").read_text()
    assert "below scratch,\n# with the tree of run/100.\n" in written
    assert penstock.Config.load(profile="pod", environ={}).format.codec == "none"
    assert (tmp_path / "figures.svg").exists()


def test_the_profile_of_the_page_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(blocks("toml")[0])

    found = penstock.Config.load(tmp_path / "x.toml", profile="pod", environ={}).save
    assert found.piece_bytes == 2**20


def test_the_rule_of_the_page_is_that_of_the_code() -> None:
    assert (ROUNDS, GAIN, SURE) == (5, 0.92, 0.95)
