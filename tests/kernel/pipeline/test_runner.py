from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, final

import anyio
import pytest
from anyio import CancelScope, Event, create_task_group
from anyio.lowlevel import checkpoint

from penstock.errors import PipelineError, StorageError
from penstock.kernel import (
    Actor,
    ByteLease,
    MemoryRegulator,
    Milestone,
    Pipeline,
    Slot,
    Threads,
    run_pipeline,
)
from penstock.kernel.concurrency import threads
from penstock.kernel.pipeline.runner import PipelineResult
from penstock.kernel.pipeline.stage import FunctionStage

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def unclosed_streams_are_found() -> Generator[None]:
    # A stream warns when it is collected unclosed; collecting here blames the right test.
    yield
    gc.collect(1)


@dataclass(frozen=True)
class Parcel:
    number: int
    lease: ByteLease

    def release(self) -> None:
        self.lease.release()


async def nothing() -> None:
    pass


@final
@dataclass(frozen=True)
class Step:
    """A stage that says what became of its context, and that can be made to misbehave in it."""

    actor: Any
    concurrency: int = 1
    log: list[str] = field(default_factory=list[str])
    opening: Callable[[], Awaitable[None]] = nothing
    closing: Callable[[], Awaitable[None]] = nothing

    @asynccontextmanager
    async def open(self, run: object, /) -> AsyncGenerator[Actor]:
        await self.opening()
        self.log.append("open")
        try:
            yield self.actor
        finally:
            self.log.append("closed")
            await self.closing()


def line(*stages: Any, queue: int = 0, milestones: bool = True) -> Pipeline[Any]:
    """Stages called a, b, c, ... with a milestone each."""
    every: list[Milestone | None] = [*Milestone] if milestones else [None] * 5
    steps = (stage if isinstance(stage, Step) else Step(stage) for stage in stages)
    return Pipeline(
        tuple(
            Slot(name, step, milestone, queue)
            for name, step, milestone in zip("abcde", steps, every, strict=False)
        )
    )


async def echo(message: Any) -> Any:
    await checkpoint()
    return message


async def numbers(message: int) -> AsyncGenerator[int]:
    for number in range(message):
        yield number


