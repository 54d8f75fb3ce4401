"""The options of the newer API, and their `Context`. While that is entered, they cannot be changed."""

from __future__ import annotations

__all__ = (
    "ArrayOptions",
    "AsyncOptions",
    "AtomicityMode",
    "AtomicityOptions",
    "CheckpointLayout",
    "CheckpointablesOptions",
    "DeletionOptions",
    "FileOptions",
    "MemoryOptions",
    "MultiprocessingOptions",
    "PathwaysOptions",
    "PyTreeMetadataOptions",
    "PyTreeOptions",
    "SafetensorsOptions",
)

import copy
import dataclasses
import enum
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar, cast, final

from penstock import handlers as built_in
from penstock.errors import ConfigError
from penstock.orbax.pathways import check_supported
from penstock.orbax.type_handlers import (
    ReplicaOptions,
    SpecOptions,
    Store,
    check_store,
    replicas_share_by_default,
)
from penstock.orbax.v1.handler_registration import CheckpointableHandlerRegistry, default_registry
from penstock.orbax.v1.path import Path

T = TypeVar("T")

FROZEN_IDS: Final[ContextVar[frozenset[int]]] = ContextVar("penstock_frozen_options", default=frozenset())
"""Identities of all objects that belong to the contexts entered here."""


class Guarded:
    """Cannot be changed while a context that it belongs to is entered."""

    def __setattr__(self, name: str, value: object) -> None:
        if id(self) in FROZEN_IDS.get():
            raise RuntimeError("options of a context in use cannot be changed; set them before its `with`")

        object.__setattr__(self, name, value)


def ids_within(*roots: object) -> frozenset[int]:
    """Return the identities of the dataclass instances that can be reached from some objects."""
    found: set[int] = set()
    todo: list[Any] = list(roots)
    while todo:
        value = todo.pop()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            if id(value) not in found:
                found.add(id(value))
                todo += [getattr(value, field.name) for field in dataclasses.fields(value)]
        elif isinstance(value, dict):
            todo += list(cast("Any", value).values())
        elif isinstance(value, list | tuple | set):
            todo += cast("list[Any]", value)

    return frozenset(found)


class TransferPriority(enum.Enum):
    """The time at which a leaf is copied to the host: a result of `is_prioritized_key_fn`."""

    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS_PRIORITIZED = "asynchronous_prioritized"
    ASYNCHRONOUS = "asynchronous"


IsPrioritizedKeyFn: TypeAlias = Callable[[Any], "TransferPriority | bool"]


class SerializationStatusCallback(Protocol):
    """Receives the progress of each leaf of a save. Never called: penstock writes to its event log."""


@dataclass(kw_only=True)
class MemoryOptions(Guarded):
    """Host memory of saves and loads.

    Attributes:
        write_concurrent_bytes: Bytes that a save may hold; None for what the machine can spare.
        read_concurrent_bytes: Bytes that a load may hold, likewise.
        transfer_concurrent_bytes: Bytes copied from devices and not yet written. It shares one
            budget with `write_concurrent_bytes`; the smaller of both applies.
        regulator_options: Has no effect: penstock adapts the limit itself.
        expected_surge_bytes: Has no effect.
        is_prioritized_key_fn: Decides by key path which leaves are copied first, before the save returns.
        serialization_status_callback: Has no effect.
        deepcopy_host_arrays: Has no effect: NumPy arrays are always copied before `save_async` returns.
    """

    @dataclass(frozen=True, kw_only=True)
    class RegulatorOptions:
        """Options of Orbax's limit, which it adapts from one save to the next. They have no effect."""

        max_memory_limit_gib: float
        profiler: Any
        target_ratio: float = 0.80
        min_memory_limit_gib: float = 10.0
        kp: float = 0.4
        ki: float = 0.05
        kd: float = 0.1

        def __post_init__(self) -> None:
            if self.profiler is None:
                raise ValueError("RegulatorOptions requires a `profiler`.")

        def __deepcopy__(self, memo: dict[int, Any]) -> MemoryOptions.RegulatorOptions:
            result = copy.copy(self)
            memo[id(self)] = result
            return result

    write_concurrent_bytes: int | None = None
    read_concurrent_bytes: int | None = None
    transfer_concurrent_bytes: int | None = None
    regulator_options: RegulatorOptions | None = None
    expected_surge_bytes: int | float | None = None
    is_prioritized_key_fn: IsPrioritizedKeyFn | None = None
    serialization_status_callback: SerializationStatusCallback | None = None
    deepcopy_host_arrays: bool = True

    @property
    def save_limit(self) -> int | None:
        """Bytes that a save may hold; None if no limit was given."""
        given = [n for n in (self.write_concurrent_bytes, self.transfer_concurrent_bytes) if n is not None]
        return min(given, default=None)


