"""How the processes of a job agree, and the implementation for a single process."""

from __future__ import annotations

__all__ = (
    "Announcements",
    "Coordinator",
    "KeyValues",
    "Operation",
    "SingleProcessCoordinator",
)

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, final


class KeyValues(Protocol):
    """Small values that all processes of a job see: what a coordination service offers.

    Every call blocks, for a moment unless it says otherwise, and raises `CoordinationError` if the service
    cannot be reached. Keys are parts joined by slashes.
    """

    def put(self, key: str, value: bytes, replace: bool, /) -> bool:
        """Store a value; return False if there is one already and `replace` is off."""
        ...

    def wait(self, key: str, timeout_s: float, /) -> bytes | None:
        """Return a value as soon as there is one; None if that was not within `timeout_s`."""
        ...

    def under(self, prefix: str, /) -> Mapping[str, bytes]:
        """Return the values below `prefix`, by what follows it. A prefix ends with a slash."""
        ...

    def count(self, key: str, /) -> int:
        """Add one to a counter that starts at 0, and return it."""
        ...

    def delete(self, prefix: str, /) -> None:
        """Forget everything below `prefix`, or the one value of that key. Nothing need be there."""
        ...


class Operation(Protocol):
    """One thing that all processes of a job do together; see `JointOperation` for what ends it."""

    @property
    def identity(self) -> str:
        """What tells it from every other one."""
        ...

    @property
    def process_index(self) -> int: ...
    @property
    def is_primary(self) -> bool: ...
    def at(self, stage: str) -> None:
        """Note where this process is, for what the others say of it if it falls silent."""
        ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Join, and stay in touch with the others for as long as the body runs."""
        ...

    async def agree(self, plan: bytes, describe: Callable[[], Sequence[str]]) -> None:
        """Say what this process is asked to do; the primary waits for all, and compares."""
        ...

    async def begin(self, place: str) -> None:
        """Tell the others where to write. The primary's."""
        ...

    async def wait_begun(self, plan: bytes, describe: Callable[[], Sequence[str]]) -> str:
        """Return where to write. For the others."""
        ...

    async def bring(self, part: bytes) -> None:
        """Say that this process's part is durable. For the others."""
        ...

    async def parts(self) -> Mapping[int, bytes]:
        """Return the parts of the others, by index. The primary's."""
        ...

    async def decide(self) -> None:
        """Set the verdict that this is published. The primary's."""
        ...

    async def wait_decided(self) -> None:
        """Wait for the verdict. For the others."""
        ...

    async def tell_published(self) -> None:
        """Tell the others that it is visible. The primary's."""
        ...

    async def wait_published(self) -> None:
        """Wait until it is visible. For the others."""
        ...


class Announcements(Protocol):
    """What the primary decides alone and the others obey, by name; see `JobAnnouncements`."""

    async def tell(self, name: str, value: str) -> None:
        """Say what was decided. The primary's."""
        ...

    async def hear(self, name: str) -> str:
        """Return what the primary decided, as soon as it has. For the others."""
        ...

    async def ask(self, what: str) -> None:
        """Tell the primary that something was asked of this process. For the others."""
        ...

    async def take(self, what: str) -> bool:
        """Return whether any other process has asked this since the last call. The primary's."""
        ...

    async def leave(self) -> None:
        """Ask and tell no more."""
        ...


class Coordinator(Protocol):
    """How the processes of one job agree. Every wait has a deadline."""

    @property
    def process_index(self) -> int: ...
    @property
    def process_count(self) -> int: ...
    @property
    def is_primary(self) -> bool: ...
    def operation(self, path: str) -> Operation | None:
        """Return an operation on `path`, to be joined with the other processes; None if there are none."""
        ...

    def announcements(self, about: str) -> Announcements | None:
        """Return what the primary decides alone about something; None if there are no other processes."""
        ...


@final
class SingleProcessCoordinator:
    """The `Coordinator` of a job with one process, which is the primary. It never waits."""

    __slots__ = ()

    @property
    def process_index(self) -> int:
        """Always 0."""
        return 0

    @property
    def process_count(self) -> int:
        """Always 1."""
        return 1

    @property
    def is_primary(self) -> bool:
        """Always true."""
        return True

    def operation(self, path: str) -> None:
        """None: nobody need agree."""
        return

    def announcements(self, about: str) -> None:
        """None: nobody else need obey."""
        return
