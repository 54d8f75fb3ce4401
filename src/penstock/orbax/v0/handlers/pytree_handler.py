"""Trees of arrays, numbers, strings and whatever else has a type handler."""

from __future__ import annotations

__all__ = ("PyTreeCheckpointHandler", "PyTreeRestoreArgs", "PyTreeSaveArgs")

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from penstock.checkpointer.description import CheckpointMetadata
from penstock.handlers.formats.orbax.file_names import LEGACY_MSGPACK
from penstock.kernel.errors import NotACheckpointError, UnsupportedFormatError
from penstock.orbax.common.handler_paths import bucket_url, path_text, place_of
from penstock.orbax.v0.common.checkpoint_args import CheckpointArgs, register_with_handler
from penstock.orbax.v0.common.save_future import Future
from penstock.orbax.v0.common.stored_tree_metadata import TreeMetadata
from penstock.orbax.v0.common.v0_options import (
    MemoryLimitOptions,
    MultiprocessingOptions,
    PyTreeMetadataOptions,
)
from penstock.orbax.v0.handlers.base_pytree_handler import (
    BasePyTreeCheckpointHandler,
    BasePyTreeRestoreArgs,
    BasePyTreeSaveArgs,
)
from penstock.orbax.v0.handlers.checkpoint_handler import DeferredPathAsyncCheckpointHandler
from penstock.orbax.v0.trees.transformed_leaves import restore_transformed

_UNSET: Final[Any] = object()


