"""One checkpoint that all processes of a job build in one place, each by handlers that write files."""

from __future__ import annotations

__all__ = ("JointBuild",)

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar, Final, TypeVar, cast, final

from anyio import CancelScope, Event, create_task_group, move_on_after, sleep

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.kernel.concurrency.threads import LoopHandle, await_future
from penstock.kernel.coordination.job_coordinator import JobCoordinator
from penstock.kernel.errors import (
    ConfigError,
    OutcomeUnknownError,
    PeerFailedError,
    SaveCancelledError,
    UnsupportedByStoreError,
)
from penstock.kernel.messages.joint_plan import JointPlan
from penstock.kernel.messages.save import Committed, TreeToSave
from penstock.kernel.pipeline.futures import Milestone, SaveFuture
from penstock.kernel.pipeline.pipeline import Pipeline, Slot
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.protocols.coordinator import Operation
from penstock.kernel.protocols.store_capabilities import ForeignFiles
from penstock.orbax.joint.plain_values import digest_of_lines
from penstock.stages.finalize import Finalize
from penstock.stages.joint.agreement import Agreement

T = TypeVar("T")

STOPPING_S: Final = 5.0
"""How long a save that was ended waits for this process's handlers to stop writing."""

MOST_CAUSES: Final = 10
"""How far an error is followed to what caused it."""

TELLING_S: Final = 2 * STOPPING_S
"""How long a process in which a save within this one failed has to say what ended it."""


