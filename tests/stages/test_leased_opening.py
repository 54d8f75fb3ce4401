"""Documents are read and decoded within the memory budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.stages.stage_rig import Rig

from penstock.errors import CorruptCheckpointError
from penstock.kernel import Opening
from penstock.stages.locate import open_leased

pytestmark = pytest.mark.anyio


class Measured:
    """A layout that only says what opening takes, and then does what it is told."""

    def __init__(self, nbytes: int, opened: Callable[[], Any]) -> None:
        self.nbytes = nbytes
        self.opened = opened

    def find(self, store: Any, path: str, item: str | None = None) -> Opening:
        return Opening(self.nbytes, self.opened)


@pytest.fixture
async def rig(tmp_path: Path, anyio_backend: object) -> Any:
    made = Rig(tmp_path)
    yield made
    made.check_idle()


def run_of(rig: Rig, nbytes: int, opened: Callable[[], Any]) -> Any:
    rig.layout = Measured(nbytes, opened)  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    return rig.restore_run()


@pytest.mark.parametrize("nbytes", [0, 300])
async def test_what_opening_takes_is_leased_until_the_result_is_made(rig: Rig, nbytes: int) -> None:
    leased: list[int] = []

    def look(_: object = None) -> str:
        leased.append(rig.memory.statistics().leased)
        return "opened"

    assert await open_leased(run_of(rig, nbytes, look), "p", None, look) == "opened"

    assert leased == [nbytes, nbytes]


async def test_more_than_the_budget_is_admitted_alone_with_a_warning(rig: Rig) -> None:
    rig.limit(100)

    await open_leased(run_of(rig, 300, lambda: None), "p", None, lambda _: None)

    assert rig.logged("memory.oversize") == [{"key_path": "", "nbytes": 300, "documents_of": "p"}]


async def test_a_damaged_document_leaves_nothing_leased(rig: Rig) -> None:
    def damaged() -> None:
        raise CorruptCheckpointError("p", "is not JSON")

    with pytest.raises(CorruptCheckpointError):
        await open_leased(run_of(rig, 300, damaged), "p", None, lambda _: None)


async def test_opening_waits_for_others_and_can_be_cancelled_meanwhile(rig: Rig) -> None:
    rig.limit(500)
    run = run_of(rig, 300, lambda: "opened")
    found: list[str] = []

    async def one(scope: anyio.CancelScope) -> None:
        with scope:
            found.append(await open_leased(run, "p", None, lambda value: str(value)))

    stopped, other = anyio.CancelScope(), anyio.CancelScope()
    with await rig.memory.acquire(300):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, stopped)
            tasks.start_soon(one, other)
            while rig.memory.statistics().tasks_waiting < 2:
                await anyio.lowlevel.checkpoint()

            assert found == []
            stopped.cancel()
            while rig.memory.statistics().tasks_waiting > 1:
                await anyio.lowlevel.checkpoint()

            other.cancel()

    assert found == []
    await one(anyio.CancelScope())
    assert found == ["opened"]
