from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import anyio
import pytest
from anyio import CancelScope, Event, create_memory_object_stream, create_task_group
from anyio.lowlevel import checkpoint
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from penstock.errors import PipelineError
from penstock.kernel import Actor, ByteLease, Finishing, MemoryRegulator, Stage, StageStatistics
from penstock.kernel.pipeline.runner import Outlet, drive, receiving
from penstock.kernel.pipeline.stage import FunctionStage
from penstock.kernel.pipeline.statistics import StageMeter

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def unclosed_streams_are_found() -> Generator[None]:
    # A stream warns when it is collected unclosed; collecting here blames the right test.
    yield
    gc.collect(1)


@dataclass(frozen=True)
class Parcel:
    name: str
    lease: ByteLease

    @property
    def nbytes(self) -> int:
        return self.lease.nbytes

    def release(self) -> None:
        self.lease.release()


@final
class Driven:
    """One driven actor, with its streams in the test's hands."""

    def __init__(self, actor: Actor, *, concurrency: int = 1, inlet: int = 10, outlet: int = 10) -> None:
        self.feed: MemoryObjectSendStream[Any]
        self.out: MemoryObjectReceiveStream[Any]
        self.feed, self._inlet = create_memory_object_stream[Any](inlet)
        outgoing, self.out = create_memory_object_stream[Any](outlet)
        self._actor = actor
        self._concurrency = concurrency
        self._meter = StageMeter("s", concurrency)
        self._outlet = Outlet(outgoing, self._meter)
        self.complete: bool | None = None

    async def __call__(self) -> None:
        with receiving(self._inlet), self._outlet:
            self.complete = await drive(self._actor, self._concurrency, self._inlet, self._outlet)

    def statistics(self) -> StageStatistics:
        return self._meter.statistics()

    def __enter__(self) -> Driven:
        return self

    def __exit__(self, *_: object) -> None:
        self.feed.close()
        self.out.close()
        with self._inlet, self._outlet:
            pass


async def outcome(actor: Actor, *messages: object, concurrency: int = 1) -> list[Any]:
    with Driven(actor, concurrency=concurrency) as driven:
        for message in messages:
            driven.feed.send_nowait(message)

        driven.feed.close()
        await driven()
        assert driven.complete
        return [message async for message in driven.out]


async def echo(message: Any) -> Any:
    await checkpoint()
    return message


async def test_one_worker_keeps_the_order() -> None:
    async def slower_first(message: int) -> int:
        for _ in range(5 - message):
            await checkpoint()
        return message

    assert await outcome(slower_first, 0, 1, 2, 3, 4) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("workers", [2, 3, 5])
async def test_as_many_messages_are_worked_on_at_once_as_there_are_workers(workers: int) -> None:
    present, most, everybody = 0, 0, Event()

    async def meet(message: int) -> int:
        nonlocal present, most
        present += 1
        most = max(most, present)
        if present == workers:
            everybody.set()
        await everybody.wait()  # for ever, if fewer come
        present -= 1
        return message

    assert sorted(await outcome(meet, *range(2 * workers), concurrency=workers)) == list(range(2 * workers))
    assert most == workers


async def test_an_actor_may_yield_any_number_of_messages() -> None:
    async def repeat(message: int) -> AsyncGenerator[int]:
        for _ in range(message):
            yield message

    assert await outcome(repeat, 2, 0, 3) == [2, 2, 3, 3, 3]


async def test_a_stage_may_return_an_iterator_without_aclose() -> None:
    class Twice:
        def __init__(self, message: str) -> None:
            self.left = [message, message]

        def __aiter__(self) -> AsyncIterator[str]:
            return self

        async def __anext__(self) -> str:
            await checkpoint()
            if not self.left:
                raise StopAsyncIteration
            return self.left.pop()

    assert await outcome(Twice, "a", "b") == ["a", "a", "b", "b"]


async def test_a_result_of_none_is_no_message() -> None:
    async def odd(message: int) -> int | None:
        await checkpoint()
        return message if message % 2 else None

    assert await outcome(odd, 0, 1, 2, 3) == [1, 3]


async def test_none_that_was_yielded_is_a_message() -> None:
    async def nothing(message: object) -> AsyncGenerator[None]:
        yield None

    assert await outcome(nothing, "tree") == [None]


