"""Reports of saves and restores in a small file next to the steps, for `penstock ui`: a flight recorder.

The file is not taken for a checkpoint: steps are found by their directories. Its size is bounded, and it is
written in the background, at most once a second. What is read back is untrusted.
"""

from __future__ import annotations

__all__ = (
    "Kept",
    "KeptBar",
    "KeptEvent",
    "KeptReport",
    "KeptRow",
    "KeptStage",
    "ReportKeeper",
    "copy_reports",
    "numbers_in",
    "read_reports",
)

import errno
import math
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeAlias, cast, final

import msgspec
from anyio import CancelScope, Event, current_time, get_cancelled_exc_class, move_on_after, sleep
from anyio.abc import TaskGroup
from structlog.stdlib import BoundLogger

from penstock.handlers.formats.orbax.file_names import REPORTS
from penstock.handlers.stores.publishing.paths import scheme_of
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import StorageError
from penstock.kernel.memory.byte_account import Peak
from penstock.kernel.memory.regulator import MemoryRegulator, RegulatorStatistics
from penstock.kernel.pipeline.statistics import StageStatistics
from penstock.kernel.protocols.stores import Store
from penstock.reports.diagnosis import bottleneck_of, wall_s
from penstock.reports.report import Promotion, Row, SaveReport, StageReport, size_text, timeline_rows

# The file is read and written whole. 1,000 reports without details are some 300 kB.
MOST_REPORTS: Final = 1000
MOST_BYTES: Final = 2**20
_MOST_EVENTS: Final = 500
_DETAILED: Final = 20  #: reports that keep their stages and their timeline
_DETAILED_AT_ONCE: Final = 5  #: of those that one write adds: they take milliseconds to make
_MOST_BARS: Final = 400  #: of one timeline
_MOST_ROWS: Final = 64
_MOST_LETTERS: Final = 300
_MOST_METRICS: Final = 16
_MOST_WAITING: Final = 100  #: reports that are not written yet
_LAST_DATE: Final = 253_402_300_799  #: seconds until the end of the year 9999

INTERVAL_S: Final = 1.0
"""Between two writes. Small saves may follow each other a hundred times a second."""

BUCKET_INTERVALS: Final = 15
"""As many times that is between two writes to buckets, where each is paid for."""

FLUSH_S: Final = 5.0
"""Seconds that leaving waits for the last write. A medium that hangs may take no more of a program's time."""

_Date: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=_LAST_DATE)]


@final
class KeptStage(msgspec.Struct, frozen=True):
    """Figures of one stage; seconds as in the table of a report."""

    name: str
    workers: int
    nbytes: int
    busy_s: float
    starved_s: float
    blocked_s: float
    memory_wait_s: float