@final
class JointBuild:
    """A save whose files handlers write, in all processes of the job. Made by `begin`.

    It is a save like that of a tree: one verdict decides, and the primary publishes. In place of the stages
    that write a tree it has one that waits until this process's handlers have written. `complete` or `fail`
    is called once; from any thread.

    Args:
        telling_s: How long another process in which a save within this one failed has to say what ended it.
    """

    def __init__(self, telling_s: float = TELLING_S) -> None:
        self._telling_s = telling_s
        self._place: str | None = None
        self._save: SaveFuture | None = None
        self._coordinator: JobCoordinator | None = None
        self._written: Future[None] = Future()
        self._ended: Future[None] = Future()  # once it is known here that the save failed
        self._stopped: Future[None] = Future()  # once no handler of this process writes any more

    @classmethod
    async def begin(
        cls,
        checkpointer: Checkpointer,
        path: str,
        asked: Sequence[str],
        complete: Callable[[JointBuild], object],
        *,
        overwrite: bool,
    ) -> JointBuild:
        """Return once all processes want to save the same, and the place is there.

        Args:
            checkpointer: Open, of several processes.
            path: Of the checkpoint.
            asked: What must be the same in all processes: for each item or option its name, a tab, and what
                it is.
            complete: Writes what is written once. Called by the primary, in a thread, when all processes
                have written.
            overwrite: Whether a checkpoint that lies there may be replaced.

        Raises:
            PeerError: If the processes differ, or one of them does not come.
            ValueError: If something exists at `path` and `overwrite` is off.
            ConfigError: If `jax.distributed` was not there yet when the Checkpointer was opened.
        """
        build, coordinator = cls(), checkpointer.engine.coordinator
        if not isinstance(coordinator, JobCoordinator):
            problem = "must be initialised before the first save of a checkpointer"
            raise ConfigError("jax.distributed", problem)

        build._coordinator = coordinator
        stages: Pipeline[SaveRun] = Pipeline(
            (
                Slot("agree", _Agree(build), Milestone.STAGED),
                Slot("handlers", _AwaitHandlers(build, complete), Milestone.COMMITTED),
                Slot("finalize", Finalize()),
            )
        )
        lines = [*asked, f"option overwrite\t{overwrite}"]
        build._save = await checkpointer.save(path, lines, overwrite=overwrite, pipeline=stages)
        build._save.add_done_callback(build._note_failure)
        return build

    @property
    def place(self) -> str:
        """Where the checkpoint is built."""
        assert self._place is not None, "known once `begin` has returned"
        return self._place

    @property
    def is_primary(self) -> bool:
        """Whether this process completes and publishes it."""
        return self._coordinator is not None and self._coordinator.is_primary

    @property
    def save(self) -> SaveFuture:
        """Over once the checkpoint is visible; or fails with what ended it, here or in another process."""
        assert self._save is not None, "made by `begin`"
        return self._save

    def nested_coordinator(self) -> JobCoordinator:
        """Return what saves within this one agree by, for the event loop that runs here."""
        assert self._coordinator is not None, "known once `begin` was called"
        return self._coordinator.nested()

    def complete(self) -> None:
        """Note that all that this process writes is durable."""
        _settle(self._stopped)
        _settle(self._written)

    def fail(self, error: BaseException) -> None:
        """End the save for all processes, unless it is ended. `save` then says what did.

        To be called when nothing writes any more: then what was written is removed.
        """
        _settle(self._stopped)
        if isinstance(error, Exception):
            with suppress(InvalidStateError):
                self._written.set_exception(error)
        else:
            self.save.cancel()

    async def written_by(self, write: Callable[[], Awaitable[object]]) -> None:
        """Return once the checkpoint is visible, of which `write()` writes this process's part, durably.

        Raises:
            Exception: What ended the save: what `write` raises, or what came before, here or elsewhere.

        Cancellation:
            Ends the save for all processes.
        """
        try:
            await self.unless_ended(write)
        except BaseException as error:
            self.fail(error)
            if isinstance(error, Exception):
                await self.save  # which says what ended it

            raise

        self.complete()
        await self.save

    def when_ended(self, call: Callable[[], object]) -> None:
        """Call `call`, in any thread, once it is known here that the save failed, or now if it is."""
        self._ended.add_done_callback(lambda _: call())

    async def unless_ended(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work()`, which is cancelled if the save is ended first.

        Raises:
            SaveCancelledError: If it was. `save` says why.
            Exception: What `work` raises.
        """
        found: list[T] = []
        failures: list[Exception] = []
        async with create_task_group() as tasks:

            async def watch() -> None:
                ended, loop = Event(), LoopHandle()
                self.when_ended(lambda: loop.post(ended.set))
                await ended.wait()
                failures.append(SaveCancelledError(f"the save of {self.save.path!r} was ended"))
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            try:
                found.append(await work())
            except Exception as error:
                failures.append(error)

            tasks.cancel_scope.cancel()

        if failures and not found:
            try:
                raise failures[0]
            finally:
                failures.clear()  # the traceback refers to this frame

        return found[0]

    async def begin_within(self, begin: Callable[[], Awaitable[SaveFuture]]) -> SaveFuture:
        """Return the save that `begin()` begins. It is cancelled if this one is ended.

        Raises:
            SaveCancelledError: If this one is ended first.
            Exception: What `begin` raises.

        Cancellation:
            The save goes on if it has begun, until this one is ended.
        """

        async def begin_bound() -> SaveFuture:
            save = await begin()
            self.when_ended(lambda: _give_up(save))  # here: who is cancelled now never gets the save
            return save

        return await self.unless_ended(begin_bound)

    def enter(self, place: str) -> None:
        """Note where it is built. For its own stages."""
        self._place = place

    async def wait_written(self) -> None:
        """Wait until this process has written. For its own stages.

        Raises:
            Exception: What `fail` was given. What another process did only if that says nothing by itself.

        Cancellation:
            The handlers are told, and stop first, or go on for `STOPPING_S` at most.
        """
        try:
            await self._all_written()
        except BaseException:
            _settle(self._ended)
            with CancelScope(shield=True), move_on_after(STOPPING_S):  # then what it wrote is removed
                await await_future(self._stopped)
            raise

    async def _all_written(self) -> None:
        try:
            await await_future(self._written)
        except Exception as error:
            if _comes_from_elsewhere(error):
                # Of a save within this one, which the other process perhaps only cancelled. Its verdict on
                # the whole save says why, and cancels this wait.
                await sleep(self._telling_s)

            raise

    def _note_failure(self, save: SaveFuture) -> None:
        if save.exception() is not None:
            _settle(self._ended)


@final
@dataclass(frozen=True, slots=True)
class _Begun:
    """All processes want to save the same, and the place is there."""


@final
@dataclass(frozen=True, slots=True)
class _Agree:
    """Takes what must be the same in all processes."""

    build: JointBuild
    messages: ClassVar[Messages] = {TreeToSave: _Begun}

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""

        async def agree(message: TreeToSave, /) -> _Begun:
            if not isinstance(run.store, ForeignFiles):  # a bucket
                raise UnsupportedByStoreError("let handlers write to", run.path, run.store, ForeignFiles)

            lines = cast("list[str]", message.take())
            await run.threads.run(run.workspace.check_now)
            agreement = Agreement(run, _operation(run), None)
            asked = JointPlan(
                shares=(), digest=digest_of_lines(lines), describe=lambda: lines, agree=agreement.reach
            )
            await agreement.reach(asked)
            self.build.enter(run.workspace.path(""))
            return _Begun()

        yield agree


@final
@dataclass(frozen=True, slots=True)
class _AwaitHandlers:
    """Waits until the handlers of all processes have written; then the primary completes what they wrote."""

    build: JointBuild
    complete: Callable[[JointBuild], object]
    messages: ClassVar[Messages] = {_Begun: Committed}

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""

        async def wait(_: _Begun, /) -> Committed:
            operation = _operation(run)
            operation.at("handlers")
            await self.build.wait_written()
            operation.at("commit")
            if operation.is_primary:
                await operation.parts()
                await run.threads.run(self.complete, self.build)
            else:
                await operation.bring(b"")
                await operation.wait_decided()

            operation.at("publish")
            return Committed(0, 0, 0)

        yield wait


def _comes_from_elsewhere(error: BaseException) -> bool:
    """Whether another process is the cause: a handler may have raised something else because of that."""
    cause: BaseException | None = error
    for _ in range(MOST_CAUSES):
        if cause is None or isinstance(cause, PeerFailedError | OutcomeUnknownError):
            break

        cause = cause.__cause__ or cause.__context__

    return isinstance(cause, PeerFailedError | OutcomeUnknownError)


def _give_up(save: SaveFuture) -> None:
    """Cancel a save whose failure is of no interest: what ended the one around it is told instead."""
    save.cancel()
    save.add_done_callback(SaveFuture.exception)


def _settle(future: Future[None]) -> None:
    with suppress(InvalidStateError):
        future.set_result(None)


def _operation(run: SaveRun) -> Operation:
    assert run.operation is not None, "`begin` takes a Checkpointer of several processes"
    return run.operation
