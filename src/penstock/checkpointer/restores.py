"""The restores of a Checkpointer: of one tree, of items by name, leaf by leaf, and by one replica for all.

Each runs its pipeline, again if the checkpoint is replaced meanwhile.
"""

from __future__ import annotations

__all__ = (
    "LeafStream",
    "Streams",
    "check_single_replica",
    "restore_together",
    "restore_tree",
    "result_check",
)

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
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
from penstock.kernel.pipeline.failures import short_tracebacks
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.runner import PipelineResult, run_pipeline
from penstock.kernel.pipeline.statistics import waited_for_memory_s
from penstock.kernel.protocols.leaf import KeyPath
from penstock.reports.report import RestoreReport
from penstock.stages.deliver import Deliver
from penstock.stages.reorder import InOrder
from penstock.stages.reuse.value_cache import KnownValues

if TYPE_CHECKING:
    import jax

    from penstock.handlers.leaves.single_replica import Share


async def restore_tree(
    engine: Engine, threads: Threads, pipeline: Pipeline[RestoreRun], request: RestoreRequest
) -> tuple[Any, RestoreReport]:
    """Return one tree, and the report of its restore. Remember values that a later save may find unchanged.

    Args:
        engine: Of the Checkpointer, at the path.
        threads: Of the Checkpointer.
        pipeline: The stages.
        request: What is wanted.
    """
    path = request.path
    once = partial(_restored_once, engine, threads, pipeline, request)
    with engine.observing("restore", path) as observers:
        since = engine.store.request_figures()
        result, run, source = await engine.read_unchanged(path, threads, once)
        restored: RestoredTree = result.value
        plan = restored.plan
        if restored.references and plan is not None:
            KnownValues(run.caches.known_values).remember(
                path, source.identity, {plan.directory: restored.references}
            )

        report = RestoreReport(
            path,
            run.progress.leaves_total,
            run.progress.bytes_done,
            () if plan is None else plan.changes,
            stages=result.stages,
            limits=run.limits,
            processor_s=result.processor_s,
            requests=engine.store.request_figures().since(since),
        )
        for tell in observers:
            tell(report)

    return restored.tree, report


async def _restored_once(
    engine: Engine,
    threads: Threads,
    pipeline: Pipeline[RestoreRun],
    request: RestoreRequest,
    source: Reading,
) -> tuple[PipelineResult, RestoreRun, Reading]:
    # No inner function: its frame would keep what it closes over, such as a target, even when it is cleared.
    path = request.path
    run = engine.restore_run(path, threads, source.store)
    since = time.perf_counter()
    try:
        result = await run_pipeline(pipeline, run, request)
    except InsufficientMemoryError:
        raise
    except MemoryError as error:  # there was less than there seemed to be
        raise InsufficientMemoryError(path) from error

    engine.events.info(
        "restore.finished",
        path=path,
        n_leaves=run.progress.leaves_total,
        nbytes=run.progress.bytes_done,
        seconds=time.perf_counter() - since,
        memory_wait_s=waited_for_memory_s(result.stages),
    )
    return result, run, source


async def restore_together(
    engine: Engine, threads: Threads, pipeline: Pipeline[RestoreRun], request: RestoreRequest
) -> tuple[Any, RestoreReport]:
    """Return one tree, restored by all processes of the job, and the report of what this one read of it.

    One replica reads, the others receive. Args as those of `restore_tree`; the request has a target, and
    the axis of meshes along which replicas are.
    """
    from penstock.handlers.coordinators.recorded_answers import AnsweredStore, RecordingStore
    from penstock.handlers.leaves.single_replica import (
        ReplicaAxis,
        SingleReplica,
        broadcast_together,
    )
    from penstock.stages.locate import LocateOnce

    options = request.options
    assert options.replica_axis is not None, "or each process restores for itself"
    axis = ReplicaAxis(options.replica_axis, options.primary_replica)
    operation = engine.coordinator.operation(f"restore of {request.path} {options.item or ''}")
    single = await threads.run(SingleReplica.of, request.like, axis, operation.processes)

    async def read(share: Share) -> tuple[tuple[Any, RestoreReport], Sequence[jax.Array]]:
        once = pipeline.replace("locate", LocateOnce(share, RecordingStore, AnsweredStore))
        found = await restore_tree(engine, threads, once, replace(request, like=single.like))
        return found, await threads.run(single.sources, found[0])

    limits, turn = engine.config.processes, engine.replica_turn
    (tree, report), arrays = await broadcast_together(
        operation, single.arrays, axis, read, limits, engine.memory, threads, turn
    )
    return await threads.run(single.together, tree, arrays), report


@short_tracebacks
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
        observing = engine.observing("restore", path)
        with calm_interpreter(self._tasks, engine.config.loop), observing as observers:
            async with engine.reading(path, self._threads) as self._source:
                run = engine.restore_run(path, self._threads, self._source.store)
                result = await run_pipeline(self._pipeline, run, self._request)

            progress = run.progress
            report = RestoreReport(
                path,
                progress.leaves_total,
                progress.bytes_done,
                stages=result.stages,
                limits=run.limits,
                processor_s=result.processor_s,
            )
            for tell in observers:
                tell(report)

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
            TypedDict (of which only its names are).

    Raises:
        SpecError: If results cannot be checked against `as_type`.
    """
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
