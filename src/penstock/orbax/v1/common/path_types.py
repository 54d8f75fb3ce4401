"""Paths, and paths that are still being created."""

from __future__ import annotations

__all__ = ("Path", "PathAwaitingCreation", "PathLike")

from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

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
        """Where it will be."""
        ...

    async def await_creation(self) -> Path:
        """Return the path once it exists."""
        ...
