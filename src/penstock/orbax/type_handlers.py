"""The module `type_handlers` of Orbax's API: the type handlers of leaves, and registries of them.

In the save of a tree each stands for the handler of penstock that does the same, its `leaf_handler`.
Programs, and classes that override a method, call `serialize` and `deserialize` themselves: then TensorStore
writes and reads, in a thread.
"""

from __future__ import annotations

__all__ = (
    "PLACEHOLDER",
    "ArrayHandler",
    "ArrayRestoreArgs",
    "InvalidShardingError",
    "NumpyHandler",
    "ParamInfo",
    "PlaceholderHandler",
    "RestoreArgs",
    "SaveArgs",
    "ScalarHandler",
    "SerializedArrayMetadata",
    "SingleReplicaArrayHandler",
    "SingleReplicaArrayRestoreArgs",
    "Store",
    "StringHandler",
    "TypeHandler",
    "TypeHandlerRegistry",
    "Validator",
    "check_input_arguments",
    "create_type_handler_registry",
    "default_registry",
    "get_cast_tspec_deserialize",
    "get_cast_tspec_serialize",
    "get_json_tspec_read",
    "get_json_tspec_write",
    "get_ts_context",
    "get_type_handler",
    "has_type_handler",
    "is_ocdbt_checkpoint",
    "is_placeholder",
    "is_supported_empty_value",
    "is_supported_type",
    "merge_ocdbt_per_process_files",
    "register_standard_handlers_with_options",
    "register_type_handler",
    "supported_types",
)

import copy
import json
import math
import os
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock, RLock
from typing import Any, Final, Protocol, cast, final, runtime_checkable

import jax
import numpy as np
import tensorstore as ts

from penstock import handlers as built_in
from penstock import kernel
from penstock.embedding import (
    ReplicaAxis,
    RestoreOptions,
    blocking,
    check_arrays,
    chunk_shapes,
    document_files,
    dtypes,
    encode_strings,
    file_names,
    prng_keys,
)
from penstock.errors import DuplicateNameError, InvalidLeafError
from penstock.orbax.arrays import asked_placement, is_narrowed, jax_dtype, key_data
from penstock.orbax.future import in_thread
from penstock.orbax.installation import loaded_orbax
from penstock.orbax.item_files import check_document
from penstock.orbax.leaf_args import (
    ArrayRestoreArgs,
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
    get_cast_tspec_serialize,
    get_json_tspec_read,
    get_json_tspec_write,
    get_ts_context,
    is_ocdbt_checkpoint,
    json_spec,
    merge_ocdbt_per_process_files,
)
from penstock.orbax.stage_workers import TypeHandler
from penstock.orbax.value_metadata import (
    ArrayMetadata,
    ScalarMetadata,
    ShardingMetadata,
    StorageMetadata,
    StringMetadata,
    ZarrMetadata,
    from_serialized_string,
)

_jax: Any = jax
_ts: Any = ts  # its stubs use names that they do not define


_RANDOM_KEY_IMPL: Final = "random_key_impl"
_PROCESS_PREFIX: Final = "process_"


@dataclass(frozen=True, kw_only=True)
class SerializedArrayMetadata:
    """A record of the way that one array was written."""

    param_name: str
    write_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    ext_metadata: dict[str, Any] | None = None


class Store:
    """Writes and reads `array_metadatas/process_N`, the document of one process.

    In the save of a tree the layout records the same; this is for type handlers that are called directly.

    Args:
        primary_host: Has no effect: every process creates the directory if it is missing.
        write_timeout_secs: Has no effect: no process waits for another one.
    """

    def __init__(self, primary_host: int | None = 0, write_timeout_secs: int = 600) -> None:
        self._primary_host = primary_host
        self._write_timeout_secs = write_timeout_secs
        self._lock = Lock()  # leaves handled separately are recorded concurrently

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=Lock())

    def set_primary_host(self, primary_host: int | None) -> None:
        """Has no effect."""
        self._primary_host = primary_host

    async def write(self, checkpoint_dir: Any, array_metadatas: Sequence[Any], process_index: int) -> None:
        """Record more arrays."""

        def write() -> None:
            with self._lock:
                _write_records(Path(checkpoint_dir), array_metadatas, process_index)

        await in_thread(write)

    async def read(self, checkpoint_dir: Any, process_index: int | None = None) -> Any:
        """Return what one process recorded, or each of them; None if there is nothing.

        Raises:
            ValueError: If there is no such directory.
        """
        return await in_thread(_read_records, Path(checkpoint_dir), process_index)


