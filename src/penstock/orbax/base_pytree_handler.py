"""Trees through penstock's pipelines: `PyTreeCheckpointHandler` and others delegate to this.

The handler holds Checkpointers open in the event loop of a thread. What it does there stands below it: the
options of leaves, links to the step before, and saves alone, with other processes, or to a bucket.
"""

from __future__ import annotations

__all__ = (
    "BasePyTreeCheckpointHandler",
    "BasePyTreeRestoreArgs",
    "BasePyTreeSaveArgs",
    "HandledTree",
    "TreeHandler",
    "Trees",
    "leaf_formats",
)

import math
import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final, Literal, TypeAlias, TypeGuard, TypeVar, final

import jax
import numpy as np
from jax import tree_util

from penstock import Checkpointer, CheckpointMetadata, Pipeline, SaveFormat, SaveFuture, kernel
from penstock import SaveArgs as LeafFormat
from penstock import handlers as built_in
from penstock.embedding import (
    BaseIfWhole,
    JointBuild,
    KnownValues,
    RestoreOptions,
    TreeDirectory,
    blocking,
    chunk_shapes,
    paths,
)
from penstock.errors import ConfigError, NotACheckpointError
from penstock.orbax.checkpoint_args import (
    CheckpointArgs,
    DeferredPathAsyncCheckpointHandler,
    register_with_handler,
    wait_for_all,
)
from penstock.orbax.enclosing_save import JointDirectory, joint_build_around, links_in_force
from penstock.orbax.future import Future, PipelineFuture, awaited_as_raised, called_as_raised
from penstock.orbax.item_files import bucket_url, path_text, place_of
from penstock.orbax.leaf_args import (
    ParamInfo,
    PathAwaitingCreation,
    RestoreArgs,
    SaveArgs,
    TransferPriority,
    leaves_first,
)
from penstock.orbax.logging import WRITE, timed
from penstock.orbax.multihost import process_count
from penstock.orbax.options import (
    MemoryLimitOptions,
    MultiprocessingOptions,
    PyTreeMetadataOptions,
    check_processes,
)
from penstock.orbax.restore_tree import Reader, TreeRequest, describe_tree, restore_tree, with_markers
from penstock.orbax.stage_workers import (
    Flow,
    Limiters,
    StageWorkers,
    TypeHandlerLookup,
    UnknownTypeError,
    save_stages,
)
from penstock.orbax.tree import get_param_names, is_empty_or_leaf, to_flat_dict
from penstock.orbax.type_handlers import PLACEHOLDER, by_one_replica, default_registry, get_ts_context

T = TypeVar("T")

