"""Trees as checkpointables: penstock's pipelines as a handler of v1, with v1's leaf handlers."""

from __future__ import annotations

__all__ = ("CustomLeaves", "PyTreeHandler")

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, final

import jax
import numpy as np
from anyio import to_thread
from jax import tree_util

from penstock import Checkpointer, HandlerRegistry, SaveArgs, kernel
from penstock import handlers as built_in
from penstock.embedding import TreeDirectory, flattening
from penstock.errors import InvalidLeafError, NoHandlerError, StructureMismatchError
from penstock.orbax.array_metadata_store import Validator
from penstock.orbax.enclosing_save import joint_build_around
from penstock.orbax.leaf_args import leaves_first
from penstock.orbax.serialization import MergeProcessFiles, get_ts_context
from penstock.orbax.stage_workers import Limiters, key_entries, leaf_size, save_stages
from penstock.orbax.v1.abstract_tree import (
    LoadPlan,
    StoredTree,
    leaf_metadata,
    mismatch,
    plan_load,
    read_tree,
    save_format_of,
)
from penstock.orbax.v1.handler_registration import typestr
from penstock.orbax.v1.operation import BackgroundOperation, begin, budget
from penstock.orbax.v1.options import (
    ArrayOptions,
    Context,
    TransferPriority,
    array_handler_of,
    get_context,
    storage_options_of,
)
from penstock.orbax.v1.path import ExistingPath, Path, PathAwaitingCreation
from penstock.orbax.v1.serialization import (
    BUILT_IN,
    DeserializationContext,
    DeserializationParam,
    LeafHandlerRegistry,
    SerializationContext,
    SerializationParam,
    StandardLeafHandlerRegistry,
    UnregisteredTypeError,
    check_types,
)
from penstock.orbax.v1.tree import PyTree

_tree: Any = tree_util  # jax declares no types for it

_VALIDATOR: Final = Validator()