class Validator:
    """Has no effect: every byte of a tree is counted before it is published."""

    def validate_all_array_metadatas(self, array_metadatas: Mapping[int, Sequence[Any]]) -> None:
        """Do nothing. Nothing calls it."""


def check_store(store: Any) -> None:
    """Refuse a store of the caller's, which would not be asked in the save of a tree.

    Args:
        store: A `Store`, or Orbax's; None for no records.

    Raises:
        NotImplementedError: If it is of a class of the caller's.
    """
    kind = cast("Any", type)(store)
    if store is not None and kind is not Store and not kind.__module__.startswith("orbax."):
        raise NotImplementedError(
            f"the array metadata of a tree are written by penstock, and {kind.__qualname__} would not be "
            "called: give a Store, or None for no records"
        )


def _write_records(directory: Path, found: Sequence[Any], process_index: int) -> None:
    path = directory / file_names.ARRAY_METADATAS / f"{_PROCESS_PREFIX}{process_index}"
    store = built_in.LocalStore()
    store.make_directory(str(path.parent))
    if file_names.TEMPORARY_SUFFIX not in str(path):  # a new tree may have the record of what it replaces
        check_document(str(path.parent), path.name)

    known = store.read_file(str(path)) if store.kind(str(path)) == "file" else b""
    entries: list[Any] = json.loads(known)["array_metadatas"] if known else []
    entries += [
        {
            "array_metadata": {
                "param_name": one.param_name,
                "write_shape": one.write_shape,
                "chunk_shape": one.chunk_shape,
                "ext_metadata": one.ext_metadata,
            }
        }
        for one in found
    ]
    document_files.rewrite_document(store, str(path), json.dumps({"array_metadatas": entries}).encode())


def _read_records(directory: Path, process_index: int | None) -> Any:
    if not directory.exists():
        raise ValueError(f"the directory of the checkpoint does not exist: {directory}")

    folder = directory / file_names.ARRAY_METADATAS
    if process_index is not None:
        path = folder / f"{_PROCESS_PREFIX}{process_index}"
        return _records_in(path) if path.exists() else None

    paths = sorted(folder.glob(f"{_PROCESS_PREFIX}*")) if folder.exists() else []
    found: dict[int, list[SerializedArrayMetadata]] = {}
    for path in paths:
        number = path.name.removeprefix(_PROCESS_PREFIX)
        if not number.isdigit():
            raise ValueError(f"the document does not exist: {path}")
        found[int(number)] = _records_in(path)

    return found or None


def _records_in(path: Path) -> list[SerializedArrayMetadata]:
    entries = [item["array_metadata"] for item in json.loads(path.read_text())["array_metadatas"]]
    return [
        SerializedArrayMetadata(
            param_name=entry["param_name"],
            write_shape=tuple(entry["write_shape"]),
            chunk_shape=tuple(entry["chunk_shape"]),
            ext_metadata=entry.get("ext_metadata"),
        )
        for entry in entries
    ]


@final
@dataclass(frozen=True, slots=True)
class _Copied:
    """An array to write: the boxes of it that this process has, copied."""

    info: ParamInfo
    arg: SaveArgs
    spec: kernel.LeafSpec  #: of the whole array, as penstock's own handler describes it
    part: tuple[int, ...]  #: the shape of what is written at once, which bounds a chunk
    dtype: Any  #: of the elements
    boxes: Sequence[tuple[Any, Any]]  #: where, and the elements

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self.spec.shape or ())