_UNLIMITED: Final = 1 << 62  # bytes of a data file

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
        use_ocdbt: Whether all arrays are in one OCDBT database; else each in its own directory.
        use_zarr3: Whether arrays are of zarr version 3; else 2.
        use_compression: Whether chunks that compress well are compressed.
        multiprocessing_options: Which processes save.
        type_handler_registry: Handlers of leaf types; by default those registered for the process.
        enable_post_merge_validation: Has no effect: every leaf is counted before a save is complete.
        pytree_metadata_options: How structure is recorded.
        array_metadata_validator: Has no effect: every byte is counted before a save is complete.
        enable_pinned_host_transfer: Has no effect: jax chooses how to copy.
        is_prioritized_key_fn: Decides which leaves are copied first.

    Raises:
        ValueError: If `"auto"` is given without `memory_limit_options`.
    """

    _ORBAX_NAME = "orbax.checkpoint._src.handlers.base_pytree_checkpoint_handler.BasePyTreeCheckpointHandler"

    _DURABLE = True
    _SAVES_TOGETHER = True
    _BLOCKS = True
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
        self._is_first = is_prioritized_key_fn
        limits = (
            save_limit(save_concurrent_bytes, save_device_host_concurrent_bytes, memory_limit_options),
            restore_concurrent_bytes,
        )
        self._layout = built_in.OrbaxLayout(self._form, directory=TreeDirectory(single=self._single))
        self._type_handler_registry = type_handler_registry
        self._loop = blocking.LoopThread(
            partial(Trees.open, self._layout, limits, self._form), name="penstock.orbax"
        )

    def get_param_names(self, item: Any) -> Any:
        """Return a tree with each leaf replaced by its stored name."""
        return get_param_names(item)

    def _get_param_infos(
        self,
        item: Any,
        directory: Any,
        *,
        use_ocdbt: bool = True,
        use_compression: bool | None = True,
        use_zarr3: bool | None = None,
        ocdbt_target_data_file_size: int | None = None,
    ) -> Any:
        """Return the tree with a `ParamInfo` for each leaf, which subclasses ask for (paxml)."""
        context = get_ts_context(use_ocdbt=use_ocdbt)

        def info(path: Any, name: str, value: Any) -> ParamInfo:
            return ParamInfo(
                name=name,
                parent_dir=directory,
                keypath=path,
                skip_deserialize=getattr(value, "skip_deserialize", value is PLACEHOLDER),
                is_ocdbt_checkpoint=use_ocdbt,
                use_compression=use_compression,
                use_zarr3=self._form.zarr == 3 if use_zarr3 is None else use_zarr3,
                ocdbt_target_data_file_size=ocdbt_target_data_file_size,
                ts_context=context,
            )

        names = get_param_names(item)  # an override is warned of when its class is made
        return tree_util.tree_map_with_path(info, names, item, is_leaf=is_empty_or_leaf)

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
        place: Place = directory if isinstance(directory, JointDirectory) else path_text(directory)
        build = joint_build_around(directory)
        if isinstance(place, str) and build is not None:
            place = JointItem(place, build)

        with timed(f"{WRITE}blocking_tree_map_duration_secs"):
            tree = self.tree_to_save(place, args)
        with timed(f"{WRITE}blocking_d2h_duration_secs"):
            return [await self.begin_save(place, tree)]

    async def begin_save(self, place: Place, tree: HandledTree) -> Future:
        """Copy what `tree_to_save` returned, or several such trees as one, and begin to write it.

        Raises:
            ValueError: If a leaf cannot be saved.
        """
        try:
            save = await awaited_as_raised(self._loop.acall(Trees.save, place, tree))
        except UnknownTypeError as error:
            raise ValueError(f"TypeHandler lookup failed for: type={error.type_}, {error}") from error

        return PipelineFuture(save, keep=self._loop)

    def tree_to_save(self, place: Place, args: BasePyTreeSaveArgs) -> HandledTree:
        """Return the tree of a save with penstock's options.

        Raises:
            ValueError: If there is custom metadata of the tree of a whole checkpoint.
        """
        custom, most = args.custom_metadata, args.ocdbt_target_data_file_size
        if isinstance(place, JointDirectory) and custom is not None:
            who = "Several processes" if bucket_url(place.path) is None else "Saves to buckets"
            raise ValueError(f"{who} save the custom metadata of a checkpoint, not of a tree.")

        return HandledTree(
            with_markers(args.item),
            self._registry,
            self._workers(data_file_size=most, save_args=args.save_args),
            save_args=leaf_formats(args.item, args.save_args, self._form, most),
            prioritise=self._prioritise(args.item),
            custom_metadata=None if custom is None else {TreeDirectory.CUSTOM: custom},
            pipeline=self._pipeline(place, most),
            base=base_of(place, self._loop),
        )

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

        if args.on_missing not in ("keep", "raise"):
            raise ValueError(f'on_missing must be "keep" or "raise", not {args.on_missing!r}')

        asked = TreeRequest(
            args.item,
            args.restore_args,
            args.partial_restore,
            keeps_missing=args.on_missing == "keep",
            rich=self._form.rich_types,
        )
        workers = self._workers(reads=True, restore_args=args.restore_args)
        calls = Reader(
            metadata=partial(self._loop.call, Trees.metadata, self._registry, workers, path),
            restore=partial(self._restore, workers, path),
            own_files=TypeHandlerLookup(self._registry, workers).own_files,
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

    def close(self) -> None:
        """End the thread. Using the handler again starts another one."""
        self._loop.close()

    def about(self, directory: Any) -> CheckpointMetadata:
        """Return what `penstock.Checkpointer.metadata` does."""
        workers, path = self._workers(reads=True), path_text(directory)
        found: CheckpointMetadata = called_as_raised(
            self._loop.call, Trees.metadata, self._registry, workers, path
        )
        return found

    def _restore(
        self, workers: StageWorkers, path: str, like: Any = ..., options: RestoreOptions | None = None
    ) -> Any:
        options = by_one_replica(self._registry, like, options or RestoreOptions())
        return self._loop.call(Trees.restore, self._registry, workers, path, like, options)

    @property
    def _registry(self) -> Any:
        """The registry of type handlers that was given, or else the current one of the process."""
        return self._type_handler_registry or default_registry()

    def _workers(
        self,
        *,
        reads: bool = False,
        data_file_size: int | None = None,
        save_args: Any = None,
        restore_args: Any = None,
    ) -> StageWorkers:
        return StageWorkers(
            use_ocdbt=None if reads else self._form.ocdbt,
            use_zarr3=self._form.zarr == 3,
            use_compression=self._form.codec != "none",
            ocdbt_target_data_file_size=data_file_size,
            save_args=_by_name(save_args, SaveArgs),
            restore_args=_by_name(restore_args, RestoreArgs),
        )

    def _pipeline(self, place: Place, data_file_size: int | None) -> Pipeline[kernel.SaveRun] | None:
        """Return the stages of a save; None for the usual ones."""
        is_bounded = data_file_size is not None and self._form.ocdbt
        if not isinstance(place, str) and (bucket_url(place.path) is not None or data_file_size is None):
            return None

        return save_stages(
            merges=isinstance(place, str) and self._form.ocdbt,
            file_bytes=data_file_size or _UNLIMITED if is_bounded else None,
        )

    def _prioritise(self, item: Any) -> Callable[[kernel.KeyPath], bool] | None:
        function = self._is_first
        return None if function is None else leaves_first(item, lambda path: _comes_first(function(path)))


class TreeHandler(DeferredPathAsyncCheckpointHandler):
    """A handler of trees that has a `BasePyTreeCheckpointHandler` do the work."""

    @property
    @abstractmethod
    def base(self) -> BasePyTreeCheckpointHandler:
        """The handler that does the work."""

    def about(self, directory: Any) -> CheckpointMetadata:
        """Return what `penstock.Checkpointer.metadata` does."""
        return self.base.about(directory)

    def finalize(self, directory: Any) -> None:
        """Let the handler that does the work complete the tree."""
        self.base.finalize(directory)

    def close(self) -> None:
        """Release the handler's resources. Using the handler again reacquires them."""
        self.base.close()


