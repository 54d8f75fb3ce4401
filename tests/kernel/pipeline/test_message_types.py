from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import PipelineError
from penstock.kernel import (
    LeafBatch,
    Pipeline,
    PlannedBatch,
    RestoreRequest,
    StagedBatch,
    TreeToSave,
    WrittenBatch,
)
from penstock.pipelines import restore_pipeline, save_pipeline

pytestmark = pytest.mark.anyio


async def on_staged(batch: StagedBatch) -> StagedBatch:
    return batch


def maybe_staged(batch: StagedBatch) -> StagedBatch | None:
    return batch


async def many_staged(batch: StagedBatch) -> AsyncIterator[StagedBatch]:
    yield batch


async def on_leaves(batch: LeafBatch) -> LeafBatch:
    return batch


async def on_any_leaves(batch: LeafBatch | PlannedBatch) -> LeafBatch | PlannedBatch:
    return batch


async def on_written(batch: WrittenBatch) -> WrittenBatch:
    return batch


async def untold(batch):  # type: ignore[no-untyped-def]  # that is what is tested  # noqa: ANN001, ANN201
    return batch


@dataclass(frozen=True)
class OnStaged:
    option: int = 1

    def __call__(self, batch: StagedBatch) -> StagedBatch:
        return batch


SAVE, RESTORE = save_pipeline(), restore_pipeline()


@pytest.mark.parametrize(
    "pipeline",
    [
        SAVE,
        save_pipeline(),
        RESTORE,
        SAVE.without("prioritise"),
        SAVE.without("limit_bytes"),
        RESTORE.without("limit_bytes").without("prioritise"),
        SAVE.insert_after("device_to_host", on_staged),
        SAVE.insert_after("limit_bytes", maybe_staged),
        SAVE.insert_after("limit_bytes", many_staged),
        SAVE.insert_before("write", OnStaged()),
        SAVE.insert_after("flatten", on_leaves),
        SAVE.insert_after("flatten", on_any_leaves),
        RESTORE.insert_after("plan", on_any_leaves),
        SAVE.insert_after("write", on_written),
        SAVE.replace("write", untold),
        SAVE.insert_before("finalize", untold),
    ],
    ids=lambda pipeline: "-".join(pipeline.names),
)
def test_a_pipeline_that_can_work_passes(pipeline: Pipeline[Any]) -> None:
    pipeline.check()


@pytest.mark.parametrize(
    ("pipeline", "problem"),
    [
        (
            SAVE.without("commit"),
            "stage 'finalize' takes Committed, but 'write' before it gives WrittenBatch",
        ),
        (
            SAVE.without("device_to_host"),
            "stage 'limit_bytes' takes PlannedBatch or StagedBatch, but 'prioritise' before it gives",
        ),
        (SAVE.without("finalize"), "the last stage, 'commit', gives Committed, not Published"),
        (SAVE.without("flatten"), "a save begins with TreeToSave and a restore with RestoreRequest"),
        (SAVE.without("write"), "stage 'commit' takes WrittenBatch"),
        (SAVE.insert_after("flatten", on_staged), "stage 'on_staged' takes StagedBatch"),
        (SAVE.insert_after("flatten", OnStaged()), "stage 'on_staged' takes StagedBatch"),
        (SAVE.insert_after("device_to_host", on_leaves), "stage 'on_leaves' takes LeafBatch"),
        (SAVE.replace("commit", on_staged), "stage 'commit' takes StagedBatch"),
        (RESTORE.insert_after("plan", on_leaves), "stage 'on_leaves' takes LeafBatch"),
        (RESTORE.without("read"), "stage 'host_to_device' takes HostBatch"),
        (RESTORE.without("assemble"), "'host_to_device', gives RestoredBatch, not RestoredTree"),
        (Pipeline(()), "needs at least one stage"),
    ],
    ids=lambda case: case[:40] if isinstance(case, str) else "",
)
def test_a_pipeline_whose_stages_do_not_fit_is_refused_by_name(pipeline: Pipeline[Any], problem: str) -> None:
    with pytest.raises(PipelineError) as raised:
        pipeline.check()

    assert problem in str(raised.value)


def test_a_pipeline_of_the_other_flow_is_refused() -> None:
    with pytest.raises(PipelineError, match="stage 'flatten' takes TreeToSave, but the call gives Rest"):
        SAVE.check(RestoreRequest)

    with pytest.raises(PipelineError, match="stage 'locate' takes RestoreRequest, but the call gives TreeTo"):
        RESTORE.check(TreeToSave)


def test_steps_between_may_be_incomplete() -> None:
    half = SAVE.without("commit")
    whole = half.insert_after("write", SAVE["commit"], called="commit")

    whole.check()


async def entered(checkpointer: penstock.Checkpointer) -> None:
    async with checkpointer:
        pass


async def test_a_checkpointer_and_each_call_refuse_what_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="finalize"):
        await entered(penstock.Checkpointer(save_pipeline=SAVE.without("commit")))

    with pytest.raises(PipelineError, match="host_to_device"):
        await entered(penstock.Checkpointer(restore_pipeline=RESTORE.without("read")))

    async with penstock.Checkpointer() as checkpointer:
        with pytest.raises(PipelineError, match="finalize"):
            await checkpointer.save(tmp_path / "c", {"a": 1}, pipeline=SAVE.without("commit"))

        await (await checkpointer.save(tmp_path / "c", {"a": 1}))
        with pytest.raises(PipelineError, match="host_to_device"):
            await checkpointer.restore(tmp_path / "c", pipeline=RESTORE.without("read"))

    assert [path.name for path in tmp_path.iterdir()] == ["c"]


# Stages without boilerplate


async def test_a_plain_function_runs_in_a_worker_thread_and_an_object_has_options(tmp_path: Path) -> None:
    import threading

    threads: set[int] = set()

    def look(batch: StagedBatch) -> StagedBatch:
        threads.add(threading.get_ident())
        return batch

    pipeline = SAVE.insert_after("device_to_host", look).insert_after("look", OnStaged())
    assert pipeline.configure("on_staged", option=7)["on_staged"] != pipeline["on_staged"]
    async with penstock.Checkpointer(save_pipeline=pipeline) as checkpointer:
        await (await checkpointer.save(tmp_path / "c", {"a": 1}))

    assert threads
    assert threading.get_ident() not in threads


async def test_a_plain_object_may_finish(tmp_path: Path) -> None:
    class KeepLast:
        def __init__(self) -> None:
            self.kept: list[StagedBatch] = []

        def __call__(self, batch: StagedBatch) -> None:
            self.kept.append(batch)

        async def finish(self) -> AsyncIterator[StagedBatch]:
            for batch in self.kept:
                yield batch

    pipeline = SAVE.insert_after("device_to_host", KeepLast())
    async with penstock.Checkpointer(save_pipeline=pipeline) as checkpointer:
        await (await checkpointer.save(tmp_path / "c", {"a": 1, "b": "text"}))
        assert await checkpointer.restore(tmp_path / "c") == {"a": 1, "b": "text"}
        assert checkpointer.statistics().leased == 0
