"""Reports of recent saves, kept in a small file next to the checkpoints, for `penstock ui`.

The file is not taken for a checkpoint: steps are found by their directories. What is read back is untrusted.
"""

from __future__ import annotations

__all__ = ("REPORTS", "KeptBar", "KeptReport", "KeptRow", "KeptStage", "ReportKeeper", "read_reports")

import errno
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, final

import msgspec
from anyio import Lock

from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import StorageError
from penstock.kernel.pipeline.statistics import StageStatistics
from penstock.kernel.protocols.stores import Store
from penstock.reports.report import Row, SaveReport, timeline_rows

REPORTS: Final = "_PENSTOCK_REPORTS.json"
# The file is read and written whole after each save.
MOST_REPORTS: Final = 1000
_MOST_BYTES: Final = 2**24
_MOST_BARS: Final = 40  #: of one worker
_LAST_DATE: Final = 253_402_300_799  #: seconds until the end of the year 9999


@final
@dataclass(frozen=True, slots=True)
class KeptStage:
    """Figures of one stage; seconds as in the table of a report."""

    name: str
    workers: int
    nbytes: int
    busy_s: float
    starved_s: float
    blocked_s: float
    memory_wait_s: float


@final
@dataclass(frozen=True, slots=True)
class KeptBar:
    """A stretch of time of one worker, in seconds from the first of any."""

    start_s: float
    seconds: float
    memory_wait_s: float  #: of these


@final
@dataclass(frozen=True, slots=True)
class KeptRow:
    """The work of one worker."""

    label: str
    bars: tuple[KeptBar, ...]


@final
@dataclass(frozen=True, slots=True)
class KeptReport:
    """The report of one save."""

    name: str  #: of the checkpoint, in the directory of the file
    ended_at: Annotated[float, msgspec.Meta(ge=0, le=_LAST_DATE)]  #: wall clock, seconds since the epoch
    n_leaves: int
    nbytes: int  #: array bytes
    staged_s: float
    durable_s: float
    explanation: str
    stages: tuple[KeptStage, ...]
    rows: tuple[KeptRow, ...]


@final
class ReportKeeper:
    """Writes the files of one Checkpointer, one after another."""

    __slots__ = ("_turn",)

    def __init__(self) -> None:
        self._turn = Lock()

    async def keep(self, store: Store, threads: Threads, report: SaveReport, most: int) -> None:
        """Add a report to those next to its checkpoint, of which the last `most` are kept.

        Raises:
            StorageError: If the medium refuses.
        """
        folder, name = os.path.split(report.path)
        file, kept = os.path.join(folder, REPORTS), _kept(report, name, time.time())
        async with self._turn:
            await threads.run(partial(_add, store, file, kept, min(most, MOST_REPORTS)))


def read_reports(store: Store, folder: str) -> Sequence[KeptReport]:
    """Return the reports that are kept in a folder, the latest last; none if the file is damaged. Blocking.

    Raises:
        StorageError: If the medium refuses.
    """
    return _read(store, os.path.join(folder, REPORTS))


def _add(store: Store, file: str, report: KeptReport, most: int) -> None:
    before = [other for other in _read(store, file) if other.name != report.name]
    store.write_file(file, msgspec.json.encode([*before, report][-most:]))


def _read(store: Store, file: str) -> Sequence[KeptReport]:
    try:
        if store.kind(file) != "file" or store.size(file) > _MOST_BYTES:
            return ()

        return msgspec.json.decode(store.read_file(file), type=tuple[KeptReport, ...])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()  # another writer may be in the middle of it
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return ()

        raise


def _kept(report: SaveReport, name: str, ended_at: float) -> KeptReport:
    return KeptReport(
        name,
        ended_at,
        report.n_leaves,
        report.nbytes,
        _finite(report.staged_s),
        _finite(report.durable_s),
        report.explain(),
        tuple([_stage(stage) for stage in report.stages]),
        tuple([_row(row) for row in timeline_rows(report.stages, _MOST_BARS)]),
    )


def _stage(stage: StageStatistics) -> KeptStage:
    return KeptStage(
        stage.name,
        stage.workers,
        stage.nbytes,
        stage.busy_s / stage.workers,
        stage.starved_s / stage.workers,
        stage.blocked_s / stage.workers,
        stage.memory_wait_s / stage.workers,
    )


def _row(row: Row) -> KeptRow:
    return KeptRow(
        row.label, tuple([KeptBar(bar.start_s, bar.seconds, bar.memory_wait_s) for bar in row.bars])
    )


def _finite(seconds: float) -> float:
    return seconds if math.isfinite(seconds) else 0.0