@register_with_handler(BasePyTreeCheckpointHandler, for_save=True)
@dataclass
class BasePyTreeSaveArgs(CheckpointArgs):
    """The object of a save, and its options.

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
    """The target of a restore, and its options.

    Attributes:
        item: A tree of the structure of the result; its leaves may be anything.
        restore_args: A tree of `RestoreArgs`, like the item or else like the stored tree.
        partial_restore: Whether the item may lack leaves that are stored, and have leaves that are not.
        on_missing: What a leaf that is not stored is in a partial restore: the item's own in the result,
            or an error. penstock's.
    """

    item: Any = None
    restore_args: Any = None
    partial_restore: bool = False
    on_missing: Literal["keep", "raise"] = "keep"


def _by_name(args: Any, kind: type[T]) -> Callable[[str], T | None]:
    """Return what gives the arguments of a leaf by its stored name. Few handlers ask, so it begins then."""

    @cache
    def named() -> dict[str, T]:
        if args is None:
            return {}

        flat = to_flat_dict(args, sep=".", is_leaf=lambda node: isinstance(node, kind))
        return {name: one for name, one in flat.items() if isinstance(one, kind)}

    return lambda name: named().get(name)


def _comes_first(answer: Any) -> bool:
    if isinstance(answer, TransferPriority):
        return answer in {TransferPriority.SYNCHRONOUS, TransferPriority.ASYNCHRONOUS_PRIORITIZED}

    return bool(answer)


_NOTHING: Final = LeafFormat()


def leaf_formats(item: Any, save_args: Any, form: SaveFormat, file_bytes: int | None) -> Any:
    """Return the save options of each leaf; None if no leaf has any.

    Args:
        item: The tree.
        save_args: A tree of `SaveArgs` like it, or None.
        form: How arrays are stored.
        file_bytes: The target size of a data file of the database. A chunk is in one file, so this
            also bounds a chunk. None or 0: no bound.

    Raises:
        ValueError: If `save_args` has not the structure of the tree.
    """
    if save_args is not None:
        _tree.tree_map(_nothing, item, save_args, is_leaf=is_empty_or_leaf)

    most = file_bytes if form.ocdbt and file_bytes and file_bytes > 0 else None
    if most is not None and form.codec != "none" and most >= chunk_shapes.CODED_CHUNK:
        most = None  # chunks with a codec are smaller anyway
    if save_args is None and most is None:
        return None

    if most is None:
        formats = jax.tree.map(_translated, save_args, is_leaf=_is_args)
    else:
        leaves, structure = _tree.tree_flatten(item)
        given = [None] * len(leaves) if save_args is None else structure.flatten_up_to(save_args)
        bounded = [_bounded(_translated(one), value, most) for one, value in zip(given, leaves, strict=True)]
        formats = structure.unflatten(bounded)

    return formats if jax.tree.leaves(formats) else None


def _nothing(value: object, asked: object) -> None:
    """Only the structures are compared, and jax says where they differ."""


def _translated(one: Any) -> LeafFormat | None:
    if not _is_args(one):
        return None

    found = LeafFormat(one.dtype, one.chunk_byte_size, tuple(one.shard_axes))
    return None if found == _NOTHING else found


def _bounded(asked: LeafFormat | None, value: Any, most: int) -> LeafFormat | None:
    """Bound the chunks of a leaf; the options of a leaf smaller than that do not change."""
    dtype: Any = getattr(value, "dtype", None)
    if not hasattr(dtype, "itemsize"):
        return asked

    known = asked or _NOTHING
    itemsize = int((dtype if known.dtype is None else np.dtype(known.dtype)).itemsize)
    small = math.prod(value.shape) * itemsize <= most
    if small or (known.chunk_byte_size is not None and known.chunk_byte_size <= most):
        return asked

    return replace(known, chunk_byte_size=most)


def _is_args(node: Any) -> TypeGuard[SaveArgs]:
    return isinstance(node, SaveArgs)


def base_of(place: Place, loop: blocking.LoopThread[Trees]) -> BaseIfWhole | None:
    """Return the item of the step before to which unchanged leaves are linked, if a manager saves a step.

    Args:
        place: The item of the step, as it is being built. A whole checkpoint links nothing.
        loop: Of the handler that saves; once the step is there it notes where the values are.
    """
    links = links_in_force()
    if links is None or isinstance(place, JointDirectory):
        return None
    if isinstance(place, str):
        links.when_complete(place, partial(loop.call, Trees.note_moved, place))
        base = links.base_of(place)
    else:
        published = partial(loop.call, Trees.note_published, place.path)
        links.when_published(place.build.place, place.path, published)
        base = links.base_of_place(place.build.place, place.path)

    return None if base is None else BaseIfWhole(base)  # a save works without it


def save_limit(
    concurrent: int | None, device_host: int | Literal["auto"] | None, options: MemoryLimitOptions | None
) -> int | None:
    """Return the host bytes that saves may hold, as three options say; None if none does.

    Raises:
        ValueError: If `"auto"` is given without its upper limit.
    """
    most = (
        None
        if options is None or options.max_transfer_concurrent_gb is None
        else options.max_transfer_concurrent_gb
    )
    if device_host == "auto":
        if most is None:
            raise ValueError(
                "memory_limit_options with max_transfer_concurrent_gb must be provided if the limit of "
                'transfers from devices is "auto"'
            )
        device_host = None

    given = [limit for limit in (concurrent, device_host) if limit is not None]
    if most is not None:
        given.append(int(most * 10**9))

    return min(given) if given else None


@dataclass(frozen=True, slots=True)
class JointItem:
    """A directory of a checkpoint that all processes build."""

    path: str
    build: JointBuild


Place: TypeAlias = str | JointItem | JointDirectory
"""A directory that this process fills, one that all fill, or the place of a whole checkpoint."""


@final
@dataclass(frozen=True, slots=True)
class HandledTree:
    """A tree with its type handlers and penstock's options of a save."""

    item: Any
    registry: Any  #: of type handlers
    workers: StageWorkers
    save_args: Any = None
    prioritise: Callable[[kernel.KeyPath], bool] | None = None
    custom_metadata: Mapping[str, Any] | None = None
    pipeline: Pipeline[kernel.SaveRun] | None = None
    base: Any = None  #: what unchanged leaves are linked to

    def lookup(self, checkpointer: Checkpointer) -> TypeHandlerLookup:
        """Return the handlers of its leaves, bounded by the memory of a Checkpointer."""
        return _lookup(self.registry, self.workers, checkpointer, "save")

    async def begin(
        self, checkpointer: Checkpointer, path: str, *, overwrite: Any = True, base: Any = None
    ) -> SaveFuture:
        """Begin to save it."""
        return await checkpointer.save(
            path,
            self.item,
            overwrite=overwrite,
            base=base,
            save_args=self.save_args,
            prioritise=self.prioritise,
            custom_metadata=self.custom_metadata,
            pipeline=self.pipeline,
        )


