"""Arrays to and from the medium by TensorStore, for handlers that are called directly."""

from __future__ import annotations

__all__ = (
    "ReplicaOptions",
    "Staged",
    "Written",
    "check_infos",
    "open_arrays",
    "opened_metadata",
    "read_array",
    "read_values",
    "resolve_paths",
    "sharding_pointer",
    "stage",
    "wanted_of",
    "write_arrays",
    "write_values",
)

import math
import os
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast, final

import jax
import numpy as np
import numpy.typing as npt
import tensorstore as ts

from penstock.blocking.background import run_sync
from penstock.handlers.coordinators.jax_processes import processes_of_jax
from penstock.handlers.dtypes import dtype_name, numpy_dtype
from penstock.handlers.formats.common.checksummed_reads import NONE
from penstock.handlers.formats.common.integrity import Checksum
from penstock.handlers.formats.orbax.documents.file_names import MANIFEST
from penstock.handlers.formats.orbax.documents.sealed_documents import SealedDocuments
from penstock.handlers.formats.orbax.reading.verification import RecordedRange, check_ranges
from penstock.handlers.leaves.array import ArrayHandler
from penstock.handlers.leaves.common.host_buffers import HostRegion
from penstock.handlers.leaves.jax_arrays.devices import device_indices
from penstock.handlers.leaves.jax_arrays.placement import Placement, make_arrays, split
from penstock.handlers.leaves.jax_arrays.prng_keys import is_key
from penstock.handlers.ocdbt.database_reader import read_index
from penstock.handlers.ocdbt.value_refs import Indirect
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.concurrency.threads import await_future
from penstock.kernel.errors import ChecksumError, DuplicateNameError
from penstock.kernel.messages.packs import ReadLeaf
from penstock.kernel.messages.save import Leaf
from penstock.kernel.protocols.leaf import KeyKind, LeafSpec, StoredLeaf
from penstock.kernel.protocols.leaf import ParamInfo as KernelInfo
from penstock.kernel.protocols.reads import Target
from penstock.orbax.array_metadata_store import RANDOM_KEY_IMPL
from penstock.orbax.array_metadata_store import ArrayMetadata as RecordedArray
from penstock.orbax.background_work import all_results, blaming, in_thread, reserved
from penstock.orbax.item_files import check_document
from penstock.orbax.leaf_args import ParamInfo, RestoreArgs, SaveArgs
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
class Written:
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


def write_arrays(arrays: Sequence[Written], *, database: bool) -> None:
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
                # Without a copy: nobody changes what was staged.
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
        _compare(LocalStore(), directory, names)


def _compare(store: LocalStore, directory: str, names: AbstractSet[str]) -> None:
    if store.kind(directory) != "directory":
        return  # TensorStore says what is wrong, or reads it from elsewhere

    inside = store.list_directory(directory)
    sealed = SealedDocuments.open(store, directory, inside)
    for document in sealed.recorded.documents:
        if document.rpartition("/")[0] in names:
            sealed.read(document)

    found = set(_in_directories(sealed, names))
    if MANIFEST in inside and sealed.recorded.files:
        found |= set(_in_database(store, sealed, names))  # which compares the nodes of the index

    for file, ranges in groupby(sorted(found), key=lambda one: one[0]):
        path = os.path.join(directory, file)
        wanted = [RecordedRange(path, checksum, (name,)) for _, checksum, name in ranges]
        for finding in check_ranges(store, wanted):
            raise ChecksumError(path, finding.problem, key_path=finding.key_paths[0])


def _in_directories(sealed: SealedDocuments, names: AbstractSet[str]) -> Iterator[tuple[str, Checksum, str]]:
    for file, checksums in sealed.recorded.files.items():
        steps = file.split("/")
        for name in names & {"/".join(steps[:depth]) for depth in range(1, len(steps))}:
            for checksum in checksums:
                yield file, checksum, name


def _in_database(
    store: LocalStore, sealed: SealedDocuments, names: AbstractSet[str]
) -> Iterator[tuple[str, Checksum, str]]:
    index = read_index(store, sealed.directory)
    for name in names:
        for row in index.rows_below(f"{name}/".encode()):
            value = index.value(row)
            if not isinstance(value, Indirect):
                continue

            recorded = sealed.recorded.files.get(value.file, NONE)
            for at in range(max(recorded.from_offset(value.offset + 1) - 1, 0), len(recorded)):
                checksum = recorded[at]
                if checksum.offset >= value.offset + value.length:
                    break
                if checksum.offset + checksum.nbytes > value.offset:
                    yield value.file, checksum, name


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
class Wanted:
    """The requested form of an array."""

    sharding: jax.sharding.Sharding
    format: Any = None  #: a jax `Format`, for a memory layout other than the default
    shape: tuple[int, ...] | None = None  #: of the data; None for the stored shape
    strict: bool = True  #: whether a shape other than the stored one is an error


def wanted_of(arg: RestoreArgs, sharding: Any, info: ParamInfo) -> Wanted:
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
    if shape is not None and arg.dtype is not None and is_key(arg.dtype):
        struct = _jax.eval_shape(jax.random.key_data, _jax.ShapeDtypeStruct(tuple(shape), arg.dtype))
        inner = _also_along(inner, len(struct.shape) - len(shape))
        shape = struct.shape

    return Wanted(
        inner,
        None if isinstance(sharding, jax.sharding.Sharding) else sharding,
        None if shape is None else tuple(shape),
        getattr(arg, "strict", True),
    )


