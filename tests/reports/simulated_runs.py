"""Saves of a made-up machine, on a clock that nothing else moves, with the figures of their stages.

It has nothing in common with the model that is fitted to these: messages are copied, wait for budgets and for
workers, and share bandwidths, one event after another.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, replace

from penstock import SaveReport
from penstock.kernel import RunLimits, Span, StageStatistics
from penstock.kernel.pipeline import advice_of
from penstock.pipelines import save_pipeline
from penstock.reports.diagnosis import Settings

MIB = 2**20
DEFAULTS = Settings(4, 16 * MIB, 1024 * MIB, 128 * MIB)
_DOCUMENTS = 6  #: files of a commit, one after another


@dataclass(frozen=True)
class Machine:
    """What a message costs: in the store, and before it."""

    latency_s: float = 0.0
    stream_rate: float = math.inf  #: bytes per second
    total_rate: float = math.inf
    copy_rate: float = 2000.0 * MIB
    message_s: float = 0.001  #: of the event loop
    nbytes: int = 64 * MIB
    n_small: int = 1  #: messages of small leaves, of 50 KiB

    def sizes(self, settings: Settings) -> list[int]:
        """Return the messages of a save: small leaves first."""
        piece, left = settings.message_bytes, self.nbytes
        sizes = [50 * 1024] * self.n_small
        while left > 0:
            sizes.append(min(piece, left))
            left -= sizes[-1]

        return sizes

    def save(self, settings: Settings) -> SaveReport:
        """Save; return the report."""
        sizes = self.sizes(settings)
        copies, writes = self._flow(sizes, settings)
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
        limits = RunLimits(
            settings.message_bytes,
            2048,
            4 * MIB,
            settings.piece_bytes,
            settings.limit_bytes,
            settings.in_flight_bytes,
        )
        return SaveReport("/made/up", 8, self.nbytes, stages=stages, limits=limits)

    def _flow(self, sizes: list[int], settings: Settings) -> tuple[list[Span], list[Span]]:
        """Let every message be copied, and then written, within the budgets."""
        coming, staged = deque(sizes), deque[int]()
        idle = list(range(settings.concurrency))
        copies: list[Span] = []
        writes: list[Span] = []
        working: dict[int, tuple[float, float, int]] = {}  # when latency is over, bytes left, bytes
        began: dict[int, float] = {}
        now, memory, in_flight = 0.0, settings.limit_bytes, settings.in_flight_bytes
        copying: tuple[float, int] | None = None  # until when, and how many bytes
        asked_at = 0.0
        while coming or copying or staged or working:
            if copying is None and coming and memory >= min(coming[0], settings.limit_bytes):
                nbytes = coming.popleft()
                memory -= nbytes
                end = now + nbytes / self.copy_rate + self.message_s
                copies.append(Span(0, asked_at, end, nbytes, now - asked_at))
                copying = end, nbytes
            while staged and idle and in_flight >= min(staged[0], settings.in_flight_bytes):
                nbytes, worker = staged.popleft(), heapq.heappop(idle)
                in_flight -= nbytes
                working[worker] = now + self.latency_s, float(nbytes), nbytes
                began[worker] = now

            moving = [worker for worker, (ready, _, _) in working.items() if ready <= now]
            rate = min(self.stream_rate, self.total_rate / max(len(moving), 1))
            moments = [ready for ready, _, _ in working.values() if ready > now]
            moments += [now + (working[worker][1] / rate) for worker in moving]
            moments += [copying[0]] if copying else []
            then = min(moments)
            for worker in moving:
                ready, left, nbytes = working[worker]
                working[worker] = ready, left - (then - now) * rate if rate < math.inf else 0.0, nbytes

            now = then
            for worker in [worker for worker in moving if working[worker][1] <= 1e-3]:
                nbytes = working.pop(worker)[2]
                writes.append(Span(worker, began.pop(worker), now, nbytes))
                heapq.heappush(idle, worker)
                memory, in_flight = memory + nbytes, in_flight + nbytes

            if copying and copying[0] <= now:
                staged.append(copying[1])
                copying, asked_at = None, now

        return copies, writes
