"""The module `serialization` of Orbax's API: TensorStore's context, specs of arrays, and databases.

The databases of single processes are found through one of the whole tree.

Source:
    ORBAX_FORMAT.md §1.5, §1.6; tests/orbax_face compares each spec with Orbax's own.
"""

from __future__ import annotations

__all__ = ("get_ts_context",)

import math
import os
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast, final

import numpy as np
import tensorstore as ts

from penstock import kernel
from penstock.embedding import blocking, chunk_shapes, document_files, file_names, prng_keys
from penstock.orbax.future import in_thread
from penstock.orbax.leaf_args import ParamInfo, RestoreArgs, SaveArgs

_ts: Any = ts  # its stubs use names that they do not define

_GIB: Final = 2**30
_MIB: Final = 2**20
_ZSTD_LEVEL: Final = {2: 1, 3: 3}
_PROCESS_ID: Final = re.compile("(replica_)?[A-Za-z0-9]+")


@dataclass(frozen=True)
class OcdbtWriteOptions:
    """Options for writing to a database.

    Attributes:
        target_data_file_size: See `ParamInfo.ocdbt_target_data_file_size`; None for the default.
    """

    target_data_file_size: int | None = None


def get_ts_context(
    *,
    use_ocdbt: bool = True,
    file_io_concurrency_limit: int | None = None,
    data_copy_concurrency_limit: int | None = None,
) -> Any:
    """Make a TensorStore context.

    Args:
        use_ocdbt: Whether to have a cache for the index of databases.
        file_io_concurrency_limit: Files read or written at once; by default 128.
        data_copy_concurrency_limit: Threads that encode and copy; by default TensorStore's.
    """
    context: dict[str, Any] = {"file_io_concurrency": {"limit": file_io_concurrency_limit or 128}}
    if use_ocdbt:
        context["cache_pool#ocdbt"] = {"total_bytes_limit": 100_000_000}
    if data_copy_concurrency_limit is not None:
        context["data_copy_concurrency"] = {"limit": data_copy_concurrency_limit}

    return ts.Context(context)


def process_directory(process_id: int | str) -> str:
    """Return the name of the directory of one process.

    Raises:
        ValueError: If the id has characters other than letters and digits, but for `replica_` in front.
    """
    if not _PROCESS_ID.fullmatch(str(process_id)):
        raise ValueError(f"the id of a process consists of letters and digits: {process_id!r}")

    return f"ocdbt.process_{process_id}"


def kvstore_spec(
    directory: str,
    name: str | None = None,
    *,
    use_ocdbt: bool = True,
    process: str | None = None,
    writing: OcdbtWriteOptions | None = None,
) -> dict[str, Any]:
    """Return the spec of a key-value store.

    Args:
        directory: Of the tree; absolute, or of a `gs://` bucket.
        name: The prefix of all keys: the stored name of a leaf.
        use_ocdbt: Whether they are in a database there; else each is a file.
        process: The directory of one process, within.
        writing: What to write to a database with; None to read it.

    Raises:
        ValueError: If the directory is not absolute, or an option does not fit.
    """
    directory = os.path.normpath(directory).replace("gs:/", "gs://")
    if not use_ocdbt:
        return _base_spec(directory if name is None else os.path.join(directory, name))
    if not directory.startswith("gs://") and not os.path.isabs(directory):
        raise ValueError(f"the path of a checkpoint must be absolute: {directory}")

    if process is not None:
        directory = os.path.join(directory, process)

    return _ocdbt_spec(directory, name, writing)


def _ocdbt_spec(directory: str, name: str | None, writing: OcdbtWriteOptions | None) -> dict[str, Any]:
    spec: dict[str, Any] = {"driver": "ocdbt"}
    if directory.startswith("gs://"):
        spec["base"] = _base_spec(directory)
    else:
        files: dict[str, Any] = _ts.KvStore.Spec(_base_spec(directory + "/")).to_json()
        # The manifest alone is replaced atomically: data files that it does not name are not read.
        spec["base"] = {**files, "file_io_locking": {"mode": "non_atomic"}}
        spec["manifest"] = files
    if writing is not None:
        spec |= _writing(writing, remote=directory.startswith("gs://"))
    if name is not None:
        spec["path"] = name

    spec["cache_pool"] = "cache_pool#ocdbt"
    if directory.startswith("gs://"):
        spec["experimental_read_coalescing_threshold_bytes"] = 1_000_000
        spec["experimental_read_coalescing_merged_bytes"] = 500_000_000_000
        spec["experimental_read_coalescing_interval"] = "1ms"

    return spec


