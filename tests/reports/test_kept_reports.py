"""Reports of recent saves, beside the checkpoints."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio import create_task_group

import penstock
from penstock.handlers import LocalStore
from penstock.reports.kept_reports import REPORTS, KeptReport, read_reports
from penstock.steps import CheckpointManager
from penstock.testing import FaultyStore

TREE = {"w": np.ones((4, 4)), "b": np.zeros(3)}


def keeping(n: int) -> penstock.Config:
    return penstock.Config.load(environ={}, arguments={"telemetry": {"keep_reports": n}})


def kept(folder: Path) -> list[KeptReport]:
    return list(read_reports(LocalStore(), str(folder)))


@pytest.mark.anyio
async def test_the_last_reports_are_kept_beside_the_steps(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path, config=keeping(2)) as manager:
        for step in (1, 2, 3):
            save = await manager.save(step, TREE)
            assert save is not None
            await save

    second, third = kept(tmp_path)
    assert (second.name, third.name) == ("2", "3")
    assert (third.n_leaves, third.nbytes) == (2, 152)
    assert 0 < third.staged_s <= third.durable_s
    assert third.explanation.startswith("The stage ")
    assert [stage.name for stage in third.stages][-2:] == ["commit", "finalize"]
    assert "commit" in [row.label for row in third.rows]


@pytest.mark.anyio
async def test_no_report_is_kept_by_default(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path, config=keeping(0)) as manager:
        await manager.save(1, TREE)

    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert kept(tmp_path) == []


@pytest.mark.anyio
async def test_saves_at_once_lose_none_and_one_repeated_replaces_its_own(tmp_path: Path) -> None:
    async with penstock.Checkpointer(config=keeping(9)) as checkpointer:

        async def save(name: str) -> None:
            await (await checkpointer.save(tmp_path / name, TREE, overwrite=True))

        async with create_task_group() as tasks:
            for name in "abca":
                tasks.start_soon(save, name)

    assert sorted(report.name for report in kept(tmp_path)) == ["a", "b", "c"]


@pytest.mark.anyio
async def test_a_failed_save_leaves_no_report(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore())
    store.fail_on("publish")
    async with penstock.Checkpointer(store=store, config=keeping(9)) as checkpointer:
        save = await checkpointer.save(tmp_path / "1", TREE)
        with pytest.raises(penstock.errors.StorageError):
            await save

    assert kept(tmp_path) == []


@pytest.mark.anyio
async def test_a_report_that_cannot_be_written_is_logged_and_the_save_is_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / REPORTS).mkdir()
    async with penstock.Checkpointer(config=keeping(9)) as checkpointer:
        report = await (await checkpointer.save(tmp_path / "1", TREE))

    assert report.n_leaves == 2
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [vars(record)["event"] for record in warnings] == ["telemetry.failed"]


@pytest.mark.parametrize("content", [b"", b"{}", b'[{"name": 1}]', b"\xff", b"[" * 100_000, None])
@pytest.mark.anyio
async def test_what_is_damaged_is_no_report_and_the_next_save_replaces_it(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / REPORTS).write_bytes(content)

    assert kept(tmp_path) == []
    async with penstock.Checkpointer(config=keeping(9)) as checkpointer:
        await (await checkpointer.save(tmp_path / "1", TREE))

    assert [report.name for report in kept(tmp_path)] == ["1"]


def test_the_file_of_reports_is_not_taken_for_a_step(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with penstock.sync.CheckpointManager(root, config=keeping(9)) as manager:
        manager.save(1, TREE)
        manager.save(2, TREE)
    with penstock.sync.CheckpointManager(root) as manager:
        assert tuple(manager.all_steps()) == (1, 2)

    verified = penstock.sync.verify(root)
    assert (verified.intact, len(verified.checkpoints), verified.leftovers) == (True, 2, ())
    collected: Any = penstock.sync.gc(root)
    assert not collected.removed
    penstock.sync.convert(root, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["1", "2"]
    assert len(json.loads((root / REPORTS).read_bytes())) == 2
    ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed")
    with ocp.CheckpointManager(root) as theirs:
        assert sorted(theirs.all_steps()) == [1, 2]
