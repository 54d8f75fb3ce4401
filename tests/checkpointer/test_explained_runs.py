"""Whatever is slow in a real save or restore, its report names it, and the option to change.

Time is a clock that only what is slow moves on, so nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.stages.stage_rig import Rig

from penstock import Checkpointer, RestoreReport, SaveReport
from penstock.handlers import LocalStore
from penstock.kernel import (
    Actor,
    Advice,
    Finishing,
    MemoryRegulator,
    Milestone,
    Pipeline,
    RestoreRequest,
    StoreWrapper,
    TreeToSave,
    run_pipeline,
)
from penstock.kernel.pipeline import advice_of, workers_of
from penstock.pipelines import restore_pipeline, save_pipeline
from penstock.reports.diagnosis import fit
from penstock.stages import Encode
from penstock.testing import FaultyStore, MemoryStore

pytestmark = pytest.mark.anyio
MIB = 2**20
PIECE = 2**17
TREE = {f"w{n}": np.full(PIECE // 4, n, np.float32) for n in range(8)}


class Clock:
    """Goes on when it is told to: for everybody, or for one worker, as if no other overlapped it."""

    def __init__(self) -> None:
        self._now = 0.0
        self._lock = threading.Lock()
        self._own: ContextVar[float] = ContextVar("own time", default=0.0)
        self.may_pass = threading.Event()

    def __call__(self) -> float:
        return self._now + self._own.get()

    def pass_by(self) -> None:
        """Let a second pass for everybody."""
        assert self.may_pass.wait(30)
        with self._lock:
            self._now += 1.0

    def pass_here(self) -> None:
        """Let a second pass for the worker that calls."""
        self._own.set(self._own.get() + 1.0)


@dataclass(frozen=True)
class Slow:
    """A stage that takes its time over every message."""

    inner: Any
    clock: Clock

    @property
    def concurrency(self) -> int:
        return workers_of(self.inner)

    @property
    def advice(self) -> Advice:
        return advice_of(self.inner)

    @asynccontextmanager
    async def open(self, run: Any, /) -> AsyncGenerator[Actor]:
        async with self.inner.open(run) as actor:
            yield (_SlowFinisher if isinstance(actor, Finishing) else _SlowActor)(actor, self.clock)


class _SlowActor:
    def __init__(self, actor: Any, clock: Clock) -> None:
        self.actor = actor
        self.clock = clock

    def __call__(self, message: Any) -> Any:
        result = self.actor(message)
        return self._each(result) if isinstance(result, AsyncIterator) else self._one(result)

    async def _each(self, results: AsyncIterator[Any]) -> AsyncIterator[Any]:
        self.clock.pass_here()
        async for result in results:
            yield result

    async def _one(self, result: Awaitable[Any]) -> Any:
        self.clock.pass_here()
        return await result


class _SlowFinisher(_SlowActor):
    def finish(self) -> Any:
        return self.actor.finish()


class SlowFile:
    def __init__(self, inner: Any, clock: Clock) -> None:
        self.inner = inner
        self.clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write_at(self, offset: int, buffers: Any) -> None:
        self.clock.pass_by()
        self.inner.write_at(offset, buffers)


class SlowStore(StoreWrapper):
    """A store that takes a second for each write."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(LocalStore())
        self.clock = clock

    def create_data_file(self, path: str) -> Any:
        return SlowFile(self.inner.create_data_file(path), self.clock)


def slow_store(clock: Clock) -> FaultyStore:
    return FaultyStore(SlowStore(clock))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    made = Rig(tmp_path)
    made.limit(1 << 26, piece=PIECE)
    return made


async def saved(rig: Rig, pipeline: Pipeline[Any], clock: Clock) -> SaveReport:
    def reach(milestone: Milestone) -> None:
        if milestone is Milestone.STAGED:
            clock.may_pass.set()  # so that no copy is on its way meanwhile

    result = await run_pipeline(pipeline, rig.save_run(), TreeToSave(TREE), on_milestone=reach, clock=clock)
    rig.check_idle()
    return SaveReport(str(rig.final), len(TREE), 8 * PIECE, stages=result.stages)


SAVE = {
    "flatten": "penstock.warm_up()",
    "prioritise": "leave `prioritise` empty",
    "device_to_host": 'staging="overlap"',
    "limit_bytes": "raise `piece_bytes`",
    "write": "raise `[save.write] concurrency`",
    "commit": "save less often",
    "finalize": "save less often",
}


