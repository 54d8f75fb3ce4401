"""The type handlers of leaves: jax.Arrays, NumPy arrays, numbers and strings.

In the save of a tree each stands for the handler of penstock that does the same, its `leaf_handler`.
Programs, and classes that override a method, call `serialize` and `deserialize` themselves. Each such call is
a batch of `array_io`: TensorStore writes and reads its arrays.
"""

from __future__ import annotations

__all__ = (
    "ArrayHandler",
    "InvalidShardingError",
    "NumpyHandler",
    "ScalarHandler",
    "SingleReplicaArrayHandler",
    "SpecOptions",
    "StringHandler",
    "by_one_replica",
    "replicas_share_by_default",
)

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Final, cast, final

import jax
import numpy as np
import numpy.typing as npt
import tensorstore as ts

from penstock import handlers as built_in
from penstock import kernel
from penstock.embedding import ReplicaAxis, RestoreOptions, blocking, dtypes, encode_strings, file_names
from penstock.errors import InvalidLeafError
from penstock.orbax.array_io import (
    ArrayToRead,
    ArrayToWrite,
    ReplicaOptions,
    begin_writing,
    check_infos,
    leaf_to_write,
    open_arrays,
    opened_metadata,
    read_arrays,
    read_values,
    sharding_pointer,
    target_of,
    write_shape_of,
    write_values,
)
from penstock.orbax.array_metadata_store import RANDOM_KEY_IMPL
from penstock.orbax.array_metadata_store import ArrayMetadata as RecordedArray
from penstock.orbax.arrays import asked_placement, is_narrowed, jax_dtype, key_data
from penstock.orbax.future import in_thread
from penstock.orbax.leaf_args import (
    ParamInfo,
    RestoreArgs,
    SaveArgs,
    SingleReplicaArrayRestoreArgs,
    check_input_arguments,
)
from penstock.orbax.multihost import has_primary_host, is_primary_host, process_count, process_index
from penstock.orbax.serialization import (
    chunk_shape_for,
    get_cast_tspec_deserialize,
    get_json_tspec_read,
    get_json_tspec_write,
)
from penstock.orbax.stage_workers import TypeHandler
from penstock.orbax.value_metadata import ScalarMetadata, StringMetadata, from_serialized_string

_jax: Any = jax
_ts: Any = ts  # its stubs use names that they do not define

_RANKS: Final = range(3)
"""The values of Orbax's `TransferPriority` but for the unknown: at once, soon, later."""


class _ArraysBySpecs(TypeHandler):
    """Stores arrays by TensorStore, where and as its specs say. Programs override how those are made."""

    _metadata_key: str | None

    def _get_json_tspec_write(
        self,
        info: ParamInfo,
        value: Any,
        use_ocdbt: bool = False,
        process_index: int | str | None = None,
        arg: SaveArgs | None = None,
    ) -> dict[str, Any]:
        """Return TensorStore's spec to write an array. An override is called in saves of whole trees, too."""
        dtype = value.dtype if arg is None or arg.dtype is None else arg.dtype
        return get_json_tspec_write(
            info,
            use_ocdbt,
            tuple(value.shape),
            self._part_of(value),
            dtype,
            process_index,
            self._metadata_key,
            arg,
        )

    def _get_json_tspec_read(self, info: ParamInfo, use_ocdbt: bool = False) -> dict[str, Any]:
        """Return TensorStore's spec to read a leaf; likewise."""
        missing_is_error = info.raise_array_data_missing_error
        return get_json_tspec_read(info, use_ocdbt, self._metadata_key, missing_is_error)

    def _part_of(self, value: Any) -> tuple[int, ...]:
        """Return the shape of what is written of an array at once."""
        return tuple(value.shape)

    async def _open(self, infos: Sequence[ParamInfo], dtypes: Sequence[Any] | None) -> list[Any]:
        """Open stored arrays, cast to `dtypes` if they are to be restored."""
        for info in infos:
            await info.await_path_creation()

        specs = [self._get_json_tspec_read(info, bool(info.is_ocdbt_checkpoint)) for info in infos]
        if dtypes is not None:
            specs = [
                get_cast_tspec_deserialize(spec, RestoreArgs(dtype=dtype))
                for spec, dtype in zip(specs, dtypes, strict=True)
            ]

        return await open_arrays(infos, specs, compare=dtypes is not None)


