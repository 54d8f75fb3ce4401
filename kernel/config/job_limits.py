"""Options for how long the processes of a job wait for each other."""

from __future__ import annotations

__all__ = ("JobLimits",)

from dataclasses import dataclass
from typing import final

from penstock.kernel.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """`[processes]`: how long the processes of a job wait for each other, in seconds.

    Attributes:
        join_s: For the others to begin the same save, once this one has.
        write_s: For the others to have written their parts, once this one has, and for the primary to
            publish them. One that is slow but alive is waited for this long.
        silence_s: For a sign of life. Well above what a process that holds Python's lock can be late.
        beat_s: Between two signs of life.
        call_s: For the service to answer when this process gives up.
    """

    join_s: float = 600.0
    write_s: float = 3600.0
    silence_s: float = 30.0
    beat_s: float = 1.0
    call_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("join_s", "write_s", "silence_s", "beat_s", "call_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"processes.{name}", f"must be positive, not {getattr(self, name)!r}")

        if self.silence_s < 2 * self.beat_s:
            raise ConfigError("processes.silence_s", f"must be two beats ({2 * self.beat_s:g} s) at least")

    @property
    def patience_s(self) -> float:
        """Seconds that the others wait for the primary, which judges first."""
        return 1.5 * self.join_s + 2 * self.silence_s
