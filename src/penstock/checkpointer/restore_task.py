"""One restore: its pipeline, run again if the checkpoint is replaced meanwhile."""

from __future__ import annotations

__all__ = ("RestoreTask",)

import time
from typing import Any, final

from penstock.checkpointer.engine import Engine
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import InsufficientMemoryError
from penstock.kernel.messages.restore import RestoredTree, RestoreRequest
from penstock.kernel.messages.restore_options import RestoreReport
from penstock.kernel.messages.statistics import waited_for_memory_s
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.runner import PipelineResult, run_pipeline
from penstock.stages.reuse.value_cache import KnownValues


@final
class RestoreTask:
    """Restores one tree, and remembers values that a later save may find unchanged.

    Args:
        engine: Of the Checkpointer.
        threads: Of the Checkpointer.
        pipeline: The stages.
        request: What is wanted.
    """

    __slots__ = ("_engine", "_pipeline", "_request", "_threads")

    def __init__(
        self, engine: Engine, threads: Threads, pipeline: Pipeline[RestoreRun], request: RestoreRequest
    ) -> None:
        self._engine = engine
        self._threads = threads
        self._pipeline = pipeline
        self._request = request

    async def __call__(self) -> tuple[Any, RestoreReport]:
        """Return the tree, and the report of the restore."""
        path = self._request.path
        result, run, identity = await self._engine.read_unchanged(path, self._threads, self._once)
        restored: RestoredTree = result.value
        plan, progress = restored.plan, run.progress
        if restored.references and plan is not None:
            run.shared.of(KnownValues).remember(path, identity, {plan.directory: restored.references})

        changes = () if plan is None else plan.changes
        return restored.tree, RestoreReport(
            run.path, progress.leaves_total, progress.bytes_done, changes, result.stages
        )

    async def _once(self) -> tuple[PipelineResult, RestoreRun, object]:
        """Return what was restored, and the identity that its checkpoint had before it was read."""
        run = self._engine.restore_run(self._request.path, self._threads)
        identity = await self._threads.run(run.store.identity, self._request.path)
        since = time.perf_counter()
        try:
            result = await run_pipeline(self._pipeline, run, self._request)
        except InsufficientMemoryError:
            raise
        except MemoryError as error:  # there was less than there seemed to be
            raise InsufficientMemoryError(run.path) from error

        self._engine.events.info(
            "restore.finished",
            path=run.path,
            n_leaves=run.progress.leaves_total,
            nbytes=run.progress.bytes_done,
            seconds=time.perf_counter() - since,
            memory_wait_s=waited_for_memory_s(result.stages),
        )
        return result, run, identity
