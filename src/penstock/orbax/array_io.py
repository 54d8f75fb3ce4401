"""Arrays and documents through TensorStore, for type handlers that are called directly.

A call is one batch: it is staged, written in one transaction, and read with its checksums compared.
"""

from __future__ import annotations

__all__ = (
    "ArrayWrite",
    "HostArray",
    "ReplicaOptions",
    "array_request",
    "check_infos",
    "open_arrays",
    "opened_metadata",
    "read_array",
    "read_values",
    "resolve_paths",
    "sharding_pointer",
    "stage",
    "write_arrays",
    "write_values",
)

import math
import os
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast, final

import jax
import numpy as np
import numpy.typing as npt
import tensorstore as ts

from penstock.embedding import (
    await_future,
    built_in,
    check_arrays,
    chunk_shapes,
    dtypes,
    kernel,
    prng_keys,
    run_sync,
)
from penstock.errors import DuplicateNameError
from penstock.orbax.array_metadata_store import RANDOM_KEY_IMPL
from penstock.orbax.array_metadata_store import ArrayMetadata as RecordedArray
from penstock.orbax.background_work import all_results, blaming, in_thread, reserved
from penstock.orbax.item_files import check_document
from penstock.orbax.leaf_args import ParamInfo, RestoreArgs, SaveArgs
from penstock.orbax.multihost import process_index
from penstock.orbax.tensorstore_specs import (
    array_read_spec,
    array_write_spec,
    chunk_shape_for,
    get_ts_context,
    json_spec,
    process_directory,
)
from penstock.orbax.value_metadata import ArrayMetadata, ShardingMetadata, StorageMetadata, ZarrMetadata

_ts: Any = ts  # its stubs use names that they do not define


@final
@dataclass(frozen=True, slots=True)
class ArrayWrite:
    """One array to write, on the host and independent of the caller."""

    info: ParamInfo
    spec: dict[str, Any]  #: for TensorStore
    parts: Sequence[tuple[tuple[Any, ...], npt.NDArray[Any]]]  #: each with its place in the array


def check_infos(infos: Sequence[ParamInfo]) -> None:
    """Refuse leaves that would be stored in one place, and a mix of databases and directories.

    Raises:
        DuplicateNameError: If two have one name; Orbax would lose one of them.
        ValueError: If only some of them go to a database.
    """
    if len({info.is_ocdbt_checkpoint for info in infos}) > 1:
        raise ValueError("is_ocdbt_checkpoint is the same for all leaves that are handled together")

    seen: dict[tuple[str, str], ParamInfo] = {}
    for info in infos:
        place = str(vars(info)["_parent_dir"]), info.name  # it may not exist yet
        if place in seen:
            raise DuplicateNameError(info.name, _key_path(seen[place]), _key_path(info))

        seen[place] = info


def resolve_paths(infos: Sequence[ParamInfo]) -> None:
    """Wait in a worker thread until every directory is there."""

    async def resolve() -> None:
        for info in infos:
            await info.await_path_creation()

    awaiting = False
    for info in infos:
        try:
            awaiting = awaiting or info.parent_dir is None
        except ValueError:
            awaiting = True
    if awaiting:
        run_sync(resolve)


def write_arrays(arrays: Sequence[ArrayWrite], *, database: bool) -> None:
    """Write arrays, to a database in one transaction. Blocking; to be called in a thread of its own.

    Args:
        arrays: What goes where.
        database: Whether they go to an OCDBT database.
    """
    transaction = _ts.Transaction(atomic=True) if database else None
    context = _contexts(array.info for array in arrays)
    opening = [
        _ts.open(
            _ts.Spec(array.spec),
            create=True,
            open=True,
            context=context(array.info),
            transaction=transaction,
        )
        for array in arrays
    ]
    writing: list[tuple[ParamInfo, Any]] = []
    for array, future in zip(arrays, opening, strict=True):
        with blaming(array.info):
            store = future.result()
            for place, data in array.parts:
                # Without a copy: what was staged does not change.
                written = store[place].write(data, can_reference_source_data_indefinitely=True)
                writing.append((array.info, written))

    for info, future in writing:
        with blaming(info):
            future.result()
    if transaction is not None:
        transaction.commit_async().result()


