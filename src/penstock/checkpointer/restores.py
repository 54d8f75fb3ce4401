"""The restores of a Checkpointer: of one tree, of items by name, leaf by leaf, and by one replica for all.

Each runs its pipeline, again if the checkpoint is replaced meanwhile.
"""

from __future__ import annotations

__all__ = (
    "LeafStream",
    "RestoreTask",
    "SingleReplicaTask",
    "Streams",
    "check_single_replica",
    "result_check",
)

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast, final, get_origin, is_typeddict

from anyio import (
    CancelScope,
    ClosedResourceError,
    EndOfStream,
    Event,
    create_memory_object_stream,
    get_cancelled_exc_class,
)
from anyio.abc import TaskGroup

from penstock.checkpointer.engine import Engine
from penstock.event_loop.interpreter_settings import calm_interpreter
from penstock.handlers.stores.publishing.reading import Reading
from penstock.kernel.concurrency.threads import LoopHandle, Threads
from penstock.kernel.errors import (
    ClosedError,
    InsufficientMemoryError,
    ResultTypeError,
    SpecError,
)
from penstock.kernel.messages.restore import Order, RestoredTree, RestoreRequest
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.runner import PipelineResult, run_pipeline
from penstock.kernel.pipeline.statistics import waited_for_memory_s
from penstock.kernel.protocols.leaf import KeyPath
from penstock.reports.report import RestoreReport
from penstock.stages.deliver import Deliver
from penstock.stages.reorder import InOrder
from penstock.stages.reuse.value_cache import KnownValues
from penstock.telemetry.observers import observed

if TYPE_CHECKING:
    import jax

    from penstock.handlers.leaves.single_replica import Share


@final
class RestoreTask:
    """Restores one tree, and remembers values that a later save may find unchanged.

    Args:
        engine: Of the Checkpointer.
        threads: Of the Checkpointer.
        pipeline: The stages.
        request: What is wanted.
    """

    __slots__ = ("_engine", "_pipeline", "_request", "_threads")

    def __init__(
        self, engine: Engine, threads: Threads, pipeline: Pipeline[RestoreRun], request: RestoreRequest
    ) -> None:
        self._engine = engine
        self._threads = threads
        self._pipeline = pipeline
        self._request = request

    async def __call__(self) -> tuple[Any, RestoreReport]:
        """Return the tree, and the report of the restore."""
        engine, path = self._engine, self._request.path
        with observed(engine.observers, "restore", path, engine.events) as tell:
            since = engine.store.request_figures()
            result, run, source = await engine.read_unchanged(path, self._threads, self._once)
            restored: RestoredTree = result.value
            plan = restored.plan
            if restored.references and plan is not None:
                KnownValues(run.caches.known_values).remember(
                    path, source.identity, {plan.directory: restored.references}
                )

            report = RestoreReport(
                run.path,
                run.progress.leaves_total,
                run.progress.bytes_done,
                () if plan is None else plan.changes,
                stages=result.stages,
                requests=engine.store.request_figures().since(since),
            )
            tell(report)

        return restored.tree, report

    async def _once(self, source: Reading) -> tuple[PipelineResult, RestoreRun, Reading]:
        run = self._engine.with_store(source.store).restore_run(self._request.path, self._threads)
        since = time.perf_counter()
        try:
            result = await run_pipeline(self._pipeline, run, self._request)
        except InsufficientMemoryError:
            raise
        except MemoryError as error:  # there was less than there seemed to be
            raise InsufficientMemoryError(run.path) from error

        self._engine.events.info(
            "restore.finished",
            path=run.path,
            n_leaves=run.progress.leaves_total,
            nbytes=run.progress.bytes_done,
            seconds=time.perf_counter() - since,
            memory_wait_s=waited_for_memory_s(result.stages),
        )
        return result, run, source


