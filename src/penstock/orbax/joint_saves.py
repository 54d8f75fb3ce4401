"""One checkpoint that all processes of a job build in one place, each by handlers that write files."""

from __future__ import annotations

__all__ = (
    "JointBuild",
    "JointDirectory",
    "act_on_answer",
    "active_processes",
    "check_processes",
    "check_publishing",
    "described_json",
    "described_message",
    "digest_of_lines",
    "is_joint",
    "is_publisher",
    "job_options",
    "joint_build_around",
    "joint_place",
    "refuse_save",
    "writes_what_is_whole",
)

import hashlib
import json
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, TypeVar, cast, final

import jax
from anyio import CancelScope, Event, create_task_group, move_on_after, sleep

from penstock.blocking.background import run_sync
from penstock.checkpointer.checkpointer import Checkpointer
from penstock.kernel.concurrency.threads import LoopHandle, await_future
from penstock.kernel.config.job_options import JobOptions
from penstock.kernel.coordination.job_coordinator import JobCoordinator
from penstock.kernel.errors import (
    ConfigError,
    InactiveProcessError,
    OutcomeUnknownError,
    PeerFailedError,
    PenstockError,
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
from penstock.orbax.item_files import path_text
from penstock.orbax.options import (
    AtomicityMode,
    AtomicityOptions,
    FileOptions,
    MultiprocessingOptions,
    check_primary_host,
)
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


@contextmanager
def joint_place(build: JointBuild) -> Generator[None]:
    """Make it known to handlers that are called inside that all processes call them, for files of a build.

    By a context variable, and not by what they are given: a user's handler calls those of trees with paths
    that it makes.
    """
    token = _IN_FORCE.set(build)
    try:
        yield
    finally:
        _IN_FORCE.reset(token)


def joint_build_around(directory: Any) -> JointBuild | None:
    """Return the build that a directory belongs to; None if this process writes into it by itself."""
    build = _IN_FORCE.get()
    if build is None:
        return None

    path = os.path.abspath(path_text(directory))
    return build if path == build.place or path.startswith(build.place + os.sep) else None


def writes_what_is_whole(directory: Any) -> bool:
    """Whether this process writes into a directory what every process has whole: of several, the primary."""
    build = joint_build_around(directory)
    return build is None or build.is_primary


_IN_FORCE: Final[ContextVar[JointBuild | None]] = ContextVar("penstock.orbax.joint_build", default=None)


SHOWN: Final = 200
"""Characters of a value that are told to the other processes as they are."""


def described_json(value: Any) -> str:
    """Describe a JSON value; one that JSON cannot hold in no detail, since its handler says what is wrong."""
    try:
        text = json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return "JSON"

    return f"JSON {text if len(text) <= SHOWN else f'{text[:SHOWN]}… {_digest(text.encode())}'}"


def described_message(message: Any) -> str:
    """Describe a protobuf message."""
    return f"a message {_digest(message.SerializeToString(deterministic=True))}"


def digest_of_lines(lines: Iterable[str]) -> bytes:
    """Return what tells at once whether all processes ask the same, which `lines` describe."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).digest()


def _digest(data: bytes) -> str:
    return f"with the SHA-256 {hashlib.sha256(data).hexdigest()}"


async def act_on_answer(
    operation: Operation,
    asked: Sequence[str],
    answer: Callable[[], Awaitable[str]],
    act: Callable[[str], Awaitable[T]],
) -> T:
    """Return what `act` makes of the primary's answer, once it has in all processes.

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
    async with operation.running():
        operation.at("ask")
        await operation.agree(plan, lambda: asked)
        if operation.is_primary:
            told = await answer()
            await operation.begin(told)
        else:
            told, _ = await operation.wait_begun(plan, lambda: asked)

        operation.at("prepare")
        found.append(await act(told))
        if operation.is_primary:
            await operation.parts()
            await operation.decide()
            await operation.tell_published()
        else:
            await operation.bring(b"")
            await operation.wait_published()

    return found[0]


def refuse_save(path: str, error: Exception, job: JobOptions) -> None:
    """Tell the others, who would wait for this process, why it does not come. Blocking; raises nothing of it.

    Args:
        path: What is to be saved, as they name it.
        error: What this process failed with before it began.
        job: Which processes save together.
    """
    with suppress(PenstockError):  # of a process that is no part of the job
        run_sync(partial(_refuse, path, error, job))


async def _refuse(path: str, error: Exception, job: JobOptions) -> None:
    async with Checkpointer(job=job) as checkpointer:
        operation = checkpointer.engine.at(path).operation(path)
        if operation is not None:
            await operation.refuse(error)


_jax: Any = jax


@final
@dataclass(frozen=True)
class JointDirectory(os.PathLike[str]):
    """Where a handler saves a whole checkpoint: together with the other processes, or to a bucket.

    Nothing is there yet: it appears in one step, when all have written. On a disk, a handler of a job of one
    process gets a directory instead, which exists, and which its checkpointer publishes.
    """

    path: str  #: of the checkpoint
    overwrite: bool  #: whether what lies there may be replaced
    custom_metadata: Mapping[str, Any] | None  #: JSON values kept with the checkpoint
    jointly: bool = True  #: whether the other processes of the job save there, too
    begun: threading.Event = field(
        default_factory=threading.Event, compare=False, repr=False
    )  #: once the others know of it

    def __fspath__(self) -> str:
        return self.path


def is_joint(options: MultiprocessingOptions) -> bool:
    """Whether several processes save together. With the primary host None each saves by itself."""
    return options.primary_host is not None and len(active_processes(options)) > 1


def is_publisher(options: MultiprocessingOptions) -> bool:
    """Whether this process publishes what several save together."""
    return active_processes(options)[0] == int(_jax.process_index())


def active_processes(options: MultiprocessingOptions) -> Sequence[int]:
    """Return which processes of the job take part, ascending. The first publishes."""
    everybody = range(int(_jax.process_count()))
    return sorted(options.active_processes) if options.active_processes and len(everybody) > 1 else everybody


def job_options(options: MultiprocessingOptions) -> JobOptions:
    """Return the same as an option of penstock's Checkpointer."""
    some = tuple(options.active_processes) if options.active_processes else None
    return JobOptions(active_processes=some, key_prefix=options.barrier_sync_key_prefix or "")


def check_processes(options: MultiprocessingOptions) -> None:
    """Refuse what is asked of processes and cannot be had.

    Raises:
        ConfigError: If the primary host does not exist, or publishes what several processes save and is not
            the first of them. It is a ValueError.
        InactiveProcessError: If this process is to take no part. It is a ValueError, too.
    """
    check_primary_host(options.primary_host)
    active, index = active_processes(options), int(_jax.process_index())
    if options.primary_host is not None and index not in active:
        raise InactiveProcessError(index, active)
    if is_joint(options) and options.primary_host != active[0]:
        who = f"process {active[0]} publishes what several processes save together"
        raise ConfigError("primary_host", f"is {options.primary_host}, and {who}")


def check_publishing(atomicity: AtomicityOptions | None, files: FileOptions | None) -> None:
    """Refuse a way to publish that several processes do not have.

    Raises:
        ConfigError: If it is one. It is a ValueError.
    """
    if atomicity is not None and atomicity.mode is AtomicityMode.COMMIT_FILE:
        raise ConfigError("atomicity_options", "several processes publish by a rename, not by a file")
    if files is not None and files.path_permission_mode is not None:
        raise ConfigError("file_options", "several processes save with the permissions of the job")