@pytest.mark.parametrize("name", SAVE)
async def test_a_slow_stage_of_a_save_is_named(name: str, rig: Rig, clock: Clock) -> None:
    pipeline = save_pipeline()
    report = await saved(rig, pipeline.replace(name, Slow(pipeline[name], clock)), clock)

    assert report.explain().startswith(f"The stage {name!r} is the bottleneck: it was busy ")
    assert SAVE[name] in report.explain()
    assert f"\n{name} " in str(report)


RESTORE = {
    "locate": "keep one Checkpointer open",
    "plan": "penstock.warm_up()",
    "prioritise": "leave `prioritise` empty",
    "limit_bytes": "raise `piece_bytes`",
    "read": "raise `[restore.read] concurrency`",
    "host_to_device": "Raise `[restore.host_to_device] concurrency`",
    "assemble": "penstock.warm_up()",
}


@pytest.mark.parametrize("name", RESTORE)
async def test_a_slow_stage_of_a_restore_is_named(name: str, rig: Rig, clock: Clock) -> None:
    await saved(rig, save_pipeline(), clock)
    pipeline = restore_pipeline()
    slow = pipeline.replace(name, Slow(pipeline[name], clock))
    result = await run_pipeline(slow, rig.restore_run(), RestoreRequest(str(rig.final)), clock=clock)

    report = RestoreReport(str(rig.final), 8, 8 * PIECE, stages=result.stages)
    assert report.explain().startswith(f"The stage {name!r} is the bottleneck: it was busy ")
    assert RESTORE[name] in report.explain()


async def test_a_slow_store_is_the_work_of_write(rig: Rig, clock: Clock) -> None:
    rig.store = slow_store(clock)

    report = await saved(rig, save_pipeline(), clock)

    assert report.explain().startswith("The stage 'write' is the bottleneck: it was busy ")
    assert "write less" in report.explain()


async def test_a_small_budget_is_told_from_a_slow_store(rig: Rig, clock: Clock) -> None:
    rig.store = slow_store(clock)
    clock.may_pass.set()
    rig.memory = MemoryRegulator(PIECE)  # so only one of the four writers has something to write

    report = await saved(rig, save_pipeline(), clock)

    assert report.explain().startswith("Memory is the bottleneck: the stage 'device_to_host' waited ")
    assert "Raise `[memory] limit_bytes`" in report.explain()


async def test_few_bytes_in_flight_are_told_from_a_small_budget(rig: Rig, clock: Clock) -> None:
    rig.store = slow_store(clock)

    report = await saved(rig, save_pipeline().configure("limit_bytes", in_flight_bytes=PIECE), clock)

    assert report.explain().startswith("Memory is the bottleneck: the stage 'limit_bytes' waited ")
    assert "`save_concurrent_bytes`" in report.explain()


async def test_a_heavy_codec_is_named(rig: Rig, clock: Clock) -> None:
    pipeline = save_pipeline().insert_after("device_to_host", Slow(Encode(), clock), called="encode")

    report = await saved(rig, pipeline, clock)

    assert report.explain().startswith("The stage 'encode' is the bottleneck: it was busy ")
    assert "a faster `[format] codec`" in report.explain()


async def test_reports_have_the_sizes_and_budgets_that_held(tmp_path: Path) -> None:
    restored: list[RestoreReport] = []
    async with Checkpointer(memory_limit="32MiB") as checkpointer:
        saved = await (await checkpointer.save(tmp_path / "1", TREE))
        await checkpointer.restore(tmp_path / "1", on_report=restored.append)

    for report, chosen, in_flight in ((saved, 16 * MIB, 128 * MIB), (restored[0], 32 * MIB, 256 * MIB)):
        limits = report.limits
        assert limits is not None
        assert (limits.piece_bytes, limits.chosen_piece_bytes) == (2 * MIB, chosen)
        assert (limits.budget_bytes, limits.in_flight_bytes) == (32 * MIB, in_flight)
        assert limits.processors >= 1
        assert report.processor_s > 0


@pytest.mark.parametrize(("limit", "n_messages"), [("16MiB", 16), ("256MiB", 1)])
async def test_messages_that_a_budget_makes_are_counted_and_those_without_it(
    limit: str, n_messages: int
) -> None:
    tree = {"w": np.zeros(16 * MIB, np.uint8)}
    async with Checkpointer(memory_limit=limit, store=MemoryStore()) as checkpointer:
        report = await (await checkpointer.save("/1", tree))

    assert report.limits is not None
    fitted = fit("save", report.stages, report.limits)
    assert fitted is not None
    assert (fitted.n_now, fitted.n_enough) == (n_messages, 1)
    assert fitted.is_cut is (n_messages > 1)
