"""The manager of a directory of steps, under Orbax's names, and the handlers and arguments of its items."""

from __future__ import annotations

__all__ = (
    "DEFAULT_ITEM_NAME",
    "METADATA_ITEM_NAME",
    "METRIC_ITEM_NAME",
    "RESERVED_ITEM_NAMES",
    "AbstractCheckpointManager",
    "AsyncCheckpointer",
    "AsyncOptions",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "Checkpointer",
    "FileOptions",
    "ItemMetadata",
    "MultiprocessingOptions",
    "RootMetadata",
    "StepAlreadyExistsError",
    "StepMetadata",
    "is_async_checkpointer",
)

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self, TypeAlias, cast, overload

from penstock.embedding import as_json_metrics, blocking, failures, step_directory, step_number
from penstock.errors import ConfigError, NotACheckpointError, SpecError, StepExistsError
from penstock.orbax.abstract_checkpoint_manager import AbstractCheckpointManager
from penstock.orbax.checkpoint_args import (
    CheckpointArgs,
    CheckpointHandler,
    DefaultCheckpointHandlerRegistry,
    get_registered_args_cls,
)
from penstock.orbax.checkpointers import AsyncCheckpointer, Checkpointer
from penstock.orbax.composite_handler import CompositeArgs, CompositeCheckpointHandler, CompositeOptions
from penstock.orbax.installation import WarnsOfOverrides
from penstock.orbax.logging import SaveTimes, log_restore, log_save
from penstock.orbax.manager_steps import CheckpointInfo, CheckpointManagerOptions, ManagerSteps, StepChange
from penstock.orbax.metadata import CompositeItemMetadata, RootMetadata, StepMetadata
from penstock.orbax.multihost import reached_preemption
from penstock.orbax.options import AsyncOptions, FileOptions, MultiprocessingOptions
from penstock.orbax.plain_handlers import JsonCheckpointHandler, JsonRestoreArgs, JsonSaveArgs, WrapperArgs
from penstock.orbax.policies import ShouldSaveFnPolicy, best_of, needs_metrics

StepAlreadyExistsError = StepExistsError

DEFAULT_ITEM_NAME: Final = "default"

METRIC_ITEM_NAME: Final = "metrics"

METADATA_ITEM_NAME: Final = "metadata"
"""The name of the folder of what is kept with the directory of steps."""

_ShouldSaveFnPolicy = ShouldSaveFnPolicy  # programs use it under this name of Orbax's

RESERVED_ITEM_NAMES: Final[list[str]] = []

ItemMetadata: TypeAlias = CompositeItemMetadata | Any

DEFAULT_ITEM: Final = step_directory.TREE
"""The name of the item of a step that is one object."""


