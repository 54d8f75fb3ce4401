"""The keys of one operation in the coordination service.

| key | who sets it | what it says |
| --- | --- | --- |
| `penstock/join/<path>/<group>` | the primary | which operation who is to join; gone once all have come |
| `penstock/<id>/plan/<i>` | all others | what process i is asked to do, as a digest |
| `penstock/<id>/plan_here` | the last to come | all plans are there |
| `penstock/<id>/go` | the primary | where to write, or that plans differ |
| `penstock/<id>/tree/<k>` | the primary | its plan in words, in pieces, if they differ |
| `penstock/<id>/at/<i>` | each, again and again | where process i is; whose key is there has joined already |
| `penstock/<id>/met_<where>/<i>` | all others | process i is where all are to meet |
| `penstock/<id>/met_<where>_here` | the last to come | all others are there |
| `penstock/<id>/start_<where>` | the primary | so is it |
| `penstock/<id>/part/<i>` | all others | what process i wrote, durably |
| `penstock/<id>/part_here` | the last to come | all parts are there |
| `penstock/<id>/verdict` | the first to fail, or the primary | how the operation ends |
| `penstock/<id>/done/<i>` | all others | on local disks: whether process i has published |
| `penstock/<id>/done_here` | the last to come | on local disks: all have said so |
| `penstock/<id>/result` | the primary | whether it was published |
| `penstock/<id>/left` | each | how many have left; the last one deletes all of these, if none can join |
| `penstock/<id>/left_here` | the last of the others, after a failure | only the primary is left |
| `penstock/announced/<topic>/<group>` | the primary | which announcements the others are to hear |
| `penstock/ended/<i>/<n>` | the primary i | a failed operation whose keys are kept for those who come late |
| `penstock/ended/<i>/n` | the primary i | how many there were |
"""

from __future__ import annotations

__all__ = (
    "JOIN_FOLDER",
    "JoinRecord",
    "OperationKeys",
    "announcements_key",
    "join_folder",
    "join_key",
    "outcome_key",
)

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from penstock.kernel.errors import CoordinationError

ROOT = "penstock"
JOIN_FOLDER = f"{ROOT}/join/"


def join_folder(path: str, about: str = "") -> str:
    """Return the prefix of the keys that say which operations on `path` are to be joined, one for each group.

    Args:
        path: What the operation is about.
        about: Tells groups that know nothing of each other apart.
    """
    named = f"{about}\0{path}" if about else path  # no path has a null character
    return f"{JOIN_FOLDER}{_digest(named)}/"


def join_key(path: str, about: str = "", group: str = "") -> str:
    """Return the key that says which operation on `path` is to be joined.

    Args:
        path: What the operation is about.
        about: See `join_folder`.
        group: The processes that agree with each other; empty for all of a job.
    """
    return join_folder(path, about) + (_digest(group) if group else "all")


def announcements_key(topic: str, about: str = "", group: str = "") -> str:
    """Return the key that says which announcements about `topic` are to be joined. They wait for no one."""
    return join_key(topic, about, group).replace(JOIN_FOLDER, f"{ROOT}/announced/", 1)


def outcome_key(primary: int, at: int | None = None) -> str:
    """Return the key that says which failed operation is kept at this place; without one, how many were."""
    return f"{ROOT}/ended/{primary}/{'n' if at is None else at}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()


@final
@dataclass(frozen=True, slots=True)
class JoinRecord:
    """The content of a join key."""

    identity: str  #: of the operation
    group: str  #: the processes that are to join, with commas between them; empty for all of a job
    about: str  #: see `join_folder`
    path: str  #: what the operation is about

    def encoded(self) -> bytes:
        """Return the value to store."""
        return json.dumps([self.identity, self.group, self.about, self.path]).encode()

    @classmethod
    def decoded(cls, data: bytes) -> JoinRecord:
        """Read what `encoded` made.

        Raises:
            CoordinationError: If something else is stored there.
        """
        try:
            identity, group, about, path = map(str, json.loads(data))
        except (ValueError, TypeError) as error:
            raise CoordinationError(
                f"{data[:80]!r} is no operation: do all processes run one penstock?"
            ) from error

        return cls(identity, group, about, path)

    @property
    def primary(self) -> int:
        """The process that has begun it."""
        return int(self.group.split(",")[0]) if self.group else 0

    def shares_processes(self, processes: Sequence[int]) -> bool:
        """True if one of these processes is to join."""
        return not self.group or not set(processes).isdisjoint(map(int, self.group.split(",")))


@final
@dataclass(frozen=True, slots=True)
class OperationKeys:
    """The keys of the operation with this id."""

    identity: str

    @property
    def all(self) -> str:
        """The prefix of all of them."""
        return f"{ROOT}/{self.identity}/"

    @property
    def verdict(self) -> str:
        """The end of the operation."""
        return f"{self.all}verdict"

    @property
    def result(self) -> str:
        """The outcome of publishing."""
        return f"{self.all}result"

    @property
    def left(self) -> str:
        """Counts those who have left."""
        return f"{self.all}left"

    @property
    def go(self) -> str:
        """The place to write at."""
        return f"{self.all}go"

    def start(self, where: str) -> str:
        """The key that exists once all have met."""
        return f"{self.all}start_{where}"

    def each(self, what: str, index: int | None = None) -> str:
        """Return the prefix of the messages of all processes, or the key of one."""
        return f"{self.all}{what}/{'' if index is None else index}"

    def here(self, what: str) -> str:
        """Return the key that the last process to say `what` sets."""
        return f"{self.all}{what}_here"

    def counter(self, what: str) -> str:
        """Return the counter of the processes that said `what`."""
        return f"{self.all}{what}_n"
