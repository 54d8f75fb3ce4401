"""Where the time of a restore goes. Saves say so themselves; for a restore the pipeline is run by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.bench.contenders.penstock import stage_times
from tests.bench.results import StageTime
from tests.bench.trees import ready

import penstock
from penstock.kernel import RestoreRequest, RestoreRun, run_pipeline
from penstock.pipelines import restore_pipeline


async def restore_profile(path: Path, like: Any) -> tuple[float, tuple[StageTime, ...]]:
    """Restore once and return the time it took and the times of the stages."""
    async with penstock.Checkpointer() as checkpointer:
        # The one place where the benchmark looks inside; it measures nothing that is compared.
        _, threads = checkpointer.operations.life.running()
        run: RestoreRun = checkpointer.engine.restore_run(str(path), threads, checkpointer.engine.store)
        since = time.perf_counter()
        result = await run_pipeline(restore_pipeline(), run, RestoreRequest(str(path), like, has_like=True))
        ready(result.value.tree)
        return time.perf_counter() - since, stage_times(result.stages)
