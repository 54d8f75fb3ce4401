"""How the directories of steps are named and found."""

from __future__ import annotations

__all__ = (
    "Metadata",
    "NameFormat",
    "as_name_format",
    "composite_name_format",
    "get_save_directory",
    "has_standard_names",
    "is_empty",
    "standard_name_format",
)

import datetime
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, TypeVar, final

from penstock.kernel.errors import ConfigError, CorruptCheckpointError, NotACheckpointError, SpecError
from penstock.kernel.protocols.stores import Store
from penstock.orbax.common.handler_paths import path_as_given, path_text, place_of, store_at
from penstock.orbax.v0.common.step_metadata import StepMetadata, get_step_metadata
from penstock.orbax.v0.common.v0_options import AtomicityOptions
from penstock.steps import step_names as own
from penstock.steps.step_directory import find_steps, is_finished, list_root


@final
@dataclass(frozen=True)
class Metadata:
    """A step that exists.

    Attributes:
        step: Its number.
        path: Its directory.
    """

    step: int
    path: Any

    @property
    def init_timestamp_nsecs(self) -> int | None:
        """When its save began, in nanoseconds since the epoch."""
        return self._recorded().init_timestamp_nsecs

    @property
    def commit_timestamp_nsecs(self) -> int | None:
        """When it was complete."""
        return self._recorded().commit_timestamp_nsecs

    @property
    def commit_timestamp(self) -> datetime.datetime:
        """When it was complete; if that is not recorded, when its directory last changed.

        Raises:
            CorruptCheckpointError: If what is recorded is not as it was written.
        """
        recorded = self.commit_timestamp_nsecs
        seconds = os.stat(path_text(self.path)).st_mtime if recorded is None else recorded / 1e9
        return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)

    def _recorded(self) -> StepMetadata:
        try:
            return get_step_metadata(self.path)
        except CorruptCheckpointError:
            raise
        except ValueError:
            return StepMetadata()


MetadataT = TypeVar("MetadataT", bound=Any, covariant=True)


class NameFormat(Protocol[MetadataT]):
    """Names steps and finds them, as a `Metadata` or an object with its attributes."""

    def build_name(self, step: int) -> str:
        """Return the name of a step."""
        ...

    def find_all(self, base_path: Any) -> Iterator[MetadataT]:
        """Yield every step in a directory."""
        ...

    def find_step(self, base_path: Any, step: int) -> MetadataT:
        """Return one step; raise a ValueError if it does not exist."""
        ...


@final
@dataclass(frozen=True)
class _Format(NameFormat[Metadata]):
    names: own.NameFormat
    single_host_load_and_broadcast: bool = False

    def __str__(self) -> str:
        return f'StandardNameFormat("{self.build_name(1234)}")'

    def build_name(self, step: int) -> str:
        return self.names.name(step)

    def find_all(self, base_path: Any) -> Iterator[Metadata]:
        """Yield every step, and every empty directory that is named like one, as in Orbax."""
        base, store = place_of(base_path), store_at(base_path)
        listed = list_root(store, path_text(base))
        found = {name: step for step, name in find_steps(store, path_text(base), self.names, listed).items()}
        for name in listed:
            step = self.names.step(name)
            if step is not None and name not in found and is_empty(store, os.path.join(base, name)):
                found[name] = step

        yield from (Metadata(step, base / name) for name, step in sorted(found.items(), key=itemgetter(1)))

    def find_step(self, base_path: Any, step: int) -> Metadata:
        path, store = place_of(base_path) / self.build_name(step), store_at(base_path)
        if not (is_finished(store, path_text(path)) or is_empty(store, path_text(path))):
            raise NotACheckpointError(path_text(path), f"there is no step {step} of {self}")

        return Metadata(step, path)


