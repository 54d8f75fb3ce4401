"""Chooses how much host memory to use when the user sets no limit."""

from __future__ import annotations

__all__ = (
    "FREE_BYTES",
    "MOST_CODED_EXPANSION",
    "MOST_EXPANSION",
    "MemoryReading",
    "MemorySource",
    "SystemMemory",
    "adjusted_limit",
    "auto_limit",
    "auto_memory_limit",
    "check_available",
    "free_memory",
    "memory_domain",
)

import os
import platform
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final, Protocol, final

from penstock.kernel.errors import InsufficientMemoryError

FREE_BYTES: Final = 64 * 2**20
"""Up to this size nothing is compared with what there is: any machine has that much."""

MOST_EXPANSION: Final = 1000
"""How many times the bytes stored may be asked for, if nobody says that they are wanted."""

MOST_CODED_EXPANSION: Final = 2**15
"""Likewise of chunks with a codec: of 128 KiB that are all the same, as in a new optimiser, zstd makes 4."""

LEAST: Final = 64 * 2**20
"""The floor: a lower limit would make saves crawl without relieving the machine."""
MOST: Final = 16 * 2**30

PRESSED: Final = 10.0
"""Percent of the last ten seconds in which something waited for memory: the limit is halved."""
RELIEVED: Final = 1.0
"""Below this the limit may rise again."""
STEPS: Final = 8
"""A lowered limit rises again in this many steps."""
NOTICED: Final = 16
"""Changes smaller than this part of the whole are ignored."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The memory of the system at one moment."""

    limit: int  #: bytes that control groups and the machine allow in total
    free: int  #: bytes that are available without evicting anything
    pressure: float = 0.0  #: percent of the last ten seconds in which something waited for memory

    def shared(self, sharers: int) -> MemoryReading:
        """Return the part of one of so many processes that have this memory."""
        return replace(self, limit=self.limit // sharers, free=self.free // sharers)


class MemorySource(Protocol):
    """The source of the figures; tests supply their own."""

    def read(self) -> MemoryReading:
        """Look once. Blocking, and quick."""
        ...


@final
class SystemMemory:
    """The figures of this machine and of the control groups of this process, versions 2 and 1.

    Args:
        root: Where `proc` and `sys` are, for tests.
    """

    __slots__ = ("_root",)

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self._root = Path(root)

    def read(self) -> MemoryReading:
        """Read a few small files of `/proc` and `/sys`. What cannot be read does not count."""
        groups = list(_groups(self._root))
        limits = [group.limit for group in groups if group.limit is not None]
        available = _field(_read(self._root / "proc" / "meminfo"), "MemAvailable:", "kB")
        available_bytes = [] if available is None else [available * 1024]
        allowed = [*limits, *available_bytes]
        memory = min(allowed) if allowed else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        room = [group.room for group in groups if group.room is not None]
        stalls = [_stalled(_read(self._root / "proc" / "pressure" / "memory"))]
        stalls += [_stalled(_read(group.path / "memory.pressure")) for group in groups[:1]]
        return MemoryReading(memory, min([*room, *(available_bytes or [memory])]), max(stalls))


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
    return auto_limit(SystemMemory(root).read())


def memory_domain(root: str | os.PathLike[str] = "/") -> str:
    """Return an id that is equal for all processes that share one memory, and for no others.

    That is the control group with the least limit around this process, as seen in its container; or the
    whole machine, as it was started, if none has less than the machine. Blocking: reads a few small files.

    Args:
        root: Where `proc` and `sys` are, for tests.
    """
    base = Path(root)
    machine = _read(base / "proc" / "sys" / "kernel" / "random" / "boot_id").strip()
    machine = machine or _read(base / "etc" / "machine-id").strip() or platform.node()
    total = (_field(_read(base / "proc" / "meminfo"), "MemTotal:", "kB") or 0) * 1024
    bounds = [(group.limit, group.path) for group in _groups(base) if group.limit is not None]
    limit, path = min(bounds, default=(0, base))
    if not bounds or (total and limit >= total):
        return machine

    try:
        return f"{machine} {path.stat().st_ino}"  # which every container sees alike
    except OSError:
        return f"{machine} {platform.node()}"


def free_memory(root: str | os.PathLike[str] = "/") -> int:
    """Return how many bytes this process can still get: from the machine, its control groups, its own limits.

    Blocking: reads a few small files.
    """
    free = SystemMemory(root).read().free
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    words = _read(Path(root) / "proc" / "self" / "statm").split()
    if soft == resource.RLIM_INFINITY or not words:
        return free

    return min(free, max(0, soft - int(words[0]) * resource.getpagesize()))


def check_available(path: str, nbytes: int, key_path: str) -> None:
    """Raise `InsufficientMemoryError` for a buffer larger than what this process can still get. Blocking.

    Args:
        path: Of the checkpoint that it is for, and below it the leaf.
        nbytes: Of the buffer. Up to `FREE_BYTES` nothing is compared.
        key_path: Of the leaf.
    """
    if nbytes <= FREE_BYTES:
        return

    free = free_memory()
    if nbytes > free:
        raise InsufficientMemoryError(path, nbytes, free, key_path)


def auto_limit(reading: MemoryReading) -> int:
    """Return a quarter of what is allowed, from 64 MiB to 16 GiB."""
    return min(max(reading.limit // 4, LEAST), MOST)


def adjusted_limit(limit: int, whole: int, leased: int, reading: MemoryReading) -> int:
    """Return the limit for the memory that is available now.

    It never exceeds half of the free memory. Leased bytes are penstock's own and count as free. Under
    pressure it is halved. Afterwards it rises again in steps. It stays between the floor and
    `whole`.

    Args:
        limit: The present one.
        whole: What it was in the beginning.
        leased: Bytes that are leased now.
        reading: What the system says now.
    """
    least = min(LEAST, whole)
    ceiling = min(whole, (reading.free + leased) // 2)
    wanted = min(limit, ceiling)
    if reading.pressure >= PRESSED:
        wanted = min(wanted, limit // 2)
    elif reading.pressure < RELIEVED and ceiling > limit:
        wanted = min(ceiling, limit + whole // STEPS)

    wanted = max(wanted, least)
    if abs(wanted - limit) < whole // NOTICED and wanted not in {least, whole}:
        return limit

    return wanted


@dataclass(frozen=True, slots=True)
class _Group:
    path: Path
    limit: int | None
    room: int | None  #: what of the limit is not in use, or could be reclaimed at once


def _groups(root: Path) -> Iterator[_Group]:
    """Yield the control groups of this process, from the innermost outwards."""
    hierarchy = root / "sys" / "fs" / "cgroup"
    for line in _read(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = f"{line}::".split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            yield from _groups_above(hierarchy, path, *names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _groups_above(hierarchy / "memory", path, *names)


def _groups_above(hierarchy: Path, path: str, most: str, used: str, reclaimable: str) -> Iterator[_Group]:
    # A limit binds all groups below it. In a container the path may be the host's, of which only
    # the root can be seen: what is not there is passed over.
    group = PurePosixPath("/", path.rstrip(":"))
    for outer in (group, *group.parents):
        folder = hierarchy / outer.relative_to("/")
        limit = _number(_read(folder / most))  # no limit is the word "max"
        in_use = _number(_read(folder / used))
        room = None
        if limit is not None and in_use is not None:
            cached = _field(_read(folder / "memory.stat"), reclaimable) or 0
            room = max(0, limit - in_use + cached)

        yield _Group(folder, limit, room)


def _stalled(text: str) -> float:
    """Read `some avg10=1.25 avg60=...`: the percentage over ten seconds."""
    for line in text.splitlines():
        if line.startswith("some "):
            for field in line.split():
                name, _, value = field.partition("=")
                if name == "avg10" and value.replace(".", "", 1).isdecimal():
                    return float(value)

    return 0.0


def _field(text: str, name: str, *unit: str) -> int | None:
    """Return the number on the line of this name; None if there is none, or it is in another unit."""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == [name] and tuple(words[2:]) == unit and len(words) > 1:
            return _number(words[1])

    return None


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