@final
class PyTreeHandler:
    """Saves and loads trees.

    Args:
        context: Its options; by default the current context.
        array_metadata_validator: Has no effect: every byte is counted before a checkpoint is published.
        leaf_handler_registry: Handlers for leaves.
        partial_save_mode: Has no effect: a part is saved like any tree.
    """

    RECORDED_AS: Final = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"

    def __init__(
        self,
        *,
        context: Context | None = None,
        array_metadata_validator: Any = _VALIDATOR,
        leaf_handler_registry: LeafHandlerRegistry | None = None,
        partial_save_mode: bool = False,
    ) -> None:
        self._context = get_context() if context is None else context
        self._leaves = (
            StandardLeafHandlerRegistry() if leaf_handler_registry is None else leaf_handler_registry
        )

    @property
    def keeps_own_files(self) -> bool:
        """Return whether the caller's own leaf handlers write files in the tree."""
        return bool(CustomLeaves(self._leaves, self._context).types())

    def check(self, tree: PyTree) -> None:
        """Refuse a tree that cannot be saved.

        Raises:
            ValueError: If a leaf cannot be saved, or there is none.
        """
        check_types(tree, self._leaves.is_handleable, "leaf")
        if not _tree.tree_leaves(tree) and not tree:
            raise ValueError("Found empty item.")

        _check_sizes(tree)

    def save_args(self, tree: PyTree) -> Any:
        """Return how the leaves of a tree are stored; None for the default."""
        return _save_args(self._context.array.saving, tree)

    def comes_first(self, tree: PyTree) -> Any:
        """Return which leaves are copied first, by their keys; None if none are."""
        return _first(self._context, tree)

    async def save(self, directory: PathAwaitingCreation, checkpointable: PyTree) -> Awaitable[None]:
        """Copy the values of a tree; return an awaitable that writes them.

        Raises:
            ValueError: If a leaf cannot be saved, or there is none.
            PenstockError: What `penstock.Checkpointer.save` raises.
        """
        self.check(checkpointable)
        saving = begin("save", partial(self._save, directory, checkpointable))
        await saving.begun()
        return saving

    async def load(self, directory: Path, abstract_checkpointable: PyTree | None = None) -> Awaitable[PyTree]:
        """Begin to load a tree.

        Args:
            directory: Where it was saved.
            abstract_checkpointable: The target: its structure, with values, structs or types as
                leaves, None for a leaf as it was saved, `...` for one that is not loaded. By default
                all is as it was saved.

        Raises:
            ValueError: If `abstract_checkpointable` has a leaf of an unregistered type.
        """
        check_types(abstract_checkpointable, self._leaves.is_abstract_handleable, "abstract leaf")
        loading = partial(self._load, str(directory), abstract_checkpointable)
        return _LazyAwaitable(partial(begin, "load", loading))

    async def metadata(self, directory: Path) -> PyTree:
        """Return the saved tree with a description in the place of each leaf."""
        tree = await to_thread.run_sync(read_tree, str(directory))
        custom = self._custom(tree)
        names = custom.types()
        found: list[Any] = []
        columns = tree.keys, tree.kinds, tree.specs, tree.documents
        for keys, kinds, spec, document in zip(*columns, strict=True):
            if spec.typestr in names:
                info = kernel.ParamInfo(keys, kinds, "", str(directory))
                found.append(await custom.metadata(spec.typestr, info))
            else:
                found.append(leaf_metadata(spec, document))

        return flattening.nest_columns(tree.keys, tree.kinds, found)

    def is_handleable(self, checkpointable: Any) -> bool:
        try:
            check_types(checkpointable, self._leaves.is_handleable, "leaf")
        except Exception:
            return False

        return True

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        try:
            check_types(abstract_checkpointable, self._leaves.is_abstract_handleable, "abstract leaf")
        except Exception:
            return False

        return True

    async def _save(
        self, directory: PathAwaitingCreation, tree: PyTree, operation: BackgroundOperation[None]
    ) -> None:
        options = self._context.array.saving
        path = await directory.await_creation()
        build = joint_build_around(path)
        form = save_format_of(options, jointly=build is not None)
        layout = built_in.OrbaxLayout(form, directory=TreeDirectory())
        pipeline = save_stages()
        if options.use_ocdbt and build is None:  # for leaf handlers that write databases of their own
            pipeline = pipeline.insert_after("commit", MergeProcessFiles(), called="merge")

        save_args = _save_args(options, tree)
        limit = budget(self._context.memory.save_limit)
        custom = CustomLeaves(self._leaves, self._context)
        await to_thread.run_sync(built_in.LocalStore().make_directory, str(path))
        registry = custom.registry()
        # By itself, this process cannot save what is spread over others.
        coordinator = kernel.SingleProcessCoordinator() if build is None else build.nested_coordinator()
        async with Checkpointer(
            memory_limit=limit, layout=layout, registry=registry, coordinator=coordinator
        ) as checkpointer:
            custom.limiters = Limiters.of(checkpointer.engine.memory, "save")
            first = _first(self._context, tree)
            try:
                future = await checkpointer.save(
                    str(path), tree, prioritise=first, pipeline=pipeline, save_args=save_args
                )
            except NoHandlerError as error:
                raise UnregisteredTypeError(str(error)) from error

            del tree
            operation.mark_begun()
            await future

    async def _load(
        self, directory: str, abstract: PyTree | None, operation: BackgroundOperation[PyTree]
    ) -> PyTree:
        operation.mark_begun()
        stored = await to_thread.run_sync(read_tree, directory)
        custom = self._custom(stored)
        plan = LoadPlan()
        if abstract is not None:
            plan = plan_load(
                abstract,
                stored,
                partial=self._context.pytree.loading.partial_load,
                keeps_missing=self._context.pytree.loading.on_missing == "keep",
                resize=self._context.array.loading.enable_padding_and_truncation,
                custom=custom.types(),
            )
            custom.asked = plan.asked

        limit = budget(self._context.memory.read_concurrent_bytes)
        async with Checkpointer(memory_limit=limit, registry=custom.registry()) as checkpointer:
            custom.limiters = Limiters.of(checkpointer.engine.memory, "restore")
            try:
                tree = await checkpointer.restore_with(directory, plan.like, plan.options)
            except StructureMismatchError as error:
                raise mismatch([str(difference) for difference in error.differences]) from error
            except NoHandlerError as error:
                raise UnregisteredTypeError(str(error)) from error

        return plan.finish(tree)

    def _custom(self, stored: StoredTree) -> CustomLeaves:
        return CustomLeaves(self._leaves, self._context, frozenset([spec.typestr for spec in stored.specs]))


@final
class _LazyAwaitable:
    """An awaitable that begins only when it is awaited."""

    def __init__(self, start: Any) -> None:
        self._start = start

    def __await__(self) -> Any:
        return self._start().__await__()


def _check_sizes(tree: PyTree) -> None:
    """Refuse arrays without elements, as Orbax does, because it could not read them.

    Raises:
        InvalidLeafError: If there is one. It is a ValueError.
    """
    for path, leaf in _tree.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, np.ndarray | jax.Array) and not leaf.size:
            raise InvalidLeafError(_tree.keystr(path), "Cannot save arrays with zero size")


def _save_args(saving: ArrayOptions.Saving, tree: PyTree) -> Any:
    """Return how leaves are stored: one for all, or one for each."""
    if saving.scoped_storage_options_creator is None:
        args = _args(saving.storage_options)
        return None if args == SaveArgs() else args

    def of_leaf(path: Any, leaf: Any) -> SaveArgs | None:
        return _args(storage_options_of(saving, path, leaf))

    return _tree.tree_map_with_path(of_leaf, tree)


def _args(options: ArrayOptions.Saving.StorageOptions) -> SaveArgs:
    return SaveArgs(options.dtype, options.chunk_byte_size, tuple(options.shard_axes or ()))


def _first(context: Context, tree: PyTree) -> Any:
    """Return a predicate by stored keys for leaves that are copied first; Orbax's takes jax's keys."""
    function = context.memory.is_prioritized_key_fn
    if function is None:
        return None

    return leaves_first(tree, lambda path: _is_first(function(path)))