_STORE: Final = Store()


@dataclass(kw_only=True)
class ArrayOptions(Guarded):
    """The options of arrays."""

    @dataclass(kw_only=True)
    class Saving(Guarded):
        """The options of a save.

        Attributes:
            storage_options: For all leaves.
            use_ocdbt: Whether all arrays are in one OCDBT database, or each in its own directory.
            use_zarr3: Whether they are zarr v3, or v2.
            use_compression: Whether leaves are compressed that become smaller by it.
            ocdbt_target_data_file_size: Bytes after which a data file is followed by another; 0: never.
            enable_pinned_host_transfer: Has no effect: jax chooses how bytes get to the host.
            enable_post_merge_validation: Has no effect: penstock counts every byte before it publishes.
            use_replica_parallel: Whether each replica of a shard writes a part of it; by default
                unless JAX_PLATFORMS names a GPU.
            min_slice_bytes_for_replica_parallel: Bytes of a part below which a shard is not divided so.
            max_replicas_for_replica_parallel: The most parts that it is divided into.
            enable_replica_parallel_separate_folder: Has no effect: there is one database.
            enable_write_sharding_file: Whether shardings are recorded.
            array_metadata_store: Whether chunks and the kind of typed keys are recorded: a `Store`, or None
                for neither. One of the caller's is refused.
            scoped_storage_options_creator: Returns the storage options for a key path and a leaf;
                None, or a field that is None, falls back to `storage_options`.
        """

        class ScopedStorageOptionsCreator(Protocol):
            """Returns the storage options of one leaf."""

            def __call__(self, key: Any, value: Any) -> ArrayOptions.Saving.StorageOptions | None: ...

        @dataclass(kw_only=True)
        class StorageOptions(Guarded):
            """The storage of one leaf.

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
        """The options of a load.

        Attributes:
            enable_padding_and_truncation: Whether arrays are padded with zeros and truncated to
                the requested shapes; else other shapes are an error.
            raise_array_data_missing_error: Has no effect: absent bytes are always an error.
            use_load_and_broadcast: Has no effect: every process reads what it needs.
            load_and_broadcast_options: Has no effect, likewise.
        """

        @dataclass(kw_only=True)
        class LoadAndBroadcastOptions(Guarded):
            """Options of Orbax's broadcast of what one replica has read. They have no effect."""

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


def array_handler_of(saving: ArrayOptions.Saving) -> built_in.ArrayHandler:
    """Return the handler that saves jax.Arrays as these options say.

    Raises:
        NotImplementedError: If the array metadata are to be written by a class of the caller's.
    """
    check_store(saving.array_metadata_store)
    parallel = saving.use_replica_parallel
    described = SpecOptions(
        ReplicaOptions(
            replicas_share_by_default() if parallel is None else parallel,
            saving.min_slice_bytes_for_replica_parallel,
            saving.max_replicas_for_replica_parallel,
        ),
        shardings=saving.enable_write_sharding_file,
        shapes=saving.array_metadata_store is not None,
    )
    return built_in.ArrayHandler(described=None if described == SpecOptions() else described)


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