class PyTreeCheckpointHandler(DeferredPathAsyncCheckpointHandler):
    """Saves and restores trees. Use it through a `Checkpointer`, which makes saves atomic.

    Args:
        aggregate_filename: Of the file of values that Orbax wrote before 0.5.16. It is no longer written. It
            is read if it is called `checkpoint`, as by default; a tree with one of another name is refused.
        save_concurrent_gb: Gigabytes of host memory that saves may hold; by default as much as the
            machine can spare.
        restore_concurrent_gb: Likewise for restores.
        save_device_host_concurrent_gb: Gigabytes copied from devices at once, or `"auto"`.
        memory_limit_options: The upper limit of `"auto"`.
        use_ocdbt: Whether all arrays lie in one OCDBT database; else each in a directory of its own.
        use_zarr3: Whether arrays are of zarr version 3; else 2.
        use_compression: Whether chunks that compress well are compressed, with zstd.
        multiprocessing_options: Which processes save.
        type_handler_registry: Handlers of leaf types; by default those registered for the process.
        handler_impl: Does the work; by default it is made from the other options.
        pytree_metadata_options: How structure is recorded.
        array_metadata_validator: Checks the recorded array metadata in `finalize`; an error it raises fails
            the save. None by default: shapes and chunks are counted when a save is committed.
        enable_pinned_host_transfer: Has no effect: jax chooses how to copy.
        is_prioritized_key_fn: Decides which leaves are copied first.
        concurrent_gb: The older name, as of 2024, of both `save_concurrent_gb` and `restore_concurrent_gb`.
        primary_host: The older name, as of 2024, of what is in `multiprocessing_options`.

    Raises:
        ValueError: If `"auto"` is given without `memory_limit_options`.
    """

    _ORBAX_NAME = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
    _DURABLE = True
    _SAVES_TOGETHER = True

    def __init__(
        self,
        aggregate_filename: str | None = None,
        *,
        save_concurrent_gb: int | None = None,
        restore_concurrent_gb: int | None = None,
        save_device_host_concurrent_gb: int | Literal["auto"] | None = None,
        memory_limit_options: MemoryLimitOptions | None = None,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        use_compression: bool = True,
        multiprocessing_options: MultiprocessingOptions = MultiprocessingOptions(),
        type_handler_registry: Any = None,
        handler_impl: BasePyTreeCheckpointHandler | None = None,
        pytree_metadata_options: PyTreeMetadataOptions = PyTreeMetadataOptions(),
        array_metadata_validator: Any = None,
        enable_pinned_host_transfer: bool | None = None,
        is_prioritized_key_fn: Callable[[tuple[Any, ...]], Any] | None = None,
        concurrent_gb: int | None = None,
        primary_host: int | None = _UNSET,
    ) -> None:
        if primary_host is not _UNSET:
            multiprocessing_options = MultiprocessingOptions(primary_host=primary_host)
        if concurrent_gb is not None:
            save_concurrent_gb = save_concurrent_gb or concurrent_gb
            restore_concurrent_gb = restore_concurrent_gb or concurrent_gb

        self._aggregate_filename = aggregate_filename
        self._primary_host = multiprocessing_options.primary_host
        self._handler_impl = handler_impl or BasePyTreeCheckpointHandler(
            save_concurrent_bytes=_bytes(save_concurrent_gb),
            restore_concurrent_bytes=_bytes(restore_concurrent_gb),
            save_device_host_concurrent_bytes=(
                "auto" if save_device_host_concurrent_gb == "auto" else _bytes(save_device_host_concurrent_gb)
            ),
            memory_limit_options=memory_limit_options,
            use_ocdbt=use_ocdbt,
            use_zarr3=use_zarr3,
            use_compression=use_compression,
            multiprocessing_options=multiprocessing_options,
            type_handler_registry=type_handler_registry,
            pytree_metadata_options=pytree_metadata_options,
            array_metadata_validator=array_metadata_validator,
            enable_pinned_host_transfer=enable_pinned_host_transfer,
            is_prioritized_key_fn=is_prioritized_key_fn,
        )

    async def async_save(
        self,
        directory: Any,
        item: Any = None,
        save_args: Any = None,
        args: PyTreeSaveArgs | None = None,
    ) -> Sequence[Future] | None:
        """Copy a tree and begin to write it; the tree may change when this returns.

        Args:
            directory: That exists, or is being created.
            item: The tree, if there are no `args`.
            save_args: A tree of `SaveArgs` like it, if there are no `args`.
            args: What to save, and how.

        Returns:
            Futures that are over when everything is durable.

        Raises:
            ValueError: If the tree is empty, or has leaves that cannot be saved.
        """
        return await self._handler_impl.async_save(directory, args=_base_save_args(item, save_args, args))

    def save(
        self,
        directory: Any,
        item: Any = None,
        save_args: Any = None,
        args: PyTreeSaveArgs | None = None,
    ) -> None:
        """Write a tree; return when it is durable. See `async_save`."""
        self._handler_impl.save(directory, args=_base_save_args(item, save_args, args))

    def restore(
        self,
        directory: Any,
        item: Any = None,
        restore_args: Any = None,
        transforms: Any = None,
        transforms_default_to_original: bool = True,
        legacy_transform_fn: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None,
        args: PyTreeRestoreArgs | None = None,
    ) -> Any:
        """Return the tree in a directory.

        Args:
            directory: That was saved to.
            item: See `PyTreeRestoreArgs`; all but `args` count only if there are no `args`.
            restore_args: See `PyTreeRestoreArgs`.
            transforms: See `PyTreeRestoreArgs`.
            transforms_default_to_original: See `PyTreeRestoreArgs`.
            legacy_transform_fn: See `PyTreeRestoreArgs`.
            args: What to restore, and how.

        Raises:
            FileNotFoundError: If there is nothing.
            ValueError: If the item and the stored tree differ in structure, a leaf cannot be restored as
                requested, arguments contradict each other, or the directory is damaged.
        """
        if isinstance(item, CheckpointArgs):
            raise ValueError("Make sure to specify kwarg name `args=` when providing `PyTreeRestoreArgs`.")

        path = path_text(directory)
        if bucket_url(path) is None and not os.path.isdir(path):
            raise NotACheckpointError(path, "Requested directory for restore does not exist")

        self._refuse_other_name(path)
        if args is None:
            args = PyTreeRestoreArgs(
                item, restore_args, transforms, transforms_default_to_original, legacy_transform_fn
            )

        if args.transforms is None and args.legacy_transform_fn is None:
            plain = BasePyTreeRestoreArgs(args.item, args.restore_args, args.partial_restore)
            return self._handler_impl.restore(directory, args=plain)

        return restore_transformed(args, _Reader(self._handler_impl), place_of(directory))

    def metadata(self, directory: Any) -> TreeMetadata:
        """Return what is known of each leaf, in a tree of dicts and lists.

        Raises:
            FileNotFoundError: If there is no tree.
            ValueError: If it is damaged.
        """
        self._refuse_other_name(path_text(directory))
        found: TreeMetadata = self._handler_impl.metadata(directory)
        return found

    def about(self, directory: Any) -> CheckpointMetadata:
        """Return what `penstock.Checkpointer.metadata` does."""
        return self._handler_impl.about(directory)

    def finalize(self, directory: Any) -> None:
        """Complete a tree that several processes wrote."""
        self._handler_impl.finalize(directory)

    @property
    def base(self) -> BasePyTreeCheckpointHandler:
        """The handler that this one delegates to."""
        return self._handler_impl

    @property
    def has_own_records(self) -> bool:
        """See `BasePyTreeCheckpointHandler.has_own_records`."""
        return self._handler_impl.has_own_records

    def close(self) -> None:
        """Release the handler's resources. Using the handler again reacquires them."""
        self._handler_impl.close()

    def _refuse_other_name(self, directory: str) -> None:
        """Refuse a tree that has a file of values which penstock would not find, and so not read."""
        name = self._aggregate_filename
        if name is not None and name != LEGACY_MSGPACK and os.path.isfile(os.path.join(directory, name)):
            problem = f"its values lie in {name!r}: rename that file to {LEGACY_MSGPACK!r}"
            raise UnsupportedFormatError(directory, problem)


