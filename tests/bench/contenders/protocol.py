"""What a contender is. Those that block are wrapped, so that all are called in one way."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

from anyio import to_thread
from tests.bench.results import Operation, StageTime
from tests.bench.trees import State


class Saved(NamedTuple):
    """What a save has to say beyond its duration."""

    staged_s: float | None = None  #: when the caller had control again, if that was earlier
    stages: tuple[StageTime, ...] = ()


class Described(Protocol):
    """What every contender says of itself."""

    label: str
    operations: frozenset[Operation]
    checkpoint: str  #: label of the contender whose checkpoint it restores


class Contender(Described, Protocol):
    """A way to save and restore; what it returns is durable, or ready to be computed with."""

    def running(self) -> AbstractAsyncContextManager[object]: ...
    async def save(self, path: Path, state: State, base: Path | None = None) -> Saved: ...
    async def restore(self, path: Path, target: State) -> Any: ...
    async def metadata(self, path: Path) -> object: ...
    def leaves(self, restored: Any, state: State) -> Iterator[Any]: ...


class Blocking(Described, Protocol):
    """The same as plain calls."""

    def save(self, path: Path, state: State) -> Saved: ...
    def restore(self, path: Path, target: State) -> Any: ...
    def metadata(self, path: Path) -> object: ...
    def leaves(self, restored: Any, state: State) -> Iterator[Any]: ...


@runtime_checkable
class InBackground(Protocol):
    """A blocking contender whose save gives back control before it is durable."""

    label: str

    def begin(self, path: Path, state: State) -> None: ...
    def finish(self) -> None: ...


@final
class InThread:
    """A blocking contender in a thread without an event loop, as a plain script would run it."""

    def __init__(self, inner: Blocking) -> None:
        self.inner = inner
        self.label, self.operations, self.checkpoint = inner.label, inner.operations, inner.checkpoint

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        yield

    async def save(self, path: Path, state: State, base: Path | None = None) -> Saved:
        return await to_thread.run_sync(self.inner.save, path, state)

    async def restore(self, path: Path, target: State) -> Any:
        return await to_thread.run_sync(self.inner.restore, path, target)

    async def metadata(self, path: Path) -> object:
        return await to_thread.run_sync(self.inner.metadata, path)

    def leaves(self, restored: Any, state: State) -> Iterator[Any]:
        return self.inner.leaves(restored, state)


@final
class InLoop:
    """A blocking contender called in the event loop, as its API has it; only waiting is in a thread."""

    def __init__(self, inner: Blocking) -> None:
        self.inner = inner
        self.label, self.operations, self.checkpoint = inner.label, inner.operations, inner.checkpoint

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        yield

    async def save(self, path: Path, state: State, base: Path | None = None) -> Saved:
        if not isinstance(self.inner, InBackground):
            return self.inner.save(path, state)

        self.inner.begin(path, state)
        await to_thread.run_sync(self.inner.finish)
        return Saved()

    async def restore(self, path: Path, target: State) -> Any:
        return self.inner.restore(path, target)

    async def metadata(self, path: Path) -> object:
        return self.inner.metadata(path)

    def leaves(self, restored: Any, state: State) -> Iterator[Any]:
        return self.inner.leaves(restored, state)