@failures.short_tracebacks
class CheckpointManager(WarnsOfOverrides):
    """Saves steps into one directory, keeps the ones worth keeping, and restores them.

    A context manager that also works inside a running event loop. It serves one thread. In a job of several
    processes each has one, and all call it alike: process 0 decides what is saved and deleted.

    A step is one object, or several named ones. The names and handlers given here decide which; without
    them the arguments of the first save or restore do.

    What subclasses of Orbax's class read is here, too, although private: `_directory`, `_options`,
    `_checkpoints` and what is next to them. Of the hooks that they override, `_load_checkpoint_infos`,
    `_get_old_steps_to_remove` and `_finalize_checkpoint` are called; for others there is a warning.

    Args:
        directory: The directory of the steps.
        checkpointers: Saves the object, or by name each of several; the older way to say it.
        options: When to save, what to keep, and how.
        metadata: The caller's own JSON values, kept with the directory. Existing ones are not replaced.
        item_names: The names of several objects, whose first arguments decide their handlers.
        item_handlers: The handler of the object, or by name of each of several.
        logger: Its `log_entry` is called with a dict for each save and restore.
        handler_registry: Which handler serves which item; in place of the other three.

    Raises:
        ValueError: If arguments or options contradict each other.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        checkpointers: Any = None,
        options: CheckpointManagerOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
    ) -> None:
        self._options = CheckpointManagerOptions() if options is None else options
        self._checkpointer, self._single = make_checkpointer(
            self._options, checkpointers, item_names, item_handlers, handler_registry
        )
        self._multiprocessing_options = self._options.multiprocessing_options
        self._steps = ManagerSteps(directory, self._options, metadata)
        self._directory = self._steps.directory
        self._logger = logger
        self._finishing: Future[None] | None = None
        self._saving: StepChange | None = None
        self._leave_listed()

    @property
    def directory(self) -> Any:
        """The directory of the steps."""
        return self._directory

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """Return every step that this manager knows, including the one being saved.

        Args:
            read: Whether to list the directory again first; see `reload`.
        """
        if read:
            self.reload()

        return list(self._steps.steps)

    def latest_step(self) -> int | None:
        """Return the last step; None if there is none."""
        return next(reversed(self._steps.steps), None)

    def best_step(self) -> int | None:
        """Return the step with the best metrics, the latest of equals; without `best_fn` the last step.

        Returns None if no step has metrics. A value that is not finite is worse than any finite one.
        """
        if self._options.best_fn is None:
            return self.latest_step()

        best = best_of(self._checkpoints, self._options.best_fn, self._options.best_mode == "min")
        return None if best is None else best.step

    def reload(self) -> None:
        """List the directory again, since others may have changed it."""
        self._steps.reload()
        self._leave_listed()

    def reached_preemption(self, step: int) -> bool:
        """Return whether the job is to end after this step."""
        return reached_preemption(step)

    def should_save(self, step: int) -> bool:
        """Return whether `save` would save a step: it is newer than all, and the options ask for it."""
        check = self._options.enable_should_save_is_saving_in_progress_check
        return not self._options.read_only and self._steps.should_save(
            step,
            self._checkpoints,
            is_saving=check and self.is_saving_in_progress(),
            reached_preemption=self.reached_preemption,
        )

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: CheckpointArgs | None = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Start to save a step, if the options ask for it. Returns when the objects have been copied.

        The next save waits for it and raises its failure.

        Args:
            step: The number of the step.
            items: The object, or several by name; the older way to say it.
            save_kwargs: For the handler of the object, or by name for each of several.
            metrics: Kept with the step if there is a `best_fn`, which is called with them.
            force: Save whatever the options say, except with `read_only`.
            args: What to save: the arguments of one object, or a `Composite` of those of several.
            custom_metadata: JSON values kept with the step.

        Returns:
            Whether the step is being saved.

        Raises:
            StepAlreadyExistsError: If the step exists. It is a ValueError.
            ValueError: If there is nothing to save, or the arguments are of the wrong kind.
            Exception: What a handler raises, or the failure of the earlier save.
        """
        if items is None and args is None:
            raise SpecError("Must provide `args` for `save`.")

        number, times = step_number(step), SaveTimes()
        check_args(items, args, single := self._is_single(not isinstance(args, CompositeArgs)))
        wanted = force or self._steps.is_wanted(number, self.should_save)
        if self._options.read_only or not wanted:
            return False

        with times.part("wait_for_prev"):
            self.wait_until_finished()

        if number in self.all_steps():
            raise StepAlreadyExistsError(number)
        written = metrics if self._writes_metrics else None
        ckpt_args = args_to_save(self._checkpointer, items, save_kwargs, args, written, single=single)
        latest = self.latest_step()
        choose = self._get_old_steps_to_remove
        background = self._checkpointer if isinstance(self._checkpointer, AsyncCheckpointer) else None
        with nullcontext() if background is None else blocking.caller_waits():
            with (
                self._steps.adding(number, metrics, choose, times) as (change, failure),
                self._steps.saving(number, latest) as path,
                times.part("checkpointer_blocking"),
            ):
                self._checkpointer.save(path, args=ckpt_args, custom_metadata=custom_metadata, force=True)

            if background is None:
                self._finish(change)
            else:
                # Old steps are deleted even if the program ends without waiting.
                self._finishing = background.then(self._finish, change)
                self._saving = change
            if failure is not None:
                raise failure

            log_save(self._logger, number, self.directory, times, synchronous=background is None)
            return True

    def restore(
        self,
        step: int | None = None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: str | os.PathLike[str] | None = None,
        args: CheckpointArgs | None = None,
    ) -> Any:
        """Return what was saved as a step. Waits for a save that is under way first.

        Args:
            step: The number of the step; None for the latest.
            items: The target: the object, or several by name; the older way to say it.
            restore_kwargs: For the handler of the object, or by name for each of several.
            directory: A directory of steps to read in place of this manager's.
            args: What to restore, and how: the arguments of one object, or a `Composite` of several.

        Returns:
            The object, or a `Composite` of several.

        Raises:
            FileNotFoundError: If there is no such step, no step at all, or nothing in it.
            ValueError: If the arguments are of the wrong kind.
            Exception: What a handler raises.
        """
        begun = time.time()
        self.wait_until_finished()
        if step is None:
            step = self.latest_step() if directory is None else self._steps.latest_in(directory)
        if step is None:
            raise NotACheckpointError(str(directory or self.directory), "there is no step in it")

        path = self._steps.path(step_number(step), directory)
        self._steps.check_content(path)
        single = self._is_single(self._steps.has_item(path, DEFAULT_ITEM))
        check_args(items, args, single)
        if args is None:
            found = make_args(
                self._checkpointer, by_item(items, single), by_item(restore_kwargs, single), for_save=False
            )
            args = CompositeArgs(**found)
        elif single:
            args = CompositeArgs(**{DEFAULT_ITEM: args})

        reading = time.time()
        with self._steps.reading(path):
            found = self._object_of(self._checkpointer.restore(path, args=args))
        log_restore(self._logger, step, path.parent, begun, reading)
        return found

    def item_metadata(self, step: int) -> Any:
        """Return what the handlers know of a step's object, or of each of several.

        Raises:
            ValueError: If no step is given.
        """
        if cast("int | None", step) is None:
            raise SpecError("a step must be given: only steps have items")

        return self.metadata(step).item_metadata

    @overload
    def metadata(self, step: None = None) -> RootMetadata: ...
    @overload
    def metadata(self, step: int) -> StepMetadata: ...
    def metadata(self, step: int | None = None) -> RootMetadata | StepMetadata:
        """Describe a step without restoring it, or the directory if no step is given.

        Raises:
            FileNotFoundError: If there is no such step.
        """
        if step is None:
            return self._steps.metadata()

        path = self._steps.path(step_number(step))
        found = self._checkpointer.metadata(path)
        self._is_single(self._steps.has_item(path, DEFAULT_ITEM))
        item_metadata = self._object_of(found.item_metadata)
        metrics = self.metrics(step) if step_directory.METRICS in (found.item_handlers or {}) else None
        return replace(found, item_metadata=item_metadata, metrics=dict(metrics or found.metrics))

    def metrics(self, step: int) -> Any:
        """Return the metrics kept with a step; None if it has none."""
        return self._steps.metrics(step_number(step))

    def delete(self, step: int) -> None:
        """Delete a step, or move it away if the options say so. It is gone when this returns.

        Does nothing with `read_only`.

        Raises:
            FileNotFoundError: If there is no such step.
            OSError: If it could not be deleted, for instance because penstock reads it on this machine.
        """
        if self._options.read_only:
            return

        number = step_number(step)
        if number not in self.all_steps():
            raise NotACheckpointError(str(self._steps.new_path(number)), "there is no such step")
        # Files of the step before are linked in the background.
        saving = self._saving
        if saving is not None and (number in (saving.step, saving.base) or not self._steps.is_alone):
            self.wait_until_finished()

        self._steps.agree_on(f"delete {number}", partial(self._steps.delete, number))
        self._steps.forget(number)

    def is_saving_in_progress(self) -> bool:
        """Return whether a save is running in the background."""
        return self._finishing is not None and not self._finishing.done()

    def wait_until_finished(self) -> None:
        """Wait until no save is running and old steps are deleted. Raises the failure of a save, once."""
        finishing, saving = self._finishing, self._saving
        if finishing is None or saving is None:
            return

        try:
            finishing.result()
        except BaseException:
            if finishing.done():  # and not interrupted
                self._steps.undo(saving)
            raise
        finally:
            if finishing.done():
                self._finishing, self._saving = None, None

    def check_for_errors(self) -> None:
        """Raise the failure of a save in the background, once. Does not wait."""
        if self._finishing is not None and self._finishing.done():
            self.wait_until_finished()

    def close(self) -> None:
        """Wait until nothing is running, then close the handlers. Idempotent if the handlers are."""
        try:
            self.wait_until_finished()
        finally:
            self._checkpointer.close()
            self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def _checkpoints(self) -> list[CheckpointInfo]:
        return self._steps.infos

    @property
    def _track_best(self) -> bool:
        return self._options.best_fn is not None

    def _get_old_steps_to_remove(self) -> list[int]:
        """Return which of `_checkpoints` go once the newest is saved. Subclasses replace it."""
        return self._steps.to_delete()

    def _load_checkpoint_infos(self, skip_metadata_read: bool = False) -> list[CheckpointInfo]:
        """Return the steps to know, once the directory is listed. Subclasses replace it."""
        return self._checkpoints

    def _finalize_checkpoint(self, step: int) -> None:
        """Do what a subclass does once a step is complete, before old ones are deleted; in the background."""

    def _get_write_step_directory(self, step: int, root_dir: Any) -> Any:
        return self._steps.new_path(step, root_dir)

    _get_save_directory = _get_write_step_directory

    def _get_read_step_directory(self, step: int, root_dir: Any) -> Any:
        return self._steps.path(step, root_dir)

    def _leave_listed(self) -> None:
        listed = self._load_checkpoint_infos(skip_metadata_read=self._options.lightweight_initialize)
        self._steps.leave_only([info.step for info in listed])

    @property
    def _writes_metrics(self) -> bool:
        # Asked at each save: programs set `best_fn` in the options of a manager that is there.
        wants = self._track_best or needs_metrics(self._steps.preserving)
        return wants and not self._options.prevent_write_metrics

    def _is_single(self, if_unknown: bool) -> bool:
        """Return whether a step is one object. If that is not known yet, the caller decides it for good."""
        if self._single is None:
            self._single = if_unknown

        return self._single

    def _object_of(self, found: Any) -> Any:
        if not self._single:
            return found
        if DEFAULT_ITEM not in found:
            raise SpecError(f"no handler of {DEFAULT_ITEM!r} is known; pass a handler_registry or args")

        return found[DEFAULT_ITEM]

    def _finish(self, change: StepChange) -> None:
        if isinstance(self._checkpointer, AsyncCheckpointer):
            self._checkpointer.wait_until_finished()

        self._finalize_checkpoint(change.step)
        self._steps.complete(change)


