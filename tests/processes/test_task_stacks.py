"""What the log of a job that hangs says of its tasks."""

from __future__ import annotations

import pytest
from anyio import Event, create_task_group
from anyio.lowlevel import checkpoint
from tests.processes.task_stacks import task_stacks

pytestmark = pytest.mark.anyio


async def waits_for_what_never_comes(begun: Event) -> None:
    begun.set()
    await Event().wait()


async def test_each_call_that_a_task_awaits_is_told() -> None:
    begun, told = Event(), ""

    async def calls() -> None:
        await waits_for_what_never_comes(begun)

    async with create_task_group() as tasks:
        tasks.start_soon(calls)
        await begun.wait()
        await checkpoint()
        told = task_stacks()
        tasks.cancel_scope.cancel()

    lines = [line.rpartition(" ")[2] for line in told.splitlines()]
    at = lines.index("waits_for_what_never_comes")
    assert lines[at - 1] == "calls"
    assert "test_task_stacks.py:" in told
