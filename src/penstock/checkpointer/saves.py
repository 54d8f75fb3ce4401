"""The saves of a Checkpointer: each a task with its cancel scope and clean-up, of one tree or of items.

They go on in the background, and their failures are kept until a caller has seen them.
"""

from __future__ import annotations

__all__ = (
    "Array",
    "BackgroundSaves",
    "Composite",
    "Json",
    "NumpyRandomKey",
    "Onward",
    "Proto",
    "PyTree",
    "RandomKey",
    "SaveTask",
    "for_items",
)

import errno
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, cast, final
from weakref import WeakValueDictionary

from anyio import CancelScope, Event, Lock, get_cancelled_exc_class, move_on_after

from penstock.checkpointer.engine import Engine
from penstock.checkpointer.save_future import SavePromise
from penstock.handlers.layouts.item_parts import take_apart
from penstock.handlers.layouts.item_types import (
    Array,
    Composite,
    Json,
    NumpyRandomKey,
    Proto,
    PyTree,
    RandomKey,
)
from penstock.handlers.layouts.items_layout import CompositeLayout
from penstock.kernel.concurrency.threads import LoopHandle, Threads
from penstock.kernel.errors import (
    HandlerFailedError,
    InsufficientMemoryError,
    NoSpaceError,
    NotDurableError,
    PeerError,
    PenstockError,
    SaveCancelledError,
    SpecError,
    StageFailedError,
    StorageError,
)
from penstock.kernel.messages.save import Published, TreeToSave
from penstock.kernel.pipeline.failures import without_frame
from penstock.kernel.pipeline.pipeline import Milestone, Pipeline
from penstock.kernel.pipeline.run_context import HandlerWork, RunCaches, SaveRequest, SaveRun
from penstock.kernel.pipeline.runner import run_pipeline
from penstock.kernel.pipeline.statistics import waited_for_memory_s
from penstock.kernel.protocols.build_place import BuildPlace
from penstock.kernel.protocols.leaf import KeyPath
from penstock.kernel.protocols.leaf_handlers import Background
from penstock.kernel.protocols.save_format import SaveArgs
from penstock.reports.report import SaveReport
from penstock.telemetry.observers import TellReport

# Clean-up runs in a shield. A medium that hangs may keep a cancelled save no longer than this; the next
# save to the path removes what is left.
CLEANING_S = 60.0
# Only makes an error more precise, and a full disk may hang as well.
ASKING_S = 5.0
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@final
@dataclass(frozen=True, slots=True)
class Onward:
    """The way of a save that is kept at its path, and goes on to another one."""

    path: str  #: where it will be finalized
    take: Callable[[SavePromise, SaveReport, BuildPlace, str], object]
    """Called once it is kept or stranded, in the loop that saves: it fulfils the promise, and lets it be
    cancelled. The workspace says which. As long as it is there, what it built can be read. At last comes what
    tells this save from any other, in all processes of a job."""


