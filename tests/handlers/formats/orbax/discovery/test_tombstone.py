"""Items that Orbax had begun to delete, and other marks beside items."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import CorruptCheckpointError, NotACheckpointError
from penstock.handlers import Composite


@pytest.fixture
def path(tmp_path: Path) -> Path:
    items = Composite(state={"w": np.arange(3)}, other={"w": np.arange(4)})
    penstock.sync.save(tmp_path / "ckpt", items)
    return tmp_path / "ckpt"


def mark(path: Path, **members: Any) -> None:
    (path / "_CHECKPOINT_DELETION").write_text(json.dumps({"operation_id": "0" * 32, **members}))


def test_an_item_that_is_being_deleted_is_gone(path: Path) -> None:
    assert len(penstock.sync.restore(path)["w"]) == 3
    mark(path, checkpointable_name="state")

    assert len(penstock.sync.restore(path)["w"]) == 4  # the only one that remains
    assert len(penstock.sync.restore(path / "other")["w"]) == 4
    assert list(penstock.sync.restore_items(path)) == ["other"]
    for again in (penstock.sync.restore, penstock.sync.metadata):
        with pytest.raises(NotACheckpointError, match="no item 'state' any more: it is being deleted"):
            again(path, item="state")
        with pytest.raises(NotACheckpointError, match="state: is being deleted, as _CHECKPOINT_DELETION"):
            again(path / "state")
        with pytest.raises(NotACheckpointError, match="state: is being deleted"):
            again(f"{path}/state/")


def test_files_that_are_gone_already_are_not_missed(path: Path) -> None:
    mark(path, checkpointable_name="state")
    for file in sorted((path / "state").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (path / "state").rmdir()

    assert list(penstock.sync.restore_items(path)) == ["other"]
    assert len(penstock.sync.restore(path)["w"]) == 4


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"checkpointable_name": 3}'])
def test_a_mark_that_says_nothing_is_an_error(path: Path, text: str) -> None:
    (path / "_CHECKPOINT_DELETION").write_text(text)
    for at in (path, path / "other"):
        with pytest.raises(CorruptCheckpointError, match="_CHECKPOINT_DELETION: "):
            penstock.sync.restore(at)


def test_an_item_that_was_lost_is_not_replaced_by_another(path: Path) -> None:
    (path / "state").rename(path.parent / "lost")
    with pytest.raises(CorruptCheckpointError, match="state: is missing, and _CHECKPOINT_METADATA lists it"):
        penstock.sync.restore(path)
    (path / "state").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match="state: is a file, not a directory"):
        penstock.sync.restore(path)
    assert len(penstock.sync.restore(path, item="other")["w"]) == 4
