"""Options for how long the processes of a job wait for each other."""

from __future__ import annotations

__all__ = (
    "JobLimits",
    "JobOptions",
)

import os
from dataclasses import dataclass, field
from typing import final

from penstock.handlers.stores.publishing.paths import inside_of_process
from penstock.kernel.errors import ConfigError
from penstock.kernel.options import fit_fields


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

    join_s: float = field(default=600.0, metadata={"positive": True})
    write_s: float = field(default=3600.0, metadata={"positive": True})
    silence_s: float = field(default=30.0, metadata={"positive": True})
    beat_s: float = field(default=1.0, metadata={"positive": True})
    call_s: float = field(default=10.0, metadata={"positive": True})

    def __post_init__(self) -> None:
        fit_fields(self, "processes")
        if self.silence_s < 2 * self.beat_s:
            raise ConfigError("processes.silence_s", f"must be two beats ({2 * self.beat_s:g} s) at least")

    @property
    def patience_s(self) -> float:
        """Seconds that the others wait for the primary, which judges first."""
        return 1.5 * self.join_s + 2 * self.silence_s


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """`[job]`: which processes of a job save together, and on which disks.

    Attributes:
        active_processes: Those that do, by the index that jax gives them; None for all. The same in each of
            them. The others take no part and are not waited for. The lowest of them is the primary.
        local_root: A directory of this process alone, on a disk of its machine. To a path below it each
            process saves all that it holds, by itself; together they decide whether that counts. What
            follows `local_root` in the path is the same in all processes; `local_root` need not be.
        key_prefix: Tells what they agree about from what others agree about with the same processes and the
            same paths.

    Raises:
        ConfigError: If a process is named twice, or none is.
    """

    active_processes: tuple[int, ...] | None = None
    local_root: str | None = None
    key_prefix: str = ""

    def __post_init__(self) -> None:
        fit_fields(self, "job")
        if self.local_root is not None:
            root = os.path.abspath(os.path.expanduser(self.local_root))
            object.__setattr__(self, "local_root", root)
        if self.active_processes is None:
            return

        given = self.active_processes
        if not given or min(given) < 0 or len(set(given)) < len(given):
            problem = f"must be indices of processes, each once, as in (0, 1), not {given!r}"
            raise ConfigError("job.active_processes", problem)

        object.__setattr__(self, "active_processes", tuple(sorted(given)))

    def local_name(self, path: str) -> str | None:
        """Return what all processes call `path` if it is on local disks or in keepers; None if it is not.

        Args:
            path: Absolute, or the URL of a place in a bucket, which is on no disk.
        """
        kept = inside_of_process(path)
        if kept is not None:
            return f"in keepers: {kept}"

        root = self.local_root
        if root is None or not os.path.isabs(path) or os.path.commonpath([root, path]) != root:
            return None

        return os.path.relpath(path, root)
