"""The type handler of jax.Arrays."""

from __future__ import annotations

__all__ = ("ArrayHandler",)

import os
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, Final, cast

from penstock.blocking.background import run_sync, start_thread
from penstock.handlers.coordinators.jax_processes import processes_of_jax
from penstock.handlers.formats.orbax.file_names import SHARDING
from penstock.handlers.leaves import array
from penstock.kernel.protocols.leaf_handlers import Waitable
from penstock.orbax.common.array_handler_options import Described, replicas_share_by_default
from penstock.orbax.common.array_metadata_store import RANDOM_KEY_IMPL
from penstock.orbax.common.array_structs import asked_placement
from penstock.orbax.common.background_work import in_thread, together
from penstock.orbax.common.job_processes import has_primary_host, is_primary_host
from penstock.orbax.common.leaf_args import (
    ParamInfo,
    RestoreArgs,
    SaveArgs,
    check_input_arguments,
)
from penstock.orbax.common.sharding_metadata import from_serialized_string
from penstock.orbax.v0.leaf_handlers.array_io import (
    check_infos,
    open_arrays,
    opened_metadata,
    resolve_paths,
    write_arrays,
)
from penstock.orbax.v0.leaf_handlers.array_reading import read_array, wanted_of
from penstock.orbax.v0.leaf_handlers.array_staging import ReplicaOptions, Staged, stage
from penstock.orbax.v0.leaf_handlers.leaf_documents import read_values, sharding_pointer, write_values
from penstock.orbax.v0.leaf_handlers.numpy_handlers import refuse_empty
from penstock.orbax.v0.leaf_handlers.type_handler import TypeHandler

_RANKS: Final = range(3)
"""The values of Orbax's `TransferPriority` but for the unknown: at once, soon, later."""


class ArrayHandler(TypeHandler):
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
        enable_replica_parallel_separate_folder: Whether what is replicated has a directory of its own.
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
        """The pipeline handler that does the same, shared by equal handlers; None if there is none."""
        if self._metadata_key is not None or self._callback is not None:
            return None

        replicas = self._replicas
        described = Described(
            replicas.parallel,
            replicas.min_slice_bytes,
            replicas.max_replicas,
            self._replica_id,
            self._enable_write_sharding_file and has_primary_host(self._primary_host),
            self._array_metadata_store is not None,
        )
        return _leaf_handler(self.typestr(), None if described == Described() else described)

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        """Describe each stored leaf by an `ArrayMetadata`, with its sharding if one is recorded."""
        opened = await open_arrays(infos, None, self._metadata_key)
        shardings = await _recorded(infos, range(len(infos)))
        return [
            opened_metadata(store, info, from_serialized_string(text) if text else None)
            for store, info, text in zip(opened, infos, shardings, strict=True)
        ]

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[Waitable]:
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
        staged = await in_thread(stage, values, infos, args, self._replicas, self._metadata_key)
        self._tell("on_transfer_end", infos)
        return [start_thread(self._write, staged, infos)]

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

        shardings = await _shardings(infos, args)
        wanted = [wanted_of(arg, s, i) for arg, s, i in zip(args, shardings, infos, strict=True)]
        opened = await open_arrays(infos, args, self._metadata_key)
        impls = await self._key_impls(infos)

        async def read(at: int) -> Any:
            return await read_array(opened[at], infos[at], wanted[at], impls.get(infos[at].name))

        return await together([partial(read, at) for at in range(len(infos))])

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Return for each value the bytes of its distinct shards, to write and to read."""
        sizes = [int(value.nbytes) for value in values]
        return [(size, size) for size in sizes]

    def _write(self, staged: Sequence[Staged], infos: Sequence[ParamInfo]) -> None:
        resolve_paths(infos)
        write_arrays([one.array for one in staged], database=bool(infos[0].is_ocdbt_checkpoint))
        texts = [(one.array.info, one.sharding) for one in staged]
        if self._enable_write_sharding_file and is_primary_host(self._primary_host):
            write_values(SHARDING, [(i, sharding_pointer(i.name), text) for i, text in texts if text])

        store = self._array_metadata_store
        if store is not None:
            run_sync(
                store.write, infos[0].parent_dir, [one.metadata for one in staged], processes_of_jax()[0]
            )

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
    if not which or not await in_thread(os.path.exists, os.path.join(infos[0].parent_dir, SHARDING)):
        return [None] * len(which)

    chosen = [infos[at] for at in which]
    texts = await read_values(SHARDING, chosen, [sharding_pointer(info.name) for info in chosen])
    return [cast("str", text) or None for text in texts]


@lru_cache(maxsize=64)
def _leaf_handler(typestr: str, described: Described | None) -> array.ArrayHandler:
    """Equal handlers share one: a tree is planned anew for each different one."""
    return array.ArrayHandler(typestr, described=described)