async def open_arrays(
    infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None, metadata_key: str | None
) -> list[Any]:
    """Open stored arrays, cast to the requested dtypes.

    Raises:
        FileNotFoundError: If one with its own directory is missing.
        ValueError: If one in a database is missing, or something is damaged.
        ChecksumError: If `args` are given, for a restore, and stored bytes are not those that were written.
    """
    for info in infos:
        await info.await_path_creation()

    await in_thread(_check_files, infos, metadata_key)
    if args is not None:
        await in_thread(compare_arrays, infos)

    context = _contexts(infos)
    dtypes = [None] * len(infos) if args is None else [arg.dtype for arg in args]
    futures = [
        _ts.open(
            _ts.Spec(
                array_read_spec(
                    info,
                    use_ocdbt=bool(info.is_ocdbt_checkpoint),
                    metadata_key=metadata_key,
                    raise_array_data_missing_error=info.raise_array_data_missing_error,
                    dtype=dtype,
                )
            ),
            open=True,
            context=context(info),
        )
        for info, dtype in zip(infos, dtypes, strict=True)
    ]
    return await all_results(futures, infos)


def opened_metadata(store: Any, info: ParamInfo, sharding: ShardingMetadata | None = None) -> ArrayMetadata:
    """Describe an open array."""
    base = store
    while getattr(base, "base", None) is not None:  # below a cast
        base = base.base

    zarr = None
    with suppress(Exception):  # the metadata is optional
        zarr = ZarrMetadata.from_json(base.spec().to_json().get("metadata"))

    return ArrayMetadata(
        name=info.name,
        directory=info.parent_dir,
        shape=tuple(store.shape),
        dtype=cast("np.dtype[Any]", store.dtype.numpy_dtype),
        sharding=sharding,
        storage=StorageMetadata(
            chunk_shape=store.chunk_layout.read_chunk_template.shape,
            write_shape=info.write_shape,
            zarr_metadata=zarr,
        ),
    )


def _check_files(infos: Sequence[ParamInfo], metadata_key: str | None) -> None:
    """Refuse missing arrays, which TensorStore does not tell apart from damaged ones."""
    for info in infos:
        if info.is_ocdbt_checkpoint or str(info.parent_dir).startswith("gs://"):
            continue

        directory = os.path.join(str(info.parent_dir), info.name)
        key = metadata_key or ("zarr.json" if info.use_zarr3 else ".zarray")
        for path in (directory, os.path.join(directory, key)):
            if not os.path.exists(path):
                raise FileNotFoundError(f"the array {info.name!r} is not there: {path} does not exist")


def _contexts(infos: Any) -> Any:
    """Return a function from a leaf to its context: its own, or one shared by all other leaves."""
    made: list[Any] = []

    def find(info: ParamInfo) -> Any:
        if info.ts_context is not None:
            return info.ts_context
        if not made:
            made.append(get_ts_context())

        return made[0]

    return find


def _key_path(info: ParamInfo) -> str:
    return info.name if info.keypath is None else "".join(map(str, info.keypath))


def compare_arrays(infos: Iterable[ParamInfo]) -> None:
    """Compare stored arrays, and the documents that describe them, with what is recorded. Blocking.

    Raises:
        ChecksumError: If something is not as it was written.
    """
    by_directory: dict[str, set[str]] = {}
    for info in infos:
        by_directory.setdefault(str(info.parent_dir), set()).add(info.name)

    for directory, names in by_directory.items():
        check_arrays(built_in.LocalStore(), directory, names)


def sharding_pointer(name: str) -> str:
    """The JSON pointer of a leaf's sharding in `_sharding`."""
    return f"/{urlsafe_b64encode(name.encode()).decode()}"


