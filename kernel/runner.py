"""Runs a pipeline once: makes the streams, drives the stages, and turns failure into one exception."""

from __future__ import annotations

__all__ = ("PipelineResult", "run_pipeline")

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast, final

from anyio import create_memory_object_stream, create_task_group
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from penstock.kernel.errors import PenstockError, PipelineError
from penstock.kernel.futures import Milestone
from penstock.kernel.meters import StageMeter, StageStatistics
from penstock.kernel.pipeline import Pipeline, Slot
from penstock.kernel.stage import drive

RunT = TypeVar("RunT")


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What came out of the last stage, and what each stage did."""

    value: Any
    stages: tuple[StageStatistics, ...]


async def run_pipeline(
    pipeline: Pipeline[RunT],
    run: RunT,
    message: object,
    *,
    on_milestone: Callable[[Milestone], object] | None = None,
) -> PipelineResult:
    """Send `message` through every stage and return the last message that comes out.

    Args:
        pipeline: At least one stage.
        run: Given to each stage's `open`.
        message: The first stage's only input.
        on_milestone: Called when a stage whose slot has a milestone has passed on its last message.

    Returns:
        The one message of the last stage, with the figures of every stage.

    Raises:
        Exception: What the first stage to fail raised, as it is, with the stage's name in a note
            (and in `.stage`, if it is a `PenstockError`). The other stages are cancelled.
        PipelineError: If the pipeline is empty, or nothing comes out of it.

    Cancellation:
        Cancels every stage and returns when all of them have ended; messages under way are released.
    """
    if not pipeline.slots:
        raise PipelineError("a pipeline needs at least one stage")

    failures: list[BaseException] = []
    meters = [StageMeter(slot.name, slot.stage.concurrency) for slot in pipeline]
    feed, inlet = create_memory_object_stream[Any](1)
    with feed:
        feed.send_nowait(message)

    results: list[Any] = []
    try:
        async with create_task_group() as stages:
            for slot, meter in zip(pipeline, meters, strict=True):
                outlet, following = create_memory_object_stream[Any](slot.queue)
                task = _SlotTask(slot, run, meter, failures, on_milestone)
                stages.start_soon(task, inlet, outlet)
                inlet = following

            stages.start_soon(_collect, inlet, results)
    except BaseExceptionGroup as group:
        _raise_one(group, failures)

    if not results:
        raise PipelineError(f"nothing came out of the last stage, {pipeline.names[-1]!r}")

    return PipelineResult(results[-1], tuple(meter.statistics() for meter in meters))


@final
@dataclass(frozen=True, slots=True)
class _SlotTask:
    """Everything one stage's task needs; a frozen value, so that the loop above stays readable."""

    slot: Slot[Any]
    run: Any
    meter: StageMeter
    failures: list[BaseException]
    on_milestone: Callable[[Milestone], object] | None

    async def __call__(
        self, inlet: MemoryObjectReceiveStream[Any], outlet: MemoryObjectSendStream[Any]
    ) -> None:
        with inlet, outlet:
            try:
                async with self.slot.stage.open(self.run) as actor:
                    complete = await drive(actor, self.slot.stage.concurrency, inlet, outlet, self.meter)
            except Exception as error:
                self._note(error)
                raise

            if complete and self.slot.milestone is not None and self.on_milestone is not None:
                self.on_milestone(self.slot.milestone)

    def _note(self, error: Exception) -> None:
        first = _first_leaf(error)
        first.add_note(f"in stage {self.slot.name!r}")
        if isinstance(first, PenstockError) and first.stage is None:
            first.stage = self.slot.name

        self.failures.append(first)


async def _collect(inlet: MemoryObjectReceiveStream[Any], results: list[Any]) -> None:
    with inlet:
        async for message in inlet:
            results.append(message)


def _first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]

    return error


def _raise_one(group: BaseExceptionGroup[Any], failures: list[BaseException]) -> NoReturn:
    """Raise what matters out of the group: an interrupt before a failure, the first before the rest."""
    interrupts, _ = group.split((KeyboardInterrupt, SystemExit))
    if interrupts is not None:
        raise _first_leaf(interrupts) from None
    if failures:
        raise failures[0] from failures[0].__cause__  # keeps the cause, hides the group

    raise group
