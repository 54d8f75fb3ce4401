"""A checkpoint of one tree that all processes of a job save together, under Orbax's names."""

from __future__ import annotations

__all__ = ("JointDirectory", "check_processes", "is_joint")

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import jax

from penstock.kernel.errors import ConfigError
from penstock.orbax.v0.common.v0_options import MultiprocessingOptions, check_primary_host

_jax: Any = jax


@final
@dataclass(frozen=True)
class JointDirectory(os.PathLike[str]):
    """Where a tree handler saves a whole checkpoint, together with the other processes.

    Nothing is there yet: it appears in one step, when all have written. In a job of one process a handler
    gets a directory instead, which exists, and which its checkpointer publishes.
    """

    path: str  #: of the checkpoint
    overwrite: bool  #: whether what lies there may be replaced
    custom_metadata: Mapping[str, Any] | None  #: JSON values kept with the checkpoint

    def __fspath__(self) -> str:
        return self.path


def is_joint(options: MultiprocessingOptions) -> bool:
    """Whether several processes save together. With the primary host None each saves by itself."""
    return options.primary_host is not None and int(_jax.process_count()) > 1


def check_processes(options: MultiprocessingOptions) -> None:
    """Refuse what is asked of processes and cannot be had.

    Raises:
        ConfigError: If the primary host does not exist, or publishes in a job of several processes and is not
            process 0; or if only some processes are to take part. It is a ValueError.
    """
    check_primary_host(options.primary_host)
    if not is_joint(options):
        return
    if options.primary_host != 0:
        problem = f"is {options.primary_host}, and process 0 publishes what several processes save together"
        raise ConfigError("primary_host", problem)

    everybody = set(range(int(_jax.process_count())))
    if options.active_processes is not None and set(options.active_processes) != everybody:
        chosen = sorted(options.active_processes)
        raise ConfigError("active_processes", f"are {chosen}, and all processes of a job save together")
