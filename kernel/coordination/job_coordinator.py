"""The coordinator of a job with several processes."""

from __future__ import annotations

__all__ = ("JobCoordinator",)

from collections.abc import Mapping, Sequence
from typing import Final, final

from penstock.kernel.config.job_limits import JobLimits
from penstock.kernel.config.job_options import JobOptions
from penstock.kernel.coordination.announcements import JobAnnouncements
from penstock.kernel.coordination.job import Job
from penstock.kernel.coordination.joint_operation import JointOperation
from penstock.kernel.coordination.key_value_calls import KeyValueCalls
from penstock.kernel.coordination.operation_keys import ROOT
from penstock.kernel.coordination.procedures import Member
from penstock.kernel.coordination.shared_reads import JobReads
from penstock.kernel.errors import ConfigError, InactiveProcessError
from penstock.kernel.protocols.coordinator import KeyValues

PLACES: Final = f"{ROOT}/places/"
"""One key for each process, for as long as the job lives."""


@final
class JobCoordinator:
    """One process of a job agrees with the others, through a service of small values.

    Args:
        service: The same for all of them.
        process_index: Which one this is.
        process_count: How many the job has.
        limits: How long they wait for each other.
        options: Which of them take part; by default all. The first of those is the primary.

    Raises:
        ConfigError: If there is no such process.
    """

    __slots__ = ("_job", "_n_processes", "_place", "_reads")

    def __init__(
        self,
        service: KeyValues,
        process_index: int,
        process_count: int,
        limits: JobLimits | None = None,
        options: JobOptions | None = None,
    ) -> None:
        if not 0 <= process_index < process_count:
            raise ConfigError("process_index", f"must be from 0 to {process_count - 1}, not {process_index}")

        options = options or JobOptions()
        chosen = options.active_processes
        if chosen is not None and chosen[-1] >= process_count:
            problem = f"{chosen[-1]} is none of the job's, which are 0 to {process_count - 1}"
            raise ConfigError("job.active_processes", problem)

        everybody = range(process_count)
        processes = everybody if chosen is None or len(chosen) == process_count else chosen
        group = "" if processes is everybody else ",".join(map(str, processes))
        limits = limits or JobLimits()
        member = Member(process_index, processes, group, options.key_prefix or "", limits)
        self._job = Job(KeyValueCalls(service, limits.beat_s), member)
        self._reads = JobReads(self._job)
        self._n_processes = process_count
        self._place: str | None = None  # where this process has said that it is

    def nested(self) -> JobCoordinator:
        """Return a coordinator for parts of an operation of this one, for the event loop that runs here."""
        other = object.__new__(JobCoordinator)
        other._job = self._job.elsewhere()
        other._reads = JobReads(other._job)
        other._n_processes, other._place = self._n_processes, self._place
        return other

    @property
    def process_index(self) -> int:
        """The number of this process in the job."""
        return self._job.member.index

    @property
    def processes(self) -> Sequence[int]:
        """The processes that take part, ascending."""
        return self._job.member.processes

    @property
    def is_primary(self) -> bool:
        """True if this process judges, merges and publishes."""
        return self._job.member.is_primary

    @property
    def calls(self) -> Mapping[str, int]:
        """Counts of the calls of the service so far, by name."""
        return dict(self._job.calls.counted)

    def operation(self, path: str, *, is_local: bool = False) -> JointOperation | None:
        """Return an operation on `path`, to be joined with the others; None if this process is alone.

        Args:
            path: What it is about, the same in all processes.
            is_local: Whether each of them publishes on a disk of its own.

        Raises:
            InactiveProcessError: If this process takes no part.
        """
        return JointOperation(self._job, path, is_local=is_local) if self._has_others() else None

    def announcements(self, about: str) -> JobAnnouncements | None:
        """Return what the primary decides alone about something that lasts, such as a root of steps.

        Raises:
            InactiveProcessError: If this process takes no part.
        """
        return JobAnnouncements(self._job, about) if self._has_others() else None

    def shared_reads(self) -> JobReads | None:
        """Return how processes share what they read; None if this one is alone, or takes no part."""
        member = self._job.member
        return self._reads if member.count > 1 and member.index in member.processes else None

    async def count_neighbours(self, place: str) -> tuple[int, bool]:
        """Say where this process is, and count who is there; see `Coordinator`. It need not take part."""
        calls, index = self._job.calls, self._job.member.index
        if self._place != place:
            await calls.put(f"{PLACES}{index}", place.encode(), replace=True)
            self._place = place

        places = await calls.under(PLACES)
        here = [index for index, found in places.items() if found == place.encode()]
        return max(len(here), 1), len(places) >= self._n_processes

    def _has_others(self) -> bool:
        member = self._job.member
        if member.index not in member.processes:
            raise InactiveProcessError(member.index, member.processes)

        return member.count > 1
