"""Paths, paths that are still being created, and the names of steps."""

from __future__ import annotations

__all__ = (
    "Path",
    "PathAwaitingCreation",
    "PathLike",
    "step",
)

import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias, final, runtime_checkable

from anyio import Lock

from penstock.orbax.v1 import step_formats as step

if TYPE_CHECKING:
    from pathlib import Path
else:
    try:
        # What Orbax hands to handlers; it adds methods such as `rmtree` to those of pathlib.
        from etils.epath import Path
    except ImportError:
        from pathlib import Path

PathLike: TypeAlias = Path | str


@runtime_checkable
class PathAwaitingCreation(Protocol):
    """A directory that may not exist yet. Its name can be used at once, its content later."""

    def __truediv__(self, other: PathLike) -> PathAwaitingCreation: ...

    @property
    def path(self) -> Path:
        """Its path, once it is there."""
        ...

    async def await_creation(self) -> Path:
        """Return the path once it exists."""
        ...


@final
class PendingPath(PathAwaitingCreation):
    """A directory that is created, with those of all items, when it is first awaited.

    Args:
        path: Of the directory.
        make: Makes it; called once.
    """

    def __init__(self, path: Path, make: Callable[[], Awaitable[None]]) -> None:
        self._path = path
        self._make = make
        self._lock = Lock()
        self._made = False

    def __truediv__(self, other: PathLike) -> PathAwaitingCreation:
        return _PendingSubpath(self, self._path / os.fspath(other))

    @property
    def path(self) -> Path:
        """Its path, once it is there."""
        return self._path

    async def await_creation(self) -> Path:
        """Return the path once it exists; create it if necessary."""
        async with self._lock:
            if not self._made:
                await self._make()
                self._made = True

        return self._path


@final
class _PendingSubpath(PathAwaitingCreation):
    """A path below the directory. That of an item exists once the directory does; others are not created."""

    def __init__(self, root: PendingPath, path: Path) -> None:
        self._root = root
        self._path = path

    def __truediv__(self, other: PathLike) -> PathAwaitingCreation:
        return _PendingSubpath(self._root, self._path / os.fspath(other))

    @property
    def path(self) -> Path:
        return self._path

    async def await_creation(self) -> Path:
        await self._root.await_creation()
        return self._path


@final
class ExistingPath(PathAwaitingCreation):
    """A directory that exists already."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __truediv__(self, other: PathLike) -> PathAwaitingCreation:
        return ExistingPath(self._path / os.fspath(other))

    @property
    def path(self) -> Path:
        return self._path

    async def await_creation(self) -> Path:
        return self._path
