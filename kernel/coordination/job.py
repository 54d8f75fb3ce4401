"""A job of several processes, as one of them sees it."""

from __future__ import annotations

__all__ = ("Job", "JobLimits")

from collections import deque
from dataclasses import dataclass, field
from typing import Final, final

from penstock.kernel.coordination.key_value_calls import KeyValueCalls
from penstock.kernel.errors import ConfigError

PRIMARY: Final = 0
MOST_OUTCOMES: Final = 4
"""Of how many unread operations the outcome is kept, for those who come late."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """How long the processes of a job wait for each other, in seconds.

    Args:
        join_s: For the others to begin the same save, once this one has.
        silence_s: For a sign of life. Well above what a process that holds Python's lock can be late.
        beat_s: Between two signs of life.
        call_s: For the service to answer when this process gives up.
    """

    join_s: float = 600.0
    silence_s: float = 30.0
    beat_s: float = 1.0
    call_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("join_s", "silence_s", "beat_s", "call_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"processes.{name}", f"must be positive, not {getattr(self, name)!r}")

        if self.silence_s < 2 * self.beat_s:
            raise ConfigError("processes.silence_s", f"must be two beats ({2 * self.beat_s:g} s) at least")

    @property
    def patience_s(self) -> float:
        """How long the others wait for the primary, who judges first."""
        return 1.5 * self.join_s + 2 * self.silence_s


@final
@dataclass(slots=True, eq=False)
class Job:
    """What all operations of one process share."""

    calls: KeyValueCalls
    index: int
    count: int
    limits: JobLimits = field(default_factory=JobLimits)
    joined: dict[str, str] = field(default_factory=dict[str, str])  #: the last operation by its path's digest
    ended: deque[str] = field(default_factory=deque[str])  #: whose outcomes the primary still has to forget

    @property
    def is_primary(self) -> bool:
        """Whether this process judges, merges and publishes."""
        return self.index == PRIMARY
