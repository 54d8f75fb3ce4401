"""Handlers of single arrays and numbers, and of random keys: of jax, and of NumPy's generator."""

from __future__ import annotations

__all__ = (
    "ArrayCheckpointHandler",
    "ArrayRestoreArgs",
    "ArraySaveArgs",
    "JaxRandomKeyCheckpointHandler",
    "JaxRandomKeyRestoreArgs",
    "JaxRandomKeySaveArgs",
    "NumpyRandomKeyCheckpointHandler",
    "NumpyRandomKeyRestoreArgs",
    "NumpyRandomKeySaveArgs",
)

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import jax
import numpy as np

from penstock import kernel
from penstock.embedding import prng_keys
from penstock.orbax.base_pytree_handler import (
    BasePyTreeCheckpointHandler,
    BasePyTreeRestoreArgs,
    BasePyTreeSaveArgs,
)
from penstock.orbax.checkpoint_args import (
    AsyncCheckpointHandler,
    CheckpointArgs,
    register_with_handler,
    wait_for_all,
)
from penstock.orbax.composite_handler import CompositeArgs, CompositeCheckpointHandler
from penstock.orbax.future import Future
from penstock.orbax.leaf_args import RestoreArgs, SaveArgs
from penstock.orbax.plain_handlers import JsonRestoreArgs, JsonSaveArgs
from penstock.orbax.pytree_handler import PyTreeRestoreArgs, PyTreeSaveArgs

_MODULE: Final = "orbax.checkpoint._src.handlers.random_key_checkpoint_handler"


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

    def close(self) -> None:
        """Release the handler's resources."""
        self._tree_handler.close()


@register_with_handler(ArrayCheckpointHandler, for_save=True)
@dataclass
class ArraySaveArgs(CheckpointArgs):
    """The object of a save, and its options.

    Attributes:
        item: An array or a number.
        save_args: How it is stored.
    """

    item: Any
    save_args: SaveArgs | None = None


@register_with_handler(ArrayCheckpointHandler, for_restore=True)
@dataclass
class ArrayRestoreArgs(CheckpointArgs):
    """The options of a restore.

    Attributes:
        item: An array or struct like the result, whose dtype and shape count with `ArrayRestoreArgs`.
        restore_args: How it is restored; by default as it was saved.
    """

    item: Any = None
    restore_args: RestoreArgs | None = None


class BaseRandomKeyCheckpointHandler(AsyncCheckpointHandler):
    """Saves a key as two items: its data, and JSON about it.

    Args:
        key_name: The name of the item with the data; that of the other one ends in `_metadata`.
    """

    def __init__(self, key_name: str) -> None:
        self._key_name = key_name
        self._key_metadata = f"{key_name}_metadata"
        self._handler = CompositeCheckpointHandler()

    @abc.abstractmethod
    def checkpoint_save_args(self, args: Any) -> tuple[CheckpointArgs, JsonSaveArgs]:
        """Return the save arguments of the two items."""

    @abc.abstractmethod
    def checkpoint_restore_args(self, args: Any) -> CheckpointArgs:
        """Return the restore arguments of the data."""

    @abc.abstractmethod
    def post_restore(self, item: Any, metadata: Mapping[Any, Any]) -> Any:
        """Make the key from both items."""

    async def async_save(self, directory: Any, args: Any) -> Sequence[Future] | None:
        """Copy a key and begin to write it.

        Raises:
            TypeError: If it is not a key.
        """
        data, about = self.checkpoint_save_args(args)
        return await self._handler.async_save(
            directory, CompositeArgs(**{self._key_name: data, self._key_metadata: about})
        )

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write a key; see `async_save`."""
        wait_for_all(self, directory, *args, **kwargs)

    def restore(self, directory: Any, args: Any) -> Any:
        """Return the key in a directory.

        Raises:
            KeyError: If there is none.
        """
        wanted = {self._key_name: self.checkpoint_restore_args(args), self._key_metadata: JsonRestoreArgs()}
        found = self._handler.restore(directory, CompositeArgs(**wanted))
        return self.post_restore(found[self._key_name], found[self._key_metadata])

    def finalize(self, directory: Any) -> None:
        """Complete both items."""
        self._handler.finalize(directory)

    def close(self) -> None:
        """Release the handler's resources."""
        self._handler.close()


