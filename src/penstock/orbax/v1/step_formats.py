"""Steps in the newer API: the names of their directories, and what they and the directory of steps record."""

from __future__ import annotations

__all__ = (
    "CheckpointMetadata",
    "NameFormat",
    "RootMetadata",
    "StepCheckpointMetadata",
    "composite_name_format",
    "standard_name_format",
)

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, final

from penstock.errors import CorruptCheckpointError
from penstock.orbax import step as established
from penstock.orbax.step import NameFormat

MetadataT = TypeVar("MetadataT")


class CheckpointMetadata(Generic[MetadataT]):
    """The description of a checkpoint. Passed to `load`, it asks for everything as it was saved.

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
        """The time at which the save began, in nanoseconds since the epoch."""
        return self._init_timestamp_nsecs

    @property
    def commit_timestamp_nsecs(self) -> int | None:
        """The time at which it was done, in nanoseconds since the epoch."""
        return self._commit_timestamp_nsecs

    @property
    def init_timestamp(self) -> datetime.datetime | None:
        """The time at which the save began."""
        return _datetime(self._init_timestamp_nsecs)

    @property
    def commit_timestamp(self) -> datetime.datetime | None:
        """The time at which it was done."""
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


@final
class StepCheckpointMetadata(CheckpointMetadata[MetadataT]):
    """The description of a checkpoint as one of several steps.

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
        """The time at which it was done."""
        return datetime.datetime.fromtimestamp((self.commit_timestamp_nsecs or 0) / 1e9, tz=datetime.UTC)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, step={self._step}, metrics={self._metrics!r})"


@final
@dataclass(frozen=True, kw_only=True)
class RootMetadata:
    """The metadata of a directory of steps.

    Attributes:
        directory: The directory.
        custom_metadata: The caller's own.
    """

    directory: Path
    custom_metadata: Any = None


def standard_name_format(
    *,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    single_host_load_and_broadcast: bool = False,
) -> NameFormat[StepCheckpointMetadata[None]]:
    """Return a format of names such as `7`, `0007`, `step_7` or `step_0007`.

    Args:
        step_prefix: What precedes the number, followed by an underscore.
        step_format_fixed_length: The number of digits, filled up with zeros.
        single_host_load_and_broadcast: Has no effect: every process lists the directory.

    Raises:
        ValueError: If steps cannot have such names.
    """
    names: Any = established.standard_name_format(
        step_prefix=step_prefix,
        step_format_fixed_length=step_format_fixed_length,
        single_host_load_and_broadcast=single_host_load_and_broadcast,
    )
    return cast("NameFormat[StepCheckpointMetadata[None]]", replace(names, describe=_describe))


def composite_name_format(
    write_name_format: NameFormat[StepCheckpointMetadata[None]],
    read_name_formats: Sequence[NameFormat[StepCheckpointMetadata[None]]],
) -> NameFormat[StepCheckpointMetadata[None]]:
    """Return a format that names new steps in one way, and finds steps named in any of several.

    Raises:
        ValueError: If the format for writing is not one of those for reading.
    """
    return established.composite_name_format(write_name_format, read_name_formats)


def _describe(found: Any) -> StepCheckpointMetadata[None]:
    """Describe a step; if its times are damaged, they are left out."""
    try:
        times: dict[str, Any] = {
            "init_timestamp_nsecs": found.init_timestamp_nsecs,
            "commit_timestamp_nsecs": found.commit_timestamp_nsecs,
        }
    except CorruptCheckpointError:
        times = {}

    return StepCheckpointMetadata(found.step, found.path, metadata=None, **times)


def _datetime(nanoseconds: int | None) -> datetime.datetime | None:
    if nanoseconds is None:
        return None

    return datetime.datetime.fromtimestamp(nanoseconds / 1e9, tz=datetime.UTC)
