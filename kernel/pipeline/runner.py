"""Runs a pipeline once: makes the streams, drives the actors, and turns failure into one exception.

A stage holds neither end of its streams, and stops when a neighbour has closed: both are done here.
"""

from __future__ import annotations

__all__ = (
    "Outlet",
    "PipelineResult",
    "drive",
    "receiving",
    "release_dropped",
    "run_pipeline",
)

import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast, final

from anyio import (
    BrokenResourceError,
    EndOfStream,
    WouldBlock,
    create_memory_object_stream,
    create_task_group,
    get_cancelled_exc_class,
)
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from penstock.kernel.concurrency.threads import caller_gone
from penstock.kernel.errors import PenstockError, PipelineError
from penstock.kernel.pipeline.failures import forget_locals
from penstock.kernel.pipeline.pipeline import Milestone, Pipeline, Slot
from penstock.kernel.pipeline.stage import Actor, Finishing, OffersThreads
from penstock.kernel.pipeline.statistics import StageMeter, StageStatistics

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

RunT = TypeVar("RunT")

OTHER_THREADS: Final = 4
"""For the stages next to the one with the most workers, each of which may need a thread."""

LOOP_TURNS: Final = 3
"""Turns of the loop in which a stage ends, and who waited for its milestone goes on."""


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """The last stage's message, and the statistics of each stage."""

    value: Any
    stages: tuple[StageStatistics, ...]
    processor_s: float = 0.0  #: of the whole process, in the time of the run


async def run_pipeline(
    pipeline: Pipeline[RunT],
    run: RunT,
    message: object,
    *,
    on_milestone: Callable[[Milestone], object] | None = None,
    awaited: Milestone | None = None,
    clock: Callable[[], float] = time.perf_counter,
    translate: Callable[[str, Exception], PenstockError] | None = None,
) -> PipelineResult:
    """Send `message` through every stage and return the last message that comes out.

    Args:
        pipeline: At least one stage. One that `PassesOn` everything is left out, unless it has a milestone.
        run: Given to each stage's `open`.
        message: The first stage's only input; the driver keeps no reference once that stage has it.
        on_milestone: Called when a stage whose slot has a milestone has passed on its last message.
        awaited: The milestone that a caller waits for. The stages after it start a little later, together.
        clock: Seconds, for the figures.
        translate: Makes of a stage's name and an error that is no `PenstockError` the one that is raised,
            with that as its cause.

    Returns:
        The last message of the last stage, with the figures of every stage.

    Raises:
        BaseException: What the first stage to fail raised, as it is, with the stage's name in a note
            (and in `.stage`, if it is a `PenstockError`). The other stages are cancelled. A
            KeyboardInterrupt takes precedence over a failure.
        PipelineError: If the pipeline is empty, a stage has no worker or ended early without an
            error, or nothing comes out of the last one.

    Cancellation:
        Cancels every stage and returns when all of them have ended; messages under way are released.
    """
    if not pipeline.slots:
        raise PipelineError("a pipeline needs at least one stage")

    if isinstance(run, OffersThreads):  # or a worker could wait for a thread while the medium is idle
        run.threads.allow(max(slot.workers for slot in pipeline.slots) + OTHER_THREADS)

    began_s = time.process_time()
    driven = _PipelineRun(pipeline, run, on_milestone, awaited, clock, translate)
    feed, inlet = create_memory_object_stream[Any](1)
    with feed:
        feed.send_nowait(message)

    del message  # or this frame would keep a staged tree alive
    try:
        async with create_task_group() as driven.group:
            driven.start(0, inlet)
    except BaseExceptionGroup:
        driven.drop_results()
        if not driven.failures:
            raise
    except BaseException:
        driven.drop_results()
        raise

    # Raised here, outside any `except` block, so that no exception group becomes its context.
    if driven.failures:
        interrupts = [each for each in driven.failures if isinstance(each, KeyboardInterrupt | SystemExit)]
        failure = [*interrupts, *driven.failures][0]
        driven.failures.clear()  # tracebacks refer to frames that refer to that object
        try:
            raise failure
        finally:
            del failure, interrupts  # its traceback refers to this frame
    if driven.cut_short:
        driven.drop_results()
        await checkpoint_if_cancelled()  # they were cut short by that cancellation
        raise PipelineError(f"stage {driven.cut_short[0]!r} ended early: something it awaited was cancelled")
    if not driven.results:
        raise PipelineError(f"nothing came out of the last stage, {pipeline.names[-1]!r}")

    value = driven.results.pop()
    for dropped in driven.results:
        release_dropped(dropped)

    stages = tuple(map(StageMeter.statistics, driven.meters))
    return PipelineResult(value, stages, time.process_time() - began_s)


