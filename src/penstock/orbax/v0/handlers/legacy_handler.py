"""Handlers whose methods take no args objects: `save(directory, item, **kwargs)`, as before Orbax 0.5."""

from __future__ import annotations

__all__ = ("get_legacy_handler_wrapper",)

from collections.abc import Sequence
from typing import Any

from penstock.orbax.v0.common.checkpoint_args import CheckpointArgs, register_with_handler
from penstock.orbax.v0.common.save_future import Future
from penstock.orbax.v0.handlers.checkpoint_handler import AsyncCheckpointHandler, CheckpointHandler


class _Wrapper(CheckpointHandler):
    """Passes the arguments of a call on to a handler unchanged."""

    _ORBAX_NAME = "penstock.orbax.handlers.legacy._Wrapper"  # as it has always been recorded

    def __init__(self, handler: CheckpointHandler) -> None:
        self._handler = handler

    def save(self, directory: Any, args: CheckpointArgs) -> Any:
        positional, named = _unwrapped(args)
        return self._handler.save(directory, *positional, **named)

    def restore(self, directory: Any, args: CheckpointArgs) -> Any:
        positional, named = _unwrapped(args)
        return self._handler.restore(directory, *positional, **named)

    def metadata(self, directory: Any) -> Any | None:
        return self._handler.metadata(directory)

    def finalize(self, directory: Any) -> None:
        self._handler.finalize(directory)

    def close(self) -> None:
        self._handler.close()


class _AsyncWrapper(_Wrapper, AsyncCheckpointHandler):
    """The same for a handler that saves in the background."""

    _ORBAX_NAME = "penstock.orbax.handlers.legacy._AsyncWrapper"
    _handler: AsyncCheckpointHandler

    async def async_save(self, directory: Any, args: CheckpointArgs) -> Sequence[Future] | None:
        positional, named = _unwrapped(args)
        return await self._handler.async_save(directory, *positional, **named)


@register_with_handler(_Wrapper, for_save=True, for_restore=True)
class WrapperArgs(CheckpointArgs):
    """The arguments of a call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs


@register_with_handler(_AsyncWrapper, for_save=True, for_restore=True)
class AsyncWrapperArgs(WrapperArgs):
    """The same for a handler that saves in the background."""


def get_legacy_handler_wrapper(handler: CheckpointHandler) -> CheckpointHandler:
    """Return a handler that takes any arguments and passes them on to `handler`."""
    return _AsyncWrapper(handler) if isinstance(handler, AsyncCheckpointHandler) else _Wrapper(handler)


def _unwrapped(args: CheckpointArgs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(args, WrapperArgs):
        return args.args, args.kwargs

    return (), {"args": args}  # the class of another handler, from which this one inherits