@final
class Summing:
    def __init__(self, fail_at: int = -1) -> None:
        self.total = 0
        self.finished = 0
        self.fail_at = fail_at

    async def __call__(self, message: int) -> None:
        await checkpoint()
        if message == self.fail_at:
            raise ValueError(message)
        self.total += message

    async def finish(self) -> AsyncGenerator[int]:
        self.finished += 1
        yield self.total
        yield -self.total


@pytest.mark.parametrize("workers", [1, 3])
async def test_finish_is_called_once_after_every_worker_has_ended(workers: int) -> None:
    actor = Summing()

    assert isinstance(actor, Finishing)
    assert await outcome(actor, 1, 2, 3, concurrency=workers) == [6, -6]
    assert actor.finished == 1


async def test_finish_is_not_called_after_an_error_and_what_waits_is_released() -> None:
    actor, memory = Summing(fail_at=2), MemoryRegulator(10)

    with Driven(actor) as driven:
        for message in (1, 2, Parcel("waiting", await memory.acquire(10))):
            driven.feed.send_nowait(message)

        with pytest.raises(ValueError, match=r"^2$"):
            await driven()

    assert actor.finished == 0
    assert memory.statistics().leased == 0


async def test_a_message_whose_work_failed_is_released() -> None:
    memory = MemoryRegulator(10)

    async def fail(message: Parcel) -> None:
        await checkpoint()
        raise ValueError

    with Driven(fail) as driven:
        driven.feed.send_nowait(Parcel("a", await memory.acquire(10)))
        with pytest.raises(ValueError, match=r"^$"):
            await driven()

    assert memory.statistics().leased == 0


async def test_a_consumer_that_left_ends_the_stage_quietly() -> None:
    actor, memory = Summing(), MemoryRegulator(10)
    with Driven(actor) as driven:
        driven.out.close()
        driven.feed.close()
        await driven()
        assert driven.complete is False  # what finish() had to say was not heard

    with Driven(echo) as driven:
        driven.out.close()
        for name in ("offered", "waiting"):
            driven.feed.send_nowait(Parcel(name, await memory.acquire(5)))
        await driven()

    assert driven.complete is False
    assert memory.statistics().leased == 0


async def test_a_consumer_that_leaves_while_a_message_is_offered_ends_the_stage_quietly() -> None:
    memory, closed = MemoryRegulator(10), list[str]()

    async def split(message: Parcel) -> AsyncGenerator[Parcel]:
        try:
            with message.lease:
                yield Parcel("half", message.lease.split(5))
                yield Parcel("half", message.lease.split(3))
        finally:
            await checkpoint()
            closed.append("generator")

    with Driven(split, outlet=0) as driven:
        driven.feed.send_nowait(Parcel("a", await memory.acquire(10)))
        async with create_task_group() as tasks:
            tasks.start_soon(driven)
            (await driven.out.receive()).release()
            assert memory.statistics().leased == 5
            while not driven.out.statistics().tasks_waiting_send:
                await checkpoint()

            driven.out.close()

        # Closed by the driver and not by the garbage collector, with its input released.
        assert closed == ["generator"]

    assert driven.complete is False
    assert memory.statistics().leased == 0


async def test_a_cancelled_stage_releases_what_it_works_on_offers_and_has_waiting() -> None:
    memory, held = MemoryRegulator(100), Event()

    async def hold(message: Parcel) -> Parcel:
        if message.name == "work":
            held.set()
            await anyio.sleep_forever()
        return message

    with Driven(hold, concurrency=2, outlet=0) as driven, CancelScope() as scope:
        for name in ("work", "offer", "buffer", "buffer"):
            driven.feed.send_nowait(Parcel(name, await memory.acquire(10)))

        async with create_task_group() as tasks:
            tasks.start_soon(driven)
            await held.wait()
            while not driven.out.statistics().tasks_waiting_send:
                await checkpoint()
            assert memory.statistics().leased == 40
            scope.cancel()

    assert memory.statistics().leased == 0
    assert driven.complete is None


async def test_a_generator_that_is_cancelled_half_way_is_closed_and_its_input_released() -> None:
    memory, closed, begun = MemoryRegulator(10), list[str](), Event()

    async def begin(message: Parcel) -> AsyncGenerator[str]:
        try:
            yield "first"
            begun.set()
            await anyio.sleep_forever()
        finally:
            closed.append(message.name)

    with Driven(begin) as driven, CancelScope() as scope:
        driven.feed.send_nowait(Parcel("a", await memory.acquire(10)))
        async with create_task_group() as tasks:
            tasks.start_soon(driven)
            await begun.wait()
            scope.cancel()

    assert closed == ["a"]
    assert memory.statistics().leased == 0


