"""Single arrays and numbers."""

from __future__ import annotations

__all__ = ("ArrayCheckpointHandler", "ArrayRestoreArgs", "ArraySaveArgs")

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from penstock.orbax.common.leaf_args import RestoreArgs, SaveArgs
from penstock.orbax.v0.common.checkpoint_args import CheckpointArgs, register_with_handler
from penstock.orbax.v0.common.save_future import Future
from penstock.orbax.v0.handlers.base_pytree_handler import (
    BasePyTreeCheckpointHandler,
    BasePyTreeRestoreArgs,
    BasePyTreeSaveArgs,
)
from penstock.orbax.v0.handlers.checkpoint_handler import AsyncCheckpointHandler, wait_for_all


class _SingleArray(BasePyTreeCheckpointHandler):
    """A tree of one array, in a directory named after it."""

    _single = True


class ArrayCheckpointHandler(AsyncCheckpointHandler):
    """Saves and restores one array or number.

    Args:
        checkpoint_name: The name of the directory of the array; by default `checkpoint`.
    """

    _ORBAX_NAME = "orbax.checkpoint._src.handlers.array_checkpoint_handler.ArrayCheckpointHandler"
    _DURABLE = True

    def __init__(self, checkpoint_name: str | None = None) -> None:
        self._checkpoint_name = checkpoint_name or "checkpoint"
        self._tree_handler = _SingleArray(use_ocdbt=False)

    async def async_save(
        self,
        directory: Any,
        item: Any = None,
        save_args: SaveArgs | None = None,
        args: ArraySaveArgs | None = None,
    ) -> Sequence[Future] | None:
        """Copy an array and begin to write it.

        Args:
            directory: That exists.
            item: The array, if there are no `args`.
            save_args: How it is stored, if there are no `args`.
            args: What to save, and how.

        Raises:
            TypeError: If it is neither an array nor a number.
        """
        if args is not None:
            item, save_args = args.item, args.save_args
        if not isinstance(item, np.ndarray | jax.Array | int | float | np.number):
            raise TypeError(f"Unsupported type: {type(item)}.")

        name = self._checkpoint_name
        asked = None if save_args is None else {name: save_args}
        return await self._tree_handler.async_save(directory, BasePyTreeSaveArgs({name: item}, asked))

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write an array; return when it is durable. See `async_save`."""
        wait_for_all(self, directory, *args, **kwargs)

    def restore(
        self,
        directory: Any,
        item: Any = None,
        restore_args: RestoreArgs | None = None,
        args: ArrayRestoreArgs | None = None,
    ) -> Any:
        """Return the array in a directory.

        Args:
            directory: That was saved to.
            item: An array or struct like the result, if there are no `args`.
            restore_args: How it is restored, if there are no `args`.
            args: How it is restored.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If it cannot be restored as requested, or is damaged.
        """
        if args is not None:
            item, restore_args = args.item, args.restore_args

        name = self._checkpoint_name
        wanted = BasePyTreeRestoreArgs(
            None if item is None else {name: item}, None if restore_args is None else {name: restore_args}
        )
        return self._tree_handler.restore(directory, wanted)[name]

    def finalize(self, directory: Any) -> None:
        """Complete what several processes wrote."""
        self._tree_handler.finalize(directory)

    def close(self) -> None:
        """Release the handler's resources."""
        self._tree_handler.close()


@register_with_handler(ArrayCheckpointHandler, for_save=True)
@dataclass
class ArraySaveArgs(CheckpointArgs):
    """What to save and how.

    Attributes:
        item: An array or a number.
        save_args: How it is stored.
    """

    item: Any
    save_args: SaveArgs | None = None


@register_with_handler(ArrayCheckpointHandler, for_restore=True)
@dataclass
class ArrayRestoreArgs(CheckpointArgs):
    """How to restore.

    Attributes:
        item: An array or struct like the result, whose dtype and shape count with `ArrayRestoreArgs`.
        restore_args: How it is restored; by default as it was saved.
    """

    item: Any = None
    restore_args: RestoreArgs | None = None
