"""Items of one array without `_METADATA`, and what only looks like one."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tests.unsealed import unseal

import penstock
from penstock import SaveFormat
from penstock.errors import CorruptCheckpointError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two arrays in directories, one of which is called `checkpoint`, as it was before 0.11."""
    with penstock.sync.Checkpointer(save_format=SaveFormat(ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / "a", {"x": jnp.arange(3), "y": np.arange(4)}).result()
    unseal(tmp_path / "a")
    (tmp_path / "a" / "x").rename(tmp_path / "a" / "checkpoint")
    for name in ("_METADATA", "_PENSTOCK_INTEGRITY"):
        (tmp_path / "a" / name).unlink()
    return tmp_path / "a"


def test_a_second_array_makes_it_a_tree_without_its_document(path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="_METADATA"):
        penstock.sync.restore(path)


def test_a_directory_with_one_array_is_the_item(path: Path) -> None:
    for file in (path / "y").iterdir():
        file.unlink()
    (path / "y").rmdir()

    found = penstock.sync.restore(path)
    assert list(found) == ["checkpoint"]
    assert found["checkpoint"].tolist() == [0, 1, 2]


def test_a_file_in_place_of_what_all_steps_share(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "1", {"a": 1})
    (tmp_path / "metadata").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match="metadata: is a file, not the directory"):
        penstock.sync.restore(tmp_path)