@final
class _PipelineRun(Generic[RunT]):
    """One run of a pipeline: its stages as they start and end, and its last message or first failure."""

    __slots__ = (
        "_failing",
        "_n_on_demand",
        "_on_milestone",
        "_run",
        "_stages",
        "_translate",
        "cut_short",
        "failures",
        "group",
        "meters",
        "results",
    )

    def __init__(
        self,
        pipeline: Pipeline[RunT],
        run: RunT,
        on_milestone: Callable[[Milestone], object] | None,
        awaited: Milestone | None,
        clock: Callable[[], float],
        translate: Callable[[str, Exception], PenstockError] | None,
    ) -> None:
        self._run = run
        self._on_milestone = on_milestone
        self._translate = translate
        self._failing = False  # the first failure, noted before its stage has cleaned up
        self.group: TaskGroup
        self.results: list[Any] = []
        self.failures: list[BaseException] = []
        self.cut_short: list[str] = []  #: stages that were cancelled; an error unless the run was
        self.meters: list[StageMeter] = []  #: of every stage
        self._stages: list[tuple[Slot[RunT], StageMeter, int]] = []  # that are needed, with their queues
        self._n_on_demand = 0  # of the first stages, each starts the next one with its first message
        for slot in pipeline.slots:
            if slot.workers < 1:
                raise PipelineError(f"stage {slot.name!r} needs at least one worker, not {slot.workers}")

            meter = StageMeter(slot.name, slot.workers, clock, slot.advice)
            self.meters.append(meter)
            if slot.is_needed:
                self._stages.append((slot, meter, slot.queue))
            elif self._stages:
                # The stage before it gets its room, for one message and its queue: it would wait for the
                # one after it otherwise, and so would a caller that waits for its milestone.
                before, meter_before, queue = self._stages[-1]
                self._stages[-1] = (before, meter_before, queue + 1 + slot.queue)

            if awaited is not None and slot.milestone is awaited and not self._n_on_demand:
                self._n_on_demand = len(self._stages)

        self._n_on_demand = self._n_on_demand or len(self._stages)

    def start(self, number: int, inlet: MemoryObjectReceiveStream[Any], *, is_due: bool = False) -> None:
        """Start the stage with this number, or the collector of results after the last one.

        Each stage starts with the first message for it, so that what comes later delays no awaited milestone.
        The messages after the stage of that milestone start all the rest, a few turns of the loop after the
        last one that comes at once: the one that publishes must be waiting for its message when the milestone
        before it is reached, and not act before.

        Args:
            number: Of the stage, among those that are needed.
            inlet: The stage closes it.
            is_due: Whether those turns have passed.
        """
        if number == len(self._stages):
            self.group.start_soon(_collect, inlet, self.results, name="penstock result")
            return
        if number == self._n_on_demand and not is_due:
            self.group.start_soon(self._start_rest, number, inlet, name="penstock stages")
            return

        slot, meter, queue = self._stages[number]
        # Bounded to a few messages; bytes are bounded by the leases that travel in them.
        outgoing, following = create_memory_object_stream[Any](queue)
        outlet = Outlet(outgoing, meter, partial(self.start, number + 1, following), following)
        self.group.start_soon(self._drive, slot, inlet, outlet, name=f"penstock stage {slot.name}")
        # Past the awaited milestone nothing is delayed by a start: all the rest begins at once.
        if number >= self._n_on_demand:
            outlet.start_next()

    async def _start_rest(self, number: int, inlet: MemoryObjectReceiveStream[Any]) -> None:
        """Start all later stages once the waiters for the milestone have gone on, if it is reached now.

        It may be reached as long as each turn of the loop brings another message.
        """
        turns = waiting = 0
        try:
            while turns < LOOP_TURNS:
                await checkpoint()
                before, waiting = waiting, inlet.statistics().current_buffer_used
                turns = turns + 1 if waiting == before else 0

            if not inlet.statistics().open_send_streams:  # nothing waits for the rest
                await caller_gone()
        except BaseException:
            del self  # as for `_collect`
            with receiving(inlet):
                raise

        self.start(number, inlet, is_due=True)

    async def _drive(self, slot: Slot[RunT], inlet: MemoryObjectReceiveStream[Any], outlet: Outlet) -> None:
        """Run one stage to its end, and say so if that is a milestone."""
        with receiving(inlet), outlet:
            try:
                complete: bool | None = None
                async with slot.stage.open(self._run) as actor:
                    try:
                        complete = await drive(actor, slot.workers, inlet, outlet)
                    except BaseException:
                        self._failing = True
                        raise
                    finally:
                        del actor  # the traceback refers to this frame

                self._note_end(slot, complete)
            except BaseException as error:
                self._note(error, slot.name)
                forget_locals(error)  # of a cancellation, too: task groups keep it in a reference cycle
                # Before the outlet closes, which tells the next stage that this was the last message.
                self.group.cancel_scope.cancel()
                del self, slot  # as for `_collect`
                raise

    def _note_end(self, slot: Slot[RunT], complete: bool | None) -> None:
        if complete is None:
            raise PipelineError("the stage's context swallowed an error")
        if complete and slot.milestone and self._on_milestone and not self._failing:
            self._on_milestone(slot.milestone)

    def drop_results(self) -> None:
        """Release the messages that came out of the last stage."""
        for message in self.results:
            release_dropped(message)

        self.results.clear()

    def _note(self, error: BaseException, stage: str) -> None:
        """Keep the first failure in `error`, or note that the stage was cancelled."""
        first = _first_failure(error)
        if first is None:
            self.cut_short.append(stage)
            return

        if isinstance(first, PenstockError):
            if first.stage is None:
                first.stage = stage
            self.failures.append(first)
            return

        first.add_note(f"in stage {stage!r}")
        if self._translate is not None and isinstance(first, Exception):
            translated = self._translate(stage, first)
            translated.__cause__ = first
            first = translated

        self.failures.append(first)