def _writing(options: OcdbtWriteOptions, *, remote: bool) -> dict[str, Any]:
    size = options.target_data_file_size
    if size is None:
        size = _default_file_size(remote=remote)
    if size < 0:
        raise ValueError(f"the size of a data file must be positive, or 0 for no limit: {size}")

    return {
        "target_data_file_size": size,
        "config": {
            "max_inline_value_bytes": 1024,
            "max_decoded_node_bytes": 100_000_000,
            "manifest_kind": "single",
        },
        "assume_config": True,  # no manifest without entries is written first
    }


def _base_spec(path: str) -> dict[str, Any]:
    if not path.startswith("gs://"):
        return {"driver": "file", "path": path}

    bucket, _, key = path.removeprefix("gs://").partition("/")
    # Which of TensorStore's drivers for such buckets: an environment variable that Orbax's users know.
    return {"driver": os.environ.get("TENSORSTORE_GCS_BACKEND", "gcs"), "bucket": bucket, "path": key}


def _default_file_size(*, remote: bool) -> int:
    return 400 * _MIB if remote else 2 * _GIB


def json_spec(directory: str, file: str, pointer: str) -> dict[str, Any]:
    """Return the spec of a value in a JSON document."""
    return {
        "driver": "json",
        "kvstore": kvstore_spec(directory, file, use_ocdbt=False),
        "json_pointer": pointer,
    }


def chunk_shape_for(
    info: ParamInfo,
    *,
    use_ocdbt: bool,
    shape: tuple[int, ...],
    write_shape: tuple[int, ...],
    dtype: Any,
    arg: SaveArgs | None,
) -> tuple[int, ...]:
    """Choose the chunk shape that Orbax would for the options of a leaf.

    Args:
        info: Of the leaf.
        use_ocdbt: Whether it goes to a database, whose data files bound a chunk.
        shape: Of the array.
        write_shape: Of the part that one replica writes.
        dtype: Of the stored elements.
        arg: The caller's options.
    """
    arg = arg or SaveArgs()
    itemsize = _dtype(dtype).itemsize
    most = arg.chunk_byte_size
    if use_ocdbt:
        file_size = info.ocdbt_target_data_file_size
        if file_size is None:
            file_size = _default_file_size(remote=_directory(info).startswith("gs://"))
        if file_size and most is None and math.prod(write_shape) * itemsize > file_size:
            most = file_size
        elif file_size and most is not None:
            most = min(most, file_size)
    if most is not None and most < itemsize:
        raise ValueError(
            f"chunk_byte_size {most} of {info.name!r} is less than one element, {itemsize} bytes"
        )
    if any(not 0 <= axis < len(write_shape) for axis in arg.shard_axes):
        raise ValueError(f"shard_axes {arg.shard_axes} of {info.name!r} are not all within shape {shape}")

    return chunk_shapes.orbax_chunk_shape(shape, write_shape, itemsize, most, arg.shard_axes)


def get_json_tspec_read(
    info: ParamInfo,
    use_ocdbt: bool,
    metadata_key: str | None = None,
    raise_array_data_missing_error: bool = True,
) -> dict[str, Any]:
    """Return TensorStore's spec to read the array of a leaf.

    Args:
        info: Of the leaf.
        use_ocdbt: Whether it is in a database.
        metadata_key: The name of the array's metadata; by default that of its format.
        raise_array_data_missing_error: Whether a missing chunk is an error; else it reads as zeros.

    Raises:
        ValueError: If the directory is not absolute.
    """
    spec: dict[str, Any] = {
        "driver": "zarr3" if info.use_zarr3 else "zarr",
        "kvstore": kvstore_spec(_directory(info), info.name, use_ocdbt=use_ocdbt),
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        "fill_missing_data_reads": not raise_array_data_missing_error,
    }
    return spec if metadata_key is None else {**spec, "metadata_key": metadata_key}


