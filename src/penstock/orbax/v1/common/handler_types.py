"""The interface of checkpointable handlers."""

from __future__ import annotations

__all__ = (
    "AbstractCheckpointable",
    "Checkpointable",
    "CheckpointableHandler",
    "StatefulCheckpointable",
    "typestr",
)

from collections.abc import Awaitable
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from penstock.orbax.v1.common.path_types import Path, PathAwaitingCreation

Checkpointable: TypeAlias = Any
AbstractCheckpointable: TypeAlias = Any

T = TypeVar("T")
AbstractT = TypeVar("AbstractT")


@runtime_checkable
class StatefulCheckpointable(Protocol):
    """An object that saves itself, and loads itself in place."""

    async def save(self, directory: PathAwaitingCreation) -> Awaitable[None]:
        """Begin to save; see `CheckpointableHandler.save`."""
        ...

    async def load(self, directory: Path) -> Awaitable[None]:
        """Begin to load; see `CheckpointableHandler.load`."""
        ...


@runtime_checkable
class CheckpointableHandler(Protocol[T, AbstractT]):
    """Saves and loads one kind of object, each in its own directory.

    Any object with these methods is one. `save` and `load` run while the caller waits; the awaitable that
    they return is awaited in the background.
    """

    async def save(self, directory: PathAwaitingCreation, checkpointable: T) -> Awaitable[None]:
        """Copy what is needed from an object, which may change once this returns.

        Args:
            directory: Where to write. It may not exist yet: await its creation in the returned
                awaitable, not here.
            checkpointable: The object.

        Returns:
            An awaitable that writes it.
        """
        ...

    async def load(self, directory: Path, abstract_checkpointable: AbstractT | None = None) -> Awaitable[T]:
        """Begin to load what was saved in a directory, as requested; with None as it was saved.

        Returns:
            An awaitable of the object.
        """
        ...

    async def metadata(self, directory: Path) -> AbstractT:
        """Describe what was saved, in a form that `load` takes."""
        ...

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether `save` takes this object."""
        ...

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Whether `load` takes this, which is not None; None if that depends on what was saved."""
        ...


def typestr(handler_cls: type[Any]) -> str:
    """Return the name that a checkpoint records of a handler; penstock's are recorded as Orbax's."""
    recorded: str | None = vars(handler_cls).get("RECORDED_AS")
    return recorded or f"{handler_cls.__module__}.{handler_cls.__qualname__}"
