"""How the directories of steps are named and found, in the newer API."""

from __future__ import annotations

__all__ = ("NameFormat", "composite_name_format", "standard_name_format")

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from penstock.kernel.errors import CorruptCheckpointError
from penstock.orbax.v0.manager import step_name_formats as established
from penstock.orbax.v0.manager.step_name_formats import NameFormat
from penstock.orbax.v1.steps.training_metadata import CheckpointMetadata


@final
@dataclass(frozen=True)
class _Format(NameFormat[CheckpointMetadata[None]]):
    """A format of the established API, whose steps are described as in this one."""

    names: NameFormat[Any]

    @property
    def single_host_load_and_broadcast(self) -> bool:
        """As it was asked for."""
        return bool(getattr(self.names, "single_host_load_and_broadcast", False))

    def __str__(self) -> str:
        return str(self.names)

    def build_name(self, step: int) -> str:
        return self.names.build_name(step)

    def find_all(self, base_path: Any) -> Iterator[CheckpointMetadata[None]]:
        return map(_described, self.names.find_all(base_path))

    def find_step(self, base_path: Any, step: int) -> CheckpointMetadata[None]:
        return _described(self.names.find_step(base_path, step))


def standard_name_format(
    *,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    single_host_load_and_broadcast: bool = False,
) -> NameFormat[CheckpointMetadata[None]]:
    """Return a format of names such as `7`, `0007`, `step_7` or `step_0007`.

    Args:
        step_prefix: What precedes the number, followed by an underscore.
        step_format_fixed_length: The number of digits, filled up with zeros.
        single_host_load_and_broadcast: Has no effect: every process lists the directory.

    Raises:
        ValueError: If steps cannot have such names.
    """
    names = established.standard_name_format(
        step_prefix=step_prefix,
        step_format_fixed_length=step_format_fixed_length,
        single_host_load_and_broadcast=single_host_load_and_broadcast,
    )
    return _Format(names)


def composite_name_format(
    write_name_format: NameFormat[CheckpointMetadata[None]],
    read_name_formats: Sequence[NameFormat[CheckpointMetadata[None]]],
) -> NameFormat[CheckpointMetadata[None]]:
    """Return a format that names new steps in one way, and finds steps named in any of several.

    Raises:
        ValueError: If the format for writing is not one of those for reading.
    """
    return established.composite_name_format(write_name_format, read_name_formats)


def _described(found: Any) -> CheckpointMetadata[None]:
    """Describe a step; one whose times are damaged is a step, too, of which no time is known."""
    try:
        times: dict[str, Any] = {
            "init_timestamp_nsecs": found.init_timestamp_nsecs,
            "commit_timestamp_nsecs": found.commit_timestamp_nsecs,
        }
    except CorruptCheckpointError:
        times = {}

    return CheckpointMetadata(found.step, found.path, metadata=None, **times)
