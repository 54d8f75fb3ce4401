"""`penstock.delete` deletes checkpoints, whole, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.handlers.stores.buckets.bucket_rig import URL, Bucket

import penstock
from penstock.errors import InUseError, NotACheckpointError
from penstock.handlers import LocalStore, SafetensorsLayout

pytestmark = pytest.mark.anyio


def state() -> dict[str, Any]:
    return {"a": np.arange(1000.0), "step": 7}


async def test_a_checkpoint_is_gone_and_its_neighbours_stay(tmp_path: Path) -> None:
    for step in (1, 2):
        await penstock.save(tmp_path / str(step), state())

    await penstock.delete(tmp_path / "1")
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


@pytest.mark.parametrize("name", ["model.safetensors", "model"])
async def test_safetensors_are_checkpoints(tmp_path: Path, name: str) -> None:
    async with penstock.Checkpointer(layout=SafetensorsLayout()) as checkpointer:
        await (await checkpointer.save(tmp_path / name, {"a": np.ones(3)}))

    await penstock.delete(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


async def test_only_checkpoints_are_deleted(tmp_path: Path) -> None:
    for step in (1, 2):
        await penstock.save(tmp_path / "run" / str(step), state())

    folder = tmp_path / "folder"
    folder.mkdir()
    async with penstock.Checkpointer(layout=SafetensorsLayout()) as checkpointer:
        await (await checkpointer.save(folder / "model.safetensors", {"a": np.ones(3)}))

    (folder / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for name in ("run", "folder", "empty", "file", "absent", "."):
        with pytest.raises(NotACheckpointError):
            await penstock.delete(tmp_path / name)

    assert sorted(tmp_path.rglob("*")) == before


async def test_what_is_read_is_not_deleted(tmp_path: Path) -> None:
    await penstock.save(tmp_path / "1", state())
    held = LocalStore().hold_reading(str(tmp_path / "1"))
    try:
        with pytest.raises(InUseError):
            await penstock.delete(tmp_path / "1")
    finally:
        held.release()

    assert (await penstock.restore(tmp_path / "1"))["step"] == 7


async def test_a_checkpoint_in_a_bucket_is_deleted() -> None:
    bucket = Bucket()
    for step in (1, 2):
        async with penstock.Checkpointer(store=bucket.store()) as checkpointer:
            await (await checkpointer.save(f"{URL}/run/{step}", state()))

    await penstock.delete(f"{URL}/run/1", store=bucket.store())
    assert bucket.store().list_directory(f"{URL}/run") == ["2"]
    with pytest.raises(NotACheckpointError):
        await penstock.delete(f"{URL}/run/1", store=bucket.store())
    with pytest.raises(NotACheckpointError):
        await penstock.delete(f"{URL}/run", store=bucket.store())
