"""The agreement of the processes of a job, and the implementation for a single process."""

from __future__ import annotations

__all__ = (
    "Announcements",
    "Coordinator",
    "KeyValues",
    "Operation",
    "SharedReads",
    "SharesReads",
    "SingleProcessCoordinator",
    "SoleOperation",
)

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol, TypeVar, runtime_checkable

from penstock.kernel.protocols.capability import Capability

T = TypeVar("T")


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
    """One thing that all processes of a job do together; see `JointOperation` for what ends it.

    A process alone agrees with itself at once: see `SoleOperation`.
    """

    @property
    def identity(self) -> str:
        """A name that no other one has."""
        ...

    @property
    def path(self) -> str:
        """The path that it is about, as all processes call it."""
        ...

    @property
    def is_local(self) -> bool:
        """True if each process writes and publishes by itself, on its own disk."""
        ...

    @property
    def process_index(self) -> int: ...
    @property
    def processes(self) -> Sequence[int]:
        """The processes that take part, ascending. The first is the primary."""
        ...

    @property
    def is_primary(self) -> bool: ...
    @property
    def publishes(self) -> bool:
        """True if this process makes a place and publishes it: the primary; on local disks each."""
        ...

    @property
    def is_alone(self) -> bool:
        """True if no other process takes part."""
        ...

    def at(self, stage: str) -> None:
        """Note the stage that this process is in, for the error of the others if it falls silent."""
        ...

    def running(
        self, take_back: Callable[[], Awaitable[bool]] | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Join, and stay in touch with the others for as long as the body runs."""
        ...

    async def refuse(self, error: Exception) -> None:
        """Take no part, and tell the others why."""
        ...

    async def agree(
        self,
        plan: bytes,
        describe: Callable[[], Sequence[str]],
        begin: Callable[[Mapping[int, bytes]], Awaitable[tuple[str, bytes]]],
        beside: bytes = b"",
        enter: Callable[[str], Awaitable[None]] | None = None,
    ) -> tuple[str, bytes]:
        """Say what this process is asked to do; return once all are asked the same and the primary has begun.

        Called again, as by another stage, it waits for what the first call does and returns the same.

        Args:
            plan: A digest of it, and of whatever else must be equal. As long in all processes.
            describe: Returns it in words, called only if the plans differ: for each leaf its key path, a tab,
                and what it is.
            begin: Called in the primary, with what all say next to their plans, by index. Returns where to
                write, and what else the others are to know.
            beside: What else the primary is to know. It need not be equal.
            enter: Called in each process with the place, before this returns.

        Returns:
            What `begin` returned, in all processes.
        """
        ...

    async def meet(self, where: str) -> None:
        """Wait until all processes are here."""
        ...

    async def commit(
        self, bring: Callable[[], Awaitable[bytes]], merge: Callable[[Mapping[int, bytes]], Awaitable[T]]
    ) -> T | None:
        """Complete what all have written; return when nothing is left but to publish.

        Args:
            bring: Called in all processes but the primary: makes this process's part durable, and returns
                what the primary is to know of it. Nothing is written after that.
            merge: Called in the primary with the parts of the others, by index.

        Returns:
            What `merge` returned; None in the others, once the primary has decided to publish.
        """
        ...

    async def publish(self, publish: Callable[[], Awaitable[str | None]]) -> str | None:
        """Publish once all agree: the primary does, before the others; on local disks each does, together.

        Args:
            publish: Returns why what is whole was not published after all, as `Workspace.publish` does.

        Returns:
            What it returned in one of the processes, the same in all; None if it was published everywhere.
        """
        ...

    async def combine(self, part: bytes, combined: Callable[[Mapping[int, bytes]], bytes]) -> bytes:
        """Send a part; return the result of the primary's function of the parts of all, by index."""
        ...


class Announcements(Protocol):
    """Decisions that the primary makes alone and the others follow, by name; see `JobAnnouncements`."""

    async def tell(self, name: str, value: str, *, is_again: bool = False) -> None:
        """Announce a decision. Called by the primary.

        Args:
            name: What it is about.
            value: What was decided.
            is_again: Whether it replaces the last one of this name: the service did not take it.
        """
        ...

    async def hear(self, name: str, *, is_again: bool = False) -> str:
        """Return what the primary decided, as soon as it has. For the others.

        Args:
            name: What it is about.
            is_again: Whether the last call failed, and it is the same one that is asked for.
        """
        ...

    async def ask(self, what: str) -> None:
        """Tell the primary that something was asked of this process. For the others."""
        ...

    async def take(self, what: str) -> bool:
        """Return whether another process has asked for this since the last call. Called by the primary."""
        ...

    async def leave(self) -> None:
        """Ask and tell no more."""
        ...


class SharedReads(Protocol):
    """The reads that the processes of a job give each other; see `JobReads`."""

    async def turn(self, path: str) -> tuple[str, bytes | None]:
        """Return what another process read of `path`, or the turn of this one to read and to `tell`."""
        ...

    async def tell(self, turn: str, data: bytes) -> None:
        """Tell the others what was read; empty if there is nothing to tell. Never fails."""
        ...


@runtime_checkable
class SharesReads(Capability, Protocol):
    """A `Coordinator` by which one process reads what all of a job need. By any other, each reads itself."""

    def shared_reads(self) -> SharedReads | None:
        """Return how they share it, always the same; None if there are no other processes."""
        ...


class Coordinator(Protocol):
    """Lets the processes of one job agree. Every wait has a deadline."""

    @property
    def process_index(self) -> int:
        """The number of this process in the job, as jax counts them."""
        ...

    @property
    def processes(self) -> Sequence[int]:
        """The processes that take part, ascending. The first is the primary. This one need not be in it."""
        ...

    @property
    def is_primary(self) -> bool: ...
    def operation(self, path: str, *, is_local: bool = False) -> Operation:
        """Return an operation on `path`, to be joined with the other processes, if there are any.

        Args:
            path: What it is about, the same in all processes.
            is_local: Whether each of them publishes on its own disk.

        Raises:
            InactiveProcessError: If this process takes no part.
        """
        ...

    def announcements(self, about: str) -> Announcements | None:
        """Return the decisions of the primary about a topic; None if there are no other processes.

        Raises:
            InactiveProcessError: If this process takes no part.
        """
        ...

    async def count_neighbours(self, place: str) -> tuple[int, bool]:
        """Say that this process is in `place`, such as on a host; return how many of the job are.

        Returns:
            How many have said so, this one included; and whether all of the job have said where they are.

        Raises:
            CoordinationError: If the service cannot be reached.
        """
        ...


class SoleOperation:
    """The `Operation` of a process alone, which is the primary: it agrees at once, and nothing is sent.

    Args:
        path: What it is about.
        process_index: The number of this process in its job, of which the others take no part.
    """

    identity = ""  #: there are no others to tell it apart for
    is_local = False  #: what one process publishes is the whole
    is_primary = True
    publishes = True
    is_alone = True

    __slots__ = ("path", "process_index", "processes")

    def __init__(self, path: str = "", process_index: int = 0) -> None:
        self.path = path
        self.process_index = process_index
        self.processes: Sequence[int] = (process_index,)

    def at(self, stage: str) -> None:
        """Do nothing: there are no other processes."""

    def running(
        self, take_back: Callable[[], Awaitable[bool]] | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Return a context in which nothing happens."""
        return nullcontext()

    async def refuse(self, error: Exception) -> None:
        """Do nothing: there are no other processes."""

    async def agree(
        self,
        plan: bytes,
        describe: Callable[[], Sequence[str]],
        begin: Callable[[Mapping[int, bytes]], Awaitable[tuple[str, bytes]]],
        beside: bytes = b"",
        enter: Callable[[str], Awaitable[None]] | None = None,
    ) -> tuple[str, bytes]:
        """Begin."""
        place, told = await begin({self.process_index: beside})
        if enter is not None:
            await enter(place)

        return place, told

    async def meet(self, where: str) -> None:
        """All are here."""

    async def commit(
        self, bring: Callable[[], Awaitable[bytes]], merge: Callable[[Mapping[int, bytes]], Awaitable[T]]
    ) -> T | None:
        """Merge the parts of no others."""
        return await merge({})

    async def publish(self, publish: Callable[[], Awaitable[str | None]]) -> str | None:
        """Publish."""
        return await publish()

    async def combine(self, part: bytes, combined: Callable[[Mapping[int, bytes]], bytes]) -> bytes:
        """Return what `combined` makes of this process's part."""
        return combined({self.process_index: part})


class SingleProcessCoordinator:
    """The `Coordinator` of a job with one process, which is the primary. It never waits."""

    process_index = 0
    processes: Sequence[int] = (0,)
    is_primary = True

    __slots__ = ()

    def operation(self, path: str, *, is_local: bool = False) -> SoleOperation:
        """An operation of this process alone."""
        return SoleOperation(path)

    def announcements(self, about: str) -> None:
        """None: there are no other processes to obey."""
        return

    async def count_neighbours(self, place: str) -> tuple[int, bool]:
        """This one alone."""
        return 1, True