def write_values(file: str, entries: Sequence[tuple[ParamInfo, str, str]]) -> None:
    """Add strings to a document, all of them or none. Blocking.

    Args:
        file: The name of the document.
        entries: Of each leaf, the JSON pointer and the text.
    """
    transaction, context = _ts.Transaction(), get_ts_context(use_ocdbt=False)
    opening = [
        _ts.open(json_spec(str(info.parent_dir), file, pointer), open=True, context=context)
        for info, pointer, _ in entries
    ]
    writing = [
        future.result().with_transaction(transaction).write(text)
        for future, (_, _, text) in zip(opening, entries, strict=True)
    ]
    for future in writing:
        future.result()

    transaction.commit_async().result()


async def read_values(file: str, infos: Sequence[ParamInfo], pointers: Sequence[str]) -> list[Any]:
    """Read a value for each leaf.

    Raises:
        ValueError: If the document or a value is missing.
        ChecksumError: If the document is not as it was written.
    """
    for directory in {str(info.parent_dir) for info in infos}:
        await in_thread(check_document, directory, file)

    context = get_ts_context(use_ocdbt=False)
    opening = [
        _ts.open(json_spec(str(info.parent_dir), file, pointer), open=True, read=True, context=context)
        for info, pointer in zip(infos, pointers, strict=True)
    ]
    opened = await all_results(opening, infos)
    return [value.item() for value in await all_results([store.read() for store in opened], infos)]


_jax: Any = jax


@final
@dataclass(frozen=True, slots=True)
class ArrayRequest:
    """The requested form of an array."""

    sharding: jax.sharding.Sharding
    format: Any = None  #: a jax `Format`, for a memory layout other than the default
    shape: tuple[int, ...] | None = None  #: of the data; None for the stored shape
    strict: bool = True  #: whether a shape other than the stored one is an error


def array_request(arg: RestoreArgs, sharding: Any, info: ParamInfo) -> ArrayRequest:
    """Combine the request of a leaf.

    Args:
        arg: The restore args of the leaf; typed keys are requested by their own shape.
        sharding: Of jax, or a `Format` that has one.
        info: Of the leaf.

    Raises:
        ValueError: If no sharding can be made of it.
    """
    inner = sharding if isinstance(sharding, jax.sharding.Sharding) else getattr(sharding, "sharding", None)
    if not isinstance(inner, jax.sharding.Sharding):
        problem = f"the leaf {info.name!r} cannot be restored with the sharding {sharding!r}"
        raise ValueError(problem)  # the kind that Orbax raises

    shape = getattr(arg, "global_shape", None)
    if shape is not None and arg.dtype is not None and prng_keys.is_key(arg.dtype):
        struct = _jax.eval_shape(jax.random.key_data, _jax.ShapeDtypeStruct(tuple(shape), arg.dtype))
        inner = _also_along(inner, len(struct.shape) - len(shape))
        shape = struct.shape

    return ArrayRequest(
        inner,
        None if isinstance(sharding, jax.sharding.Sharding) else sharding,
        None if shape is None else tuple(shape),
        getattr(arg, "strict", True),
    )


