"""A job of several processes, as one of them sees it."""

from __future__ import annotations

__all__ = ("MOST_OUTCOMES", "PRIMARY", "Job")

from collections import deque
from dataclasses import dataclass, field
from typing import Final, final

from penstock.kernel.config.job_limits import JobLimits
from penstock.kernel.coordination.key_value_calls import KeyValueCalls

PRIMARY: Final = 0
MOST_OUTCOMES: Final = 4
"""Of how many unread operations the outcome is kept, for those who come late."""


@final
@dataclass(slots=True, eq=False)
class Job:
    """What all operations of one process share."""

    calls: KeyValueCalls
    index: int
    count: int
    limits: JobLimits = field(default_factory=JobLimits)
    open: dict[str, str] = field(default_factory=dict[str, str])
    """The operations of the primary that can still be joined, by the key that says so."""
    ended: deque[str] = field(default_factory=deque[str])  #: whose outcomes the primary still has to forget

    @property
    def is_primary(self) -> bool:
        """Whether this process judges, merges and publishes."""
        return self.index == PRIMARY