@final
class SingleReplicaTask:
    """Restores one tree together with all processes of the job: one replica reads, the others receive.

    Args:
        engine: Of the Checkpointer.
        threads: Of the Checkpointer.
        pipeline: The stages.
        request: What is wanted, with a target.
        axis: Of meshes, along which replicas are.
    """

    __slots__ = ("_axis", "_engine", "_pipeline", "_request", "_threads")

    def __init__(
        self,
        engine: Engine,
        threads: Threads,
        pipeline: Pipeline[RestoreRun],
        request: RestoreRequest,
        axis: str,
    ) -> None:
        self._engine = engine
        self._threads = threads
        self._pipeline = pipeline
        self._request = request
        self._axis = axis

    async def __call__(self) -> tuple[Any, RestoreReport]:
        """Return the tree, and the report of what this process read of it."""
        from penstock.handlers.coordinators.recorded_answers import AnsweredStore, RecordingStore
        from penstock.handlers.leaves.single_replica import (
            ReplicaAxis,
            SingleReplica,
            broadcast_together,
        )
        from penstock.stages.locate import LocateOnce

        engine, threads, request = self._engine, self._threads, self._request
        axis = ReplicaAxis(self._axis, request.options.primary_replica)
        operation = engine.coordinator.operation(f"restore of {request.path} {request.options.item or ''}")
        single = await threads.run(SingleReplica.of, request.like, axis, operation.processes)

        async def read(share: Share) -> tuple[tuple[Any, RestoreReport], Sequence[jax.Array]]:
            once = LocateOnce(share, RecordingStore, AnsweredStore)
            pipeline = self._pipeline.replace("locate", once)
            found = await RestoreTask(engine, threads, pipeline, replace(request, like=single.like))()
            return found, await threads.run(single.sources, found[0])

        limits, turn = engine.config.processes, engine.replica_turn
        (tree, report), arrays = await broadcast_together(
            operation, single.arrays, axis, read, limits, engine.memory, threads, turn
        )
        return await threads.run(single.together, tree, arrays), report


@final
class LeafStream(AsyncIterator[tuple[KeyPath, Any]]):
    """The leaves of a checkpoint, as pairs of key path and value. An async iterator, and a context manager.

    Only the in-flight bytes are read ahead, so a value that is not taken delays the others. Leaving
    the loop early stops the reading: at once if `aclose` is awaited or the context left, otherwise
    soon after the stream is dropped.

    Raises:
        ReplacedError: If the checkpoint was replaced; all values so far are from the old one.
        PenstockError: What `Checkpointer.restore` raises, at the value that cannot be read.
    """

    __slots__ = ("_loop", "_reading")

    def __init__(self, opened: _Reading) -> None:
        self._reading = opened
        self._loop = LoopHandle()

    async def __anext__(self) -> tuple[KeyPath, Any]:
        return await self._reading.next_value()

    async def aclose(self) -> None:
        """Stop reading, and return when every byte is released. Idempotent."""
        self._reading.stop()
        await self._reading.wait_ended()

    async def __aenter__(self) -> LeafStream:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        with CancelScope(shield=True):  # bounded by the reads under way
            await self.aclose()

    def __del__(self) -> None:
        self._loop.post(self._reading.stop)  # perhaps in another thread


@final
class Streams:
    """The streams of one Checkpointer, which are closed with it."""

    __slots__ = ("_readings",)

    def __init__(self) -> None:
        self._readings: list[_Reading] = []

    def open(
        self,
        engine: Engine,
        tasks: TaskGroup,
        threads: Threads,
        pipeline: Pipeline[RestoreRun],
        request: RestoreRequest,
        order: Order | None,
    ) -> LeafStream:
        """Return a stream that begins to read when its first value is requested."""
        self._readings = [one for one in self._readings if not one.has_ended]
        opened = _Reading(engine, tasks, threads, pipeline, request, order)
        self._readings.append(opened)
        return LeafStream(opened)

    def stop(self) -> None:
        """Stop all of them."""
        for one in self._readings:
            one.stop()