@final
class Gather:
    """A last stage: everything that came, as one list."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.finished = False

    async def __call__(self, message: object) -> None:
        await checkpoint()
        self.got.append(message)

    async def finish(self) -> AsyncGenerator[list[Any]]:
        self.finished = True
        yield self.got


def failing(error: BaseException, at: object = None) -> Actor:
    async def fail(message: object) -> object:
        await checkpoint()
        if at in (None, message):
            raise error
        return message

    return fail


async def stuck(message: object) -> None:
    await anyio.sleep_forever()


async def raised_by(pipeline: Pipeline[Any], message: object = 3) -> BaseException:
    """Run it, and return what it raised after checking that it comes as promised."""
    reached: list[Milestone] = []
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - whatever it is
        await run_pipeline(pipeline, None, message, on_milestone=reached.append)

    assert not isinstance(caught.value, (BaseExceptionGroup, anyio.BrokenResourceError))
    for slot in pipeline:
        log = slot.stage.log if isinstance(slot.stage, Step) else []
        assert log in ([], ["open", "closed"])

    return caught.value


# The normal course


@pytest.mark.parametrize("queue", [0, 3])
async def test_one_message_goes_in_and_the_last_that_comes_out_is_returned(queue: int) -> None:
    reached: list[Milestone] = []
    pipeline = line(numbers, echo, Gather(), queue=queue)

    result = await run_pipeline(pipeline, None, 5, on_milestone=reached.append)

    assert result.value == [0, 1, 2, 3, 4]
    assert reached == [Milestone.PLANNED, Milestone.STAGED, Milestone.WRITTEN]
    assert [(stage.name, stage.n_in, stage.n_out) for stage in result.stages] == [
        ("a", 1, 5),
        ("b", 5, 5),
        ("c", 5, 1),
    ]
    assert all(slot.stage.log == ["open", "closed"] for slot in pipeline if isinstance(slot.stage, Step))


async def test_every_stage_is_given_the_run() -> None:
    given: list[object] = []

    @final
    class Asks:
        concurrency = 1

        @asynccontextmanager
        async def open(self, run: str, /) -> AsyncGenerator[Actor]:
            given.append(run)
            yield echo

    await run_pipeline(Pipeline((Slot("a", Asks()), Slot("b", Asks()))), "the run", 1)

    assert given == ["the run", "the run"]


@final
@dataclass(frozen=True)
class Idle:
    """A stage that says whether it has anything to do."""

    passes_on: bool
    log: list[str] = field(default_factory=list[str])

    @asynccontextmanager
    async def open(self, run: object, /) -> AsyncGenerator[Actor]:
        self.log.append("open")
        yield echo


async def test_a_stage_that_passes_everything_on_is_left_out_and_has_figures_of_nothing() -> None:
    idle, busy, marked = Idle(passes_on=True), Idle(passes_on=False), Idle(passes_on=True)
    pipeline: Pipeline[Any] = Pipeline(
        (
            Slot("idle", idle),
            Slot("numbers", Step(numbers)),
            Slot("busy", busy),
            Slot("marked", marked, Milestone.STAGED),  # who waits for it must hear of it
            Slot("last", idle),
        )
    )
    reached: list[Milestone] = []

    result = await run_pipeline(pipeline, None, 3, on_milestone=reached.append)

    assert result.value == 2
    assert (idle.log, busy.log, marked.log) == ([], ["open"], ["open"])
    assert reached == [Milestone.STAGED]
    assert [(each.name, each.n_in, each.n_out) for each in result.stages] == [
        ("idle", 0, 0),
        ("numbers", 1, 3),
        ("busy", 3, 3),
        ("marked", 3, 3),
        ("last", 0, 0),
    ]


async def test_who_waits_for_the_stage_before_it_does_not_wait_for_the_one_behind() -> None:
    behind, reached = Event(), Event()

    async def held(message: int) -> int:
        await behind.wait()
        return message

    pipeline: Pipeline[Any] = Pipeline(
        (
            Slot("first", Step(numbers), Milestone.PLANNED),
            Slot("idle", Idle(passes_on=True)),
            Slot("held", FunctionStage(held)),
        )
    )
    async with create_task_group() as tasks:
        tasks.start_soon(partial(run_pipeline, pipeline, None, 2, on_milestone=lambda _: reached.set()))
        await reached.wait()
        behind.set()


async def test_what_comes_after_an_awaited_milestone_begins_once_that_is_reached() -> None:
    log: list[str] = []

    async def later(message: int) -> int:
        log.append("later")
        return message

    slots = Slot("numbers", Step(numbers), Milestone.STAGED, queue=20), Slot("later", FunctionStage(later))
    pipeline: Pipeline[Any] = Pipeline(slots)
    await run_pipeline(
        pipeline, None, 10, on_milestone=lambda each: log.append(str(each)), awaited=Milestone.STAGED
    )

    assert log == ["staged", *["later"] * 10]


async def test_what_comes_after_an_awaited_milestone_begins_if_that_has_to_wait_for_it() -> None:
    begun = Event()

    async def first(message: int) -> AsyncGenerator[int]:
        yield 1
        await begun.wait()
        yield 2

    async def later(message: int) -> int:
        begun.set()
        return message

    slots = Slot("first", Step(first), Milestone.STAGED, queue=20), Slot("later", FunctionStage(later))
    pipeline: Pipeline[Any] = Pipeline(slots)
    with anyio.fail_after(20):
        await run_pipeline(pipeline, None, 1, awaited=Milestone.STAGED)


async def test_what_comes_after_an_awaited_milestone_begins_once_a_waiting_caller_has_gone_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "LEAVES_WITHIN_S", 60)
    staged, later_began = Event(), Event()

    async def later(message: int) -> int:
        later_began.set()
        return message

    slots = Slot("numbers", Step(numbers), Milestone.STAGED, queue=20), Slot("later", FunctionStage(later))
    pipeline: Pipeline[Any] = Pipeline(slots)
    run = partial(run_pipeline, pipeline, None, 3, awaited=Milestone.STAGED)
    async with create_task_group() as tasks:
        with threads.caller_waits(), threads.caller_waits():  # the inner one is a part of the outer one
            tasks.start_soon(partial(run, on_milestone=lambda _: staged.set()))
            await staged.wait()
            await anyio.wait_all_tasks_blocked()
            assert not later_began.is_set()

        with anyio.fail_after(20):
            await later_began.wait()


async def test_what_comes_after_an_awaited_milestone_does_not_wait_for_ever_for_a_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "LEAVES_WITHIN_S", 0)
    slots = Slot("numbers", Step(numbers), Milestone.STAGED, queue=20), Slot("gather", Step(Gather()))
    pipeline: Pipeline[Any] = Pipeline(slots)
    with threads.caller_waits(), anyio.fail_after(20):
        result = await run_pipeline(pipeline, None, 3, awaited=Milestone.STAGED)

    assert result.value == [0, 1, 2]


async def test_where_every_stage_passes_everything_on_the_message_comes_out() -> None:
    pipeline: Pipeline[Any] = Pipeline((Slot("idle", Idle(passes_on=True)),))

    result = await run_pipeline(pipeline, None, 3)

    assert result.value == 3


async def test_a_stage_may_swallow_messages() -> None:
    async def odd(message: int) -> int | None:
        await checkpoint()
        return message if message % 2 else None

    assert (await run_pipeline(line(numbers, odd, Gather()), None, 5)).value == [1, 3]


async def test_none_may_be_the_result_if_it_was_yielded() -> None:
    async def tree(message: object) -> AsyncGenerator[None]:
        yield None

    assert (await run_pipeline(line(tree), None, "like")).value is None


async def test_a_pipeline_out_of_which_nothing_comes_is_an_error() -> None:
    async def swallow(message: object) -> None:
        await checkpoint()

    error = await raised_by(line(numbers, swallow))

    assert isinstance(error, PipelineError)
    assert str(error) == "nothing came out of the last stage, 'b'"


async def test_a_pipeline_without_a_stage_or_a_stage_without_a_worker_is_refused() -> None:
    with pytest.raises(PipelineError, match="at least one stage"):
        await run_pipeline(line(), None, 1)

    with pytest.raises(PipelineError, match="'b' needs at least one worker, not 0"):
        await run_pipeline(line(echo, Step(echo, concurrency=0)), None, 1)


async def test_the_first_message_lives_no_longer_than_the_first_stage_needs_it() -> None:
    class Tree:
        pass

    begun, seen = Event(), list[weakref.ref[Tree]]()

    async def flatten(message: Tree) -> str:
        await checkpoint()
        seen.append(weakref.ref(message))
        return "leaf"

    async def write(message: str) -> bool:
        begun.set()
        for _ in range(20):
            await checkpoint()
        return seen[0]() is None

    assert (await run_pipeline(line(flatten, write), None, Tree())).value


# Milestones


async def test_a_milestone_is_reached_once_the_last_message_was_passed_on_and_not_before() -> None:
    reached: list[Milestone] = []
    taken: list[int] = []
    let_go = [Event(), Event(), Event()]

    async def take(message: int) -> None:
        taken.append(message)
        await let_go[message].wait()

    @final
    class Take:
        async def __call__(self, message: int) -> None:
            await take(message)

        async def finish(self) -> AsyncGenerator[str]:
            yield "end"

    async with create_task_group() as tasks:

        async def run() -> None:
            await run_pipeline(line(numbers, Take()), None, 3, on_milestone=reached.append)

        tasks.start_soon(run)
        for number in range(3):
            await anyio.wait_all_tasks_blocked()
            # The message after this one is being offered, unless this is the last.
            assert taken == list(range(number + 1))
            assert reached == ([Milestone.PLANNED] if number == 2 else [])
            let_go[number].set()

    assert reached == [Milestone.PLANNED, Milestone.STAGED]


async def test_no_milestone_is_reached_by_or_after_a_stage_that_fails() -> None:
    # Downstream sees the failed stage's outlet close, and must not take that for the end.
    for at in range(3):
        for queue in (0, 5):
            reached: list[Milestone] = []
            end = Gather()
            with pytest.raises(ValueError, match="boom"):
                await run_pipeline(
                    line(numbers, failing(ValueError("boom"), at), end, queue=queue),
                    None,
                    3,
                    on_milestone=reached.append,
                )

            assert set(reached) <= {Milestone.PLANNED}
            assert not end.finished


async def test_no_milestone_is_reached_once_something_failed_though_its_stage_still_cleans_up() -> None:
    failed, reached = Event(), list[Milestone]()

    async def fail_at_once(message: int) -> None:
        failed.set()
        raise ValueError

    async def one_after_the_failure(message: int) -> AsyncGenerator[int]:
        yield 1
        await failed.wait()
        yield 2  # into the queue of a stage that will not take it

    async def until_upstream_has_ended() -> None:
        for _ in range(30):
            await checkpoint()

    pipeline = line(
        one_after_the_failure, Step(fail_at_once, closing=until_upstream_has_ended), Gather(), queue=2
    )
    with pytest.raises(ValueError, match=r"^\nin stage"):
        await run_pipeline(pipeline, None, 1, on_milestone=reached.append)

    assert reached == []


async def test_a_milestone_callback_that_raises_fails_the_run() -> None:
    def refuse(milestone: Milestone) -> None:
        raise RuntimeError(milestone.name)

    with pytest.raises(RuntimeError, match="PLANNED"):
        await run_pipeline(line(numbers, Gather()), None, 3, on_milestone=refuse)


# Failure


async def test_the_first_failure_arrives_alone_as_itself_with_the_name_of_its_stage() -> None:
    cause, context = KeyError("cause"), KeyError("context")

    async def fail_with_cause(message: object) -> None:
        await checkpoint()
        raise StorageError("write", "/x", "no") from cause

    async def fail_with_context(message: object) -> None:
        await checkpoint()
        try:
            raise context
        except KeyError:
            raise ValueError from None

    error = await raised_by(line(numbers, fail_with_cause, Gather()))
    assert isinstance(error, StorageError)
    assert error.stage == "b"
    assert str(error) == "in stage 'b': write '/x': no"
    assert error.__cause__ is cause

    error = await raised_by(line(numbers, fail_with_context, Gather()))
    assert isinstance(error, ValueError)
    assert error.__notes__ == ["in stage 'b'"]
    assert error.__context__ is context
    assert error.__cause__ is None


async def test_a_failure_keeps_its_context_and_gets_no_group_for_one() -> None:
    async def fail(message: object) -> None:
        await checkpoint()
        try:
            dict[str, int]()["context"]
        except KeyError:
            message.no_such_attribute  # type: ignore[attr-defined]  # noqa: B018 - an error while handling one

    error = await raised_by(line(numbers, fail, Gather()))

    assert isinstance(error, AttributeError)
    assert isinstance(error.__context__, KeyError)
    assert not error.__suppress_context__


@pytest.mark.parametrize("queue", [0, 2])
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("at", range(4))
async def test_whichever_stage_fails_at_whichever_message_its_error_arrives(
    queue: int, place: int, at: int
) -> None:
    boom = ValueError("boom")
    stages: list[Any] = [numbers, echo, echo, echo, Gather()]
    stages[place + 1] = failing(boom, at)

    assert await raised_by(line(*stages, queue=queue), 4) is boom
    assert boom.__notes__ == [f"in stage {'bcd'[place]!r}"]


async def test_the_error_arrives_while_upstream_is_stuck_in_send_and_downstream_waits() -> None:
    boom = ValueError("boom")
    offered = Event()

    async def offer(message: int) -> AsyncGenerator[int]:
        yield 1
        offered.set()
        yield 2  # nobody takes it

    async def fail(message: int) -> None:
        await offered.wait()
        await checkpoint()
        raise boom

    assert await raised_by(line(offer, fail, Gather())) is boom


async def test_the_error_arrives_although_another_stage_would_never_end() -> None:
    boom = ValueError("boom")

    assert await raised_by(line(numbers, failing(boom, 1), Step(stuck, concurrency=2))) is boom
    assert await raised_by(line(stuck_after_one, Step(echo, opening=failing_context(boom)))) is boom


async def stuck_after_one(message: int) -> AsyncGenerator[int]:
    yield message
    await anyio.sleep_forever()


async def test_a_stage_is_opened_with_the_first_message_for_it_or_with_the_end() -> None:
    opened: list[str] = []

    def opening(name: str) -> Callable[[], Awaitable[None]]:
        async def note() -> None:
            await checkpoint()
            opened.append(name)

        return note

    async def look(message: int) -> int:
        await checkpoint()
        opened.append("message")
        return message

    await run_pipeline(line(Step(look, opening=opening("a")), Step(Gather(), opening=opening("b"))), None, 1)
    assert opened == ["a", "message", "b"]

    opened.clear()
    await run_pipeline(
        line(Step(no_message, opening=opening("a")), Step(Gather(), opening=opening("b"))), None, 1
    )
    assert opened == ["a", "b"]


async def test_behind_the_stage_that_stages_all_are_opened_with_its_first_message() -> None:
    # The stage that publishes must be waiting when the milestone before it is reached.
    last_is_open = anyio.Event()

    async def note() -> None:
        await checkpoint()
        last_is_open.set()

    async def wait_for_the_last(message: int) -> int:
        await last_is_open.wait()  # for ever, if it is opened with the first message for it
        return message

    stages = line(numbers, echo, wait_for_the_last, Step(Gather(), opening=note))
    assert stages.slots[1].milestone is Milestone.STAGED

    with anyio.fail_after(20):
        await run_pipeline(stages, None, 2, awaited=Milestone.STAGED)


async def test_who_waits_for_what_is_staged_goes_on_before_the_rest_is_opened() -> None:
    staged = anyio.Event()
    order: list[str] = []

    async def note() -> None:
        order.append("the rest is opened")

    async def wait() -> None:
        await staged.wait()
        order.append("the caller goes on")

    def reach(milestone: Milestone) -> None:
        if milestone is Milestone.STAGED:
            staged.set()

    async def copy(message: int) -> int:
        for _ in range(9):  # as long as a trip to a thread: meanwhile the stage before it ends
            await checkpoint()

        return message

    stages = line(echo, copy, Step(Gather(), opening=note), queue=1)
    async with create_task_group() as tasks:
        tasks.start_soon(wait)
        await checkpoint()
        await run_pipeline(stages, None, 1, on_milestone=reach, awaited=Milestone.STAGED)

    assert order == ["the caller goes on", "the rest is opened"]


async def no_message(_: int) -> None:
    await checkpoint()


async def test_nothing_is_opened_behind_a_stage_that_fails_before_its_first_message() -> None:
    opened: list[str] = []

    async def note() -> None:
        await checkpoint()
        opened.append("b")

    boom = ValueError("boom")
    assert await raised_by(line(failing(boom), Step(Gather(), opening=note))) is boom
    assert opened == []


def failing_context(error: BaseException) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        await checkpoint()
        raise error

    return fail


@pytest.mark.parametrize("place", range(3))
async def test_a_stage_may_fail_to_open(place: int) -> None:
    boom = ValueError("boom")
    steps = [Step(numbers), Step(echo), Step(Gather())]
    steps[place] = replace(steps[place], opening=failing_context(boom))

    assert await raised_by(line(*steps, queue=1)) is boom
    assert boom.__notes__ == [f"in stage {'abc'[place]!r}"]


@pytest.mark.parametrize("place", range(3))
async def test_a_stage_may_fail_to_close(place: int) -> None:
    boom = ValueError("boom")
    steps = [Step(numbers), Step(echo), Step(Gather())]
    steps[place] = replace(steps[place], closing=failing_context(boom))
    reached: list[Milestone] = []

    with pytest.raises(ValueError, match="boom") as caught:
        await run_pipeline(line(*steps), None, 3, on_milestone=reached.append)

    assert caught.value is boom
    assert reached == [*Milestone][:place]


async def test_a_stage_may_fail_in_a_generator_half_way_and_in_finish() -> None:
    boom = ValueError("boom")

    async def half_way(message: int) -> AsyncGenerator[int]:
        yield message
        raise boom

    @final
    class FailsAtTheEnd:
        async def __call__(self, message: int) -> int:
            return message

        async def finish(self) -> AsyncGenerator[int]:
            yield 1
            raise boom

    for actor in (half_way, FailsAtTheEnd()):
        boom.__notes__ = []
        end = Gather()
        assert await raised_by(line(numbers, actor, end)) is boom
        assert boom.__notes__ == ["in stage 'b'"]
        assert not end.finished


async def test_of_two_stages_failing_at_once_one_arrives_and_of_two_in_turn_the_first() -> None:
    first, second = ValueError("first"), ValueError("second")
    gate = Event()

    async def fail_together(message: int) -> None:
        if message == 0:
            gate.set()
        await gate.wait()
        raise (first, second)[message]

    error = await raised_by(line(numbers, Step(fail_together, concurrency=2), Gather()), 2)
    assert error in (first, second)

    async def fail_on_cancellation(message: int) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise second

    error = await raised_by(line(numbers, failing(first, 1), fail_on_cancellation), 2)
    assert error is first


async def test_a_group_raised_by_an_actor_is_unwrapped_to_its_first_error() -> None:
    first = ValueError("first")

    async def fail(message: object) -> None:
        await checkpoint()
        raise ExceptionGroup("several", [ExceptionGroup("nested", [first]), KeyError()])

    assert await raised_by(line(numbers, fail)) is first


async def test_a_context_that_swallows_errors_does_not_truncate_in_silence() -> None:
    @final
    class Swallows:
        concurrency = 1

        @asynccontextmanager
        async def open(self, run: object, /) -> AsyncGenerator[Actor]:
            with suppress(ValueError):
                yield failing(ValueError(), 2)

    end = Gather()
    pipeline = line(numbers, echo, end).replace("b", Swallows())
    with pytest.raises(PipelineError, match="swallowed an error") as caught:
        await run_pipeline(pipeline, None, 5)

    assert caught.value.stage == "b"
    assert not end.finished


@pytest.mark.parametrize("where", ["work", "open", "close", "finish"])
def test_a_stage_cancelled_by_what_it_awaits_is_an_error_and_not_the_end(where: str) -> None:
    # An asyncio future that somebody else cancels, as a cancelled TensorStore future does, raises
    # CancelledError in a task that nobody cancelled. Task groups ignore that.
    async def rogue(*_: object) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    @final
    class RogueFinish:
        async def __call__(self, message: int) -> int:
            return message

        async def finish(self) -> AsyncGenerator[int]:
            yield 1
            await rogue()

    step = {
        "work": Step(rogue),
        "open": Step(echo, opening=rogue),
        "close": Step(echo, closing=rogue),
        "finish": Step(RogueFinish()),
    }[where]

    async def main() -> None:
        end = Gather()
        with pytest.raises(PipelineError, match="ended early") as caught:
            await run_pipeline(line(numbers, step, end), None, 5)

        assert "'b'" in str(caught.value) or caught.value.stage == "b"
        assert not end.finished

    anyio.run(main, backend="asyncio")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_comes_out_as_itself(backend: str, interrupt: type[BaseException]) -> None:
    end = Gather()

    async def fail_too(message: int) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError(message)

    with pytest.raises(interrupt) as caught:
        anyio.run(
            run_pipeline,
            line(numbers, failing(interrupt(), 1), Step(fail_too), end),
            None,
            3,
            backend=backend,
        )

    assert type(caught.value) is interrupt
    assert not end.finished


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_interrupt_goes_before_a_failure_that_came_first(backend: str) -> None:
    async def interrupted(message: int) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        anyio.run(
            run_pipeline, line(numbers, failing(ValueError(), 1), interrupted), None, 3, backend=backend
        )


async def test_a_failure_leaves_no_cycle_that_would_keep_buffers_alive() -> None:
    class Large:
        pass

    alive: list[weakref.ref[Large]] = []

    async def make(message: int) -> Large:
        await checkpoint()
        large = Large()
        alive.append(weakref.ref(large))
        return large

    async def fail(message: Large) -> None:
        await checkpoint()
        raise ValueError

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match=r"^\nin stage"):
            await run_pipeline(line(make, fail), None, 1)
        await checkpoint()
        assert alive[0]() is None
    finally:
        gc.enable()


# Cancellation

LIMIT = 20


@final
class Flow:
    """A pipeline whose messages carry leases, more of them than the budget holds at once."""

    def __init__(self, fail_at: int | None = None, queue: int = 1) -> None:
        self.memory = MemoryRegulator(LIMIT)
        self.steps = (
            Step(self.make),
            Step(self.change, concurrency=2, opening=checkpoint, closing=checkpoint),
            Step(self.count, concurrency=2),
            Step(self),
        )
        self.fail_at = fail_at
        self.pipeline = line(*self.steps, queue=queue)

    async def make(self, message: int) -> AsyncGenerator[Parcel]:
        for number in range(message):
            yield Parcel(number, await self.memory.acquire(5))

    async def change(self, message: Parcel) -> Parcel:
        for _ in range(message.number % 3):
            await checkpoint()
        return Parcel(message.number, message.lease.split(message.lease.nbytes))

    async def count(self, message: Parcel) -> Parcel:
        if message.number == self.fail_at:
            raise ValueError(message.number)
        return message

    async def __call__(self, message: Parcel) -> None:
        with message.lease:
            await checkpoint()

    async def finish(self) -> AsyncGenerator[Parcel]:
        yield Parcel(0, await self.memory.acquire(5))
        yield Parcel(1, await self.memory.acquire(5))

    async def run(self, results: list[PipelineResult]) -> None:
        results.append(await run_pipeline(self.pipeline, None, 6))

    def left_nothing(self) -> bool:
        statistics = self.memory.statistics()
        logs = [step.log for step in self.steps]
        return (statistics.leased, statistics.tasks_waiting) == (0, 0) and all(
            log in ([], ["open", "closed"]) for log in logs
        )


async def ticks(number: int) -> None:
    for _ in range(number):
        await checkpoint()


# These two run without asyncio's debug mode, which would make them slow.


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("queue", [0, 3])
def test_cancelling_after_any_number_of_ticks_leaves_nothing(queue: int, backend: str) -> None:
    async def cancelled_after(number: int) -> bool:
        flow, results, scope = Flow(queue=queue), list[PipelineResult](), CancelScope()

        async def cancel_later() -> None:
            await ticks(number)
            scope.cancel()

        with anyio.fail_after(20):
            async with create_task_group() as tasks:
                tasks.start_soon(cancel_later)
                with scope:
                    await flow.run(results)

        for result in results:
            result.value.release()

        assert scope.cancelled_caught != bool(results)
        assert flow.left_nothing(), number
        return not results

    async def main() -> list[bool]:
        return [await cancelled_after(number) for number in range(110)]

    check_covered(anyio.run(main, backend=backend))


@pytest.mark.parametrize("queue", [0, 3])
def test_a_native_cancel_after_any_number_of_ticks_leaves_nothing(queue: int) -> None:
    async def cancelled_after(number: int) -> bool:
        flow, results = Flow(queue=queue), list[PipelineResult]()
        task = asyncio.ensure_future(flow.run(results))
        for _ in range(number):
            await asyncio.sleep(0)

        task.cancel()
        with suppress(asyncio.CancelledError), anyio.fail_after(20):
            await task

        for result in results:
            result.value.release()

        assert flow.left_nothing(), number
        return not results

    async def main() -> list[bool]:
        return [await cancelled_after(number) for number in range(110)]

    check_covered(anyio.run(main, backend="asyncio"))


def check_covered(cancelled: list[bool]) -> None:
    """From before the first stage opens to after the last one has closed."""
    assert all(cancelled[:20])
    assert not any(cancelled[-5:])


@pytest.mark.parametrize("fail_at", range(6))
@pytest.mark.parametrize("queue", [0, 1, 5])
async def test_failing_at_any_message_leaves_nothing(fail_at: int, queue: int) -> None:
    flow = Flow(fail_at=fail_at, queue=queue)

    with pytest.raises(ValueError, match=f"^{fail_at}\\n") as caught:
        await flow.run([])

    assert caught.value.__notes__ == ["in stage 'c'"]
    assert flow.left_nothing()


async def test_what_waits_before_a_stage_that_cannot_open_is_released() -> None:
    boom, full = ValueError("boom"), Event()
    memory = MemoryRegulator(LIMIT)

    async def fill(message: int) -> AsyncGenerator[Parcel]:
        for number in range(4):
            if number == 3:  # three are in the queue
                full.set()
            yield Parcel(number, await memory.acquire(5))

    async def fail() -> None:
        await full.wait()
        await checkpoint()
        raise boom

    assert await raised_by(line(fill, Step(echo, opening=fail), queue=3)) is boom
    assert memory.statistics().leased == 0


async def test_what_is_sent_to_a_failed_stage_that_still_cleans_up_is_released() -> None:
    boom, failed = ValueError("boom"), Event()
    memory = MemoryRegulator(LIMIT)

    async def fill(message: int) -> AsyncGenerator[Parcel]:
        yield Parcel(0, await memory.acquire(5))
        await failed.wait()
        yield Parcel(1, await memory.acquire(5))
        yield Parcel(2, await memory.acquire(5))

    async def fail(message: Parcel) -> None:
        failed.set()
        raise boom

    assert await raised_by(line(fill, Step(fail, closing=lambda: ticks(20)), queue=3)) is boom
    assert memory.statistics().leased == 0


async def test_a_result_is_released_if_the_run_fails_after_it_came_out() -> None:
    memory = MemoryRegulator(LIMIT)
    boom = ValueError("boom")

    async def make(message: int) -> Parcel:
        return Parcel(message, await memory.acquire(5))

    async def fail() -> None:
        await ticks(20)
        raise boom

    assert await raised_by(line(Step(make, closing=fail))) is boom
    assert memory.statistics().leased == 0


@pytest.mark.parametrize("where", ["open", "work", "finish", "close"])
async def test_cancelling_a_stage_that_is_stuck_ends_the_run(where: str) -> None:
    at = Event()

    async def stick(*_: object) -> None:
        at.set()
        await anyio.sleep_forever()

    @final
    class StuckAtTheEnd:
        async def __call__(self, message: int) -> int:
            return message

        async def finish(self) -> AsyncGenerator[int]:
            yield 1
            await stick()

    step = {
        "open": Step(echo, opening=stick),
        "work": Step(stick),
        "finish": Step(StuckAtTheEnd()),
        "close": Step(echo, closing=stick),
    }[where]
    others = (Step(numbers), Step(Gather()))
    reached: list[Milestone] = []
    with CancelScope() as scope:
        async with create_task_group() as tasks:

            async def run() -> None:
                pipeline = line(others[0], step, others[1])
                await run_pipeline(pipeline, None, 3, on_milestone=reached.append)

            tasks.start_soon(run)
            await at.wait()
            scope.cancel()

    assert scope.cancelled_caught
    assert all(other.log in ([], ["open", "closed"]) for other in others)
    assert set(reached) <= {Milestone.PLANNED}


async def test_a_cancellation_does_not_hide_a_failure_in_cleaning_up() -> None:
    boom, begun = ValueError("boom"), Event()

    async def hold(message: object) -> None:
        begun.set()
        await anyio.sleep_forever()

    async def fail() -> None:
        raise boom

    scope = CancelScope()

    async def run() -> None:
        with pytest.raises(ValueError, match="boom") as caught, scope:
            await run_pipeline(line(numbers, Step(hold, closing=fail), echo), None, 3)
        assert caught.value is boom

    async with create_task_group() as tasks:
        tasks.start_soon(run)
        await begun.wait()
        scope.cancel()

    assert not scope.cancelled_caught


async def test_every_worker_of_a_stage_has_a_thread_at_the_same_time() -> None:
    run, all_there = SimpleNamespace(threads=Threads(2)), threading.Barrier(12)

    async def wait(message: int) -> int:
        await run.threads.run(all_there.wait, 30)
        return message

    result = await run_pipeline(line(numbers, Step(wait, concurrency=12), Gather()), run, 12)

    assert sorted(result.value) == list(range(12))