class ArrayHandler(_ArraysBySpecs):
    """Stores the distinct shards of a jax.Array; typed PRNG keys as their key data.

    Args:
        metadata_key: The name of an array's metadata file; by default that of its format.
        primary_host: The process that records shardings; with None each does. A job that has no such
            process records none.
        replica_id: Which replica of a shard is written.
        use_replica_parallel: Whether chunks are cut as if replicas shared the work of writing; by
            default unless JAX_PLATFORMS names a GPU. In a pipeline a shard is one chunk all the same.
        min_slice_bytes_for_replica_parallel: Bytes below which a shard is not cut so.
        max_replicas_for_replica_parallel: The most parts that it is cut into.
        enable_write_sharding_file: Whether shardings are recorded.
        array_metadata_store: Records how arrays were cut, and the kind of typed keys; None to record neither.
        enable_replica_parallel_separate_folder: Whether what is replicated has its own directory.
        dispatcher: Not supported: must be None.
        callback: Its `on_transfer_end` and `on_write_end` are called with the keys of each array; and first
            its `key_priority`, if copies to the host are limited, for the order of the copies.

    Raises:
        NotImplementedError: If there is a dispatcher.
    """

    def __init__(
        self,
        metadata_key: str | None = None,
        primary_host: int | None = 0,
        replica_id: int | None = 0,
        use_replica_parallel: bool | None = None,
        min_slice_bytes_for_replica_parallel: int | None = None,
        max_replicas_for_replica_parallel: int | None = None,
        enable_write_sharding_file: bool = True,
        array_metadata_store: Any = None,
        enable_replica_parallel_separate_folder: bool = False,
        dispatcher: Any = None,
        callback: Any = None,
    ) -> None:
        if dispatcher is not None:
            raise NotImplementedError("penstock has no dispatchers: every process saves its own shards")
        if use_replica_parallel is None:
            use_replica_parallel = replicas_share_by_default()

        self._metadata_key = metadata_key
        self._primary_host = primary_host
        self._replica_id = replica_id
        self._enable_write_sharding_file = enable_write_sharding_file
        self._array_metadata_store = array_metadata_store
        self._callback = callback
        self._replicas = ReplicaOptions(
            use_replica_parallel,
            min_slice_bytes_for_replica_parallel,
            max_replicas_for_replica_parallel,
            enable_replica_parallel_separate_folder,
        )

    def has_dispatcher(self) -> bool:
        """Return False: penstock has no dispatchers."""
        return False

    def typestr(self) -> str:
        """`jax.Array`."""
        return "jax.Array"

    @property
    def leaf_handler(self) -> Any:
        """The equivalent handler of the pipeline, shared by equal handlers; None if there is none."""
        if self._metadata_key is not None or self._callback is not None:
            return None

        described = SpecOptions(
            replace(self._replicas, separate_folder=False),
            self._replica_id,
            self._enable_write_sharding_file and has_primary_host(self._primary_host),
            self._array_metadata_store is not None,
        )
        return _leaf_handler(self.typestr(), None if described == SpecOptions() else described)

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        """Describe each stored leaf by an `ArrayMetadata`, with its sharding if one is recorded."""
        opened = await self._open(infos, None)
        shardings = await _recorded(infos, range(len(infos)))
        return [
            opened_metadata(store, info, from_serialized_string(text) if text else None)
            for store, info, text in zip(opened, infos, shardings, strict=True)
        ]

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[kernel.Waitable]:
        """Bring arrays to the host, and begin to write them: they may be donated when this returns.

        Raises:
            ValueError: If an array has no elements, cannot be stored, or two leaves have one name.
            DeletedLeafError: If an array is deleted or donated.
        """
        args = args or [SaveArgs()] * len(values)
        check_input_arguments(values, infos, args)
        check_infos(infos)
        refuse_empty(values, infos)
        values, infos, args = self._prioritised(values, infos, args)
        arrays = [
            self._to_write(value, info, arg) for value, info, arg in zip(values, infos, args, strict=True)
        ]
        recorded = [(one.leaf.spec, arg) for one, arg in zip(arrays, args, strict=True)]
        record = partial(self._record, infos, recorded)
        written = await begin_writing(arrays, record)
        self._tell("on_transfer_end", infos)
        return [written]

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None
    ) -> Sequence[Any]:
        """Read arrays, each with the requested or else the recorded sharding.

        Args:
            infos: Of the leaves.
            args: `ArrayRestoreArgs`, or `RestoreArgs` to use the recorded sharding.

        Raises:
            ValueError: If there are no `args`, a leaf has no sharding or one over devices that
                are not here, or the shape differs.
            FileNotFoundError: If an array with its own directory is missing.
        """
        if args is None:
            raise ValueError("to be restored as a jax.Array, a leaf needs ArrayRestoreArgs")

        check_input_arguments(infos, args)
        check_infos(infos)
        if infos[0].is_ocdbt_checkpoint is None:
            raise ValueError("is_ocdbt_checkpoint says how a stored array is to be read, and cannot be None")
        for info in infos:
            await info.await_path_creation()

        places = await _shardings(infos, args)
        opened = await self._open(infos, [arg.dtype for arg in args])
        narrow = [_narrowed(store) for store in opened]
        impls = await self._key_impls(infos)
        return await read_arrays(
            [
                ArrayToRead(
                    info, store, target_of(arg, place, info, store), _finish(place, impls.get(info.name))
                )
                for info, store, arg, place in zip(infos, narrow, args, places, strict=True)
            ]
        )

    def _part_of(self, value: Any) -> tuple[int, ...]:
        return write_shape_of(value, self._replicas)

    def _to_write(self, value: Any, info: ParamInfo, arg: SaveArgs) -> ArrayToWrite:
        def part() -> tuple[int, ...]:
            return self._part_of(key_data(value))

        def spec() -> dict[str, Any]:
            data, database = key_data(value), bool(info.is_ocdbt_checkpoint)
            options = self._replicas
            apart = options.separate_folder and options.parallel and _is_replicated(data.sharding)
            process = f"replica_{process_index()}" if apart else process_index()
            return self._get_json_tspec_write(info, data, database, process if database else None, arg)

        return ArrayToWrite(info, leaf_to_write(value, info, built_in.ArrayHandler(), arg.dtype, part), spec)

    async def _record(
        self, infos: Sequence[ParamInfo], saved: Sequence[tuple[kernel.LeafSpec, SaveArgs]]
    ) -> None:
        """Write what documents say of arrays that are durable."""
        # The shardings of arrays are those of all processes.
        if self._enable_write_sharding_file and is_primary_host(self._primary_host):
            texts = [
                (info, sharding_pointer(info.name), spec.sharding)
                for info, (spec, _) in zip(infos, saved, strict=True)
                if spec.sharding
            ]
            await in_thread(write_values, file_names.SHARDING, texts)

        if self._array_metadata_store is not None:
            arrays = [_recorded_array(info, *one) for info, one in zip(infos, saved, strict=True)]
            await self._array_metadata_store.write(infos[0].parent_dir, arrays, process_index())

        self._tell("on_write_end", infos)

    async def _key_impls(self, infos: Sequence[ParamInfo]) -> dict[str, str]:
        """Find which leaves are typed PRNG keys, and of which kind."""
        if self._array_metadata_store is None:
            return {}

        found = await self._array_metadata_store.read(checkpoint_dir=infos[0].parent_dir)
        entries = next(iter(found.values())) if found else ()
        extras: dict[str, dict[str, Any]] = {one.param_name: one.ext_metadata or {} for one in entries}
        return {name: extra[RANDOM_KEY_IMPL] for name, extra in extras.items() if RANDOM_KEY_IMPL in extra}

    def _prioritised(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs]
    ) -> tuple[Sequence[Any], Sequence[ParamInfo], Sequence[SaveArgs]]:
        """Order leaves as the callback wants them, if copies to the host are limited, as in Orbax.

        Raises:
            ValueError: If the callback knows no priority for one.
        """
        if self._callback is None or infos[0].device_host_byte_limiter is None:
            return values, infos, args

        ranks = [int(self._callback.key_priority(info.keypath).value) for info in infos]
        for info, rank in zip(infos, ranks, strict=True):
            if rank not in _RANKS:
                raise ValueError(f"Prioritization is unknown for key {info.keypath}.")

        order = sorted(range(len(ranks)), key=ranks.__getitem__)  # which keeps the order of equals
        return [values[at] for at in order], [infos[at] for at in order], [args[at] for at in order]

    def _tell(self, event: str, infos: Sequence[ParamInfo]) -> None:
        if self._callback is not None:
            for info in infos:
                getattr(self._callback, event)(info.keypath)