def _is_first(answer: Any) -> bool:
    return answer is not TransferPriority.ASYNCHRONOUS and bool(answer)


@final
@dataclass(slots=True)
class CustomLeaves:
    """The leaf types of a registry that penstock itself does not handle.

    Args:
        leaves: The registry.
        context: Given to the handlers; also has the class of paths.
        stored: Recorded names of the handlers that saved the leaves of a tree.
        asked: The requested abstract leaves, by their keys.
        limiters: Given to the handlers; None for no limits.
    """

    leaves: LeafHandlerRegistry
    context: Context
    stored: frozenset[str] = frozenset()
    asked: Mapping[kernel.KeyPath, Any] = field(default_factory=dict[kernel.KeyPath, Any])
    limiters: Limiters | None = None
    _made: dict[type[Any], _AdaptedLeafHandler] = field(
        default_factory=dict["type[Any]", "_AdaptedLeafHandler"], init=False, repr=False
    )

    def types(self) -> Mapping[str, type[Any]]:
        """Return the leaf type of each recorded name that has a handler."""
        return {self._recorded(handler): leaf_type for leaf_type, handler in self._entries()}

    def registry(self) -> HandlerRegistry:
        """Return penstock's own handlers, with the options applied to that of arrays, and these."""
        registry = built_in.default_handlers()
        registry.register(jax.Array, array_handler_of(self.context.array.saving), override=True)
        for leaf_type, handler in self._entries():
            registry.register(leaf_type, self._adapted(handler), override=True)

        return registry

    async def metadata(self, name: str, info: kernel.ParamInfo) -> Any:
        """Describe a leaf saved by the handler with this recorded name."""
        handler = next((one for _, one in self._entries() if self._recorded(one) == name), None)
        if handler is None:
            return name

        (found,) = await self._adapted(handler).metadata([info])
        return found

    def _entries(self) -> list[tuple[type[Any], type[Any]]]:
        entries = self.leaves.get_all()
        return [(leaf, handler) for leaf, _, handler in entries if handler not in BUILT_IN]

    def _recorded(self, handler: type[Any]) -> str:
        names = [typestr(handler), *self.leaves.get_secondary_typestrs(handler)]
        return next((name for name in names if name in self.stored), names[0])

    def _adapted(self, handler: type[Any]) -> _AdaptedLeafHandler:
        """Make a handler, one for all its types, so that their leaves are one batch."""
        if handler not in self._made:
            try:
                inner: Any = handler(context=self.context)
            except TypeError:
                inner = handler()

            self._made[handler] = _AdaptedLeafHandler(inner, self._recorded(handler), self)

        return self._made[handler]


@final
@dataclass(frozen=True, slots=True, eq=False)
class _AdaptedLeafHandler:
    """A `LeafHandler` of v1 as a handler of the kernel."""

    inner: Any
    name: str
    call: CustomLeaves  #: the save or restore

    @property
    def handler_class(self) -> type:
        """The class that errors name."""
        return type(self.inner)  # pyright: ignore[reportUnknownVariableType]  # anybody's

    def typestr(self) -> str:
        return self.name

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[kernel.ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[kernel.Waitable]:
        params = [
            SerializationParam(key_entries(info), value) for info, value in zip(infos, values, strict=True)
        ]
        directory = ExistingPath(self._path(infos[0]))
        limiters = self.call.limiters
        context = SerializationContext(directory, ts_context=get_ts_context())
        if limiters is not None:
            context.byte_limiter = limiters.in_flight
            context.device_host_byte_limiter = limiters.device_host

        await (await self.inner.serialize(params, context))
        return []

    async def deserialize(
        self, infos: Sequence[kernel.ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        params = [DeserializationParam(key_entries(info), self.call.asked.get(info.keys)) for info in infos]
        found: Sequence[Any] = await (await self.inner.deserialize(params, self._context(infos[0])))
        return found

    async def metadata(self, infos: Sequence[kernel.ParamInfo]) -> Sequence[Any]:
        params = [DeserializationParam[Any](key_entries(info)) for info in infos]
        found: Sequence[Any] = await self.inner.metadata(params, self._context(infos[0]))
        return found

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Return the sizes of the values: a `LeafHandler` does not know more."""
        return [(leaf_size(value), leaf_size(value)) for value in values]

    def finalize(self, directory: str) -> None:
        """Do nothing: `serialize` has awaited everything."""

    def _path(self, info: kernel.ParamInfo) -> Path:
        return self.call.context.file.path_class(info.directory)

    def _context(self, info: kernel.ParamInfo) -> DeserializationContext:
        saving, limiters = self.call.context.array.saving, self.call.limiters
        byte_limiter = None if limiters is None else limiters.in_flight
        return DeserializationContext(
            self._path(info),
            saving.use_ocdbt,
            saving.use_zarr3,
            ts_context=get_ts_context(),
            byte_limiter=byte_limiter,
        )