class AtomicityMode(enum.StrEnum):
    """The ways that a checkpoint becomes visible. penstock always renames, and writes the commit mark."""

    AUTO = "auto"
    COMMIT_FILE = "commit_file"
    ATOMIC_RENAME = "atomic_rename"


class CheckpointLayout(enum.Enum):
    """The format at a path: an Orbax checkpoint, safetensors, or either."""

    ORBAX = "orbax"
    SAFETENSORS = "safetensors"
    AUTO = "auto"


@dataclass(kw_only=True)
class AsyncOptions(Guarded):
    """The options of work in the background.

    Attributes:
        timeout_secs: Seconds after which a save fails.
        post_finalization_callback: Called when a save is done.
        create_directories_asynchronously: Has no effect: directories are made in the background.
    """

    timeout_secs: int = 1200
    post_finalization_callback: Callable[[], None] | None = None
    create_directories_asynchronously: bool = True


@dataclass(kw_only=True)
class AtomicityOptions(Guarded):
    """The way that a checkpoint becomes visible. penstock always renames it, and writes the commit mark, too.

    Attributes:
        mode: With `COMMIT_FILE`, what has no commit mark is not loaded.
        allow_legacy_atomic_rename: Whether it is, with that mode.
    """

    mode: AtomicityMode = AtomicityMode.AUTO
    allow_legacy_atomic_rename: bool = False

    @property
    def needs_mark(self) -> bool:
        """Return whether only what has a commit mark is loaded."""
        return self.mode is AtomicityMode.COMMIT_FILE and not self.allow_legacy_atomic_rename


@dataclass(kw_only=True)
class MultiprocessingOptions(Guarded):
    """The processes that take part, and the names of their barriers.

    Attributes:
        primary_host: The process that writes what is written once; None for every one.
        active_processes: Those that take part; None for all.
        barrier_sync_key_prefix: Prefix of the names of barriers.
    """

    primary_host: int | None = 0
    active_processes: set[int] | None = None
    barrier_sync_key_prefix: str | None = None


@dataclass(kw_only=True)
class FileOptions(Guarded):
    """The options of files and directories.

    Attributes:
        path_permission_mode: Of the directory of a checkpoint, as in 0o750.
        path_class: The class of paths that handlers get.
        skip_sync_file_validations: Has no effect: the destination is always checked.
    """

    path_permission_mode: int | None = None
    path_class: type[Path] = Path
    skip_sync_file_validations: bool = False


@dataclass(frozen=True)
class PyTreeMetadataOptions:
    """The record of the structure of a tree.

    Attributes:
        support_rich_types: Has no effect: penstock reads rich types, and writes plain ones.
    """

    support_rich_types: bool = False


@dataclass(kw_only=True)
class PyTreeOptions(Guarded):
    """The options of trees."""

    @dataclass(kw_only=True)
    class Saving(Guarded):
        """The options of a save."""

        pytree_metadata_options: Any = field(default_factory=PyTreeMetadataOptions)

    @dataclass(kw_only=True)
    class Loading(Guarded):
        """The options of a load.

        Attributes:
            partial_load: Whether an abstract tree may leave out what the checkpoint has, and have leaves
                that it has not.
            on_missing: What a leaf that is not stored is in a partial load: that of the abstract tree in
                the result, or an error. penstock's.
        """

        partial_load: bool = False
        on_missing: Literal["keep", "raise"] = "keep"

    saving: Saving = field(default_factory=Saving)
    loading: Loading = field(default_factory=Loading)


@dataclass(kw_only=True)
class CheckpointablesOptions(Guarded):
    """The handlers of objects.

    Attributes:
        registry: The handlers. Of those that can handle an object, the one registered last is used; one
            registered for a name takes precedence.
    """

    registry: CheckpointableHandlerRegistry = field(default_factory=default_registry)


