"""A checkpoint whose files are written by handlers, without a pipeline, and published in one step.

`DirectoryBuild` is such a save of one process, `JointBuild` one of all processes of a job, and
`SharedDirectory` a directory that the latter fill. Each is built next to its place and published in one step,
with the documents and digests of a checkpoint; or all of it is removed.
"""

from __future__ import annotations

__all__ = ("DirectoryBuild", "JointBuild", "SharedDirectory", "act_on_answer", "limit_permissions")

import errno
import hashlib
import os
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar, Final, TypeVar, cast, final

from anyio import CancelScope, Event, create_task_group, move_on_after, sleep

from penstock.blocking.background import run_sync
from penstock.checkpointer.checkpointer import Checkpointer
from penstock.checkpointer.save_future import SaveFuture
from penstock.handlers.coordinators.job_coordinator import JobCoordinator
from penstock.handlers.coordinators.job_options import JobOptions
from penstock.handlers.formats.orbax.document_files import mark_complete
from penstock.handlers.stores.local import LocalStore
from penstock.handlers.stores.publishing.deletion import remove_abandoned
from penstock.handlers.stores.publishing.paths import temporary_path
from penstock.handlers.stores.publishing.workspace import Workspace
from penstock.kernel.concurrency.threads import LoopHandle, Threads, await_future
from penstock.kernel.errors import (
    BuildChangedError,
    ConfigError,
    DestinationExistsError,
    OutcomeUnknownError,
    PeerFailedError,
    PenstockError,
    SaveCancelledError,
    StageFailedError,
    StorageError,
    UnsupportedByStoreError,
)
from penstock.kernel.events import get_logger
from penstock.kernel.messages.save import Committed, TreeToSave
from penstock.kernel.pipeline.pipeline import Milestone, Pipeline, Slot
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.protocols.coordinator import Operation
from penstock.kernel.protocols.stores import Hold, SystemFiles
from penstock.stages.agree import agree_on_place
from penstock.stages.finalize import Finalize

T = TypeVar("T")

_ATTEMPTS: Final = 10
"""How often a directory is walked again because files of others vanished from it."""

STOPPING_S: Final = 5.0
"""How long a save that was ended waits for this process's handlers to stop writing."""

MOST_CAUSES: Final = 10
"""How far an error is followed to what caused it."""

TELLING_S: Final = 2 * STOPPING_S
"""How long a process in which a save within this one failed has to say what ended it."""


def limit_permissions(directory: str, mode: int) -> None:
    """Take away the permissions of a new directory that are not in a mode. Blocking."""
    given = stat.S_IMODE(os.stat(directory).st_mode)
    os.chmod(directory, given & (mode | ~0o777))  # with what the directory inherits from its parent


