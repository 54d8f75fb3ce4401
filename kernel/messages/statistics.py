"""What the driver measures about each stage: where the time goes, and which stage is the bottleneck."""

from __future__ import annotations

__all__ = (
    "Span",
    "StageMeter",
    "StageStatistics",
    "bottleneck",
    "stage_lines",
    "waited_for_memory_s",
)

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

from penstock.kernel.memory.memory_waits import MemoryWaits, with_waits


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work of one worker; times by `time.perf_counter`."""

    worker: int
    start: float
    end: float
    nbytes: int
    memory_wait_s: float = 0.0  #: of this time, waiting for the memory budget


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """A snapshot of one stage of one run. The four times are summed over its workers, and none overlap."""

    name: str
    workers: int
    n_in: int  #: messages taken
    n_out: int  #: messages passed on
    nbytes: int  #: array bytes in the messages taken
    busy_s: float  #: in the stage's own code
    starved_s: float  #: waiting for a message from upstream
    blocked_s: float  #: waiting for downstream to take one
    memory_wait_s: float = 0.0  #: waiting for bytes of the memory budget, or of the bytes in flight
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def longest_s(self) -> float:
        """Busy seconds of the busiest worker: idle siblings do not make a stage faster."""
        by_worker = [0.0] * self.workers
        for span in self.spans:
            by_worker[span.worker] += span.end - span.start - span.memory_wait_s

        return max(*by_worker, self.busy_s / self.workers)

    def __str__(self) -> str:
        return (
            f"{self.name}: worked {self.busy_s:.3f} s; waited {self.starved_s:.3f} s for input, "
            f"{self.blocked_s:.3f} s for output, {self.memory_wait_s:.3f} s for memory"
        )


def bottleneck(stages: Iterable[StageStatistics]) -> str | None:
    """Name the stage whose busiest worker worked longest; None if nothing ran."""
    ran = (stage for stage in stages if stage.n_in)
    busiest = max(ran, key=lambda stage: stage.longest_s, default=None)
    return busiest.name if busiest is not None else None


def waited_for_memory_s(stages: Iterable[StageStatistics]) -> float:
    """Seconds that all stages together waited for the memory budget."""
    return sum([stage.memory_wait_s for stage in stages])


def stage_lines(stages: Iterable[StageStatistics]) -> str:
    """A line for each stage, each after a line break."""
    return "".join([f"\n  {stage}" for stage in stages])


@final
class StageMeter:
    """Collects the figures of one stage while it runs. Used from one event loop.

    Args:
        name: Of the stage.
        workers: How many it has.
        clock: Seconds.
    """

    __slots__ = (
        "_blocked_s",
        "_busy_s",
        "_clock",
        "_memory_wait_s",
        "_n_in",
        "_n_out",
        "_name",
        "_nbytes",
        "_spans",
        "_starved_s",
        "_workers",
    )

    MAX_SPANS = 20_000  #: so that a run of any length keeps a bounded record

    def __init__(self, name: str, workers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._name = name
        self._workers = workers
        self._n_in = self._n_out = self._nbytes = 0
        self._busy_s = self._starved_s = self._blocked_s = self._memory_wait_s = 0.0
        self._spans: list[Span] = []

    def took(self, nbytes: int, starved_s: float) -> None:
        """Count a message taken from upstream after waiting `starved_s` for it."""
        self._n_in += 1
        self._nbytes += nbytes
        self._starved_s += starved_s

    def passed(self, blocked_s: float) -> None:
        """Count a message passed on after waiting `blocked_s` for downstream."""
        self._n_out += 1
        self._blocked_s += blocked_s

    @contextmanager
    def working(self, worker: int, nbytes: int = 0) -> Generator[None]:
        """Time a stretch of the stage's own work, and apart from it what of that is waiting for memory."""
        start, waits = self._clock(), MemoryWaits(self._clock)
        try:
            with with_waits(waits):
                yield
        finally:
            end, waited_s = self._clock(), waits.waited_s
            self._busy_s += end - start - waited_s
            self._memory_wait_s += waited_s
            if len(self._spans) < self.MAX_SPANS:
                self._spans.append(Span(worker, start, end, nbytes, waited_s))

    def statistics(self) -> StageStatistics:
        """Return a snapshot."""
        return StageStatistics(
            self._name,
            self._workers,
            self._n_in,
            self._n_out,
            self._nbytes,
            self._busy_s,
            self._starved_s,
            self._blocked_s,
            self._memory_wait_s,
            tuple(self._spans),
        )