@final
class _Reading:
    """The restore of a stream. It holds no reference to the stream, so that the stream can be dropped."""

    def __init__(
        self,
        engine: Engine,
        tasks: TaskGroup,
        threads: Threads,
        pipeline: Pipeline[RestoreRun],
        request: RestoreRequest,
        order: Order | None,
    ) -> None:
        self._engine = engine
        self._tasks = tasks
        self._threads = threads
        self._request = request
        # No value waits in the stream: one that is made and not taken is memory that no lease counts.
        self._send, self._receive = create_memory_object_stream[tuple[KeyPath, Any]](0)
        # A stream makes no tree, so values can die one by one.
        pipeline = pipeline.replace("assemble", Deliver(self._take, order, self._check))
        if order is not None:
            pipeline = pipeline.replace("prioritise", InOrder(order))

        self._pipeline = pipeline
        self._scope = CancelScope()
        self._ended = Event()
        self._started = False
        self._source: Reading | None = None
        self._error: BaseException | None = None

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    async def next_value(self) -> tuple[KeyPath, Any]:
        if not self._started:
            self._started = True
            self._tasks.start_soon(self._read)

        try:
            return await self._receive.receive()
        except ClosedResourceError:
            raise ClosedError("the stream was closed") from None
        except EndOfStream:
            pass  # raised below, so that this is not its context

        await self._ended.wait()
        self._receive.close()
        error, self._error = self._error, None
        if error is None:
            raise StopAsyncIteration
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    def stop(self) -> None:
        """End it. Call it in the event loop only."""
        self._scope.cancel()
        self._receive.close()
        self._send.close()
        if not self._started:
            self._started = True
            self._ended.set()

    async def wait_ended(self) -> None:
        await self._ended.wait()

    async def _take(self, keys: KeyPath, value: object) -> None:
        await self._send.send((keys, value))

    async def _read(self) -> None:
        try:
            with self._scope, self._send:
                await self._run()
        except get_cancelled_exc_class():
            raise
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()

    async def _run(self) -> None:
        engine, path = self._engine, self._request.path
        observing = observed(engine.observers, "restore", path, engine.events)
        with calm_interpreter(self._tasks, engine.config.loop), observing as tell:
            async with engine.reading(path, self._threads) as self._source:
                run = engine.with_store(self._source.store).restore_run(path, self._threads)
                result = await run_pipeline(self._pipeline, run, self._request)

            progress = run.progress
            tell(RestoreReport(path, progress.leaves_total, progress.bytes_done, stages=result.stages))

    async def _check(self) -> None:
        """Raise if the checkpoint was replaced."""
        assert self._source is not None, "a leaf arrives once it is being read"
        await self._source.check()


def check_single_replica(request: RestoreRequest) -> None:
    """Raise `SpecError` if the options of a restore with `replica_axis` contradict `like`."""
    options = request.options
    problems = {
        "it needs a `like`, whose shardings say what lies where": not request.has_like,
        "arrays that are mapped are read by none": options.mmap,
        "`like` must have the dtypes and shapes of the result": options.dtype is not None
        or not options.strict,
        "the leaves of `like` are replaced, so none can be kept": options.on_missing == "keep",
        "functions have no replicas": options.transforms is not None,
    }
    for problem, is_asked in problems.items():
        if is_asked:
            raise SpecError(f"replica_axis: {problem}")


def result_check(path: str, as_type: object) -> Callable[[object], None]:
    """Return a function that raises `ResultTypeError` for a result of another type than requested.

    Args:
        path: Of the checkpoint, for the message.
        as_type: A class, a generic alias (`dict[str, jax.Array]`, of which only `dict` is checked), a
            TypedDict (of which only its names are), or None for any result.

    Raises:
        SpecError: If results cannot be checked against `as_type`.
    """
    if as_type is None:
        return lambda _: None
    if is_typeddict(as_type):
        keys: frozenset[str] = cast("Any", as_type).__required_keys__
        return lambda result: _check(
            path, as_type, result, fits=isinstance(result, dict) and keys <= cast("Any", result).keys()
        )

    origin = get_origin(as_type)
    wanted = as_type if origin is None else origin
    try:
        isinstance(None, cast("Any", wanted))
    except TypeError as error:
        raise SpecError(f"as_type must be a class such as a dataclass or dict, not {as_type!r}") from error

    return lambda result: _check(path, as_type, result, fits=isinstance(result, cast("Any", wanted)))


def _check(path: str, as_type: object, result: object, *, fits: bool) -> None:
    if not fits:
        raise ResultTypeError(path, as_type, result)