@final
class DirectoryBuild:
    """One directory on its way to its own name: created, filled by its caller, marked complete, published.

    Every method blocks.

    Args:
        store: Where the checkpoint will be.
        final: Its own absolute path.
        overwrite: Whether what is there may be replaced. That happens in one step, at the end.
        in_place: Whether it is built under its own name: then it is complete once it has its commit mark.
        mode: The permissions of the directory, less those in the umask of the process; None for all others.
        whole: Whether it is a checkpoint; else it is an item of one.
        recognises: Returns whether a path holds a checkpoint that may be replaced; by default any directory.
        before_publishing: Called when everything is written and marked complete.

    Raises:
        PathError: If the path is named like an interrupted save.
    """

    def __init__(
        self,
        store: LocalStore,
        final: str,
        *,
        overwrite: bool = False,
        in_place: bool = False,
        mode: int | None = None,
        whole: bool = True,
        recognises: Callable[[str], bool] = lambda _: True,
        before_publishing: Callable[[], object] | None = None,
    ) -> None:
        self._store = store
        self._final = final
        self._overwrite = overwrite
        self._whole = whole
        self._in_place = in_place
        self._mode = mode
        self._before_publishing = before_publishing
        self._workspace = Workspace(
            store,
            Threads(1),
            final,
            final if in_place else temporary_path(final),
            overwrite=overwrite,
            recognises=recognises,
        )
        self._hold: Hold | None = None  # in place alone: elsewhere the workspace holds

    def __repr__(self) -> str:
        return f"DirectoryBuild({self.path!r})"

    @property
    def path(self) -> str:
        """The directory that it is built in."""
        return self._workspace.temporary

    def check(self) -> None:
        """Check that it can be published.

        Raises:
            DestinationExistsError: If something is there that may not be replaced.
            StorageError: If it could not be created.
        """
        if not self._in_place:
            self._workspace.check()
        elif self._store.kind(self._final) is not None and not self._overwrite:
            raise DestinationExistsError(self._final)

    def create(self) -> None:
        """Create it, empty. What an interrupted save left there is removed.

        Raises:
            StorageError: If another save is building there, or the medium refuses.
        """
        if self._in_place:
            remove_abandoned(self._store, self._final)
            self._hold = self._store.make_held(self._final)
        else:
            self._workspace.open_now()
        if self._mode is not None:
            limit_permissions(self.path, self._mode)

    def publish(self, *, synced: bool) -> None:
        """Mark it complete and make it visible under its own name, durably.

        Args:
            synced: Whether all files in it are on the medium already.

        Raises:
            DestinationExistsError: If another writer put something there meanwhile.
            NotDurableError: If it is there, and its name may not be durable.
            BuildChangedError: If another program changed what was built.
        """
        _complete(self._store, self.path, synced=synced, whole=self._whole)
        if self._before_publishing is not None:
            self._before_publishing()

        if self._in_place:
            if self._hold is not None and not self._hold.is_at(self.path):
                raise BuildChangedError("publish", self.path, "another program has put something else there")

            self._store.sync_directory(os.path.dirname(self.path))
        else:
            place = self.path
            self._workspace.publish_now()
            if self._workspace.left_behind is not None:  # the new one is there, and durable
                error = repr(self._workspace.left_behind)
                get_logger().warning("save.left_behind", path=place, error=error)

        self.release()

    def discard(self) -> None:
        """Remove it and what is in it, unless it is published."""
        if not self._in_place:
            self._workspace.discard_now()
        elif self._hold is not None:
            self._store.remove_tree(self._final)

        self.release()

    def release(self) -> None:
        """Let others build there. Idempotent."""
        self._workspace.release()
        if self._hold is not None:
            self._hold.release()
            self._hold = None


@final
class SharedDirectory:
    """A directory that several processes fill, in a place that is published as a whole.

    It has its own name from the beginning, so nothing is renamed, held or removed here. Every method blocks.

    Args:
        store: Where the checkpoint will be.
        path: Of the directory.
        whole: Whether it is a checkpoint; else it is an item of one.
    """

    def __init__(self, store: LocalStore, path: str, *, whole: bool = True) -> None:
        self._store = store
        self._whole = whole
        self.path = path  #: of the directory

    def __repr__(self) -> str:
        return f"SharedDirectory({self.path!r})"

    def create(self) -> None:
        """Create it, unless another process has.

        Raises:
            StorageError: If the place that it belongs to is gone, because the save was ended.
        """
        above = os.path.dirname(self.path)
        if self._store.kind(above) is None:  # one that slept must not bring back what was removed
            raise StorageError("mkdir", self.path, "the save was ended", errno.ENOENT)

        self._store.make_directory(self.path)

    def sync(self) -> None:
        """Make durable what this process wrote, and perhaps more."""
        for left in reversed(range(_ATTEMPTS)):
            try:
                self._store.sync_tree(self.path)
            except StorageError as error:
                if error.errno != errno.ENOENT or not left:  # otherwise another process renamed its file
                    raise
            else:
                return

    def publish(self, *, synced: bool) -> None:
        """Mark it complete, durably, once all processes have written. Called by the primary.

        Args:
            synced: Whether all files in it are on the medium already.
        """
        _complete(self._store, self.path, synced=synced, whole=self._whole)

    def discard(self) -> None:
        """Do nothing: the place is removed as a whole."""

    def release(self) -> None:
        """Do nothing: nothing is held."""