async def read_array(store: Any, info: ParamInfo, wanted: Wanted, key_impl: str | None) -> Any:
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

    dtype = np.dtype(store.dtype.numpy_dtype)
    regions = tuple([HostRegion(bounds, dtype) for bounds in split(wanted.sharding, shape)])
    async with reserved(info.byte_limiter, sum([region.nbytes for region in regions])):
        await _fill(store, info, regions)
        place = KernelInfo((info.name,), (KeyKind.MAPPING,), info.name)
        spec = LeafSpec("jax.Array", shape, dtype_name(dtype), dtype.itemsize, shape)
        staging = 0 if Placement(wanted.sharding).keeps_regions else sum([r.nbytes for r in regions])
        target = Target(regions, staging, Placement(wanted.sharding, key_impl=key_impl))
        leaf = ReadLeaf(0, StoredLeaf(place, spec), cast("Any", None), target)
        (array,) = await in_thread(make_arrays, [leaf])
        if wanted.format is not None:
            array = await in_thread(_jax.device_put, array, wanted.format)

    return array


def _also_along(sharding: jax.sharding.Sharding, axes: int) -> jax.sharding.Sharding:
    """The sharding of data with more trailing axes than what was sharded."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding

    spec = _jax.sharding.PartitionSpec(*sharding.spec, *[None] * axes)
    return jax.sharding.NamedSharding(cast("Any", sharding.mesh), spec)


async def _fill(store: Any, info: ParamInfo, regions: tuple[HostRegion, ...]) -> None:
    writes: list[Any] = []
    for region in regions:
        array = region.array()
        starts = [start for start, _ in region.bounds]
        stops = [min(stop, size) for (_, stop), size in zip(region.bounds, store.shape, strict=True)]
        if stops != [stop for _, stop in region.bounds]:
            array[...] = 0
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


_WHOLE = 1 << 62  # bytes of a piece: whole chunks, which TensorStore takes as they are


@final
@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """How the replicas of an array share the work of writing it: the options of `ArrayHandler`."""

    parallel: bool = True
    min_slice_bytes: int | None = None
    max_replicas: int | None = None
    separate_folder: bool = False


@final
@dataclass(frozen=True, slots=True)
class Staged:
    """An array on the host."""

    array: Written
    sharding: str | None  #: as it is recorded
    metadata: RecordedArray


def stage(
    values: Sequence[jax.Array],
    infos: Sequence[ParamInfo],
    args: Sequence[SaveArgs],
    options: ReplicaOptions,
    metadata_key: str | None,
) -> list[Staged]:
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
    """Return the shape of the part of a shard that one of its replicas writes.

    The first axis that all replicas divide is cut into as many parts; a shard without such an axis, or
    of parts that would be too small, is written whole.

    Source:
        ORBAX_FORMAT.md §2.1.
    """
    shape = tuple(value.sharding.shard_shape(value.shape))
    if not options.parallel or not math.prod(shape):
        return shape

    held = Counter(map(str, device_indices(value.sharding, value.shape).values()))
    replicas = min(held.values())
    if options.max_replicas is not None:
        replicas = min(replicas, options.max_replicas)

    axis = next((at for at, size in enumerate(shape) if size % max(replicas, 1) == 0), None)
    if replicas <= 1 or axis is None:
        return shape

    part = (*shape[:axis], shape[axis] // replicas, *shape[axis + 1 :])
    return shape if math.prod(part) * value.dtype.itemsize < (options.min_slice_bytes or 0) else part


def _staged(
    value: jax.Array, info: ParamInfo, arg: SaveArgs, options: ReplicaOptions, metadata_key: str | None
) -> Staged:
    handler = ArrayHandler()
    place = KernelInfo((info.name,), (KeyKind.MAPPING,), info.name)
    spec = handler.describe(value, place)
    data = value if spec.random_key_impl is None else jax.random.key_data(value)
    database = bool(info.is_ocdbt_checkpoint)
    write_shape = write_shape_of(data, options)
    dtype = np.dtype(data.dtype if arg.dtype is None else arg.dtype)
    shape = spec.shape or ()
    chunk_shape = chunk_shape_for(
        info, use_ocdbt=database, shape=shape, write_shape=write_shape, dtype=dtype, arg=arg
    )
    spec = replace(spec, chunk_shape=chunk_shape, dtype=dtype_name(dtype), itemsize=dtype.itemsize)
    leaf = Leaf(0, place, value, spec, handler)
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
        process=process_directory(processes_of_jax()[0], replicas=separate) if database else None,
        metadata_key=metadata_key,
    )
    extra = {RANDOM_KEY_IMPL: spec.random_key_impl} if spec.random_key_impl else None
    metadata = RecordedArray(
        info.name, shape, dtype, write_shape, chunk_shape, database, bool(info.use_zarr3), extra
    )
    return Staged(Written(info, written, parts), spec.sharding, metadata)


def _place(chunk: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple([slice(at * size, (at + 1) * size) for at, size in zip(chunk, shape, strict=True)]) or (...,)


def _elements(data: memoryview, dtype: str, shape: tuple[int, ...]) -> Any:
    # A view: it keeps the memory, and what holds that, alive.
    return np.frombuffer(data, np.uint8).view(numpy_dtype(dtype)).reshape(shape)


def _is_replicated(sharding: Any) -> bool:
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = cast("Sequence[object]", tuple(sharding.spec))
        return len(sharding.mesh.axis_names) > len(spec) or not spec or None in spec

    return isinstance(sharding, jax.sharding.SingleDeviceSharding)
