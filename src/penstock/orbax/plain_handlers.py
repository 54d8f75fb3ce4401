"""Handlers of JSON and of protobuf messages, and handlers from before there were arguments."""

from __future__ import annotations

__all__ = (
    "JsonCheckpointHandler",
    "JsonRestoreArgs",
    "JsonSaveArgs",
    "ProtoCheckpointHandler",
    "ProtoRestoreArgs",
    "ProtoSaveArgs",
    "get_legacy_handler_wrapper",
)

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import SpecError
from penstock.orbax.checkpoint_args import (
    AsyncCheckpointHandler,
    CheckpointArgs,
    CheckpointHandler,
    register_with_handler,
    wait_for_all,
)
from penstock.orbax.enclosing_save import writes_what_is_whole
from penstock.orbax.future import CommitFutureAwaitingContractedSignals, Future
from penstock.orbax.item_files import find_text, write_text
from penstock.orbax.options import MultiprocessingOptions


class _TextHandler(AsyncCheckpointHandler):
    """Keeps one object as text, in one file of its directory."""

    _DURABLE = True

    def __init__(self, filename: str, multiprocessing_options: MultiprocessingOptions) -> None:
        self._filename = filename
        self._primary_host = multiprocessing_options.primary_host

    @property
    def filename(self) -> str:
        """The name of the file in the directory."""
        return self._filename

    def _begin(self, directory: Any, text: str) -> Sequence[Future]:
        """Begin to write the file, if this process does."""
        if not writes_what_is_whole(directory):
            return []

        writing = write_text(directory, self._filename, text)
        return [CommitFutureAwaitingContractedSignals(writing, name="text_save")]

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Write an object; return when it is durable. See `async_save`."""
        wait_for_all(self, *args, **kwargs)

    def _read(self, directory: Any) -> str:
        text = find_text(directory, [self._filename])
        if text is None:
            raise FileNotFoundError(f"File {os.path.join(directory, self._filename)} not found.")

        return text


class JsonCheckpointHandler(_TextHandler):
    """Saves JSON values: dicts with string keys, lists, strings, numbers, booleans, None.

    Args:
        filename: Of the file in the directory; by default `metadata`.
        multiprocessing_options: Which process writes.
    """

    _ORBAX_NAME = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"
    _DURABLE = True
    _BLOCKS = True

    def __init__(
        self,
        filename: str | None = None,
        *,
        multiprocessing_options: MultiprocessingOptions = MultiprocessingOptions(),
    ) -> None:
        super().__init__(filename or "metadata", multiprocessing_options)

    async def async_save(
        self, directory: Any, item: Mapping[str, Any] | None = None, args: JsonSaveArgs | None = None
    ) -> Sequence[Future] | None:
        """Encode an object, and write it in the background.

        Raises:
            SpecError: If a value is not JSON.
        """
        if isinstance(item, CheckpointArgs):
            raise ValueError("Make sure to specify kwarg name `args=` when providing `JsonSaveArgs`.")
        try:
            text = json.dumps(item if args is None else args.item)  # the caller may change it from here on
        except (TypeError, ValueError, RecursionError) as error:
            raise SpecError(f"the item cannot be written as JSON: {error}") from error

        return self._begin(directory, text)

    def save(
        self, directory: Any, item: Mapping[str, Any] | None = None, args: JsonSaveArgs | None = None
    ) -> None:
        """Write an object; see `async_save`."""
        super().save(directory, item, args)

    def restore(
        self, directory: Any, item: Mapping[str, Any] | None = None, args: JsonRestoreArgs | None = None
    ) -> Any:
        """Return the object.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If it is damaged.
        """
        return json.loads(self._read(directory))


@register_with_handler(JsonCheckpointHandler, for_save=True)
@dataclass
class JsonSaveArgs(CheckpointArgs):
    """The object of a save.

    Attributes:
        item: JSON values.
    """

    item: Mapping[str, Any]


@register_with_handler(JsonCheckpointHandler, for_restore=True)
@dataclass
class JsonRestoreArgs(CheckpointArgs):
    """The options of a restore.

    Attributes:
        item: Has no effect.
    """

    item: bytes | None = None


class ProtoCheckpointHandler(_TextHandler):
    """Saves and restores one protobuf message. Needs protobuf: `pip install penstock[proto]`.

    Args:
        filename: Of the file in the directory.
        multiprocessing_options: Which process writes.
    """

    _ORBAX_NAME = "orbax.checkpoint._src.handlers.proto_checkpoint_handler.ProtoCheckpointHandler"
    _DURABLE = True
    _BLOCKS = True

    def __init__(
        self,
        filename: str = "proto.pbtxt",
        *,
        multiprocessing_options: MultiprocessingOptions = MultiprocessingOptions(),
    ) -> None:
        super().__init__(filename, multiprocessing_options)

    async def async_save(
        self, directory: Any, item: Any = None, args: ProtoSaveArgs | None = None
    ) -> Sequence[Future] | None:
        """Encode a message, and write it in the background."""
        from google.protobuf import text_format

        message: Any = item if args is None else args.item
        return self._begin(directory, text_format.MessageToString(message))

    def restore(self, directory: Any, item: Any = None, args: ProtoRestoreArgs | None = None) -> Any:
        """Return the message; its class is the argument `item`.

        Raises:
            ValueError: If no class is given.
            FileNotFoundError: If there is none.
        """
        from google.protobuf import text_format

        kind: Any = item if args is None else args.item
        if kind is None:
            raise ValueError("Must provide `item`, the class of the message, to restore it.")

        return text_format.Parse(self._read(directory), kind())


@register_with_handler(ProtoCheckpointHandler, for_save=True)
@dataclass
class ProtoSaveArgs(CheckpointArgs):
    """The object of a save.

    Attributes:
        item: A message.
    """

    item: Any


@register_with_handler(ProtoCheckpointHandler, for_restore=True)
@dataclass
class ProtoRestoreArgs(CheckpointArgs):
    """The options of a restore.

    Attributes:
        item: The class of the message.
    """

    item: Any


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
    """The wrapper of a handler that saves in the background."""

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
    """The wrapper of a handler that saves in the background."""


def get_legacy_handler_wrapper(handler: CheckpointHandler) -> CheckpointHandler:
    """Return a handler that takes any arguments and passes them on to `handler`."""
    return _AsyncWrapper(handler) if isinstance(handler, AsyncCheckpointHandler) else _Wrapper(handler)


def _unwrapped(args: CheckpointArgs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(args, WrapperArgs):
        return args.args, args.kwargs

    return (), {"args": args}  # the class of another handler, from which this one inherits
