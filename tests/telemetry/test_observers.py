"""An observer that fails disturbs no save; one that does not hears of everything."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import ConfigError, DestinationExistsError, SpecError

pytestmark = pytest.mark.anyio
TREE = {"w": np.ones(10)}


class Hearing:
    """Writes down what it is told; raises at one point."""

    def __init__(self, fails_at: str = "") -> None:
        self.heard: list[str] = []
        self.fails_at = fails_at

    def hear(self, what: str) -> None:
        self.heard.append(what)
        if what == self.fails_at:
            raise ValueError(what)

    @contextmanager
    def observing(self, kind: str, path: str) -> Generator[Callable[[Any], None]]:
        self.hear("begin")
        try:
            yield lambda report: self.hear(f"report of a {report.kind}")
        except BaseException as error:
            self.hear(type(error).__name__)
            raise
        self.hear("end")

    @contextmanager
    def watching(self, statistics: Callable[[], Any]) -> Generator[None]:
        self.hear(f"opened with {statistics().limit}")
        yield
        self.hear("closed")


SAVE_AND_RESTORE = [
    "opened with 1000000",
    *("begin", "report of a save", "end"),
    *("begin", "report of a restore", "end"),
    "closed",
]


@pytest.mark.parametrize(
    "fails_at", ["", "begin", "end", "report of a save", "closed", "opened with 1000000"]
)
async def test_what_an_observer_raises_is_logged_and_no_more(
    tmp_path: Path, fails_at: str, caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = Hearing(fails_at), Hearing()
    async with penstock.Checkpointer(observers=[failing, other], memory_limit="1MB") as checkpointer:
        await (await checkpointer.save(tmp_path / "a", TREE))
        restored = await checkpointer.restore(tmp_path / "a")

    assert restored["w"].shape == (10,)
    assert other.heard == SAVE_AND_RESTORE
    logged = [record for record in caplog.records if record.getMessage().startswith("telemetry.failed")]
    assert bool(logged) == bool(fails_at)
    assert not fails_at or fails_at in failing.heard


async def test_a_failure_leaves_the_context_of_the_observer(tmp_path: Path) -> None:
    hearing = Hearing()
    async with penstock.Checkpointer(observers=[hearing]) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", TREE))
        with pytest.raises(DestinationExistsError):
            await (await checkpointer.save(tmp_path / "a", TREE))

    assert hearing.heard[-2:] == ["DestinationExistsError", "closed"]


async def test_an_unknown_observer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TELEMETRY__OBSERVERS", "promethius")

    with pytest.raises(ConfigError, match="no observer 'promethius'; did you mean 'prometheus'"):
        async with penstock.Checkpointer():
            pass


async def test_a_manager_has_observers(tmp_path: Path) -> None:
    hearing = Hearing()
    async with penstock.CheckpointManager(tmp_path, observers=[hearing], memory_limit="1MB") as manager:
        await manager.save(1, TREE)
        await manager.wait()
        await manager.restore()

    assert hearing.heard == SAVE_AND_RESTORE


async def test_observers_beside_a_given_checkpointer_are_refused(tmp_path: Path) -> None:
    checkpointer = penstock.Checkpointer()
    with pytest.raises(SpecError, match="observers: an option of the checkpointer"):
        penstock.CheckpointManager(tmp_path, checkpointer=checkpointer, observers=[Hearing()])

    penstock.CheckpointManager(tmp_path, checkpointer=checkpointer)


async def test_free_functions_have_observers(tmp_path: Path) -> None:
    first, second, third = Hearing(), Hearing(), Hearing()
    await penstock.save(tmp_path / "a", penstock.Composite(x=TREE), observers=[first])
    await penstock.restore(tmp_path / "a", observers=[second])
    await penstock.restore_items(tmp_path / "a", observers=[third])

    assert first.heard[1:] == [*SAVE_AND_RESTORE[1:4], "closed"]
    assert second.heard[1:] == third.heard[1:] == SAVE_AND_RESTORE[4:]
