"""Copies are all begun before the first of them is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.stages.stage_rig import Rig, Scripted, cancel_in, save_stages

from penstock.kernel.protocols.views import StagedLeaf
from penstock.kernel.protocols.written import PiecePlan
from penstock.stages.device_to_host import PACKED_BELOW, DeviceToHost
from penstock.stages.flatten import Flatten

pytestmark = pytest.mark.anyio

SIZE = PACKED_BELOW + 1
TREE = {name: np.zeros(SIZE, np.uint8) for name in "abcd"}


class Beginning(Scripted):
    """A handler whose pieces have a `begin` step."""

    def pieces(self, leaf: StagedLeaf, piece_bytes: int) -> Iterator[PiecePlan]:
        for plan in super().pieces(leaf, piece_bytes):
            yield replace(plan, begin=partial(self.enter, "begin", leaf.info.name))


@pytest.fixture
def handler(rig: Rig) -> Beginning:
    found = Beginning(rig.registry.lookup(np.ndarray, ""))
    rig.registry = rig.registry.copy()
    rig.registry.register(np.ndarray, found, override=True)
    rig.limits = replace(rig.limits, piece_bytes=2 * SIZE)
    return found


async def stage(rig: Rig) -> list[Any]:
    return await save_stages(rig.save_run(), TREE, Flatten(), DeviceToHost())


async def test_those_that_are_leased_together_begin_together(rig: Rig, handler: Beginning) -> None:
    await stage(rig)

    calls = [call for call in handler.calls if call[0] in {"begin", "take"}]
    assert calls == [
        *(("begin", "a"), ("begin", "b"), ("take", "a"), ("take", "b")),
        *(("begin", "c"), ("begin", "d"), ("take", "c"), ("take", "d")),
    ]


async def test_one_that_cannot_begin_fails_the_stage(rig: Rig, handler: Beginning) -> None:
    error = handler.fail("begin", "b")

    with pytest.raises(type(error)) as caught:
        await stage(rig)

    assert caught.value is error
    assert handler.names("take") == []


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
async def test_cancelled_while_one_begins(rig: Rig, handler: Beginning, native: bool) -> None:
    hang = handler.hang("begin", "c")
    await cancel_in(hang, lambda: stage(rig), native=native)
