"""How much host memory may be used, where nobody says."""

from __future__ import annotations

__all__ = ("auto_memory_limit",)

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

LEAST = 64 * 2**20
MOST = 16 * 2**30


def auto_memory_limit(root: str | os.PathLike[str] = "/") -> int:
    """Return a quarter of the memory that this process could still get, from 64 MiB to 16 GiB.

    That is the smallest of what its control groups allow (v2 `memory.max`, v1
    `memory.limit_in_bytes`, of its own group and of those around it) and of `MemAvailable`. Where
    none of them can be read, it is the machine's physical memory. Blocking: reads a few small
    files of `/proc` and `/sys`.

    Args:
        root: Where `proc` and `sys` are, for tests.

    Returns:
        Bytes.
    """
    limits = [*_cgroup_limits(Path(root)), *_available(Path(root))]
    memory = min(limits) if limits else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(max(memory // 4, LEAST), MOST)


def _cgroup_limits(root: Path) -> Iterator[int]:
    groups = root / "sys" / "fs" / "cgroup"
    for line in _read(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = f"{line}::".split(":", 2)
        if not controllers:
            yield from _limits_above(groups, path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _limits_above(groups / "memory", path, "memory.limit_in_bytes")


def _limits_above(hierarchy: Path, path: str, name: str) -> Iterator[int]:
    # A limit binds all groups below it. In a container the path may be the host's, of which only
    # the root can be seen: what is not there is passed over.
    group = PurePosixPath("/", path.rstrip(":"))
    for outer in (group, *group.parents):
        text = _read(hierarchy / outer.relative_to("/") / name).strip()
        if text.isdecimal():  # no limit is the word "max"
            yield int(text)


def _available(root: Path) -> Iterator[int]:
    for line in _read(root / "proc" / "meminfo").splitlines():
        words = line.split()
        if words[:1] == ["MemAvailable:"] and words[2:] == ["kB"] and words[1].isdecimal():
            yield int(words[1]) * 1024


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
