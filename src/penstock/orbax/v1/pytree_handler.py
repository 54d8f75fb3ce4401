"""Trees as checkpointables: penstock's pipelines as a handler of v1, with v1's leaf handlers.

Below it, a tree as it is stored and as it is asked for: the target and the options of penstock's `restore`.
"""

from __future__ import annotations

__all__ = ("CustomLeaves", "PyTreeHandler", "mismatch", "read_tree", "save_format_of")

import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, final

import jax
import numpy as np
from anyio import to_thread
from jax import tree_util
from jax.sharding import Sharding

from penstock import Checkpointer, HandlerRegistry, SaveArgs, SaveFormat, kernel
from penstock import handlers as built_in
from penstock.embedding import RestoreOptions, TreeDirectory, dtypes, file_names, flattening, pair_keys
from penstock.errors import InvalidLeafError, NoHandlerError, NotACheckpointError, StructureMismatchError
from penstock.orbax.arrays import is_narrowed, jax_dtype, number_type
from penstock.orbax.enclosing_save import joint_build_around
from penstock.orbax.item_files import store_at
from penstock.orbax.leaf_args import leaves_first
from penstock.orbax.restore_tree import LeafTarget, clashing_keys
from penstock.orbax.serialization import get_ts_context
from penstock.orbax.stage_workers import Limiters, key_entries, leaf_size, save_stages
from penstock.orbax.type_handlers import Validator
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
from penstock.orbax.v1.tree import (
    PLACEHOLDER,
    PyTree,
    has_attributes,
    is_supported_abstract_leaf,
    is_supported_leaf,
)
from penstock.orbax.value_metadata import StorageMetadata, ZarrMetadata, from_serialized_string

_jax: Any = jax
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
        # Leaf handlers may write databases of their own.
        pipeline = save_stages(merges=options.use_ocdbt and build is None)

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
                is_partial=self._context.pytree.loading.partial_load,
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


_PYTHON: Final = (bool, int, float)

Finish = Callable[[Any], Any]


@final
@dataclass(frozen=True, slots=True)
class StoredTree:
    """The recorded description of each leaf of a tree, in order."""

    keys: Sequence[kernel.KeyPath]
    kinds: Sequence[tuple[Any, ...]]
    specs: Sequence[kernel.LeafSpec]
    documents: Sequence[Mapping[str, Any] | None]  #: of arrays in zarr, their metadata


def read_tree(directory: str) -> StoredTree:
    """Read the documents of the tree in a directory. Blocking.

    Raises:
        NotACheckpointError: If there is none. It is a FileNotFoundError.
        CorruptCheckpointError: If it is damaged.
    """
    store = store_at(directory, snapshot=True)
    if store.kind(os.path.join(directory, file_names.METADATA)) is None:
        raise NotACheckpointError(directory, f"holds no tree: it has no {file_names.METADATA}")

    checkpoint = built_in.OrbaxLayout().open(store, directory)
    leaves = checkpoint.leaves
    documents = [checkpoint.zarr_metadata(number) for number in range(len(leaves))]
    return StoredTree(leaves.keys, leaves.kinds, leaves.specs, documents)


def save_format_of(saving: ArrayOptions.Saving, *, jointly: bool = False) -> SaveFormat:
    """Return the save format that the options of a tree describe.

    Args:
        saving: The options.
        jointly: Whether several processes save it together.
    """
    parallel = saving.use_replica_parallel
    least, most = saving.min_slice_bytes_for_replica_parallel, saving.max_replicas_for_replica_parallel
    form = SaveFormat(
        ocdbt=saving.use_ocdbt,
        zarr=3 if saving.use_zarr3 else 2,
        codec="auto" if saving.use_compression else "none",
        ocdbt_target_data_file_size=saving.ocdbt_target_data_file_size if saving.use_ocdbt else None,
    )
    if not jointly:
        return form

    return replace(
        form,
        replica_parallel=parallel is not False,
        replica_parallel_min_bytes=form.replica_parallel_min_bytes if least is None else least,
        replica_parallel_max_replicas=most,
    )


