"""The interface of checkpoint handlers: they save an object to a given directory, and restore it."""

from __future__ import annotations

__all__ = (
    "AsyncCheckpointHandler",
    "CheckpointHandler",
    "DeferredPathAsyncCheckpointHandler",
    "is_durable",
    "saves_together",
    "wait_for_all",
)

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, cast

from penstock.blocking.background import run_sync
from penstock.orbax.substitution.counterparts import Counterpart
from penstock.orbax.v0.common.save_future import Future


class _Trees(Protocol):
    @property
    def has_own_records(self) -> bool: ...


class CheckpointHandler(Counterpart):
    """Saves and restores one kind of object. Use it through a `Checkpointer`, which makes saves atomic.

    Handlers that derive from Orbax's class of this name are such handlers, too.
    """

    _ORBAX_CLASS = ("", "CheckpointHandler")
    _ORBAX_NAME: ClassVar[str]  # of penstock's handlers: the name in `_CHECKPOINT_METADATA`
    _DURABLE: ClassVar[bool]  # of penstock's handlers: whether `save` syncs all that it writes
    _SAVES_TOGETHER: ClassVar[bool]  # likewise: whether several processes save one tree by it

    @abc.abstractmethod
    def save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Write an object into a directory that exists; return when it is written."""

    @abc.abstractmethod
    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the object that was written into a directory."""

    def metadata(self, directory: Any) -> Any | None:
        """Describe what was written into a directory without reading all of it. None by default."""
        return None

    def finalize(self, directory: Any) -> None:
        """Complete what was written, once, before it becomes visible. Does nothing by default."""

    def close(self) -> None:
        """Release the handler's resources. Does nothing by default."""

    @classmethod
    def typestr(cls) -> str:
        """The recorded name of the handler. Handlers that Orbax has, too, are recorded under its names."""
        return str(vars(cls).get("_ORBAX_NAME") or f"{cls.__module__}.{cls.__qualname__}")


class AsyncCheckpointHandler(CheckpointHandler):
    """A handler that returns once an object is copied, and writes it in the background."""

    _ORBAX_CLASS = ("", "AsyncCheckpointHandler")

    @abc.abstractmethod
    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Sequence[Future] | None:
        """Copy an object and begin to write it.

        Returns:
            Futures of work that is already running; when all are done, the object is written.
        """


class DeferredPathAsyncCheckpointHandler(AsyncCheckpointHandler):
    """A handler whose `async_save` also takes a directory still being created: a `PathAwaitingCreation`."""


def is_durable(handler: object) -> bool:
    """Whether a handler syncs what it writes. Files of other handlers are synced for them."""
    return bool(vars(type(handler)).get("_DURABLE", False))


def saves_together(handler: object) -> bool:
    """Whether a handler takes a `JointDirectory`, to save a whole checkpoint together with others."""
    if not vars(type(handler)).get("_SAVES_TOGETHER", False):
        return False

    return not cast("_Trees", handler).has_own_records


def wait_for_all(handler: Any, directory: Any, *args: Any, **kwargs: Any) -> None:
    """Save synchronously with a handler's `async_save`. Also inside a running event loop."""

    async def start() -> Sequence[Future]:
        return await handler.async_save(directory, *args, **kwargs) or ()

    for future in run_sync(start):
        future.result()
