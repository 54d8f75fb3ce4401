"""Snapshots of steps that another process saves and may delete."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.orbax.checkpoint_utils import _snapshot


def test_a_snapshot_has_the_files_of_the_step_folders_included(tmp_path: Path) -> None:
    (tmp_path / "7" / "d").mkdir(parents=True)
    (tmp_path / "7" / "d" / "x").write_bytes(b"data")
    made = _snapshot(str(tmp_path / "7"), tmp_path / "snapshots", forgiving=False)

    assert Path(made, "d", "x").read_bytes() == b"data"
    assert os.path.samefile(Path(made, "d", "x"), tmp_path / "7" / "d" / "x")


def test_a_step_that_is_gone_is_a_missing_file_unless_that_is_forgiven(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        _snapshot(str(tmp_path / "7"), tmp_path / "snapshots", forgiving=False)

    assert raised.value.filename == str(tmp_path / "7")
    _snapshot(str(tmp_path / "8"), tmp_path / "snapshots", forgiving=True)
