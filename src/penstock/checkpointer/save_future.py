"""The handle on a save that goes on in the background."""

from __future__ import annotations

__all__ = (
    "SaveFuture",
    "SavePromise",
)

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, final

from anyio import Event
from anyio.lowlevel import checkpoint

from penstock.kernel.concurrency.threads import HomeProcess, LoopHandle
from penstock.kernel.errors import NotDurableError, RunningLoopError
from penstock.kernel.events import get_logger
from penstock.kernel.pipeline.failures import Failure, short_tracebacks
from penstock.kernel.pipeline.pipeline import Milestone
from penstock.kernel.pipeline.run_context import Progress
from penstock.reports.report import SaveReport


@short_tracebacks
@final
class SaveFuture:
    """A save in progress: await it, poll it, wait for it in a thread, or cancel it.

    It can be awaited any number of times, by any number of tasks, on asyncio and on trio, also from an event
    loop other than the one that saves.

    ```python
    save = await checkpointer.save(path, state)   # staged: the state may change now
    report = await save                           # durable and visible
    ```
    """

    __slots__ = ("_promise",)

    def __init__(self, promise: SavePromise) -> None:
        self._promise = promise

    def __repr__(self) -> str:
        return f"<SaveFuture {self.path!r} {self.status}>"

    def __await__(self) -> Generator[Any, Any, SaveReport]:
        return self.finalized().__await__()

    @property
    def path(self) -> str:
        """The path of the checkpoint."""
        return self._promise.path

    @property
    def milestone(self) -> Milestone | None:
        """The last milestone passed; None before the first."""
        reached = self._promise.reached
        return Milestone(reached) if reached else None

    @property
    def status(self) -> str:
        """One word: `starting`, the name of the last milestone, or `failed`."""
        if self._promise.failure is not None:
            return "failed"

        return self.milestone.name.lower() if self.milestone is not None else "starting"

    @property
    def published(self) -> bool:
        """True if the checkpoint is at its path: durable, or the save failed with a `NotDurableError`."""
        promise = self._promise
        failed_last = promise.failure is not None and isinstance(promise.failure.error, NotDurableError)
        return promise.report is not None or failed_last

    @property
    def done(self) -> bool:
        """True if the save has ended, successfully or not."""
        return self._promise.is_over(Milestone.FINALIZED)

    @property
    def progress(self) -> Progress:
        """Leaves and bytes written so far, of how many."""
        return self._promise.progress()

    async def planned(self) -> None:
        """Wait until every leaf is checked. Errors in the input are raised here."""
        await self.wait(Milestone.PLANNED)

    async def staged(self) -> None:
        """Wait until the state may be mutated, deleted or donated."""
        await self.wait(Milestone.STAGED)

    async def written(self) -> None:
        """Wait until the array bytes are durable."""
        await self.wait(Milestone.WRITTEN)

    async def committed(self) -> None:
        """Wait until everything is durable under the temporary name."""
        await self.wait(Milestone.COMMITTED)

    async def kept(self) -> None:
        """Wait until the checkpoint survives this process: it is whole and durable in the nearest tier.

        Without tiers, until it is finalized.
        """
        await self.wait(Milestone.KEPT)

    async def finalized(self) -> SaveReport:
        """Wait until the checkpoint is durable and visible; the same as awaiting the future."""
        await self.wait(Milestone.FINALIZED)
        assert self._promise.report is not None
        return self._promise.report

    async def wait(self, milestone: Milestone) -> None:
        """Wait until the save has passed `milestone`.

        Raises:
            PenstockError: What the save failed with, if it failed before.
            ForkedError: In a fork of the process that saves.

        Cancellation:
            Always a checkpoint. Cancelling the wait does not cancel the save.
        """
        if self._promise.is_over(milestone):
            await checkpoint()
        else:
            self._promise.home.check(f"the save of {self._promise.path!r}")
            event = Event()
            loop = LoopHandle()
            with self._waking(milestone, lambda: loop.post(event.set)):
                await event.wait()

        failure = self._failure_before(milestone)
        if failure is not None:
            try:
                raise failure.take_to_raise()
            finally:
                del self, failure  # the traceback refers to this frame

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait in a thread until the checkpoint is durable and visible.

        Args:
            timeout: Seconds to wait at most; None waits for ever.

        Raises:
            TimeoutError: If the save is still going on after `timeout`.
            RunningLoopError: If called in the thread of the event loop that saves, where it would deadlock.
            ForkedError: In a fork of the process that saves.
            PenstockError: What the save failed with.
        """
        self._block(Milestone.FINALIZED, timeout, "result() would block", "await the future")
        assert self._promise.report is not None
        return self._promise.report

    def block_until_kept(self, timeout: float | None = None) -> None:
        """Wait in a thread until the checkpoint survives this process, as `kept` does in a loop.

        Args:
            timeout: Seconds to wait at most; None waits for ever.

        Raises:
            TimeoutError: If it is not kept after `timeout`.
            RunningLoopError: If called in the thread of the event loop that saves, where it would deadlock.
            ForkedError: In a fork of the process that saves.
            PenstockError: What the save failed with, if it failed before.
        """
        self._block(Milestone.KEPT, timeout, "block_until_kept() would block", "await kept()")

    def _block(self, milestone: Milestone, timeout: float | None, problem: str, instead: str) -> None:
        """Wait in a thread for a milestone, and raise what the save failed with before it."""
        if not self._promise.is_over(milestone):
            self._promise.home.check(f"the save of {self._promise.path!r}")
            if threading.get_ident() == self._promise.loop_thread:
                raise RunningLoopError(f"{problem} the event loop that saves; {instead}")

            event = threading.Event()
            with self._waking(milestone, event.set):
                if not event.wait(timeout):
                    raise TimeoutError(f"the save of {self.path!r} is {self.status} after {timeout} s")

        failure = self._failure_before(milestone)
        if failure is not None:
            try:
                raise failure.take_to_raise()
            finally:
                del self, failure  # the traceback refers to this frame

    def exception(self) -> BaseException | None:
        """Return what the save failed with, or None. Does not wait."""
        failure = self._failure_before(Milestone.FINALIZED)
        return None if failure is None else failure.take()

    def add_done_callback(
        self, callback: Callable[[SaveFuture], object], *, milestone: Milestone = Milestone.FINALIZED
    ) -> None:
        """Call `callback(self)` once `milestone` is passed or the save has failed.

        It is called in the thread of the loop that saves, or at once if the milestone or failure is past.
        Its exceptions are logged and not raised.
        """

        def call() -> None:
            try:
                callback(self)
            except Exception:
                get_logger().exception("save.callback_failed", path=self.path)

        with self._promise.lock:
            if not self._promise.is_over(milestone):
                self._promise.waiting.append((milestone, call))
                return

        call()

    def cancel(self) -> None:
        """Ask the save to stop and to undo what it did. From any thread; does not wait.

        Tasks that await the save get `SaveCancelledError`. After COMMITTED the call has no effect, but for a
        step that is kept in a tier: then it goes no further.

        Raises:
            ForkedError: In a fork of the process that saves.
        """
        if not self.done:
            self._promise.home.check(f"the save of {self._promise.path!r}")
            self._promise.cancel()

    def _failure_before(self, milestone: Milestone) -> Failure | None:
        """Return the failure, if there was one before `milestone`. From then on it counts as seen."""
        if self._promise.reached >= milestone or self._promise.failure is None:
            return None

        self._promise.mark_seen()
        return self._promise.failure

    @contextmanager
    def _waking(self, milestone: Milestone, wake: Callable[[], object]) -> Generator[None]:
        """Call `wake` when `milestone` is passed or the save fails, as long as the context is open."""
        entry = (milestone, wake)
        with self._promise.lock:
            over = self._promise.is_over(milestone)
            if not over:
                self._promise.waiting.insert(0, entry)  # before callbacks, which may take their time
        if over:
            wake()
        try:
            yield
        finally:
            with self._promise.lock:
                if entry in self._promise.waiting:
                    self._promise.waiting.remove(entry)


@final
class SavePromise:
    """A save as those see it who make it, and the state that its `SaveFuture`s show.

    Its methods are called in the loop that saves, and only there.

    Args:
        path: Where the checkpoint is going.
        cancel: Called by `SaveFuture.cancel`, from any thread.
        progress: Called by `SaveFuture.progress`, from any thread.
    """

    __slots__ = (
        "cancel",
        "failure",
        "home",
        "is_seen",
        "lock",
        "loop_thread",
        "path",
        "progress",
        "reached",
        "report",
        "waiting",
    )

    def __init__(self, path: str, cancel: Callable[[], object], progress: Callable[[], Progress]) -> None:
        self.path = path
        self.cancel = cancel
        self.progress = progress
        self.home = HomeProcess()
        self.loop_thread = threading.get_ident()
        # All below is written under the lock.
        self.lock = threading.Lock()
        self.reached = 0
        self.report: SaveReport | None = None
        self.failure: Failure | None = None
        self.is_seen = False  #: whether a caller has seen the failure
        self.waiting: list[
            tuple[int, Callable[[], object]]
        ] = []  #: milestones, each with what is then called

    @property
    def future(self) -> SaveFuture:
        """A handle for a caller. Made anew, as the promise and a handle that it holds would be a cycle."""
        return SaveFuture(self)

    def is_over(self, milestone: int) -> bool:
        """Return whether that milestone is passed, or none will be passed any more."""
        return self.reached >= milestone or self.failure is not None

    @property
    def error_unseen(self) -> BaseException | None:
        """The failure, if there is one that no caller has seen yet; to be looked at."""
        return None if self.is_seen or self.failure is None else self.failure.error

    def take_unseen(self) -> BaseException | None:
        """Return the failure, if there is one that no caller has seen yet, to a caller that will raise it."""
        if self.is_seen or self.failure is None:
            return None

        self.is_seen = True
        return self.failure.take_to_raise()

    def mark_seen(self) -> None:
        """Note that a caller has seen the failure."""
        self.is_seen = True

    def reach(self, milestone: Milestone) -> None:
        """Pass a milestone, and every earlier one. The last is passed by `finish`, which has the report."""
        with self.lock:
            if self.failure is None:
                # Stages may reach milestones out of order; a later one implies the earlier ones.
                self.reached = max(self.reached, min(milestone, Milestone.KEPT))

        self._announce()

    def finish(self, report: SaveReport) -> None:
        """Pass the last milestone."""
        with self.lock:
            self.report = report
            if self.failure is None:
                self.reached = Milestone.FINALIZED

        self._announce()

    def fail(self, error: BaseException) -> None:
        """End the save: every milestone not yet reached fails with `error`. Later calls change nothing."""
        with self.lock:
            if not self.is_over(Milestone.FINALIZED):
                self.failure = Failure(error)

        self._announce()

    def _announce(self) -> None:
        due: list[tuple[int, Callable[[], object]]] = []
        left: list[tuple[int, Callable[[], object]]] = []
        with self.lock:
            for milestone, call in self.waiting:
                if self.is_over(milestone):
                    due.append((milestone, call))
                else:
                    left.append((milestone, call))

            self.waiting = left

        # Without the lock: a callback may ask the future, or add another callback.
        for _, call in sorted(due, key=itemgetter(0)):  # of several that are passed at once, in their order
            call()
        if self.is_over(Milestone.FINALIZED):  # refer no more to what saved: handles may be kept for long
            last = self.progress()
            self.cancel, self.progress = _do_nothing, lambda: last


def _do_nothing() -> None:
    """Cancel a save that is over."""
