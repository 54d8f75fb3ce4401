"""The saves of one root: their order, their bases, and what happens when one is durable."""

from __future__ import annotations

__all__ = ("StepSaves",)

import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

from anyio import Event
from anyio.abc import TaskGroup

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.checkpointer.save_future import SaveFuture
from penstock.handlers.layouts.item_types import Composite
from penstock.handlers.stores.publishing.workspace import how_to_replace
from penstock.kernel.errors import (
    ClosedError,
    CorruptCheckpointError,
    NoSpaceError,
    OlderStepError,
    StepExistsError,
    StorageError,
)
from penstock.kernel.pipeline.run_context import BaseIfWhole, SaveRequest
from penstock.steps.catalogue import NamedSteps
from penstock.steps.keep_policies import Metric, Mode, StepInfo
from penstock.steps.open_steps import OpenSteps
from penstock.steps.opened_root import RootOptions
from penstock.steps.save_decisions import SaveDecisions, hear_sigterm
from penstock.steps.save_policies import SavePolicy
from penstock.steps.step_contents import step_items
from penstock.steps.step_metrics import RankedMetrics, best_step
from penstock.steps.step_names import NameFormat


@final
@dataclass(slots=True, eq=False)
class _Pending:
    """A save under way."""

    name: str
    was_newest: bool  #: when it began; an older step is saved only if that is asked for
    future: SaveFuture | None = None
    done: Event = field(default_factory=Event)  #: the save is over
    ended: Event = field(default_factory=Event)  #: and the deletions that follow are decided


