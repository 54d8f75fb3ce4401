"""Protobuf messages, as text."""

from __future__ import annotations

__all__ = ("ProtoCheckpointHandler", "ProtoRestoreArgs", "ProtoSaveArgs")

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.orbax.common.item_files import find_text, write_text
from penstock.orbax.joint.joint_place import writes_what_is_whole
from penstock.orbax.v0.common.checkpoint_args import CheckpointArgs, register_with_handler
from penstock.orbax.v0.common.save_future import CommitFutureAwaitingContractedSignals, Future
from penstock.orbax.v0.common.v0_options import MultiprocessingOptions
from penstock.orbax.v0.handlers.checkpoint_handler import AsyncCheckpointHandler, wait_for_all


class ProtoCheckpointHandler(AsyncCheckpointHandler):
    """Saves and restores one protobuf message. Needs protobuf: `pip install penstock[proto]`.

    Args:
        filename: Of the file in the directory.
        multiprocessing_options: Which process writes.
    """

    _ORBAX_NAME = "orbax.checkpoint._src.handlers.proto_checkpoint_handler.ProtoCheckpointHandler"
    _DURABLE = True

    def __init__(
        self,
        filename: str = "proto.pbtxt",
        *,
        multiprocessing_options: MultiprocessingOptions = MultiprocessingOptions(),
    ) -> None:
        self._filename = filename
        self._primary_host = multiprocessing_options.primary_host

    async def async_save(
        self, directory: Any, item: Any = None, args: ProtoSaveArgs | None = None
    ) -> Sequence[Future] | None:
        """Encode a message, and write it in the background."""
        from google.protobuf import text_format

        message: Any = item if args is None else args.item
        if not writes_what_is_whole(directory):
            return []

        writing = write_text(directory, self._filename, text_format.MessageToString(message))
        return [CommitFutureAwaitingContractedSignals(writing, name="proto_save")]

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Write a message; see `async_save`."""
        wait_for_all(self, *args, **kwargs)

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

        text = find_text(directory, [self._filename])
        if text is None:
            raise FileNotFoundError(f"File {os.path.join(directory, self._filename)} not found.")

        return text_format.Parse(text, kind())


@register_with_handler(ProtoCheckpointHandler, for_save=True)
@dataclass
class ProtoSaveArgs(CheckpointArgs):
    """What to save.

    Attributes:
        item: A message.
    """

    item: Any


@register_with_handler(ProtoCheckpointHandler, for_restore=True)
@dataclass
class ProtoRestoreArgs(CheckpointArgs):
    """What to restore.

    Attributes:
        item: The class of the message.
    """

    item: Any
