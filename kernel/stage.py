"""How one actor is driven: who owns which stream end, and what a vanished peer means.

A stage is a value that knows its options; `open(run)` makes the actor of one run out of it, and the
end of that context is the end of the actor. An actor is a callable from one message to the next, or
to an async iterator of them. It never sees a stream, a task group or a sibling.
"""

from __future__ import annotations

__all__ = ("Actor", "Finishing", "FunctionStage", "Stage", "drive")

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast, final, runtime_checkable

from anyio import BrokenResourceError, EndOfStream, WouldBlock, create_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from penstock.kernel.meters import StageMeter

Actor: TypeAlias = Callable[[Any], "Awaitable[Any] | AsyncIterator[Any]"]
"""One message in; one message, None for none, or an async iterator of messages out."""

RunT_contra = TypeVar("RunT_contra", contravariant=True)


@runtime_checkable
class Stage(Protocol[RunT_contra]):
    """One step of a pipeline: a frozen value holding options. `concurrency` workers share an actor."""

    @property
    def concurrency(self) -> int: ...

    def open(self, run: RunT_contra, /) -> AbstractAsyncContextManager[Actor]:
        """Make the actor of one run. Whatever it holds is given back when the context ends.

        Cancellation:
            The context may be left at any time by cancellation. Clean-up that must happen is
            shielded, with a bound.
        """
        ...


@runtime_checkable
class Finishing(Protocol):
    """An actor that has something to say, or to do, after its last message."""

    def finish(self) -> AsyncIterator[Any]:
        """Yield what remains. Called once, after every worker has ended without an error."""
        ...


@final
@dataclass(frozen=True, slots=True)
class FunctionStage:
    """A stage made of a plain `async def f(message) -> message`: no options, nothing to close."""

    function: Actor
    concurrency: int = 1

    @asynccontextmanager
    async def open(self, run: object, /) -> AsyncIterator[Actor]:
        """Yield the function itself."""
        yield self.function


@runtime_checkable
class _Releasable(Protocol):
    def release(self) -> None: ...


@runtime_checkable
class _Weighs(Protocol):
    @property
    def nbytes(self) -> int: ...


@final
class _ConsumerLeft(Exception):  # noqa: N818 - not an error: it unwinds a worker nobody listens to
    pass


async def drive(
    actor: Actor,
    concurrency: int,
    inlet: MemoryObjectReceiveStream[Any],
    outlet: MemoryObjectSendStream[Any],
    meter: StageMeter,
) -> bool:
    """Run `actor` over `inlet` until upstream closes it, then let it finish.

    A consumer that left means stop quietly: its own error is the one worth reporting, and whatever
    such a stop cuts off is caught by the count of leaves before finalize. The caller closes both
    ends afterwards; messages still waiting in the inlet are released here.

    Returns:
        Whether every message was passed on; False if the consumer left before.

    Raises:
        ExceptionGroup: Of what the workers raised.
    """
    port = _Port(outlet, meter)
    complete = False
    try:
        async with create_task_group() as workers:
            for worker in range(concurrency):
                workers.start_soon(_work, worker, actor, inlet, port, meter)

        if isinstance(actor, Finishing):
            await _forward(0, actor.finish(), port, meter, 0)

        complete = True
    except* _ConsumerLeft:
        pass
    finally:
        _drain(inlet)

    return complete


@final
@dataclass(frozen=True, slots=True)
class _Port:
    """The outlet, with what happens to a message that cannot be delivered."""

    outlet: MemoryObjectSendStream[Any]
    meter: StageMeter

    async def send(self, message: Any) -> None:
        since = time.perf_counter()
        try:
            await self.outlet.send(message)
        except BrokenResourceError:
            _drop(message)
            raise _ConsumerLeft from None
        except BaseException:
            _drop(message)  # cancelled while offering it: nobody else will ever hold it
            raise

        self.meter.passed(time.perf_counter() - since)


async def _work(
    worker: int, actor: Actor, inlet: MemoryObjectReceiveStream[Any], port: _Port, meter: StageMeter
) -> None:
    waiting_since = time.perf_counter()
    async for message in inlet:
        nbytes = message.nbytes if isinstance(message, _Weighs) else 0
        meter.took(nbytes, time.perf_counter() - waiting_since)
        try:
            result = actor(message)
            if isinstance(result, AsyncIterator):
                await _forward(worker, cast("AsyncIterator[Any]", result), port, meter, nbytes)
            else:
                with meter.working(worker, nbytes):
                    produced = await result

                if produced is not None:
                    await port.send(produced)
        except BaseException:
            _drop(message)
            raise

        waiting_since = time.perf_counter()


async def _forward(
    worker: int, produced: AsyncIterator[Any], port: _Port, meter: StageMeter, nbytes: int
) -> None:
    # Actors yield from async generators; one that is left half-way is closed here and not by the
    # garbage collector, which would do it in some other task.
    async with aclosing(cast("AsyncGenerator[Any, None]", produced)) as messages:
        while True:
            with meter.working(worker, nbytes):
                try:
                    message = await anext(messages)
                except StopAsyncIteration:
                    return

            nbytes = 0  # counted with the first stretch of work
            await port.send(message)


def _drain(inlet: MemoryObjectReceiveStream[Any]) -> None:
    while True:
        try:
            _drop(inlet.receive_nowait())
        except (WouldBlock, EndOfStream):
            return


def _drop(message: object) -> None:
    if isinstance(message, _Releasable):
        message.release()
