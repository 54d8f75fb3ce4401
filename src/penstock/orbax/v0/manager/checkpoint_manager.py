"""A directory of steps, under Orbax's names."""

from __future__ import annotations

__all__ = (
    "CheckpointManager",
    "CheckpointManagerOptions",
    "RootMetadata",
    "StepAlreadyExistsError",
    "StepMetadata",
)

import datetime
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, cast, overload

from penstock.blocking.background import start_thread
from penstock.kernel.errors import NotACheckpointError, SpecError, StepExistsError
from penstock.orbax.common.job_processes import reached_preemption
from penstock.orbax.v0.checkpointers.async_checkpointer import AsyncCheckpointer
from penstock.orbax.v0.common.checkpoint_args import CheckpointArgs
from penstock.orbax.v0.common.step_metadata import RootMetadata, StepMetadata, save_statistics
from penstock.orbax.v0.common.unchanged_links import StepLinks
from penstock.orbax.v0.handlers.composite_handler import CompositeArgs
from penstock.orbax.v0.manager.manager_items import (
    DEFAULT_ITEM,
    args_to_save,
    check_args,
    make_args,
    make_checkpointer,
    named,
)
from penstock.orbax.v0.manager.manager_options import CheckpointManagerOptions, policies_of
from penstock.orbax.v0.manager.manager_root import CheckpointInfo, Root
from penstock.orbax.v0.manager.own_policies import needs_metrics
from penstock.orbax.v0.manager.preservation_policy import PreservationContext, best_of
from penstock.orbax.v0.manager.save_decision_policy import DecisionContext
from penstock.steps.step_contents import step_number
from penstock.steps.step_directory import METRICS

StepAlreadyExistsError = StepExistsError


