"""A directory of steps: what a training loop saves into, and resumes from."""

from __future__ import annotations

__all__ = ("CheckpointManager",)

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from types import TracebackType
from typing import Any, SupportsIndex, final

from anyio import create_task_group, get_cancelled_exc_class
from anyio.abc import TaskGroup

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.handlers.formats.items.item_types import Composite
from penstock.kernel.errors import ClosedError, NotACheckpointError, SpecError
from penstock.kernel.pipeline.futures import SaveFuture
from penstock.kernel.storage.paths import absolute_path
from penstock.steps import step_directory as on_disk
from penstock.steps.keep_policies import KeepAll, KeepPolicy, Metric, Mode, best_of, ranking_of
from penstock.steps.preemption import awaits_preemption, hear_sigterm
from penstock.steps.restore_step import restore_step
from penstock.steps.save_policies import Always, SavePolicy
from penstock.steps.save_queue import StepSaves
from penstock.steps.step_contents import ABSENT, StepMetadata, describe_step, step_number
from penstock.steps.step_names import NameFormat, StepNames
from penstock.steps.step_watch import Watch, watch_steps


@final
class CheckpointManager:
    """Saves steps into one directory by policy, keeps the ones worth keeping, and restores them.

    ```python
    async with penstock.CheckpointManager(
        "run", save_when=EverySteps(100) | OnPreemption(), keep=KeepLast(3) | KeepBest(2, "loss")
    ) as manager:
        state = await manager.restore(like=state) if manager.latest_step() is not None else state
        for step in range(...):
            state, loss = train(state)
            await manager.save(step, state, metrics={"loss": loss})   # staged, or not wanted now
    ```

    An async context manager. Leaving it waits for saves and deletions, and raises the failure of a save
    that nobody awaited; leaving it on an error cancels the saves. One manager at a time saves into a
    root; any number may read it, with `read_only=True`.

    Args:
        root: The directory of steps; made if it is not there.
        save_when: Which of the steps offered to `save` are saved.
        keep: Which steps stay once a new one is durable; the last one always does.
        names: What the directories of steps are called.
        trash: A folder in `root` that steps are moved to instead of being removed.
        metric: What `best_step` ranks by; by default what the first `KeepBest` in `keep` does.
        mode: Whether the least or the greatest is best, with `metric`.
        metadata: The caller's own, JSON, kept with `root`; what is there already is not replaced.
        read_only: Whether nothing is written or deleted.
        clean: Whether what crashed saves left in `root` is removed on opening.
        link: Whether arrays that an earlier step holds already are linked to it, not written again.
        sigterm: Whether SIGTERM no longer ends the process but tells `OnPreemption`; by default if
            `save_when` has that in it.
        checkpointer: What saves and restores, to share one memory budget; it must be open.
        **options: Those of `penstock.Checkpointer`, if none is given.

    Raises:
        SpecError, ConfigError: If an option does not fit.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_when: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        names: NameFormat | None = None,
        trash: str | None = None,
        metric: Metric | None = None,
        mode: Mode = "min",
        metadata: Mapping[str, Any] | None = None,
        read_only: bool = False,
        clean: bool = True,
        link: bool = True,
        sigterm: bool | None = None,
        checkpointer: Checkpointer | None = None,
        **options: Any,
    ) -> None:
        if checkpointer is not None and options:
            raise SpecError(f"with a checkpointer, {', '.join(options)} is for that one")

        save_when = Always() if save_when is None else save_when
        keep = KeepAll() if keep is None else keep
        self._root = absolute_path(root)
        self._names: NameFormat = StepNames() if names is None else names
        self._ranking = ranking_of(keep) if metric is None else (metric, mode)
        self._metadata = metadata
        self._read_only = read_only
        self._clean = clean and not read_only
        self.awaits_preemption = awaits_preemption(save_when)  #: whether `save_when` has `OnPreemption`
        self._sigterm = self.awaits_preemption if sigterm is None else sigterm
        self._owns = checkpointer is None
        self._checkpointer = Checkpointer(**options) if checkpointer is None else checkpointer
        self._saves = StepSaves(
            self._checkpointer, self._root, self._names, save_when, keep, trash=trash, link=link
        )
        self._tasks: TaskGroup | None = None
        self._life: AbstractAsyncContextManager[None] | None = None

    async def __aenter__(self) -> CheckpointManager:
        if self._life is not None:
            raise ClosedError("a CheckpointManager can be entered once; make another one")

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
        return await self._life.__aexit__(exc_type, exc_val, exc_tb)

    @property
    def root(self) -> str:
        """The directory of steps."""
        return self._root

    @property
    def checkpointer(self) -> Checkpointer:
        """What saves and restores."""
        return self._checkpointer

    @property
    def saving(self) -> Sequence[int]:
        """Steps that are being saved now."""
        return self._saves.saving

    @property
    def preempted(self) -> bool:
        """Whether the process was told to end, since the manager was opened."""
        return self._saves.preempted

    def preempt(self) -> None:
        """Note that the process was told to end, as SIGTERM does. From any thread, or a signal handler."""
        self._saves.preempt()

    def should_save(self, step: SupportsIndex) -> bool:
        """Whether `save` would save `step` now: it is newer than the latest, and the policy wants it."""
        return not self._read_only and self._saves.should_save(step_number(step))

    async def save(
        self,
        step: SupportsIndex,
        items: object,
        *,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
        force: bool = False,
        overwrite: bool = False,
        **options: Any,
    ) -> SaveFuture | None:
        """Begin to save a step, if the policy wants it; return once it is staged.

        Args:
            step: Its number.
            items: A tree, or a `Composite` of named items.
            metrics: Numbers, by name; kept with the step, and what `KeepBest` looks at.
            custom_metadata: JSON values kept with the step.
            force: Save it whatever the policy says.
            overwrite: Replace the step if it is there, and allow one older than the latest.
            **options: Those of `Checkpointer.save`: `staging`, `prioritise`, `save_args`, `compare`, ...

        Returns:
            The save in the background; None if the policy does not want it.

        Raises:
            StepExistsError: If the step is there, or being saved.
            OlderStepError: If it is older than the latest.
            SpecError, HandlerError, StorageError: As `Checkpointer.save`.
            PenstockError: If an earlier save failed and nobody was told yet.

        Cancellation:
            Cancels the save and returns when its temporary files are gone.
        """
        tasks = self._running()
        if self._read_only:
            raise SpecError(f"{self._root!r} was opened read_only; nothing can be saved there")

        number = step_number(step)
        self._saves.raise_unseen()
        self._saves.check_order(number, overwrite=overwrite)
        if not force and not self._saves.is_wanted(number):
            return None

        options.update(custom_metadata=custom_metadata, overwrite=overwrite)
        return await self._saves.begin(tasks, number, items, metrics, options)

    async def restore(
        self,
        step: SupportsIndex | None = None,
        *,
        like: Any = ABSENT,
        item: str | None = None,
        **options: Any,
    ) -> Any:
        """Return what was saved as a step.

        While it is read, no penstock on this machine deletes it.

        Args:
            step: Its number; by default the latest.
            like: As for `Checkpointer.restore`; or a `Composite` of such, for some items, where `...`
                means as it was saved.
            item: The name of one item, which alone is restored.
            **options: Those of `Checkpointer.restore`.

        Returns:
            The tree, if the step holds one or `item` or one `like` is given; else a `Composite`.

        Raises:
            NotACheckpointError: If there is no such step, or none at all.
            PenstockError: As `Checkpointer.restore`.
        """
        self._running()
        number = self._chosen(step)
        path = self._saves.catalogue.path(number)
        if like is not ABSENT:
            options["like"] = like
        if item is not None or (like is not ABSENT and not isinstance(like, Composite)):
            tree = await self._checkpointer.restore(path, item=item, **options)
        else:
            tree = await restore_step(self._checkpointer, self._saves.threads, path, options)

        self._saves.note_base(number)
        return tree

    def all_steps(self) -> Sequence[int]:
        """Every durable step, ascending, as far as this manager knows; see `reload`."""
        return self._saves.catalogue.steps

    def latest_step(self) -> int | None:
        """The last durable step; None if there is none."""
        return self._saves.catalogue.latest

    async def best_step(self, metric: Metric | None = None, mode: Mode = "min") -> int | None:
        """Return the step with the best metric, the latest of equals; None if none has a finite one.

        Args:
            metric: By default that of the manager, with its mode.
            mode: Whether the least or the greatest is best.

        Raises:
            SpecError: If no metric was named, here or to the manager.
        """
        self._running()
        ranking = self._ranking if metric is None else (metric, mode)
        if ranking is None:
            raise SpecError("best by what? Name a metric, here or to the manager")

        catalogue = self._saves.catalogue

        def find() -> int | None:
            return best_of(catalogue.infos(steps, frozenset({"metrics"})), *ranking)

        steps = catalogue.snapshot()
        return await self._saves.threads.run(find)

    async def metadata(self, step: SupportsIndex | None = None) -> StepMetadata:
        """Say what a step holds, by default the latest, without reading arrays or touching a device.

        Raises:
            NotACheckpointError: If there is no such step, or none at all.
            CorruptCheckpointError: If a document is damaged.
        """
        self._running()
        number = self._chosen(step)
        path, engine = self._saves.catalogue.path(number), self._checkpointer.engine

        async def describe() -> StepMetadata:
            return await self._saves.threads.run(describe_step, engine.layout, engine.store, path, number)

        return await engine.read_unchanged(path, self._saves.threads, describe)

    async def root_metadata(self) -> Mapping[str, Any] | None:
        """Return what was given as `metadata` when the root was made; None if nothing was."""
        self._running()
        store = self._checkpointer.engine.store
        return await self._saves.threads.run(on_disk.read_root_metadata, store, self._root)

    async def delete(self, step: SupportsIndex) -> None:
        """Delete a step; returns when it is gone, which it is not while somebody on this machine reads it.

        Raises:
            NotACheckpointError: If there is no such step.
            StorageError: If it could not be deleted; it is still there then.

        Cancellation:
            It will be deleted all the same.
        """
        self._running()
        number = step_number(step)
        if self._read_only:
            raise SpecError(f"{self._root!r} was opened read_only; nothing can be deleted there")
        if number not in self._saves.catalogue:
            raise NotACheckpointError(self._saves.catalogue.path(number), "there is no such step")

        await self._saves.retention.delete(number)

    def pin(self, step: SupportsIndex) -> None:
        """Keep a step, whatever the policy says, as long as this manager is open or until `unpin`."""
        self._saves.retention.pins.add(step_number(step))

    def unpin(self, step: SupportsIndex) -> None:
        """Leave a step to the policy again."""
        self._saves.retention.pins.discard(step_number(step))

    async def reload(self) -> None:
        """Look again at what lies in the root, which others may have changed."""
        self._running()
        await self._saves.load()

    def watch(self, **options: Any) -> Watch:
        """Yield each step that becomes durable, whoever saves it; options as those of `penstock.watch`."""
        self._running()
        store, threads = self._checkpointer.engine.store, self._saves.threads
        found = self._saves.note_found
        return watch_steps(store, threads, self._root, self._names, on_step=found, **options)

    async def wait(self) -> None:
        """Wait until no save is under way, and what the policy does not keep is deleted or being read.

        Raises:
            PenstockError: The first failure that nobody was told of yet.
        """
        self._running()
        await self._saves.settle()
        await self._checkpointer.wait()

    async def close(self) -> None:
        """Wait as `wait` does; afterwards nothing more can be asked of the manager but to be left."""
        await self.wait()
        self._tasks = None

    def _chosen(self, step: SupportsIndex | None) -> int:
        if step is not None:
            return step_number(step)

        latest = self.latest_step()
        if latest is None:
            raise NotACheckpointError(self._root, "there is no step in it")

        return latest

    @asynccontextmanager
    async def _live(self) -> AsyncGenerator[None]:
        async with self._checkpointer if self._owns else nullcontext():
            await self._saves.open(self._metadata, writes=not self._read_only, clean=self._clean)
            failure: BaseException | None = None
            try:
                async with create_task_group() as tasks:
                    try:
                        tasks.start_soon(self._saves.retention.deleter.run)
                        if self._sigterm:
                            await tasks.start(hear_sigterm, self.preempt)

                        self._tasks = tasks
                        yield
                        await self._saves.settle()
                    except (get_cancelled_exc_class(), GeneratorExit):
                        raise
                    except BaseException as error:
                        failure = error  # raised below, as it is and not in a group

                    tasks.cancel_scope.cancel()
            finally:
                self._tasks = None
                if failure is not None:
                    self._saves.cancel()

            failure = failure or self._saves.take_unseen()
            if failure is not None:
                try:
                    raise failure
                finally:
                    del failure  # the traceback refers to this frame

    def _running(self) -> TaskGroup:
        if self._tasks is None:
            raise ClosedError("the CheckpointManager is not open; use it inside its `async with`")

        return self._tasks