@final
@dataclass(slots=True)
class LoadPlan:
    """The target and the options of a restore that loads a tree as requested."""

    like: Any = ...
    options: RestoreOptions = field(default_factory=RestoreOptions)
    finishes: dict[int, Finish] = field(default_factory=dict[int, Finish])  #: by place in flatten order
    asked: dict[kernel.KeyPath, Any] = field(
        default_factory=dict[kernel.KeyPath, Any]
    )  #: of leaves with their own handlers

    def finish(self, tree: Any) -> Any:
        """Convert what was restored to what was requested, with dicts in the order of their names."""
        leaves, treedef = flattening.flatten_tree(tree)
        values = [leaf.value for leaf in leaves]
        for at, finish in self.finishes.items():
            values[at] = finish(values[at])

        return _tree.tree_unflatten(treedef, values)


def plan_load(
    abstract: Any,
    stored: StoredTree,
    *,
    is_partial: bool = False,
    keeps_missing: bool = True,
    resize: bool = False,
    custom: Mapping[str, type[Any]] | None = None,
) -> LoadPlan:
    """Decide the target and the options of `restore`.

    Args:
        abstract: The requested tree: values, structs, types, None for as stored, or placeholders.
        stored: The description of the stored tree.
        is_partial: Whether leaves may be left out of `abstract`, and others be there.
        keeps_missing: Whether leaves that are not stored are those of a partial result.
        resize: Whether arrays may be padded and truncated.
        custom: The types of leaves that user-defined handlers saved, by recorded name.

    Raises:
        ValueError: If they do not fit.
    """
    wanted, treedef = flattening.flatten_tree(abstract)
    specs = dict(zip(stored.keys, stored.specs, strict=True))
    _check_keys(wanted, stored, is_partial=is_partial, keeps_missing=keeps_missing)

    plan, likes, left_out, kept = LoadPlan(), list[Any](), dict[kernel.KeyPath, None](), False
    casts: dict[kernel.KeyPath, Any] = {}
    resized = False
    for at, leaf in enumerate(wanted):
        spec = specs.get(leaf.info.keys)
        if leaf.value is PLACEHOLDER and spec is not None:
            left_out[leaf.info.keys] = None
        if spec is None or leaf.value is PLACEHOLDER:
            # `restore` keeps no leaf that only describes one.
            stays = is_supported_leaf(leaf.value) or flattening.is_empty(leaf.value)
            likes.append(leaf.value if stays else PLACEHOLDER)
            if not stays:
                plan.finishes[at] = partial(_kept, leaf.value)
            kept = kept or is_partial or not flattening.is_empty(leaf.value)
            continue
        if spec.typestr in (custom or {}):
            plan.asked[leaf.info.keys] = leaf.value
            likes.append((custom or {})[spec.typestr])
            continue

        one = _leaf_target(leaf.value, spec, resize=resize)
        likes.append(one.like)
        if one.finish is not None:
            plan.finishes[at] = one.finish
        if one.dtype is not None:
            casts[leaf.info.keys] = one.dtype

        resized = resized or one.resized

    plan.like = _tree.tree_unflatten(treedef, likes)
    plan.options = RestoreOptions(
        rename=left_out if kept else None,  # placeholders, and values that the checkpoint lacks
        on_missing="keep" if kept else "raise",
        on_unexpected="skip" if is_partial else "raise",
        dtype=casts.get if casts else None,
        strict=not resized,
    )
    return plan


def _kept(value: Any, _restored: object) -> Any:
    return value


