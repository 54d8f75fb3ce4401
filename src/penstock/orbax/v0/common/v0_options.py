"""Options of handlers and checkpointers, under Orbax's names."""

from __future__ import annotations

__all__ = (
    "AsyncOptions",
    "AtomicityMode",
    "AtomicityOptions",
    "FileOptions",
    "MemoryLimitOptions",
    "MultiprocessingOptions",
    "PyTreeMetadataOptions",
    "check_primary_host",
)

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax

from penstock.kernel.errors import ConfigError

_jax: Any = jax


@dataclass
class AsyncOptions:
    """How saves go on in the background.

    Attributes:
        timeout_secs: Seconds that a save may take once it is staged.
        barrier_sync_fn: Kept for the processes of one job to agree; one process needs none.
        post_finalization_callback: Called in the background, before the checkpoint gets its own name.
        create_directories_asynchronously: Without effect: making a directory is no work to speak of.
    """

    timeout_secs: int = 1200
    barrier_sync_fn: Callable[..., Any] | None = None
    post_finalization_callback: Callable[[], None] | None = None
    create_directories_asynchronously: bool = True


@dataclass
class MultiprocessingOptions:
    """Which processes save.

    Attributes:
        primary_host: The process that writes what is written once; None: every process does.
        active_processes: The processes that take part; None: all of the job. One waits for no other.
        barrier_sync_key_prefix: Begins the names of the barriers, to tell several savers apart; one process
            has none.
    """

    primary_host: int | None = 0
    active_processes: set[int] | None = None
    barrier_sync_key_prefix: str | None = None


def check_primary_host(primary_host: int | None) -> None:
    """Refuse a primary host that is not there: nobody would write what is written once.

    Raises:
        ConfigError: If the job has no such process. It is a ValueError.
    """
    if primary_host is not None and not 0 <= primary_host < _jax.process_count():
        problem = f"is {primary_host}, and the processes of the job are 0 to {_jax.process_count() - 1}"
        raise ConfigError("primary_host", problem)


class AtomicityMode(str, Enum):  # noqa: UP042  # as in Orbax, its text is not its value
    """How it is told that a checkpoint is complete."""

    AUTO = "auto"
    COMMIT_FILE = "commit_file"
    ATOMIC_RENAME = "atomic_rename"


@dataclass(frozen=True)
class AtomicityOptions:
    """How a checkpoint becomes visible.

    Attributes:
        mode: `ATOMIC_RENAME`: it is built beside its place, and renamed; it has a commit mark, too.
            `COMMIT_FILE`: it is built in its place, and is complete when it has its commit mark.
            `AUTO` is the former.
        allow_legacy_atomic_rename: Whether a checkpoint without a commit mark may be complete in
            the mode `COMMIT_FILE`.
    """

    mode: AtomicityMode = AtomicityMode.AUTO
    allow_legacy_atomic_rename: bool = False


@dataclass(frozen=True)
class FileOptions:
    """What directories are like.

    Attributes:
        path_permission_mode: Permissions of the directories of a checkpoint, as in `0o750`.
        skip_sync_file_validations: Without effect: whether something lies at the destination is
            always looked at.
    """

    path_permission_mode: int | None = None
    skip_sync_file_validations: bool = False


@dataclass
class MemoryLimitOptions:
    """Bounds the host memory of a save.

    Attributes:
        max_transfer_concurrent_gb: Gigabytes that are copied from devices at once, at most.
    """

    max_transfer_concurrent_gb: int | None = None


@dataclass
class PyTreeMetadataOptions:
    """How the structure of a tree is recorded.

    Attributes:
        support_rich_types: Whether it is recorded which sequences are tuples, and of which class named
            tuples are; and whether tuples are restored as such without an item, where that is recorded.
            Named tuples are restored as dicts then.
    """

    support_rich_types: bool = False
