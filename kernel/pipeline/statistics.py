"""Figures that the driver measures about each stage: where the time goes, and which one is the bottleneck."""

from __future__ import annotations

__all__ = (
    "Advice",
    "Advises",
    "Span",
    "StageMeter",
    "StageStatistics",
    "advice_of",
    "bottleneck",
    "combined",
    "waited_for_memory_s",
)

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, Protocol, final, runtime_checkable

from penstock.kernel.memory.byte_account import MEMORY_WAITS, MemoryWaits
from penstock.kernel.protocols.capability import Capability


@final
@dataclass(frozen=True, slots=True)
class Advice:
    """Advice for when a stage is the bottleneck: a sentence or two, which name an option."""

    busy: str = (
        "Give it more workers, if it has an option `concurrency`, or less to do."  #: it is busy all the time
    )
    memory_wait: str = "Raise `[memory] limit_bytes` (the argument `memory_limit`)."  #: it waits for memory
    few_leaves: str = ""  #: instead of `busy`, if their number cannot be why
    few_bytes: str = ""  #: instead of `busy`, if their number cannot be why


NO_ADVICE: Final = Advice()


@runtime_checkable
class Advises(Capability, Protocol):
    """A stage that says what to change if it is the bottleneck. `report.explain()` quotes it."""

    @property
    def advice(self) -> Advice: ...


def advice_of(stage: object) -> Advice:
    """Return the advice of a stage."""
    return stage.advice if isinstance(stage, Advises) else NO_ADVICE


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of time in which one worker was busy; times by `time.perf_counter`."""

    worker: int
    start: float
    end: float
    nbytes: int
    memory_wait_s: float = 0.0  #: of this time; the rest was busy


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
    queued_mean: float = 0.0  #: messages that waited for the stage, whenever it took one, on average
    queued_most: int = 0  #: and at most
    advice: Advice = field(default=NO_ADVICE, repr=False)  #: if it is the bottleneck

    @property
    def busiest_s(self) -> float:
        """Busy seconds of its busiest worker: idle siblings do not make a stage faster."""
        by_worker = [0.0] * self.workers
        for span in self.spans:
            by_worker[span.worker] += span.end - span.start - span.memory_wait_s

        return max(*by_worker, self.busy_s / self.workers)

    @property
    def throughput(self) -> float | None:
        """Bytes per second of work, with all its workers; None without bytes or work."""
        return self.nbytes / self.busiest_s if self.nbytes and self.busiest_s > 0 else None

    def __str__(self) -> str:
        return (
            f"{self.name}: busy {self.busy_s:.3f} s, starved {self.starved_s:.3f} s, "
            f"blocked {self.blocked_s:.3f} s, memory_wait {self.memory_wait_s:.3f} s"
        )


def bottleneck(stages: Iterable[StageStatistics]) -> str | None:
    """Name the stage whose busiest worker was busy longest; None if nothing ran."""
    ran = (stage for stage in stages if stage.n_in)
    busiest = max(ran, key=lambda stage: stage.busiest_s, default=None)
    return busiest.name if busiest is not None else None


def combined(stages: Iterable[StageStatistics]) -> tuple[StageStatistics, ...]:
    """Add up the figures of stages of one name, as of several runs."""
    sums: dict[str, StageStatistics] = {}
    for stage in stages:
        before = sums.get(stage.name)
        sums[stage.name] = stage if before is None else _added(before, stage)

    return tuple(sums.values())


def _added(one: StageStatistics, other: StageStatistics) -> StageStatistics:
    n_in = one.n_in + other.n_in
    queued = one.queued_mean * one.n_in + other.queued_mean * other.n_in
    return StageStatistics(
        one.name,
        max(one.workers, other.workers),
        n_in,
        one.n_out + other.n_out,
        one.nbytes + other.nbytes,
        one.busy_s + other.busy_s,
        one.starved_s + other.starved_s,
        one.blocked_s + other.blocked_s,
        one.memory_wait_s + other.memory_wait_s,
        (*one.spans, *other.spans),
        queued / n_in if n_in else 0.0,
        max(one.queued_most, other.queued_most),
        one.advice,
    )


def waited_for_memory_s(stages: Iterable[StageStatistics]) -> float:
    """Seconds that all stages together waited for the memory budget."""
    waited_s: float = sum(map(attrgetter("memory_wait_s"), stages))
    return waited_s


@final
class StageMeter:
    """Collects the figures of one stage while it runs. Used from one event loop.

    Args:
        name: Of the stage.
        workers: How many it has.
        clock: Seconds.
        advice: What to change if it is the bottleneck.
    """

    __slots__ = (
        "_advice",
        "_blocked_s",
        "_busy_s",
        "_memory_wait_s",
        "_n_in",
        "_n_out",
        "_name",
        "_nbytes",
        "_queued",
        "_queued_most",
        "_spans",
        "_starved_s",
        "_workers",
        "clock",
    )

    MAX_SPANS = 20_000  #: so that a run of any length keeps a bounded record

    def __init__(
        self,
        name: str,
        workers: int,
        clock: Callable[[], float] = time.perf_counter,
        advice: Advice = NO_ADVICE,
    ) -> None:
        self.clock = clock
        self._advice = advice
        self._name = name
        self._workers = workers
        self._n_in = self._n_out = self._nbytes = self._queued = self._queued_most = 0
        self._busy_s = self._starved_s = self._blocked_s = self._memory_wait_s = 0.0
        self._spans: list[Span] = []

    def took(self, nbytes: int, starved_s: float, queued: int = 0) -> None:
        """Count a message taken from upstream after waiting `starved_s` for it, `queued` more after it."""
        self._queued += queued
        self._queued_most = max(self._queued_most, queued)
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
        start, waits = self.clock(), MemoryWaits(self.clock)
        token = MEMORY_WAITS.set(waits)
        try:
            yield
        finally:
            MEMORY_WAITS.reset(token)
            end, waited_s = self.clock(), waits.waited_s
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
            self._queued / self._n_in if self._n_in else 0.0,
            self._queued_most,
            self._advice,
        )
