"""What a step, and a directory of steps, say about themselves."""

from __future__ import annotations

__all__ = ("CheckpointMetadata", "RootMetadata")

import datetime
from dataclasses import dataclass
from typing import Any, TypeVar, final

from penstock.orbax.v1.common.path_types import Path
from penstock.orbax.v1.operations.checkpoint_info import CheckpointMetadata as OneCheckpoint

MetadataT = TypeVar("MetadataT")


@final
class CheckpointMetadata(OneCheckpoint[MetadataT]):
    """What a checkpoint is, as one of several steps.

    Args:
        step: Its number.
        path: As in `penstock.orbax.v1.CheckpointMetadata`; so are those that are not named here.
        metadata: That of the tree, or of each item by name; None where it was not read.
        init_timestamp_nsecs: When the save began: nanoseconds since the epoch.
        commit_timestamp_nsecs: When it was done.
        custom_metadata: The caller's own.
        metrics: Those of the step; None if it has none.
    """

    def __init__(
        self,
        step: int,
        path: Path,
        *,
        metadata: MetadataT,
        init_timestamp_nsecs: int | None = None,
        commit_timestamp_nsecs: int | None = None,
        custom_metadata: Any = None,
        metrics: Any = None,
    ) -> None:
        super().__init__(
            path,
            metadata=metadata,
            init_timestamp_nsecs=init_timestamp_nsecs,
            commit_timestamp_nsecs=commit_timestamp_nsecs,
            custom_metadata=custom_metadata,
        )
        self._step = step
        self._metrics = metrics

    @property
    def step(self) -> int:
        """The number of the step."""
        return self._step

    @property
    def metrics(self) -> Any:
        """The metrics kept with it; None if it has none."""
        return self._metrics

    @property
    def time(self) -> datetime.datetime:
        """When it was done."""
        return datetime.datetime.fromtimestamp((self.commit_timestamp_nsecs or 0) / 1e9, tz=datetime.UTC)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, step={self._step}, metrics={self._metrics!r})"


@final
@dataclass(frozen=True, kw_only=True)
class RootMetadata:
    """What is kept with a directory of steps.

    Attributes:
        directory: The directory.
        custom_metadata: The caller's own.
    """

    directory: Path
    custom_metadata: Any = None