class JaxRandomKeyCheckpointHandler(BaseRandomKeyCheckpointHandler):
    """Saves and restores one key of jax, typed or as raw data.

    The implementation of a typed key is recorded and restored; Orbax restores every key with jax's default.

    Args:
        key_name: The name of the item with the data; by default `jax_random_key`.
    """

    _ORBAX_NAME = f"{_MODULE}.JaxRandomKeyCheckpointHandler"
    _DURABLE = True

    def __init__(self, key_name: str | None = None) -> None:
        super().__init__(key_name or "jax_random_key")

    def checkpoint_save_args(self, args: JaxRandomKeySaveArgs) -> tuple[CheckpointArgs, JsonSaveArgs]:
        key = cast("object", args.item)
        if not isinstance(key, jax.Array):
            raise TypeError(f"Unsupported type: {type(key)}.")
        if not prng_keys.is_key(cast("object", key.dtype)):
            return ArraySaveArgs(key, args.save_args), JsonSaveArgs({"typed": False})

        impl = prng_keys.key_impl_of(key, kernel.ParamInfo((self._key_name,), (), self._key_name))
        return ArraySaveArgs(prng_keys.key_data_of(key), args.save_args), JsonSaveArgs(
            {"typed": True, "impl": impl}
        )

    def checkpoint_restore_args(self, args: JaxRandomKeyRestoreArgs) -> CheckpointArgs:
        return ArrayRestoreArgs(restore_args=args.restore_args)

    def post_restore(self, item: Any, metadata: Mapping[Any, Any]) -> Any:
        if not metadata["typed"]:
            return item

        wrap: Any = jax.random.wrap_key_data
        return wrap(item, impl=metadata.get("impl"))


@register_with_handler(JaxRandomKeyCheckpointHandler, for_save=True)
@dataclass
class JaxRandomKeySaveArgs(CheckpointArgs):
    """The object of a save, and its options.

    Attributes:
        item: A key of jax.
        save_args: How its data is stored.
    """

    item: jax.Array
    save_args: SaveArgs | None = None


@register_with_handler(JaxRandomKeyCheckpointHandler, for_restore=True)
@dataclass
class JaxRandomKeyRestoreArgs(CheckpointArgs):
    """The options of a restore.

    Attributes:
        restore_args: How its data is restored.
    """

    restore_args: RestoreArgs | None = None


class NumpyRandomKeyCheckpointHandler(BaseRandomKeyCheckpointHandler):
    """Saves and restores what `np.random.get_state` returns, as a tuple or as a dict.

    Args:
        key_name: The name of the item with the data; by default `np_random_key`.
    """

    _ORBAX_NAME = f"{_MODULE}.NumpyRandomKeyCheckpointHandler"
    _DURABLE = True

    def __init__(self, key_name: str | None = None) -> None:
        super().__init__(key_name or "np_random_key")

    def checkpoint_save_args(self, args: NumpyRandomKeySaveArgs) -> tuple[CheckpointArgs, JsonSaveArgs]:
        if not isinstance(cast("object", args.item), tuple | dict):
            raise TypeError(f"Unsupported type: {type(args.item)}.")

        return PyTreeSaveArgs(args.item), JsonSaveArgs({"legacy": isinstance(args.item, tuple)})

    def checkpoint_restore_args(self, args: NumpyRandomKeyRestoreArgs) -> CheckpointArgs:
        return PyTreeRestoreArgs()

    def post_restore(self, item: Any, metadata: Mapping[Any, Any]) -> Any:
        return tuple(item) if metadata["legacy"] else item


@register_with_handler(NumpyRandomKeyCheckpointHandler, for_save=True)
@dataclass
class NumpyRandomKeySaveArgs(CheckpointArgs):
    """The object of a save.

    Attributes:
        item: What `np.random.get_state` returns.
    """

    item: tuple[Any, ...] | dict[str, Any]


@register_with_handler(NumpyRandomKeyCheckpointHandler, for_restore=True)
@dataclass
class NumpyRandomKeyRestoreArgs(CheckpointArgs):
    """Takes no options."""
