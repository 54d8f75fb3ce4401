"""Arrays to and from the medium by TensorStore, for handlers that are called directly."""

from __future__ import annotations

__all__ = ("Written", "check_infos", "open_arrays", "opened_metadata", "resolve_paths", "write_arrays")

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from penstock.blocking.background import run_sync
from penstock.kernel.errors import DuplicateNameError
from penstock.orbax.common.background_work import all_results, blaming, in_thread
from penstock.orbax.common.leaf_args import ParamInfo, RestoreArgs
from penstock.orbax.common.sharding_metadata import ShardingMetadata
from penstock.orbax.common.value_metadata import ArrayMetadata, StorageMetadata, ZarrMetadata
from penstock.orbax.v0.common.compared_arrays import compare_arrays
from penstock.orbax.v0.leaf_handlers.tensorstore_specs import array_read_spec, get_ts_context

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
