"""Options of handlers and checkpointers, under Orbax's names, and the module `path.atomicity`.

Orbax's classes of temporary paths are names here of the ways that a checkpoint becomes visible: penstock
builds and publishes by itself, and asks a class only which way it stands for.
"""

from __future__ import annotations

__all__ = (
    "COMMIT_SUCCESS_FILE",
    "TMP_DIR_SUFFIX",
    "AsyncOptions",
    "AtomicRenameTemporaryPath",
    "AtomicityMode",
    "AtomicityOptions",
    "CommitFileTemporaryPath",
    "FileOptions",
    "MemoryLimitOptions",
    "MultiprocessingOptions",
    "PyTreeMetadataOptions",
    "TemporaryPath",
    "check_primary_host",
    "get_default_temporary_path_class",
    "get_item_default_temporary_path_class",
)

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Final, Protocol, cast

import jax

from penstock import JobOptions
from penstock.embedding import file_names
from penstock.errors import ConfigError, InactiveProcessError
from penstock.orbax.installation import ORBAX
from penstock.orbax.item_files import bucket_url

_jax: Any = jax


@dataclass
class AsyncOptions:
    """The options of saves in the background.

    Attributes:
        timeout_secs: How long a save may take after staging, in seconds.
        barrier_sync_fn: Has no effect: there are no barriers.
        post_finalization_callback: Called in the background, before the checkpoint gets its own name.
        create_directories_asynchronously: Has no effect: creating a directory takes no time worth saving.
    """

    timeout_secs: int = 1200
    barrier_sync_fn: Callable[..., Any] | None = None
    post_finalization_callback: Callable[[], None] | None = None
    create_directories_asynchronously: bool = True


@dataclass
class MultiprocessingOptions:
    """The processes that save.

    Attributes:
        primary_host: The process that publishes; None: every process saves by itself. If several save
            together, it is the first of them.
        active_processes: The processes that take part; None for all of the job. The others may not save.
        barrier_sync_key_prefix: Tells these saves from others to the same paths. There are no barriers.
    """

    primary_host: int | None = 0
    active_processes: set[int] | None = None
    barrier_sync_key_prefix: str | None = None


class Processes(Protocol):
    """The options of either API that say which processes save."""

    @property
    def primary_host(self) -> int | None: ...
    @property
    def active_processes(self) -> set[int] | None: ...
    @property
    def barrier_sync_key_prefix(self) -> str | None: ...


def check_primary_host(primary_host: int | None) -> None:
    """Refuse a primary host that does not exist: what is written once would not be written.

    Raises:
        ConfigError: If the job has no such process. It is a ValueError.
    """
    if primary_host is not None and not 0 <= primary_host < _jax.process_count():
        problem = f"is {primary_host}, and the processes of the job are 0 to {_jax.process_count() - 1}"
        raise ConfigError("primary_host", problem)


def is_publisher(options: Processes) -> bool:
    """Return whether this process publishes: what it saves by itself, or what several save together."""
    return saving_processes(options)[0] == int(_jax.process_index())


def saving_processes(options: Processes) -> Sequence[int]:
    """Return the processes that save together, ascending. The first publishes.

    With the primary host None each saves by itself: this one alone.
    """
    if options.primary_host is None:
        return (int(_jax.process_index()),)

    everyone = range(int(_jax.process_count()))
    return sorted(options.active_processes) if options.active_processes and len(everyone) > 1 else everyone


def job_options(options: Processes) -> JobOptions:
    """Return the same as an option of penstock's Checkpointer."""
    some = tuple(options.active_processes) if options.active_processes else None
    return JobOptions(active_processes=some, key_prefix=options.barrier_sync_key_prefix or "")


def check_processes(options: Processes) -> None:
    """Refuse unsupported options about processes.

    Raises:
        ConfigError: If the primary host does not exist, or publishes what several processes save and is not
            the first of them. It is a ValueError.
        InactiveProcessError: If this process is to take no part. It is a ValueError, too.
    """
    check_primary_host(options.primary_host)
    saving, index = saving_processes(options), int(_jax.process_index())
    if index not in saving:
        raise InactiveProcessError(index, saving)
    if len(saving) > 1 and options.primary_host != saving[0]:
        who = f"process {saving[0]} publishes what several processes save together"
        raise ConfigError("primary_host", f"is {options.primary_host}, and {who}")


class AtomicityMode(str, Enum):  # noqa: UP042  # as in Orbax, its text is not its value
    """The ways to show that a checkpoint is complete."""

    AUTO = "auto"
    COMMIT_FILE = "commit_file"
    ATOMIC_RENAME = "atomic_rename"


@dataclass(frozen=True)
class AtomicityOptions:
    """The way that a checkpoint becomes visible.

    Attributes:
        mode: `ATOMIC_RENAME` builds it next to its place and renames it; it has a commit mark, too.
            `COMMIT_FILE` builds it in its place; it is complete once it has its commit mark.
            `AUTO` is the former.
        allow_legacy_atomic_rename: Whether a checkpoint without a commit mark may be complete in
            the mode `COMMIT_FILE`.
    """

    mode: AtomicityMode = AtomicityMode.AUTO
    allow_legacy_atomic_rename: bool = False


