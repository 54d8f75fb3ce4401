"""Trees through penstock's pipelines: `PyTreeCheckpointHandler` and others delegate to this."""

from __future__ import annotations

__all__ = ("BasePyTreeCheckpointHandler", "BasePyTreeRestoreArgs", "BasePyTreeSaveArgs")

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import jax
from jax import tree_util

from penstock.blocking.loop_thread import LoopThread
from penstock.checkpointer import pipelines
from penstock.checkpointer.description import CheckpointMetadata
from penstock.handlers.formats.orbax.tree_layout import CUSTOM, TreeLayout
from penstock.kernel.config.save_format import SaveFormat
from penstock.kernel.errors import NotACheckpointError
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.leaf import KeyPath
from penstock.orbax.common.array_metadata_store import Store
from penstock.orbax.common.as_raised import awaited_as_raised, called_as_raised
from penstock.orbax.common.handler_paths import bucket_url, path_text, place_of
from penstock.orbax.common.leaf_args import PathAwaitingCreation, RestoreArgs, SaveArgs, TransferPriority
from penstock.orbax.common.metadata_recording import recorded_by, store_of, validate
from penstock.orbax.joint.joint_place import joint_build_around
from penstock.orbax.v0.common.checkpoint_args import CheckpointArgs, register_with_handler
from penstock.orbax.v0.common.joint_directory import JointDirectory, check_processes
from penstock.orbax.v0.common.lazy_mapping import LazyMapping
from penstock.orbax.v0.common.monitoring import WRITE, timed
from penstock.orbax.v0.common.save_future import Future, PipelineFuture
from penstock.orbax.v0.common.tree_utils import get_param_names, to_flat_dict
from penstock.orbax.v0.common.v0_options import (
    MemoryLimitOptions,
    MultiprocessingOptions,
    PyTreeMetadataOptions,
)
from penstock.orbax.v0.handlers.checkpoint_handler import DeferredPathAsyncCheckpointHandler, wait_for_all
from penstock.orbax.v0.handlers.pytree_calls import (
    Serving,
    Within,
    describe,
    open_checkpointers,
    restore_value,
    save_limit,
    start_joint_save,
    start_save,
    with_type_handlers,
)
from penstock.orbax.v0.handlers.tree_links import joint_links, own_links
from penstock.orbax.v0.leaf_handlers.database_merging import MergeProcessFiles
from penstock.orbax.v0.leaf_handlers.default_registry import default_registry
from penstock.orbax.v0.leaf_handlers.single_replica_handler import single_replica_keywords
from penstock.orbax.v0.leaf_handlers.stage_workers import StageRegistry, StageWorkers, UnknownTypeError
from penstock.orbax.v0.trees.empty_node_leaves import with_markers
from penstock.orbax.v0.trees.leaf_formats import leaf_formats
from penstock.orbax.v0.trees.restore_tree import Asked, Calls, restore_tree
from penstock.orbax.v0.trees.tree_description import describe_tree
from penstock.stages.pytree.flattening import step

T = TypeVar("T")
_tree: Any = tree_util  # jax declares no types for it


