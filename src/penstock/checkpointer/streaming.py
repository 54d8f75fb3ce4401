"""A restore that yields values one by one, each as soon as it is complete."""

from __future__ import annotations

__all__ = ("LeafStream", "Streams")

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, final

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
from penstock.kernel.concurrency.interpreter_settings import calm_interpreter
from penstock.kernel.concurrency.threads import LoopHandle, Threads
from penstock.kernel.errors import ClosedError
from penstock.kernel.messages.restore import Order, RestoreReport, RestoreRequest
from penstock.kernel.pipeline.observers import observed
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.runner import run_pipeline
from penstock.kernel.protocols.leaf import KeyPath
from penstock.kernel.storage.reading import Reading
from penstock.stages.deliver import Deliver
from penstock.stages.reorder import InOrder


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
    """The restore behind a stream. It holds no reference to the stream, so that the stream can be dropped."""

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
        self._send, self._receive = create_memory_object_stream[tuple[KeyPath, Any]](0)
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