@final
class SaveTask:
    """Runs one save to its end and reports to its future. Raises only when it is cancelled.

    Args:
        engine: Of the Checkpointer, or of a save of items.
        threads: Of the Checkpointer.
        pipeline: The stages.
        request: What was asked for.
        tree: What to save.
        turn: A lock held while saving, so that saves to one path follow each other.
        onward: Who takes it when it is at its path; None if that is all.

    Raises:
        SpecError: If an option does not fit.
    """

    __slots__ = (
        "_ended",
        "_engine",
        "_hung",
        "_is_handed_on",
        "_onward",
        "_pipeline",
        "_run",
        "_scope",
        "_staged_s",
        "_started",
        "_tree",
        "_turn",
        "_undo_s",
        "future",
        "promise",
    )

    def __init__(
        self,
        engine: Engine,
        threads: Threads,
        pipeline: Pipeline[SaveRun],
        request: SaveRequest,
        tree: TreeToSave,
        turn: Lock,
        onward: Onward | None = None,
    ) -> None:
        loop = LoopHandle()
        self._engine = engine
        self._pipeline = pipeline
        self._tree = tree
        self._turn = turn
        self._undo_s = engine.config.stopping.undo_s
        work = HandlerWork(self._undo_s, self._leave_behind)
        self._run = engine.save_run(request, threads, work, goes_on=onward is not None)
        self._hung: HandlerFailedError | None = None
        self._scope = CancelScope()
        self._ended = Event()
        self._started = time.perf_counter()
        self._staged_s = float("nan")
        self._onward, self._is_handed_on = onward, False
        path = request.path if onward is None else onward.path
        self.promise = SavePromise(path, lambda: loop.post(self.cancel), self._run.progress.snapshot)
        self.future = self.promise.future  #: the caller's handle

    def cancel(self) -> None:
        """Stop, unless the commit is done and only publishing remains. Event loop only."""
        if (self.future.milestone or 0) < Milestone.COMMITTED:
            self._scope.cancel()

    async def wait_ended(self) -> None:
        """Wait until no part of the save runs any more and its temporary files are gone."""
        await self._ended.wait()

    def let_go(self) -> None:
        """Stop reporting its failure, since the caller was cancelled; that of a handler is still reported."""
        of_handler = isinstance(self.promise.error_unseen, HandlerFailedError)
        if self._hung is None and not of_handler:
            self.promise.mark_seen()

    async def __call__(self) -> None:
        """Save."""
        try:
            try:
                with self._scope, self._engine.observing("save", self._run.path) as observers:
                    await self._save(observers)
            except get_cancelled_exc_class():
                self._give_up()
                raise
            except Exception as error:
                self._fail(error)
            except BaseException as interrupt:
                self.promise.fail(interrupt)  # a thread may be waiting for the result
                raise

            if not self.future.done and not self._is_handed_on:
                self._give_up()
        finally:
            self._ended.set()
            if self._hung is None:  # or else what hangs needs them until it is over
                self._run.let_go()
                # The future stays with the caller, and must not keep the tree alive.
                del self._run, self._pipeline, self._tree, self._engine

    def _fail(self, error: Exception) -> None:
        """End with a failure, which keeps nothing alive."""
        failure: Exception = without_frame(error)
        if isinstance(error, MemoryError) and not isinstance(error, PenstockError):
            # A bare MemoryError names neither the checkpoint nor what to do.
            failure = InsufficientMemoryError(self._run.path)
            failure.__cause__ = error

        self._run.events.error("save.failed", path=self._run.path, error=repr(failure))
        self.promise.fail(failure)

    async def _save(self, observers: Sequence[TellReport]) -> None:
        """Run the stages, for as long as no other process of the job ends the save; undo what fails."""
        run, result = self._run, None
        # Saves to one path build in one place, so they take turns.
        async with self._turn:
            run.events.info("save.started", path=run.path)
            since = run.store.request_figures()
            try:
                async with run.operation.running(run.workspace.take_back):
                    result = await run_pipeline(
                        self._pipeline,
                        run,
                        self._tree,
                        on_milestone=self._reach,
                        awaited=Milestone.STAGED,
                        # Other processes hear of an error in words, and each says the same.
                        translate=None if run.operation.is_alone else StageFailedError,
                    )
            except BaseException as error:
                full: NoSpaceError | None = None
                with CancelScope(shield=True):  # each part has a bound
                    full = await self._as_full(error)
                    await self._undo(error if full is None else full)

                if full is not None:
                    raise full from error

                raise
            finally:
                if self._hung is None:
                    self._release()

        assert result is not None, "what ends an operation is raised"
        published: Published = result.value
        took_s = time.perf_counter() - self._started
        report = SaveReport(
            published.path,
            published.n_leaves,
            published.nbytes,
            published.nbytes_kept,
            single_writer=published.single_writer,
            staged_s=self._staged_s,
            kept_s=took_s if run.workspace.stranded is None else math.nan,
            durable_s=took_s,
            peak_leased_bytes=run.memory.peak,
            stages=result.stages,
            limits=run.limits,
            processor_s=result.processor_s,
            requests=run.store.request_figures().since(since),
        )
        run.events.info(
            "save.finalized",
            path=run.path,
            n_leaves=report.n_leaves,
            nbytes=report.nbytes,
            durable_s=report.durable_s,
            memory_wait_s=waited_for_memory_s(report.stages),
        )
        for tell in observers:
            tell(report)

        onward, self._onward = self._onward, None
        if onward is None:
            self.promise.finish(report)
        else:
            self._is_handed_on = True
            if run.workspace.stranded is None:
                self._reach(Milestone.KEPT)

            onward.take(self.promise, report, run.workspace, run.operation.identity)

    async def _as_full(self, error: BaseException) -> NoSpaceError | None:
        """Return the error of a full medium in full; None if it is another, or says all already."""
        says_more = isinstance(error, NoSpaceError | NotDurableError)
        if not isinstance(error, StorageError) or says_more or error.errno not in _FULL:
            return None

        run, free = self._run, None
        with move_on_after(ASKING_S), suppress(StorageError):
            free = await run.threads.leaving_calls(0.0).run(run.store.free_bytes, run.path)

        left = max(run.progress.bytes_total - run.progress.bytes_done, 0)
        found = NoSpaceError(error.operation, error.path, left, free, error.key_path, error.problem)
        found.stage = error.stage
        for note in getattr(error, "__notes__", ()):
            found.add_note(note)

        return found

    def _release(self) -> None:
        """Let other saves build here. A published checkpoint stays durable, even if that fails."""
        run = self._run
        try:
            run.workspace.release()
        except StorageError as error:
            run.events.warning("save.left_behind", path=run.workspace.temporary, error=repr(error))

    async def _undo(self, because: BaseException) -> None:
        run = self._run
        work = run.handler_work
        if work.begun:
            self._hung = self._hung_in(work.begun[0])  # should this wait itself be cut off
            lasting = await work.wait_over()
            self._hung = None if lasting is None else self._hung_in(lasting)

        if self._hung is not None:
            # The handler may still write there: the directory stays held until it does no more.
            work.call_when_over(self._release)
            run.events.warning("save.left_behind", path=run.workspace.temporary, error=repr(self._hung))
            because.add_note(str(self._hung))
            return

        try:
            with move_on_after(CLEANING_S):
                await run.workspace.discard()
                if isinstance(because, PeerError):  # on local disks it counts only if all have published
                    await run.workspace.withdraw()
        except StorageError as error:
            run.events.warning("save.left_behind", path=run.workspace.temporary, error=repr(error))
            because.add_note(f"what was written could not be removed: {error}")

    def _hung_in(self, work: Background) -> HandlerFailedError:
        problem = f"{work.what} did not end within {self._undo_s:g} s of the save's end"
        return HandlerFailedError(
            work.key_path,
            work.handler,
            f"{problem}; {self._run.workspace.temporary!r} stays, and stays held, until it does",
        )

    def _leave_behind(self, work: Background) -> None:
        """End the save for its waiters. A hanging coroutine cannot be ended."""
        error = self._hung_in(work)
        self._run.events.warning("save.left_behind", path=self._run.workspace.temporary, error=repr(error))
        self.promise.fail(error)
        self._ended.set()

    def _reach(self, milestone: Milestone) -> None:
        if milestone >= Milestone.STAGED and self._staged_s != self._staged_s:  # still NaN
            self._staged_s = time.perf_counter() - self._started

        self._run.events.debug(f"save.{milestone.name.lower()}", path=self._run.path)
        self.promise.reach(milestone)

    def _give_up(self) -> None:
        published = " after it was published" if self._run.workspace.published else ""
        self._run.events.info("save.cancelled", path=self._run.path)
        if self.future.done:
            return
        if self._hung is not None:
            self.promise.fail(self._hung)
            return

        self.promise.fail(SaveCancelledError(f"the save of {self._run.path!r} was cancelled{published}"))
        self.promise.mark_seen()  # the canceller knows


