"""The work of a `Checkpointer`, without its signatures, and its life while it is open.

Importing this loads everything that a save or a restore needs.
"""

from __future__ import annotations

__all__ = (
    "Lifetime",
    "Operations",
    "RestoreCall",
)

import os
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, cast, final

from anyio import CancelScope
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from penstock.checkpointer import pipelines
from penstock.checkpointer.description import CheckpointMetadata, describe_checkpoint
from penstock.checkpointer.engine import Engine, make_engine
from penstock.checkpointer.parts import CheckpointerParts
from penstock.checkpointer.process_exit import Stopping
from penstock.checkpointer.restores import (
    LeafStream,
    Streams,
    check_single_replica,
    restore_together,
    restore_tree,
    result_check,
)
from penstock.checkpointer.save_future import SaveFuture
from penstock.checkpointer.saves import BackgroundSaves, Onward, SaveTask, for_items
from penstock.event_loop.entered_once import own_tasks
from penstock.event_loop.interpreter_settings import calm_interpreter
from penstock.handlers.layouts.auto_layout import AutoLayout
from penstock.handlers.layouts.item_parts import message_target
from penstock.handlers.layouts.item_types import Composite
from penstock.handlers.stores.publishing.paths import path_or_url
from penstock.handlers.stores.publishing.reading import Reading
from penstock.kernel.concurrency.threads import Threads, caller_gone
from penstock.kernel.errors import (
    ClosedError,
    NotACheckpointError,
    PenstockError,
    RunningLoopError,
    SpecError,
    UnsupportedFormatError,
)
from penstock.kernel.memory.buffers import give_back_freed_memory
from penstock.kernel.memory.regulator import LimitSharing, watching_memory
from penstock.kernel.messages.restore import Only, Order, RestoreOptions, RestoreRequest
from penstock.kernel.messages.save import TreeToSave
from penstock.kernel.pipeline.pipeline import Milestone, Pipeline
from penstock.kernel.pipeline.run_context import RestoreRun, SaveRequest, ShowProgress
from penstock.kernel.protocols.coordinator import Coordinator, SingleProcessCoordinator
from penstock.kernel.protocols.layouts import FoundItems, Layout, ListedItems
from penstock.kernel.protocols.leaf_handlers import HandlerLookup
from penstock.reports.report import RestoreReport
from penstock.telemetry.observers import watched
from penstock.verification.verify import Verification, VerifyReport

T = TypeVar("T")
RunT = TypeVar("RunT")

LOOP_TURNS: Final = 3
"""Turns of the loop in which a save comes to its first call in a worker thread."""

LONG_S: Final = 1.0
"""For how long one works with many leaves, or much data. A million leaves leave 500 MB with the allocator."""


@final
class Lifetime:
    """Everything that one open Checkpointer is running. Used from one event loop.

    Args:
        engine: Of the Checkpointer.
    """

    __slots__ = ("_engine", "_loop_thread", "_tasks", "_threads", "background", "stopping", "streams")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tasks: TaskGroup | None = None
        self._threads: Threads | None = None
        self._loop_thread = 0
        self.background = BackgroundSaves()
        self.streams = Streams()
        self.stopping = Stopping(engine.config.stopping, self.background)

    @asynccontextmanager
    async def live(self) -> AsyncGenerator[None, None]:
        """Open it. Leaving waits for the saves under way; leaving on an error cancels them."""
        memory, events = self._engine.memory, self._engine.events
        coordinator, stores = self._engine.coordinator, self._engine.stores
        # One process would start a thread to learn that it is the only one.
        count = None if isinstance(coordinator, SingleProcessCoordinator) else coordinator.count_neighbours
        sharing = LimitSharing(memory, count, events)
        await sharing.look()
        writers = Threads(1)  # apart from the pipelines', which a report may not delay
        try:
            async with own_tasks(self.background.raise_on_leaving) as tasks:
                self._tasks, self._threads, self._loop_thread = tasks, Threads(), threading.get_ident()
                with (
                    self.stopping.watching(tasks),
                    watching_memory(tasks, memory, events),
                    sharing.going_on(tasks),
                    memory.counting(self._engine.counted_caches()),
                    watched(self._engine.observers, memory.statistics, events),
                    stores.renewing_leases(tasks),
                    self._engine.report_keeper.writing(tasks, writers),
                ):
                    yield
                    self.streams.stop()
                    await self.background.wait_ended()
        finally:
            self._tasks = None
            await self._engine.report_keeper.flush(writers)
            await stores.close(writers)

    def running(self) -> tuple[TaskGroup, Threads]:
        """Return the task group and the threads.

        Raises:
            ClosedError: If the Checkpointer is not open.
            RunningLoopError: In another thread than that of its event loop.
            ForkedError: In a fork of the process that it was opened in.
        """
        self.stopping.home.check("this Checkpointer")
        if self._tasks is None or self._threads is None:
            raise ClosedError("the Checkpointer is not open; use it inside its `async with`")
        if threading.get_ident() != self._loop_thread:
            raise RunningLoopError(
                "this Checkpointer was opened in the event loop of another thread; open one in each loop, "
                "with one `memory=` for all, or use penstock.sync.Checkpointer, which any thread may call"
            )

        return self._tasks, self._threads

    def reading(self) -> Threads:
        """Return threads for what only reads: a cancellation leaves its calls, if the medium hangs.

        Raises:
            ClosedError, ForkedError: As `running`.
        """
        _, threads = self.running()
        return threads.leaving_calls(self._engine.config.stopping.read_s)

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await `work()` with the interpreter settings that the configuration asks for.

        After long work a thread has the allocator return to the system what was freed.
        """
        tasks, threads = self.running()
        since = time.monotonic()
        with calm_interpreter(tasks, self._engine.config.loop):
            try:
                result = await work()
            finally:
                self._engine.memory.free_caches()  # which may have grown

        if time.monotonic() - since > LONG_S and self._tasks is tasks:
            tasks.start_soon(threads.run, give_back_freed_memory)

        return result

    async def start(self, task: SaveTask, until: Milestone) -> None:
        """Start a save in the background; return when it has passed `milestone`.

        Cancellation:
            Cancels the save and returns when its temporary files are gone. That it failed by itself just then
            is not reported; that a handler hangs or failed is, when the Checkpointer is left.
        """
        tasks, _ = self.running()
        self.background.add(task)
        tasks.start_soon(self.run, task)
        if self.stopping.keeps_alive:
            tasks.start_soon(self._keep_alive, task.future)
        try:
            await task.future.wait(until)
        except BaseException:
            task.cancel()
            with CancelScope(shield=True):  # bounded by the task, which bounds its own clean-up
                await task.wait_ended()

            task.let_go()
            raise

    async def _keep_alive(self, save: SaveFuture) -> None:
        """Have the interpreter wait for a save, which begins first: starting a thread blocks."""
        for _ in range(LOOP_TURNS):
            await checkpoint()

        await caller_gone()
        if not save.done:
            self.stopping.keep_alive(save)

    async def wait(self) -> None:
        """Wait until no save is under way; raise the first unseen failure."""
        await self.background.wait_ended()
        self.background.raise_unseen()


Path: TypeAlias = str | os.PathLike[str]

_ARRAY: Final = "checkpoint"
"""Orbax's name for the only leaf of an item that is one array."""


