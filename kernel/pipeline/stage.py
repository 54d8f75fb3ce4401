"""Drives an actor: holds both ends of its streams, and stops it when a neighbour has closed.

A stage is a value that holds options. `open(run)` makes an actor for one run, which ends with that context.
An actor is a callable from one message to the next, or to an async iterator of them. It never sees a stream,
a task group or a sibling.

A function or callable object that has nothing to open is a stage, too.
"""

from __future__ import annotations

__all__ = (
    "Actor",
    "ChangesLeaves",
    "Concurrent",
    "DeclaresMessages",
    "Finishing",
    "FunctionStage",
    "Messages",
    "PassesOn",
    "SendingEnd",
    "Stage",
    "does_nothing",
    "drive",
    "receiving",
    "release_dropped",
    "workers_of",
)

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, final, runtime_checkable

from anyio import BrokenResourceError, EndOfStream, WouldBlock, create_task_group
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from penstock.kernel.errors import PipelineError
from penstock.kernel.pipeline.failures import forget_locals
from penstock.kernel.protocols.capability import Capability

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream

    from penstock.kernel.concurrency.threads import Threads
    from penstock.kernel.pipeline.statistics import StageMeter
    from penstock.kernel.protocols.leaf import LeafSpec

Actor: TypeAlias = Callable[[Any], "Awaitable[Any] | AsyncIterator[Any]"]
"""One message in; one message, None for none, or an async iterator of messages out (None is one, too)."""

Messages: TypeAlias = Mapping[Any, Any]
"""For each type of message that a stage takes, as `LeafBatch`, the type that it gives."""

RunT_contra = TypeVar("RunT_contra", contravariant=True)


@runtime_checkable
class Stage(Capability, Protocol[RunT_contra]):
    """One step of a pipeline: a frozen value holding options. It may add the protocols below."""

    def open(self, run: RunT_contra, /) -> AbstractAsyncContextManager[Actor]:
        """Make the actor of one run. Its resources are released when the context ends.

        Called when the first message comes, or the end without one.

        Cancellation:
            The context may be left at any time by cancellation. Clean-up that must happen is
            shielded, with a bound.
        """
        ...


@runtime_checkable
class Concurrent(Capability, Protocol):
    """A stage with several workers, which share one actor. Without it there is one."""

    @property
    def concurrency(self) -> int: ...


@runtime_checkable
class ChangesLeaves(Capability, Protocol):
    """A stage of a save that changes the dtype, the shape or the stored length of leaves."""

    def resolve_spec(self, spec: LeafSpec, /) -> LeafSpec:
        """Return the changed spec of a leaf with array bytes. Pure: called before any byte is read."""
        ...


@runtime_checkable
class DeclaresMessages(Capability, Protocol):
    """A stage that declares its message types, for lack of an annotated function."""

    @property
    def messages(self) -> Messages: ...


@runtime_checkable
class PassesOn(Capability, Protocol):
    """A stage that may have nothing to do. Then the driver leaves it out, which saves turns of the loop."""

    @property
    def passes_on(self) -> bool:
        """Whether, with these options, every message leaves as it came. Its figures are then all 0."""
        ...


@runtime_checkable
class Finishing(Capability, Protocol):
    """An actor that has messages to give, or work to do, after its last input."""

    def finish(self) -> AsyncIterator[Any]:
        """Yield what remains. Called once, after every worker has ended without an error."""
        ...


@final
@dataclass(frozen=True, slots=True)
class FunctionStage:
    """A stage made of a function from message to message, or of a callable object.

    An `async def` runs in the event loop, a plain `def` in a worker thread.
    """

    function: Callable[[Any], Any]
    concurrency: int = 1

    @asynccontextmanager
    async def open(self, run: object, /) -> AsyncGenerator[Actor]:
        """Yield the function itself, or a wrapper that calls it in one of the run's worker threads."""
        if _is_async(self.function):
            yield self.function
        elif isinstance(run, _OffersThreads):
            yield _InThread(self.function, run.threads)
        else:
            raise PipelineError(f"{self.function!r} is not async, and the run has no worker threads")


@runtime_checkable
class _OffersThreads(Capability, Protocol):
    @property
    def threads(self) -> Threads: ...


@final
class _InThread:
    """Calls a function in a worker thread, and finishes as it does."""

    __slots__ = ("_function", "_threads")

    def __init__(self, function: Callable[[Any], Any], threads: Threads) -> None:
        self._function = function
        self._threads = threads

    async def __call__(self, message: Any, /) -> Any:
        made = await self._threads.run(self._function, message)
        return await made if inspect.isawaitable(made) else made

    async def finish(self) -> AsyncIterator[Any]:
        if isinstance(self._function, Finishing):
            async for message in self._function.finish():
                yield message


def _is_async(function: Any) -> bool:
    calls = [function, type(function).__call__]
    return any(inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call) for call in calls)


def does_nothing(stage: object) -> bool:
    """True if a stage, with its options, passes every message on as it came."""
    return isinstance(stage, PassesOn) and stage.passes_on


def workers_of(stage: object) -> int:
    """Return how many workers share a stage's actor: one, unless the stage says more."""
    return stage.concurrency if isinstance(stage, Concurrent) else 1


class SendingEnd(Protocol):
    """The sending end of a stream."""

    async def send(self, item: Any, /) -> None:
        """Pass a message on; raise anyio's BrokenResourceError if no stage will take it."""
        ...