@final
@dataclass(frozen=True)
class _Composite(NameFormat[Any]):
    writing: NameFormat[Any]
    reading: Sequence[NameFormat[Any]]
    single_host_load_and_broadcast: bool = False

    def __str__(self) -> str:
        return f"Composite([{','.join(map(str, self.reading))}])"

    def build_name(self, step: int) -> str:
        return self.writing.build_name(step)

    def find_all(self, base_path: Any) -> Iterator[Any]:
        return _once(one for reading in self.reading for one in reading.find_all(base_path))

    def find_step(self, base_path: Any, step: int) -> Any:
        problems: list[str] = []
        for reading in self.reading:
            try:
                return reading.find_step(base_path, step)
            except ValueError as error:
                problems.append(str(error))

        raise NotACheckpointError(path_text(base_path), "\n".join(problems))


def is_empty(store: Store, path: str) -> bool:
    """Whether there is a directory with nothing in it."""
    return store.kind(path) == "directory" and not store.list_directory(path)


def _once(steps: Iterable[Any]) -> Iterator[Any]:
    """Leave out what lies where one before it does."""
    seen: set[str] = set()
    for found in steps:
        if path_text(found.path) not in seen:
            seen.add(path_text(found.path))
            yield found


def standard_name_format(
    *,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    single_host_load_and_broadcast: bool = False,
    temporary_path_cls: Any = None,
    atomicity_options: AtomicityOptions | None = None,
) -> NameFormat[Metadata]:
    """Return a format of names such as `7`, `0007`, `step_7` or `step_0007`.

    Args:
        step_prefix: What precedes the number, followed by an underscore.
        step_format_fixed_length: The number of digits, filled up with zeros.
        single_host_load_and_broadcast: Has no effect: every process lists the directory.
        temporary_path_cls: Not supported.
        atomicity_options: Has no effect: unfinished steps are left out anyway.

    Raises:
        ValueError: If steps cannot have such names.
    """
    if temporary_path_cls is not None:
        raise ConfigError("temporary_path_cls", "is not supported; say how in atomicity_options")

    names = own.StepNames(step_prefix, step_format_fixed_length or None)
    return _Format(names, single_host_load_and_broadcast)


def composite_name_format(
    write_name_format: NameFormat[Any], read_name_formats: Sequence[NameFormat[Any]]
) -> NameFormat[Any]:
    """Return a format that names new steps in one way, and finds steps named in any of several.

    Raises:
        ValueError: If the format for writing is not one of those for reading.
    """
    if write_name_format not in read_name_formats:
        raise SpecError(f"{write_name_format} must be one of the formats that are read")

    return _Composite(write_name_format, tuple(read_name_formats))


def get_save_directory(
    step: int,
    directory: Any,
    name: str | None = None,
    step_prefix: str | None = None,
    override_directory: Any = None,
    step_format_fixed_length: int | None = None,
    step_name_format: NameFormat[Any] | None = None,
) -> Any:
    """Return the directory of a step, or of one of its items.

    Args:
        step: Its number.
        directory: The directory of steps.
        name: Of the item; None for the step.
        step_prefix: See `standard_name_format`.
        override_directory: The directory of the step, whatever the others say.
        step_format_fixed_length: See `standard_name_format`.
        step_name_format: How steps are named, in place of the two before.

    Raises:
        ValueError: If `directory` is None.
    """
    if directory is None:
        raise ValueError("Directory cannot be None.")

    if override_directory is not None:
        path = path_as_given(override_directory)
    else:
        names = step_name_format or standard_name_format(
            step_prefix=step_prefix, step_format_fixed_length=step_format_fixed_length
        )
        path = path_as_given(directory) / names.build_name(step)

    return path if name is None else path / name


def has_standard_names(name_format: Any) -> bool:
    """Whether `standard_name_format` made it."""
    return isinstance(name_format, _Format)


def as_name_format(given: Any) -> NameFormat[Any]:
    """Return a format of Orbax's kind from one of that kind or of penstock's."""
    return _Format(given) if isinstance(given, own.NameFormat) else given
