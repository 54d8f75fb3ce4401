"""A repair of a checkpoint whose index is gone says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.errors import CorruptCheckpointError


def damage(folder: Path) -> str:
    """Change a byte of the file in which the index lies, and return its name."""
    (file,) = [file for file in folder.iterdir() if b"\x0c\xdb" in file.read_bytes()[:8]]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)
    return file.name


def test_what_is_damaged_is_named_and_not_called_missing(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "one", {"w": np.ones(3), "b": np.zeros(2)})
    name = damage(tmp_path / "one" / "d")

    with pytest.raises(CorruptCheckpointError, match=f"saved: {name}: differs from what was written"):
        penstock.sync.repair(tmp_path / "one", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_item_without_index_is_gone_and_the_others_are_kept(tmp_path: Path) -> None:
    items = penstock.items.Composite(model={"a": np.ones(2)}, other={"b": np.ones(3)})
    with penstock.sync.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, items)
    name = damage(tmp_path / "run" / "1" / "model" / "d")

    report = penstock.sync.repair(tmp_path / "run" / "1", tmp_path / "new")

    (gone,) = [leaf for leaf in report.leaves if leaf.outcome == "gone"]
    assert (gone.item, gone.problem) == ("model", f"{name}: differs from what was written")
    assert penstock.sync.restore(tmp_path / "new", item="other")["b"].tolist() == [1, 1, 1]