class BasePyTreeCheckpointHandler(DeferredPathAsyncCheckpointHandler):
    """Saves trees into given directories, and restores them.

    It owns an event loop in a thread, from its first use until `close`, or until it is garbage
    collected. All methods also work inside a running event loop.

    Args:
        save_concurrent_bytes: Host bytes that saves may hold.
        restore_concurrent_bytes: Host bytes that restores may hold.
        save_device_host_concurrent_bytes: Bytes copied from devices at once; or `"auto"`, for as much as
            the machine can spare.
        memory_limit_options: The upper limit of `"auto"`.
        use_ocdbt: Whether all arrays lie in one OCDBT database; else each in a directory of its own.
        use_zarr3: Whether arrays are of zarr version 3; else 2.
        use_compression: Whether chunks that compress well are compressed, with zstd.
        multiprocessing_options: Which processes save.
        type_handler_registry: Handlers of leaf types; by default those registered for the process.
        enable_post_merge_validation: Has no effect: every leaf is counted before a save is complete.
        pytree_metadata_options: How structure is recorded.
        array_metadata_validator: Checks the recorded array metadata in `finalize`; an error it raises fails
            the save. None by default: shapes and chunks are counted when a save is committed.
        enable_pinned_host_transfer: Has no effect: jax chooses how to copy.
        is_prioritized_key_fn: Decides which leaves are copied first.

    Raises:
        ValueError: If `"auto"` is given without `memory_limit_options`.
    """

    _ORBAX_NAME = "orbax.checkpoint._src.handlers.base_pytree_checkpoint_handler.BasePyTreeCheckpointHandler"

    _DURABLE = True
    _SAVES_TOGETHER = True
    _single = False  # whether the tree is one array, stored under its own name

    def __init__(
        self,
        *,
        save_concurrent_bytes: int | None = None,
        restore_concurrent_bytes: int | None = None,
        save_device_host_concurrent_bytes: int | Literal["auto"] | None = None,
        memory_limit_options: MemoryLimitOptions | None = None,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        use_compression: bool = True,
        multiprocessing_options: MultiprocessingOptions = MultiprocessingOptions(),
        type_handler_registry: Any = None,
        enable_post_merge_validation: bool = True,
        pytree_metadata_options: PyTreeMetadataOptions = PyTreeMetadataOptions(),
        array_metadata_validator: Any = None,
        enable_pinned_host_transfer: bool | None = None,
        is_prioritized_key_fn: Callable[[tuple[Any, ...]], Any] | None = None,
    ) -> None:
        self._form = SaveFormat(
            ocdbt=use_ocdbt,
            zarr=3 if use_zarr3 else 2,
            codec="auto" if use_compression else "none",
            rich_types=pytree_metadata_options.support_rich_types,
        )
        self._processes = multiprocessing_options
        self._primary_host = multiprocessing_options.primary_host
        self._validator = array_metadata_validator
        self._is_first = is_prioritized_key_fn
        limits = (
            save_limit(save_concurrent_bytes, save_device_host_concurrent_bytes, memory_limit_options),
            restore_concurrent_bytes,
        )
        self._layout = TreeLayout(self._form, single=self._single)
        self._type_handler_registry = type_handler_registry
        self._loop = LoopThread(
            partial(open_checkpointers, self._layout, limits, self._form), name="penstock.orbax"
        )

    def get_param_names(self, item: Any) -> Any:
        """Return a tree with each leaf replaced by its stored name."""
        return get_param_names(item)

    async def async_save(self, directory: Any, args: BasePyTreeSaveArgs) -> Sequence[Future] | None:
        """Copy a tree and begin to write it; the tree may change when this returns.

        Args:
            directory: That exists, or is being created.
            args: What to save, and how.

        Returns:
            A future that is over when everything is durable.

        Raises:
            ValueError: If the tree is empty, or has leaves that cannot be saved.
        """
        check_processes(self._processes)
        item = args.item
        if not jax.tree.leaves(item) and not item:
            raise ValueError("Found empty item.")
        if not isinstance(directory, os.PathLike | str) and isinstance(directory, PathAwaitingCreation):
            directory = await directory.await_creation()
        if isinstance(directory, JointDirectory):
            return [await self._save_jointly(directory, args)]

        build = joint_build_around(directory)
        if build is not None:
            return [await self._save_jointly(Within(path_text(directory), build), args)]

        with timed(f"{WRITE}blocking_tree_map_duration_secs"):
            keywords: dict[str, Any] = {
                "save_args": leaf_formats(item, args.save_args, self._form, args.ocdbt_target_data_file_size),
                "prioritise": self._prioritise(item),
                "custom_metadata": None if args.custom_metadata is None else {CUSTOM: args.custom_metadata},
                "pipeline": self._pipeline(args.ocdbt_target_data_file_size),
            }
            workers = self._workers(
                ocdbt_target_data_file_size=args.ocdbt_target_data_file_size,
                save_args=_by_name(args.save_args, SaveArgs),
            )
            serves = partial(with_type_handlers, self._registry, workers, self._layout)
            path, marked = path_text(directory), with_markers(item)

        keywords |= own_links(path, self._loop)
        try:
            with timed(f"{WRITE}blocking_d2h_duration_secs"):
                save = await awaited_as_raised(self._loop.acall(start_save, serves, path, marked, keywords))
        except UnknownTypeError as error:
            raise ValueError(f"TypeHandler lookup failed for: type={error.type_}, {error}") from error

        return [PipelineFuture(save, keep=self._loop)]

    async def _save_jointly(self, place: JointDirectory | Within, args: BasePyTreeSaveArgs) -> Future:
        """Begin to save a tree together with the other processes, or as a whole checkpoint in a bucket.

        Raises:
            ValueError: If there is custom metadata of the tree of a whole checkpoint, or a leaf cannot be
                saved.
        """
        url = bucket_url(place.path)
        if isinstance(place, JointDirectory) and args.custom_metadata is not None:
            who = "Several processes" if url is None else "Saves to buckets"
            raise ValueError(f"{who} save the custom metadata of a checkpoint, not of a tree.")

        form, most = self._form, args.ocdbt_target_data_file_size
        keywords: dict[str, Any] = {
            "save_args": leaf_formats(args.item, args.save_args, form, most),
            "prioritise": self._prioritise(args.item),
            **joint_links(place, self._loop),
        }
        if args.custom_metadata is not None:
            keywords["custom_metadata"] = {CUSTOM: args.custom_metadata}
        if url is None and (most is not None or self._own_store is not None):
            keywords["pipeline"] = self._recording_pipeline(most)

        workers = self._workers(
            ocdbt_target_data_file_size=most, save_args=_by_name(args.save_args, SaveArgs)
        )
        start = partial(self._loop.acall, start_joint_save, self._registry, workers)
        try:
            save = await awaited_as_raised(start(place, with_markers(args.item), keywords))
            return PipelineFuture(save, keep=self._loop)
        except UnknownTypeError as error:
            raise ValueError(f"TypeHandler lookup failed for: type={error.type_}, {error}") from error

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write a tree; return when it is durable. See `async_save`."""
        wait_for_all(self, directory, *args, **kwargs)

    def restore(self, directory: Any, args: BasePyTreeRestoreArgs | None = None) -> Any:
        """Return the tree in a directory.

        Without arguments it is made of dicts and lists, with leaves of the types that were saved.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If the item and the stored tree differ in structure, or a leaf cannot be restored
                as requested, or the directory is damaged.
        """
        args = args or BasePyTreeRestoreArgs()
        path = path_text(directory)
        if bucket_url(path) is None and not os.path.isdir(path):
            raise NotACheckpointError(path, "Requested directory for restore does not exist")

        asked = Asked(args.item, args.restore_args, args.partial_restore, rich=self._form.rich_types)
        workers = self._workers(use_ocdbt=None, restore_args=_by_name(args.restore_args, RestoreArgs))
        serves = partial(with_type_handlers, self._registry, workers, self._layout)
        calls = Calls(
            metadata=partial(self._loop.call, describe, serves, path),
            restore=partial(self._restore, serves, path),
            own_files=StageRegistry(self._registry, workers).own_files,
        )
        return called_as_raised(restore_tree, asked, calls)

    def metadata(self, directory: Any) -> Any:
        """Return a `TreeMetadata`: a tree of dicts and lists, with what is known of each leaf.

        Raises:
            FileNotFoundError: If there is no tree.
            ValueError: If it is damaged.
        """
        about = self.about(directory)
        return describe_tree(about, place_of(directory), self._registry, rich=self._form.rich_types)

    def kinds(self, directory: Any) -> dict[str, str]:
        """Return what `_METADATA` calls the type of each leaf, by its stored name; see `metadata`."""
        return {leaf.name: leaf.kind for leaf in self.about(directory).leaves}

    def finalize(self, directory: Any) -> None:
        """Validate the recorded array metadata. What was written was merged when it was committed.

        Raises:
            Exception: What the validator raises.
        """
        store = store_of(self._registry)
        if self._validator is not None and store is not None and self._primary_host is not None:
            validate(self._validator, store, directory)

    def close(self) -> None:
        """End the thread. Using the handler again starts another one."""
        self._loop.close()

    def about(self, directory: Any) -> CheckpointMetadata:
        """Return what `penstock.Checkpointer.metadata` does."""
        serves = partial(with_type_handlers, self._registry, self._workers(use_ocdbt=None), self._layout)
        found: CheckpointMetadata = called_as_raised(self._loop.call, describe, serves, path_text(directory))
        return found

    def _restore(self, serves: Serving, path: str, **keywords: Any) -> Any:
        asked = {**keywords, **single_replica_keywords(self._registry, keywords)}
        return self._loop.call(restore_value, serves, path, asked)

    @property
    def _registry(self) -> Any:
        """The registry of type handlers that was given, or else the current one of the process."""
        return self._type_handler_registry or default_registry()

    def _workers(self, **options: Any) -> StageWorkers:
        form: dict[str, Any] = {
            "use_ocdbt": self._form.ocdbt,
            "use_zarr3": self._form.zarr == 3,
            "use_compression": self._form.codec != "none",
        }
        return StageWorkers(**(form | options))

    @property
    def has_own_records(self) -> bool:
        """Whether something of the caller's records the arrays, or looks at what is recorded of them."""
        return self._validator is not None or self._own_store is not None

    @property
    def _own_store(self) -> Any:
        store = store_of(self._registry)
        return None if type(store) is Store else store

    def _pipeline(self, data_file_size: int | None) -> Pipeline[SaveRun]:
        pipeline = self._recording_pipeline(data_file_size)
        if not self._form.ocdbt:
            return pipeline

        # For type handlers that write databases of their own.
        return pipeline.insert_after("commit", MergeProcessFiles(), called="merge")

    def _recording_pipeline(self, data_file_size: int | None) -> Pipeline[SaveRun]:
        pipeline = pipelines.save_pipeline(self._layout)
        if self._own_store is not None:
            pipeline = recorded_by(self._own_store, self._form, pipeline)
        if data_file_size is None or not self._form.ocdbt:
            return pipeline

        return pipeline.configure("write", file_bytes=data_file_size or pipelines.UNLIMITED)

    def _prioritise(self, item: Any) -> Callable[[KeyPath], bool] | None:
        if self._is_first is None:
            return None

        pairs = _tree.tree_flatten_with_path(item)[0]
        first = {
            tuple([step(entry)[0] for entry in path])
            for path, _ in pairs
            if _comes_first(self._is_first(path))
        }
        return first.__contains__


