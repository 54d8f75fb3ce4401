"""Runs a pipeline once: makes the streams, drives the stages, and turns failure into one exception."""

from __future__ import annotations

__all__ = (
    "PipelineResult",
    "run_pipeline",
)

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar, cast, final

from anyio import (
    CancelScope,
    EndOfStream,
    create_memory_object_stream,
    create_task_group,
    get_cancelled_exc_class,
)
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from penstock.kernel.errors import PenstockError, PipelineError
from penstock.kernel.pipeline.failures import forget_locals
from penstock.kernel.pipeline.pipeline import Milestone, Pipeline, Slot
from penstock.kernel.pipeline.stage import (
    FunctionStage,
    does_nothing,
    drive,
    receiving,
    release_dropped,
    workers_of,
)
from penstock.kernel.pipeline.statistics import Advice, StageMeter, StageStatistics, advice_of

RunT = TypeVar("RunT")

LOOP_TURNS: Final = 3
"""Turns of the loop in which a stage ends, and who waited for its milestone goes on."""


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """The last stage's message, and the statistics of each stage."""

    value: Any
    stages: tuple[StageStatistics, ...]


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
    meters = [StageMeter(slot.name, _workers_of(slot), clock, _advice(slot)) for slot in pipeline]
    if not meters:
        raise PipelineError("a pipeline needs at least one stage")

    feed, inlet = create_memory_object_stream[Any](1)
    with feed:
        feed.send_nowait(message)

    del message  # or this frame would keep a staged tree alive
    outcome = _Outcome(translate)
    slots = _needed(zip(pipeline, meters, strict=True))
    tasks = [_SlotTask(slot, run, meter, outcome, on_milestone) for slot, meter in slots]
    await _run_stages(tasks, inlet, outcome, awaited)

    # Raised here, outside any `except` block, so that no exception group becomes its context.
    failure = outcome.take_failure()
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # its traceback refers to this frame
    if outcome.cut_short:
        raise PipelineError(f"stage {outcome.cut_short[0]!r} ended early: something it awaited was cancelled")
    if not outcome.results:
        raise PipelineError(f"nothing came out of the last stage, {pipeline.names[-1]!r}")

    value = outcome.results.pop()
    outcome.drop_results()  # any that came before it
    return PipelineResult(value, tuple(meter.statistics() for meter in meters))


async def _run_stages(
    tasks: Sequence[_SlotTask],
    inlet: MemoryObjectReceiveStream[Any],
    outcome: _Outcome,
    awaited: Milestone | None,
) -> None:
    """Connect the stages and run them; what failed is in the outcome, and only a cancellation is raised."""
    try:
        async with create_task_group() as stages:
            _StageStarter(tasks, stages, outcome.results, _n_on_demand(tasks, awaited)).start(0, inlet)
    except BaseExceptionGroup:
        outcome.drop_results()
        if not outcome.failures:
            raise
    except BaseException:
        outcome.drop_results()
        raise

    if outcome.cut_short and not outcome.failures:
        outcome.drop_results()
        await checkpoint_if_cancelled()  # they were cut short by that cancellation


@final
@dataclass(frozen=True, slots=True)
class _StageStarter:
    """Starts each stage with the first message for it, so that what comes later delays no awaited milestone.

    The first message after the stage of that milestone starts all the rest, a few turns of the loop later:
    the one that publishes must be waiting for its message when the milestone before it is reached, and not
    act before.
    """

    tasks: Sequence[_SlotTask]
    group: TaskGroup
    results: list[Any]
    n_on_demand: int

    def start(self, number: int, inlet: MemoryObjectReceiveStream[Any]) -> None:
        """Start the stage with this number, or the collector of results after the last one."""
        if number == self.n_on_demand < len(self.tasks):
            self.group.start_soon(self._start_later, number, inlet, name="penstock stages")
        else:
            self._start(number, inlet)

    async def _start_later(self, number: int, inlet: MemoryObjectReceiveStream[Any]) -> None:
        """Start all later stages once the waiters for the milestone have gone on, if it is reached now."""
        try:
            for _ in range(LOOP_TURNS):
                await checkpoint()
        except BaseException:
            with receiving(inlet):
                raise

        self._start(number, inlet)

    def _start(self, number: int, inlet: MemoryObjectReceiveStream[Any]) -> None:
        if number == len(self.tasks):
            self.group.start_soon(_collect, inlet, self.results, name="penstock result")
            return

        task = self.tasks[number]
        # Bounded to a few messages; bytes are bounded by the leases that travel in them.
        ends = create_memory_object_stream[Any](task.slot.queue)
        outlet = _Outlet(*ends, partial(self.start, number + 1))
        self.group.start_soon(
            task, inlet, outlet, self.group.cancel_scope, name=f"penstock stage {task.slot.name}"
        )
        # Past the awaited milestone nothing is delayed by a start: all the rest begins at once.
        if number >= self.n_on_demand:
            outlet.start_next()


def _n_on_demand(tasks: Sequence[_SlotTask], awaited: Milestone | None) -> int:
    """Count the first stages that start the next one with their first message: up to the awaited one."""
    found = (at for at, task in enumerate(tasks, 1) if awaited and task.slot.milestone is awaited)
    return next(found, len(tasks))


