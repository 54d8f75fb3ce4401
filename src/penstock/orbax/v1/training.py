"""Directories of steps in the newer API: their checkpointer, the steps that it knows, and the save of one."""

from __future__ import annotations

__all__ = (
    "CheckpointMetadata",
    "Checkpointer",
    "RootMetadata",
    "errors",
    "preservation_policies",
    "save_decision_policies",
)

import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeAlias, cast, final

from penstock import kernel
from penstock.embedding import failures, step_number
from penstock.orbax import policies as preservation_policies
from penstock.orbax import policies as save_decision_policies
from penstock.orbax.logging import SaveTimes, StandardLogger, log_restore, log_save
from penstock.orbax.manager_steps import CheckpointInfo, CheckpointManagerOptions, ManagerSteps, StepChange
from penstock.orbax.options import FileOptions
from penstock.orbax.policies import (
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    InitialSavePolicy,
    PreemptionCheckpointingPolicy,
    PreservationPolicy,
    PreserveAll,
    SaveDecisionPolicy,
)
from penstock.orbax.v1 import errors, loading
from penstock.orbax.v1.errors import StepAlreadyExistsError, StepNotFoundError
from penstock.orbax.v1.handler_registration import STATE
from penstock.orbax.v1.loading import delete, load_checkpointables_async
from penstock.orbax.v1.operation import AsyncResponse, BackgroundOperation, begin, wait_for
from penstock.orbax.v1.options import Context, get_context
from penstock.orbax.v1.path import Path, PathLike
from penstock.orbax.v1.saving import begin_save, check_state, wait_until_staged
from penstock.orbax.v1.step_formats import CheckpointMetadata as OneCheckpoint
from penstock.orbax.v1.step_formats import NameFormat, RootMetadata, standard_name_format
from penstock.orbax.v1.step_formats import StepCheckpointMetadata as CheckpointMetadata
from penstock.orbax.v1.tree import JsonType, PyTreeOf

Step: TypeAlias = int | CheckpointMetadata[Any]