def is_in_place(atomicity: AtomicityOptions | None) -> bool:
    """Return whether a checkpoint is built under its own name."""
    return atomicity is not None and atomicity.mode is AtomicityMode.COMMIT_FILE


COMMIT_SUCCESS_FILE: Final = file_names.COMMIT_MARK
TMP_DIR_SUFFIX: Final = file_names.TEMPORARY_SUFFIX


def _get_tmp_directory(  # pyright: ignore[reportUnusedFunction]  # programs call it
    final_path: Any,
) -> Any:
    """Return the path that Orbax builds a checkpoint at: paxml's tests make one there."""
    return final_path.parent / (final_path.name + TMP_DIR_SUFFIX)


class TemporaryPath:
    """Base of the classes that stand for a way to publish. They have no instances here."""

    MODE: ClassVar[AtomicityMode]


class AtomicRenameTemporaryPath(TemporaryPath):
    """Stands for `AtomicityMode.ATOMIC_RENAME`."""

    MODE = AtomicityMode.ATOMIC_RENAME


class CommitFileTemporaryPath(TemporaryPath):
    """Stands for `AtomicityMode.COMMIT_FILE`."""

    MODE = AtomicityMode.COMMIT_FILE


_CLASSES: Final = {one.__name__: one for one in (AtomicRenameTemporaryPath, CommitFileTemporaryPath)}
_STEPS: Final = frozenset(
    {
        *("create", "finalize", "from_final", "from_temporary", "get", "get_awaitable_path", "get_final"),
        *("validate", "validate_final"),
    }
)
"""What Orbax calls of such a class."""


def chosen_atomicity(temporary_path_class: Any, options: AtomicityOptions | None) -> AtomicityOptions | None:
    """Return how a checkpoint becomes visible: what the class stands for, if there is one, or the options.

    Args:
        temporary_path_class: Ours or Orbax's, or derived from one of these; None for none.
        options: Of the caller; None for the defaults.

    Raises:
        ConfigError: If the class builds or publishes by itself. It is a ValueError.
    """
    if temporary_path_class is None:
        return options

    own: set[str] = set()
    for base in getattr(temporary_path_class, "__mro__", ()):
        known = _CLASSES.get(base.__name__) if base.__module__.startswith((__name__, ORBAX)) else None
        if known is None:
            own |= _STEPS & cast("dict[str, Any]", vars(base)).keys()
        elif own:
            break
        else:
            legacy = options is not None and options.allow_legacy_atomic_rename
            return AtomicityOptions(known.MODE, legacy)

    shown = getattr(temporary_path_class, "__qualname__", repr(temporary_path_class))
    what = f"has its own {', '.join(sorted(own))}" if own else "is no class of temporary paths"
    raise ConfigError(
        "temporary_path_class",
        f"{shown} {what}: penstock builds and publishes checkpoints itself, as {' or '.join(_CLASSES)}, "
        "or a class derived from one that replaces none of its steps",
    )


def get_default_temporary_path_class(
    path: str | os.PathLike[str], *, atomicity_options: AtomicityOptions | None = None
) -> type[TemporaryPath]:
    """Return the class that stands for the way of the options; by default for what the place has."""
    mode = AtomicityMode.AUTO if atomicity_options is None else atomicity_options.mode
    if mode is AtomicityMode.AUTO:
        mode = AtomicityMode.ATOMIC_RENAME if bucket_url(path) is None else AtomicityMode.COMMIT_FILE

    return next(one for one in _CLASSES.values() if one.MODE is mode)


get_item_default_temporary_path_class = get_default_temporary_path_class


def check_publishing(atomicity: AtomicityOptions | None, path_permission_mode: int | None) -> None:
    """Refuse a way to publish that several processes do not have.

    Raises:
        ConfigError: If it is one. It is a ValueError.
    """
    if atomicity is not None and atomicity.mode is AtomicityMode.COMMIT_FILE:
        raise ConfigError("atomicity_options", "several processes publish by a rename, not by a file")
    if path_permission_mode is not None:
        raise ConfigError("file_options", "several processes save with the permissions of the job")


def saves_jointly(options: Processes, atomicity: AtomicityOptions | None, mode: int | None) -> bool:
    """Return whether all processes that take part save together; False if this one saves by itself.

    Args:
        options: The processes.
        atomicity: How the checkpoint becomes visible.
        mode: The permissions of its directories.

    Raises:
        ConfigError: If they cannot save as is asked. It is a ValueError.
        InactiveProcessError: If this process is to take no part. It is a ValueError, too.
    """
    check_processes(options)
    jointly = len(saving_processes(options)) > 1
    if jointly:
        check_publishing(atomicity, mode)

    return jointly


@dataclass(frozen=True)
class FileOptions:
    """Permissions of directories.

    Attributes:
        path_permission_mode: Permissions of the directories of a checkpoint, as in `0o750`.
        skip_sync_file_validations: Has no effect: the destination is always checked.
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
    """The record of the structure of a tree.

    Attributes:
        support_rich_types: Whether it is recorded which sequences are tuples, and of which class named
            tuples are; and whether tuples are restored as such without an item, where that is recorded.
            Named tuples are restored as dicts then.
    """

    support_rich_types: bool = False