async def _collect(inlet: MemoryObjectReceiveStream[Any], results: list[Any]) -> None:
    # No method: task groups keep a cancellation in a reference cycle, and that this frame, which may hold
    # nothing of the caller's. One by one: a cancelled comprehension would leave nothing to release.
    with receiving(inlet), suppress(EndOfStream):
        while True:
            results.append(await inlet.receive())


def _first_failure(error: BaseException) -> BaseException | None:
    """Return the first exception in `error` that is not a cancellation, at any depth of groups."""
    if isinstance(error, BaseExceptionGroup):
        found = map(_first_failure, cast("BaseExceptionGroup[BaseException]", error).exceptions)
        return next((failure for failure in found if failure is not None), None)

    return None if isinstance(error, get_cancelled_exc_class()) else error


@final
class _ConsumerLeft(Exception):
    """Not an error: unwinds a worker whose consumer has left."""


@final
class Outlet:
    """The outgoing end of a stage. It releases a message that cannot be delivered.

    Args:
        stream: Closed at the end.
        meter: Counts what is passed on.
        start: Starts the next stage; called with the first message, or at an end without one.
        following: The next stage's inlet, which is closed if that never starts.
    """

    __slots__ = ("_following", "_start", "_stream", "meter")

    def __init__(
        self,
        stream: MemoryObjectSendStream[Any],
        meter: StageMeter,
        start: Callable[[], object] | None = None,
        following: MemoryObjectReceiveStream[Any] | None = None,
    ) -> None:
        self.meter = meter
        self._stream = stream
        self._start = start
        self._following = following

    async def send(self, message: object) -> None:
        """Pass a message on.

        Raises:
            _ConsumerLeft: If no stage will take it.
        """
        since = self.meter.clock()
        try:
            if self._start is not None:
                self.start_next()

            await self._stream.send(message)
        except BrokenResourceError:
            release_dropped(message)
            raise _ConsumerLeft from None
        except BaseException:
            release_dropped(message)  # cancelled during the send: nothing else holds the message
            raise

        self.meter.passed(self.meter.clock() - since)

    def __enter__(self) -> Outlet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.start_next()
        elif self._following is not None:
            self._following.close()

        self._start = None  # it refers to the run, and a frame that a failure keeps refers to this
        self._stream.close()

    def start_next(self) -> None:
        """Start the next stage, unless that was done."""
        start, self._start, self._following = self._start, None, None
        if start is not None:
            start()


