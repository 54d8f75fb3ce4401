"""The protocols of a stage and of its actor.

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
    "OffersThreads",
    "PassesOn",
    "Stage",
    "workers_of",
)

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, final, runtime_checkable

from penstock.kernel.errors import PipelineError
from penstock.kernel.protocols.capability import Capability

if TYPE_CHECKING:
    from penstock.kernel.concurrency.threads import Threads
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
        elif isinstance(run, OffersThreads):
            yield _InThread(self.function, run.threads)
        else:
            raise PipelineError(f"{self.function!r} is not async, and the run has no worker threads")


@runtime_checkable
class OffersThreads(Capability, Protocol):
    """A run that has worker threads for blocking calls."""

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


def workers_of(stage: object) -> int:
    """Return how many workers share a stage's actor: one, unless the stage says more."""
    return stage.concurrency if isinstance(stage, Concurrent) else 1
