"""A directory of steps, in Orbax's newer API."""

from __future__ import annotations

__all__ = ("Checkpointer",)

import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, final

from penstock.orbax.v0.common.step_statistics import StandardLogger
from penstock.orbax.v0.manager.preservation_policy import PreservationPolicy, PreserveAll
from penstock.orbax.v0.manager.save_decision_policy import SaveDecisionPolicy
from penstock.orbax.v1.common.item_names import STATE
from penstock.orbax.v1.common.operation import AsyncResponse, Operation, begin, finished
from penstock.orbax.v1.common.path_types import Path, PathLike
from penstock.orbax.v1.common.tree_types import JsonType, PyTreeOf
from penstock.orbax.v1.context.context import Context, get_context
from penstock.orbax.v1.operations import loading
from penstock.orbax.v1.operations.saving import check_state
from penstock.orbax.v1.steps.step_formats import NameFormat, standard_name_format
from penstock.orbax.v1.steps.step_sequence import NewStep, Step, StepSequence, often, options_of
from penstock.orbax.v1.steps.training_metadata import CheckpointMetadata, RootMetadata


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
        options = options_of(
            self._context,
            save_decision_policy or often(),
            preservation_policy or PreserveAll(),
            step_name_format or standard_name_format(),
        )
        options.cleanup_tmp_directories = cleanup_tmp_directories
        options.lightweight_initialize = lightweight_initialize
        self._sequence = StepSequence(
            directory, options, StandardLogger() if logger is None else logger, custom_metadata
        )

    @property
    def directory(self) -> Path:
        """The directory of the steps."""
        return self._sequence.directory

    @property
    def latest(self) -> CheckpointMetadata[None] | None:
        """The last step, saved or being saved; None if there is none."""
        return (self.checkpoints or (None,))[-1]

    @property
    def checkpoints(self) -> Sequence[CheckpointMetadata[None]]:
        """Every step that this checkpointer knows, in ascending order, with the one that is being saved.

        Nothing is read for it: `metadata` says more of a step, `reload` looks for steps of others.
        """
        return self._sequence.described()

    def should_save(self, step: Step) -> bool:
        """Whether `save` would save a step: it is newer than the latest one, and the policy asks for it."""
        return self._sequence.should_save(step)

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
            return self._sequence.begin_save(new)

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
            return self._sequence.begin_save(new)

    def cancel(self, step: Step | None = None) -> None:
        """Stop a save in the background, and remove what it wrote. No error is raised for it.

        Args:
            step: A step that is deleted, too, if it exists.
        """
        self._sequence.cancel()
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
        return finished(self._begin_load(step, abstract_checkpointables))

    def load_async(
        self, step: Step | None = None, abstract_state: PyTreeOf | None = None
    ) -> AsyncResponse[PyTreeOf]:
        """Start to load the tree of a step, and return at once. See `load`."""
        loading_items = self._begin_load(step, {STATE: abstract_state})

        async def tree_of(operation: Operation[PyTreeOf]) -> PyTreeOf:
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
        info = self._sequence.existing(step)
        with get_context(self._context):
            return self._sequence.about(info, loading.metadata(self._sequence.path(info.step)))

    def checkpointables_metadata(self, step: Step | None = None) -> CheckpointMetadata[dict[str, Any]]:
        """Describe the items of a step. See `metadata`."""
        info = self._sequence.existing(step)
        with get_context(self._context):
            found = loading.checkpointables_metadata(self._sequence.path(info.step))
            return self._sequence.about(info, found)

    def root_metadata(self) -> RootMetadata:
        """Return what is kept with the directory."""
        return self._sequence.root_metadata()

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
        with get_context(self._context):
            self._sequence.begin_delete(step, checkpointable_name, missing_ok=missing_ok)
        return self._sequence.wait_for_deletion()

    def delete_async(
        self, step: Step, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> AsyncResponse[bool]:
        """Begin to delete, and return. A whole step is gone from `checkpoints` at once. See `delete`."""
        with get_context(self._context):
            return self._sequence.begin_delete(step, checkpointable_name, missing_ok=missing_ok)

    def reload(self) -> None:
        """List the directory again, since others may have changed it."""
        self._sequence.reload()

    def is_saving_in_progress(self) -> bool:
        """Whether a save is running in the background."""
        return self._sequence.is_saving()

    def wait(self) -> None:
        """Wait until no save and no deletion is running. Raises the failure of either, once."""
        self._sequence.wait()

    def close(self) -> None:
        """Wait until nothing is running. Idempotent."""
        self._sequence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
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
            saving = self._sequence.begin_save(new, synchronous=True)
        return saving is not None and saving.result()

    def _begin_load(self, step: Step | None, abstract: dict[str, Any] | None) -> Operation[dict[str, Any]]:
        with get_context(self._context):
            return self._sequence.begin_load(step, abstract)