@contextmanager
def receiving(inlet: MemoryObjectReceiveStream[Any]) -> Generator[None]:
    """Close `inlet` at the end, and release the messages that are still in it."""
    with inlet:
        try:
            yield
        finally:
            with suppress(WouldBlock, EndOfStream):
                while True:
                    release_dropped(inlet.receive_nowait())


def release_dropped(message: object) -> None:
    """Release the resources of a message that will not be delivered."""
    release = getattr(message, "release", None)
    if release is not None:
        release()


async def drive(
    actor: Actor, concurrency: int, inlet: MemoryObjectReceiveStream[Any], outlet: Outlet
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
    ended: list[int] = []
    try:
        if concurrency == 1:  # the usual case: without a task group, a save is staged sooner
            await _work(0, actor, inlet, outlet, ended)
        else:
            async with create_task_group() as workers:
                for worker in range(concurrency):
                    workers.start_soon(_work, worker, actor, inlet, outlet, ended)

        # A task group treats a cancellation it did not request (an asyncio future that others cancelled) as
        # the quiet end of a task. The worker's message is lost.
        if len(ended) < concurrency:
            await checkpoint_if_cancelled()  # a cancellation of our own may not have been delivered here yet
            raise PipelineError("a worker ended early: something that it awaited was cancelled")
        if isinstance(actor, Finishing):
            await _forward(0, actor.finish(), outlet, 0)
    except* _ConsumerLeft:
        complete = False
    else:
        complete = True

    return complete


async def _work(
    worker: int, actor: Actor, inlet: MemoryObjectReceiveStream[Any], outlet: Outlet, ended: list[int]
) -> None:
    clock = outlet.meter.clock
    waiting_since = clock()
    while True:
        try:
            message = inlet.receive_nowait()  # takes no turn of the loop: passing the message on does
        except WouldBlock:
            try:
                message = await inlet.receive()
            except EndOfStream:
                break
        except EndOfStream:
            await checkpoint_if_cancelled()  # the end of what a cancelled stage gets is not the last message
            break

        nbytes: int = getattr(message, "nbytes", 0)
        waiting = inlet.statistics()
        queued = waiting.current_buffer_used + waiting.tasks_waiting_send
        outlet.meter.took(nbytes, clock() - waiting_since, queued)
        try:
            await _handle(worker, actor, message, outlet, nbytes)
        except BaseException as error:
            release_dropped(message)
            del message
            # A cancellation, too: task groups keep it in a reference cycle.
            forget_locals(error)
            raise

        del message  # a waiting worker keeps no bytes alive
        waiting_since = clock()

    ended.append(worker)


async def _handle(worker: int, actor: Actor, message: Any, outlet: Outlet, nbytes: int) -> None:
    # Not a part of `_work`, whose frame would keep the results alive.
    result = actor(message)
    if isinstance(result, AsyncIterator):
        await _forward(worker, result, outlet, nbytes)
        return

    with outlet.meter.working(worker, nbytes):
        produced = await result

    if produced is None:
        await checkpoint()  # a worker that passes nothing on does not keep the loop, either
    else:
        await outlet.send(produced)


async def _forward(worker: int, produced: AsyncIterator[Any], outlet: Outlet, nbytes: int) -> None:
    passed_on = False
    try:
        while True:
            with outlet.meter.working(worker, nbytes):
                try:
                    message = await anext(produced)
                except StopAsyncIteration:
                    break

            nbytes = 0  # counted with the first stretch of work
            passed_on = True
            await outlet.send(message)
            del message  # the receiver owns it now; do not keep it alive while the next one is made
    finally:
        # Actors yield from async generators; one that is left half-way is closed here and not by
        # the garbage collector, which would do it in some other task.
        close = getattr(produced, "aclose", None)
        if close is not None:
            await close()

    if not passed_on:
        await checkpoint()
