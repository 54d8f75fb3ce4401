"""The automatic limit: what is read of the system, what is made of it, and who does it."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
import structlog
from anyio import CancelScope, create_task_group, fail_after
from structlog.testing import LogCapture

from penstock.kernel import MemoryRegulator
from penstock.kernel.memory.memory_limit import LEAST, MemoryReading, SystemMemory, adjusted_limit
from penstock.kernel.memory.regulator import watch_memory, watching_memory

MIB, GIB = 2**20, 2**30
WHOLE = 2 * GIB


def read(free: int, pressure: float = 0.0) -> MemoryReading:
    return MemoryReading(8 * GIB, free, pressure)


@pytest.mark.parametrize(
    ("limit", "leased", "reading", "becomes"),
    [
        (WHOLE, 0, read(8 * GIB), WHOLE),
        (WHOLE, 0, read(2 * GIB), GIB),  # half of what is free
        (WHOLE, GIB, read(2 * GIB), 3 * GIB // 2),  # what is leased would be free without us
        (WHOLE, 0, read(0), LEAST),
        (WHOLE, 0, read(8 * GIB, 10.0), GIB),  # pressure halves,
        (LEAST, 0, read(0, 99.0), LEAST),  # but not below the floor
        (GIB, 0, read(8 * GIB, 5.0), GIB),  # neither pressed nor relieved
        (GIB, 0, read(8 * GIB, 0.5), GIB + WHOLE // 8),  # back in steps,
        (WHOLE - 1, 0, read(8 * GIB), WHOLE),  # to what it was
        (GIB, 0, read(2 * GIB + 100 * MIB), GIB),  # a little is nothing,
        (WHOLE, 0, read(2 * (WHOLE - WHOLE // 16)), WHOLE - WHOLE // 16),  # and a sixteenth is not
        (WHOLE, 0, read(GIB, 10.0), GIB // 2),  # pressed, and less is free than half of it
    ],
)
def test_what_a_limit_becomes(limit: int, leased: int, reading: MemoryReading, becomes: int) -> None:
    assert adjusted_limit(limit, WHOLE, leased, reading) == becomes


def test_a_budget_that_begins_below_the_floor_stays_as_it_is() -> None:
    assert adjusted_limit(10, 10, 0, read(0, 99.0)) == 10


def put(root: Path, files: dict[str, str]) -> SystemMemory:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return SystemMemory(root)


MEMINFO = f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n"
PRESSURE = "some avg10={} avg60=1.00 avg300=0.00 total=5\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=0\n"


@pytest.mark.parametrize(
    ("cgroup", "folder", "names", "cached"),
    [
        ("0::/job\n", "sys/fs/cgroup/job", ("memory.max", "memory.current"), "inactive_file"),
        (
            "4:memory:/job\n",
            "sys/fs/cgroup/memory/job",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "total_inactive_file",
        ),
    ],
)
def test_what_a_group_has_left_counts_its_reclaimable_cache(
    tmp_path: Path, cgroup: str, folder: str, names: tuple[str, str], cached: str
) -> None:
    most, used = names
    source = put(
        tmp_path,
        {
            "proc/self/cgroup": cgroup,
            "proc/meminfo": MEMINFO,
            f"{folder}/{most}": f"{4 * GIB}\n",
            f"{folder}/{used}": f"{3 * GIB}\n",
            f"{folder}/memory.stat": f"anon 5\n{cached} {GIB // 2}\n",
        },
    )
    assert source.read() == MemoryReading(4 * GIB, 3 * GIB // 2, 0.0)


def test_a_group_that_has_more_than_it_may_has_nothing_left(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job\n",
        "proc/meminfo": MEMINFO,
        "sys/fs/cgroup/job/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/job/memory.current": f"{GIB + 5}\n",
    }
    assert put(tmp_path, files).read().free == 0


def test_the_pressure_of_a_group_around_the_own_one_does_not_count(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/job\n",
        "sys/fs/cgroup/pod/job/memory.pressure": PRESSURE.format("2.50"),
        "sys/fs/cgroup/pod/memory.pressure": PRESSURE.format("80.00"),
    }
    assert put(tmp_path, files).read().pressure == 2.5


def test_the_higher_pressure_counts_of_the_machine_and_of_the_own_group(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/job\n", "proc/meminfo": MEMINFO}
    source = put(tmp_path, {**files, "proc/pressure/memory": PRESSURE.format("3.50")})
    assert source.read().pressure == 3.5
    put(tmp_path, {"sys/fs/cgroup/job/memory.pressure": PRESSURE.format("12.25")})
    assert source.read().pressure == 12.25
    put(tmp_path, {"sys/fs/cgroup/job/memory.pressure": "nonsense avg10=7\nsome avg10=much\n"})
    assert source.read().pressure == 3.5


def test_the_memory_of_this_machine_can_be_read() -> None:
    found = SystemMemory().read()
    assert found.limit > 0
    assert found.free >= 0
    assert 0 <= found.pressure <= 100


class Machine:
    """Says what it is told, in turn, and tells when it has nothing left to say."""

    def __init__(self, *readings: MemoryReading | Exception) -> None:
        self.readings = [*readings]
        self.over = anyio.Event()
        self.n_read = 0

    def read(self) -> MemoryReading:
        self.n_read += 1
        if len(self.readings) == 1:
            anyio.from_thread.run_sync(self.over.set)
            return self._said(self.readings[0])

        return self._said(self.readings.pop(0))

    def _said(self, reading: MemoryReading | Exception) -> MemoryReading:
        if isinstance(reading, Exception):
            raise reading

        return reading


def automatic(machine: Machine) -> MemoryRegulator:
    class Begin:
        def read(self) -> MemoryReading:
            return machine.read() if begun else MemoryReading(8 * GIB, 8 * GIB)

    begun: list[bool] = []
    memory = MemoryRegulator("auto", source=Begin())
    begun.append(True)
    return memory


@pytest.mark.anyio
async def test_a_watched_limit_falls_under_pressure_and_comes_back_each_time_with_an_event() -> None:
    machine = Machine(read(8 * GIB, 50.0), OSError("gone"), read(8 * GIB, 50.0), *[read(8 * GIB)] * 20)
    memory, capture = automatic(machine), LogCapture()
    events = structlog.wrap_logger(None, processors=[capture])
    limits: list[int] = []
    with fail_after(20):
        async with create_task_group() as tasks:
            with watching_memory(tasks, memory, events, interval_s=0):
                while not machine.over.is_set():
                    await anyio.lowlevel.checkpoint()
                    if [memory.limit] != limits[-1:]:
                        limits.append(memory.limit)

    assert min(limits) == WHOLE // 4
    assert limits[-1] == memory.limit == WHOLE
    assert memory.watcher is None
    said = [(entry["event"], entry.get("limit_bytes")) for entry in capture.entries]
    assert said[:3] == [
        ("memory.limit_lowered", WHOLE // 2),
        ("memory.unreadable", None),
        ("memory.limit_lowered", WHOLE // 4),
    ]
    assert {event for event, _ in said[3:]} == {"memory.limit_raised"}
    assert said[-1] == ("memory.limit_raised", WHOLE)


@pytest.mark.anyio
async def test_the_second_of_two_watchers_takes_over_from_the_first() -> None:
    machine = Machine(read(8 * GIB))
    memory = automatic(machine)
    events = structlog.wrap_logger(None, processors=[LogCapture()])
    scopes = [CancelScope(), CancelScope()]

    async def watch(scope: CancelScope) -> None:
        with scope:
            await watch_memory(memory, events, interval_s=0)

    with fail_after(20):
        async with create_task_group() as tasks:
            tasks.start_soon(watch, scopes[0])
            await machine.over.wait()
            first = memory.watcher
            assert first is not None
            tasks.start_soon(watch, scopes[1])
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
                assert memory.watcher is first

            scopes[0].cancel()
            while memory.watcher in {None, first}:
                await anyio.lowlevel.checkpoint()

            scopes[1].cancel()

    assert memory.watcher is None


@pytest.mark.anyio
async def test_who_does_not_watch_ends_without_a_change_for_who_does() -> None:
    memory = automatic(Machine(read(8 * GIB)))
    events = structlog.wrap_logger(None, processors=[LogCapture()])
    second, seen, watching = CancelScope(), list[object](), list[object]()

    async def watch_second() -> None:
        with second:
            await watch_memory(memory, events, interval_s=0)

        seen.append(memory.watcher)

    with fail_after(20):
        async with create_task_group() as tasks:
            with watching_memory(tasks, memory, events, interval_s=0):
                while memory.watcher is None:
                    await anyio.lowlevel.checkpoint()

                watching.append(memory.watcher)
                tasks.start_soon(watch_second)
                for _ in range(20):
                    await anyio.lowlevel.checkpoint()

                second.cancel()
                while not seen:
                    await anyio.lowlevel.checkpoint()

    assert seen == watching


@pytest.mark.anyio
async def test_a_limit_that_is_a_number_is_not_watched() -> None:
    memory = MemoryRegulator(100)
    with fail_after(20):
        await watch_memory(memory, structlog.wrap_logger(None, processors=[LogCapture()]), interval_s=0)

    assert memory.source is None
