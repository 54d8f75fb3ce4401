"""Calls of the service, as an event loop makes them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from penstock.kernel.coordination.key_value_calls import LONGEST_WAIT_S, KeyValueCalls

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