def _recorded_array(info: ParamInfo, spec: kernel.LeafSpec, arg: SaveArgs) -> RecordedArray:
    shape, part, dtype = spec.shape or (), spec.chunk_shape, dtypes.numpy_dtype(spec.dtype)
    database = bool(info.is_ocdbt_checkpoint)
    chunks = chunk_shape_for(info, use_ocdbt=database, shape=shape, write_shape=part, dtype=dtype, arg=arg)
    extra = {RANDOM_KEY_IMPL: spec.extended_dtype} if spec.extended_dtype else None
    return RecordedArray(info.name, shape, dtype, part, chunks, database, bool(info.use_zarr3), extra)


def _is_replicated(sharding: Any) -> bool:
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = cast("Sequence[object]", tuple(sharding.spec))
        return len(sharding.mesh.axis_names) > len(spec) or not spec or None in spec

    return isinstance(sharding, jax.sharding.SingleDeviceSharding)


def _narrowed(store: Any) -> Any:
    """Return an open array as jax holds it, where 64-bit types may be disabled."""
    dtype = store.dtype.numpy_dtype
    return _ts.cast(store, jax_dtype(dtype)) if is_narrowed(dtype) else store


def _finish(place: Any, key_impl: str | None) -> Callable[[Any], Any] | None:
    """Return what makes typed keys of their data, and chooses the memory layout; None if neither is asked."""
    memory = None if isinstance(place, jax.sharding.Sharding) else place
    if key_impl is None and memory is None:
        return None

    def finish(array: Any) -> Any:
        if key_impl is not None:
            array = _jax.random.wrap_key_data(array, impl=key_impl)

        return array if memory is None else _jax.device_put(array, memory)

    return finish


