"""What `metadata` returns for a whole checkpoint."""

from __future__ import annotations

__all__ = ("CheckpointMetadata", "PyTreeMetadata")

import datetime
from typing import Any, Generic, TypeAlias, TypeVar

from penstock.orbax.v1.common.path_types import Path

MetadataT = TypeVar("MetadataT")

PyTreeMetadata: TypeAlias = Any
"""A tree of dicts and lists that holds the metadata of each leaf."""


class CheckpointMetadata(Generic[MetadataT]):
    """What a checkpoint holds. Passed to `load`, it asks for everything as it was saved.

    Args:
        path: The path of the checkpoint.
        metadata: That of the tree, or of each item by name.
        init_timestamp_nsecs: When the save began: nanoseconds since the epoch.
        commit_timestamp_nsecs: When it was done.
        custom_metadata: The caller's own.
    """

    def __init__(
        self,
        path: Path,
        *,
        metadata: MetadataT,
        init_timestamp_nsecs: int | None = None,
        commit_timestamp_nsecs: int | None = None,
        custom_metadata: Any = None,
    ) -> None:
        self._path = path
        self._metadata = metadata
        self._init_timestamp_nsecs = init_timestamp_nsecs
        self._commit_timestamp_nsecs = commit_timestamp_nsecs
        self._custom_metadata = custom_metadata

    @property
    def path(self) -> Path:
        """The path of the checkpoint."""
        return self._path

    @property
    def metadata(self) -> MetadataT:
        """The metadata of the tree, or of each item by name."""
        return self._metadata

    @property
    def init_timestamp_nsecs(self) -> int | None:
        """When the save began: nanoseconds since the epoch."""
        return self._init_timestamp_nsecs

    @property
    def commit_timestamp_nsecs(self) -> int | None:
        """When it was done: nanoseconds since the epoch."""
        return self._commit_timestamp_nsecs

    @property
    def init_timestamp(self) -> datetime.datetime | None:
        """When the save began."""
        return _datetime(self._init_timestamp_nsecs)

    @property
    def commit_timestamp(self) -> datetime.datetime | None:
        """When it was done."""
        return _datetime(self._commit_timestamp_nsecs)

    @property
    def custom_metadata(self) -> Any:
        """The caller's own metadata."""
        return self._custom_metadata

    def __repr__(self) -> str:
        return (
            f"CheckpointMetadata(metadata={self._metadata!r}, "
            f"init_timestamp_nsecs={self._init_timestamp_nsecs}, "
            f"commit_timestamp_nsecs={self._commit_timestamp_nsecs}, "
            f"custom_metadata={self._custom_metadata!r})"
        )


def _datetime(nanoseconds: int | None) -> datetime.datetime | None:
    if nanoseconds is None:
        return None

    return datetime.datetime.fromtimestamp(nanoseconds / 1e9, tz=datetime.UTC)
