"""What happens while a manager decides which steps go, and while it deletes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.futures import SaveFuture
from penstock.steps import CheckpointManager, StepInfo
from penstock.testing import Hang, Operation

pytestmark = pytest.mark.anyio


class Slow:
    """Keeps the last step; the decision about step `at` takes until it is released."""

    needs: frozenset[Any] = frozenset()

    def __init__(self, at: int) -> None:
        self.at = at
        self.hang = Hang()

    def keep(self, steps: Sequence[StepInfo], now_s: float, /) -> list[int]:
        if steps[-1].step == self.at:
            self.hang.hold(Operation("keep", ""))

        return [steps[-1].step]


async def save(manager: CheckpointManager, step: int) -> SaveFuture:
    saving = await manager.save(step, {"n": step})
    assert saving is not None
    await saving
    return saving


@pytest.mark.parametrize("meanwhile", ["pin", "unpin"])
async def test_what_is_pinned_when_it_is_decided_stays(tmp_path: Path, meanwhile: str) -> None:
    policy = Slow(3)
    async with CheckpointManager(tmp_path, keep=policy) as manager:
        manager.pin(1)
        await save(manager, 1)
        await save(manager, 2)
        await manager.wait()
        if meanwhile == "pin":
            manager.unpin(1)

        await save(manager, 3)
        await policy.hang.wait_reached()
        getattr(manager, meanwhile)(1)
        policy.hang.release()
        await manager.wait()

        assert sorted(os.listdir(tmp_path)) == (["1", "3"] if meanwhile == "pin" else ["3"])


async def test_what_became_the_last_step_while_it_is_decided_stays(tmp_path: Path) -> None:
    policy = Slow(3)
    async with CheckpointManager(tmp_path, keep=policy) as manager:
        await save(manager, 2)
        await save(manager, 3)
        await policy.hang.wait_reached()
        await manager.delete(3)
        policy.hang.release()
        await manager.wait()

        assert os.listdir(tmp_path) == ["2"]
        assert manager.latest_step() == 2
