"""A handler that writes and reads its own files, and its work in the background."""

from __future__ import annotations

__all__ = ("Background", "FilesHandler")

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.protocols.capability import Capability
from penstock.kernel.protocols.leaf_handlers import Leaf, ReadLeaf


@dataclass(frozen=True, slots=True)
class Background:
    """Background work of a handler. It goes on if the task that waits for it is cancelled."""

    key_path: str  #: the leaves, or what else it is for
    handler: str  #: its name
    what: str  #: what it does, for messages
    wait: Callable[[], Awaitable[None]]  #: may be cancelled, and called again
    #: Takes what to call, in any thread, when work that was waited for is over. None: it ends with the save.
    when_over: Callable[[Callable[[], object]], object] | None = None


@runtime_checkable
class FilesHandler(Capability, Protocol):
    """A `LeafHandler` that stores its leaves in its own files, many leaves in one call.

    Its leaves travel in batches of their own, which name the handler. They have no pieces and no
    regions: `pieces` and `build` are never called.
    """

    @property
    def name(self) -> str:
        """Its name, for messages."""
        ...

    @property
    def inner(self) -> object:
        """The object that does the work. Leaves with the same one are saved together."""
        ...

    def write_size(self, leaves: Sequence[Leaf]) -> int:
        """Host bytes that saving the leaves together holds."""
        ...

    def read_sizes(self, leaves: Sequence[ReadLeaf]) -> Sequence[int | None]:
        """Host bytes that restoring each leaf holds; None where that is not known in advance."""
        ...

    async def save(self, leaves: Sequence[Leaf], threads: Threads, place: object = None) -> Background:
        """Copy the leaves, which go to one directory, and begin to write them.

        The writing cannot be interrupted: if a wait for it is cancelled, the writing goes on.

        Args:
            leaves: To be saved into `info.directory`, in flatten order.
            threads: For the wait.
            place: What it writes to. Kept alive, and so held, while a wait for the work goes on in a
                thread, whether that is awaited or not.

        Returns:
            The writing; waiting for it raises its errors.
        """
        ...

    async def load(self, leaves: Sequence[ReadLeaf]) -> Sequence[Any]:
        """Read the values of leaves that are in one directory, in order."""
        ...

    def finalizing(self, directory: str, threads: Threads, place: object = None) -> Background:
        """Return the call that completes the files in `directory`; it begins when first waited for.

        Once it has begun it cannot be interrupted. If a wait is cancelled before it begins, it never begins.

        Args:
            directory: Where the files are.
            threads: For the call.
            place: As for `save`.
        """
        ...