async def _shardings(infos: Sequence[ParamInfo], args: Sequence[RestoreArgs]) -> list[Any]:
    """Find the requested or else the recorded sharding of each leaf."""
    shardings = [asked_placement(arg) for arg in args]
    absent = [at for at, sharding in enumerate(shardings) if sharding is None]
    for at, text in zip(absent, await _recorded(infos, absent), strict=True):
        if text is None:
            raise ValueError(
                f"no sharding is recorded for the leaf {infos[at].name!r}: give `sharding`, or `mesh` and "
                f"`mesh_axes`, in ArrayRestoreArgs"
            )
        shardings[at] = from_serialized_string(text).to_jax_sharding()

    return shardings


async def _recorded(infos: Sequence[ParamInfo], which: Sequence[int]) -> list[str | None]:
    """Read the recorded sharding of some leaves; None for all if nothing is recorded there."""
    if not which or not await in_thread(
        os.path.exists, os.path.join(infos[0].parent_dir, file_names.SHARDING)
    ):
        return [None] * len(which)

    chosen = [infos[at] for at in which]
    texts = await read_values(file_names.SHARDING, chosen, [sharding_pointer(info.name) for info in chosen])
    return [cast("str", text) or None for text in texts]


@lru_cache(maxsize=64)
def _leaf_handler(typestr: str, described: SpecOptions | None) -> built_in.ArrayHandler:
    """Equal handlers share one: a tree is planned anew for each different one."""
    return built_in.ArrayHandler(typestr, described=described)


