"""The work of a `Checkpointer`, behind its signatures; loads everything that a save or a restore needs."""

from __future__ import annotations

__all__ = ("Operations",)

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, final

from penstock.checkpointer import pipelines
from penstock.checkpointer.background_saves import SaveOptions
from penstock.checkpointer.description import CheckpointMetadata, describe_checkpoint
from penstock.checkpointer.engine import Compare, Engine, make_engine
from penstock.checkpointer.lifetime import Lifetime
from penstock.checkpointer.pipelines import First
from penstock.checkpointer.restore_items import restore_items
from penstock.checkpointer.restore_keywords import check_single_replica, result_check
from penstock.checkpointer.restore_task import RestoreTask, SingleReplicaTask
from penstock.checkpointer.streaming import LeafStream
from penstock.handlers.layouts.item_parts import message_target
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.config.config import Config
from penstock.kernel.config.save_format import SaveArgs, SaveFormat
from penstock.kernel.errors import PenstockError
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.messages.restore import (
    Only,
    Order,
    RestoreOptions,
    RestoreReport,
    RestoreRequest,
)
from penstock.kernel.messages.save import TreeToSave
from penstock.kernel.pipeline.futures import Milestone, SaveFuture
from penstock.kernel.pipeline.observers import Observer
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import RestoreRun, SaveRun
from penstock.kernel.protocols.coordinator import Coordinator
from penstock.kernel.protocols.layouts import Layout
from penstock.kernel.protocols.leaf import KeyPath
from penstock.kernel.protocols.leaf_handlers import HandlerLookup
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.paths import BUCKETS, bucket_of, path_or_url, path_to_save_to
from penstock.kernel.storage.reading import Reading
from penstock.kernel.storage.snapshots import Views
from penstock.kernel.storage.workspace import Overwrite
from penstock.progress.shown_progress import ShowProgress
from penstock.telemetry.find_observers import observers_of
from penstock.verification.verify import Verification
from penstock.verification.verify_report import VerifyReport

Path: TypeAlias = str | os.PathLike[str]


