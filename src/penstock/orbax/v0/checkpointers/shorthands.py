"""Checkpointers that come with their handler."""

from __future__ import annotations

__all__ = ("PyTreeCheckpointer", "StandardCheckpointer")

import os
from typing import Any

from penstock.orbax.v0.checkpointers.async_checkpointer import AsyncCheckpointer
from penstock.orbax.v0.checkpointers.checkpointer import Checkpointer
from penstock.orbax.v0.common.v0_options import (
    AsyncOptions,
    AtomicityOptions,
    FileOptions,
    MultiprocessingOptions,
)
from penstock.orbax.v0.handlers.pytree_handler import PyTreeCheckpointHandler
from penstock.orbax.v0.handlers.standard_handler import (
    StandardCheckpointHandler,
    StandardRestoreArgs,
    StandardSaveArgs,
)


class PyTreeCheckpointer(Checkpointer):
    """A `Checkpointer` of trees: `PyTreeCheckpointer().save(path, tree)`.

    Args:
        primary_host: See `MultiprocessingOptions`.
        use_ocdbt: See `PyTreeCheckpointHandler`.
        use_zarr3: See `PyTreeCheckpointHandler`.
        use_compression: See `PyTreeCheckpointHandler`.
    """

    def __init__(
        self,
        primary_host: int | None = 0,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        use_compression: bool = True,
    ) -> None:
        options = MultiprocessingOptions(primary_host=primary_host)
        handler = PyTreeCheckpointHandler(
            use_ocdbt=use_ocdbt,
            use_zarr3=use_zarr3,
            use_compression=use_compression,
            multiprocessing_options=options,
        )
        super().__init__(handler, multiprocessing_options=options)


class StandardCheckpointer(AsyncCheckpointer):
    """An `AsyncCheckpointer` of trees of arrays and numbers.

    Args:
        async_options: See `AsyncCheckpointer`.
        multiprocessing_options: See `AsyncCheckpointer`.
        file_options: See `AsyncCheckpointer`.
        atomicity_options: See `AsyncCheckpointer`.
        checkpoint_metadata_store: See `AsyncCheckpointer`.
        temporary_path_class: See `AsyncCheckpointer`.
        **kwargs: Those of `StandardCheckpointHandler`.
    """

    def __init__(
        self,
        *,
        async_options: AsyncOptions = AsyncOptions(),
        multiprocessing_options: MultiprocessingOptions = MultiprocessingOptions(),
        file_options: FileOptions = FileOptions(),
        atomicity_options: AtomicityOptions | None = None,
        checkpoint_metadata_store: Any = None,
        temporary_path_class: type[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            StandardCheckpointHandler(multiprocessing_options=multiprocessing_options, **kwargs),
            async_options=async_options,
            multiprocessing_options=multiprocessing_options,
            file_options=file_options,
            atomicity_options=atomicity_options,
            checkpoint_metadata_store=checkpoint_metadata_store,
            temporary_path_class=temporary_path_class,
        )

    def save(  # type: ignore[override]  # as in Orbax, it takes the tree and no args object
        self,
        directory: str | os.PathLike[str],
        state: Any,
        *,
        save_args: Any = None,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
    ) -> None:
        """Start to save a tree; return when it has been copied.

        Args:
            directory: A path where nothing exists yet.
            state: A tree of arrays and numbers.
            save_args: A tree of `SaveArgs` like it.
            force: Whether to replace what exists there.
            custom_metadata: JSON values kept with the checkpoint.

        Raises:
            ValueError: If the tree cannot be saved, or something exists at `directory` and `force` is off.
        """
        super().save(
            directory, args=StandardSaveArgs(state, save_args), force=force, custom_metadata=custom_metadata
        )

    def restore(self, directory: str | os.PathLike[str], target: Any = None, *, strict: bool = True) -> Any:
        """Return the tree in a directory.

        Args:
            directory: The path of the checkpoint.
            target: See `StandardRestoreArgs.item`.
            strict: See `StandardRestoreArgs`.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            ValueError: If the tree does not fit the target, or a save was interrupted there.
        """
        return super().restore(directory, args=StandardRestoreArgs(target, strict=strict))
