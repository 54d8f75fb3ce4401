"""The identity of a process across machines, and whether it has ended. Blocking; reads `/proc`."""

from __future__ import annotations

__all__ = (
    "ProcessIdentity",
    "ThisProcess",
    "this_process",
)

import json
import os
import socket
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, Final, cast, final

_FIRST_NAMESPACE: Final = "pid:[4026531836]"
"""That of a machine's own processes. Linux gives it this number always; a container has another one."""

_ENDED: Final = frozenset({"Z", "X"})
"""States of a process that has ended, and whose parent has not asked for its exit status."""


@final
@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, so that it differs from every other one, also on another machine or after a restart.

    What cannot be found out is empty.
    """

    host: str
    machine: str  #: its `/etc/machine-id`
    boot: str  #: differs each time that the machine is started
    namespace: str  #: where the number counts: containers count their own processes
    pid: int
    began: str  #: in clock ticks since the start of the machine: numbers of processes are used again

    @classmethod
    def mine(cls) -> ProcessIdentity:
        """Return the identity of the calling process."""
        pid = os.getpid()
        return cls(
            host=socket.gethostname(),
            machine=_text_of("/etc/machine-id"),
            boot=_text_of("/proc/sys/kernel/random/boot_id"),
            namespace=_namespace(),
            pid=pid,
            began=_state_of(pid)[1],
        )

    @classmethod
    def decode(cls, data: bytes) -> ProcessIdentity | None:
        """Return what `encode` made these bytes of; None if it did not."""
        try:
            found = json.loads(data)
        except ValueError:
            return None

        if not isinstance(found, dict):
            return None

        members = cast("dict[str, Any]", found)
        kinds = {field.name: int if field.name == "pid" else str for field in fields(cls)}
        if not all(type(members.get(name)) is kind for name, kind in kinds.items()):
            return None

        return cls(**{name: members[name] for name in kinds})

    def encode(self, **more: str) -> bytes:
        """Return it as JSON, with other members added."""
        return json.dumps(asdict(self) | more).encode()

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host}"

    def is_beside(self, other: ProcessIdentity) -> bool:
        """True if both are of one machine and container, so that each can see if the other has ended."""
        return bool(self.boot and self.namespace) and (self.boot, self.namespace) == (
            other.boot,
            other.namespace,
        )

    def has_ended(self, seen_by: ProcessIdentity) -> bool:
        """True if the process is known to be no more; when in doubt, it is at work.

        That is known of a process of this machine and container, and of one that this machine ran before it
        was started anew. A container is moved to other machines under its name, so a process of one may be
        at work although the machine is another one.

        Args:
            seen_by: The calling process.
        """
        if not self.boot or not seen_by.boot:
            return False
        if self.boot != seen_by.boot:
            return _is_restarted(self, seen_by)
        if not self.namespace or self.namespace != seen_by.namespace:
            return False

        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # it belongs to another user, and may be another process than then

        state, began = _state_of(self.pid)
        return state in _ENDED or (bool(self.began) and bool(began) and self.began != began)


@final
class ThisProcess:
    """The calling process, and the claims that it holds. Thread-safe.

    Claims on files and objects belong to the process, not to the store object that made them. So one that was
    given up, and whose file could not be removed, is in the way of no other object of the same process.
    """

    __slots__ = ("_held", "_lock", "identity", "key")

    def __init__(self) -> None:
        self.identity = ProcessIdentity.mine()
        self.key = uuid.uuid4().hex  #: stands in its claims: numbers of processes are not unique everywhere
        self._lock = Lock()
        self._held: set[str] = set()

    def hold(self, token: str) -> None:
        """Note that this process holds a claim."""
        with self._lock:
            self._held.add(token)

    def let_go(self, token: str) -> None:
        """Note that this process no longer holds a claim, even if its file is still there. Idempotent."""
        with self._lock:
            self._held.discard(token)

    def holds(self, token: str) -> bool:
        """True if this process holds a claim."""
        return token in self._held

    def has_given_up(self, key: str, token: str) -> bool:
        """True if a claim is this process's own and was let go.

        Args:
            key: Of the process that made the claim.
            token: Of the claim.
        """
        return key == self.key and token not in self._held


def this_process() -> ThisProcess:
    """Return the calling process: one object for all that ask. A fork has its own."""
    return _process_with(os.getpid())


@cache  # there is one process, and so one record of what it claims, whichever objects made the claims
def _process_with(pid: int) -> ThisProcess:
    del pid
    return ThisProcess()


def _is_restarted(earlier: ProcessIdentity, now: ProcessIdentity) -> bool:
    """True if both are of one machine, and of no container. Those of other machines were started, too."""
    is_one = bool(earlier.machine) and (earlier.machine, earlier.host) == (now.machine, now.host)
    return is_one and earlier.namespace == now.namespace == _FIRST_NAMESPACE


def _text_of(file: str) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return Path(file).read_text().strip()

    return ""


def _namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")

    return ""


def _state_of(pid: int) -> tuple[str, str]:
    """Return the state of a process, and when it began; empty if that cannot be found out."""
    with suppress(OSError, IndexError):
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return found[0], found[19]

    return "", ""
