"""A whole tree in one msgpack file, as early Orbax kept it, under the names of `aggregate_handlers`."""

from __future__ import annotations

__all__ = ("AggregateHandler", "MsgpackHandler")

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from penstock.orbax.future import CommitFutureAwaitingContractedSignals, Future
from penstock.orbax.item_files import write_bytes
from penstock.orbax.msgpack_utils import msgpack_restore, msgpack_serialize
from penstock.orbax.multihost import is_primary_host
from penstock.orbax.options import PyTreeMetadataOptions
from penstock.orbax.tree import serialize_tree


class AggregateHandler(ABC):
    """Writes a tree to one file, and reads it."""

    @abstractmethod
    async def serialize(self, path: Any, item: Any) -> Future:
        """Begin to write a tree to the file `path`; return what waits for it."""

    @abstractmethod
    def deserialize(self, path: Any) -> Any:
        """Return the tree in the file `path`, as dicts and lists."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held."""


class MsgpackHandler(AggregateHandler):
    """Keeps a tree as msgpack.

    Args:
        primary_host: The process that writes; None for every one.
        pytree_metadata_options: Rich types are refused.
    """

    def __init__(
        self, primary_host: int | None = 0, pytree_metadata_options: PyTreeMetadataOptions | None = None
    ) -> None:
        self._primary_host = primary_host
        self._rich = pytree_metadata_options is not None and pytree_metadata_options.support_rich_types

    async def serialize(self, path: Any, item: Any) -> Future:
        """Encode a tree, and begin to write it, durably.

        Args:
            path: Of the file. Its directory exists.
            item: A tree of numbers, strings and arrays.

        Raises:
            NotImplementedError: If rich types were asked for.
            ValueError: If the tree has other leaves.
        """
        if self._rich:
            raise NotImplementedError("msgpack files have no rich types: set support_rich_types to False")

        data = msgpack_serialize(serialize_tree(item, keep_empty_nodes=True))
        return CommitFutureAwaitingContractedSignals(self._write(str(path), data), name="msgpack_save")

    def deserialize(self, path: Any) -> Any:
        """Return the tree in a file, its arrays as NumPy arrays.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If it is not msgpack.
        """
        return msgpack_restore(Path(path).read_bytes())

    def close(self) -> None:
        """Do nothing: nothing is held."""

    async def _write(self, path: str, data: bytes) -> None:
        if is_primary_host(self._primary_host):  # all have the same values
            await write_bytes(path, data)