@final
@dataclass(frozen=True, slots=True)
class SpecOptions:
    """Adapts the handler's description of each array to the options."""

    replicas: ReplicaOptions = field(default_factory=ReplicaOptions)
    replica_id: int | None = 0  #: of the replica that writes a shard that is not divided; None for any
    shardings: bool = True  #: whether shardings are recorded
    shapes: bool = True  #: whether the chunks of arrays and the kind of typed keys are recorded

    def __call__(self, spec: kernel.LeafSpec, key_path: str) -> kernel.LeafSpec:
        """Return the spec with the options applied.

        Raises:
            InvalidLeafError: If no replica would write the array; it is a ValueError.
        """
        if self.replicas.parallel and self.replica_id is None:
            raise InvalidLeafError(key_path, "use_replica_parallel needs a replica_id")

        shard, part = spec.write_shape, None
        if shard is not None:
            part = self.replicas.part_of(shard, spec.replicas.n, spec.itemsize)

        n_parts = 1 if shard is None or part is None else math.prod(shard) // math.prod(part)
        if n_parts == 1 and (self.replica_id or 0) >= spec.replicas.n:
            problem = f"replica_id is {self.replica_id}, but its shards have {spec.replicas.n} replicas"
            raise InvalidLeafError(key_path, problem)

        spec = replace(
            spec,
            replicas=replace(spec.replicas, n=n_parts),
            sharding=spec.sharding if self.shardings else None,
            shapes_recorded=self.shapes,
        )
        if not spec.replicas.is_global:
            return spec
        # Of several processes it is said here which replicas write what: nothing else divides it then.
        if part is None:
            return replace(spec, replicas=replace(spec.replicas, n=1, writer=self.replica_id or 0))

        replicas = replace(spec.replicas, n=1, n_writers=n_parts)
        return replace(spec, replicas=replicas, write_shape=part, chunk_shape=part)


def replicas_share_by_default() -> bool:
    """Return whether replicas share the work by default: unless JAX_PLATFORMS names a GPU, as in Orbax."""
    platforms = os.environ.get("JAX_PLATFORMS", "").lower()
    return "gpu" not in platforms and "cuda" not in platforms