def _check_keys(wanted: Sequence[Any], stored: StoredTree, *, is_partial: bool, keeps_missing: bool) -> None:
    """Refuse leaves that only one side has. `restore` compares empty containers."""
    pairing = pair_keys([leaf.info.keys for leaf in wanted], stored.keys)
    missing = [wanted[at] for at in pairing.missing]
    missing = [leaf for leaf in missing if not (flattening.is_empty(leaf.value) or leaf.value is PLACEHOLDER)]
    refused: Collection[kernel.KeyPath] = {leaf.info.keys for leaf in missing}
    if is_partial and keeps_missing and missing:
        indices = [[kind is kernel.KeyKind.SEQUENCE for kind in kinds] for kinds in stored.kinds]
        refused = clashing_keys(refused, dict(zip(stored.keys, indices, strict=True)))

    problems = [
        f"{leaf.info.key_path}: requested, but not in the checkpoint"
        for leaf in missing
        if leaf.info.keys in refused
    ]
    if not is_partial:
        unexpected = [(stored.keys[row], stored.specs[row]) for row in pairing.unexpected]
        problems += [
            f"{'.'.join(keys)}: in the checkpoint, but not requested"
            for keys, spec in unexpected
            if not spec.is_empty_marker
        ]
    if problems:
        raise mismatch(problems)


def mismatch(problems: Sequence[str]) -> ValueError:
    """Return the error for trees that do not match; it begins with the same words as Orbax's."""
    shown = [*problems[:40], *([f"... and {len(problems) - 40} more"] if len(problems) > 40 else [])]
    return ValueError(
        "User-provided restore item and on-disk value metadata tree structures do not match:\n  "
        + "\n  ".join(shown)
    )


def _leaf_target(abstract: Any, spec: kernel.LeafSpec, *, resize: bool) -> LeafTarget:
    if spec.typestr == "None" and is_supported_abstract_leaf(abstract):
        return LeafTarget(None)  # it was masked when it was saved
    if spec.is_empty_marker:
        return LeafTarget(empty_value(spec) if abstract is None else abstract)
    if abstract is None or spec.shape is None:
        return _as_saved(spec) if abstract is None else LeafTarget(abstract)

    kind = abstract if isinstance(abstract, type) else type(abstract)
    if has_attributes(kind, "shape", "dtype", "sharding"):
        return _array(None if abstract is kind else abstract, spec, resize=resize)
    if has_attributes(kind, "shape", "dtype"):
        struct: Any = abstract
        return _host_array(spec, None if abstract is kind else struct.dtype)
    if issubclass(kind, _PYTHON):
        return _number(kind, spec)

    return LeafTarget(kind)


def _as_saved(spec: kernel.LeafSpec) -> LeafTarget:
    """Request a leaf as it was saved; a jax.Array of a dtype that jax has here."""
    if spec.typestr == "jax.Array" and spec.shape is not None and is_narrowed(spec.dtype):
        return LeafTarget(jax.Array, jax_dtype(spec.dtype))

    return LeafTarget(_as_stored(spec))


def _as_stored(spec: kernel.LeafSpec) -> Any:
    """Return the type that a leaf had when it was saved."""
    match spec.typestr:
        case "jax.Array":
            return jax.Array
        case "np.ndarray":
            return np.ndarray
        case "scalar":
            return number_type(spec.dtype)
        case "string":
            return str
        case _:
            return None


def _array(abstract: Any, spec: kernel.LeafSpec, *, resize: bool) -> LeafTarget:
    if abstract is None:
        return _as_saved(spec)

    shape: Any = abstract.shape if abstract.shape is not None else spec.shape
    dtype: Any = abstract.dtype if abstract.dtype is not None else dtypes.numpy_dtype(spec.dtype)
    if is_narrowed(dtype):
        dtype = jax_dtype(dtype)
    sharding, finish = _placement(abstract)
    if _jax.dtypes.issubdtype(dtype, _jax.dtypes.prng_key):
        return LeafTarget(_jax.ShapeDtypeStruct(shape, dtype, sharding=sharding), finish=finish)
    if tuple(shape) != spec.shape and not resize:
        raise ValueError(
            f"Requested shape: {tuple(shape)} is not compatible with the stored shape: {spec.shape}. To pad "
            "and truncate, set `enable_padding_and_truncation=True` in `ArrayOptions.Loading`."
        )

    impl = spec.extended_dtype
    if impl is not None:  # requested as key data, as an abstract tree describes it
        finish = partial(_wrap_key, impl)

    changed = None if dtypes.dtype_name(np.dtype(dtype)) == spec.dtype else dtype
    like = _jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return LeafTarget(like, changed, finish, resized=tuple(shape) != spec.shape)