def _complete(store: LocalStore, path: str, *, synced: bool, whole: bool) -> None:
    if synced:
        store.sync_directory(path)
    else:
        store.sync_tree(path)

    mark_complete(store, path, whole=whole)


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
        self._own: Exception | None = None  # by which this process ended it
        self._place: str | None = None
        self._save: SaveFuture | None = None
        self._coordinator: JobCoordinator | None = None
        self._written: Future[None] = Future()
        self._ended: Future[None] = Future()  # once it is known here that the save failed
        self._stopped: Future[None] = Future()  # once no handler of this process writes any more

    @staticmethod
    def refuse(path: str, error: Exception, job: JobOptions) -> None:
        """Say to the other processes, which would wait, why this one does not begin. Blocking; never raises.

        Args:
            path: What is to be saved, as they name it.
            error: What this process failed with before it began.
            job: Which processes save together.
        """

        async def refuse() -> None:
            async with Checkpointer(job=job) as checkpointer:
                await checkpointer.engine.at(path).operation(path).refuse(error)

        with suppress(PenstockError):  # of a process that is no part of the job
            run_sync(refuse)

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
            overwrite: Whether a checkpoint that is there may be replaced.

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
        """The directory that the checkpoint is built in."""
        assert self._place is not None, "known once `begin` has returned"
        return self._place

    @property
    def is_primary(self) -> bool:
        """True if this process completes and publishes it."""
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
            self._own = error
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
                await self._end()

            raise

        self.complete()
        await self.save

    async def _end(self) -> None:
        """Raise the error that ended the save, unless a handler of this process raised it."""
        try:
            await self.save
        except StageFailedError as ended:
            self._check_foreign(ended)

    def wait_end(self) -> None:
        """Wait in a thread; raise the error that ended the save, unless this process passed it to `fail`."""
        try:
            self.save.result()
        except StageFailedError as ended:
            self._check_foreign(ended)

    def _check_foreign(self, ended: StageFailedError) -> None:
        if self._own is None or ended.__cause__ is not self._own:
            raise ended

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
            The handlers are asked to stop, and do so first, or go on for `STOPPING_S` at most.
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
            if run.store.system_files is None:  # a bucket
                raise UnsupportedByStoreError("let handlers write to", run.path, run.store, SystemFiles)

            lines = cast("list[str]", message.take())
            await run.threads.run(run.workspace.check)
            await agree_on_place(run, digest_of_lines(lines), lambda: lines)
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

        async def bring() -> bytes:
            return b""

        async def merge(_: Mapping[int, bytes]) -> None:
            await run.threads.run(self.complete, self.build)

        async def wait(_: _Begun, /) -> Committed:
            operation = run.operation
            operation.at("handlers")
            await self.build.wait_written()
            operation.at("commit")
            await operation.commit(bring, merge)
            operation.at("publish")
            return Committed(0, 0, 0)

        yield wait


def _comes_from_elsewhere(error: BaseException) -> bool:
    """True if another process is the cause: a handler may have raised something else because of that."""
    cause: BaseException | None = error
    for _ in range(MOST_CAUSES):
        if cause is None or isinstance(cause, PeerFailedError | OutcomeUnknownError):
            break

        cause = cause.__cause__ or cause.__context__

    return isinstance(cause, PeerFailedError | OutcomeUnknownError)


def _give_up(save: SaveFuture) -> None:
    """Cancel a save within another one that has failed: only the error of the outer one counts."""
    save.cancel()
    save.add_done_callback(SaveFuture.exception)


def _settle(future: Future[None]) -> None:
    with suppress(InvalidStateError):
        future.set_result(None)


def digest_of_lines(lines: Iterable[str]) -> bytes:
    """Return what tells at once whether all processes ask the same, which `lines` describe."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).digest()


async def act_on_answer(
    operation: Operation,
    asked: Sequence[str],
    answer: Callable[[], Awaitable[str]],
    act: Callable[[str], Awaitable[T]],
) -> T:
    """Return the result of `act` for the primary's answer, once it was called in all processes.

    So what the primary refuses, all can refuse by the same error. What another process sees of a shared
    directory does not count: on a network it may be seen there later.

    Args:
        operation: Not joined yet. All processes come, or all raise.
        asked: What must be the same in all: for each leaf or option its name, a tab, and what it is.
        answer: Called in the primary, once all have asked the same; a short text.
        act: Called with it in each process. If it raises in one, the others raise, too.

    Raises:
        PeerError: If another process asks something else, failed, or does not come.
        Exception: What `answer` or `act` raises here.
    """
    plan = digest_of_lines(asked)
    found: list[T] = []

    async def begin(_: Mapping[int, bytes]) -> tuple[str, bytes]:
        return await answer(), b""

    async with operation.running():
        operation.at("ask")
        found_out, _ = await operation.agree(plan, lambda: asked, begin)
        operation.at("prepare")
        found.append(await act(found_out))
        await operation.combine(b"", lambda _: b"")  # once all have acted

    return found[0]
