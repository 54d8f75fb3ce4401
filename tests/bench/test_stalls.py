"""The heartbeat, the loops it beats in, and what is told of a machine that is not idle."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
import sniffio
from tests.bench import noise, trees
from tests.bench.loops import LOOPS, is_here, run_on
from tests.bench.options import parse
from tests.bench.results import IDLE, Operation
from tests.bench.stalls import beating
from tests.bench.timing import measure_stalls
from tests.bench.workloads import TINY, WORKLOADS

WATCHED = replace(TINY, stalls=True, operations=(*TINY.operations, Operation.METADATA))


async def test_a_heartbeat_sees_a_blocked_loop() -> None:
    async with beating() as heartbeat:
        await anyio.lowlevel.checkpoint()
        heartbeat.reset()
        until = time.perf_counter() + 0.05
        while time.perf_counter() < until:  # as a blocking call would
            pass

        assert heartbeat.worst_s() > 0.045
        heartbeat.reset()
        assert heartbeat.worst_s() < 0.04


@pytest.mark.parametrize("loop", LOOPS)
def test_each_loop_runs_under_its_own_name(loop: str) -> None:
    if not is_here(loop):
        pytest.skip(f"{loop} is not installed")

    async def name() -> tuple[str, str]:
        library = sniffio.current_async_library()
        if library == "trio":
            return library, "trio"

        return library, type(asyncio.get_running_loop()).__module__

    library, module = run_on(loop, name)
    assert library == ("trio" if loop == "trio" else "asyncio")
    assert module.startswith("uvloop") is (loop == "uvloop")


async def test_every_operation_is_watched_beside_an_idle_second(tmp_path: Path) -> None:
    state = trees.build("tiny", 1)
    results = await measure_stalls(WATCHED, state, 1, tmp_path, "this one")

    assert [note for note in results.notes if note.failed] == []
    assert [(stall.operation, stall.loop) for stall in results.stalls] == [
        (what, "this one") for what in (IDLE, *WATCHED.operations)
    ]
    assert all(stall.seconds >= 0 for stall in results.stalls)
    assert results.samples == []


def test_stalls_alone_are_of_the_workloads_that_are_watched() -> None:
    options = parse(["--only-stalls"])

    assert options.workloads == tuple(w.name for w in WORKLOADS if w.stalls)
    assert not options.with_memory
    assert (options.json.name, options.svg.name) == ("stalls.json", "stalls.svg")
    assert parse([]).json.name == "results.json"


def test_busy_processors_are_counted() -> None:
    #                user nice system idle iowait irq softirq steal guest
    before = "cpu  100 0 100 1000 50 0 0 10 99 0\ncpu0 1 2 3\ncpu1 1 2 3\nintr 5\n"
    after = "cpu  130 0 110 1120 90 0 0 30 199 0\ncpu0 1 2 3\ncpu1 1 2 3\nintr 5\n"

    assert noise.busy_cores(before, after) == pytest.approx(2 * 60 / 220)
    assert noise.busy_cores("", "") == 0


def test_looking_takes_as_long_as_it_says() -> None:
    quiet = noise.look("small", 0.01)

    assert quiet.workload == "small"
    assert quiet.load_1 >= 0
    assert quiet.busy_cores >= 0