@dataclass(kw_only=True)
class PathwaysOptions(Guarded):
    """Options of a backend that penstock does not support.

    Attributes:
        checkpointing_impl: None, or `NO_DISPATCHER` of `penstock.orbax.pathways.CheckpointingImpl`.

    Raises:
        ConfigError: If it is another one. It is a ValueError.
    """

    checkpointing_impl: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        check_supported(value)
        super().__setattr__(name, value)


@dataclass(kw_only=True)
class DeletionOptions(Guarded):
    """The options of deletions."""

    @dataclass(kw_only=True)
    class GcsDeletionOptions(Guarded):
        """The options of deletions in buckets.

        Attributes:
            todelete_full_path: Must be None: nothing is moved in a bucket.

        Raises:
            ConfigError: If it is not. It is a ValueError.
        """

        todelete_full_path: str | None = None

        def __setattr__(self, name: str, value: Any) -> None:
            if value is not None:
                raise ConfigError(name, "must be None: checkpoints in a bucket are deleted, not moved")

            super().__setattr__(name, value)

    gcs_deletion_options: GcsDeletionOptions = field(default_factory=GcsDeletionOptions)


@dataclass(kw_only=True)
class SafetensorsOptions(Guarded):
    """The options of safetensors files.

    Attributes:
        max_over_read_ratio: Bytes read for each byte that is needed, at most. penstock reads no others.
        read_chunk_bytes: The size of one read, at most; by default that of the configuration.
    """

    max_over_read_ratio: float | None = None
    read_chunk_bytes: int | None = None

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigError: If a read may have no bytes, or fewer than are needed. It is a ValueError.
        """
        if self.read_chunk_bytes is not None and self.read_chunk_bytes <= 0:
            raise ConfigError("read_chunk_bytes", f"must be positive, not {self.read_chunk_bytes}")
        if self.max_over_read_ratio is not None and self.max_over_read_ratio < 1:
            raise ConfigError("max_over_read_ratio", f"must be at least 1, not {self.max_over_read_ratio}")


_CONTEXT: Final[ContextVar[Context | None]] = ContextVar("penstock_orbax_context", default=None)


def get_context(default: Context | None = None) -> Context:
    """Return the entered context; if there is none, `default` or one with the default options."""
    active = _CONTEXT.get()
    if active is not None:
        return active

    return Context() if default is None else default


@final
class Context:
    """Options for everything that is done inside its `with`, in this thread and this task.

    ```python
    context = ocp.Context()
    context.array.saving.use_zarr3 = False
    with context:
        ocp.save(path, state)
    ```

    A context starts from the defaults, even inside another one, unless that one is passed. While it is
    entered its options cannot be changed.

    Args:
        context: One whose options are copied.
        pytree_options: See `options.PyTreeOptions`; the others likewise.
        array_options: Likewise.
        async_options: Likewise.
        multiprocessing_options: Likewise.
        file_options: Likewise.
        checkpointables_options: Likewise.
        pathways_options: Likewise.
        checkpoint_layout: Likewise, or its name.
        deletion_options: Likewise.
        memory_options: Likewise.
        safetensors_options: Likewise.
        atomicity_options: Likewise.
    """

    def __init__(
        self,
        context: Context | None = None,
        *,
        pytree_options: PyTreeOptions | None = None,
        array_options: ArrayOptions | None = None,
        async_options: AsyncOptions | None = None,
        multiprocessing_options: MultiprocessingOptions | None = None,
        file_options: FileOptions | None = None,
        checkpointables_options: CheckpointablesOptions | None = None,
        pathways_options: PathwaysOptions | None = None,
        checkpoint_layout: CheckpointLayout | str | None = None,
        deletion_options: DeletionOptions | None = None,
        memory_options: MemoryOptions | None = None,
        safetensors_options: SafetensorsOptions | None = None,
        atomicity_options: AtomicityOptions | None = None,
    ) -> None:
        up = context
        layout = None if checkpoint_layout is None else CheckpointLayout(checkpoint_layout)
        self._pytree = _chosen(pytree_options, up and up.pytree, PyTreeOptions)
        self._array = _chosen(array_options, up and up.array, ArrayOptions)
        self._asynchronous = _chosen(async_options, up and up.asynchronous, AsyncOptions)
        self._multiprocessing = _chosen(
            multiprocessing_options, up and up.multiprocessing, MultiprocessingOptions
        )
        self._file = _chosen(file_options, up and up.file, FileOptions)
        self._checkpointables = _chosen(
            checkpointables_options, up and up.checkpointables, CheckpointablesOptions
        )
        self._pathways = _chosen(pathways_options, up and up.pathways, PathwaysOptions)
        self._checkpoint_layout = _chosen(layout, up and up.checkpoint_layout, lambda: CheckpointLayout.ORBAX)
        self._deletion = _chosen(deletion_options, up and up.deletion, DeletionOptions)
        self._memory = _chosen(memory_options, up and up.memory, MemoryOptions)
        self._safetensors = _chosen(safetensors_options, up and up.safetensors, SafetensorsOptions)
        self._atomicity = _chosen(atomicity_options, up and up.atomicity, AtomicityOptions)
        self._entered: list[tuple[Token[Context | None], Token[frozenset[int]]]] = []

    def __enter__(self) -> Context:
        frozen = FROZEN_IDS.get() | {id(self)} | ids_within(*vars(self).values())
        self._entered.append((_CONTEXT.set(self), FROZEN_IDS.set(frozen)))
        return self

    def __exit__(self, *raised: object) -> None:
        context, frozen = self._entered.pop()
        _CONTEXT.reset(context)
        FROZEN_IDS.reset(frozen)

    @property
    def array(self) -> ArrayOptions:
        """The options of arrays."""
        return self._array

    @property
    def asynchronous(self) -> AsyncOptions:
        """The options of work in the background."""
        return self._asynchronous

    @property
    def pytree(self) -> PyTreeOptions:
        """The options of trees."""
        return self._pytree

    @property
    def file(self) -> FileOptions:
        """The options of files and directories."""
        return self._file

    @property
    def multiprocessing(self) -> MultiprocessingOptions:
        """The processes that take part."""
        return self._multiprocessing

    @property
    def checkpointables(self) -> CheckpointablesOptions:
        """The handlers of objects."""
        return self._checkpointables

    @property
    def pathways(self) -> PathwaysOptions:
        """Options of a backend that is not supported. They have no effect."""
        return self._pathways

    @property
    def deletion(self) -> DeletionOptions:
        """The options of deletions."""
        return self._deletion

    @property
    def memory(self) -> MemoryOptions:
        """The limits of memory."""
        return self._memory

    @property
    def safetensors(self) -> SafetensorsOptions:
        """The options of safetensors files."""
        return self._safetensors

    @property
    def atomicity(self) -> AtomicityOptions:
        """The way that a checkpoint becomes visible. It is renamed to its path, whatever this says."""
        return self._atomicity

    @property
    def checkpoint_layout(self) -> CheckpointLayout:
        """The layout of the checkpoints that are loaded."""
        return self._checkpoint_layout

    @checkpoint_layout.setter
    def checkpoint_layout(self, value: CheckpointLayout | str) -> None:
        if id(self) in FROZEN_IDS.get():
            raise RuntimeError("a context in use cannot be changed; set its options before its `with`")

        self._checkpoint_layout = CheckpointLayout(value)

    # Names from before `context.array`, which handlers written for Orbax still read.
    pytree_options = pytree
    array_options = array
    async_options = asynchronous
    multiprocessing_options = multiprocessing
    file_options = file
    checkpointables_options = checkpointables
    pathways_options = pathways
    deletion_options = deletion
    memory_options = memory
    safetensors_options = safetensors


def _chosen(given: T | None, inherited: T | None, default: Callable[[], T]) -> T:
    """Copy the given options, or those of another context; later changes to them have no effect here."""
    if given is not None:
        return copy.deepcopy(given)
    if inherited is not None:
        return copy.deepcopy(inherited)

    return default()