class NumpyHandler(_ArraysBySpecs):
    """Stores an `np.ndarray` whole.

    Args:
        metadata_key: The name of an array's metadata file; by default that of its format.
        ocdbt_process_id: The process whose directory in the database gets the arrays; by default this one.
            Has no effect in a tree.
        deepcopy_host_arrays: Has no effect: arrays are copied, so that they may change during the save.
    """

    def __init__(
        self,
        metadata_key: str | None = None,
        ocdbt_process_id: str | None = None,
        deepcopy_host_arrays: bool = True,
    ) -> None:
        self._metadata_key = metadata_key
        self._process_id = ocdbt_process_id

    def typestr(self) -> str:
        """`np.ndarray`."""
        return "np.ndarray"

    @cached_property
    def leaf_handler(self) -> Any:
        """The equivalent handler of the pipeline; None if there is none."""
        return None if self._metadata_key else built_in.NumpyHandler(self.typestr())

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        """Describe each stored leaf by an `ArrayMetadata`."""
        opened = await self._open(infos, None)
        return [opened_metadata(store, info) for store, info in zip(opened, infos, strict=True)]

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[kernel.Waitable]:
        """Copy arrays, and begin to write them.

        Raises:
            ValueError: If an array has no elements, or two leaves have one name.
        """
        args = args or [SaveArgs()] * len(values)
        check_input_arguments(values, infos, args)
        check_infos(infos)
        refuse_empty(values, infos)
        arrays = [
            self._to_write(value, info, arg) for value, info, arg in zip(values, infos, args, strict=True)
        ]
        return [await begin_writing(arrays, _nothing)]

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None
    ) -> Sequence[Any]:
        """Read arrays, cast to the requested dtypes.

        Raises:
            FileNotFoundError: If one with its own directory is missing.
            ValueError: If one in a database is missing.
        """
        args = args or [RestoreArgs()] * len(infos)
        check_input_arguments(infos, args)
        opened = await self._open(infos, [arg.dtype for arg in args])
        return await read_arrays(
            [ArrayToRead(info, store, np.ndarray) for info, store in zip(infos, opened, strict=True)]
        )

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Return for each value its bytes, to write and to read."""
        sizes = [np.asarray(value).nbytes for value in values]
        return [(size, size) for size in sizes]

    def _to_write(self, value: Any, info: ParamInfo, arg: SaveArgs) -> ArrayToWrite:
        def spec() -> dict[str, Any]:
            database = bool(info.is_ocdbt_checkpoint)
            process = (self._process_id or process_index()) if database else None
            return self._get_json_tspec_write(info, shown, database, process, arg)

        shown = _jax.ShapeDtypeStruct(value.shape, value.dtype)
        leaf = leaf_to_write(value, info, built_in.NumpyHandler(), arg.dtype, lambda: tuple(value.shape))
        return ArrayToWrite(info, leaf, spec)


async def _nothing() -> None:
    """Write no documents."""


class ScalarHandler(NumpyHandler):
    """Stores a number as an array without axes; it is restored as a Python number.

    Args:
        metadata_key: See `NumpyHandler`.
        ocdbt_process_id: Has no effect in a tree, see `NumpyHandler`.
    """

    def __init__(self, metadata_key: str | None = None, ocdbt_process_id: str | None = None) -> None:
        super().__init__(metadata_key, ocdbt_process_id, deepcopy_host_arrays=False)

    def typestr(self) -> str:
        """`scalar`."""
        return "scalar"

    @cached_property
    def leaf_handler(self) -> Any:
        """The equivalent handler of the pipeline; None if there is none."""
        return None if self._metadata_key else built_in.ScalarHandler(self.typestr())

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        """Describe each stored leaf by a `ScalarMetadata`."""
        found = await super().metadata(infos)
        return [ScalarMetadata(name=one.name, directory=one.directory, dtype=one.dtype) for one in found]

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[kernel.Waitable]:
        """Begin to write numbers."""
        return await super().serialize([np.asarray(value) for value in values], infos, args)

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None
    ) -> Sequence[Any]:
        """Read numbers, each converted to its `restore_type`.

        Raises:
            ValueError: If the stored value is not a number.
        """
        numbers: list[Any] = []
        for info, value in zip(infos, await super().deserialize(infos, args), strict=True):
            if value.ndim:
                raise ValueError(f"the leaf {info.name!r} is not a number: its shape is {value.shape}")
            numbers.append(value.item())

        kinds = [arg.restore_type for arg in args] if args else [None] * len(numbers)
        return [kind(number) if kind else number for kind, number in zip(kinds, numbers, strict=True)]


def refuse_empty(values: Sequence[Any], infos: Sequence[ParamInfo]) -> None:
    """Raise `ValueError` if an array has no elements, which Orbax can neither write nor read."""
    for value, info in zip(values, infos, strict=True):
        if value.size == 0:
            raise ValueError(f"an array without elements cannot be saved: {info.name!r} is {value.shape}")


class StringHandler(TypeHandler):
    """Stores a `str` in a JSON document that all strings of a tree share.

    Args:
        filename: Of the document; by default `_strings.json`.
    """

    def __init__(self, filename: str | None = None) -> None:
        self._filename = filename or file_names.STRINGS

    def typestr(self) -> str:
        """`string`."""
        return "string"

    @cached_property
    def leaf_handler(self) -> Any:
        """The equivalent handler of the pipeline; None if there is none."""
        return built_in.StringHandler(self.typestr()) if self._filename == file_names.STRINGS else None

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        """Describe each stored leaf by a `StringMetadata`. Reads nothing."""
        for info in infos:
            await info.await_path_creation()

        return [StringMetadata(name=info.name, directory=info.parent_dir) for info in infos]

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[kernel.Waitable]:
        """Begin to write strings.

        Raises:
            ValueError: If two would be stored in one place, or one cannot be stored under its name.
        """
        check_input_arguments(values, infos)
        check_infos(infos)
        _check_places(values, infos)
        return [blocking.start_thread(self._write, list(values), infos)]

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None
    ) -> Sequence[Any]:
        """Read strings.

        Raises:
            ValueError: If one is not there.
        """
        check_input_arguments(infos)
        for info in infos:
            await info.await_path_creation()

        found = await read_values(self._filename, infos, [f"/{info.name}" for info in infos])
        return [str(value) for value in found]

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Return the length of each string in bytes."""
        sizes = [len(str(value).encode(errors="replace")) for value in values]
        return [(size, size) for size in sizes]

    def _write(self, values: Sequence[str], infos: Sequence[ParamInfo]) -> None:
        blocking.run_sync(_created, infos)
        write_values(
            self._filename, [(i, f"/{i.name}", str(value)) for i, value in zip(infos, values, strict=True)]
        )


async def _created(infos: Sequence[ParamInfo]) -> None:
    for info in infos:
        await info.await_path_creation()


def _check_places(values: Sequence[Any], infos: Sequence[ParamInfo]) -> None:
    """Refuse a name that is a prefix of another: a slash nests in the document, so one would be lost."""
    places = [kernel.ParamInfo((info.name,), (kernel.KeyKind.MAPPING,), info.name) for info in infos]
    texts = list(map(str, values))
    built_in.StringHandler().describe(texts, places, {})  # refuses what cannot be stored
    encode_strings(list(zip(places, texts, strict=True)))


