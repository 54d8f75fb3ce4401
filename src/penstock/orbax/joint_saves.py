"""Saves of several processes, as handlers know them: who takes part, and where they write."""

from __future__ import annotations

__all__ = (
    "JointDirectory",
    "active_processes",
    "check_processes",
    "check_publishing",
    "described_json",
    "described_message",
    "is_joint",
    "is_publisher",
    "job_options",
    "joint_build_around",
    "joint_place",
    "writes_what_is_whole",
)

import hashlib
import json
import os
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, final

import jax

from penstock import JobOptions
from penstock.embedding import JointBuild
from penstock.errors import ConfigError, InactiveProcessError
from penstock.orbax.item_files import path_text
from penstock.orbax.options import (
    AtomicityMode,
    AtomicityOptions,
    Processes,
    check_primary_host,
)


@final
@dataclass(frozen=True)
class JointDirectory(os.PathLike[str]):
    """The place of a whole checkpoint that a handler saves: with the other processes, or to a bucket.

    Nothing is there yet: it appears in one step, when all have written. On a disk, a handler of a job of one
    process gets a directory instead, which exists, and which its checkpointer publishes.
    """

    path: str  #: of the checkpoint
    overwrite: bool  #: whether what is there may be replaced
    custom_metadata: Mapping[str, Any] | None  #: JSON values kept with the checkpoint
    jointly: bool = True  #: whether the other processes of the job save there, too
    begun: threading.Event = field(
        default_factory=threading.Event, compare=False, repr=False
    )  #: once the others know of it

    def __fspath__(self) -> str:
        return self.path


def is_joint(options: Processes) -> bool:
    """Return whether several processes save together. With the primary host None each saves by itself."""
    return options.primary_host is not None and len(active_processes(options)) > 1


def is_publisher(options: Processes) -> bool:
    """Return whether this process publishes what several save together."""
    return active_processes(options)[0] == int(_jax.process_index())


def active_processes(options: Processes) -> Sequence[int]:
    """Return which processes of the job take part, ascending. The first publishes."""
    everyone = range(int(_jax.process_count()))
    return sorted(options.active_processes) if options.active_processes and len(everyone) > 1 else everyone


def job_options(options: Processes) -> JobOptions:
    """Return the same as an option of penstock's Checkpointer."""
    some = tuple(options.active_processes) if options.active_processes else None
    return JobOptions(active_processes=some, key_prefix=options.barrier_sync_key_prefix or "")


def check_processes(options: Processes) -> None:
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


def check_publishing(atomicity: AtomicityOptions | None, path_permission_mode: int | None) -> None:
    """Refuse a way to publish that several processes do not have.

    Raises:
        ConfigError: If it is one. It is a ValueError.
    """
    if atomicity is not None and atomicity.mode is AtomicityMode.COMMIT_FILE:
        raise ConfigError("atomicity_options", "several processes publish by a rename, not by a file")
    if path_permission_mode is not None:
        raise ConfigError("file_options", "several processes save with the permissions of the job")


_jax: Any = jax

T = TypeVar("T")


@contextmanager
def joint_place(build: JointBuild) -> Generator[None]:
    """Make it known to handlers that are called inside that all processes call them, for files of a build.

    By a context variable, and not by what they are given: a user's handler calls those of trees with paths
    that it makes.
    """
    token = _IN_FORCE.set(build)
    try:
        yield
    finally:
        _IN_FORCE.reset(token)


def joint_build_around(directory: Any) -> JointBuild | None:
    """Return the build that a directory belongs to; None if this process writes into it by itself."""
    build = _IN_FORCE.get()
    if build is None:
        return None

    path = os.path.abspath(path_text(directory))
    return build if path == build.place or path.startswith(build.place + os.sep) else None


def writes_what_is_whole(directory: Any) -> bool:
    """Return whether this process writes what every process has whole: of several, the primary does."""
    build = joint_build_around(directory)
    return build is None or build.is_primary


_IN_FORCE: Final[ContextVar[JointBuild | None]] = ContextVar("penstock.orbax.joint_build", default=None)

SHOWN: Final = 200
"""Characters of a value that the other processes get as they are."""


def described_json(value: Any) -> str:
    """Describe a JSON value; one that JSON cannot hold in no detail, since its handler says what is wrong."""
    try:
        text = json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return "JSON"

    return f"JSON {text if len(text) <= SHOWN else f'{text[:SHOWN]}… {_digest(text.encode())}'}"


def described_message(message: Any) -> str:
    """Describe a protobuf message."""
    return f"a message {_digest(message.SerializeToString(deterministic=True))}"


def _digest(data: bytes) -> str:
    return f"with the SHA-256 {hashlib.sha256(data).hexdigest()}"