def is_async_checkpointer(checkpointer: Any) -> bool:
    """Return whether a checkpointer saves in the background."""
    return isinstance(checkpointer, AsyncCheckpointer)


def make_checkpointer(
    options: CheckpointManagerOptions,
    checkpointers: Any,
    item_names: Sequence[str] | None,
    item_handlers: Any,
    handler_registry: Any,
) -> tuple[Checkpointer, bool | None]:
    """Return a checkpointer of steps, and whether a step is one object; None if that is not known yet.

    Raises:
        ValueError: If arguments exclude each other.
    """
    _check_exclusive(checkpointers, item_names, item_handlers, handler_registry)
    metrics = JsonCheckpointHandler(
        step_directory.METRICS, multiprocessing_options=options.multiprocessing_options
    )
    if checkpointers is not None:
        handlers, asynchronous, timeout = _parts_of(checkpointers)
        if timeout is not None and options.async_options is None:
            options.async_options = AsyncOptions(timeout_secs=timeout)

        handler = _composite(options, {**handlers, step_directory.METRICS: metrics})
        return _checkpointer(handler, options, asynchronous), not isinstance(checkpointers, dict)

    asynchronous = options.enable_async_checkpointing
    if item_names is None and item_handlers is None:
        registry = DefaultCheckpointHandlerRegistry(handler_registry)
        for args_cls in (JsonSaveArgs, JsonRestoreArgs):
            if not registry.has(step_directory.METRICS, args_cls):
                registry.add(step_directory.METRICS, args_cls, metrics)

        return _checkpointer(_composite(options, {}, registry), options, asynchronous), None

    single = isinstance(item_handlers, CheckpointHandler)
    known: dict[str, Any] = {DEFAULT_ITEM: item_handlers} if single else dict.fromkeys(item_names or ())
    if isinstance(item_handlers, Mapping):
        known.update(cast("Mapping[str, Any]", item_handlers))

    return _checkpointer(
        _composite(options, {**known, step_directory.METRICS: metrics}), options, asynchronous
    ), single