@final
class StepSaves:
    """The state of a manager. Used in one event loop.

    Args:
        checkpointer: What saves.
        root: The directory of steps.
        names: Names of step directories.
        save_when: Which steps are saved.
        options: The way in which the directory is used.
        link: Whether arrays are linked to an earlier step that holds them.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        root: str,
        names: NameFormat,
        save_when: SavePolicy,
        options: RootOptions,
        *,
        link: bool,
    ) -> None:
        engine = checkpointer.engine.at(root)
        self._checkpointer = checkpointer
        self._engine = engine
        self._store, self._events = engine.store, engine.events
        self._keeper = engine.report_keeper
        if options.writes:
            self._keeper.keep_below(root)

        self._root = root
        self._link = link
        self._pending: dict[int, _Pending] = {}
        self._followed: list[_Pending] = []  # ended, and the deletions that follow are being decided
        self._not_durable: set[int] = set()  # steps that are there, and may be lost if the power fails
        self._bases: list[int] = []  # steps whose values are known here, the latest last
        self._tasks: TaskGroup | None = None
        self._failure: BaseException | None = None
        files = NamedSteps(self._store, root, names)
        self._steps = OpenSteps(engine, root, files, options)
        self.reading = self._steps.reading  #: threads for what only reads
        self.catalogue, self.retention = self._steps.catalogue, self._steps.retention
        self.load = self._steps.load
        self.decisions = SaveDecisions(save_when, self._known_steps, self._steps.root.job)  #: which to save
        self._ranked = RankedMetrics(options.keep, self._infos_with_metrics, self._events)

    @property
    def saving(self) -> Sequence[int]:
        """Steps that are being saved now."""
        return tuple(self._pending)

    @asynccontextmanager
    async def live(self, owned: Checkpointer | None, *, sigterm: bool) -> AsyncGenerator[None]:
        """Open it. Leaving waits for saves and deletions; leaving on an error cancels the saves.

        Args:
            owned: The Checkpointer, if it is entered and left with this.
            sigterm: Whether a SIGTERM counts as a preemption.
        """
        async with (
            nullcontext() if owned is None else owned,
            self._steps.live(self._raise_on_leaving) as tasks,
        ):
            if sigterm:
                await tasks.start(hear_sigterm, self.decisions.preempt)

            self._tasks = tasks
            self._keeper.note(self._root, "opened", text=f"by process {os.getpid()} on {os.uname().nodename}")
            try:
                yield
                await self._wait_for_saves()
            finally:
                self._tasks = None
                self._keeper.note(self._root, "closed")

    def check_open(self) -> None:
        """Raise `ClosedError` unless the manager is open."""
        self._running()

    def close(self) -> None:
        """Take no more calls."""
        self._tasks = None

    def should_save(self, step: int) -> bool:
        """True if `step` is newer than any other and the policy wants it, as this process asks it."""
        return step > self._newest() and self.decisions.says(step)

    async def admits(self, step: int, *, force: bool, overwrite: bool) -> bool:
        """True if `step` is to be saved now, in all processes: the policy wants it, or it is forced.

        Raises:
            StepExistsError, OlderStepError: As `check_order`.
            Exception: What failed in the background, and was not raised yet. The other processes hear of it,
                if they save this step; or what the policy raises.
            PeerSilentError: If process 0 of a job of several does not decide.
        """
        self.check_order(step, overwrite=overwrite)
        is_wanted = force or await self.decisions.wanted(step)
        failure = self.take_unseen()
        if failure is not None:
            if is_wanted and isinstance(failure, Exception):
                await self._refuse(step, failure)

            raise failure

        return is_wanted

    def replaces(self, step: int) -> bool:
        """True if an existing step is saved again unasked, because its name may not be durable."""
        return step in self._not_durable

    def check_order(self, step: int, *, overwrite: bool) -> None:
        """Refuse a step that exists, or is older than the latest.

        Raises:
            StepExistsError: If it exists and may not be overwritten, or is being saved.
            OlderStepError: If it is older.
        """
        if step in self._pending or (step in self.catalogue and not overwrite):
            raise StepExistsError(step, how_to_replace(self._store))
        if step < self._newest() and not overwrite:
            raise OlderStepError(step, self._newest())

    async def begin(
        self,
        step: int,
        items: object,
        metrics: Mapping[str, Any] | None,
        request: SaveRequest,
    ) -> SaveFuture:
        """Start a save and return when it is staged; deletions that follow from it run in the background.

        Args:
            step: Its number.
            items: A tree or a `Composite`.
            metrics: The caller's, not yet JSON.
            request: All options. Without a `base`, unchanged leaves are linked to a step known here.
        """
        tasks = self._running()
        pending = _Pending(self.catalogue.name(step), was_newest=step >= self._newest())
        self._pending[step] = pending
        try:
            contents = await self._contents(step, items, metrics)
            begun_s = time.monotonic()
            future = await self._save_with_room(step, contents, request)
        except BaseException:
            del self._pending[step]
            pending.ended.set()
            raise

        pending.future = future
        self.decisions.note_begun(begun_s)
        future.add_done_callback(lambda done: self._note_done(step, pending, done))
        tasks.start_soon(self._follow, step, pending, future)
        return future

    async def _contents(self, step: int, items: object, metrics: Mapping[str, Any] | None) -> Composite:
        """Return the contents of a step, once no deletion at its path is under way."""
        try:
            await self._steps.root.hold()
            if metrics is not None:
                metrics = await self.reading.run(self._ranked.checked, metrics)
                self._keeper.note_metrics(self.catalogue.path(step), metrics)

            await self.retention.forget(step)
            return step_items(items, metrics)
        except Exception as error:
            await self._refuse(step, error)
            raise

    async def _refuse(self, step: int, error: Exception) -> None:
        """Tell the other processes, which would wait for this one, that it does not save a step."""
        await self._engine.operation(os.path.join(self._root, self.catalogue.name(step))).refuse(error)

    async def best_step(self, metric: Metric, mode: Mode) -> int | None:
        """Return the step with the best metric, as the function of this name; its metrics are read first."""
        infos = partial(self._infos_with_metrics, self.catalogue.snapshot())
        return await self.reading.run(lambda: best_step(infos(), metric, mode))

    def note_base(self, step: int) -> None:
        """Note that the values of a step are known here: they were saved or restored."""
        self._bases = [*[known for known in self._bases if known != step], step][-3:]

    def note_found(self, step: int, name: str) -> None:
        """Note a step that another process saved."""
        if step not in self.catalogue and step not in self.retention.deleter.waiting:
            self.catalogue.add(step, name)

    async def settle(self) -> None:
        """Wait until no save is under way, and try once to delete the steps due."""
        await self._wait_for_saves()
        await self.retention.deleter.attempt()
        self.raise_unseen()

    async def _wait_for_saves(self) -> None:
        for pending in (*self._pending.values(), *self._followed):
            await pending.ended.wait()

    def cancel(self) -> None:
        """Ask every save to stop."""
        for pending in self._pending.values():
            if pending.future is not None:
                pending.future.cancel()

    def raise_unseen(self) -> None:
        """Raise, once, the error that a policy raised in the background."""
        failure = self.take_unseen()
        if failure is not None:
            raise failure

    def take_unseen(self) -> BaseException | None:
        """Return that error, once, to a caller that will raise it."""
        failure, self._failure = self._failure, None
        return failure

    async def _save_with_room(self, step: int, items: Composite, request: SaveRequest) -> SaveFuture:
        """Save as `_save` does; if there is no room, once more after the steps due for deletion are gone.

        Not where several processes save: the others have heard of a failure, and do not save once more.
        """
        try:
            return await self._save(step, items, request)
        except NoSpaceError:
            if self._engine.is_joint or not self.retention.deleter.waiting:  # as above
                raise

        await self.retention.deleter.attempt()
        return await self._save(step, items, request)

    async def _save(self, step: int, items: Composite, request: SaveRequest) -> SaveFuture:
        save, known = self._checkpointer.operations.save, self._base(step)
        if request.base is not None or known is None:
            return await save(request, items)
        if self._engine.is_joint:  # one that finds it damaged could not save once more without the others
            return await save(replace(request, base=BaseIfWhole(known)), items)

        try:
            return await save(replace(request, base=known), items)
        except (CorruptCheckpointError, StorageError) as error:
            if not error.path.startswith(known):
                raise

            # It was removed or damaged; the new step does not need it.
            self._events.warning("step.no_base", base=known, error=repr(error))
            return await save(request, items)

    def _infos_with_metrics(self, steps: Mapping[int, str] | None = None) -> Sequence[StepInfo]:
        steps = self.catalogue.snapshot() if steps is None else steps
        return self.catalogue.infos(steps, frozenset({"metrics"}))

    def _base(self, step: int) -> str | None:
        if not self._link:
            return None

        there = [known for known in self._bases if known in self.catalogue and known != step]
        return self.catalogue.path(there[-1]) if there else None

    def _note_done(self, step: int, pending: _Pending, future: SaveFuture) -> None:
        """Record the step before any task that awaits the save continues."""
        del self._pending[step]
        self._followed.append(pending)
        if future.status != "failed":
            self._not_durable.clear()  # their names are in the same directory
            self.catalogue.add(step, pending.name)
            self.note_base(step)
        elif future.published and not self._engine.is_joint:  # the other processes do not know
            self._not_durable.add(step)
            self.catalogue.add(step, pending.name)
        elif self._steps.root.is_local:
            self.catalogue.remove([step])  # if it was to be overwritten, it may be on some disks

        pending.done.set()

    async def _follow(self, step: int, pending: _Pending, future: SaveFuture) -> None:
        try:
            await pending.done.wait()
            if future.status != "failed":
                latest = self.catalogue.latest
                is_overtaken = pending.was_newest and latest is not None and step < latest
                await self.retention.apply(step, is_overtaken=is_overtaken)
        except Exception as error:  # from a policy, or from the medium while reading for it
            self._events.error("step.retention_failed", step=step, error=repr(error))
            self._failure = error
        finally:
            if pending in self._followed:
                self._followed.remove(pending)

            pending.ended.set()

    def _running(self) -> TaskGroup:
        if self._tasks is None:
            raise ClosedError("the CheckpointManager is not open; use it inside its `async with`")

        return self._tasks

    def _raise_on_leaving(self, failure: BaseException | None) -> None:
        if failure is not None:
            self.cancel()

        failure = failure or self.take_unseen()
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # the traceback refers to this frame

    def _known_steps(self) -> tuple[Sequence[int], bool]:
        steps = self._durable()
        return (sorted({*steps, *self._pending}) if self._pending else steps), bool(self._pending)

    def _newest(self) -> int:
        latest = self._durable()[-1:]
        return max([-1, *latest, *self._pending])

    def _durable(self) -> Sequence[int]:
        """Return the steps that need not be saved again, ascending."""
        steps = self.catalogue.steps
        return [step for step in steps if step not in self._not_durable] if self._not_durable else steps