class CheckpointManager:
    """Saves steps into one directory, keeps the ones worth keeping, and restores them.

    A context manager; also used inside a running event loop. For one thread, and one process that saves.

    A step is one object, or several that are named: which of the two, the first arguments of a save or
    restore tell, or the names and handlers given here.

    Args:
        directory: Of the steps.
        checkpointers: What saves the object, or each of several by name; the old way to say it.
        options: When to save, what to keep, and how.
        metadata: The caller's own, JSON, kept with the directory; what is there already is not replaced.
        item_names: Of several objects; their handlers are told by their first arguments.
        item_handlers: The handler of the object, or of each of several by name.
        logger: Has `log_entry`, which is called with what each save was, as a dict.
        handler_registry: Who handles which item; instead of the other three.

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
        self._deciding, self._preserving = policies_of(self._options)
        self._checkpointer, self._single = make_checkpointer(
            self._options, checkpointers, item_names, item_handlers, handler_registry
        )
        counts = self._options.best_fn is not None or needs_metrics(self._preserving)
        self._writes_metrics = counts and not self._options.prevent_write_metrics
        self._logger = logger
        self._root = Root(directory, self._options)
        self._root.prepare(metadata)
        self._infos = self._root.infos()
        self._finishing: Future[None] | None = None
        self._saving: tuple[int, Sequence[CheckpointInfo]] | None = None

    @property
    def directory(self) -> Any:
        """Of the steps."""
        return self._root.directory

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """Return every step that this manager knows, and the one being saved.

        Args:
            read: Look at the directory again first; see `reload`.
        """
        if read:
            self.reload()

        return [info.step for info in self._infos]

    def latest_step(self) -> int | None:
        """Return the last of them; None if there is none."""
        return self._infos[-1].step if self._infos else None

    def best_step(self) -> int | None:
        """Return the step whose metrics are best, the latest of equals; without `best_fn` the last one.

        None if there is none, or none has metrics. What is not finite is worse than anything finite.
        """
        if self._options.best_fn is None:
            return self.latest_step()

        best = best_of(self._infos, self._options.best_fn, self._options.best_mode == "min")
        return None if best is None else best.step

    def reload(self) -> None:
        """Look at the directory again, which others may have changed."""
        self._infos = self._root.infos()

    def reached_preemption(self, step: int) -> bool:
        """Whether the job is to end after this step."""
        return reached_preemption(step)

    def should_save(self, step: int) -> bool:
        """Whether `save` would save a step: it is newer than the latest, and the options want it."""
        latest = self.latest_step()
        if self._options.read_only or (latest is not None and latest >= step):
            return False

        check = self._options.enable_should_save_is_saving_in_progress_check
        context = DecisionContext(
            is_saving_in_progress=check and self.is_saving_in_progress(),
            reached_preemption=self.reached_preemption(step),
            multiprocessing_options=self._options.multiprocessing_options,
        )
        return self._deciding.should_save(CheckpointInfo(step, _now()), list(self._infos), context=context)

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
        """Begin to save a step, if the options want it; return when the objects are copied.

        One save at a time: the next one waits for it, and raises what it failed with.

        Args:
            step: Its number.
            items: The object, or several by name; the old way to say it.
            save_kwargs: For the handler of the object, or for each of several by name.
            metrics: Kept with the step if there is a `best_fn`, which is called with them.
            force: Save it whatever the options say; never with `read_only`.
            args: What to save: of one object its arguments, of several a `Composite` of such.
            custom_metadata: JSON values kept with the step.

        Returns:
            Whether it is being saved.

        Raises:
            StepAlreadyExistsError: If it is there. It is a ValueError.
            ValueError: If there is nothing to save, or the arguments are of the wrong kind.
            Exception: What the handlers raise, or what the earlier save failed with.
        """
        if items is None and args is None:
            raise SpecError("Must provide `args` for `save`.")

        number = step_number(step)
        single = self._is_single(not isinstance(args, CompositeArgs))
        check_args(items, args, single)
        if self._options.read_only or (not force and not self.should_save(number)):
            return False

        self.wait_until_finished()
        if number in self.all_steps():
            raise StepAlreadyExistsError(number)

        begun = time.time()
        self._root.forget(number)
        written = metrics if self._writes_metrics else None
        ckpt_args = args_to_save(self._checkpointer, items, save_kwargs, args, written, single=single)
        with self._root.saving(number, self.latest_step()) as (path, links):
            self._checkpointer.save(path, args=ckpt_args, custom_metadata=custom_metadata, force=True)
        self._infos.append(CheckpointInfo(number, _now(), metrics))
        self._begin_finishing(number, links)
        self._log(number, begun)
        return True

    def restore(
        self,
        step: int | None = None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: str | os.PathLike[str] | None = None,
        args: CheckpointArgs | None = None,
    ) -> Any:
        """Return what was saved as a step. Waits for a save first.

        Args:
            step: Its number; None for the latest.
            items: What to restore into: the object, or several by name; the old way to say it.
            restore_kwargs: For the handler of the object, or for each of several by name.
            directory: Of the steps, instead of this manager's.
            args: What to restore, and how: of one object its arguments, of several a `Composite`.

        Returns:
            The object, or a `Composite` of several.

        Raises:
            FileNotFoundError: If there is no such step, or none at all.
            ValueError: If the arguments are of the wrong kind.
            Exception: What the handlers raise.
        """
        self.wait_until_finished()
        if step is None:
            step = self.latest_step() if directory is None else self._root.latest_in(directory)
        if step is None:
            raise NotACheckpointError(str(directory or self.directory), "there is no step in it")

        path = self._root.path(step_number(step), directory)
        single = self._is_single((path / DEFAULT_ITEM).exists())
        check_args(items, args, single)
        if args is None:
            found = make_args(
                self._checkpointer, named(items, single), named(restore_kwargs, single), for_save=False
            )
            args = CompositeArgs(**found)
        elif single:
            args = CompositeArgs(**{DEFAULT_ITEM: args})

        with self._root.reading(path):
            return self._object_of(self._checkpointer.restore(path, args=args))

    def item_metadata(self, step: int) -> Any:
        """Say what the handlers say of a step's object, or of each of several.

        Raises:
            ValueError: If no step is given.
        """
        if cast("int | None", step) is None:
            raise SpecError("name the step: only steps have items")

        return self.metadata(step).item_metadata

    @overload
    def metadata(self, step: None = None) -> RootMetadata: ...
    @overload
    def metadata(self, step: int) -> StepMetadata: ...
    def metadata(self, step: int | None = None) -> RootMetadata | StepMetadata:
        """Say what is kept with a step, without restoring it; or with the directory.

        Raises:
            FileNotFoundError: If there is no such step.
        """
        if step is None:
            return self._root.metadata()

        path = self._root.path(step_number(step))
        found = self._checkpointer.metadata(path)
        self._is_single((path / DEFAULT_ITEM).exists())
        item_metadata = self._object_of(found.item_metadata)
        metrics = self.metrics(step) if METRICS in (found.item_handlers or {}) else None
        return replace(found, item_metadata=item_metadata, metrics=dict(metrics or found.metrics))

    def metrics(self, step: int) -> Any:
        """Return the metrics kept with a step; None if it has none."""
        return self._root.metrics(step_number(step))

    def delete(self, step: int) -> None:
        """Delete a step, or move it away as the options say; it is gone when this returns.

        Nothing is done with `read_only`.

        Raises:
            FileNotFoundError: If there is no such step.
            OSError: If it could not be deleted, as when penstock reads it elsewhere on this machine.
        """
        if self._options.read_only:
            return

        number = step_number(step)
        if number not in self.all_steps():
            raise NotACheckpointError(str(self._root.new_path(number)), "there is no such step")
        if self._saving is not None and self._saving[0] == number:
            self.wait_until_finished()

        self._root.delete(number)
        self._infos = [info for info in self._infos if info.step != number]

    def is_saving_in_progress(self) -> bool:
        """Whether a save goes on in the background."""
        return self._finishing is not None and not self._finishing.done()

    def wait_until_finished(self) -> None:
        """Wait until no save is under way and its old steps are deleted; raise what it failed with, once."""
        finishing, saving = self._finishing, self._saving
        if finishing is None or saving is None:
            return

        try:
            finishing.result()
        except BaseException:
            if finishing.done():  # and not interrupted
                number, doomed = saving  # which are still there
                kept = [info for info in (*self._infos, *doomed) if info.step != number]
                self._infos = sorted(kept, key=lambda info: info.step)
            raise
        finally:
            if finishing.done():
                self._finishing, self._saving = None, None

    def check_for_errors(self) -> None:
        """Raise what a save in the background failed with, once. Does not wait."""
        if self._finishing is not None and self._finishing.done():
            self.wait_until_finished()

    def close(self) -> None:
        """Wait until nothing is under way, and close the handlers. Idempotent if those are."""
        try:
            self.wait_until_finished()
        finally:
            self._checkpointer.close()
            self._root.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()

    def _is_single(self, if_unknown: bool) -> bool:
        """Whether a step is one object; if that is not known yet, it is what is said now, for good."""
        if self._single is None:
            self._single = if_unknown

        return self._single

    def _object_of(self, found: Any) -> Any:
        if not self._single:
            return found
        if DEFAULT_ITEM not in found:
            raise SpecError(
                f"there is no {DEFAULT_ITEM!r} item whose handler is known; give a handler_registry or args"
            )

        return found[DEFAULT_ITEM]

    def _begin_finishing(self, number: int, links: StepLinks) -> None:
        """Decide what goes when the step is durable, and wait for that: here, or in the background."""
        doomed: list[CheckpointInfo] = []
        try:
            context = PreservationContext()
            stay = self._preserving.should_preserve(list(self._infos), context=context)
            doomed = [info for info, stays in zip(self._infos, stay, strict=True) if not stays]
            self._infos = [info for info, stays in zip(self._infos, stay, strict=True) if stays]
        finally:
            steps = [info.step for info in doomed]
            if isinstance(self._checkpointer, AsyncCheckpointer):
                # Not a daemon: whoever leaves without waiting has the old steps deleted all the same.
                self._finishing = start_thread(self._finish, steps, links, name="penstock.orbax.manager")
                self._saving = (number, doomed)
            else:
                self._finish(steps, links)

    def _finish(self, doomed: Sequence[int], links: StepLinks) -> None:
        if isinstance(self._checkpointer, AsyncCheckpointer):
            self._checkpointer.wait_until_finished()

        links.published()
        self._root.delete_all(doomed)

    def _log(self, number: int, begun: float) -> None:
        if self._logger is not None:
            synchronous = not isinstance(self._checkpointer, AsyncCheckpointer)
            self._logger.log_entry(save_statistics(number, self.directory, begun, synchronous=synchronous))


def _now() -> datetime.datetime:
    return datetime.datetime.now(tz=datetime.UTC)
