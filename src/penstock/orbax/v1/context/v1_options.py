"""The options of a `Context`."""

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

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.kernel.errors import ConfigError
from penstock.orbax.common.checkpointing_impl import check_supported
from penstock.orbax.v1.common.handler_registration import CheckpointableHandlerRegistry, default_registry
from penstock.orbax.v1.common.path_types import Path
from penstock.orbax.v1.context.array_options import ArrayOptions
from penstock.orbax.v1.context.frozen_options import Guarded
from penstock.orbax.v1.context.memory_options import MemoryOptions


class AtomicityMode(enum.StrEnum):
    """How a checkpoint becomes visible. penstock always renames, and writes the commit mark, too."""

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
    """What happens in the background.

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
    """How a checkpoint becomes visible. penstock always renames it, and writes the commit mark, too.

    Attributes:
        mode: With `COMMIT_FILE`, what has no commit mark is not loaded.
        allow_legacy_atomic_rename: Whether it is, with that mode.
    """

    mode: AtomicityMode = AtomicityMode.AUTO
    allow_legacy_atomic_rename: bool = False

    @property
    def needs_mark(self) -> bool:
        """Whether only what has a commit mark is loaded."""
        return self.mode is AtomicityMode.COMMIT_FILE and not self.allow_legacy_atomic_rename


@dataclass(kw_only=True)
class MultiprocessingOptions(Guarded):
    """Which processes take part, and what their barriers are called.

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
    """How files and directories are made.

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
    """How the structure of a tree is recorded.

    Attributes:
        support_rich_types: Has no effect: penstock reads rich types, and writes plain ones.
    """

    support_rich_types: bool = False


@dataclass(kw_only=True)
class PyTreeOptions(Guarded):
    """How trees are saved and loaded."""

    @dataclass(kw_only=True)
    class Saving(Guarded):
        """How trees are saved."""

        pytree_metadata_options: Any = field(default_factory=PyTreeMetadataOptions)

    @dataclass(kw_only=True)
    class Loading(Guarded):
        """How trees are loaded.

        Attributes:
            partial_load: Whether an abstract tree may leave out what the checkpoint has.
        """

        partial_load: bool = False

    saving: Saving = field(default_factory=Saving)
    loading: Loading = field(default_factory=Loading)


@dataclass(kw_only=True)
class CheckpointablesOptions(Guarded):
    """Which handlers save and load objects.

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
    """How checkpoints are deleted."""

    @dataclass(kw_only=True)
    class GcsDeletionOptions(Guarded):
        """How checkpoints in buckets are deleted.

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
    """How safetensors are read.

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
