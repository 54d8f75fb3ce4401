"""The async face: one object that owns the budget, the threads and the background saves."""

from __future__ import annotations

__all__ = ("Checkpointer", "Staging")

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias, TypeVar, Unpack, final

from anyio import CancelScope, create_task_group, get_cancelled_exc_class
from anyio.abc import TaskGroup

from penstock.checkpointer import pipelines
from penstock.checkpointer.background_saves import BackgroundSaves
from penstock.checkpointer.description import CheckpointMetadata, describe_checkpoint
from penstock.checkpointer.engine import Engine, SaveKeywords
from penstock.checkpointer.memory_budget import MemoryKeywords, config_and_regulator
from penstock.checkpointer.pipelines import First, configured_pipeline, fitting_pipeline, prioritised
from penstock.checkpointer.process_exit import Stopping
from penstock.checkpointer.restore_arguments import RestoreKeywords, restore_options, with_derive
from penstock.checkpointer.restore_items import ItemsKeywords, restore_items
from penstock.checkpointer.restore_task import RestoreTask
from penstock.checkpointer.save_items import for_items
from penstock.checkpointer.save_task import SaveTask
from penstock.checkpointer.streaming import LeafStream, StreamKeywords, Streams
from penstock.checkpointer.verify import VerifyReport, verify_checkpoint
from penstock.handlers.formats.auto_layout import AutoLayout
from penstock.handlers.formats.items.item_types import Composite
from penstock.handlers.formats.items.protobuf_targets import message_target
from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout
from penstock.handlers.formats.orbax.writing.storage_choice import CODED_CHUNK
from penstock.handlers.leaves.default_handlers import default_handlers
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.concurrency.interpreter_settings import calm_interpreter
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.config.config import Config
from penstock.kernel.config.save_format import SaveFormat
from penstock.kernel.errors import ClosedError
from penstock.kernel.events import get_logger
from penstock.kernel.memory.limit_watch import watching_memory
from penstock.kernel.memory.regulator import RegulatorStatistics
from penstock.kernel.messages.restore import RestoreRequest
from penstock.kernel.messages.restore_options import RestoreReport
from penstock.kernel.messages.save import TreeToSave
from penstock.kernel.pipeline.futures import Milestone, SaveFuture
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import RestoreRun, SaveRun
from penstock.kernel.plugins.handler_registry import HandlerRegistry
from penstock.kernel.protocols.coordinator import Coordinator, SingleProcessCoordinator
from penstock.kernel.protocols.layouts import Layout
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.paths import absolute_path

Staging: TypeAlias = Literal["copy", "overlap"]
T = TypeVar("T")

_ABSENT: Final[Any] = object()
"""No restore target; None would be one."""


