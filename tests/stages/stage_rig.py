"""The environment for tests of single stages, and handlers that fail or hang at a chosen leaf."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
import structlog
from anyio import create_task_group
from anyio.lowlevel import checkpoint, current_token
from structlog.testing import LogCapture

from penstock import HandlerRegistry
from penstock.errors import TreeDifference
from penstock.handlers import LocalStore, OrbaxLayout, default_handlers
from penstock.handlers.stores.publishing import Workspace
from penstock.handlers.stores.publishing.reading import reading
from penstock.items import SaveRequest
from penstock.kernel import (
    Actor,
    Leaf,
    LeafHandler,
    LeafSpec,
    MemoryRegulator,
    ParamInfo,
    PiecePlan,
    Pipeline,
    ReadLeaves,
    RestoreRun,
    RunLimits,
    SaveRun,
    SingleProcessCoordinator,
    Slot,
    StoredRows,
    Target,
    Threads,
    TreeToSave,
    Waitable,
    run_pipeline,
)
from penstock.kernel.pipeline import FunctionStage, RunCaches, release_dropped
from penstock.testing import FaultyStore, Hang, Operation

Fault = Exception | Hang
T = TypeVar("T")

LIMITS = RunLimits(piece_bytes=1 << 20, batch_leaves=512, batch_bytes=4 << 20)


class Rig:
    """A store that fails on demand, a budget, threads, and runs that use them. Needs a running loop."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = FaultyStore(LocalStore())
        self.layout = OrbaxLayout()
        self.registry = default_handlers(entry_points=False)
        self.threads = Threads()
        self.memory = MemoryRegulator(1 << 30)
        self.limits = LIMITS
        self.caches = RunCaches()
        self.runs: list[SaveRun] = []
        self._capture = LogCapture()

    @property
    def final(self) -> Path:
        """The path of the checkpoint that `save_run` writes."""
        return self.root / "ckpt"

    @property
    def temporary(self) -> Path:
        """The temporary directory that the checkpoint is built in."""
        return Path(self.layout.temporary_name(str(self.final)))

    @property
    def events(self) -> list[str]:
        """The names of the logged events."""
        return [entry["event"] for entry in self._capture.entries]

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Return the fields of each event of this name, without those that logging adds."""
        fields = [dict(entry) for entry in self._capture.entries if entry["event"] == event]
        return [{k: v for k, v in entry.items() if k not in {"event", "log_level"}} for entry in fields]

    @property
    def operations(self) -> list[str]:
        """The names of the operations on the store."""
        return [operation.name for operation in self.store.operations]

    def save_run(self, *, overwrite: bool = False) -> SaveRun:
        workspace = Workspace(
            self.store, self.threads, str(self.final), str(self.temporary), overwrite=overwrite
        )
        self.runs.append(
            SaveRun(
                **self._shared(),
                request=SaveRequest(str(self.final)),
                layout=self.layout,
                workspace=workspace,
                reading=partial(reading, self.store, self.threads),
                started_ns=1,
            )
        )
        return self.runs[-1]

    def restore_run(self) -> RestoreRun:
        return RestoreRun(**self._shared())

    def limit(self, memory: int, *, piece: int | None = None) -> None:
        """Set a budget of `memory` bytes. Pieces are at most that large, and at most `piece` bytes."""
        self.memory = MemoryRegulator(memory)
        self.limits = replace(self.limits, piece_bytes=min(piece or memory, memory))

    def scripted(self, type_: type) -> Scripted:
        """Wrap the handler of this type in a scripted one, and return that."""
        found = self.registry.lookup(type_, "")
        handler = Scripted(found)
        self.registry = self.registry.copy()
        self.registry.register(type_, handler, override=True)
        return handler

    async def wait_background(self) -> None:
        """Wait for the background writes of third parties, as a failed save does."""
        for pending in [each for run in self.runs for each in run.handler_work.begun]:
            with suppress(Exception):
                await pending.wait()

    def check_idle(self) -> None:
        """Assert that nothing is held any more: no byte, no thread, no file."""
        statistics = self.memory.statistics()
        assert statistics.leased == 0
        assert statistics.tasks_waiting == 0
        assert self.threads.busy == 0
        assert self.store.open_files == 0

    def _shared(self) -> dict[str, Any]:
        logger: Any = structlog.wrap_logger(None, processors=[self._capture])
        return {
            "path": str(self.final),
            "registry": self.registry,
            "memory": self.memory,
            "threads": self.threads,
            "store": self.store,
            "finder": self.layout,
            "coordinator": SingleProcessCoordinator(),
            "events": logger,
            "limits": self.limits,
            "caches": self.caches,
        }


# Stages before and after the one under test


@dataclass(frozen=True)
class Gather:
    """The last stage: collects all messages in one list. Releases leases, as a later stage would."""

    kept: list[Any] = field(default_factory=list[Any])
    release: bool = True

    @property
    def concurrency(self) -> int:
        return 1

    @asynccontextmanager
    async def open(self, run: object, /) -> AsyncGenerator[Actor]:
        try:
            yield _Gatherer(self.kept, release=self.release)
        finally:
            if not self.release:
                for message in self.kept:
                    release_dropped(message)


class _Gatherer:
    def __init__(self, kept: list[Any], *, release: bool) -> None:
        self._kept = kept
        self._release = release

    async def __call__(self, message: object) -> None:
        await checkpoint()
        self._kept.append(message)
        if self._release:
            release_dropped(message)

    async def finish(self) -> AsyncIterator[list[Any]]:
        yield self._kept


@dataclass(frozen=True)
class Probe:
    """Holds every message for a while, with several workers, and records the most bytes held at once."""

    concurrency: int = 3
    held: dict[str, int] = field(default_factory=lambda: {"now": 0, "peak": 0})

    @property
    def peak(self) -> int:
        return self.held["peak"]

    @asynccontextmanager
    async def open(self, run: object, /) -> AsyncGenerator[Actor]:
        yield self._hold

    async def _hold(self, message: Any) -> Any:
        self.held["now"] += message.nbytes
        self.held["peak"] = max(self.held["peak"], self.held["now"])
        for _ in range(5):
            await checkpoint()

        self.held["now"] -= message.nbytes
        if message.in_flight is not None:
            message.in_flight.release()

        return message


def feed(messages: Iterable[object]) -> FunctionStage:
    """Make a first stage that ignores its input and yields `messages`."""

    async def yield_all(_: object) -> AsyncIterator[object]:
        for message in messages:
            yield message

    return FunctionStage(yield_all)


async def run_stages(run: Any, *stages: Any, message: object = None) -> list[Any]:
    """Run the stages as one pipeline, and return all messages of the last one."""
    slots = [Slot(f"s{at}", stage) for at, stage in enumerate((*stages, Gather()))]
    return cast("list[Any]", (await run_pipeline(Pipeline(tuple(slots)), run, message)).value)


async def run_one(run: Any, stage: Any, *messages: object) -> list[Any]:
    """Run one stage, called `x`, over these messages."""
    slots = (Slot("feed", feed(messages)), Slot("x", stage), Slot("gather", Gather()))
    return cast("list[Any]", (await run_pipeline(Pipeline(slots), run, None)).value)


async def save_stages(run: SaveRun, tree: object, *stages: Any) -> list[Any]:
    """Run the first stages of a save over a tree."""
    return await run_stages(run, *stages, message=TreeToSave(tree))


async def cancel_in(hang: Hang, work: Callable[[], Awaitable[object]], *, native: bool = False) -> None:
    """Start `work`, and cancel it while it hangs; if `native`, with asyncio's own `Task.cancel`."""
    if native and current_token().backend_class.__module__.endswith("asyncio"):
        task = asyncio.ensure_future(work())
        await hang.wait_reached()
        task.cancel()
        await anyio.lowlevel.checkpoint()
        hang.release()
        await asyncio.wait([task])
        assert task.cancelled()
        return

    async with create_task_group() as tasks:
        tasks.start_soon(_swallow_nothing, work)
        await hang.wait_reached()
        tasks.cancel_scope.cancel()
        hang.release()