def check_args(items: Any, args: Any, single: bool) -> None:
    """Check that the arguments of a save or restore are of the right kind.

    Raises:
        ValueError: If they are not.
    """
    if isinstance(items, CheckpointArgs):
        raise SpecError("items must not be CheckpointArgs; pass those as `args=`")
    if args is None:
        return
    if not isinstance(args, CheckpointArgs):
        raise SpecError(f"args must be CheckpointArgs, not {type(args).__name__}")
    if single and isinstance(args, CompositeArgs):
        raise SpecError("args are a Composite, but a step of this manager is one object")
    if not single and not isinstance(args, CompositeArgs):
        raise SpecError("args must be a Composite: a step of this manager has several items")


def by_item(given: Any, single: bool) -> Mapping[str, Any]:
    """Return arguments by item, whether they were given for one object or for several."""
    if given is None:
        return {}

    return {DEFAULT_ITEM: given} if single else given


def make_args(
    checkpointer: Checkpointer, items: Mapping[str, Any], kwargs: Mapping[str, Any], *, for_save: bool
) -> dict[str, CheckpointArgs]:
    """Make arguments from items and keywords, for calls in the style from before Orbax had arguments.

    Raises:
        ValueError: If the handler of an item is not known.
    """
    names = items if for_save else dict.fromkeys([*items, *kwargs])
    entries = checkpointer.handler._handler_registry.get_all_entries()
    found: dict[str, CheckpointArgs] = {}
    for name in names:
        handlers = {args_cls: handler for (item, args_cls), handler in entries.items() if item == name}
        if not handlers:
            raise SpecError(f"the handler of the item {name!r} is not known; pass `args`")

        save_cls, restore_cls = (
            (WrapperArgs, WrapperArgs)
            if WrapperArgs in handlers
            else get_registered_args_cls(next(iter(handlers.values())))
        )
        make = cast("Any", save_cls if for_save else restore_cls)
        found[name] = make(items.get(name), **(kwargs.get(name) or {}))

    return found