def get_json_tspec_write(
    info: ParamInfo,
    use_ocdbt: bool,
    global_shape: tuple[int, ...],
    local_shape: tuple[int, ...],
    dtype: Any,
    process_index: int | str | None = None,
    metadata_key: str | None = None,
    arg: SaveArgs | None = None,
) -> dict[str, Any]:
    """Return TensorStore's spec to write the array of a leaf.

    Args:
        info: Of the leaf.
        use_ocdbt: Whether it goes to a database.
        global_shape: Of the array.
        local_shape: Of the part that is written at once, which bounds a chunk.
        dtype: Of the given elements.
        process_index: Whose directory it goes to, within a database; None for the database itself.
        metadata_key: The name of the array's metadata; by default that of its format.
        arg: The caller's options.

    Raises:
        ValueError: If the directory is not absolute, or an option does not fit.
    """
    stored = dtype if arg is None or arg.dtype is None else arg.dtype
    chunks = chunk_shape_for(
        info, use_ocdbt=use_ocdbt, shape=global_shape, write_shape=local_shape, dtype=stored, arg=arg
    )
    process = None if process_index is None else process_directory(process_index)
    writing = OcdbtWriteOptions(info.ocdbt_target_data_file_size)
    spec: dict[str, Any] = {
        "driver": "zarr3" if info.use_zarr3 else "zarr",
        "kvstore": kvstore_spec(
            _directory(info), info.name, use_ocdbt=use_ocdbt, process=process, writing=writing
        ),
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        "store_data_equal_to_fill_value": True,  # so that a missing chunk is known to be lost
    }
    if metadata_key is not None:
        spec["metadata_key"] = metadata_key

    make = _zarr3_metadata if info.use_zarr3 else _zarr2_metadata
    spec["metadata"] = make(global_shape, chunks, compressed=bool(info.use_compression))
    spec["dtype"] = _name(stored)
    return spec if _name(dtype) == spec["dtype"] else {"base": spec, "driver": "cast", "dtype": _name(dtype)}


def get_cast_tspec_serialize(tspec: dict[str, Any], value: Any, args: SaveArgs) -> dict[str, Any]:
    """Return the spec to write `value`, cast to `args.dtype` if given."""
    stored = _name(value.dtype if args.dtype is None else args.dtype)
    tspec["dtype"] = stored  # in place, as Orbax does: its callers go on using what they gave
    return {"base": tspec, "driver": "cast", "dtype": _name(value.dtype)}


def get_cast_tspec_deserialize(tspec: dict[str, Any], args: RestoreArgs) -> dict[str, Any]:
    """Return the spec to read an array, cast to `args.dtype` unless that is None or a PRNG key dtype."""
    if args.dtype is None or prng_keys.is_key(args.dtype):
        return tspec

    return {"base": tspec, "driver": "cast", "dtype": _name(args.dtype)}


def _zarr2_metadata(shape: tuple[int, ...], chunks: tuple[int, ...], *, compressed: bool) -> dict[str, Any]:
    codec = {"id": "zstd", "level": _ZSTD_LEVEL[2]} if compressed else None
    return {"shape": shape, "chunks": chunks, "compressor": codec}


