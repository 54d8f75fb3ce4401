"""Calls of the service, as an event loop makes them."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
from anyio import CancelScope, create_task_group, to_thread, wait_all_tasks_blocked

from penstock.handlers.coordinators.job import LONGEST_WAIT_S, KeyValueCalls
from penstock.testing import MemoryKeyValues

pytestmark = pytest.mark.anyio


class Answers:
    """A service that answers at once, and notes for how long each call would have waited."""

    def __init__(self, *answers: bytes | None) -> None:
        self._answers = list(answers)
        self.waits: list[float] = []

    def wait(self, _key: str, timeout_s: float, /) -> bytes | None:
        self.waits.append(timeout_s)
        return self._answers.pop(0)

    def put(self, _key: str, _value: bytes, _replace: bool, /) -> bool:
        raise NotImplementedError

    def under(self, _prefix: str, /) -> Mapping[str, bytes]:
        raise NotImplementedError

    def count(self, _key: str, /) -> int:
        raise NotImplementedError

    def delete(self, _prefix: str, /) -> None:
        raise NotImplementedError


async def test_no_thread_is_left_behind_for_long() -> None:
    service = Answers(None, None, b"it came")

    assert await KeyValueCalls(service).wait("key", 3600.0) == b"it came"
    assert service.waits == [LONGEST_WAIT_S] * 3


async def test_a_short_wait_is_one_call() -> None:
    service = Answers(None)

    assert await KeyValueCalls(service).wait("key", 5.0) is None
    assert service.waits == [pytest.approx(5.0, abs=1.0)]


class SlowPut(Answers):
    """A service that confirms a put when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_confirm, self.is_done = threading.Event(), threading.Event(), False

    def put(self, _key: str, _value: bytes, _replace: bool, /) -> bool:
        self.asked.set()
        self.may_confirm.wait(60.0)
        self.is_done = True
        return True


@pytest.mark.parametrize("left_s", [60.0, 0.0])
async def test_who_is_cancelled_waits_for_a_value_that_is_being_set(
    left_s: float,
) -> None:
    service, scope = SlowPut(), CancelScope()
    done: list[bool] = []

    async def put() -> None:
        with scope:
            await KeyValueCalls(service).put_to_its_end("key", b"", left_s)

        done.append(service.is_done)

    async with create_task_group() as tasks:
        tasks.start_soon(put)
        assert await to_thread.run_sync(service.asked.wait, 60.0)
        scope.cancel()
        await wait_all_tasks_blocked()
        if left_s:
            assert done == []
            service.may_confirm.set()

    service.may_confirm.set()
    assert done == [left_s > 0]


async def test_what_processes_said_is_found_by_their_index() -> None:
    service = MemoryKeyValues()
    for index in (10, 2, 0):
        service.put(f"said/{index}", b"%d" % index, False)

    found = await KeyValueCalls(service).by_process("said/")
    assert list(found.items()) == [(0, b"0"), (2, b"2"), (10, b"10")]
