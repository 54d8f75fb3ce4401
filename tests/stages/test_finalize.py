from __future__ import annotations

import os
from pathlib import Path

import pytest
from anyio import create_task_group
from tests.stages.stage_rig import Rig, cancel_in, run_one

from penstock.errors import DestinationExistsError, StorageError
from penstock.kernel import Committed, Published, SaveRun
from penstock.stages import Finalize

pytestmark = pytest.mark.anyio

COMMITTED = Committed(3, 1000, 2)


async def built(rig: Rig, *, overwrite: bool = False) -> SaveRun:
    """Make a run whose temporary directory is not empty."""
    run = rig.save_run(overwrite=overwrite)
    await run.workspace.open()
    _write(rig.temporary, "new")
    return run


def _write(directory: Path, text: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "content").write_text(text)


def content(directory: Path) -> str | None:
    return (directory / "content").read_text() if directory.exists() else None


async def test_finalising_publishes_syncs_the_parent_and_reports(rig: Rig) -> None:
    run = await built(rig)
    before = len(rig.operations)
    assert content(rig.final) is None

    (report,) = await run_one(run, Finalize(), COMMITTED)

    assert isinstance(report, Published)
    assert (report.path, report.n_leaves, report.nbytes) == (str(rig.final), 3, 1000)
    assert content(rig.final) == "new"
    assert not rig.temporary.exists()
    assert rig.operations[before:] == ["identity", "kind", "publish", "sync_directory"]
    assert rig.store.operations[-1].path == str(rig.root)
    assert run.workspace.published


async def test_what_appeared_meanwhile_is_not_lost(rig: Rig) -> None:
    run = await built(rig)
    _write(rig.final, "somebody else's")

    with pytest.raises(DestinationExistsError) as raised:
        await run_one(run, Finalize(), COMMITTED)

    assert raised.value.stage == "x"
    assert content(rig.final) == "somebody else's"
    await run.workspace.discard()
    assert os.listdir(rig.root) == ["ckpt"]


async def test_what_appears_in_the_last_moment_is_not_lost(rig: Rig) -> None:
    run = await built(rig)
    hang = rig.store.hang_on("publish")

    async def appear() -> None:
        await hang.wait_reached()
        _write(rig.final, "somebody else's")
        hang.release()

    failure: list[DestinationExistsError] = []
    async with create_task_group() as tasks:
        tasks.start_soon(appear)
        try:
            await run_one(run, Finalize(), COMMITTED)
        except DestinationExistsError as error:
            failure.append(error)

    assert len(failure) == 1
    assert content(rig.final) == "somebody else's"
    assert not run.workspace.published


async def test_overwriting_exchanges_and_then_removes_the_old(rig: Rig) -> None:
    _write(rig.final, "old")
    run = await built(rig, overwrite=True)
    before = len(rig.operations)

    await run_one(run, Finalize(), COMMITTED)

    assert content(rig.final) == "new"
    assert os.listdir(rig.root) == ["ckpt"]
    published = ["hold_reading", "exchange", "sync_directory", "discard"]
    assert rig.operations[before:] == ["identity", "kind", *published]


@pytest.mark.parametrize("overwrite", [False, True])
async def test_what_cannot_be_published_leaves_everything_as_it_was(rig: Rig, overwrite: bool) -> None:
    if overwrite:
        _write(rig.final, "old")
    run = await built(rig, overwrite=overwrite)
    rig.store.fail_on("exchange" if overwrite else "publish")

    with pytest.raises(StorageError):
        await run_one(run, Finalize(), COMMITTED)

    assert content(rig.final) == ("old" if overwrite else None)
    assert content(rig.temporary) == "new"
    assert not run.workspace.published
    await run.workspace.discard()
    assert not rig.temporary.exists()


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
async def test_cancelled_before_the_publication_it_has_published_or_not(rig: Rig, native: bool) -> None:
    run = await built(rig)
    hang = rig.store.hang_on("publish")

    await cancel_in(hang, lambda: run_one(run, Finalize(), COMMITTED), native=native)

    # The thread is not interrupted, so it published; the workspace knows that and removes nothing.
    assert run.workspace.published
    await run.workspace.discard()
    assert content(rig.final) == "new"