@final
class BackgroundSaves:
    """Holds every save that is under way or failed unseen. Used in one event loop."""

    __slots__ = ("_saves", "_turns")

    def __init__(self) -> None:
        self._saves: list[SaveTask] = []
        # A lock lives as long as a save holds or awaits it, so paths do not pile up.
        self._turns: WeakValueDictionary[str, Lock] = WeakValueDictionary()

    def turn(self, path: str) -> Lock:
        """Return the lock that serialises saves to `path`."""
        return self._turns.setdefault(path, Lock(fast_acquire=True))

    def add(self, save: SaveTask) -> None:
        """Add a save, and drop ended saves whose failure, if any, was seen."""
        self._saves = [other for other in self._saves if not other.future.done or other.promise.error_unseen]
        self._saves.append(save)

    @property
    def under_way(self) -> bool:
        """True if a save has not ended."""
        return any(not save.future.done for save in self._saves)

    def abandon(self) -> Sequence[str]:
        """Tell threads that wait for saves under way that they will not end; return where these were going.

        From any thread, once the event loop will never run again.
        """
        paths: list[str] = []
        for save in tuple(self._saves):
            path = save.future.path
            if not save.future.done:
                problem = f"the event loop ended in the middle of the save of {path!r}"
                save.promise.fail(SaveCancelledError(problem))
                paths.append(path)

        return paths

    async def wait_ended(self) -> None:
        """Wait until all saves that were added so far have ended."""
        for save in tuple(self._saves):
            await save.wait_ended()

    def raise_unseen(self) -> None:
        """Raise the first unseen failure, if there is one."""
        for save in self._saves:
            error = save.promise.take_unseen()
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # the traceback refers to this frame

    def raise_on_leaving(self, failure: BaseException | None) -> None:
        """Raise `failure` or, without one, the first unseen failure, if any.

        Further unseen failures are added to it as notes.
        """
        unseen = self.take_unseen()
        failure = failure or next(iter(unseen.values()), None)
        if failure is None:
            return

        for path, other in unseen.items():
            if other is not failure:
                failure.add_note(f"the background save of {path!r} failed too: {other!r}")

        try:
            raise failure
        finally:
            del failure, unseen  # the traceback refers to this frame

    def take_unseen(self) -> dict[str, BaseException]:
        """Return every unseen failure, by path. The caller must raise or report them."""
        unseen: dict[str, BaseException] = {}
        for save in self._saves:
            error = save.promise.take_unseen()
            if error is not None:
                unseen.setdefault(save.future.path, error)

        return unseen