async def read_array(store: Any, info: ParamInfo, wanted: ArrayRequest, key_impl: str | None) -> Any:
    """Read the parts that devices of this process need, each once, and make the array.

    Args:
        store: The opened array, cast already.
        info: Of the leaf.
        wanted: Its requested form.
        key_impl: The implementation to wrap the data of typed PRNG keys with.

    Raises:
        ValueError: If the shape is not the stored one, or the sharding does not divide it.
    """
    stored = tuple(store.shape)
    shape = stored if wanted.shape is None else wanted.shape
    if wanted.strict and shape != stored:
        raise ValueError(
            f"the leaf {info.name!r} has the shape {stored}, and {shape} is asked for; "
            f"strict=False pads with zeros and cuts off"
        )
    if len(shape) != len(stored):
        raise ValueError(f"the leaf {info.name!r} has {len(stored)} axes, and {len(shape)} are asked for")

    indices: Any = cast("Any", wanted.sharding).addressable_devices_indices_map(shape)
    parts = {_bounds(index, shape): None for index in indices.values()}
    dtype = np.dtype(store.dtype.numpy_dtype)
    sizes = [math.prod(stop - start for start, stop in bounds) for bounds in parts]
    async with reserved(info.byte_limiter, sum(sizes) * dtype.itemsize):
        arrays = dict(zip(parts, await _read_parts(store, info, list(parts), dtype), strict=True))

        def part(index: Any) -> Any:
            return arrays[_bounds(index, shape)]

        def make() -> Any:
            array: Any = _jax.make_array_from_callback(shape, wanted.sharding, part)
            if key_impl is not None:
                array = _jax.random.wrap_key_data(array, impl=key_impl)
            if wanted.format is not None:
                array = _jax.device_put(array, wanted.format)

            return _jax.block_until_ready(array)  # then the parts can be freed

        return await in_thread(make)