@final
class _ConsumerLeft(Exception):
    """Not an error: unwinds a worker whose consumer has left."""


async def drive(
    actor: Actor,
    concurrency: int,
    inlet: MemoryObjectReceiveStream[Any],
    outlet: SendingEnd,
    meter: StageMeter,
) -> bool:
    """Run `actor` over `inlet` until upstream closes it, then let it finish.

    If the consumer has left, stop quietly: its own error is the one to report, and the leaf count before
    finalize catches whatever is cut off. The caller closes both ends afterwards, the inlet by `receiving`.
    After an error it first cancels the other stages: to the one downstream, a closed outlet says that all
    messages have come.

    Returns:
        Whether every message was passed on; False if the consumer left before.

    Raises:
        BaseException: What the worker raised; of several workers, an ExceptionGroup. A worker alone that
            was cancelled by something it awaited, and not by its scope, raises that.
        PipelineError: If one of several was.
    """
    port = _Port(outlet, meter)
    try:
        await _work_together(actor, concurrency, inlet, port)
        if isinstance(actor, Finishing):
            await _forward(0, actor.finish(), port, 0)
    except* _ConsumerLeft:
        complete = False
    else:
        complete = True

    return complete


async def _work_together(
    actor: Actor, concurrency: int, inlet: MemoryObjectReceiveStream[Any], port: _Port
) -> None:
    ended: list[int] = []
    if concurrency == 1:  # the usual case: without a task group, a save is staged sooner
        await _work(0, actor, inlet, port, ended)
        return

    async with create_task_group() as workers:
        for worker in range(concurrency):
            workers.start_soon(_work, worker, actor, inlet, port, ended)

    # A task group treats a cancellation it did not request (an asyncio future that others cancelled) as the
    # quiet end of a task. The worker's message is lost.
    if len(ended) < concurrency:
        await checkpoint_if_cancelled()  # a cancellation of our own may not have been delivered here yet
        raise PipelineError("a worker ended early: something that it awaited was cancelled")


@contextmanager
def receiving(inlet: MemoryObjectReceiveStream[Any]) -> Generator[None]:
    """Close `inlet` at the end, and release the messages that are still in it."""
    with inlet:
        try:
            yield
        finally:
            _drain(inlet)


def release_dropped(message: object) -> None:
    """Release the resources of a message that will not be delivered."""
    release = getattr(message, "release", None)
    if release is not None:
        release()


@final
@dataclass(frozen=True, slots=True)
class _Port:
    """The outlet; it releases a message that cannot be delivered."""

    outlet: SendingEnd
    meter: StageMeter

    async def send(self, message: Any) -> None:
        since = self.meter.clock()
        try:
            await self.outlet.send(message)
        except BrokenResourceError:
            release_dropped(message)
            raise _ConsumerLeft from None
        except BaseException:
            release_dropped(message)  # cancelled during the send: nothing else holds the message
            raise

        self.meter.passed(self.meter.clock() - since)


async def _work(
    worker: int, actor: Actor, inlet: MemoryObjectReceiveStream[Any], port: _Port, ended: list[int]
) -> None:
    clock = port.meter.clock
    waiting_since = clock()
    while True:
        try:
            message = await _received(inlet)
        except EndOfStream:
            break

        nbytes: int = getattr(message, "nbytes", 0)
        waiting = inlet.statistics()
        queued = waiting.current_buffer_used + waiting.tasks_waiting_send
        port.meter.took(nbytes, clock() - waiting_since, queued)
        try:
            await _handle(worker, actor, message, port, nbytes)
        except BaseException as error:
            release_dropped(message)
            del message
            # A cancellation, too: task groups keep it in a reference cycle.
            forget_locals(error)
            raise

        del message  # a waiting worker keeps no bytes alive
        waiting_since = clock()

    ended.append(worker)


async def _received(inlet: MemoryObjectReceiveStream[Any]) -> Any:
    """Return the next message. A waiting one is taken without a turn of the loop."""
    try:
        return inlet.receive_nowait()
    except WouldBlock:
        return await inlet.receive()
    except EndOfStream:
        await checkpoint_if_cancelled()  # the end of what a cancelled stage gets is not the last message
        raise


async def _handle(worker: int, actor: Actor, message: Any, port: _Port, nbytes: int) -> None:
    result = actor(message)
    if isinstance(result, AsyncIterator):
        await _forward(worker, result, port, nbytes)
        return

    with port.meter.working(worker, nbytes):
        produced = await result

    if produced is None:
        await checkpoint()  # a worker that passes nothing on does not keep the loop, either
    else:
        await port.send(produced)


async def _forward(worker: int, produced: AsyncIterator[Any], port: _Port, nbytes: int) -> None:
    passed_on = False
    try:
        while True:
            with port.meter.working(worker, nbytes):
                try:
                    message = await anext(produced)
                except StopAsyncIteration:
                    break

            nbytes = 0  # counted with the first stretch of work
            passed_on = True
            await port.send(message)
            del message  # the receiver owns it now; do not keep it alive while the next one is made
    finally:
        # Actors yield from async generators; one that is left half-way is closed here and not by
        # the garbage collector, which would do it in some other task.
        close = getattr(produced, "aclose", None)
        if close is not None:
            await close()

    if not passed_on:
        await checkpoint()


def _drain(inlet: MemoryObjectReceiveStream[Any]) -> None:
    while True:
        try:
            release_dropped(inlet.receive_nowait())
        except (WouldBlock, EndOfStream):
            return