@final
class Operations:
    """The engine, the pipelines and the life of one Checkpointer. `Checkpointer` says what its methods do.

    Raises:
        ConfigError, PipelineError: If an option of a stage, of the format or of the store does not fit.
    """

    __slots__ = ("_of_buckets", "_pipelines", "engine", "life")

    def __init__(
        self,
        options: Config,
        memory: MemoryRegulator,
        registry: HandlerLookup | None,
        save_pipeline: Pipeline[SaveRun] | None,
        restore_pipeline: Pipeline[RestoreRun] | None,
        store: Store | None,
        save_format: SaveFormat | None,
        layout: Layout | None,
        coordinator: Coordinator | None,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        made = make_engine(options, memory, registry, store, save_format, layout, coordinator)
        self.engine = replace(made, observers=(*observers, *observers_of(options.telemetry)))
        layout = self.engine.layout
        saving = pipelines.save_pipeline() if save_pipeline is None else save_pipeline
        restoring = pipelines.restore_pipeline() if restore_pipeline is None else restore_pipeline
        self._pipelines = self._fitted(saving, restoring)
        self._of_buckets: dict[int, tuple[Pipeline[SaveRun], Pipeline[RestoreRun]]] = {}
        for at_once in {options.store.of_scheme(scheme).concurrency for scheme in BUCKETS}:
            # What waits for a network needs more threads than what waits for a disk.
            if save_pipeline is None:
                saving = saving.configure("write", concurrency=at_once)
            if restore_pipeline is None:
                restoring = restoring.configure("read", concurrency=at_once)

            self._of_buckets[at_once] = self._fitted(saving, restoring)

        self.life = Lifetime(self.engine)

    def _fitted(
        self, saving: Pipeline[SaveRun], restoring: Pipeline[RestoreRun]
    ) -> tuple[Pipeline[SaveRun], Pipeline[RestoreRun]]:
        """Return the pipelines as the layout needs them, with the options that the configuration has."""
        options, layout = self.engine.config, self.engine.layout
        saving = pipelines.fitting_pipeline(saving, layout, joint=self.engine.is_joint)
        saving = pipelines.configured_pipeline(saving, options.save)
        restoring = pipelines.configured_pipeline(restoring, options.restore)
        saving.check(TreeToSave)
        restoring.check(RestoreRequest)
        return saving, restoring

    def _pipelines_at(self, path: str) -> tuple[Pipeline[SaveRun], Pipeline[RestoreRun]]:
        bucket = bucket_of(path)
        if bucket is None:
            return self._pipelines

        return self._of_buckets[self.engine.config.store.of_scheme(bucket[0]).concurrency]

    def with_handlers(
        self, registry: HandlerLookup, layout: Layout | None, coordinator: Coordinator | None
    ) -> Operations:
        """Return the same, with other handlers, and perhaps another layout and another coordinator."""
        other = object.__new__(Operations)
        other._pipelines, other._of_buckets = self._pipelines, self._of_buckets
        engine = self.engine
        other.engine = replace(
            engine,
            registry=registry,
            layout=layout or engine.layout,
            bucket_layouts={} if layout is not None else engine.bucket_layouts,
            coordinator=coordinator or engine.coordinator,
        )
        other.life = self.life
        return other

    async def save(
        self,
        path: Path,
        tree: object,
        until_staged: bool,
        overwrite: Overwrite,
        prioritise: First | None,
        custom_metadata: Mapping[str, Any] | None,
        pipeline: Pipeline[SaveRun] | None,
        save_args: SaveArgs | Callable[[KeyPath], SaveArgs | None] | object,
        base: Path | None,
        compare: Compare,
        progress: ShowProgress,
    ) -> SaveFuture:
        """Begin a save; return when it is staged, or only planned."""
        options = SaveOptions(overwrite, prioritise, custom_metadata, pipeline, save_args, base, compare)
        life, final = self.life, path_to_save_to(path)
        threads, ours = life.running()[1], self._pipelines_at(final)[0]
        try:
            engine = self.engine.at(final).showing(progress)
            task = await life.background.make(threads, engine, ours, final, tree, options)
        except Exception as error:  # also what a handler raised in an earlier save
            with suppress(PenstockError):  # of a process that is no part of the job
                operation = self.engine.operation(final)
                if operation is not None:  # otherwise the others would wait for this process
                    await operation.refuse(error)

            raise

        del tree  # a save in the background must not keep arrays that the caller dropped
        await life.start(task, Milestone.STAGED if until_staged else Milestone.PLANNED)
        return task.future

    async def restore(
        self,
        path: Path,
        like: Any,
        as_type: object,
        options: RestoreOptions,
        *,
        pipeline: Pipeline[RestoreRun] | None,
        on_report: Callable[[RestoreReport], object] | None,
        progress: ShowProgress,
    ) -> Any:
        """Restore a tree."""
        threads = self.life.reading()
        final, has_like = path_or_url(path), like is not ...
        check = result_check(final, as_type)
        options.check_target(has_like=has_like)
        target, finish = message_target(like, final)
        given = self._pipelines_at(final)[1] if pipeline is None else pipeline
        chosen, options = pipelines.with_options(given, options)
        request = RestoreRequest(final, target if has_like else None, has_like, options)
        task = _restore_task(self.engine.at(final).showing(progress), threads, chosen, request)
        tree, report = await self.life.calmly(task)
        result = finish(tree)
        check(result)
        if on_report is not None:
            on_report(report)

        return result

    async def restore_items(
        self,
        restore: Callable[..., Any],
        path: Path,
        like: Mapping[str, Any] | None,
        items: Iterable[str] | None,
    ) -> dict[str, Any]:
        """Restore items by name; `restore` restores one of them."""
        threads = self.life.reading()
        final = path_or_url(path)
        return await restore_items(self.engine.at(final), threads, restore, final, like, items)

    def stream(
        self,
        path: Path,
        like: Any,
        order: Order | None,
        only: Only | None,
        item: str | None,
        pipeline: Pipeline[RestoreRun] | None,
    ) -> LeafStream:
        """Restore leaf by leaf."""
        (tasks, _), threads = self.life.running(), self.life.reading()
        target, has_like = (None, False) if like is ... else (like, True)
        final = path_or_url(path)
        request = RestoreRequest(final, target, has_like, RestoreOptions(item=item, only=only))
        chosen = self._pipelines_at(final)[1] if pipeline is None else pipeline
        return self.life.streams.open(self.engine.at(final), tasks, threads, chosen, request, order)

    async def metadata(self, path: Path, item: str | None) -> CheckpointMetadata:
        """Describe a checkpoint."""
        threads = self.life.reading()
        final = path_or_url(path)
        engine = self.engine.at(final)

        async def describe(source: Reading) -> CheckpointMetadata:
            run = engine.with_store(source.store).restore_run(final, threads)
            return await describe_checkpoint(run, final, item)

        return await self.life.calmly(partial(engine.read_unchanged, final, threads, describe))

    async def verify(self, path: Path, item: str | None) -> VerifyReport:
        """Compare what lies below `path` with its checksums."""
        threads, final = self.life.reading(), path_or_url(path)
        engine = self.engine.at(final)
        verification = Verification(engine.store, threads, engine.memory, engine.shared.of(Views))
        return await self.life.calmly(partial(verification.verify, final, item))


def _restore_task(
    engine: Engine,
    threads: Threads,
    pipeline: Pipeline[RestoreRun],
    request: RestoreRequest,
) -> Callable[[], Awaitable[tuple[Any, RestoreReport]]]:
    axis = request.options.replica_axis
    if axis is not None:
        check_single_replica(request)
    # One process reads each shard once anyway, and on local disks each has its own to read.
    if axis is None or not engine.is_joint or engine.is_local(request.path):
        return RestoreTask(engine, threads, pipeline, request)

    return SingleReplicaTask(engine, threads, pipeline, request, axis)
