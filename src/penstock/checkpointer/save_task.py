"""One save in the background: its task, its cancel scope, and the clean-up when it fails."""

from __future__ import annotations

__all__ = ("SaveTask",)

import errno
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, final

from anyio import CancelScope, Event, Lock, create_task_group, get_cancelled_exc_class, move_on_after

from penstock.kernel.concurrency.threads import LoopHandle
from penstock.kernel.errors import (
    HandlerFailedError,
    InsufficientMemoryError,
    NoSpaceError,
    NotDurableError,
    PeerError,
    PenstockError,
    SaveCancelledError,
    StageFailedError,
    StorageError,
)
from penstock.kernel.messages.save import SaveReport, TreeToSave
from penstock.kernel.pipeline.failures import without_frame
from penstock.kernel.pipeline.futures import Milestone, SaveFuture, SavePromise
from penstock.kernel.pipeline.observers import TellReport, observed
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.runner import PipelineResult, run_pipeline
from penstock.kernel.protocols.files_handler import Background
from penstock.kernel.protocols.store_capabilities import FreeSpace, requests_of
from penstock.kernel.reports.statistics import waited_for_memory_s
from penstock.telemetry.kept_reports import ReportKeeper

CLEANING_S = 60.0
ASKING_S = 5.0
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@final
class SaveTask:
    """Runs one save to its end and reports to its future. Raises only when it is cancelled.

    Args:
        pipeline: The stages.
        run: What the stages use.
        tree: What to save.
        turn: A lock held while saving, so that saves to one path follow each other.
        undo_s: How long a save that failed or was cancelled waits for third-party handlers to stop writing.
    """

    __slots__ = (
        "_ended",
        "_hung",
        "_pipeline",
        "_promise",
        "_report",
        "_run",
        "_scope",
        "_staged_s",
        "_started",
        "_tree",
        "_turn",
        "_undo_s",
    )

    def __init__(
        self,
        pipeline: Pipeline[SaveRun],
        run: SaveRun,
        tree: TreeToSave,
        turn: Lock,
        undo_s: float = CLEANING_S,
    ) -> None:
        loop = LoopHandle()
        self._pipeline = pipeline
        self._run = run
        self._tree = tree
        self._turn = turn
        self._undo_s = run.undo_s = undo_s
        run.on_hang = self._leave_behind
        self._hung: HandlerFailedError | None = None
        self._scope = CancelScope()
        self._ended = Event()
        self._started = time.perf_counter()
        self._staged_s = float("nan")
        self._report: SaveReport | None = None
        self._promise = SavePromise(run.path, lambda: loop.post(self.cancel), run.progress.snapshot)

    @property
    def future(self) -> SaveFuture:
        """The caller's handle."""
        return self._promise.future

    @property
    def promise(self) -> SavePromise:
        """The future's writing side."""
        return self._promise

    def cancel(self) -> None:
        """Stop, unless the commit is done and only publishing remains. Event loop only."""
        if (self.future.milestone or 0) < Milestone.COMMITTED:
            self._scope.cancel()

    async def wait_ended(self) -> None:
        """Wait until no part of the save runs any more and its temporary files are gone."""
        await self._ended.wait()

    def let_go(self) -> None:
        """Have nobody told of its failure, as the caller was cancelled. What a handler did is told."""
        of_handler = isinstance(self._promise.error_unseen, HandlerFailedError)
        if self._hung is None and not of_handler:
            self._promise.mark_seen()

    async def __call__(self) -> None:
        """Save."""
        try:
            await self._run_to_its_end()
            await self._keep_report()
        finally:
            self._ended.set()
            if self._hung is None:  # or else what hangs needs them until it is over
                self._run.let_go()
                del self._run, self._pipeline, self._tree

    async def _run_to_its_end(self) -> None:
        try:
            with self._scope, observed(self._run.observers, "save", self._run.path, self._run.events) as tell:
                await self._save(tell)
        except get_cancelled_exc_class():
            self._give_up()
            raise
        except Exception as error:
            failure: Exception = without_frame(error)
            if isinstance(error, MemoryError) and not isinstance(error, PenstockError):
                failure = InsufficientMemoryError(self._run.path)
                failure.__cause__ = error

            self._run.events.error("save.failed", path=self._run.path, error=repr(failure))
            self._promise.fail(failure)
            del failure
        except BaseException as interrupt:
            self._promise.fail(interrupt)  # a thread may be waiting for the result
            raise

        if not self.future.done:
            self._give_up()

    async def _save(self, tell: TellReport) -> None:
        run = self._run
        async with self._turn:
            run.events.info("save.started", path=run.path)
            since = requests_of(run.store)
            try:
                result = await self._run_pipeline()
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

        report: SaveReport = replace(
            result.value,
            staged_s=self._staged_s,
            durable_s=time.perf_counter() - self._started,
            peak_leased_bytes=run.memory.statistics().peak,
            stages=result.stages,
            requests=requests_of(run.store, since),
        )
        run.events.info(
            "save.finalized",
            path=run.path,
            n_leaves=report.n_leaves,
            nbytes=report.nbytes,
            durable_s=report.durable_s,
            memory_wait_s=waited_for_memory_s(report.stages),
        )
        tell(report)
        self._report = report
        self._promise.finish(report)

    async def _keep_report(self) -> None:
        """Keep the report of a save that succeeded, if that is wanted. The caller has it already."""
        run, report = self._run, self._report
        others_keep_it = run.operation is not None and not run.operation.is_primary
        if report is None or run.keep_reports < 1 or others_keep_it:
            return
        try:
            await run.shared.of(ReportKeeper).keep(run.store, run.threads, report, run.keep_reports)
        except Exception as error:
            run.events.warning("telemetry.failed", error=repr(error))

    async def _run_pipeline(self) -> PipelineResult:
        """Run the stages; if several processes save together, for as long as none of them ends the save."""
        run, result = self._run, None
        if run.operation is None:
            return await run_pipeline(self._pipeline, run, self._tree, on_milestone=self._reach)

        # One process needs nothing of it.
        from penstock.kernel.storage.joined_workspace import JoinedWorkspace

        joined = run.workspace if isinstance(run.workspace, JoinedWorkspace) else None
        async with run.operation.running(None if joined is None else joined.take_back):
            result = await run_pipeline(
                self._pipeline, run, self._tree, on_milestone=self._reach, translate=StageFailedError
            )

        assert result is not None, "what ends an operation is raised"
        return result

    async def _as_full(self, error: BaseException) -> NoSpaceError | None:
        """Return the error of a full medium in full; None if it is another, or says all already."""
        says_more = isinstance(error, NoSpaceError | NotDurableError)
        if not isinstance(error, StorageError) or says_more or error.errno not in _FULL:
            return None

        run, free = self._run, None
        if isinstance(run.store, FreeSpace):
            with move_on_after(ASKING_S), suppress(StorageError):
                free = await run.threads.leaving_calls(0.0).run(run.store.free_bytes, run.path)

        left = max(run.progress.bytes_total - run.progress.bytes_done, 0)
        found = NoSpaceError(error.operation, error.path, left, free, error.key_path, error.problem)
        found.stage = error.stage
        for note in getattr(error, "__notes__", ()):
            found.add_note(note)

        return found

    def _release(self) -> None:
        """Let other saves build here. What was published stays durable, whatever comes of it."""
        run = self._run
        try:
            run.workspace.release()
        except StorageError as error:
            run.events.warning("save.left_behind", path=run.workspace.temporary, error=repr(error))

    async def _undo(self, because: BaseException) -> None:
        run = self._run
        unfinished = {id(work): work for work in run.background}
        if unfinished:
            self._hung = self._hung_in(run.background[0])  # should this wait itself be cut off
            await _wait_for(unfinished, self._undo_s)
            self._hung = next((self._hung_in(work) for work in unfinished.values()), None)

        if self._hung is not None:
            # The handler may still write there: the directory stays held until it does no more.
            _when_all_over(run.background, self._release)
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
        self._promise.fail(error)
        self._ended.set()

    def _reach(self, milestone: Milestone) -> None:
        if milestone >= Milestone.STAGED and self._staged_s != self._staged_s:  # still NaN
            self._staged_s = time.perf_counter() - self._started

        self._run.events.debug(f"save.{milestone.name.lower()}", path=self._run.path)
        self._promise.reach(milestone)

    def _give_up(self) -> None:
        published = " after it was published" if self._run.workspace.published else ""
        self._run.events.info("save.cancelled", path=self._run.path)
        if self.future.done:
            return
        if self._hung is not None:
            self._promise.fail(self._hung)
            return

        self._promise.fail(SaveCancelledError(f"the save of {self._run.path!r} was cancelled{published}"))
        self._promise.mark_seen()  # the canceller knows


async def _wait_for(works: dict[int, Background], most_s: float) -> None:
    """Wait for all of them, so that each is being waited for, and remove those that are over."""

    async def wait(number: int, work: Background) -> None:
        with suppress(Exception):  # the failure's cause is known already
            await work.wait()

        del works[number]

    with move_on_after(most_s):
        async with create_task_group() as waits:
            for number, work in list(works.items()):
                waits.start_soon(wait, number, work)


def _when_all_over(works: Sequence[Background], then: Callable[[], object]) -> None:
    """Call `then` once, in any thread, when no work goes on any more."""
    lasting = [work.when_over for work in works if work.when_over is not None]
    left, lock = len(lasting), threading.Lock()

    def one_is_over() -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            then()

    for when_over in lasting:
        when_over(one_is_over)