@final
class _Outlet:
    """The outgoing end of a stage. The first message, or the end without one, starts the next stage."""

    __slots__ = ("_following", "_start", "_stream")

    def __init__(
        self,
        stream: MemoryObjectSendStream[Any],
        following: MemoryObjectReceiveStream[Any],
        start_next: Callable[[MemoryObjectReceiveStream[Any]], None],
    ) -> None:
        self._stream = stream
        self._following: MemoryObjectReceiveStream[Any] | None = following
        self._start = start_next

    async def send(self, message: object) -> None:
        self.start_next()
        await self._stream.send(message)

    def __enter__(self) -> _Outlet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.start_next()
        elif self._following is not None:
            self._following.close()

        self._stream.close()

    def start_next(self) -> None:
        """Start the next stage, unless that was done."""
        following, self._following = self._following, None
        if following is not None:
            self._start(following)


@final
class _Outcome:
    """The end of a run: its last message, or its first failure."""

    __slots__ = ("_translate", "cut_short", "failing", "failures", "results")

    def __init__(self, translate: Callable[[str, Exception], PenstockError] | None) -> None:
        self._translate = translate
        self.results: list[Any] = []
        self.failures: list[BaseException] = []
        self.cut_short: list[str] = []  #: stages that were cancelled; an error unless the run was
        self.failing = False  #: the first failure, noted before its stage has cleaned up

    def note(self, error: BaseException, stage: str) -> None:
        """Keep the first failure in `error`, or note that the stage was cancelled."""
        first = _first_failure(error)
        if first is None:
            self.cut_short.append(stage)
            return

        first.add_note(f"in stage {stage!r}")
        if isinstance(first, PenstockError) and first.stage is None:
            first.stage = stage

        if (
            self._translate is not None
            and isinstance(first, Exception)
            and not isinstance(first, PenstockError)
        ):
            translated = self._translate(stage, first)
            translated.__cause__ = first
            first = translated

        self.failures.append(first)

    def drop_results(self) -> None:
        for message in self.results:
            release_dropped(message)

        self.results.clear()

    def take_failure(self) -> BaseException | None:
        """Return the exception to raise and drop the rest: an interrupt first, else the first failure."""
        interrupts = [error for error in self.failures if isinstance(error, (KeyboardInterrupt, SystemExit))]
        failures = [*interrupts, *self.failures]
        self.failures.clear()  # tracebacks refer to frames that refer to this object
        return failures[0] if failures else None


@final
@dataclass(frozen=True, slots=True)
class _SlotTask:
    """The parts that one stage's task needs."""

    slot: Slot[Any]
    run: Any
    meter: StageMeter
    outcome: _Outcome
    on_milestone: Callable[[Milestone], object] | None

    async def __call__(
        self,
        inlet: MemoryObjectReceiveStream[Any],
        outlet: _Outlet,
        siblings: CancelScope,
    ) -> None:
        with receiving(inlet), outlet:
            try:
                complete = await self._drive(inlet, outlet)
                milestone = self.slot.milestone
                if complete and milestone and self.on_milestone and not self.outcome.failing:
                    self.on_milestone(milestone)
            except BaseException as error:
                self.outcome.note(error, self.slot.name)
                forget_locals(error)  # of a cancellation, too: task groups keep it in a reference cycle
                # Before the outlet closes, which tells the next stage that this was the last message.
                siblings.cancel()
                raise

    async def _drive(self, inlet: MemoryObjectReceiveStream[Any], outlet: _Outlet) -> bool:
        stage = self.slot.stage
        complete: list[bool] = []
        async with stage.open(self.run) as actor:
            try:
                complete.append(await drive(actor, workers_of(stage), inlet, outlet, self.meter))
            except BaseException:
                self.outcome.failing = True
                raise

        if not complete:
            raise PipelineError("the stage's context swallowed an error")

        return complete[0]


async def _collect(inlet: MemoryObjectReceiveStream[Any], results: list[Any]) -> None:
    # One by one: a cancelled comprehension would leave nothing to release.
    with receiving(inlet), suppress(EndOfStream):
        while True:
            results.append(await inlet.receive())


def _needed(slots: Iterable[tuple[Slot[Any], StageMeter]]) -> list[tuple[Slot[Any], StageMeter]]:
    """Leave out what does nothing.

    The stage before it gets its room, for one message and its queue: it would wait for the next one
    otherwise, and so would who waits for its milestone.
    """
    needed: list[tuple[Slot[Any], StageMeter]] = []
    for slot, meter in slots:
        if slot.milestone is not None or not does_nothing(slot.stage):
            needed.append((slot, meter))
        elif needed:
            before, meter_before = needed[-1]
            needed[-1] = replace(before, queue=before.queue + 1 + slot.queue), meter_before

    return needed


def _workers_of(slot: Slot[Any]) -> int:
    workers = workers_of(slot.stage)
    if workers < 1:
        raise PipelineError(f"stage {slot.name!r} needs at least one worker, not {workers}")

    return workers


def _advice(slot: Slot[Any]) -> Advice:
    return advice_of(slot.stage.function if isinstance(slot.stage, FunctionStage) else slot.stage)


def _first_failure(error: BaseException) -> BaseException | None:
    """Return the first exception in `error` that is not a cancellation, at any depth of groups."""
    if isinstance(error, BaseExceptionGroup):
        found = map(_first_failure, cast("BaseExceptionGroup[BaseException]", error).exceptions)
        return next((failure for failure in found if failure is not None), None)

    return None if isinstance(error, get_cancelled_exc_class()) else error