def _wrap_key(impl: str, data: Any) -> Any:
    return _jax.random.wrap_key_data(data, impl=impl)


def _placement(abstract: Any) -> tuple[Sharding | None, Finish | None]:
    """Return the sharding of an array, and the function that applies a requested memory layout."""
    sharding: Any = abstract.sharding
    if sharding is None or isinstance(sharding, Sharding):
        return sharding, None
    if hasattr(sharding, "to_jax_sharding"):
        of_orbax: Any = sharding
        return of_orbax.to_jax_sharding(), None

    return sharding.sharding, lambda array: _jax.device_put(array, sharding)


def _host_array(spec: kernel.LeafSpec, dtype: Any, finish: Finish | None = None) -> LeafTarget:
    """Request a NumPy array of the stored shape."""
    stored = dtypes.numpy_dtype(spec.dtype)
    if dtype is None or isinstance(dtype, property) or np.dtype(dtype) == stored:
        return LeafTarget(np.ndarray, finish=finish)

    # A view of one element says shape and dtype and holds no memory.
    like = np.broadcast_to(np.zeros((), np.dtype(dtype)), spec.shape or ())
    return LeafTarget(like, np.dtype(dtype), finish=finish)


def _number(kind: type[Any], spec: kernel.LeafSpec) -> LeafTarget:
    """Request a Python number, converted from whatever is stored."""
    if spec.shape != ():
        raise ValueError(f"Restored result is not a scalar: it has the shape {spec.shape}.")
    if spec.typestr == "scalar" and _as_stored(spec) is kind:
        return LeafTarget(kind)

    return _host_array(spec, None, lambda array: kind(array.item()))


@dataclass
class ArrayMetadata:
    """Describes a jax.Array; its abstract leaf."""

    shape: tuple[int, ...] | None
    dtype: Any
    sharding_metadata: Any
    storage_metadata: Any

    @property
    def sharding(self) -> Sharding | None:
        """The sharding it was saved with.

        Raises:
            ValueError: If its devices are not here.
        """
        return None if self.sharding_metadata is None else self.sharding_metadata.to_jax_sharding()


@dataclass
class NumpyShapeDtype:
    """The abstract leaf of a NumPy array."""

    shape: tuple[int, ...] | None
    dtype: Any


@dataclass
class NumpyMetadata:
    """Describes a NumPy array; its abstract leaf."""

    shape: tuple[int, ...] | None
    dtype: Any
    storage_metadata: Any


_EMPTY: Final[dict[str, type[Any]]] = {"Dict": dict, "List": list, "Tuple": tuple}


def leaf_metadata(spec: kernel.LeafSpec, document: Mapping[str, Any] | None = None) -> Any:
    """Describe a leaf: arrays by their metadata, numbers and strings by an example.

    Args:
        spec: What is stored.
        document: Of an array in zarr, its metadata there.
    """
    match spec.typestr:
        case "jax.Array":
            sharding = _sharding(spec.sharding) if spec.sharding else None
            zarr = ZarrMetadata.from_json(document)
            storage = StorageMetadata(spec.chunk_shape, spec.write_shape, zarr)
            return ArrayMetadata(spec.shape, dtypes.numpy_dtype(spec.dtype), sharding, storage)
        case "np.ndarray":
            storage = StorageMetadata(spec.chunk_shape, None, ZarrMetadata.from_json(document))
            return NumpyMetadata(spec.shape, dtypes.numpy_dtype(spec.dtype), storage)
        case "scalar":
            return 0 if np.issubdtype(dtypes.numpy_dtype(spec.dtype), np.integer) else 0.0
        case "string":
            return "string"
        case _ if spec.is_empty_marker:
            return empty_value(spec)
        case typestr:
            return typestr


def _sharding(text: str) -> Any:
    """Read a recorded sharding; None for a kind that jax no longer has."""
    try:
        return from_serialized_string(text)
    except (ValueError, NotImplementedError, KeyError):
        return None


def empty_value(spec: kernel.LeafSpec) -> Any:
    """Return the empty container, or None, that a marker stands for."""
    kind = _EMPTY.get(spec.typestr)
    return None if kind is None else kind()
