"""How arrays are stored and loaded."""

from __future__ import annotations

__all__ = (
    "ArrayMetadataStore",
    "ArrayMetadataValidator",
    "ArrayOptions",
    "array_handler_of",
    "storage_options_of",
)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, final

from penstock.handlers.leaves.array import ArrayHandler
from penstock.orbax.common.array_handler_options import Described, replicas_share_by_default
from penstock.orbax.v1.context.frozen_options import Guarded


@final
@dataclass(frozen=True)
class ArrayMetadataStore:
    """Stands for writing `array_metadatas`, which penstock writes itself.

    Any other object with the methods `write` and `read` of Orbax's stores replaces it.
    """


@final
@dataclass(frozen=True)
class ArrayMetadataValidator:
    """Stands for comparing `array_metadatas` after a save; penstock counts every byte instead.

    Any other object with this method is called before the tree is published; its errors fail the save.
    """

    def validate_all_array_metadatas(self, array_metadatas: Mapping[int, Sequence[Any]]) -> None:
        """Compare what each process recorded about its arrays. One process has nothing to compare."""


_STORE: Final = ArrayMetadataStore()


@dataclass(kw_only=True)
class ArrayOptions(Guarded):
    """How arrays are stored and loaded."""

    @dataclass(kw_only=True)
    class Saving(Guarded):
        """How arrays are stored.

        Attributes:
            storage_options: For all leaves.
            use_ocdbt: Whether all arrays lie in one OCDBT database, or each in a directory of its own.
            use_zarr3: Whether they are zarr v3, or v2.
            use_compression: Whether zstd is used, for leaves that it makes smaller.
            ocdbt_target_data_file_size: Bytes after which a data file is followed by another; 0: never.
            enable_pinned_host_transfer: Has no effect: jax chooses how bytes get to the host.
            enable_post_merge_validation: Has no effect: penstock counts every byte before it publishes.
            use_replica_parallel: Whether each replica of a shard writes a part of it; by default
                unless JAX_PLATFORMS names a GPU.
            min_slice_bytes_for_replica_parallel: Bytes of a part below which a shard is not divided so.
            max_replicas_for_replica_parallel: The most parts that it is divided into.
            enable_replica_parallel_separate_folder: Has no effect: there is one database.
            enable_write_sharding_file: Whether shardings are recorded.
            array_metadata_store: Records chunks and the kind of typed keys; None to record neither.
            scoped_storage_options_creator: Returns the storage options for a key path and a leaf;
                None, or a field that is None, falls back to `storage_options`.
        """

        class ScopedStorageOptionsCreator(Protocol):
            """Returns the storage options of one leaf."""

            def __call__(self, key: Any, value: Any) -> ArrayOptions.Saving.StorageOptions | None: ...

        @dataclass(kw_only=True)
        class StorageOptions(Guarded):
            """How a leaf is stored.

            Attributes:
                dtype: What it is cast to.
                chunk_byte_size: Shards are cut into equal chunks of at most so many bytes.
                shard_axes: Axes that are cut first.
            """

            dtype: Any = None
            chunk_byte_size: int | None = None
            shard_axes: tuple[int, ...] | None = None

        storage_options: StorageOptions = field(default_factory=StorageOptions)
        use_ocdbt: bool = True
        use_zarr3: bool = True
        use_compression: bool = True
        ocdbt_target_data_file_size: int | None = None
        enable_pinned_host_transfer: bool | None = None
        enable_post_merge_validation: bool = True
        use_replica_parallel: bool | None = None
        min_slice_bytes_for_replica_parallel: int | None = None
        max_replicas_for_replica_parallel: int | None = None
        enable_replica_parallel_separate_folder: bool = False
        enable_write_sharding_file: bool = True
        array_metadata_store: Any = _STORE
        scoped_storage_options_creator: ScopedStorageOptionsCreator | None = None

    @dataclass(kw_only=True)
    class Loading(Guarded):
        """How arrays are loaded.

        Attributes:
            enable_padding_and_truncation: Whether arrays are padded with zeros and truncated to
                the requested shapes; else other shapes are an error.
            raise_array_data_missing_error: Has no effect: absent bytes are always an error.
            use_load_and_broadcast: Has no effect: every process reads what it needs.
            load_and_broadcast_options: Has no effect, likewise.
        """

        @dataclass(kw_only=True)
        class LoadAndBroadcastOptions(Guarded):
            """How Orbax broadcasts what one replica has read. It has no effect."""

            replica_axis_index: int | None = 0
            primary_replica_id: int | None = 0
            broadcast_memory_limit_bytes: int | None = None
            broadcast_memory_scaling_factor: float | None = 0.75

        enable_padding_and_truncation: bool = False
        raise_array_data_missing_error: bool = True
        use_load_and_broadcast: bool = False
        load_and_broadcast_options: LoadAndBroadcastOptions = field(default_factory=LoadAndBroadcastOptions)

    saving: Saving = field(default_factory=Saving)
    loading: Loading = field(default_factory=Loading)


def array_handler_of(saving: ArrayOptions.Saving) -> ArrayHandler:
    """Return the handler that saves jax.Arrays as these options say."""
    parallel = saving.use_replica_parallel
    described = Described(
        replicas_share_by_default() if parallel is None else parallel,
        saving.min_slice_bytes_for_replica_parallel,
        saving.max_replicas_for_replica_parallel,
        shardings=saving.enable_write_sharding_file,
        shapes=saving.array_metadata_store is not None,
    )
    return ArrayHandler(described=None if described == Described() else described)


def storage_options_of(
    saving: ArrayOptions.Saving, key: Any, value: Any
) -> ArrayOptions.Saving.StorageOptions:
    """Return the storage options of one leaf: those of the creator, or else of all leaves."""
    common = saving.storage_options
    creator = saving.scoped_storage_options_creator
    own = None if creator is None else creator(key, value)
    if own is None:
        return common

    return ArrayOptions.Saving.StorageOptions(
        dtype=common.dtype if own.dtype is None else own.dtype,
        chunk_byte_size=common.chunk_byte_size if own.chunk_byte_size is None else own.chunk_byte_size,
        shard_axes=common.shard_axes if own.shard_axes is None else own.shard_axes,
    )
