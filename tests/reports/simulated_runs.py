"""Saves and restores of a made-up machine, on a clock that nothing else moves, with figures of their stages.

It has nothing in common with the model that is fitted to these: messages are copied, wait for budgets and for
workers, and share bandwidths, one event after another.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from penstock import RestoreReport, SaveReport
from penstock.kernel import RunLimits, Span, StageStatistics
from penstock.kernel.pipeline import advice_of
from penstock.pipelines import restore_pipeline, save_pipeline
from penstock.reports.diagnosis import Settings

Flow: TypeAlias = Literal["save", "restore"]
MIB = 2**20
DEFAULTS = Settings(4, 16 * MIB, 1024 * MIB, 128 * MIB)
_DOCUMENTS = 6  #: files of a commit, or to locate a checkpoint, one after another
_AHEAD = 2  #: messages that may wait for a reader: one is in its queue, one in the hands of the stage before


@dataclass(frozen=True)
class Machine:
    """What a message costs: in the store, and before or after it."""

    latency_s: float = 0.0
    stream_rate: float = math.inf  #: bytes per second
    total_rate: float = math.inf
    copy_rate: float = 2000.0 * MIB
    message_s: float = 0.001  #: of the event loop
    nbytes: int = 64 * MIB
    n_small: int = 1  #: messages of small leaves, of 50 KiB

    def sizes(self, settings: Settings) -> list[int]:
        """Return the messages of a run: small leaves first."""
        piece, left = settings.message_bytes, self.nbytes
        sizes = [50 * 1024] * self.n_small
        while left > 0:
            sizes.append(min(piece, left))
            left -= sizes[-1]

        return sizes

    def run(self, flow: Flow, settings: Settings) -> SaveReport | RestoreReport:
        """Save or restore; return the report."""
        return self.save(settings) if flow == "save" else self.restore(settings)

    def save(self, settings: Settings) -> SaveReport:
        """Save; return the report."""
        sizes = self.sizes(settings)
        copies, writes = self._saving(sizes, settings)
        written = max(span.end for span in writes)
        opened = max(span.end for span in copies)
        committing_s = _DOCUMENTS * (self.latency_s + 0.0005)
        commits = [Span(0, written, written + committing_s, 0)]
        steps = [Span(0, opened, opened + self.message_s, 0)] * len(sizes)
        waited_s = sum([span.memory_wait_s for span in copies])
        n, whole = len(sizes), sum(sizes)
        copying_s = sum([span.end - span.start for span in copies]) - waited_s
        writing_s = sum([span.end - span.start for span in writes])
        stages: tuple[StageStatistics, ...] = (
            StageStatistics("device_to_host", 1, 1, n, 0, copying_s, 0.0, 0.0, waited_s, tuple(copies)),
            StageStatistics("limit_bytes", 1, n, n, whole, n * self.message_s, 0.0, 0.0, 0.0, tuple(steps)),
            StageStatistics(
                "write", settings.concurrency, n, n, whole, writing_s, 0.0, 0.0, 0.0, tuple(writes)
            ),
            StageStatistics("commit", 1, n, 1, whole, committing_s, 0.0, 0.0, 0.0, tuple(commits)),
        )
        pipeline = save_pipeline()
        stages = tuple([replace(stage, advice=advice_of(pipeline[stage.name])) for stage in stages])
        return SaveReport("/made/up", 8, self.nbytes, stages=stages, limits=_limits(settings))

    def restore(self, settings: Settings) -> RestoreReport:
        """Restore; return the report."""
        sizes = self.sizes(settings)
        located = _DOCUMENTS * (self.latency_s + 0.0005)
        admitted, reads, built = self._restoring(sizes, settings, located)
        n, whole = len(sizes), sum(sizes)
        stages: tuple[StageStatistics, ...] = (
            StageStatistics("locate", 1, 1, 1, 0, located, 0.0, 0.0, 0.0, (Span(0, 0.0, located, 0),)),
            _stage("limit_bytes", 1, n, whole, admitted),
            _stage("read", settings.concurrency, n, whole, reads),
            _stage("host_to_device", 1, n, whole, built),
        )
        pipeline = restore_pipeline()
        stages = tuple([replace(stage, advice=advice_of(pipeline[stage.name])) for stage in stages])
        return RestoreReport("/made/up", 8, self.nbytes, stages=stages, limits=_limits(settings))

    def _saving(self, sizes: list[int], settings: Settings) -> tuple[list[Span], list[Span]]:
        """Let every message be copied, and then written, within the budgets."""
        coming, staged = deque(sizes), deque[int]()
        store = _Store(self, settings.concurrency)
        copies: list[Span] = []
        writes: list[Span] = []
        now, memory, in_flight = 0.0, settings.limit_bytes, settings.in_flight_bytes
        copying: tuple[float, int] | None = None  # until when, and how many bytes
        asked_at = 0.0
        while coming or copying or staged or store.is_busy:
            if copying is None and coming and memory >= min(coming[0], settings.limit_bytes):
                nbytes = coming.popleft()
                memory -= nbytes
                end = now + nbytes / self.copy_rate + self.message_s
                copies.append(Span(0, asked_at, end, nbytes, now - asked_at))
                copying = end, nbytes
            while staged and store.idle and in_flight >= min(staged[0], settings.in_flight_bytes):
                nbytes = staged.popleft()
                in_flight -= nbytes
                store.begin(nbytes, now)

            moments = store.moments(now) + ([copying[0]] if copying else [])
            then = min(moments)
            for span in store.move(now, then):
                writes.append(span)
                store.free(span.worker)
                memory, in_flight = memory + span.nbytes, in_flight + span.nbytes

            now = then
            if copying and copying[0] <= now:
                staged.append(copying[1])
                copying, asked_at = None, now

        return copies, writes

    def _restoring(
        self, sizes: list[int], settings: Settings, now: float
    ) -> tuple[list[Span], list[Span], list[Span]]:
        """Let every message be admitted to the budgets, read, and built, one of them at a time."""
        coming, offered, read = deque(sizes), deque[int](), deque[Span]()
        store = _Store(self, settings.concurrency)
        admitted: list[Span] = []
        reads: list[Span] = []
        built: list[Span] = []
        memory, in_flight = settings.limit_bytes, settings.in_flight_bytes
        asked_at: float | None = None
        while len(built) < len(sizes):
            entering = bool(admitted) and admitted[-1].end > now
            if coming and not entering and len(offered) < _AHEAD:
                asked_at = now if asked_at is None else asked_at
                most = min(memory / min(coming[0], settings.limit_bytes), in_flight / coming[0])
                if most >= 1 or (memory, in_flight) == (settings.limit_bytes, settings.in_flight_bytes):
                    nbytes = coming.popleft()
                    memory, in_flight = memory - nbytes, in_flight - nbytes
                    admitted.append(Span(0, asked_at, now + self.message_s, nbytes, now - asked_at))
                    asked_at = None
            if read and not (built and built[-1].end > now):  # and until then its reader waits
                span = read.popleft()
                store.free(span.worker)
                end = now + span.nbytes / self.copy_rate + self.message_s / 4
                built.append(Span(0, now, end, span.nbytes))
            while offered and store.idle:
                store.begin(offered.popleft(), now)

            ends = [one[-1].end for one in (admitted, built) if one and one[-1].end > now]
            then = min(store.moments(now) + ends)
            for span in store.move(now, then):
                reads.append(span)
                read.append(span)
                in_flight += span.nbytes

            offered.extend([one.nbytes for one in admitted[-1:] if now < one.end <= then])
            memory += sum([one.nbytes for one in built[-1:] if now < one.end <= then])
            now = then

        return admitted, reads, built


@dataclass
class _Store:
    """What is on its way to or from a store, and how far it is."""

    machine: Machine
    workers: int
    idle: list[int] = field(init=False)
    _working: dict[int, tuple[float, float, int]] = field(default_factory=dict[int, tuple[float, float, int]])
    """When latency is over, bytes left, bytes."""
    _began: dict[int, float] = field(default_factory=dict[int, float])

    def __post_init__(self) -> None:
        self.idle = list(range(self.workers))

    @property
    def is_busy(self) -> bool:
        return bool(self._working)

    def begin(self, nbytes: int, now: float) -> None:
        """Let an idle worker begin."""
        worker = heapq.heappop(self.idle)
        self._working[worker] = now + self.machine.latency_s, float(nbytes), nbytes
        self._began[worker] = now

    def free(self, worker: int) -> None:
        """Let a worker take another message."""
        heapq.heappush(self.idle, worker)

    def moments(self, now: float) -> list[float]:
        """Return when something changes, if nothing begins before."""
        moving, rate = self._moving(now)
        moments = [ready for ready, _, _ in self._working.values() if ready > now]
        return moments + [now + self._working[worker][1] / rate for worker in moving]

    def move(self, now: float, then: float) -> list[Span]:
        """Let time pass; return what ends."""
        moving, rate = self._moving(now)
        for worker in moving:
            ready, left, nbytes = self._working[worker]
            self._working[worker] = ready, left - (then - now) * rate if rate < math.inf else 0.0, nbytes

        ended = [worker for worker in moving if self._working[worker][1] <= 1e-3]
        return [Span(worker, self._began.pop(worker), then, self._working.pop(worker)[2]) for worker in ended]

    def _moving(self, now: float) -> tuple[Sequence[int], float]:
        """Return the workers whose bytes move, and the bytes per second of each."""
        moving = [worker for worker, (ready, _, _) in self._working.items() if ready <= now]
        return moving, min(self.machine.stream_rate, self.machine.total_rate / max(len(moving), 1))


def _stage(name: str, workers: int, n: int, nbytes: int, spans: Sequence[Span]) -> StageStatistics:
    waited_s = sum([span.memory_wait_s for span in spans])
    busy_s = sum([span.end - span.start for span in spans]) - waited_s
    return StageStatistics(name, workers, n, n, nbytes, busy_s, 0.0, 0.0, waited_s, tuple(spans))


def _limits(settings: Settings) -> RunLimits:
    return RunLimits(
        settings.message_bytes,
        2048,
        4 * MIB,
        settings.piece_bytes,
        settings.limit_bytes,
        settings.in_flight_bytes,
    )