class _ArraysByTensorStore(TypeHandler):
    """Stores arrays by TensorStore, under the names and in the form that Orbax gives them."""

    _metadata_key: str | None

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[kernel.Waitable]:
        """Copy arrays, and begin to write them: they may change or be donated when this returns.

        Raises:
            ValueError: If an array has no elements, cannot be stored, or two leaves have one name.
            DeletedLeafError: If an array is deleted or donated.
        """
        args = args or [SaveArgs()] * len(values)
        check_input_arguments(values, infos, args)
        check_infos(infos)
        _refuse_empty(values, infos)
        copies = [
            await in_thread(self._copied, value, info, arg)
            for value, info, arg in zip(values, infos, args, strict=True)
        ]
        return [blocking.start_thread(self._write, copies)]

    def _copied(self, value: Any, info: ParamInfo, arg: SaveArgs) -> _Copied:
        """Copy what is to be written of a value. Blocking."""
        raise NotImplementedError

    def _record(self, copies: Sequence[_Copied]) -> None:
        """Write what documents say of arrays that are durable. Blocking."""

    def _write(self, copies: Sequence[_Copied]) -> None:
        blocking.run_sync(_created, [one.info for one in copies])
        own_context, writing = get_ts_context(), list[Any]()
        # In a transaction each chunk is encoded once, in whatever parts it comes. What goes to a database is
        # there at once; files cannot be.
        transactions = {is_atomic: _ts.Transaction(atomic=is_atomic) for is_atomic in (True, False)}
        for one in copies:
            info, database = one.info, bool(one.info.is_ocdbt_checkpoint)
            process = process_index() if database else None
            spec = self._get_json_tspec_write(info, one, database, process, one.arg)
            within = transactions[_kvstore_of(spec).get("driver") == "ocdbt"]
            store = _ts.open(
                _ts.Spec(spec),
                create=True,
                open=True,
                context=info.ts_context or own_context,
                # Among files an array may be made by another process at the same time.
                transaction=within if within.atomic else None,
            ).result()
            store = store if within.atomic else store.with_transaction(within)
            if store.dtype != _ts.dtype(one.dtype):
                store = _ts.cast(store, one.dtype)  # the spec may say another one
            writing += [store[box].write(elements) for box, elements in one.boxes]

        for future in writing:
            future.result()
        for transaction in transactions.values():
            transaction.commit_async().result()
        self._record(copies)

    def _get_json_tspec_write(
        self,
        info: ParamInfo,
        value: Any,
        use_ocdbt: bool = False,
        process_index: int | str | None = None,
        arg: SaveArgs | None = None,
    ) -> dict[str, Any]:
        """Return TensorStore's spec to write an array. An override is called in saves of whole trees, too.

        Args:
            info: Of the leaf.
            value: Has the shape and the dtype of the array.
            use_ocdbt: Whether it goes to a database.
            process_index: Whose directory it goes to, within a database.
            arg: The caller's options.
        """
        dtype = value.dtype if arg is None or arg.dtype is None else arg.dtype  # cast when it is written
        return get_json_tspec_write(
            info, use_ocdbt, value.shape, value.part, dtype, process_index, self._metadata_key, arg
        )

    def _get_json_tspec_read(self, info: ParamInfo, use_ocdbt: bool = False) -> dict[str, Any]:
        """Return TensorStore's spec to read a leaf; likewise."""
        missing_is_error = info.raise_array_data_missing_error
        return get_json_tspec_read(info, use_ocdbt, self._metadata_key, missing_is_error)

    async def _open(self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None) -> list[Any]:
        """Open stored arrays, to restore them if there are `args`: then they are compared with checksums.

        Raises:
            FileNotFoundError: If one with its own directory is missing.
            ValueError: If one in a database is missing, or something is damaged.
            ChecksumError: If stored bytes are not those that were written.
        """
        await _created(infos)
        if args is not None:
            await in_thread(_compare, infos)

        return [
            await in_thread(self._opened, info, None if args is None else args[at])
            for at, info in enumerate(infos)
        ]

    def _opened(self, info: ParamInfo, arg: RestoreArgs | None) -> Any:
        spec = self._get_json_tspec_read(info, bool(info.is_ocdbt_checkpoint))
        kvstore = _kvstore_of(spec)
        if kvstore.get("driver") == "file" and not os.path.exists(kvstore["path"]):
            # TensorStore does not tell it from a damaged one.
            raise FileNotFoundError(f"the array {info.name!r} is not there: {kvstore['path']} does not exist")

        if arg is not None:
            spec = get_cast_tspec_deserialize(spec, RestoreArgs(dtype=arg.dtype))
        try:
            return _ts.open(_ts.Spec(spec), open=True, context=info.ts_context or get_ts_context()).result()
        except ValueError as error:
            error.add_note(f"in the leaf {info.name!r}")
            raise


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
        place = str(vars(info)["_parent_dir"]), info.name  # the directory may not exist yet
        if place in seen:
            raise DuplicateNameError(info.name, _key_path(seen[place]), _key_path(info))

        seen[place] = info


def _key_path(info: ParamInfo) -> str:
    return info.name if info.keypath is None else "".join(map(str, info.keypath))