@final
@dataclass(frozen=True, slots=True)
class _Reader:
    handler: BasePyTreeCheckpointHandler

    def part(self, directory: Any, item: Any, restore_args: Any) -> Any:
        return self.handler.restore(directory, args=BasePyTreeRestoreArgs(item, restore_args, True))

    def metadata(self, directory: Any) -> Any:
        return self.handler.metadata(directory)

    def kinds(self, directory: Any) -> dict[str, str]:
        return self.handler.kinds(directory)


@register_with_handler(PyTreeCheckpointHandler, for_save=True)
@dataclass
class PyTreeSaveArgs(CheckpointArgs):
    """What to save and how.

    Attributes:
        item: A tree.
        save_args: A tree of `SaveArgs` like it; None, for a leaf or for all, means the defaults.
        ocdbt_target_data_file_size: Bytes after which a data file is followed by another; 0: never.
        custom_metadata: JSON kept with the tree.

    Raises:
        ValueError: If the item is a `TreeMetadata`.
    """

    item: Any
    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.item, TreeMetadata):
            raise ValueError("Cannot save TreeMetadata.")


@register_with_handler(PyTreeCheckpointHandler, for_restore=True)
@dataclass
class PyTreeRestoreArgs(CheckpointArgs):
    """What to restore and how. Trees may be `TreeMetadata`.

    Attributes:
        item: A tree of the structure of the result; its leaves may be anything, and one that is
            `PLACEHOLDER` is not restored. By default the stored structure, in dicts and lists.
        restore_args: A tree of `RestoreArgs`, like the item or else like the stored tree.
        transforms: Regular expressions over keys joined by slashes -> `Transform`s; needs an item.
        transforms_default_to_original: Whether leaves without a transform come from what is stored, or
            are those of the item.
        legacy_transform_fn: Called with the item, the stored structure and a tree of `ParamInfo`s;
            returns the structure to restore, and the `ParamInfo`s of its leaves.
        partial_restore: Whether the item may lack leaves that are stored.
    """

    item: Any = None
    restore_args: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None
    partial_restore: bool = False

    def __post_init__(self) -> None:
        self.item = _tree_of(self.item)
        self.restore_args = _tree_of(self.restore_args)
        self.transforms = _tree_of(self.transforms)


def _tree_of(tree: Any) -> Any:
    return tree.tree if isinstance(tree, TreeMetadata) else tree


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 10**9)


def _base_save_args(item: Any, save_args: Any, args: PyTreeSaveArgs | None) -> BasePyTreeSaveArgs:
    if isinstance(item, CheckpointArgs):
        raise ValueError("Make sure to specify kwarg name `args=` when providing `PyTreeSaveArgs`.")
    if args is None:
        args = PyTreeSaveArgs(item, save_args)

    return BasePyTreeSaveArgs(
        args.item, args.save_args, args.ocdbt_target_data_file_size, args.custom_metadata
    )