def _bounds(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The start and stop along each axis of what slices select."""
    return tuple([one.indices(size)[:2] for one, size in zip(index or (), shape, strict=True)])


def _also_along(sharding: jax.sharding.Sharding, axes: int) -> jax.sharding.Sharding:
    """The sharding of data with more trailing axes than what was sharded."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding

    spec = _jax.sharding.PartitionSpec(*sharding.spec, *[None] * axes)
    return jax.sharding.NamedSharding(cast("Any", sharding.mesh), spec)


async def _read_parts(
    store: Any, info: ParamInfo, parts: Sequence[tuple[tuple[int, int], ...]], dtype: np.dtype[Any]
) -> list[npt.NDArray[Any]]:
    """Read parts of an array, given by their bounds, all at once. What is beyond its shape is zeros."""
    arrays: list[npt.NDArray[Any]] = []
    writes: list[Any] = []
    for bounds in parts:
        shape = tuple([stop - start for start, stop in bounds])
        starts = [start for start, _ in bounds]
        stops = [min(stop, size) for (_, stop), size in zip(bounds, store.shape, strict=True)]
        cut = stops != [stop for _, stop in bounds]
        array: npt.NDArray[Any] = np.zeros(shape, dtype) if cut else np.empty(shape, dtype)
        arrays.append(array)
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            continue

        inner = tuple([slice(0, stop - start) for start, stop in zip(starts, stops, strict=True)]) or (...,)
        outer = tuple([slice(start, stop) for start, stop in zip(starts, stops, strict=True)]) or (...,)
        # Zeros as origin on both sides: TensorStore matches domains by position in the array.
        source = store[outer] if inner == (...,) else store[outer][_ts.d[:].translate_to[0]]
        writes.append(_ts.array(array)[inner].write(source).commit)

    with blaming(info):
        for future in writes:
            await await_future(future)

    return arrays


_WHOLE = 1 << 62  # bytes of a piece: whole chunks, which TensorStore takes as they are


@final
@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """The options of `ArrayHandler` for replicas that share the work of writing.

    Source:
        ORBAX_FORMAT.md §2.1.
    """

    parallel: bool = True  #: whether each replica of a shard writes a part of it
    min_slice_bytes: int | None = None  #: bytes of a part below which the shard is not divided
    max_replicas: int | None = None  #: the most parts that it is divided into
    separate_folder: bool = False  #: whether replicated arrays have a database of their own

    def part_of(self, shard: tuple[int, ...], n_replicas: int, itemsize: int) -> tuple[int, ...] | None:
        """Return the shape of the part of a shard that each replica writes; None if one writes all of it."""
        if self.max_replicas is not None:
            n_replicas = min(n_replicas, self.max_replicas)
        if not self.parallel or n_replicas <= 1:
            return None

        part = chunk_shapes.replica_shape(shard, n_replicas)
        too_small = part is not None and math.prod(part) * itemsize < (self.min_slice_bytes or 0)
        return None if too_small else part


@final
@dataclass(frozen=True, slots=True)
class HostArray:
    """An array on the host."""

    array: ArrayWrite
    sharding: str | None  #: as it is recorded
    metadata: RecordedArray


def stage(
    values: Sequence[jax.Array],
    infos: Sequence[ParamInfo],
    args: Sequence[SaveArgs],
    options: ReplicaOptions,
    metadata_key: str | None,
) -> list[HostArray]:
    """Bring arrays to the host. Blocking; when it returns they may be deleted or donated.

    On CPU devices nothing is copied: the memory of an array that is looked at is not reused.

    Raises:
        DeletedLeafError: If one is gone.
        InvalidLeafError: If one cannot be stored.
    """
    return [
        _staged(value, info, arg, options, metadata_key)
        for value, info, arg in zip(values, infos, args, strict=True)
    ]


def write_shape_of(value: jax.Array, options: ReplicaOptions) -> tuple[int, ...]:
    """Return the shape of what one replica writes: a shard, or a part of it."""
    shape = tuple(value.sharding.shard_shape(value.shape))
    indices: Any = cast("Any", value.sharding).addressable_devices_indices_map(value.shape)
    n_replicas = min(Counter(map(str, indices.values())).values())
    return options.part_of(shape, n_replicas, value.dtype.itemsize) or shape


def _staged(
    value: jax.Array, info: ParamInfo, arg: SaveArgs, options: ReplicaOptions, metadata_key: str | None
) -> HostArray:
    handler = built_in.ArrayHandler()
    place = kernel.ParamInfo((info.name,), (kernel.KeyKind.MAPPING,), info.name)
    spec = handler.describe(value, place)
    data = value if spec.random_key_impl is None else jax.random.key_data(value)
    database = bool(info.is_ocdbt_checkpoint)
    write_shape = write_shape_of(data, options)
    dtype = np.dtype(data.dtype if arg.dtype is None else arg.dtype)
    shape = spec.shape or ()
    chunk_shape = chunk_shape_for(
        info, use_ocdbt=database, shape=shape, write_shape=write_shape, dtype=dtype, arg=arg
    )
    spec = replace(spec, chunk_shape=chunk_shape, dtype=dtypes.dtype_name(dtype), itemsize=dtype.itemsize)
    leaf = kernel.Leaf(0, place, value, spec, handler)
    parts = [
        (_place(plan.chunk, chunk_shape), _elements(plan.take(), spec.dtype, chunk_shape))
        for plan in handler.pieces(leaf, _WHOLE)
    ]
    separate = options.separate_folder and options.parallel and database and _is_replicated(data.sharding)
    # Cast on the way to the host, so TensorStore is given what is stored.
    written = array_write_spec(
        info,
        use_ocdbt=database,
        shape=shape,
        chunk_shape=chunk_shape,
        dtype=dtype,
        process=process_directory(process_index(), replicas=separate) if database else None,
        metadata_key=metadata_key,
    )
    extra = {RANDOM_KEY_IMPL: spec.random_key_impl} if spec.random_key_impl else None
    metadata = RecordedArray(
        info.name, shape, dtype, write_shape, chunk_shape, database, bool(info.use_zarr3), extra
    )
    return HostArray(ArrayWrite(info, written, parts), spec.sharding, metadata)


def _place(chunk: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple([slice(at * size, (at + 1) * size) for at, size in zip(chunk, shape, strict=True)]) or (...,)


def _elements(data: memoryview, dtype: str, shape: tuple[int, ...]) -> Any:
    # A view: it keeps the memory, and what holds that, alive.
    return np.frombuffer(data, np.uint8).view(dtypes.numpy_dtype(dtype)).reshape(shape)


def _is_replicated(sharding: Any) -> bool:
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = cast("Sequence[object]", tuple(sharding.spec))
        return len(sharding.mesh.axis_names) > len(spec) or not spec or None in spec

    return isinstance(sharding, jax.sharding.SingleDeviceSharding)
