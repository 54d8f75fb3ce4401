"""A job of several processes, as one of them sees it."""

from __future__ import annotations

__all__ = ("MOST_REMEMBERED", "Job")

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, final

from penstock.kernel.config.job_limits import JobLimits
from penstock.kernel.coordination.key_value_calls import KeyValueCalls
from penstock.kernel.coordination.operation_keys import join_key

MOST_REMEMBERED: Final = 4
"""How many operations the primary remembers to have ended well, should one who took part not leave them."""

MOST_LEFT: Final = 64
"""How many operations a process remembers to have left. It may find one of them once more, just forgotten."""


@final
@dataclass(slots=True, eq=False)
class Job:
    """What all operations of one process share."""

    calls: KeyValueCalls
    index: int
    processes: Sequence[int]  #: who takes part, ascending; `index` is one of them
    group: str = ""  #: `processes`, with commas between them; empty for all of the job
    about: str = ""  #: tells these processes from others of the same job that they know nothing of
    limits: JobLimits = field(default_factory=JobLimits)
    open: dict[str, str] = field(default_factory=dict[str, str])
    """The operations of the primary that can still be joined, by the key that says so."""
    ended: deque[str] = field(default_factory=deque[str])
    """The primary's operations that ended well, whose keys it deletes if nobody else has."""
    left: deque[str] = field(default_factory=lambda: deque[str](maxlen=MOST_LEFT))
    """The last operations that this process left."""

    @property
    def count(self) -> int:
        """How many take part."""
        return len(self.processes)

    @property
    def primary(self) -> int:
        """Who judges, merges and publishes: the first of them."""
        return self.processes[0]

    @property
    def is_primary(self) -> bool:
        """Whether this process is the primary."""
        return self.index == self.primary

    def join_key(self, path: str) -> str:
        """Return the key that says which operation on `path` these processes are to join."""
        return join_key(path, self.about, self.group)
