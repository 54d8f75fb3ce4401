"""The place where a save builds a checkpoint, and a base that is read, as the stages see them."""

from __future__ import annotations

__all__ = ("BuildPlace", "Overwrite", "StateRead")

from typing import Literal, Protocol, TypeAlias

from penstock.kernel.errors import ReplacedError, StorageError

Overwrite: TypeAlias = bool | Literal["delete-first"]
"""True if what is at a path may be replaced; `"delete-first"` if it may go before the new one is there."""


class BuildPlace(Protocol):
    """Builds a checkpoint under a temporary path, and makes it visible under its own.

    Nothing is written before it is opened or entered. It raises a `PenstockError` if the store refuses.

    Attributes:
        identity: The `Store.identity` of what was built; set by `publish`.
        left_behind: Why something could not be removed from the place.
        published: Whether the checkpoint is visible under its own name.
        stranded: Why it does not count as published, though it is whole: its keeper is lost, or that of
            another process of the job. Without a keeper, this process alone can read it, under its own name,
            as long as this object is there.
    """

    identity: object
    left_behind: StorageError | None
    published: bool
    stranded: str | None

    @property
    def temporary(self) -> str:
        """The path where it is built."""
        ...

    def path(self, relative: str) -> str:
        """Return where a file of the checkpoint is built; the place itself if `relative` is empty."""
        ...

    def check(self) -> None:
        """Check that the save can be published, before anything is written. Blocking."""
        ...

    def build_below(self, folder: str) -> None:
        """Build in `folder` below the place. Before `open`."""
        ...

    def keep(self, mark: str) -> None:
        """Go on with an abandoned build that has an entry `mark`, and leave this one if it fails with one.

        Before `open`. Blocking.
        """
        ...

    async def open(self, directory: str = "") -> None:
        """Make the place, and `directory` in it, unless that was done before."""
        ...

    async def enter(self, place: str) -> None:
        """Begin to write, once the primary of a job builds in `place`; on its own disk, `open`."""
        ...

    def make_directory(self, relative: str) -> None:
        """Make a directory of the checkpoint, with those that it is in. Blocking."""
        ...

    async def restart(self) -> None:
        """Remove everything built so far, and begin again with the next `open`."""
        ...

    async def publish(self) -> str | None:
        """Make the checkpoint visible under its own path, in one step and durably; return `stranded`."""
        ...

    async def take_back(self) -> bool:
        """Take the place away from a primary that is silent; return whether it can publish no more."""
        ...

    async def discard(self) -> None:
        """Remove everything built and not published."""
        ...

    async def withdraw(self) -> None:
        """Remove what was published, unless it replaced something."""
        ...

    def release(self) -> None:
        """Let other saves build here. Idempotent."""
        ...


class StateRead(Protocol):
    """One attempt to read a checkpoint, which may be replaced meanwhile."""

    @property
    def identity(self) -> object:
        """Its `Store.identity` before anything was read."""
        ...

    @property
    def replaced(self) -> ReplacedError | None:
        """The error raised because it was replaced; None so far."""
        ...