async def _swallow_nothing(work: Callable[[], Awaitable[object]]) -> None:
    await work()
    raise AssertionError("it was cancelled, and ended as if it had not been")


# Handlers


class _Script:
    """Records calls, and fails or hangs at chosen ones."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._faults: dict[tuple[str, str], Fault] = {}
        self._lock = threading.Lock()

    def fail(self, method: str, name: str, error: Exception | None = None) -> Exception:
        """Make `method` raise at the leaf with this stored name. Returns the error."""
        fault = error or ArithmeticError(f"{method} of {name}")
        self._faults[method, name] = fault
        return fault

    def hang(self, method: str, name: str) -> Hang:
        """Make `method` hang at the leaf with this stored name."""
        hang = self._faults[method, name] = Hang()
        return hang

    def enter(self, method: str, name: str) -> None:
        with self._lock:
            self.calls.append((method, name))

        fault = self._faults.get((method, name))
        if isinstance(fault, Hang):
            fault.hold(Operation(method, name))
        elif fault is not None:
            raise fault

    def names(self, method: str) -> list[str]:
        """Return the names of the leaves that a method was called with, in order."""
        return [name for called, name in self.calls if called == method]


class Scripted(_Script):
    """Wraps a `LeafHandler`: records calls, and fails or hangs where a test asks for it."""

    def __init__(self, inner: LeafHandler) -> None:
        super().__init__()
        self._inner = inner

    @property
    def typestr(self) -> str:
        return self._inner.typestr

    def describe(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], known: dict[Any, LeafSpec]
    ) -> Sequence[LeafSpec]:
        for info in infos:
            self.enter("describe", info.name)

        return self._inner.describe(values, infos, known)

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[PiecePlan]:
        self.enter("pieces", leaf.info.name)
        for plan in self._inner.pieces(leaf, piece_bytes):
            yield replace(plan, take=partial(self._take, leaf.info.name, plan.take))

    def targets(self, stored: StoredRows, likes: Sequence[Any] | None) -> Sequence[Target | TreeDifference]:
        for leaf in stored:
            self.enter("target", leaf.info.name)

        return [
            replace(target, packable=False) if isinstance(target, Target) else target
            for target in self._inner.targets(stored, likes)
        ]

    def build(self, leaves: ReadLeaves) -> Sequence[Any]:
        for leaf in leaves:
            self.enter("build", leaf.info.name)

        return self._inner.build(leaves)

    def _take(self, name: str, take: Callable[[], memoryview]) -> memoryview:
        self.enter("take", name)
        return take()


class Parcel:
    """A leaf of a type that only a third party's handler knows."""

    def __init__(self, text: str) -> None:
        self.text = text