T = TypeVar("T")


def for_items(engine: Engine, request: SaveRequest, items: Composite) -> tuple[Engine, SaveRequest, object]:
    """Return an engine that saves the items, the request to it, and the tree: the only one, or one of all.

    Names of leaves are then those in that tree, so `save_args` and `prioritise`, which were given for the
    tree of items, are translated to it.

    Saves of several items do not share plans with other saves, because the same names mean other files.

    Raises:
        SpecError: If they cannot be saved.
    """
    layout = engine.written
    if layout.arrays is None:
        raise SpecError(f"a {type(layout).__name__} holds one tree, not several items")
    whole, parts = take_apart(items)
    only = CompositeLayout.of_one_tree(layout, parts)
    if only is not None:
        ((name, tree),) = whole.items()
        engine = replace(engine, layout=only)
        first = request.prioritise
        request = replace(
            request,
            save_args=_below(name, request.save_args),
            prioritise=None if first is None else _with_name(name, first),
        )
        return engine, request, tree

    caches = RunCaches(known_values=engine.caches.known_values)
    return replace(engine, layout=CompositeLayout(layout, parts), caches=caches), request, whole


def _below(name: str, asked: Any) -> Any:
    """Return the part of `save_args` that applies to one item.

    Raises:
        SpecError: If it has arguments for another item, which has no arrays.
    """
    if isinstance(asked, SaveArgs):
        return asked
    if callable(asked):
        return _with_name(name, asked)
    if not isinstance(asked, Mapping):
        return asked

    given = dict(cast("Mapping[str, object]", asked))
    found = given.pop(name, None)
    if any(value is not None for value in given.values()):
        raise SpecError(f"save_args are for {', '.join(map(repr, given))}, but only {name!r} has arrays")

    return found


def _with_name(name: str, function: Callable[[KeyPath], T]) -> Callable[[KeyPath], T]:
    return lambda keys: function((name, *keys))
