"""The coordinator of a job with several processes."""

from __future__ import annotations

__all__ = ("JobCoordinator",)

from collections.abc import Mapping
from typing import final

from penstock.kernel.config.job_limits import JobLimits
from penstock.kernel.coordination.announcements import JobAnnouncements
from penstock.kernel.coordination.job import Job
from penstock.kernel.coordination.joint_operation import JointOperation
from penstock.kernel.coordination.key_value_calls import KeyValueCalls
from penstock.kernel.errors import ConfigError
from penstock.kernel.protocols.coordinator import KeyValues


@final
class JobCoordinator:
    """How one process of a job agrees with the others, through a service of small values.

    Args:
        service: The same for all of them.
        process_index: Which one this is. The first, 0, is the primary.
        process_count: How many there are.
        limits: How long they wait for each other.
    """

    __slots__ = ("_job",)

    def __init__(
        self,
        service: KeyValues,
        process_index: int,
        process_count: int,
        limits: JobLimits | None = None,
    ) -> None:
        if not 0 <= process_index < process_count:
            raise ConfigError("process_index", f"must be from 0 to {process_count - 1}, not {process_index}")

        self._job = Job(KeyValueCalls(service), process_index, process_count, limits or JobLimits())

    @property
    def process_index(self) -> int:
        """Which process this is."""
        return self._job.index

    @property
    def process_count(self) -> int:
        """How many processes the job has."""
        return self._job.count

    @property
    def is_primary(self) -> bool:
        """Whether this process judges, merges and publishes."""
        return self._job.is_primary

    @property
    def calls(self) -> Mapping[str, int]:
        """How often each call of the service was made, so far."""
        return dict(self._job.calls.counted)

    def operation(self, path: str) -> JointOperation:
        """Return an operation on `path`, to be joined with the other processes."""
        return JointOperation(self._job, path)

    def announcements(self, about: str) -> JobAnnouncements:
        """Return what the primary decides alone about something that lasts, such as a root of steps."""
        return JobAnnouncements(self._job, about)
