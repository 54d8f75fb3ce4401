"""What `save` refuses in one process of a job ends the save for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio import create_task_group

from penstock import Checkpointer
from penstock.errors import PeerFailedError, SpecError
from penstock.kernel.config.job_limits import JobLimits
from penstock.kernel.coordination.job_coordinator import JobCoordinator
from penstock.testing.memory_key_values import MemoryKeyValues

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
