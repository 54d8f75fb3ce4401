"""A checkpoint of one tree that all processes of a job save together, under Orbax's names."""

from __future__ import annotations

__all__ = (
    "JointDirectory",
    "active_processes",
    "check_processes",
    "check_publishing",
    "is_joint",
    "is_publisher",
    "job_options",
)

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any, final

import jax

from penstock.kernel.config.job_options import JobOptions
from penstock.kernel.errors import ConfigError, InactiveProcessError
from penstock.orbax.v0.common.v0_options import (
    AtomicityMode,
    AtomicityOptions,
    FileOptions,
    MultiprocessingOptions,
    check_primary_host,
)

_jax: Any = jax


@final
@dataclass(frozen=True)
class JointDirectory(os.PathLike[str]):
    """Where a handler saves a whole checkpoint: together with the other processes, or to a bucket.

    Nothing is there yet: it appears in one step, when all have written. On a disk, a handler of a job of one
    process gets a directory instead, which exists, and which its checkpointer publishes.
    """

    path: str  #: of the checkpoint
    overwrite: bool  #: whether what lies there may be replaced
    custom_metadata: Mapping[str, Any] | None  #: JSON values kept with the checkpoint
    jointly: bool = True  #: whether the other processes of the job save there, too
    begun: Event = field(default_factory=Event, compare=False, repr=False)  #: once the others know of it

    def __fspath__(self) -> str:
        return self.path


def is_joint(options: MultiprocessingOptions) -> bool:
    """Whether several processes save together. With the primary host None each saves by itself."""
    return options.primary_host is not None and len(active_processes(options)) > 1


def is_publisher(options: MultiprocessingOptions) -> bool:
    """Whether this process publishes what several save together."""
    return active_processes(options)[0] == int(_jax.process_index())


def active_processes(options: MultiprocessingOptions) -> Sequence[int]:
    """Return which processes of the job take part, ascending. The first publishes."""
    everybody = range(int(_jax.process_count()))
    return sorted(options.active_processes) if options.active_processes and len(everybody) > 1 else everybody


def job_options(options: MultiprocessingOptions) -> JobOptions:
    """Return the same as an option of penstock's Checkpointer."""
    some = tuple(options.active_processes) if options.active_processes else None
    return JobOptions(active_processes=some, key_prefix=options.barrier_sync_key_prefix or "")


def check_processes(options: MultiprocessingOptions) -> None:
    """Refuse what is asked of processes and cannot be had.

    Raises:
        ConfigError: If the primary host does not exist, or publishes what several processes save and is not
            the first of them. It is a ValueError.
        InactiveProcessError: If this process is to take no part. It is a ValueError, too.
    """
    check_primary_host(options.primary_host)
    active, index = active_processes(options), int(_jax.process_index())
    if options.primary_host is not None and index not in active:
        raise InactiveProcessError(index, active)
    if is_joint(options) and options.primary_host != active[0]:
        who = f"process {active[0]} publishes what several processes save together"
        raise ConfigError("primary_host", f"is {options.primary_host}, and {who}")


def check_publishing(atomicity: AtomicityOptions | None, files: FileOptions | None) -> None:
    """Refuse a way to publish that several processes do not have.

    Raises:
        ConfigError: If it is one. It is a ValueError.
    """
    if atomicity is not None and atomicity.mode is AtomicityMode.COMMIT_FILE:
        raise ConfigError("atomicity_options", "several processes publish by a rename, not by a file")
    if files is not None and files.path_permission_mode is not None:
        raise ConfigError("file_options", "several processes save with the permissions of the job")
