"""What `save` refuses in one process of a job ends the save for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio import create_task_group

from penstock import Checkpointer, JobOptions
from penstock.config import JobLimits
from penstock.embedding import BaseIfWhole
from penstock.errors import NotSharedError, PeerFailedError, SpecError, StageFailedError
from penstock.handlers import LocalStore
from penstock.handlers.coordinators import JobCoordinator
from penstock.handlers.stores.publishing import Workspace
from penstock.kernel import StagedBatch, Threads
from penstock.pipelines import save_pipeline
from penstock.testing import MemoryKeyValues

# For a beat, who refuses waits for process 0 to begin.
LIMITS = JobLimits(join_s=60.0, write_s=60.0, silence_s=60.0, beat_s=20.0, call_s=20.0)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(150)]


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    "options", [{"compare": "nothing"}, {"progress": 7}, {"custom_metadata": {"x": object()}}]
)
async def test_an_argument_that_one_process_refuses(
    tmp_path: Path, who: int, options: dict[str, Any]
) -> None:
    service, raised = MemoryKeyValues(), dict[int, Exception]()

    async def save(index: int) -> None:
        own = options if index == who else {}
        async with Checkpointer(coordinator=JobCoordinator(service, index, 2, LIMITS)) as checkpointer:
            try:
                await (await checkpointer.save(tmp_path / "a", {"x": np.arange(3)}, **own))
            except (SpecError, PeerFailedError) as error:
                raised[index] = error

    async with create_task_group() as tasks:
        for index in range(2):
            tasks.start_soon(save, index)

    assert isinstance(raised[who], SpecError)
    told = raised[1 - who]
    assert isinstance(told, PeerFailedError)
    assert told.processes == (who,)
    assert "SpecError" in told.reason


@pytest.mark.parametrize("who", [0, 1])
async def test_a_step_before_that_one_process_alone_knows_is_no_reason_to_refuse(
    tmp_path: Path, who: int, assert_same: Callable[[Any, Any], None]
) -> None:
    service, tree = MemoryKeyValues(), {"x": np.arange(3)}

    async def save(index: int) -> None:
        own = tmp_path / str(index)
        own.mkdir()
        job, coordinator = JobOptions(local_root=str(own)), JobCoordinator(service, index, 2, LIMITS)
        async with Checkpointer(coordinator=coordinator, job=job) as checkpointer:
            await (await checkpointer.save(own / "1", tree))
            base = BaseIfWhole(str(own / "1")) if index == who else None
            await (await checkpointer.save(own / "2", tree, base=base))
            assert_same(await checkpointer.restore(own / "2"), tree)

    async with create_task_group() as tasks:
        for index in range(2):
            tasks.start_soon(save, index)


@pytest.mark.parametrize("who", [0, 1])
async def test_what_a_stage_raises_in_one_process_is_the_cause_there_and_named_by_the_others(
    tmp_path: Path, who: int
) -> None:
    service, raised = MemoryKeyValues(), dict[int, Exception]()

    async def save(index: int) -> None:
        async def weigh(batch: StagedBatch, /) -> StagedBatch:
            if index == who:
                raise ZeroDivisionError("nothing to divide by")
            return batch

        pipeline = save_pipeline().insert_after("device_to_host", weigh)
        coordinator = JobCoordinator(service, index, 2, LIMITS)
        async with Checkpointer(coordinator=coordinator, save_pipeline=pipeline) as checkpointer:
            try:
                await (await checkpointer.save(tmp_path / "a", {"x": np.arange(3)}))
            except (StageFailedError, PeerFailedError) as error:
                raised[index] = error

    async with create_task_group() as tasks:
        for index in range(2):
            tasks.start_soon(save, index)

    own, told = raised[who], raised[1 - who]
    assert isinstance(own, StageFailedError)
    assert isinstance(own.__cause__, ZeroDivisionError)
    assert own.stage == "weigh"
    assert isinstance(told, PeerFailedError)
    assert (told.processes, told.peer_stage) == ((who,), "weigh")
    assert "ZeroDivisionError: nothing to divide by" in told.reason


async def test_a_place_that_another_process_has_made_and_this_one_does_not_see_is_named(
    tmp_path: Path,
) -> None:
    workspace = Workspace(LocalStore(), Threads(), str(tmp_path / "a"), "", overwrite=False, joins=True)
    with pytest.raises(NotSharedError, match="local_root") as caught:
        await workspace.enter(str(tmp_path / "place"), waits_s=(0.0, 0.0))

    assert caught.value.place == str(tmp_path / "place")
    (tmp_path / "place").mkdir()
    await workspace.enter(str(tmp_path / "place"), waits_s=())
    assert workspace.temporary == str(tmp_path / "place")
