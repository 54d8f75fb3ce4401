from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.kernel.memory.memory_limit import auto_memory_limit

MIB, GIB = 2**20, 2**30


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(nbytes: int) -> str:
    return f"MemTotal:       999999999 kB\nMemFree: 1 kB\nMemAvailable:   {nbytes // 1024} kB\nHugePages: 0\n"


@pytest.mark.parametrize(
    ("available", "limit"),
    [(8 * GIB, 2 * GIB), (100 * MIB, 64 * MIB), (0, 64 * MIB), (999 * GIB, 16 * GIB)],
)
def test_a_quarter_of_what_is_available_within_bounds(tmp_path: Path, available: int, limit: int) -> None:
    assert auto_memory_limit(machine(tmp_path, {"proc/meminfo": meminfo(available)})) == limit


V2 = "0::/job/step\n"
V1 = "12:cpu,cpuacct:/elsewhere\n5:memory:/job/step\n0::/job/step\n"
UNLIMITED_V1 = "9223372036854771712\n"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/job/step/memory.max": f"{4 * GIB}\n"}, 1 * GIB),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/job/step/memory.max": "max\n"}, 8 * GIB),
        # The group around it is the tighter one.
        (
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/job/step/memory.max": f"{20 * GIB}\n",
                "sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n",
            },
            1 * GIB,
        ),
        # In a container, the path is the host's and the limit is at the root of what can be seen.
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{4 * GIB}\n"}, 1 * GIB),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/memory.max": f"{4 * GIB}\n"}, 1 * GIB),
        (
            {"proc/self/cgroup": V1, "sys/fs/cgroup/memory/job/step/memory.limit_in_bytes": f"{4 * GIB}\n"},
            1 * GIB,
        ),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n"}, 1 * GIB),
        (
            {"proc/self/cgroup": V1, "sys/fs/cgroup/memory/job/step/memory.limit_in_bytes": UNLIMITED_V1},
            8 * GIB,
        ),
        # Of another controller, of another group, and nonsense.
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/elsewhere/memory.limit_in_bytes": "4096\n"}, 8 * GIB),
        ({"proc/self/cgroup": "nonsense\n\n0::\n", "sys/fs/cgroup/job/step/memory.max": "4096\n"}, 8 * GIB),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/job/step/memory.max": "\n"}, 8 * GIB),
    ],
)
def test_the_limits_of_control_groups_count(tmp_path: Path, files: dict[str, str], limit: int) -> None:
    assert auto_memory_limit(machine(tmp_path, {"proc/meminfo": meminfo(32 * GIB), **files})) == limit


def test_what_is_available_counts_if_it_is_less_than_the_group_allows(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{32 * GIB}\n"}

    assert auto_memory_limit(machine(tmp_path, {"proc/meminfo": meminfo(4 * GIB), **files})) == 1 * GIB


@pytest.mark.parametrize("text", ["", "MemAvailable:\n", "MemAvailable: many kB\n", "MemAvailable: 1 MB\n"])
def test_where_nothing_can_be_read_the_physical_memory_counts(tmp_path: Path, text: str) -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    limit = auto_memory_limit(machine(tmp_path, {"proc/meminfo": text}))
    assert limit == min(max(physical // 4, 64 * MIB), 16 * GIB)


def test_a_limit_is_found_on_this_machine() -> None:
    assert 64 * MIB <= auto_memory_limit() <= 16 * GIB