def _kvstore_of(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the store of keys below a cast; an empty spec for one that is given as a URL."""
    kvstore: Any = spec.get("base", spec).get("kvstore")
    return cast("dict[str, Any]", kvstore) if isinstance(kvstore, dict) else {}


def _described(value: Any, info: ParamInfo, handler: kernel.LeafHandler) -> kernel.LeafSpec:
    """Return what penstock's own handler says of a value.

    Raises:
        DeletedLeafError: If it is gone.
        InvalidLeafError: If it cannot be stored.
    """
    place = kernel.ParamInfo((info.name,), (kernel.KeyKind.MAPPING,), info.name)
    (spec,) = handler.describe([value], [place], {})
    return spec


def _compare(infos: Sequence[ParamInfo]) -> None:
    """Compare stored arrays, and the documents that describe them, with their checksums. Blocking."""
    by_directory: dict[str, set[str]] = {}
    for info in infos:
        by_directory.setdefault(str(info.parent_dir), set()).add(info.name)

    for directory, names in by_directory.items():
        check_arrays(built_in.LocalStore(), directory, names)


def _opened_metadata(store: Any, info: ParamInfo, sharding: ShardingMetadata | None = None) -> ArrayMetadata:
    """Describe an open array."""
    zarr = None
    with suppress(Exception):  # the metadata is optional
        zarr = ZarrMetadata.from_json(store.spec().to_json().get("metadata"))

    chunk = store.chunk_layout.read_chunk_template.shape
    return ArrayMetadata(
        name=info.name,
        directory=info.parent_dir,
        shape=tuple(store.shape),
        dtype=cast("np.dtype[Any]", store.dtype.numpy_dtype),
        sharding=sharding,
        storage=StorageMetadata(chunk_shape=chunk, write_shape=info.write_shape, zarr_metadata=zarr),
    )


class ArrayHandler(_ArraysByTensorStore):
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
        array_metadata_store: Whether it is recorded how arrays were cut, and the kind of typed keys: a
            `Store`, or None for neither.
        enable_replica_parallel_separate_folder: Has no effect: there is one database.
        dispatcher: Not supported: must be None.
        callback: Not supported: must be None.

    Raises:
        NotImplementedError: If there is a dispatcher, a callback, or a store of the caller's.
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
        if callback is not None:
            raise NotImplementedError("penstock calls nobody for each array: its events say what a save does")
        check_store(array_metadata_store)
        if use_replica_parallel is None:
            use_replica_parallel = replicas_share_by_default()

        self._metadata_key = metadata_key
        self._primary_host = primary_host
        self._replica_id = replica_id
        self._enable_write_sharding_file = enable_write_sharding_file
        self._array_metadata_store = array_metadata_store
        self._replicas = ReplicaOptions(
            use_replica_parallel, min_slice_bytes_for_replica_parallel, max_replicas_for_replica_parallel
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
        if self._metadata_key is not None:
            return None

        described = SpecOptions(
            self._replicas,
            self._replica_id,
            self._enable_write_sharding_file and has_primary_host(self._primary_host),
            self._array_metadata_store is not None,
        )
        return _leaf_handler(self.typestr(), None if described == SpecOptions() else described)

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        """Describe each stored leaf by an `ArrayMetadata`, with its sharding if one is recorded."""
        opened = await self._open(infos, None)
        shardings = await in_thread(_recorded, infos)
        return [
            _opened_metadata(store, info, from_serialized_string(text) if text else None)
            for store, info, text in zip(opened, infos, shardings, strict=True)
        ]

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

        opened = await self._open(infos, args)
        places = await in_thread(_placements, infos, args)
        impls = await self._key_impls(infos)
        return [
            await in_thread(_restored, info, store, arg, place, impls.get(info.name))
            for info, store, arg, place in zip(infos, opened, args, places, strict=True)
        ]

    def _copied(self, value: Any, info: ParamInfo, arg: SaveArgs) -> _Copied:
        spec, data = _described(value, info, built_in.ArrayHandler()), key_data(value)
        shape = tuple(data.sharding.shard_shape(data.shape))
        indices: Any = data.sharding.addressable_devices_indices_map(data.shape)
        n_replicas = min(Counter(map(str, indices.values())).values())
        part = self._replicas.part_of(shape, n_replicas, data.dtype.itemsize) or shape
        writer = self._replica_id or 0
        boxes = [
            (shard.index, np.array(shard.data))
            for shard in data.addressable_shards
            if shard.replica_id == writer
        ]
        return _Copied(info, arg, spec, part, data.dtype, boxes)

    def _record(self, copies: Sequence[_Copied]) -> None:
        # The shardings of arrays are those of all processes.
        if self._enable_write_sharding_file and is_primary_host(self._primary_host):
            texts = [
                (one.info, _sharding_pointer(one.info.name), one.spec.sharding)
                for one in copies
                if one.spec.sharding
            ]
            _write_values(file_names.SHARDING, texts)
        if self._array_metadata_store is not None:
            directory, arrays = copies[0].info.parent_dir, [_recorded_array(one) for one in copies]
            blocking.run_sync(self._array_metadata_store.write, directory, arrays, process_index())

    async def _key_impls(self, infos: Sequence[ParamInfo]) -> dict[str, str]:
        """Find which leaves are typed PRNG keys, and of which kind."""
        if self._array_metadata_store is None:
            return {}

        found = await self._array_metadata_store.read(checkpoint_dir=infos[0].parent_dir)
        entries = next(iter(found.values())) if found else ()
        extras: dict[str, dict[str, Any]] = {one.param_name: one.ext_metadata or {} for one in entries}
        return {name: extra[_RANDOM_KEY_IMPL] for name, extra in extras.items() if _RANDOM_KEY_IMPL in extra}


def _recorded_array(one: _Copied) -> SerializedArrayMetadata:
    info, spec = one.info, one.spec
    chunks = chunk_shape_for(
        info,
        use_ocdbt=bool(info.is_ocdbt_checkpoint),
        shape=one.shape,
        write_shape=one.part,
        dtype=dtypes.numpy_dtype(spec.dtype) if one.arg.dtype is None else one.arg.dtype,
        arg=one.arg,
    )
    extra = {_RANDOM_KEY_IMPL: spec.extended_dtype} if spec.extended_dtype else None
    return SerializedArrayMetadata(
        param_name=info.name, write_shape=one.part, chunk_shape=chunks, ext_metadata=extra
    )


def _placements(infos: Sequence[ParamInfo], args: Sequence[RestoreArgs]) -> list[Any]:
    """Find the requested or else the recorded sharding of each leaf. Blocking.

    Raises:
        ValueError: If a leaf has neither, or what is requested is none.
    """
    places = [asked_placement(arg) for arg in args]
    if None in places:
        for at, text in enumerate(_recorded(infos)):
            if places[at] is None and text is not None:
                places[at] = from_serialized_string(text).to_jax_sharding()

    for info, place in zip(infos, places, strict=True):
        if place is None:
            raise ValueError(
                f"no sharding is recorded for the leaf {info.name!r}: give `sharding`, or `mesh` and "
                f"`mesh_axes`, in ArrayRestoreArgs"
            )
        if not isinstance(_sharding_of(place), jax.sharding.Sharding):
            problem = f"the leaf {info.name!r} cannot be restored with the sharding {place!r}"
            raise ValueError(problem)  # the kind that Orbax raises

    return places


def _sharding_of(place: Any) -> Any:
    return place if isinstance(place, jax.sharding.Sharding) else getattr(place, "sharding", None)


def _restored(info: ParamInfo, store: Any, arg: RestoreArgs, place: Any, key_impl: str | None) -> Any:
    """Read a jax.Array: each distinct part that this process needs once. Blocking.

    Raises:
        ValueError: If the shape is not the stored one, or the sharding does not divide it.
    """
    sharding: Any = _sharding_of(place)
    shape = getattr(arg, "global_shape", None)
    if shape is not None and arg.dtype is not None and prng_keys.is_key(arg.dtype):
        struct = _jax.eval_shape(jax.random.key_data, _jax.ShapeDtypeStruct(tuple(shape), arg.dtype))
        sharding = _also_along(sharding, len(struct.shape) - len(shape))
        shape = struct.shape

    stored = tuple(store.shape)
    shape = stored if shape is None else tuple(shape)
    if getattr(arg, "strict", True) and shape != stored:
        raise ValueError(
            f"the leaf {info.name!r} has the shape {stored}, and {shape} is asked for; "
            f"strict=False pads with zeros and cuts off"
        )
    if len(shape) != len(stored):
        raise ValueError(f"the leaf {info.name!r} has {len(stored)} axes, and {len(shape)} are asked for")

    dtype = store.dtype.numpy_dtype
    if is_narrowed(dtype):  # as jax holds it, where 64-bit types may be disabled
        store = _ts.cast(store, jax_dtype(dtype))

    indices: Any = sharding.addressable_devices_indices_map(shape)
    boxes: dict[str, list[tuple[int, int]]] = {
        str(index): [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        for index in indices.values()
    }
    reading = {name: _begin_reading(store, box) for name, box in boxes.items()}
    parts = {name: _padded(future.result(), boxes[name]) for name, future in reading.items()}

    def part_at(index: object) -> Any:
        return parts[str(index)]

    array = _jax.make_array_from_callback(shape, sharding, part_at)
    if key_impl is not None:
        array = _jax.random.wrap_key_data(array, impl=key_impl)

    has_layout = not isinstance(place, jax.sharding.Sharding)
    return _jax.device_put(array, place) if has_layout else array


def _begin_reading(store: Any, box: Sequence[tuple[int, int]]) -> Any:
    there = [(min(lo, size), min(hi, size)) for (lo, hi), size in zip(box, store.shape, strict=True)]
    return store[tuple(slice(lo, hi) for lo, hi in there) or ...].read()


def _padded(found: Any, box: Sequence[tuple[int, int]]) -> Any:
    shape = tuple(hi - lo for lo, hi in box)
    if found.shape == shape:
        return found

    whole = np.zeros(shape, found.dtype)
    whole[tuple(map(slice, found.shape))] = found
    return whole


def _also_along(sharding: jax.sharding.Sharding, axes: int) -> jax.sharding.Sharding:
    """The sharding of data with more trailing axes than what was sharded."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding

    spec = _jax.sharding.PartitionSpec(*sharding.spec, *[None] * axes)
    return jax.sharding.NamedSharding(cast("Any", sharding.mesh), spec)


def _recorded(infos: Sequence[ParamInfo]) -> list[str | None]:
    """Read the recorded sharding of each leaf; None for all if nothing is recorded there. Blocking."""
    if not os.path.exists(os.path.join(infos[0].parent_dir, file_names.SHARDING)):
        return [None] * len(infos)

    texts = _read_values(file_names.SHARDING, infos, [_sharding_pointer(info.name) for info in infos])
    return [cast("str", text) or None for text in texts]


def _sharding_pointer(name: str) -> str:
    """The JSON pointer of a leaf's sharding in `_sharding`."""
    return f"/{urlsafe_b64encode(name.encode()).decode()}"


def _write_values(file: str, entries: Sequence[tuple[ParamInfo, str, str]]) -> None:
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


def _read_values(file: str, infos: Sequence[ParamInfo], pointers: Sequence[str]) -> list[Any]:
    """Read a value for each leaf. Blocking.

    Raises:
        ValueError: If the document or a value is missing.
        ChecksumError: If the document is not as it was written.
    """
    for directory in {str(info.parent_dir) for info in infos}:
        check_document(directory, file)

    context = get_ts_context(use_ocdbt=False)
    opening = [
        _ts.open(json_spec(str(info.parent_dir), file, pointer), open=True, read=True, context=context)
        for info, pointer in zip(infos, pointers, strict=True)
    ]
    reading = [future.result().read() for future in opening]
    return [future.result().item() for future in reading]


@lru_cache(maxsize=64)
def _leaf_handler(typestr: str, described: SpecOptions | None) -> built_in.ArrayHandler:
    """Equal handlers share one: a tree is planned anew for each different one."""
    return built_in.ArrayHandler(typestr, described=described)


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


class NumpyHandler(_ArraysByTensorStore):
    """Stores an `np.ndarray` whole.

    Args:
        metadata_key: The name of an array's metadata file; by default that of its format.
        ocdbt_process_id: Has no effect: there is one database.
        deepcopy_host_arrays: Has no effect: arrays are copied, so that they may change during the save.
    """

    def __init__(
        self,
        metadata_key: str | None = None,
        ocdbt_process_id: str | None = None,
        deepcopy_host_arrays: bool = True,
    ) -> None:
        self._metadata_key = metadata_key

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
        return [_opened_metadata(store, info) for store, info in zip(opened, infos, strict=True)]

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
        reading = [store.read() for store in await self._open(infos, args)]
        return [await in_thread(future.result) for future in reading]

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Return for each value its bytes, to write and to read."""
        sizes = [np.asarray(value).nbytes for value in values]
        return [(size, size) for size in sizes]

    def _copied(self, value: Any, info: ParamInfo, arg: SaveArgs) -> _Copied:
        spec = _described(value, info, built_in.NumpyHandler())
        one = np.array(value, value.dtype.newbyteorder("="), order="C")  # the byte order is not recorded
        return _Copied(info, arg, spec, one.shape, one.dtype, [(..., one)])


class ScalarHandler(NumpyHandler):
    """Stores a number as an array without axes; it is restored as a Python number.

    Args:
        metadata_key: See `NumpyHandler`.
        ocdbt_process_id: Has no effect, see `NumpyHandler`.
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


def _refuse_empty(values: Sequence[Any], infos: Sequence[ParamInfo]) -> None:
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
        await _created(infos)
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
        await _created(infos)
        found = await in_thread(_read_values, self._filename, infos, [f"/{info.name}" for info in infos])
        return [str(value) for value in found]

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Return the length of each string in bytes."""
        sizes = [len(str(value).encode(errors="replace")) for value in values]
        return [(size, size) for size in sizes]

    def _write(self, values: Sequence[str], infos: Sequence[ParamInfo]) -> None:
        blocking.run_sync(_created, infos)
        _write_values(
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
    """A sharding without replicas. Never raised: it is read as any other."""


class SingleReplicaArrayHandler(ArrayHandler):
    """Reads one replica, and puts it on the devices of every other.

    In a job of several processes, a checkpointer whose registry has it restores with `replica_axis`: one
    replica is read, and sent to the others. In one process this is an `ArrayHandler`, which reads each
    distinct shard once, too.

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


PLACEHOLDER: Final = ...
"""Stands in a target for a leaf that is not to be read."""


@runtime_checkable
class TypeHandlerRegistry(Protocol):
    """Type handlers by leaf type, and by the type name that is recorded."""

    def add(
        self,
        ty: Any,
        handler: TypeHandler,
        func: Callable[[Any], bool] | None = None,
        override: bool = False,
        ignore_warnings: bool = False,
    ) -> None:
        """Handle leaves of a type; see `register_type_handler`."""
        ...

    def get(self, ty: Any) -> TypeHandler:
        """Return the handler of a type, or of a recorded type name; a ValueError if there is none."""
        ...

    def has(self, ty: Any) -> bool:
        """Return whether there is a handler of a type, or of a recorded type name."""
        ...


@final
class PlaceholderHandler(TypeHandler):
    """Handles `...` in a target: the leaf is not read, and the result has `...` there."""

    def typestr(self) -> str:
        """`placeholder`, which is never recorded."""
        return "placeholder"

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        """Refuse: a placeholder is not stored."""
        raise NotImplementedError("a placeholder has no metadata")

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[kernel.Waitable]:
        """Refuse: there is nothing to save."""
        raise NotImplementedError("a placeholder cannot be saved")

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None
    ) -> Sequence[Any]:
        """Return placeholders."""
        return [PLACEHOLDER] * len(infos)