async def test_a_worker_that_waits_keeps_no_message_alive() -> None:
    class Large:
        pass

    async def take(message: Large) -> None:
        alive.append(weakref.ref(message))
        await checkpoint()

    alive: list[weakref.ref[Large]] = []
    with Driven(take, inlet=0) as driven:
        async with create_task_group() as tasks:
            tasks.start_soon(driven)
            await driven.feed.send(Large())
            while not driven.feed.statistics().tasks_waiting_receive:
                await checkpoint()

            assert [ref() for ref in alive] == [None]
            driven.feed.close()


async def test_a_generator_at_work_keeps_no_message_alive_that_was_passed_on() -> None:
    class Large:
        pass

    asked, go_on, gone = Event(), Event(), False

    async def make(message: str) -> AsyncGenerator[object]:
        yield Large()
        asked.set()
        await go_on.wait()
        yield message

    with Driven(make, outlet=0) as driven:
        driven.feed.send_nowait("a")
        driven.feed.close()
        async with create_task_group() as tasks:
            tasks.start_soon(driven)
            alive = weakref.ref(await driven.out.receive())
            await asked.wait()
            gone = alive() is None
            go_on.set()
            assert await driven.out.receive() == "a"

    assert gone


async def test_the_meter_counts_messages_bytes_and_stretches_of_work() -> None:
    memory = MemoryRegulator(100)

    async def halve(message: Parcel) -> AsyncGenerator[Parcel]:
        with message.lease:
            for _ in range(2):
                yield Parcel("half", message.lease.split(message.lease.nbytes // 2))

    with Driven(halve) as driven:
        driven.feed.send_nowait(Parcel("a", await memory.acquire(40)))
        driven.feed.send_nowait(Parcel("b", await memory.acquire(60)))
        driven.feed.close()
        await driven()
        async for half in driven.out:
            half.release()

    statistics = driven.statistics()
    assert (statistics.n_in, statistics.n_out, statistics.nbytes) == (2, 4, 100)
    assert [span.nbytes for span in statistics.spans] == [40, 0, 0, 60, 0, 0]
    assert memory.statistics().leased == 0


def test_a_worker_cancelled_by_what_it_awaits_is_an_error_and_not_the_end() -> None:
    # On asyncio a future that others cancel raises CancelledError in a task that nobody cancelled,
    # and a task group takes that for the quiet end of the task.
    actor = Summing()

    async def await_a_cancelled_future(message: int) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    actor_call = await_a_cancelled_future

    @final
    class Rogue:
        async def __call__(self, message: int) -> None:
            await actor_call(message)

        def finish(self) -> AsyncIterator[int]:
            return actor.finish()

    async def main() -> None:
        with Driven(Rogue(), concurrency=2) as driven:
            driven.feed.send_nowait(1)
            driven.feed.close()
            with pytest.raises(PipelineError, match="ended early"):
                await driven()

    anyio.run(main, backend="asyncio")
    assert actor.finished == 0


async def test_a_function_is_a_stage_of_one_worker() -> None:
    stage = FunctionStage(echo)

    assert isinstance(stage, Stage)
    assert stage.concurrency == 1
    async with stage.open(None) as actor:
        assert actor is echo


async def test_an_error_of_the_actor_is_not_mistaken_for_a_consumer_that_left() -> None:
    async def broken(message: object) -> None:
        await checkpoint()
        raise anyio.BrokenResourceError

    with Driven(broken) as driven:
        driven.feed.send_nowait(1)
        driven.feed.close()
        with pytest.raises(anyio.BrokenResourceError):
            await driven()


async def test_receiving_releases_what_senders_offer_and_closes() -> None:
    memory = MemoryRegulator(20)
    feed, inlet = create_memory_object_stream[Parcel](1)

    async def offer() -> None:
        parcel = Parcel("offered", await memory.acquire(10))
        with feed, suppress(anyio.BrokenResourceError):
            await feed.send(parcel)

    feed.send_nowait(Parcel("buffered", await memory.acquire(10)))
    async with create_task_group() as tasks:
        with receiving(inlet):
            tasks.start_soon(offer)
            while not inlet.statistics().tasks_waiting_send:
                await checkpoint()

    assert memory.statistics().leased == 0
    with pytest.raises(anyio.ClosedResourceError):
        inlet.receive_nowait()
