"""What every handler of a whole object is: saves it to a directory that it is given, and restores it."""

from __future__ import annotations

__all__ = (
    "AsyncCheckpointHandler",
    "CheckpointHandler",
    "DeferredPathAsyncCheckpointHandler",
    "is_durable",
    "wait_for_all",
)

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

from penstock.blocking.background import run_sync
from penstock.orbax.v0.common.save_future import Future


class CheckpointHandler(abc.ABC):
    """Saves and restores objects of some kind. To be used through a `Checkpointer`, which makes it atomic."""

    _ORBAX_NAME: ClassVar[str]  # of penstock's own: what `_CHECKPOINT_METADATA` calls it, for Orbax to read
    _DURABLE: ClassVar[bool]  # of penstock's own: whether all that `save` writes is synced

    @abc.abstractmethod
    def save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Write an object into a directory that exists; return when it is written."""

    @abc.abstractmethod
    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the object that was written into a directory."""

    def metadata(self, directory: Any) -> Any | None:
        """Say what was written into a directory, without reading all of it. By default nothing."""
        return None

    def finalize(self, directory: Any) -> None:  # noqa: B027  # not every one has something to complete
        """Complete what was written, once and before it becomes visible. By default nothing."""

    def close(self) -> None:  # noqa: B027  # nor to give back
        """Give back what the handler holds. By default nothing."""

    @classmethod
    def typestr(cls) -> str:
        """The name that is recorded of the handler: of those in Orbax it is theirs."""
        return str(vars(cls).get("_ORBAX_NAME") or f"{cls.__module__}.{cls.__qualname__}")


class AsyncCheckpointHandler(CheckpointHandler):
    """A handler that returns when an object is copied, and writes it in the background."""

    @abc.abstractmethod
    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Sequence[Future] | None:
        """Copy an object and begin to write it.

        Returns:
            Futures of the work that goes on already; when all are over, the object is written.
        """


class DeferredPathAsyncCheckpointHandler(AsyncCheckpointHandler):
    """One whose directory may be still under way when `async_save` is called: a `PathAwaitingCreation`."""


def is_durable(handler: object) -> bool:
    """Whether all that a handler writes is on the medium when it says so. Others need not care."""
    return bool(vars(type(handler)).get("_DURABLE", False))


def wait_for_all(handler: Any, directory: Any, *args: Any, **kwargs: Any) -> None:
    """Save synchronously with a handler's `async_save`. Also inside a running event loop."""

    async def start() -> Sequence[Future]:
        return await handler.async_save(directory, *args, **kwargs) or ()

    for future in run_sync(start):
        future.result()