def _zarr3_metadata(shape: tuple[int, ...], chunks: tuple[int, ...], *, compressed: bool) -> dict[str, Any]:
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    codecs: list[dict[str, Any]] = [plain]
    if compressed:
        codecs.append({"name": "zstd", "configuration": {"level": _ZSTD_LEVEL[3]}})

    shard = {
        "chunk_shape": chunks,
        "codecs": codecs,
        "index_codecs": [plain, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "shape": shape,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "codecs": [{"name": "sharding_indexed", "configuration": shard}],
    }


def _directory(info: ParamInfo) -> str:
    if cast("object", info.name) is None or info.parent_dir is None:
        raise ValueError("a leaf needs a name and a directory")

    return cast("str", os.fspath(info.parent_dir))


def _dtype(dtype: Any) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(dtype)
    return found


def _name(dtype: Any) -> str:
    return _dtype(dtype).name


_PROCESSES: Final = "ocdbt.process_*"
_METADATA: Final = re.compile(r"(?:^|/)(?:\.zarray|zarr\.json)$")
_CHUNKS: Final = (re.compile(r"(?:^|/)\d+(?:\.\d+)*$"), re.compile(r"(?:^|/)c(?:/\d+)*$"))
"""What follows the name of an array in the keys of its chunks: in zarr version 2, and in 3."""


def is_ocdbt_checkpoint(path: Any) -> bool:
    """Return whether the arrays of the tree at `path` are in a database."""
    return Path(path, file_names.MANIFEST).exists()


async def merge_ocdbt_per_process_files(
    directory: Any,
    ts_context: Any,
    use_zarr3: bool,
    enable_validation: bool = True,
    *,
    store_ocdbt_metadata_and_values_separately: bool = False,
) -> None:
    """Make the values in each process's own database visible in that of the whole tree.

    The databases are referred to, so they must stay. Does nothing without any.

    Args:
        directory: Of the tree.
        ts_context: The TensorStore context; one for all databases.
        use_zarr3: The zarr version of the arrays; both versions are validated.
        enable_validation: Whether to check that every array has its metadata and a chunk.
        store_ocdbt_metadata_and_values_separately: Not supported: must be False.

    Raises:
        ValueError: If an array lacks one of them; nothing is merged then.
        NotImplementedError: If an unsupported option is set.
    """
    if store_ocdbt_metadata_and_values_separately:
        raise NotImplementedError("the index and the values are kept in the same data files")

    directory = Path(directory)
    processes = sorted(await in_thread(lambda: list(directory.glob(_PROCESSES))))
    if not processes:
        return

    there = await in_thread(is_ocdbt_checkpoint, directory)
    writing = None if there else OcdbtWriteOptions()  # a database that is there has its own options
    parent = await _open(kvstore_spec(str(directory), writing=writing), ts_context)
    transaction = _ts.Transaction(atomic=True)
    target = parent.with_transaction(transaction)
    for process in processes:
        child = await _open(kvstore_spec(str(process)), ts_context)
        await blocking.await_future(child.experimental_copy_range_to(target))
    if enable_validation:
        _validate([key.decode() for key in await blocking.await_future(target.list())])

    await blocking.await_future(transaction.commit_async())


@final
@dataclass(frozen=True, slots=True)
class MergeProcessFiles:
    """A stage between `commit` and `finalize`: merges what type handlers wrote by TensorStore themselves."""

    @asynccontextmanager
    async def open(self, run: kernel.SaveRun, /) -> AsyncGenerator[kernel.Actor]:
        """Yield the actor of one save."""

        async def merge(committed: kernel.Committed, /) -> kernel.Committed:
            directory = run.workspace.temporary
            there = await run.threads.run(
                lambda: [at for at, _, _ in os.walk(directory) if any(Path(at).glob(_PROCESSES))]
            )
            for place in there:
                await merge_ocdbt_per_process_files(place, get_ts_context(), use_zarr3=False)
                await run.threads.run(document_files.record_changes, run.store, place)

            return committed

        yield merge


async def _open(spec: dict[str, Any], context: Any) -> Any:
    return await blocking.await_future(_ts.KvStore.open(_ts.KvStore.Spec(spec), context=context))


def _validate(keys: list[str]) -> None:
    chunks = {key: names for key in keys if (names := _arrays_of(key))}
    # A handler may have its own name for the metadata of arrays.
    named = [key.rpartition("/")[0] for key in keys if not _METADATA.search(key) and key not in chunks]
    described = {_METADATA.sub("", key) for key in keys if _METADATA.search(key)}.union(named)
    written = {next((name for name in names if name in described), names[-1]) for names in chunks.values()}
    if described != written:
        lacking = sorted(described - written)
        unknown = sorted(written - described)
        raise ValueError(
            f"arrays without a chunk: {lacking}; chunks without the metadata of an array: {unknown}"
        )


def _arrays_of(key: str) -> list[str]:
    """Name the arrays that a key may be a chunk of: `b/c/0` is one of `b/c`, or in zarr version 3 of `b`."""
    return [pattern.sub("", key) for pattern in _CHUNKS if pattern.search(key)]