class ParcelHandler(_Script):
    """A `TypeHandler` with the batch protocol only: a file for each value, written in the background.

    With `when_asked` the file is written only when the result of the future is asked for, by that thread.
    """

    def __init__(self, size: int = 100, *, when_asked: bool = False) -> None:
        super().__init__()
        self._size = size
        self._begin: Callable[..., Waitable] = _WhenAsked if when_asked else _in_thread
        self.finalized: list[str] = []

    def typestr(self) -> str:
        return "parcel"

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Waitable]:
        futures: list[Waitable] = []
        for value, info in zip(values, infos, strict=True):
            await checkpoint()
            self.enter("serialize", info.name)
            futures.append(self._begin(self._write, Path(info.directory, info.name), value.text))

        return futures

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        for info in infos:
            await checkpoint()
            self.enter("deserialize", info.name)

        return [Parcel(_text(info)) for info in infos]

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        return [None for _ in infos]

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        return [(self._size, self._size) for _ in values]

    def finalize(self, directory: str) -> None:
        self.enter("finalize", "")
        self.finalized.append(directory)

    def _write(self, path: Path, text: str) -> None:
        self.enter("write", path.name)
        path.write_text(text)


def _text(info: ParamInfo) -> str:
    return Path(info.directory, info.name).read_text()


class _WhenAsked:
    def __init__(self, function: Callable[..., object], *args: Any) -> None:
        self._call = partial(function, *args)

    def result(self, timeout: float | None = None) -> object:
        return self._call()


def _in_thread(function: Callable[..., T], *args: Any) -> Future[T]:
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work).start()
    return future


def files_in(directory: Path) -> set[str]:
    """Return the relative path of every file below a directory."""
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def with_parcels(registry: HandlerRegistry, handler: ParcelHandler) -> HandlerRegistry:
    """Return a copy of the registry with a third party's handler added."""
    registry = registry.copy()
    registry.register(Parcel, handler)
    return registry
