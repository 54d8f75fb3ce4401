"""Reports of recent saves and restores, next to the checkpoints."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from anyio import create_task_group
from tests.own_files import REPORTS, listed
from tests.reports.simulated_runs import DEFAULTS, MIB, Machine

import penstock
from penstock.handlers import LocalStore
from penstock.kernel import MemoryRegulator, StoreWrapper, Threads
from penstock.reports.kept_reports import (
    MOST_BYTES,
    Kept,
    KeptReport,
    ReportKeeper,
    _kept,
    read_reports,
)
from penstock.reports.report import SaveReport
from penstock.steps import CheckpointManager, Disk, KeepLast
from penstock.testing import FaultyStore

TREE = {"w": np.ones((4, 4)), "b": np.zeros(3)}


def keeping(n: int) -> penstock.Config:
    return penstock.Config.load(environ={}, arguments={"telemetry": {"keep_reports": n}})


def kept(folder: Path) -> Kept:
    return read_reports(LocalStore(), str(folder))


def names(folder: Path) -> list[str]:
    return [report.name for report in kept(folder).reports]


async def saved(manager: CheckpointManager, step: int, **options: Any) -> None:
    save = await manager.save(step, TREE, **options)
    assert save is not None
    await save


@pytest.mark.anyio
async def test_a_manager_keeps_what_it_did_unless_that_is_turned_off(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path, keep=KeepLast(2)) as manager:
        for step in (1, 2, 3):
            await saved(manager, step)
        await manager.restore(3)
        with pytest.raises(penstock.errors.NoHandlerError):
            await manager.save(4, {"x": object()})

    found = kept(tmp_path)
    assert [(report.kind, report.name) for report in found.reports] == [
        ("save", "1"),
        ("save", "2"),
        ("save", "3"),
        ("restore", "3"),
    ]
    third, restored = found.reports[2:]
    assert (third.n_leaves, third.nbytes) == (2, 152)
    assert third.staged_s is not None
    assert 0 < third.staged_s <= third.seconds
    assert third.explanation.startswith("The stage ")
    assert [stage.name for stage in third.stages][-2:] == ["commit", "finalize"]
    assert "commit" in [row.label for row in third.rows]
    assert third.bottleneck in [stage.name for stage in third.stages]
    assert 152 <= third.peak_bytes <= third.limit_bytes
    assert (restored.staged_s, restored.nbytes) == (None, 152)
    events = [(event.what, event.name) for event in found.events]
    assert events == [("opened", ""), ("deleted", "1"), ("save failed", "4"), ("closed", "")]
    assert "NoHandlerError" in found.events[2].text

    async with CheckpointManager(tmp_path / "quiet", config=keeping(0)) as manager:
        await saved(manager, 1)
    assert [path.name for path in (tmp_path / "quiet").iterdir()] == ["1"]


@pytest.mark.anyio
async def test_nothing_is_kept_next_to_a_single_checkpoint_or_by_who_only_reads(tmp_path: Path) -> None:
    await penstock.save(tmp_path / "one", TREE)
    await penstock.restore(tmp_path / "one")
    async with CheckpointManager(tmp_path / "run", config=keeping(0)) as manager:
        await saved(manager, 1)
    async with CheckpointManager(tmp_path / "run", read_only=True) as reader:
        await reader.restore(1)

    assert not list(tmp_path.rglob(f"{REPORTS}*"))


@pytest.mark.anyio
async def test_the_last_reports_are_kept_wherever_that_is_asked_for(tmp_path: Path) -> None:
    async with penstock.Checkpointer(config=keeping(2)) as checkpointer:
        for name in "abc":
            await (await checkpointer.save(tmp_path / name, TREE))

        (tmp_path / "foreign").mkdir()
        (tmp_path / "a").rename(tmp_path / "foreign" / "d")
        await checkpointer.restore(tmp_path / "foreign" / "d")

    assert names(tmp_path) == ["b", "c"]
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["d"], "what is read is not written to"


@pytest.mark.anyio
async def test_the_root_keeps_the_reports_of_its_tiers_with_metrics_and_promotions(tmp_path: Path) -> None:
    near, root = tmp_path / "near", tmp_path / "root"
    async with CheckpointManager(root, tiers=Disk(near)) as manager:
        save = await manager.save(1, TREE, metrics={"loss": 0.5})
        assert save is not None
        await save
        await manager.restore(1)

    kept = read_reports(LocalStore(), str(root))
    assert [(one.name, one.kind, dict(one.metrics)) for one in kept.reports] == [
        ("1", "save", {"loss": 0.5}),
        ("1", "restore", {}),
    ]
    ((what, name, text),) = [(one.what, one.name, one.text) for one in kept.events if one.what == "promoted"]
    assert (what, name) == ("promoted", "1")
    assert text.startswith("to root in ")
    assert text.endswith("s after its save began")
    assert not (near / REPORTS).exists()


@pytest.mark.anyio
async def test_saves_at_once_lose_none_and_one_repeated_replaces_its_own(tmp_path: Path) -> None:
    async with penstock.Checkpointer(config=keeping(9)) as checkpointer:

        async def save(name: str) -> None:
            await (await checkpointer.save(tmp_path / name, TREE, overwrite=True))

        async with create_task_group() as tasks:
            for name in "abca":
                tasks.start_soon(save, name)

    assert sorted(names(tmp_path)) == ["a", "b", "c"]


@pytest.mark.anyio
async def test_a_failed_save_leaves_an_event_and_no_report(tmp_path: Path) -> None:
    root = tmp_path / "run"
    store = FaultyStore(LocalStore())
    store.fail_on("publish")
    async with CheckpointManager(root, store=store) as manager:
        save = await manager.save(1, TREE)
        assert save is not None
        with pytest.raises(penstock.errors.StorageError):
            await save

    assert [event.what for event in kept(root).events] == ["opened", "save failed", "closed"]
    assert kept(root).reports == ()


@pytest.mark.anyio
async def test_a_report_that_cannot_be_written_is_logged_once_and_the_saves_are_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / REPORTS).mkdir()
    async with penstock.Checkpointer(config=keeping(9)) as checkpointer:
        for name in "ab":
            report = await (await checkpointer.save(tmp_path / name, TREE))
            assert report.n_leaves == 2

    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [vars(record)["event"] for record in warnings] == ["telemetry.failed"]


@pytest.mark.parametrize("content", [b"", b"{}", b'{"reports": [{"name": 1}]}', b"\xff", b"[" * 99_999, None])
@pytest.mark.anyio
async def test_what_is_damaged_is_no_report_and_the_next_save_replaces_it(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / REPORTS).write_bytes(content)

    assert kept(tmp_path) == Kept()
    async with penstock.Checkpointer(config=keeping(9)) as checkpointer:
        await (await checkpointer.save(tmp_path / "1", TREE))

    assert names(tmp_path) == ["1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", REPORTS]


class HangingReports(StoreWrapper):
    """A medium on which writing reports does not end before the test does."""

    def __init__(self, go_on: Any) -> None:
        super().__init__(LocalStore())
        self.go_on = go_on

    def write_file(self, path: str, data: bytes, *, create: bool = False) -> bool:
        if REPORTS in path:
            self.go_on.wait()
        return super().write_file(path, data, create=create)


@asynccontextmanager
async def keeper_at(root: Path, store: Any, **options: Any) -> AsyncGenerator[ReportKeeper]:
    """A keeper that writes what happens below `root`."""
    keeper = ReportKeeper(None, MemoryRegulator(2**20), lambda _: store, penstock_events(), **options)
    keeper.keep_below(str(root))
    try:
        async with create_task_group() as tasks:
            with keeper.writing(tasks, Threads(1)):
                yield keeper
    finally:
        await keeper.flush(Threads(1))


def penstock_events() -> Any:
    from penstock.kernel.events import get_logger

    return get_logger()


@pytest.mark.anyio
async def test_a_medium_that_hangs_holds_up_neither_saves_nor_the_end(tmp_path: Path) -> None:
    from threading import Event

    go_on = Event()
    try:
        with anyio.fail_after(20):
            options: dict[str, Any] = {"flush_s": 0.05}
            async with keeper_at(tmp_path, HangingReports(go_on), **options) as keeper:
                keeper.note(str(tmp_path), "deleted", "1")
    finally:
        go_on.set()


@pytest.mark.anyio
async def test_a_manager_that_saves_nothing_leaves_no_file(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() is None

    assert not (tmp_path / REPORTS).exists()


@pytest.mark.anyio
async def test_what_is_kept_is_bounded_and_the_latest_alone_have_details(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path) as manager:
        await saved(manager, 1)
    (whole,) = kept(tmp_path).reports
    reports = [KeptReport(str(n), 1.0, 0.5, rows=whole.rows, stages=whole.stages) for n in range(1500)]
    found = Kept().joined(Kept(tuple(reports)), 1000)

    assert len(found.reports) == 1000
    assert [len(report.rows) > 0 for report in found.reports] == [False] * 980 + [True] * 20
    assert [report.name for report in found.reports[-1:]] == ["1499"]

    long = "x" * 3000
    async with keeper_at(tmp_path, LocalStore()) as keeper:
        for n in range(700):
            with keeper.observing("save", str(tmp_path / f"{n}{long}")) as tell:
                tell(SaveReport("", 1, 1))
            if n % 50 == 49:
                await keeper.flush(Threads(1))

    assert (tmp_path / REPORTS).stat().st_size <= MOST_BYTES
    assert kept(tmp_path).reports[-1].name.startswith("699x")


@pytest.mark.anyio
async def test_a_crash_in_the_middle_of_a_write_loses_no_earlier_report(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path) as manager:
        await saved(manager, 1)

    class Half(StoreWrapper):
        """Writes in place the first half of what is not to be replaced in one step."""

        def write_file(self, path: str, data: bytes, *, create: bool = False) -> bool:
            return super().write_file(
                path, data[: len(data) // 2] if REPORTS in path else data, create=create
            )

        def replace_file(self, path: str, data: bytes) -> None:
            raise penstock.errors.StorageError("write", path, "the machine stopped")

    async with CheckpointManager(tmp_path, store=Half(LocalStore())) as manager:
        await saved(manager, 2)

    assert names(tmp_path) == ["1"]
    assert listed(tmp_path) == ["1", "2"]


@pytest.mark.anyio
async def test_the_peak_is_that_of_the_operation_and_not_of_an_earlier_one(tmp_path: Path) -> None:
    large = {"w": np.ones(100_000)}
    async with CheckpointManager(tmp_path) as manager:
        await (await manager.checkpointer.save(tmp_path / "large", large))
        await saved(manager, 1)

    (report,) = [report for report in kept(tmp_path).reports if report.name == "1"]
    assert report.peak_bytes < 100_000


def test_the_file_of_reports_is_not_taken_for_a_step(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with penstock.sync.CheckpointManager(root) as manager:
        manager.save(1, TREE)
        manager.save(2, TREE)
    with penstock.sync.CheckpointManager(root) as manager:
        assert tuple(manager.all_steps()) == (1, 2)

    verified = penstock.sync.verify(root)
    assert (verified.intact, len(verified.checkpoints), verified.leftovers) == (True, 2, ())
    collected: Any = penstock.sync.gc(root)
    assert not collected.removed
    penstock.sync.convert(root, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["1", "2", REPORTS]
    assert len(json.loads((root / REPORTS).read_bytes())["reports"]) == 2
    ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed")
    with ocp.CheckpointManager(root) as theirs:
        assert sorted(theirs.all_steps()) == [1, 2]
        theirs.save(3, args=ocp.args.StandardSave({"w": np.ones(3)}))
    with penstock.sync.CheckpointManager(root) as manager:
        assert tuple(manager.all_steps()) == (1, 2, 3)
        for step in (1, 2, 3):
            manager.delete(step)
    with penstock.sync.CheckpointManager(root) as manager:
        assert manager.latest_step() is None
        manager.save(1, TREE)


def test_what_a_budget_made_slow_is_kept_as_limited_by_memory() -> None:
    for limit, why in ((16 * MIB, "memory_wait"), (1024 * MIB, "busy")):
        report = Machine().save(replace(DEFAULTS, limit_bytes=limit))
        statistics = MemoryRegulator(limit).statistics()

        (found,) = _kept(report, "1", "root", 0.0, statistics, 0, {}, True).reports

        assert found.limited_by == why
        assert found.explanation == report.explain()
