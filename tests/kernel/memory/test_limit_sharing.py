"""An "auto" limit that several processes of one host share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
from anyio import Event, create_task_group
from anyio.lowlevel import checkpoint
from structlog.testing import LogCapture

from penstock.errors import CoordinationError
from penstock.kernel import MemoryRegulator
from penstock.kernel.memory.memory_limit import MemoryReading, memory_domain
from penstock.kernel.memory.regulator import LimitSharing

GIB = 2**30


class Machine:
    def read(self) -> MemoryReading:
        return MemoryReading(24 * GIB, 24 * GIB)


class Others:
    """What the other processes have said by each look."""

    def __init__(self, *answers: tuple[int, bool] | Exception) -> None:
        self.answers = list(answers)
        self.places: list[str] = []
        self.asked = Event()

    async def count(self, place: str) -> tuple[int, bool]:
        self.places.append(place)
        answer = self.answers.pop(0)
        self.asked.set()
        if isinstance(answer, Exception):
            raise answer

        return answer


def sharing(memory: MemoryRegulator, others: Others | None) -> tuple[LimitSharing, LogCapture]:
    capture = LogCapture()
    events: Any = structlog.wrap_logger(None, processors=[capture])
    count = None if others is None else others.count
    return LimitSharing(memory, count, events, domain=lambda: "this host"), capture


@pytest.mark.anyio
async def test_each_takes_its_part_of_what_the_host_has() -> None:
    memory = MemoryRegulator(source=Machine())
    assert memory.limit == 6 * GIB
    shared, capture = sharing(memory, Others((3, True)))
    assert await shared.look()
    assert (memory.limit, memory.whole, memory.sharers) == (2 * GIB, 2 * GIB, 3)
    assert [(entry["event"], entry["processes"]) for entry in capture.entries] == [("memory.limit_shared", 3)]


@pytest.mark.anyio
async def test_sharers_are_counted_until_all_have_come() -> None:
    memory = MemoryRegulator(source=Machine())
    others = Others((1, False), CoordinationError("gone"), (2, False), (4, True))
    shared, capture = sharing(memory, others)
    async with create_task_group() as tasks:
        with shared.going_on(tasks, interval_s=0.0):
            while others.answers or memory.sharers != 4:
                await checkpoint()

    assert memory.limit == 6 * GIB // 4
    assert others.places == ["this host"] * 4
    assert [entry["event"] for entry in capture.entries] == [
        "memory.unshared",
        "memory.limit_shared",
        "memory.limit_shared",
    ]


@pytest.mark.anyio
async def test_counting_ends_with_the_block_that_it_is_for() -> None:
    others = Others(*[(1, False)] * 3)
    shared, _ = sharing(MemoryRegulator(source=Machine()), others)
    async with create_task_group() as tasks:
        with shared.going_on(tasks, interval_s=1000.0):
            await others.asked.wait()

    assert len(others.places) == 1


@pytest.mark.anyio
async def test_a_limit_that_is_a_number_is_nobodys_business() -> None:
    memory, others = MemoryRegulator(2 * GIB), Others()
    shared, _ = sharing(memory, others)
    assert await shared.look()
    memory.share(3)
    assert memory.limit == 2 * GIB
    assert others.places == []


@pytest.mark.anyio
async def test_one_process_asks_nobody() -> None:
    memory = MemoryRegulator(source=Machine())
    shared, _ = sharing(memory, None)
    assert await shared.look()
    assert memory.limit == 6 * GIB


def files(root: Path, **content: str) -> Path:
    for name, text in {"meminfo": f"MemTotal: {24 * GIB // 1024} kB\n", **content}.items():
        path = (
            root
            / {
                "meminfo": "proc/meminfo",
                "boot": "proc/sys/kernel/random/boot_id",
                "group": "proc/self/cgroup",
                "inner": "sys/fs/cgroup/job/step/memory.max",
                "outer": "sys/fs/cgroup/job/memory.max",
            }[name]
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return root


def test_processes_of_one_machine_have_one_memory(tmp_path: Path) -> None:
    one = memory_domain(files(tmp_path / "a", boot="x\n", group="0::/job/step\n", inner="max\n"))
    other = memory_domain(files(tmp_path / "b", boot="x\n"))
    elsewhere = memory_domain(files(tmp_path / "c", boot="y\n"))
    assert one == other
    assert one != elsewhere


def test_processes_of_different_groups_have_different_memory(tmp_path: Path) -> None:
    def domain(name: str, **content: str) -> str:
        return memory_domain(files(tmp_path / name, boot="x\n", group="0::/job/step\n", **content))

    whole = domain("machine")
    first, second = domain("a", inner=f"{GIB}\n"), domain("b", inner=f"{GIB}\n")
    assert len({whole, first, second}) == 3
    assert domain("above", inner=f"{99 * GIB}\n") == whole


def test_what_bounds_most_is_what_is_shared(tmp_path: Path) -> None:
    root = files(tmp_path, boot="x\n", group="0::/job/step\n", inner=f"{2 * GIB}\n", outer=f"{GIB}\n")
    before = memory_domain(root)
    (root / "proc/self/cgroup").write_text("0::/job\n")  # a process of that group, but not of the inner one
    assert memory_domain(root) == before