@final
class KeptBar(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of time of one worker, in seconds from the first of any."""

    start_s: float
    seconds: float
    memory_wait_s: float  #: of these


@final
class KeptRow(msgspec.Struct, frozen=True):
    """The timeline of one worker."""

    label: str
    bars: tuple[KeptBar, ...]


@final
class KeptReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The report of one save or restore. Only the latest have an explanation, stages and rows."""

    name: str  #: of the checkpoint, in the directory of the file
    ended_at: _Date  #: wall clock, seconds since the epoch
    seconds: float  #: from the call until it was durable; of a restore, from the first to the last work
    kind: Literal["save", "restore"] = "save"
    tier: str = "root"  #: of a run, that it was saved into or restored from, as `memory`; `seconds` are its
    staged_s: float | None = None  #: from the call until the state might change; None of a restore
    n_leaves: int = 0
    nbytes: int = 0  #: array bytes
    nbytes_kept: int = 0  #: array bytes that were not written, for an earlier step holds them
    bottleneck: str = ""  #: the stage
    limited_by: Literal["", "busy", "memory_wait"] = ""  #: why it is the bottleneck
    peak_bytes: int = 0  #: of the memory budget, leased at most at once while it was under way
    cached_bytes: int = 0  #: of it, held by caches at its end
    limit_bytes: int = 0  #: the budget at its end
    process_bytes: int = 0  #: resident memory of the whole process at its end; 0 if the system does not say
    metrics: dict[str, float | None] = {}  #: of the step; None for what is not finite
    explanation: str = ""
    stages: tuple[KeptStage, ...] = ()
    rows: tuple[KeptRow, ...] = ()


@final
class KeptEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something else that happened."""

    at: _Date  #: wall clock, seconds since the epoch
    what: str
    """`opened` and `closed`: a manager. `save failed`, `save cancelled`, and likewise of a restore; `deleted`
    and `deletion failed`."""
    name: str = ""  #: of the checkpoint, if it is about one
    text: str = ""
    tier: str = ""  #: that a step was `promoted` to
    lag_s: float | None = None  #: from the beginning of its save until it was there, if that is known


@final
class Kept(msgspec.Struct, frozen=True):
    """All that is kept of one directory of checkpoints, each the latest last."""

    reports: tuple[KeptReport, ...] = ()
    events: tuple[KeptEvent, ...] = ()

    def joined(self, other: Kept, most: int) -> Kept:
        """Return both, as far as there is room. A checkpoint that was saved again has its last report."""
        saved = {report.name for report in other.reports if report.kind == "save"}
        before = [one for one in self.reports if one.kind != "save" or one.name not in saved]
        reports = [*before, *other.reports][-most:]
        plain = [_without_details(one) for one in reports[:-_DETAILED]]
        events = (*self.events, *other.events)[-_MOST_EVENTS:]
        return Kept((*plain, *reports[-_DETAILED:]), events)


MakeKept: TypeAlias = Callable[[bool], Kept]
"""Makes what was noted short, in a thread; with the details of a report or without."""


@final
class ReportKeeper:
    """Keeps what one Checkpointer does, in the directory of the checkpoints. An `Observer`.

    Used in the event loop, where it only takes notes: a task writes them. A failure to write is logged as
    `telemetry.failed`, once, and disturbs nothing.

    Args:
        most: How many reports are kept in one directory: 0 keeps none. None keeps `MOST_REPORTS` where a
            manager asks for it, and none elsewhere: what is next to a single checkpoint is not ours.
        memory: The budget.
        store_at: Returns the store of a path.
        writes: Whether this process writes for its job.
        events: Of the Checkpointer.
        interval_s: Between two writes.
        flush_s: How long `flush` may take.
    """

    __slots__ = (
        "_changed",
        "_due",
        "_events",
        "_failed",
        "_flush_s",
        "_hangs",
        "_interval_s",
        "_keeps_anywhere",
        "_known",
        "_labels",
        "_memory",
        "_metrics",
        "_most",
        "_noted",
        "_roots",
        "_store_at",
        "_under_way",
        "_writes",
    )

    def __init__(
        self,
        most: int | None,
        memory: MemoryRegulator,
        store_at: Callable[[str], Store],
        events: BoundLogger,
        *,
        writes: bool = True,
        interval_s: float = INTERVAL_S,
        flush_s: float = FLUSH_S,
    ) -> None:
        self._most = min(MOST_REPORTS if most is None else most, MOST_REPORTS)
        self._keeps_anywhere = most is not None
        self._memory = memory
        self._store_at = store_at
        self._writes = writes and self._most > 0
        self._events = events
        self._interval_s, self._flush_s = interval_s, flush_s
        self._roots: dict[str, str] = {}  # a directory of steps: the one that keeps its reports
        self._labels: dict[str, str] = {}  # of tiers, by their directories
        self._metrics: dict[str, dict[str, float | None]] = {}  # of saves to come, by path
        self._noted: dict[str, deque[MakeKept]] = {}  # not written yet, by directory
        self._due: set[str] = set()  # directories in which something else than opening and closing happened
        self._known: dict[str, Kept] = {}  # what is in the files in buckets
        self._changed = Event()
        self._under_way: CancelScope | None = None
        self._failed = self._hangs = False

    def keep_below(self, root: str, tiers: Mapping[str, str] = MappingProxyType({})) -> None:
        """Keep what happens to the steps in a directory of steps, and in its tiers, in that directory.

        Args:
            root: The directory.
            tiers: The label of each of its tiers, by its directory.
        """
        self._roots |= dict.fromkeys((root, *tiers), root)
        self._labels |= tiers

    def promoted(self, promotion: Promotion, /) -> None:
        """Note a step that has come to a tier, or to the root."""
        folder, name = self._place("save", promotion.path)
        if folder is not None:
            lag = "" if promotion.lag_s is None else f", {promotion.lag_s:.3f} s after its save began"
            tier = self._labels.get(os.path.dirname(promotion.path), promotion.tier)
            took = promotion.processor_s
            encoded = "" if took is None else f", encoded in {took:.3f} s of processor"
            text = f"to {tier} in {promotion.seconds:.3f} s: {size_text(promotion.nbytes)}{encoded}{lag}"
            self._note(folder, KeptEvent(time.time(), "promoted", name, text, tier, promotion.lag_s))

    def note_metrics(self, path: str, metrics: Mapping[str, Any] | None) -> None:
        """Note the metrics of a step that is about to be saved: they outlive it in its report."""
        if metrics and self._writes:
            numbers = islice(numbers_in(metrics), _MOST_METRICS)
            self._metrics[path] = {_short(name): value for name, value in numbers}
            if len(self._metrics) > _MOST_WAITING:  # of saves that never began
                del self._metrics[next(iter(self._metrics))]

    def note(self, root: str, what: str, name: str = "", text: str = "") -> None:
        """Note an event in a directory of steps whose reports are kept; in a tier of one, nothing."""
        self._note(root, KeptEvent(time.time(), what, name, _short(text)))

    def _note(self, root: str, event: KeptEvent) -> None:
        if self._roots.get(root) == root:
            # A manager that only looks, and saves nothing, leaves no file.
            self._add(root, partial(_kept_event, event), is_due=event.what not in ("opened", "closed"))

    @contextmanager
    def observing(self, kind: str, path: str) -> Generator[Callable[[StageReport], object]]:
        """Note the report of a save or a restore, or its failure."""
        folder, name = self._place(kind, path)
        if folder is None:
            yield _ignored
            return

        metrics = self._metrics.pop(os.path.join(folder, name), {}) if kind == "save" else {}
        with self._memory.watching_peak() as peak:
            try:
                yield lambda report: self._take(folder, name, self._tier_of(path), report, peak, metrics)
            except get_cancelled_exc_class():
                self.note(folder, f"{kind} cancelled", name)
                raise
            except BaseException as error:
                self.note(folder, f"{kind} failed", name, repr(error))
                raise

    def watching(self, statistics: object) -> AbstractContextManager[object]:
        """Watch nothing: the budget is looked at with each report."""
        return nullcontext()

    @contextmanager
    def writing(self, tasks: TaskGroup, threads: Threads) -> Generator[None]:
        """Write what is noted, in a task of `tasks`, for the time of the block; `flush` writes the last."""
        scope = CancelScope()
        if self._writes:
            tasks.start_soon(self._run, threads.leaving_calls(0.0), scope)
        try:
            yield
        finally:
            scope.cancel()
            if self._under_way is not None:
                self._under_way.deadline = current_time() + self._flush_s

    async def flush(self, threads: Threads) -> None:
        """Write what was noted since, for so many seconds at most.

        A write that hangs is left in its thread. Late, it replaces the file by what it is to hold.
        """
        if not self._hangs:
            with move_on_after(self._flush_s, shield=True):
                await self._write(threads.leaving_calls(0.0))

    async def _run(self, threads: Threads, scope: CancelScope) -> None:
        with scope:
            while True:
                await self._changed.wait()
                self._changed = Event()
                in_bucket = any(scheme_of(folder) is not None for folder in self._noted)
                with CancelScope(shield=True) as self._under_way:  # whose deadline is set on leaving
                    await self._write(threads)

                await sleep(self._interval_s * (BUCKET_INTERVALS if in_bucket else 1))

    def _place(self, kind: str, path: str) -> tuple[str | None, str]:
        """Return the directory that keeps the report, and what the checkpoint is called there."""
        if not self._writes:
            return None, ""

        folder, name = os.path.split(path)
        above, step = os.path.split(folder)
        if folder in self._roots:
            return self._roots[folder], name
        if above in self._roots:
            return self._roots[above], f"{step}/{name}"  # an item of a step

        # What is restored from elsewhere may be anybody's: nothing is written there.
        return (folder, name) if self._keeps_anywhere and kind == "save" else (None, "")

    def _tier_of(self, path: str) -> str:
        """Return the label of the tier that a checkpoint is in, or a step that has it as an item."""
        folder = os.path.dirname(path)
        return self._labels.get(folder) or self._labels.get(os.path.dirname(folder), "root")

    def _take(
        self,
        folder: str,
        name: str,
        tier: str,
        report: StageReport,
        peak: Peak,
        metrics: dict[str, float | None],
    ) -> None:
        budget = self._memory.statistics()
        self._add(folder, partial(_kept, report, name, tier, time.time(), budget, peak.nbytes, metrics))

    def _add(self, folder: str, make: MakeKept, *, is_due: bool = True) -> None:
        if self._writes:
            # A report has thousands of spans: it is made short in a thread, and few of them wait for that.
            self._noted.setdefault(folder, deque(maxlen=_MOST_WAITING)).append(make)
            if is_due:
                self._due.add(folder)
                self._changed.set()

    async def _write(self, threads: Threads) -> None:
        for folder in tuple(self._due.intersection(self._noted)):
            noted, self._hangs = self._noted.pop(folder), True
            known, add = self._known.get(folder), partial(_add, self._store_at(folder), folder)
            try:
                kept = await threads.run(add, known, noted, self._most)
                if scheme_of(folder) is not None:
                    self._known[folder] = kept  # each look there is paid for, and others rarely write
            except Exception as error:
                if not self._failed:
                    self._failed = True
                    self._events.warning("telemetry.failed", error=repr(error))

            self._hangs = False  # or it was left in its thread


def read_reports(store: Store, folder: str) -> Kept:
    """Return what is kept in a directory of steps; nothing if the file is damaged. Blocking.

    Raises:
        StorageError: If the medium refuses.
    """
    file = os.path.join(folder, REPORTS)
    try:
        if store.kind(file) != "file" or store.size(file) > MOST_BYTES:
            return Kept()

        return msgspec.json.decode(store.read_file(file), type=Kept)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Kept()
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return Kept()

        raise


def copy_reports(source: Store, folder: str, target: Store, copy: str) -> None:
    """Keep in a directory of steps what is kept in another one, of which its steps are copies. Blocking.

    What is kept there already stays, since it is about other saves.

    Raises:
        StorageError: If a medium refuses.
    """
    kept = read_reports(source, folder)
    if kept == Kept():
        return
    try:
        target.write_file(os.path.join(copy, REPORTS), msgspec.json.encode(kept), create=True)
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise


def _ignored(_: StageReport) -> None:
    """Take a report that is kept nowhere."""


def _add(store: Store, folder: str, known: Kept | None, noted: Iterable[MakeKept], most: int) -> Kept:
    """Add to the file of a directory, which must be there, and return all that is in it now."""
    if store.objects is None and store.kind(folder) != "directory":
        return Kept()  # it is gone, or the first save failed

    file, kept = os.path.join(folder, REPORTS), read_reports(store, folder) if known is None else known
    waiting = tuple(noted)
    for at, make in enumerate(waiting):
        kept = kept.joined(make(at >= len(waiting) - _DETAILED_AT_ONCE), most)

    data = msgspec.json.encode(kept)
    while len(data) > MOST_BYTES:  # of long names
        kept = Kept(kept.reports[len(kept.reports) // 2 + 1 :], kept.events[len(kept.events) // 2 + 1 :])
        data = msgspec.json.encode(kept)

    store.replace_file(file, data)  # a crash in the middle of a write would lose what led to it
    return kept


def _kept(
    report: StageReport,
    name: str,
    tier: str,
    ended_at: float,
    budget: RegulatorStatistics,
    peak_bytes: int,
    metrics: dict[str, float | None],
    has_details: bool,
) -> Kept:
    found, diagnosis = bottleneck_of(report.stages), report.diagnosed()
    # A budget that makes pieces small is why a stage is busy with them.
    why = "memory_wait" if diagnosis.limit == "memory" else "" if found is None else found.why
    kept = KeptReport(
        name,
        ended_at,
        _rounded(wall_s(report.stages)),
        "restore",
        tier,
        n_leaves=report.n_leaves,
        nbytes=report.nbytes,
        bottleneck="" if found is None else found.stage.name,
        limited_by=why,
        peak_bytes=peak_bytes,
        cached_bytes=budget.cached,
        limit_bytes=budget.limit,
        process_bytes=_process_bytes(),
        metrics=metrics,
        explanation=diagnosis.text if has_details else "",
        stages=tuple([_stage(stage) for stage in report.stages]) if has_details else (),
        rows=_rows(report.stages) if has_details else (),
    )
    if isinstance(report, SaveReport):
        kept = msgspec.structs.replace(
            kept,
            kind="save",
            seconds=_rounded(report.durable_s),
            staged_s=_rounded(report.staged_s),
            nbytes_kept=report.nbytes_kept,
        )

    return Kept((kept,))


def _kept_event(event: KeptEvent, _: bool) -> Kept:
    return Kept((), (event,))


def _without_details(report: KeptReport) -> KeptReport:
    if not (report.stages or report.rows or report.explanation):
        return report

    return msgspec.structs.replace(report, explanation="", stages=(), rows=())


def _stage(stage: StageStatistics) -> KeptStage:
    times = (stage.busy_s, stage.starved_s, stage.blocked_s, stage.memory_wait_s)
    return KeptStage(
        stage.name, stage.workers, stage.nbytes, *[_rounded(each / stage.workers) for each in times]
    )


def _rows(stages: tuple[StageStatistics, ...]) -> tuple[KeptRow, ...]:
    rows = timeline_rows(stages, 40)[:_MOST_ROWS]
    most = max(_MOST_BARS // max(len(rows), 1), 4)
    if any(len(row.bars) > most for row in rows):
        rows = timeline_rows(stages, most)[:_MOST_ROWS]

    return tuple([_row(row) for row in rows])


def _row(row: Row) -> KeptRow:
    bars = [(bar.start_s, bar.seconds, bar.memory_wait_s) for bar in row.bars]
    return KeptRow(row.label, tuple([KeptBar(*map(_rounded, bar)) for bar in bars]))


def _rounded(seconds: float) -> float:
    return round(seconds, 6) if math.isfinite(seconds) else 0.0


def numbers_in(metrics: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float | None]]:
    """Yield metrics by name, nested ones as `eval/loss`; None for one that JSON has no number for."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from numbers_in(cast("Mapping[str, Any]", value), f"{before}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield before + name, float(value) if math.isfinite(value) else None


def _short(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"


def _process_bytes() -> int:
    """Return the resident memory of this process; 0 where the system has no `/proc`."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    return 0