@register_with_handler(BasePyTreeCheckpointHandler, for_save=True)
@dataclass
class BasePyTreeSaveArgs(CheckpointArgs):
    """What to save and how.

    Attributes:
        item: A tree.
        save_args: A tree of `SaveArgs` like it; None, for a leaf or for all, means the defaults.
        ocdbt_target_data_file_size: Bytes after which a data file is followed by another; 0: never.
        custom_metadata: JSON kept with the tree.
        partial_save_mode: Whether the tree is one part of a tree saved in several calls.
    """

    item: Any
    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None
    partial_save_mode: bool = False


@register_with_handler(BasePyTreeCheckpointHandler, for_restore=True)
@dataclass
class BasePyTreeRestoreArgs(CheckpointArgs):
    """What to restore and how.

    Attributes:
        item: A tree of the structure of the result; its leaves may be anything.
        restore_args: A tree of `RestoreArgs`, like the item or else like the stored tree.
        partial_restore: Whether the item may lack leaves that are stored.
    """

    item: Any = None
    restore_args: Any = None
    partial_restore: bool = False


def _by_name(args: Any, kind: type[T]) -> Mapping[str, T]:
    """Return the arguments of each leaf by its stored name; computed on first use, as few handlers ask."""
    return {} if args is None else LazyMapping(partial(_named, args, kind))


def _named(args: Any, kind: type[T]) -> dict[str, T]:
    flat = to_flat_dict(args, sep=".", is_leaf=lambda node: isinstance(node, kind))
    return {name: one for name, one in flat.items() if isinstance(one, kind)}


def _comes_first(answer: Any) -> bool:
    if isinstance(answer, TransferPriority):
        return answer in {TransferPriority.SYNCHRONOUS, TransferPriority.ASYNCHRONOUS_PRIORITIZED}

    return bool(answer)
