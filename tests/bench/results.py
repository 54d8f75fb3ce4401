"""What a run measured: raw samples, and the few figures made of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

FORMAT = 2
IDLE = "idle"
"""What a `Stall` is of in which nothing was done: the noise floor."""


class Operation(StrEnum):
    """What is timed. In this order within a round."""

    WARM_UP = "warm_up"
    FIRST_SAVE = "first save of a process, one-shot"
    FIRST_RESTORE = "first restore of a process, one-shot"
    SAVE = "save"
    SECOND_SAVE = "second save, 5 % changed"
    RESTORE_JAX = "restore into jax, warm"
    RESTORE_NUMPY = "restore into numpy, warm"
    COLD_NUMPY = "restore into numpy, cold"
    RESHARD = "restore onto 4 devices, warm"
    METADATA = "metadata"
    OPEN = "open the manager"
    LATEST = "latest_step"
    ALL_STEPS = "all_steps"
    BEST = "open, then best_step over all"
    STEADY = "save, ten in a row"
    BESIDE_1 = "steps of training, a save each second"
    BESIDE_10 = "steps of training, a save each ten seconds"

    @property
    def reads(self) -> bool:
        """Whether it needs a checkpoint that is there."""
        return self not in SAVES

    @property
    def cold(self) -> bool:
        """Whether the page cache is dropped before it."""
        return self is Operation.COLD_NUMPY


SAVES = (Operation.SAVE, Operation.SECOND_SAVE, Operation.STEADY)


@dataclass(frozen=True)
class StageTime:
    """One stage of penstock in one operation; seconds, summed over its workers."""

    name: str
    busy_s: float
    starved_s: float
    blocked_s: float
    memory_wait_s: float = 0.0


@dataclass(frozen=True)
class Sample:
    """One timed operation."""

    workload: str
    contender: str
    operation: str
    round: int
    seconds: float
    staged_s: float | None = None  #: after which a background save gave the caller control
    nbytes_written: int | None = None  #: in files that an earlier checkpoint does not share
    io_bytes: int | None = None  #: what the kernel counted this process to write to storage
    cpu_s: float | None = None  #: processor seconds of all threads of the process


@dataclass(frozen=True)
class Stall:
    """The longest time for which a 1 ms heartbeat in the event loop did not run, beyond that 1 ms."""

    workload: str
    contender: str
    operation: str  #: or `IDLE`
    seconds: float
    loop: str = "asyncio"


@dataclass(frozen=True)
class Memory:
    """Peak of one operation in a process of its own, above what the process held before it."""

    workload: str
    contender: str
    operation: str
    extra_bytes: int  #: of anonymous and shared memory, sampled
    extra_hwm_bytes: int  #: of all resident pages, by the kernel; counts mapped files
    n_samples: int


@dataclass(frozen=True)
class Profile:
    """Where penstock's time went in one operation; taken apart from the timed rounds if it restores."""

    workload: str
    operation: str
    seconds: float
    stages: tuple[StageTime, ...]


@dataclass(frozen=True)
class Note:
    """Something that was not measured, and why; or that went wrong."""

    workload: str
    contender: str
    text: str
    failed: bool = False  #: not left out on purpose


@dataclass(frozen=True)
class Size:
    """How large a workload was in this run."""

    workload: str
    title: str
    n_leaves: int  #: or steps
    nbytes: int
    unit: str = "leaf"  #: of what there are so many


@dataclass(frozen=True)
class Quiet:
    """What else the machine did just before a workload."""

    workload: str
    load_1: float  #: the load average over a minute, our own earlier work included
    busy_cores: float  #: on average, within a second in which the benchmark did nothing


@dataclass
class Results:
    """All of a run, or of one workload of it."""

    sizes: list[Size] = field(default_factory=list[Size])
    samples: list[Sample] = field(default_factory=list[Sample])
    stalls: list[Stall] = field(default_factory=list[Stall])
    memory: list[Memory] = field(default_factory=list[Memory])
    profiles: list[Profile] = field(default_factory=list[Profile])
    notes: list[Note] = field(default_factory=list[Note])
    quiet: list[Quiet] = field(default_factory=list[Quiet])
    checked: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])

    def add(self, other: Results) -> None:
        """Append all of another run; a workload's size is the same in all of its processes."""
        for name in _KINDS:
            mine: list[Any] = getattr(self, name)
            mine.extend(found for found in getattr(other, name) if name != "sizes" or found not in mine)
        self.checked.extend(other.checked)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Results:
        results = cls()
        for name, kind in _KINDS.items():
            getattr(results, name).extend(kind(**each) for each in data[name])

        results.checked = [(work, who, what) for work, who, what in data["checked"]]
        results.profiles = [
            Profile(p.workload, p.operation, p.seconds, tuple(StageTime(**_mapping(s)) for s in p.stages))
            for p in results.profiles
        ]
        return results

    def seconds(self, workload: str, contender: str, operation: str) -> list[float]:
        """Durations of one operation, in order."""
        return [sample.seconds for sample in self._of(workload, contender, operation)]

    def staged(self, workload: str, contender: str, operation: str = Operation.SAVE) -> list[float]:
        """Times after which the caller had control, in order; empty if it saves in the foreground."""
        samples = self._of(workload, contender, operation)
        return [sample.staged_s for sample in samples if sample.staged_s is not None]

    def cpu(self, workload: str, contender: str, operation: str) -> list[float]:
        """Processor seconds of one operation, in order."""
        samples = self._of(workload, contender, operation)
        return [sample.cpu_s for sample in samples if sample.cpu_s is not None]

    def written(self, workload: str, contender: str, operation: str) -> list[int]:
        """Bytes written, in order."""
        samples = self._of(workload, contender, operation)
        return [sample.nbytes_written for sample in samples if sample.nbytes_written is not None]

    def size(self, workload: str) -> Size | None:
        return next((size for size in self.sizes if size.workload == workload), None)

    def extra_memory(self, workload: str, contender: str, operation: str) -> Memory | None:
        key = (workload, contender, operation)
        return next((m for m in self.memory if (m.workload, m.contender, m.operation) == key), None)

    def stalled(self, workload: str, contender: str, operation: str, loop: str = "asyncio") -> list[float]:
        key = (workload, contender, operation, loop)
        return [s.seconds for s in self.stalls if (s.workload, s.contender, s.operation, s.loop) == key]

    def _of(self, workload: str, contender: str, operation: str) -> list[Sample]:
        key = (workload, contender, operation)
        return [s for s in self.samples if (s.workload, s.contender, s.operation) == key]


_KINDS = {
    "sizes": Size,
    "samples": Sample,
    "stalls": Stall,
    "memory": Memory,
    "profiles": Profile,
    "notes": Note,
    "quiet": Quiet,
}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else asdict(value)


@dataclass(frozen=True)
class Spread:
    """Median and range."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread | None:
    """Return median and range; None if there is nothing."""
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found)) if found else None


def median(values: Iterable[float]) -> float | None:
    """Return the median; None if there is nothing."""
    found = list(values)
    return statistics.median(found) if found else None
