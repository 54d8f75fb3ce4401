"""Nested dicts, lists and plain values, as JSON."""

from __future__ import annotations

__all__ = ("JsonCheckpointHandler", "JsonRestoreArgs", "JsonSaveArgs")

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.kernel.errors import SpecError
from penstock.orbax.common.item_files import find_text, write_text
from penstock.orbax.joint.joint_place import writes_what_is_whole
from penstock.orbax.v0.common.checkpoint_args import CheckpointArgs, register_with_handler
from penstock.orbax.v0.common.save_future import CommitFutureAwaitingContractedSignals, Future
from penstock.orbax.v0.common.v0_options import MultiprocessingOptions
from penstock.orbax.v0.handlers.checkpoint_handler import AsyncCheckpointHandler, wait_for_all


class JsonCheckpointHandler(AsyncCheckpointHandler):
    """Saves JSON values: dicts with string keys, lists, strings, numbers, booleans, None.

    Args:
        filename: Of the file in the directory; by default `metadata`.
        multiprocessing_options: Which process writes.
    """

    _ORBAX_NAME = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"
    _DURABLE = True

    def __init__(
        self,
        filename: str | None = None,
        *,
        multiprocessing_options: MultiprocessingOptions = MultiprocessingOptions(),
    ) -> None:
        self._filename = filename or "metadata"
        self._primary_host = multiprocessing_options.primary_host

    @property
    def filename(self) -> str:
        """The name of the file in the directory."""
        return self._filename

    async def async_save(
        self, directory: Any, item: Mapping[str, Any] | None = None, args: JsonSaveArgs | None = None
    ) -> Sequence[Future] | None:
        """Encode an object, and write it in the background.

        Raises:
            SpecError: If a value is not JSON.
        """
        value = _item_of(item, args)
        try:
            copied = json.loads(json.dumps(value))  # the caller may change the item from here on
        except (TypeError, ValueError, RecursionError) as error:
            raise SpecError(f"the item cannot be written as JSON: {error}") from error

        if not writes_what_is_whole(directory):
            return []

        return [CommitFutureAwaitingContractedSignals(self._save_fn(copied, directory), name="json_save")]

    async def _save_fn(self, x: Any, directory: Any) -> None:
        await write_text(directory, self._filename, json.dumps(x))

    def save(
        self, directory: Any, item: Mapping[str, Any] | None = None, args: JsonSaveArgs | None = None
    ) -> None:
        """Write an object; see `async_save`."""
        wait_for_all(self, directory, item, args)

    def restore(
        self, directory: Any, item: Mapping[str, Any] | None = None, args: JsonRestoreArgs | None = None
    ) -> Any:
        """Return the object.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If it is damaged.
        """
        text = find_text(directory, [self._filename])
        if text is None:
            raise FileNotFoundError(f"File {os.path.join(directory, self._filename)} not found.")

        return json.loads(text)


@register_with_handler(JsonCheckpointHandler, for_save=True)
@dataclass
class JsonSaveArgs(CheckpointArgs):
    """What to save.

    Attributes:
        item: JSON values.
    """

    item: Mapping[str, Any]


@register_with_handler(JsonCheckpointHandler, for_restore=True)
@dataclass
class JsonRestoreArgs(CheckpointArgs):
    """What to restore.

    Attributes:
        item: Has no effect.
    """

    item: bytes | None = None


def _item_of(item: Any, args: JsonSaveArgs | None) -> Any:
    if isinstance(item, CheckpointArgs):
        raise ValueError("Make sure to specify kwarg name `args=` when providing `JsonSaveArgs`.")

    return item if args is None else args.item
