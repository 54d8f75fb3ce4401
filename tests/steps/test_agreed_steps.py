"""How the primary tells the others which steps there are."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest
from anyio import create_task_group

from penstock.config import JobLimits
from penstock.handlers.coordinators import JobCoordinator, JointOperation
from penstock.steps.opened_root import agreed_steps
from penstock.testing import MemoryKeyValues

LIMITS = JobLimits(join_s=20.0, silence_s=20.0, beat_s=0.5, call_s=5.0)

pytestmark = pytest.mark.anyio


class Sizes:
    """A service that notes the size of the largest value."""

    def __init__(self) -> None:
        self.inner, self.most = MemoryKeyValues(), 0

    def put(self, key: str, value: bytes, replace: bool, /) -> bool:
        self.most = max(self.most, len(value))
        return self.inner.put(key, value, replace)

    def wait(self, key: str, timeout_s: float, /) -> bytes | None:
        return self.inner.wait(key, timeout_s)

    def under(self, prefix: str, /) -> Mapping[str, bytes]:
        return self.inner.under(prefix)

    def count(self, key: str, /) -> int:
        return self.inner.count(key)

    def delete(self, prefix: str, /) -> None:
        self.inner.delete(prefix)


async def agree(steps: Mapping[int, str]) -> tuple[list[Mapping[int, str]], int]:
    """Return what each of three processes gets, and the size of the largest value that was sent."""
    service, found = Sizes(), list[Mapping[int, str]]()

    async def one(index: int) -> None:
        async def find() -> Mapping[int, str]:
            return steps if index == 0 else {99: "seen by another"}

        operation = JobCoordinator(service, index, 3, LIMITS).operation("steps in /run")
        assert isinstance(operation, JointOperation)
        found.append(await agreed_steps(operation, find, str))

    async with create_task_group() as tasks:
        for index in range(3):
            tasks.start_soon(one, index)

    return found, service.most


@pytest.mark.parametrize(
    "steps",
    [{}, {0: "0"}, {7: "7", 10**17: str(10**17)}, {3: "step \udcff of another name", 4: "4"}],
    ids=["none", "zero", "large", "odd name"],
)
async def test_all_get_what_the_primary_finds(steps: Mapping[int, str]) -> None:
    found, _ = await agree(steps)
    assert [dict(each) for each in found] == [steps] * 3
    assert all(earlier < later for each in found for earlier, later in pairwise(each))


async def test_many_steps_are_told_in_a_few_bytes() -> None:
    steps = {step: str(step) for step in range(0, 2_000_000, 100)}
    found, most = await agree(steps)
    assert all(each == steps for each in found)
    assert most < 16 * 1024