@failures.short_tracebacks
@final
class Checkpointer:
    """Saves steps into one directory, keeps the ones worth keeping, and loads them.

    A context manager that also works inside a running event loop. It serves one thread, and only one process
    may save. One save runs at a time.

    Args:
        directory: The directory of the steps; created if it does not exist.
        context: The options of saves and loads, outside of another context's `with`.
        save_decision_policy: Decides which steps are saved, also one of `penstock.steps`; by default every
            step that comes when no save is running, and the last one before a preemption.
        preservation_policy: Decides which steps stay, likewise; by default all.
        step_name_format: How steps are named; by default by their number.
        custom_metadata: The caller's own JSON values, kept with the directory. Existing ones stay.
        cleanup_tmp_directories: Whether to remove what crashed saves left.
        lightweight_initialize: Whether to skip reading time and metrics of existing steps.
        logger: Its `log_entry` is called with a dict for each save and load; by default penstock's log.

    Raises:
        ValueError: If options contradict each other.
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        context: Context | None = None,
        save_decision_policy: SaveDecisionPolicy | None = None,
        preservation_policy: PreservationPolicy | None = None,
        step_name_format: NameFormat[CheckpointMetadata[None]] | None = None,
        custom_metadata: JsonType | None = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
        logger: Any = None,
    ) -> None:
        self._context = Context(context or get_context())
        names = step_name_format or standard_name_format()
        # The first step, each that comes when no save is running, and the last one before a preemption.
        often = [InitialSavePolicy(), ContinuousCheckpointingPolicy(), PreemptionCheckpointingPolicy()]
        options = CheckpointManagerOptions(
            save_decision_policy=save_decision_policy or AnySavePolicy(often),
            preservation_policy=preservation_policy or PreserveAll(),
            step_name_format=names,
            single_host_load_and_broadcast=bool(getattr(names, "single_host_load_and_broadcast", False)),
            cleanup_tmp_directories=cleanup_tmp_directories,
            todelete_full_path=self._context.deletion.gcs_deletion_options.todelete_full_path,
            file_options=FileOptions(path_permission_mode=self._context.file.path_permission_mode),
            multiprocessing_options=cast("Any", self._context.multiprocessing),
            lightweight_initialize=lightweight_initialize,
        )
        self._steps = ManagerSteps(directory, options, cast("Mapping[str, Any] | None", custom_metadata))
        self._logger = StandardLogger() if logger is None else logger
        self._saving: StepSave | None = None
        self._deleting: BackgroundOperation[bool] | None = None

    @property
    def directory(self) -> Path:
        """The directory of the steps."""
        return cast("Path", self._steps.directory)

    @property
    def latest(self) -> CheckpointMetadata[None] | None:
        """The last step, saved or being saved; None if there is none."""
        return (self.checkpoints or (None,))[-1]

    @property
    def checkpoints(self) -> Sequence[CheckpointMetadata[None]]:
        """Every step that this checkpointer knows, in ascending order, with the one that is being saved.

        Nothing is read for it: `metadata` says more of a step, `reload` looks for steps of others.
        """
        return [
            CheckpointMetadata(
                info.step,
                info.path,
                metadata=None,
                commit_timestamp_nsecs=int(info.time.timestamp() * 1e9),
                metrics=info.metrics,
            )
            for info in self._steps.infos
        ]

    def should_save(self, step: Step) -> bool:
        """Return whether `save` would save a step: it is newer than all, and the policy asks for it."""
        return self._should_save(_number(step), self._steps.infos)

    def save(
        self,
        step: int,
        state: PyTreeOf,
        *,
        checkpointable_name: str = STATE,
        force: bool = False,
        overwrite: bool = False,
        metrics: JsonType | None = None,
        custom_metadata: JsonType | None = None,
    ) -> bool:
        """Save a tree as a step, if the policy asks for it; return when it is durable.

        Args:
            step: The number of the step.
            state: A PyTree of arrays, numbers and strings.
            checkpointable_name: The name of the item that holds the tree.
            force: Save whatever the policy says.
            overwrite: Whether to replace the step, in one move when the new one is complete.
            metrics: JSON values kept with the step, for policies and people.
            custom_metadata: The caller's own JSON values, kept with the step.

        Returns:
            Whether it was saved.

        Raises:
            StepAlreadyExistsError: If the step exists and `overwrite` is off. It is a FileExistsError.
            Exception: What `penstock.orbax.v1.save` raises, or the failure of an earlier save.
        """
        check_state(state)
        new = NewStep(step, {checkpointable_name: state}, metrics, custom_metadata, force, overwrite)
        return self._save(new)

    def save_checkpointables(
        self,
        step: int,
        checkpointables: dict[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: JsonType | None = None,
        custom_metadata: JsonType | None = None,
    ) -> bool:
        """Save named objects as a step, if the policy asks for it; return when it is durable. See `save`."""
        return self._save(NewStep(step, checkpointables, metrics, custom_metadata, force, overwrite))

    def save_async(
        self,
        step: int,
        state: PyTreeOf,
        *,
        checkpointable_name: str = STATE,
        force: bool = False,
        overwrite: bool = False,
        metrics: JsonType | None = None,
        custom_metadata: JsonType | None = None,
    ) -> AsyncResponse[bool] | None:
        """Start to save a tree as a step; return when it may be changed, deleted or donated. See `save`.

        Returns:
            What can be awaited, or waited for; None if the policy does not ask for the step. A failure is
            raised there, or else by the next save, `wait` or `close`, once.
        """
        check_state(state)
        new = NewStep(step, {checkpointable_name: state}, metrics, custom_metadata, force, overwrite)
        with get_context(self._context):
            return self._begin_save(new)

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: dict[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: JsonType | None = None,
        custom_metadata: JsonType | None = None,
    ) -> AsyncResponse[bool] | None:
        """Start to save named objects as a step; return when they may be changed. See `save_async`."""
        new = NewStep(step, checkpointables, metrics, custom_metadata, force, overwrite)
        with get_context(self._context):
            return self._begin_save(new)

    def cancel(self, step: Step | None = None) -> None:
        """Stop a save in the background, and remove what it wrote. No error is raised for it.

        Args:
            step: A step that is deleted, too, if it exists.
        """
        self._wait_for_deletion()
        if self._saving is not None:
            self._saving.cancel()
            with suppress(Exception):  # a save that was cancelled fails
                self._saving.result()
        if step is not None:
            self.delete(step, missing_ok=True)

    def load(
        self,
        step: Step | None = None,
        abstract_state: PyTreeOf | None = None,
        *,
        checkpointable_name: str = STATE,
    ) -> PyTreeOf:
        """Load the tree of a step.

        Args:
            step: The step, or its metadata; None for the latest.
            abstract_state: What the tree is to be; None for as it was saved.
            checkpointable_name: The name of the item that holds it.

        Raises:
            StepNotFoundError: If there is no such step, or no step at all. It is a FileNotFoundError.
            Exception: What `penstock.orbax.v1.load` raises.
        """
        return self.load_checkpointables(step, {checkpointable_name: abstract_state})[checkpointable_name]

    def load_checkpointables(
        self, step: Step | None = None, abstract_checkpointables: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Load named objects of a step: those that are asked for, or all. See `load`."""
        return wait_for(self._begin_load(step, abstract_checkpointables))

    def load_async(
        self, step: Step | None = None, abstract_state: PyTreeOf | None = None
    ) -> AsyncResponse[PyTreeOf]:
        """Start to load the tree of a step, and return at once. See `load`."""
        loading_items = self._begin_load(step, {STATE: abstract_state})

        async def tree_of(operation: BackgroundOperation[PyTreeOf]) -> PyTreeOf:
            return (await loading_items)[STATE]

        return begin("load", tree_of)

    def load_checkpointables_async(
        self, step: Step | None = None, abstract_checkpointables: dict[str, Any] | None = None
    ) -> AsyncResponse[dict[str, Any]]:
        """Start to load named objects of a step, and return at once. See `load_checkpointables`."""
        return self._begin_load(step, abstract_checkpointables)

    def metadata(self, step: Step | None = None) -> CheckpointMetadata[Any]:
        """Describe the tree of a step, without reading an array; None for the latest.

        Raises:
            StepNotFoundError: If there is no such step, or no step at all. It is a FileNotFoundError.
        """
        return self._about(step, loading.metadata)

    def checkpointables_metadata(self, step: Step | None = None) -> CheckpointMetadata[dict[str, Any]]:
        """Describe the items of a step. See `metadata`."""
        return self._about(step, loading.checkpointables_metadata)

    def root_metadata(self) -> RootMetadata:
        """Return what is kept with the directory."""
        known = self._steps.metadata().custom_metadata
        return RootMetadata(directory=self.directory, custom_metadata=known)

    def delete(self, step: Step, *, checkpointable_name: str | None = None, missing_ok: bool = False) -> bool:
        """Delete a step, whatever the policy says, or one item of it.

        Args:
            step: The step, or its metadata.
            checkpointable_name: The item; by default the whole step.
            missing_ok: Whether it may be absent.

        Returns:
            Whether there was something to delete.

        Raises:
            StepNotFoundError: If there is no such step, and `missing_ok` is off. It is a FileNotFoundError.
            Exception: What `penstock.orbax.v1.delete` raises.
        """
        self.delete_async(step, checkpointable_name=checkpointable_name, missing_ok=missing_ok)
        return self._wait_for_deletion()

    def delete_async(
        self, step: Step, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> AsyncResponse[bool]:
        """Begin to delete, and return. A whole step is gone from `checkpoints` at once. See `delete`."""
        number = _number(step)
        self.wait()
        known = self._steps.exists(number)
        if not known and not missing_ok:
            raise StepNotFoundError(str(self.directory), number)
        if checkpointable_name is None:
            self._steps.forget(number)

        def remove() -> bool:
            if known and checkpointable_name is None:
                self._steps.delete(number)
            elif known:
                return delete(
                    self._steps.path(number), checkpointable_name=checkpointable_name, missing_ok=missing_ok
                )
            return known

        once = partial(self._steps.agree_on, f"delete {checkpointable_name or 'all'} of {number}", remove)

        async def run(operation: BackgroundOperation[bool]) -> bool:
            return await kernel.Threads(1).run(once)

        with get_context(self._context):
            self._deleting = begin(f"deletion of step {number}", run)
            return self._deleting

    def reload(self) -> None:
        """List the directory again, since others may have changed it."""
        self._wait_for_deletion()
        self._steps.reload()

    def is_saving_in_progress(self) -> bool:
        """Return whether a save is running in the background."""
        return self._saving is not None and not self._saving.done()

    def wait(self) -> None:
        """Wait until no save and no deletion is running. Raises the failure of either, once."""
        self._wait_for_deletion()
        self._wait_for_save()

    def close(self) -> None:
        """Wait until nothing is running. Idempotent."""
        try:
            self.wait()
        finally:
            self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def save_pytree(self, *args: Any, **kwargs: Any) -> bool:
        """Do what `save` does. Deprecated: use `save`."""
        warnings.warn("Use `save` instead.", DeprecationWarning, stacklevel=2)
        return self.save(*args, **kwargs)

    def save_pytree_async(self, *args: Any, **kwargs: Any) -> AsyncResponse[bool] | None:
        """Do what `save_async` does. Deprecated: use `save_async`."""
        warnings.warn("Use `save_async` instead.", DeprecationWarning, stacklevel=2)
        return self.save_async(*args, **kwargs)

    def load_pytree(self, *args: Any, **kwargs: Any) -> PyTreeOf:
        """Do what `load` does. Deprecated: use `load`."""
        warnings.warn("Use `load` instead.", DeprecationWarning, stacklevel=2)
        return self.load(*args, **kwargs)

    def load_pytree_async(self, *args: Any, **kwargs: Any) -> AsyncResponse[PyTreeOf]:
        """Do what `load_async` does. Deprecated: use `load_async`."""
        warnings.warn("Use `load_async` instead.", DeprecationWarning, stacklevel=2)
        return self.load_async(*args, **kwargs)

    def pytree_metadata(self, *args: Any, **kwargs: Any) -> CheckpointMetadata[Any]:
        """Do what `metadata` does. Deprecated: use `metadata`."""
        warnings.warn("Use `metadata` instead.", DeprecationWarning, stacklevel=2)
        return self.metadata(*args, **kwargs)

    def _save(self, new: NewStep) -> bool:
        with get_context(self._context):
            saving = self._begin_save(new, synchronous=True)
        return saving is not None and saving.result()

    def _begin_save(self, new: NewStep, *, synchronous: bool = False) -> StepSave | None:
        """Start to save a step, if the policy asks for it; return when its objects may be changed.

        Raises:
            StepAlreadyExistsError: If it exists and is not to be overwritten.
            Exception: The failure of an earlier save or deletion, or of this one so far.
        """
        number, times = _number(new.step), SaveTimes()
        self._wait_for_deletion()
        if number in self._steps.steps and not new.overwrite:
            raise StepAlreadyExistsError(number)
        says = partial(self._should_save, steps=[info for info in self._steps.infos if info.step != number])
        if not new.force and not self._steps.is_wanted(number, says):
            return None

        with times.part("wait_for_prev"):
            self._wait_for_save()

        choose = self._steps.to_delete
        with self._steps.adding(number, new.metrics, choose, times) as (change, failure):
            try:
                if failure is not None:
                    raise failure
            finally:
                del failure  # its traceback refers to this frame

            self._steps.hold(number)
            with times.part("checkpointer_blocking"):
                operation = begin_save(
                    self._steps.new_path(number),
                    new.items,
                    overwrite=new.overwrite,
                    custom_metadata=new.custom_metadata,
                    metrics=new.metrics,
                    is_step=True,
                )
                saving = wait_until_staged(operation)

        self._saving = StepSave(change, saving, self._steps.complete, self._ended)
        log_save(self._logger, number, self.directory, times, synchronous=synchronous)
        return self._saving

    def _begin_load(
        self, step: Step | None, abstract: dict[str, Any] | None
    ) -> BackgroundOperation[dict[str, Any]]:
        """Start to load objects of a step, which penstock does not delete on this machine meanwhile.

        Raises:
            StepNotFoundError: If there is no such step.
        """
        begun = time.time()
        info = self._existing(step)
        if self._saving is not None and self._saving.step == info.step:
            self._wait_for_save()

        async def load(operation: BackgroundOperation[dict[str, Any]]) -> dict[str, Any]:
            path, reading = self._steps.path(info.step), time.time()
            with self._steps.reading(path):
                found = await load_checkpointables_async(path, abstract)
            log_restore(self._logger, info.step, self.directory, begun, reading)
            return found

        with get_context(self._context):
            return begin(f"load of step {info.step}", load)

    def _existing(self, step: Step | None) -> CheckpointInfo:
        """Return a step, or with None the latest.

        Raises:
            StepNotFoundError: If there is none.
        """
        number = None if step is None else _number(step)
        for info in reversed(self._steps.infos):
            if number in (None, info.step):
                return info

        raise StepNotFoundError(str(self.directory), number)

    def _about(
        self, step: Step | None, describe: Callable[[Any], OneCheckpoint[Any]]
    ) -> CheckpointMetadata[Any]:
        """Return the metadata of a checkpoint together with that of its step."""
        info = self._existing(step)
        with get_context(self._context):
            found = describe(self._steps.path(info.step))

        return CheckpointMetadata(
            info.step,
            found.path,
            metadata=found.metadata,
            init_timestamp_nsecs=found.init_timestamp_nsecs,
            commit_timestamp_nsecs=found.commit_timestamp_nsecs,
            custom_metadata=found.custom_metadata,
            metrics=info.metrics,
        )

    def _wait_for_deletion(self) -> bool:
        """Wait for a deletion, and return whether it found anything. Raises its failure, once."""
        deleting, self._deleting = self._deleting, None
        return deleting is not None and deleting.result()

    def _should_save(self, number: int, steps: Sequence[CheckpointInfo]) -> bool:
        return self._steps.should_save(number, steps, is_saving=self.is_saving_in_progress())

    def _wait_for_save(self) -> None:
        if self._saving is not None:
            self._saving.result()

    def _ended(self, saving: StepSave, failed: bool) -> None:
        """Forget a save that is over; if it failed, the directory says which steps there are."""
        if self._saving is saving:
            self._saving = None
            if failed:
                self._steps.reload()


@final
@dataclass(frozen=True, slots=True)
class NewStep:
    """The request to save a step; see `Checkpointer.save`."""

    step: int
    items: Mapping[str, Any]
    metrics: JsonType | None
    custom_metadata: JsonType | None
    force: bool
    overwrite: bool


def _number(step: Step) -> int:
    return step_number(step.step if isinstance(step, CheckpointMetadata) else step)


@failures.short_tracebacks
@final
class StepSave(AsyncResponse[bool]):
    """The save of a step in the background, and the deletion of those that it replaces.

    Args:
        change: The step, and those that are deleted once it is durable.
        saving: The save.
        delete: Deletes them; blocking.
        ended: Called in each thread that waits, once all is over, with whether it failed.
    """

    def __init__(
        self,
        change: StepChange,
        saving: BackgroundOperation[None],
        delete: Callable[[StepChange], None],
        ended: Callable[[StepSave, bool], None],
    ) -> None:
        self.step = change.step
        self._change = change
        self._saving = saving
        self._delete = delete
        self._ended = ended
        self._operation: BackgroundOperation[bool] = begin(f"save of step {change.step}", self._run)

    def result(self, timeout: float | None = None) -> bool:
        """Wait until the step is durable and those that it replaces are gone.

        Args:
            timeout: The longest wait in seconds; None for no limit.

        Raises:
            TimeoutError: If it is not done by then. It goes on.
            Exception: What the save failed with.
        """
        try:
            found = self._operation.result(timeout)
        except BaseException:
            if self.done():  # and the wait was not given up
                self._ended(self, True)
            raise

        self._ended(self, False)
        return found

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """See `AsyncResponse`."""
        self._operation.on_complete(callback)

    def done(self) -> bool:
        """Return whether it has ended, with or without an error."""
        return self._operation.done()

    def cancel(self) -> None:
        """Ask the save to stop and undo its work. Does not wait."""
        self._saving.cancel()

    def __await__(self) -> Generator[Any, Any, bool]:
        return self._wait().__await__()

    async def _wait(self) -> bool:
        try:
            found = await self._operation
        except BaseException:
            if self.done():
                self._ended(self, True)
            raise

        self._ended(self, False)
        return found

    async def _run(self, operation: BackgroundOperation[bool]) -> bool:
        await self._saving
        await kernel.Threads(1).run(self._delete, self._change)
        return True