@final
@dataclass(frozen=True, slots=True)
class Trees:
    """The Checkpointers of a tree handler. That for saves is that for restores if both have one budget."""

    layout: built_in.OrbaxLayout  #: of trees in given directories
    form: SaveFormat  #: how arrays are stored in whole checkpoints
    saving: Checkpointer
    restoring: Checkpointer
    together: Checkpointer | None = None  #: saves with the other processes of the job, if there are any
    within: Checkpointer | None = None  #: likewise, into a directory of a checkpoint that they build
    receiving: Checkpointer | None = None  #: restores with them what one replica reads

    @staticmethod
    @asynccontextmanager
    async def open(
        layout: built_in.OrbaxLayout, limits: tuple[int | None, int | None], form: SaveFormat
    ) -> AsyncGenerator[Trees]:
        """Yield them, open.

        Args:
            layout: Of trees in given directories.
            limits: Host bytes that saves may hold, and restores.
            form: How arrays are stored in whole checkpoints.
        """
        chosen = built_in.AutoLayout(layout)
        async with AsyncExitStack() as stack:
            opened: list[Checkpointer] = []
            for limit in dict.fromkeys(limits):
                alone = kernel.SingleProcessCoordinator()  # a save of several processes needs the whole of it
                checkpointer = Checkpointer(layout=chosen, memory_limit=limit, coordinator=alone)
                opened.append(await stack.enter_async_context(checkpointer))

            if process_count() == 1:
                yield Trees(layout, form, opened[0], opened[-1])
                return

            memory = opened[0].engine.memory
            parallel = built_in.OrbaxLayout(replace(form, replica_parallel=True), directory=layout.directory)
            joint = (
                Checkpointer(save_format=form, memory=memory),
                Checkpointer(layout=built_in.AutoLayout(parallel), memory=memory),
                Checkpointer(layout=chosen, memory_limit=limits[1]),
            )
            together, within, receiving = [await stack.enter_async_context(one) for one in joint]
            yield Trees(layout, form, opened[0], opened[-1], together, within, receiving)

    async def save(self, place: Place, tree: HandledTree) -> SaveFuture:
        """Begin to save a tree: by this process, together with others, or as a whole checkpoint in a bucket.

        Raises:
            ConfigError: If there were no other processes yet when this handler was first used.
        """
        if isinstance(place, JointItem):
            chosen = _joined(self.within)
            coordinator = place.build.nested_coordinator()
            chosen = chosen.with_handlers(tree.lookup(chosen), coordinator=coordinator)
            return await place.build.begin_within(partial(tree.begin, chosen, place.path, base=tree.base))
        if isinstance(place, JointDirectory):
            return await self._save_whole(place, tree)

        chosen = self._with_handlers(self.saving, tree.lookup(self.saving))
        return await tree.begin(chosen, place, base=tree.base)

    async def _save_whole(self, place: JointDirectory, tree: HandledTree) -> SaveFuture:
        """Begin to save a whole checkpoint, which in a bucket a process that saves alone does, too."""
        tree = replace(tree, custom_metadata=place.custom_metadata)
        scheme = paths.scheme_of(place.path)
        if scheme is None:
            chosen = _joined(self.together)
            chosen = chosen.with_handlers(tree.lookup(chosen))
            place.begun.set()
            return await tree.begin(chosen, place.path, overwrite=place.overwrite)

        chosen = _joined(self.together) if place.jointly else self.saving
        engine = chosen.engine
        layout = built_in.OrbaxLayout(
            replace(self.form, replica_parallel=place.jointly),
            min(chunk_shapes.CODED_CHUNK, engine.memory.limit // 4),
            plain_chunk=engine.config.store.of_scheme(scheme).file_bytes,
        )
        chosen = chosen.with_handlers(tree.lookup(chosen), built_in.AutoLayout(layout))
        place.begun.set()
        # What may be replaced is deleted first, as Orbax does: a bucket cannot replace in one step.
        return await tree.begin(chosen, place.path, overwrite="delete-first" if place.overwrite else False)

    async def restore(
        self, registry: Any, workers: StageWorkers, path: str, like: Any, options: RestoreOptions
    ) -> Any:
        """Return the tree at `path`; with `replica_axis`, together with the other processes of the job."""
        together = None if options.replica_axis is None else self.receiving
        chosen = together or self.restoring
        handlers = _lookup(registry, workers, chosen, "restore")
        return await self._with_handlers(chosen, handlers).restore_with(path, like, options)

    async def metadata(self, registry: Any, workers: StageWorkers, path: str) -> CheckpointMetadata:
        """Say what the tree at `path` is."""
        handlers = _lookup(registry, workers, self.restoring, "restore")
        return await self._with_handlers(self.restoring, handlers).metadata(path)

    async def note_moved(self, path: str, built: str, to: str) -> None:
        """Note that a checkpoint whose values are known is at `built`, and is about to be moved to `to`."""
        engine = self.saving.engine
        KnownValues(engine.caches.known_values).moved(path, to, engine.store.identity(built))

    async def note_published(self, built: str, path: str, is_same: Callable[[], bool]) -> None:
        """Note that what was saved at `built` is at `path`, unless another save has replaced it."""
        if self.within is None:
            return

        engine = self.within.engine
        identity = engine.store.identity(path)
        if is_same():  # asked last
            KnownValues(engine.caches.known_values).moved(built, path, identity)

    def _with_handlers(self, checkpointer: Checkpointer, handlers: TypeHandlerLookup) -> Checkpointer:
        """Return the Checkpointer with type handlers. What only these find is not taken for missing."""
        own_files = handlers.own_files()
        if not own_files:
            return checkpointer.with_handlers(handlers)

        return checkpointer.with_handlers(handlers, built_in.AutoLayout(self.layout.with_foreign(own_files)))


def _lookup(registry: Any, workers: StageWorkers, by: Checkpointer, flow: Flow) -> TypeHandlerLookup:
    """Return the type handlers of one save or restore, bounded by the memory of its Checkpointer."""
    return TypeHandlerLookup(registry, replace(workers, limiters=Limiters.of(by.engine.memory, flow)))


def _joined(checkpointer: Checkpointer | None) -> Checkpointer:
    """Return what saves with other processes.

    Raises:
        ConfigError: If there were none yet when the handler was first used.
    """
    if checkpointer is None:
        problem = "must be initialised before the first save of a checkpointer"
        raise ConfigError("jax.distributed", problem)

    return checkpointer