def args_to_save(
    checkpointer: Checkpointer, items: Any, kwargs: Any, args: Any, metrics: Any, *, single: bool
) -> CompositeArgs:
    """Return the arguments that a step is saved with, its metrics as one more item."""
    if args is None:
        found = make_args(checkpointer, by_item(items, single), by_item(kwargs, single), for_save=True)
    else:
        found = {DEFAULT_ITEM: args} if single else dict(args)
    if metrics is not None:
        as_json = as_json_metrics(cast("Any", metrics)) if isinstance(metrics, Mapping) else metrics
        found[step_directory.METRICS] = JsonSaveArgs(as_json)

    return CompositeArgs(**found)


def _check_exclusive(checkpointers: Any, item_names: Any, item_handlers: Any, handler_registry: Any) -> None:
    wrong = (
        ("item_names", "checkpointers", checkpointers and item_names),
        ("item_handlers", "checkpointers", checkpointers and item_handlers),
        ("item_names", "item_handlers", item_names and isinstance(item_handlers, CheckpointHandler)),
    )
    for name, other, both in wrong:
        if both:
            raise ConfigError(name, f"excludes {other}")

    others = {"checkpointers": checkpointers, "item_handlers": item_handlers, "item_names": item_names}
    for name, value in others.items():
        if handler_registry is not None and value is not None:
            raise ConfigError(name, "excludes handler_registry")


def _parts_of(checkpointers: Any) -> tuple[dict[str, Any], bool, int | None]:
    """Return the handlers of checkpointers, whether any saves in the background, and the longest timeout."""
    if not isinstance(checkpointers, (dict, Checkpointer)):
        raise SpecError(f"checkpointers must be a Checkpointer or a dict of such, not {checkpointers!r}")

    single = isinstance(checkpointers, Checkpointer)
    each = cast("dict[str, Any]", {DEFAULT_ITEM: checkpointers} if single else checkpointers)
    for name, one in each.items():
        if not isinstance(one, Checkpointer):
            raise SpecError(f"the checkpointer of {name!r} is a {type(one).__name__}")

    timeouts = [one.timeout_s for one in each.values() if isinstance(one, AsyncCheckpointer)]
    longest = int(max(timeouts)) if timeouts else None
    return {name: one.handler for name, one in each.items()}, bool(timeouts), longest


def _composite(
    options: CheckpointManagerOptions, handlers: Mapping[str, Any], registry: Any = None
) -> CompositeCheckpointHandler:
    of_items = CompositeOptions(
        multiprocessing_options=options.multiprocessing_options,
        file_options=options.file_options,
        async_options=options.async_options,
        atomicity_options=options.atomicity_options,
        temporary_path_class=options.temporary_path_class,
    )
    return CompositeCheckpointHandler(
        composite_options=of_items, handler_registry=registry, **cast("dict[str, Any]", handlers)
    )


def _checkpointer(
    handler: CompositeCheckpointHandler, options: CheckpointManagerOptions, asynchronous: bool
) -> Checkpointer:
    async_options = options.async_options or AsyncOptions()
    make: Callable[..., Checkpointer] = Checkpointer
    if asynchronous:
        make = partial(AsyncCheckpointer, async_options=async_options)
    elif async_options.post_finalization_callback is not None:
        raise ConfigError("post_finalization_callback", "is for saves in the background")

    return make(
        handler,
        multiprocessing_options=options.multiprocessing_options,
        file_options=options.file_options,
        atomicity_options=options.atomicity_options,
        temporary_path_class=options.temporary_path_class,
    )