@final
@dataclass(frozen=True, slots=True)
class RestoreCall:
    """All options of one restore but its target, as one value. `Checkpointer.restore` describes each."""

    options: RestoreOptions
    pipeline: Pipeline[RestoreRun] | None = None
    on_report: Callable[[RestoreReport], object] | None = None
    progress: ShowProgress = False


@final
class Operations:
    """The engine and the life of one Checkpointer. `Checkpointer` says what its methods do.

    Raises:
        ConfigError, PipelineError: If an option of a stage, of the format or of the store does not fit.
    """

    __slots__ = ("engine", "life")

    def __init__(self, parts: CheckpointerParts) -> None:
        self.engine = make_engine(parts)
        self.life = Lifetime(self.engine)

    def with_handlers(
        self, registry: HandlerLookup, layout: Layout | AutoLayout | None, coordinator: Coordinator | None
    ) -> Operations:
        """Return the same, with other handlers, and perhaps another layout and another coordinator."""
        engine = self.engine
        return self._with_engine(
            replace(
                engine,
                registry=registry,
                layout=layout or engine.layout,
                bucket_layouts={} if layout is not None else engine.bucket_layouts,
                coordinator=coordinator or engine.coordinator,
            )
        )

    def with_codec(self, codec: str) -> Operations:
        """Return the same, with another codec; see `Engine.with_codec`."""
        return self if codec == self.engine.codec else self._with_engine(self.engine.with_codec(codec))

    def _with_engine(self, engine: Engine) -> Operations:
        other = object.__new__(Operations)
        other.engine, other.life = engine, self.life
        return other

    async def save(self, request: SaveRequest, tree: object, onward: Onward | None = None) -> SaveFuture:
        """Begin a save; return when it is staged, or only planned.

        Args:
            request: All options.
            tree: A tree or a `Composite`.
            onward: What becomes of it at its path; None if it is finalized there.
        """
        life, path = self.life, request.path
        threads = life.running()[1]
        try:
            request.check()
            engine = self.engine.at(path)
            if request.progress is not False:
                engine = engine.with_progress(request.progress)

            life.background.raise_unseen()
            if isinstance(tree, Composite):
                engine, request, tree = await threads.run(for_items, engine, request, tree)

            pipeline = engine.saving  # which was checked when the Checkpointer was made
            links = request.base_if_whole and not engine.is_joint
            if request.pipeline is not None or links:
                # With the stage that several processes agree in.
                pipeline = engine.pipelines.for_save(
                    request.pipeline or engine.saving, engine.written, joint=engine.is_joint, links=links
                )
            if request.prioritise is not None:
                pipeline = pipelines.prioritised(pipeline, request.prioritise)
                pipeline.check(TreeToSave)

            # From here on the message alone holds the tree, once the caller lets go of it.
            message = TreeToSave(tree, pipeline.spec_changes, pipeline.codec_choice)
            turn = life.background.turn(path)
            task = SaveTask(engine, threads, pipeline, request, message, turn, onward)
        except Exception as error:  # also what a handler raised in an earlier save
            with suppress(PenstockError):  # of a process that is no part of the job
                await self.engine.operation(path).refuse(error)  # the others would wait for this process

            raise

        del tree, message  # a save in the background must not keep arrays that the caller dropped
        await life.start(task, Milestone.STAGED if request.staging == "copy" else Milestone.PLANNED)
        return task.future

    async def restore(
        self,
        path: Path,
        like: Any,
        call: RestoreCall,
        as_type: object = None,
    ) -> Any:
        """Restore a tree; `...` for `like` is none."""
        threads, options = self.life.reading(), call.options
        final, has_like = path_or_url(path), like is not ...
        check = None if as_type is None else result_check(final, as_type)
        if not has_like:
            options.check_no_target()

        target, parse_message = message_target(like, final)
        engine, given = self.engine.at(final), call.pipeline
        pipeline = engine.restoring if given is None else pipelines.given_pipeline(given)
        pipeline, options = pipelines.with_options(pipeline, options, is_checked=given is None)
        request = RestoreRequest(final, target if has_like else None, has_like, options)
        if call.progress is not False:
            engine = engine.with_progress(call.progress)

        restore = restore_tree
        if options.replica_axis is not None:
            check_single_replica(request)
            # One process reads each shard once anyway, and on local disks each has its own to read.
            if engine.is_joint and not engine.is_local(final):
                restore = restore_together

        tree, report = await self.life.run(partial(restore, engine, threads, pipeline, request))
        result = tree if parse_message is None else parse_message(tree)
        if check is not None:
            check(result)
        if call.on_report is not None:
            call.on_report(report)

        return result

    async def restore_items(
        self, path: Path, like: Mapping[str, Any] | None, items: Iterable[str] | None, call: RestoreCall
    ) -> dict[str, Any]:
        """Return the values of items of the checkpoint at `path`, all of one and the same checkpoint.

        Args:
            path: A checkpoint of several items.
            like: Targets, by item; `...` stands for "as it was saved".
            items: Which; None for all.
            call: The options for each of them.

        Raises:
            SpecError: If `like` names an item that is not among `items`.
            UnsupportedFormatError: If the checkpoint has no items.
            NotACheckpointError: If a requested item is missing.
        """
        threads, final = self.life.reading(), path_or_url(path)
        engine = self.engine.at(final)
        layout = engine.layout
        if not isinstance(layout, ListedItems):
            raise UnsupportedFormatError(final, f"a {type(layout).__name__} has no items")

        async with engine.view(final, threads) as viewed:
            found = await threads.run(layout.items, viewed.store, final)
            targets = _targets(found, {} if like is None else like, items)

            async def read(_: Reading) -> dict[str, Any]:
                values: dict[str, Any] = {}
                for name, target in targets.items():
                    one = replace(call, options=replace(call.options, item=name))
                    if found.kinds[name] == "array":
                        wrapped = target if target is ... else {_ARRAY: target}
                        values[name] = (await self.restore(found.path, wrapped, one))[_ARRAY]
                    else:
                        values[name] = await self.restore(found.path, target, one)

                return values

            return await viewed.read_unchanged(found.path, threads, read)

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
        engine = self.engine.at(final)
        pipeline = engine.restoring if pipeline is None else pipelines.given_pipeline(pipeline)
        return self.life.streams.open(engine, tasks, threads, pipeline, request, order)

    async def metadata(self, path: Path, item: str | None) -> CheckpointMetadata:
        """Describe a checkpoint."""
        threads = self.life.reading()
        final = path_or_url(path)
        engine = self.engine.at(final)

        async def describe(source: Reading) -> CheckpointMetadata:
            run = engine.restore_run(final, threads, source.store)
            return await describe_checkpoint(run, final, item)

        return await self.life.run(partial(engine.read_unchanged, final, threads, describe))

    async def verify(self, path: Path, item: str | None) -> VerifyReport:
        """Compare what is below `path` with its checksums."""
        threads, final = self.life.reading(), path_or_url(path)
        engine = self.engine.at(final)
        verification = Verification(engine.store, threads, engine.memory, engine.views)
        return await self.life.run(partial(verification.verify, final, item))


def _targets(found: FoundItems, like: Mapping[str, Any], names: Iterable[str] | None) -> dict[str, Any]:
    """Return the target of each item that is wanted, `...` where there is none."""
    if isinstance(names, str):
        raise SpecError(f"items must be a list of names, not {names!r}")
    if not isinstance(cast("object", like), Mapping):
        raise SpecError(f"like must be a mapping from items to targets, not a {type(like).__name__}")

    chosen = list(found.kinds if names is None else names)
    for name in (*chosen, *like):
        if name not in found.kinds:
            listed = ", ".join(found.kinds)
            raise NotACheckpointError(found.path, f"has no item {name!r} (its items: {listed})")
    for name in like:
        if name not in chosen:
            raise SpecError(f"like has {name!r}, which is not among the requested items")

    return {name: like.get(name, ...) for name in chosen}