def create_type_handler_registry(*handlers: tuple[Any, TypeHandler]) -> TypeHandlerRegistry:
    """Make a registry of only these types and handlers."""
    return _Registry(*handlers)


def default_entries() -> tuple[tuple[Any, TypeHandler], ...]:
    """Make a handler for each type that Orbax handles by default, in its order."""
    return (
        (int, ScalarHandler()),
        (float, ScalarHandler()),
        (bytes, ScalarHandler()),
        (np.number, ScalarHandler()),
        (np.ndarray, NumpyHandler()),
        (jax.Array, ArrayHandler(array_metadata_store=Store())),
        (str, StringHandler()),
        (type(PLACEHOLDER), PlaceholderHandler()),
    )


@final
@dataclass(frozen=True, slots=True)
class _Entry:
    type_: Any
    fits: Callable[[Any], bool]
    handler: TypeHandler


@final
class _Registry(TypeHandlerRegistry):
    """Thread-safe."""

    def __init__(
        self,
        *handlers: tuple[Any, TypeHandler],
        otherwise: Callable[[Any], TypeHandler | None] | None = None,
    ) -> None:
        self._lock = RLock()
        self._entries: list[_Entry] = []
        self._by_typestr: dict[str, TypeHandler] = {}
        self._otherwise = otherwise
        for type_, handler in handlers:
            self.add(type_, handler, override=True, ignore_warnings=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Registry:
        """A registry with copies of the handlers; those that cannot be copied are shared."""
        copied = _Registry(otherwise=self._otherwise)
        with self._lock:
            handlers = {id(handler): _copied(handler) for handler in self._by_typestr.values()}
            copied._entries = [
                _Entry(entry.type_, entry.fits, handlers.get(id(entry.handler), entry.handler))
                for entry in self._entries
            ]
            copied._by_typestr = {
                typestr: handlers[id(handler)] for typestr, handler in self._by_typestr.items()
            }

        return copied

    def add(
        self,
        ty: Any,
        handler: TypeHandler,
        func: Callable[[Any], bool] | None = None,
        override: bool = False,
        ignore_warnings: bool = False,
    ) -> None:
        entry = _Entry(ty, _subclass_of(ty) if func is None else func, handler)
        typestr = handler.typestr()
        with self._lock:
            before = next((at for at, known in enumerate(self._entries) if known.fits(ty)), None)
            if before is not None and not override:
                raise ValueError(f"a type handler for {ty} is registered already; pass override=True")
            if before is None and typestr in self._by_typestr and not override:
                raise ValueError(
                    f"the typestr {typestr!r} of the handler for {ty} is taken; pass override=True"
                )

            if before is None:
                self._entries.append(entry)
            elif self._entries[before].type_ is ty:
                self._entries[before] = entry
            else:
                # A more specific type goes first; the more general one keeps its handler.
                self._entries.insert(before, entry)

            self._by_typestr[typestr] = handler

    def get(self, ty: Any) -> TypeHandler:
        with self._lock:
            if isinstance(ty, str):
                if ty in self._by_typestr:
                    return self._by_typestr[ty]
            else:
                for entry in self._entries:
                    if entry.fits(ty):
                        return entry.handler

        found = None if self._otherwise is None else self._otherwise(ty)
        if found is not None:
            return found

        raise ValueError(f"no type handler is registered for {ty!r}")

    def has(self, ty: Any) -> bool:
        try:
            self.get(ty)
        except ValueError:
            return False

        return True


def _copied(handler: TypeHandler) -> TypeHandler:
    try:
        return copy.deepcopy(handler)
    except TypeError:  # it holds a lock, or an executor
        return copy.copy(handler)


def _subclass_of(type_: Any) -> Callable[[Any], bool]:
    return lambda other: issubclass(other, type_)


def _registered_with_orbax(ty: Any) -> TypeHandler | None:
    theirs = loaded_orbax("type_handlers")
    if theirs is None or not theirs.has_type_handler(ty):
        return None

    return cast("TypeHandler", theirs.get_type_handler(ty))


# Orbax's API registers handlers for the whole process, and its users rely on a module that was imported
# somewhere having done so: the one mutable object of the API. It has its own lock. Handlers take
# a registry of their own instead wherever one is given. A library that was written for Orbax registers with
# Orbax, so that is asked for types which nobody registered here.
_PROCESS_WIDE: Final = _Registry(*default_entries(), otherwise=_registered_with_orbax)


def default_registry() -> TypeHandlerRegistry:
    """Return the registry of the process, which is used where none is given."""
    return _PROCESS_WIDE


def register_type_handler(
    ty: Any, handler: TypeHandler, func: Callable[[Any], bool] | None = None, override: bool = False
) -> None:
    """Handle leaves of a type, in the whole process.

    Args:
        ty: The type.
        handler: An instance.
        func: Decides whether a type is handled; by default if it is `ty` or a subclass.
        override: Replace the handler that `ty` has.

    Raises:
        ValueError: If `ty` has a handler, or another type has one of the same `typestr`, unless overridden.
    """
    _PROCESS_WIDE.add(ty, handler, func, override)


def get_type_handler(ty: Any) -> TypeHandler:
    """Return the handler of a type, or of a recorded type name, in this process.

    Raises:
        ValueError: If there is none.
    """
    return _PROCESS_WIDE.get(ty)


def has_type_handler(ty: Any) -> bool:
    """Return whether a type, or a recorded type name, has a handler in this process."""
    return _PROCESS_WIDE.has(ty)


def register_standard_handlers_with_options(**kwargs: Any) -> None:
    """Replace the handlers of numbers and arrays by new ones with these options, in the whole process.

    Args:
        **kwargs: Of each of the handlers; `use_ocdbt` and `ts_context` are ignored.
    """
    for name in ("use_ocdbt", "ts_context"):
        kwargs.pop(name, None)

    numbers: tuple[Any, ...] = (int, float, bytes, np.number)
    for ty in numbers:
        _PROCESS_WIDE.add(ty, ScalarHandler(**kwargs), override=True)

    _PROCESS_WIDE.add(np.ndarray, NumpyHandler(**kwargs), override=True)
    _PROCESS_WIDE.add(jax.Array, ArrayHandler(**kwargs), override=True)


def supported_types() -> list[Any]:
    """Return the types that have a handler from the beginning."""
    return [ty for ty, _ in default_entries()]


def is_placeholder(value: Any) -> bool:
    """Return whether this stands for a leaf that is not read."""
    return value is PLACEHOLDER


def is_supported_type(value: Any, pytree_metadata_options: Any = None) -> bool:
    """Return whether a value can be saved without a custom handler."""
    known = (str, int, float, np.number, np.ndarray, bytes, jax.Array)
    return isinstance(value, known) or is_supported_empty_value(value, pytree_metadata_options)


def is_supported_empty_value(value: Any, pytree_metadata_options: Any = None) -> bool:
    """Return whether a value is None or an empty container whose kind is recorded."""
    if isinstance(value, tuple) and hasattr(cast("object", value), "_fields"):
        return not value and bool(getattr(pytree_metadata_options, "support_rich_types", False))

    return value is None or (isinstance(value, dict | list | tuple | Mapping) and not value)
