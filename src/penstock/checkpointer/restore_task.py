"""One restore: its pipeline, run again if the checkpoint is replaced meanwhile."""

from __future__ import annotations

__all__ = ("RestoreTask", "SingleReplicaTask")

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from penstock.checkpointer.engine import Engine
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import InsufficientMemoryError
from penstock.kernel.messages.restore import RestoredTree, RestoreReport, RestoreRequest
from penstock.kernel.pipeline.observers import observed
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.runner import PipelineResult, run_pipeline
from penstock.kernel.protocols.store_capabilities import requests_of
from penstock.kernel.reports.statistics import waited_for_memory_s
from penstock.kernel.storage.reading import Reading
from penstock.stages.reuse.value_cache import KnownValues

if TYPE_CHECKING:
    import jax

    from penstock.handlers.leaves.single_replica import Share


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
        engine, path = self._engine, self._request.path
        with observed(engine.observers, "restore", path, engine.events) as tell:
            tree, report = await self._restore(path)
            tell(report)

        return tree, report

    async def _restore(self, path: str) -> tuple[Any, RestoreReport]:
        since = requests_of(self._engine.store)
        result, run, source = await self._engine.read_unchanged(path, self._threads, self._once)
        restored: RestoredTree = result.value
        plan, progress = restored.plan, run.progress
        if restored.references and plan is not None:
            run.shared.of(KnownValues).remember(path, source.identity, {plan.directory: restored.references})

        changes = () if plan is None else plan.changes
        return restored.tree, RestoreReport(
            run.path,
            progress.leaves_total,
            progress.bytes_done,
            changes,
            stages=result.stages,
            requests=requests_of(self._engine.store, since),
        )

    async def _once(self, source: Reading) -> tuple[PipelineResult, RestoreRun, Reading]:
        run = self._engine.with_store(source.store).restore_run(self._request.path, self._threads)
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
        return result, run, source


@final
class SingleReplicaTask:
    """Restores one tree together with all processes of the job: one replica reads, the others receive.

    Args:
        engine: Of the Checkpointer.
        threads: Of the Checkpointer.
        pipeline: The stages.
        request: What is wanted, with a target.
        axis: Of meshes, along which replicas lie.
    """

    __slots__ = ("_axis", "_engine", "_pipeline", "_request", "_threads")

    def __init__(
        self,
        engine: Engine,
        threads: Threads,
        pipeline: Pipeline[RestoreRun],
        request: RestoreRequest,
        axis: str,
    ) -> None:
        self._engine = engine
        self._threads = threads
        self._pipeline = pipeline
        self._request = request
        self._axis = axis

    async def __call__(self) -> tuple[Any, RestoreReport]:
        """Return the tree, and the report of what this process read of it."""
        from penstock.handlers.coordinators.recorded_answers import AnsweredStore, RecordingStore
        from penstock.handlers.leaves.single_replica import (
            ReplicaAxis,
            SingleReplica,
            Turns,
            broadcast_together,
        )
        from penstock.stages.locate_once import LocateOnce

        engine, threads, request = self._engine, self._threads, self._request
        axis = ReplicaAxis(self._axis, request.options.primary_replica)
        operation = engine.coordinator.operation(f"restore of {request.path} {request.options.item or ''}")
        assert operation is not None, "there is no other process"
        single = await threads.run(SingleReplica.of, request.like, axis, operation.processes)

        async def read(share: Share) -> tuple[tuple[Any, RestoreReport], Sequence[jax.Array]]:
            once = LocateOnce(share, RecordingStore, AnsweredStore)
            pipeline = self._pipeline.replace("locate", once)
            found = await RestoreTask(engine, threads, pipeline, replace(request, like=single.like))()
            return found, await threads.run(single.sources, found[0])

        limits, turns = engine.config.processes, engine.shared.of(Turns)
        (tree, report), arrays = await broadcast_together(
            operation, single.arrays, axis, read, limits, engine.memory, threads, turns
        )
        return await threads.run(single.together, tree, arrays), report