@final
class Checkpointer:
    """Saves and restores PyTrees under one memory budget. An async context manager.

    ```python
    async with penstock.Checkpointer() as checkpointer:
        save = await checkpointer.save(path, state)   # staged: the state may change now
        report = await save                           # durable and visible
        state = await checkpointer.restore(path, like=state)
    ```

    Leaving the context waits for background saves, and raises the failure of one that nobody
    awaited; leaving it on an error cancels them, and what they wrote is removed.

    Args:
        config: Options, or the path of a TOML file that holds them; by default what the environment
            says.
        registry: Handlers for leaf types; by default those that come with penstock.
        save_pipeline: The stages of a save.
        restore_pipeline: The stages of a restore.
        store: Where checkpoints lie; by default the local file system, with the options of the config.
        save_format: How arrays are stored; overrides that of the config.
        layout: What they look like there; by default Orbax's is written in that format, and all that
            penstock knows read.
        coordinator: What the processes of a job agree through.
        **memory: How much may be used: `memory_limit`, `memory`, ...; see `penstock.memory.MemoryKeywords`.

    Raises:
        ConfigError: If an option is unknown or does not fit.
    """

    def __init__(
        self,
        *,
        config: Config | str | os.PathLike[str] | None = None,
        registry: HandlerRegistry | None = None,
        save_pipeline: Pipeline[SaveRun] | None = None,
        restore_pipeline: Pipeline[RestoreRun] | None = None,
        store: Store | None = None,
        save_format: SaveFormat | None = None,
        layout: Layout | None = None,
        coordinator: Coordinator | None = None,
        **memory: Unpack[MemoryKeywords],
    ) -> None:
        options, regulator = config_and_regulator(config, memory)
        if layout is None:
            form = options.format if save_format is None else save_format
            layout = AutoLayout(OrbaxLayout(form, min(CODED_CHUNK, regulator.limit // 4)))

        self._engine = Engine(
            options,
            regulator,
            default_handlers() if registry is None else registry,
            LocalStore(io=options.store.io) if store is None else store,
            layout,
            SingleProcessCoordinator() if coordinator is None else coordinator,
            get_logger(),
        )
        chosen = pipelines.save_pipeline(layout) if save_pipeline is None else save_pipeline
        self._save_pipeline = configured_pipeline(fitting_pipeline(chosen, layout), options.save)
        self._restore_pipeline = configured_pipeline(
            pipelines.restore_pipeline() if restore_pipeline is None else restore_pipeline, options.restore
        )
        self._background = BackgroundSaves()
        self._streams = Streams()
        self.stopping = Stopping(options.stopping, self._background)
        self._tasks: TaskGroup | None = None
        self._threads: Threads | None = None
        self._life: AbstractAsyncContextManager[None] | None = None

    async def __aenter__(self) -> Checkpointer:
        if self._life is not None:
            raise ClosedError("a Checkpointer can be entered once; make another one")

        self._life = self._live()
        await self._life.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        assert self._life is not None
        if not self.stopping.is_home:
            return None  # the life of a fork's twin is not the fork's to end

        return await self._life.__aexit__(exc_type, exc_val, exc_tb)

    async def save(
        self,
        path: str | os.PathLike[str],
        tree: object,
        *,
        overwrite: bool = False,
        prioritise: First | None = None,
        staging: Staging = "copy",
        custom_metadata: Mapping[str, Any] | None = None,
        pipeline: Pipeline[SaveRun] | None = None,
        **keywords: Unpack[SaveKeywords],
    ) -> SaveFuture:
        """Begin to save `tree` at `path`; return once it is staged.

        Either the whole checkpoint becomes visible, durably and in one step, or nothing does. Saves
        to one path follow each other, saves to different paths run together.

        Args:
            path: A directory that does not exist yet; its parents may be missing.
            tree: Any PyTree of handled leaf types, or a `Composite` of named items.
            overwrite: Replace the checkpoint at `path`, atomically, when the new one is complete.
            prioritise: Says which leaves are staged first and completely, by key path.
            staging: `"copy"` returns when the tree may be mutated, deleted or donated;
                `"overlap"` when it is planned: await `save.staged()` before changing it.
            custom_metadata: JSON values kept with the checkpoint, as they are now.
            pipeline: Stages for this save alone.
            **keywords: How leaves are stored, and which need not be: `save_args`, `base`, `compare`;
                see `penstock.checkpointer.engine.SaveKeywords`.

        Returns:
            The save in the background. Await it for the durable checkpoint.

        Raises:
            SpecError: If the tree or the path cannot be saved; nothing was written.
            HandlerError: If nobody handles a leaf's type; nothing was written.
            StorageError: If the medium refused.
            PenstockError: If an earlier background save failed and nobody was told yet.

        Cancellation:
            Cancels the save and returns when its temporary files are gone.
        """
        tasks, threads = self._running()
        self._background.raise_unseen()
        final, engine = absolute_path(path), self._engine
        if isinstance(tree, Composite):
            made = await threads.run(for_items, engine, tree, keywords, prioritise)
            engine, tree, keywords, prioritise = made

        run = engine.save_run(
            final, threads, overwrite=overwrite, custom_metadata=custom_metadata, keywords=keywords
        )
        chosen = self._save_pipeline if pipeline is None else fitting_pipeline(pipeline, engine.layout)
        chosen = prioritised(chosen, prioritise)
        turn = self._background.turn(final)
        task = SaveTask(chosen, run, TreeToSave(tree), turn, engine.config.stopping.undo_s)
        del tree
        await self._start(tasks, task, Milestone.STAGED if staging == "copy" else Milestone.PLANNED)
        return task.future

    async def restore(
        self,
        path: str | os.PathLike[str],
        *,
        like: Any = _ABSENT,
        mmap: bool = False,
        split: str | None = None,
        item: str | None = None,
        prioritise: First | None = None,
        pipeline: Pipeline[RestoreRun] | None = None,
        on_report: Callable[[RestoreReport], object] | None = None,
        **onto: Unpack[RestoreKeywords],
    ) -> Any:
        """Return the tree saved at `path`.

        Args:
            path: A checkpoint, an item in it, or a directory of steps, whose latest finished one is taken.
            like: A tree of the structure wanted, whose leaves are concrete values,
                `jax.ShapeDtypeStruct`s or types; for a message in protobuf, one or its class. The result
                has exactly its node types, dtypes and shardings. Without it the result is made of dicts
                and lists, on the devices it was saved from where they are here.
            mmap: Whether leaves live in the page cache where they can, instead of memory of their own:
                NumPy arrays, read-only, and jax.Arrays on CPU devices, in time that does not depend
                on their size. Their checksums are not compared. The files must not be changed.
            split: For safetensors, whose names carry no structure: what separates the keys in them,
                as in `"."`; the result is then made of nested dicts. By default it is one flat dict.
                With `like` there is no need for it: names are those of its keys joined by dots.
            item: Which item of the checkpoint, by its name; by default the one that holds the tree.
            prioritise: Says which leaves are read first, by stored key path.
            pipeline: Stages for this restore alone.
            on_report: Called with the `RestoreReport` when the result is complete.
            **onto: How the result may depart from what is stored: `only`, `rename`, `transforms`, `dtype`,
                `strict`, `on_missing`, `on_unexpected`; see `RestoreKeywords`.

        Raises:
            SpecError: If the options contradict each other, or need a `like`.
            StructureMismatchError: If `like` does not fit; it lists every difference.
            HandlerFailedError: If one of the functions given raises.
            NotACheckpointError: If there is none at `path`, or no such item.
            IncompleteCheckpointError: If a save was interrupted there.
            CorruptCheckpointError: If a document or a data file is damaged.

        Cancellation:
            Stops reading and gives back every byte.
        """
        _, threads = self._running()
        final = absolute_path(path)
        has_like = like is not _ABSENT
        like, finish = message_target(like, final)
        options = restore_options(onto, has_like=has_like)
        target, only = like if has_like else None, onto.get("only")
        request = RestoreRequest(final, target, has_like, options, mmap, split, item, only)
        chosen = prioritised(self._restore_pipeline if pipeline is None else pipeline, prioritise)
        task = RestoreTask(self._engine, threads, with_derive(chosen, options), request)
        tree, report = await self._calmly(task)
        if on_report is not None:
            on_report(report)

        return finish(tree)

    async def restore_items(
        self, path: str | os.PathLike[str], **options: Unpack[ItemsKeywords]
    ) -> dict[str, Any]:
        """Return the values of the items of the checkpoint at `path`; see `penstock.restore_items`."""
        _, threads = self._running()
        return await restore_items(self._engine, threads, self.restore, absolute_path(path), **options)

    def stream(self, path: str | os.PathLike[str], **options: Unpack[StreamKeywords]) -> LeafStream:
        """Restore leaf by leaf: `async for key_path, value in checkpointer.stream(path)`.

        Args:
            path: As for `restore`.
            **options: What is restored, and in which order; see `StreamKeywords`.
        """
        tasks, threads = self._running()
        final, pipeline = absolute_path(path), self._restore_pipeline
        return self._streams.open(self._engine, tasks, threads, pipeline, final, options)

    async def metadata(self, path: str | os.PathLike[str], *, item: str | None = None) -> CheckpointMetadata:
        """Say what the checkpoint at `path` holds. Reads no array data and touches no device.

        Args:
            path: As for `restore`.
            item: As for `restore`.

        Raises:
            NotACheckpointError: If there is none at `path`, or no such item.
            IncompleteCheckpointError: If a save was interrupted there.
            CorruptCheckpointError: If a document is damaged.
        """
        _, threads = self._running()
        final = absolute_path(path)
        layout, store = self._engine.layout, self._engine.store
        describe = partial(threads.run, describe_checkpoint, layout, store, final, item)
        return await self._calmly(partial(self._engine.read_unchanged, final, threads, describe))

    async def verify(self, path: str | os.PathLike[str], *, item: str | None = None) -> VerifyReport:
        """Compare the checkpoint at `path`, at rest, with the checksums that were recorded of it.

        Args:
            path: As for `restore`.
            item: As for `restore`.

        Raises:
            UnsupportedFormatError: If none were: penstock did not write it.
            CorruptCheckpointError: If a document is damaged, so that nothing can be said of the leaves.
        """
        _, threads = self._running()
        final = absolute_path(path)
        check = partial(verify_checkpoint, final, self._engine.store, threads, self._engine.memory, item)
        return await self._calmly(partial(self._engine.read_unchanged, final, threads, check))

    @property
    def engine(self) -> Engine:
        """What all its saves and restores share."""
        return self._engine

    async def wait(self) -> None:
        """Wait until no save is under way.

        Raises:
            PenstockError: The first failure that nobody was told of yet.
        """
        await self._background.wait_ended()
        self._background.raise_unseen()

    def statistics(self) -> RegulatorStatistics:
        """Return the state of the memory budget."""
        return self._engine.memory.statistics()

    async def _calmly(self, work: Callable[[], Awaitable[T]]) -> T:
        tasks, _ = self._running()
        with calm_interpreter(tasks, self._engine.config.loop):
            return await work()

    @asynccontextmanager
    async def _live(self) -> AsyncGenerator[None, None]:
        failure: BaseException | None = None
        try:
            async with self.stopping.watching(), create_task_group() as tasks:
                self._tasks, self._threads = tasks, Threads()
                try:
                    with watching_memory(tasks, self._engine.memory, self._engine.events):
                        yield
                        self._streams.stop()
                        await self._background.wait_ended()
                except (get_cancelled_exc_class(), GeneratorExit):
                    raise
                except BaseException as error:
                    failure = error  # raised below, as it is and not in a group
                    tasks.cancel_scope.cancel()
        finally:
            self._tasks = None

        try:
            self._background.raise_on_leaving(failure)
        finally:
            del failure  # the traceback refers to this frame

    async def _start(self, tasks: TaskGroup, task: SaveTask, until: Milestone) -> None:
        """Start a save in the background; return when it has come so far."""
        self._background.add(task)

        tasks.start_soon(self._calmly, task)
        self.stopping.keep_alive(task.future)
        try:
            await task.future.wait(until)
        except BaseException:
            task.cancel()
            with CancelScope(shield=True):  # bounded by the task, which bounds its own clean-up
                await task.wait_ended()

            raise

    def _running(self) -> tuple[TaskGroup, Threads]:
        self.stopping.check_process()
        if self._tasks is None or self._threads is None:
            raise ClosedError("the Checkpointer is not open; use it inside its `async with`")

        return self._tasks, self._threads