class InvalidShardingError(ValueError):
    """A sharding without replicas."""


class SingleReplicaArrayHandler(ArrayHandler):
    """Reads each distinct shard once, and puts it on the devices of every replica.

    In a job of several processes, a checkpointer whose registry has it restores with `replica_axis`: one
    replica is read, and sent to the others. In one process `ArrayHandler` reads each shard once, too; this
    one requires that there are replicas.

    Args:
        replica_axis_index: The axis of the mesh along which replicas are.
        primary_replica_id: Which replica is read.
        broadcast_memory_limit_bytes: Has no effect: the checkpointer's `restore_concurrent_bytes` is the
            limit, of which a round takes a quarter.
        broadcast_memory_scaling_factor: Has no effect.
        **kwargs: The options of `ArrayHandler`.
    """

    def __init__(
        self,
        replica_axis_index: int | None = 0,
        primary_replica_id: int | None = 0,
        broadcast_memory_limit_bytes: int | None = None,
        broadcast_memory_scaling_factor: float | None = 0.75,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.replica_axis_index = replica_axis_index
        self.primary_replica_id = primary_replica_id
        self.broadcast_memory_limit_bytes = broadcast_memory_limit_bytes
        self.broadcast_memory_scaling_factor = broadcast_memory_scaling_factor

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None
    ) -> Sequence[Any]:
        """Read arrays.

        Args:
            infos: Of the leaves.
            args: `SingleReplicaArrayRestoreArgs`, each with its sharding.

        Raises:
            InvalidShardingError: If a sharding is not a NamedSharding, or its mesh has one replica.
            ValueError: If there are no such `args`, or as `ArrayHandler` raises it.
        """
        if args is None:
            raise ValueError(
                "a single replica is read with SingleReplicaArrayRestoreArgs, and there are none"
            )

        check_input_arguments(infos, args)
        for arg in args:
            if not isinstance(arg, SingleReplicaArrayRestoreArgs):
                problem = f"a single replica is read with SingleReplicaArrayRestoreArgs, not {type(arg)}"
                raise ValueError(problem)  # the kind that Orbax raises
            if arg.sharding is None:
                raise ValueError("a single replica is read with a sharding, and there is none")

            self._check(arg.sharding)

        return await super().deserialize(infos, args)

    def replicas_of(self, like: Any) -> tuple[str | None, int]:
        """Return the axis of the replicas of a target and which one reads; None if there are no others."""
        index, primary = self.replica_axis_index or 0, self.primary_replica_id or 0
        for leaf in jax.tree.leaves(like):
            sharding = getattr(leaf, "sharding", None)
            if not isinstance(sharding, jax.sharding.NamedSharding):
                continue

            names = cast("Sequence[str]", sharding.mesh.axis_names)
            if index < len(names) and ReplicaAxis(names[index], primary).one_replica(sharding) is not None:
                return names[index], primary

        return None, 0

    def _check(self, sharding: Any) -> None:
        if not isinstance(sharding, jax.sharding.NamedSharding):
            raise InvalidShardingError(
                f"replicas lie along an axis of a mesh: {sharding} is not a NamedSharding"
            )

        devices = cast("npt.NDArray[np.object_]", sharding.mesh.devices)
        one = np.take(devices, self.primary_replica_id or 0, axis=self.replica_axis_index or 0)
        if np.size(one) == len(cast("Any", jax).devices()):
            raise InvalidShardingError("all devices are in one replica: there is no other to read it for")


def by_one_replica(registry: Any, like: Any, options: RestoreOptions) -> RestoreOptions:
    """Return the options of a restore that reads one replica, if the type handler of jax.Arrays does so.

    Args:
        registry: Of type handlers.
        like: The target of the restore; `...` for none.
        options: Those of the restore. One that casts or resizes arrays is of each process alone.
    """
    if process_count() == 1 or like is ... or options.dtype is not None or not options.strict:
        return options

    handler = registry.get(jax.Array) if registry.has(jax.Array) else None
    if not isinstance(handler, SingleReplicaArrayHandler):
        return options

    axis, primary = handler.replicas_of(like)
    return replace(options, replica_axis=axis, primary_replica=primary)
