"""The names of the directories of steps, and the search for steps, under Orbax's names."""

from __future__ import annotations

__all__ = (
    "TMP_DIR_SUFFIX",
    "Metadata",
    "NameFormat",
    "any_checkpoint_step",
    "as_name_format",
    "build_step_metadatas",
    "build_step_path",
    "checkpoint_steps",
    "checkpoint_steps_paths",
    "composite_name_format",
    "find_step_path",
    "get_save_directory",
    "is_checkpoint_finalized",
    "is_path_finalized",
    "is_path_temporary",
    "is_standard_name_format",
    "is_tmp_checkpoint",
    "latest_step_metadata",
    "maybe_find_step_metadata",
    "standard_name_format",
    "step_from_checkpoint_name",
    "step_metadata_of_checkpoint_path",
    "step_prefix_with_underscore",
    "tmp_checkpoints",
)

import datetime
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, final

from penstock import kernel
from penstock import steps as own
from penstock.embedding import file_names, step_directory
from penstock.errors import CorruptCheckpointError, NotACheckpointError, SpecError
from penstock.orbax.item_files import bucket_url, handler_path, path_as_given, path_text, place_of, store_at
from penstock.orbax.metadata import StepMetadata, get_step_metadata
from penstock.orbax.options import AtomicityOptions, chosen_atomicity

TMP_DIR_SUFFIX: Final = file_names.TEMPORARY_SUFFIX

STEP_NAME: Final = re.compile(r"(?:.+_)?(\d+)")

_TEMPORARY_STEP: Final = re.compile(rf"(?:.*_)?(\d+){re.escape(file_names.TEMPORARY_SUFFIX)}.*")


def is_gcs_path(path: Any) -> bool:
    """Return whether a path is in a Google Cloud Storage bucket."""
    return str(path).startswith("gs://")


def is_tmp_checkpoint(path: Any) -> bool:
    """Return whether `path` is a checkpoint that is still being written, or that a crash left unfinished."""
    if bucket_url(path) is not None or _kind(path) != "directory":
        return False  # in a bucket, what is not complete is not there

    path = Path(path)
    return file_names.TEMPORARY_SUFFIX in path.name or (
        is_gcs_path(path) and not (path / file_names.COMMIT_MARK).exists()
    )


def is_checkpoint_finalized(path: Any) -> bool:
    """Return whether `path` is a complete checkpoint; what is not there is none."""
    return not is_tmp_checkpoint(path) and _kind(path) == "directory"


def tmp_checkpoints(checkpoint_dir: Any) -> list[str]:
    """Return the names of the unfinished checkpoints in a directory of steps; none if it is absent."""
    return [path.name for path in _listed(checkpoint_dir) if is_tmp_checkpoint(path)]


def step_from_checkpoint_name(name: str) -> int:
    """Return the step number in a name: `12`, `step_12`, or the temporary name of either.

    Raises:
        ValueError: If the name is not one of a step.
    """
    found = STEP_NAME.fullmatch(name) or _TEMPORARY_STEP.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is not the name of a step")

    return int(found[1])


def checkpoint_steps_paths(checkpoint_dir: Any) -> list[Path]:
    """Return the directories of all complete steps."""
    return list(_complete_steps(checkpoint_dir))


def checkpoint_steps(checkpoint_dir: Any) -> list[int]:
    """Return the numbers of all complete steps."""
    return [step_from_checkpoint_name(path.name) for path in _complete_steps(checkpoint_dir)]


def any_checkpoint_step(checkpoint_dir: Any) -> int | None:
    """Return the number of one complete step; None if there is none."""
    path = next(_complete_steps(checkpoint_dir), None)
    return None if path is None else step_from_checkpoint_name(path.name)


def _complete_steps(directory: Any) -> Iterator[Path]:
    for path in _listed(directory):
        if STEP_NAME.fullmatch(path.name) and is_checkpoint_finalized(path):
            yield path


def _listed(directory: Any) -> list[Any]:
    url = bucket_url(directory)
    store, path = store_at(directory), Path(directory) if url is None else place_of(url)
    if store.kind(path_text(path)) is None:
        return []

    return [path / name for name in store.list_directory(path_text(path))]


def _kind(path: Any) -> str | None:
    return store_at(path).kind(bucket_url(path) or str(Path(path)))


is_path_finalized = is_checkpoint_finalized

is_path_temporary = is_tmp_checkpoint

MetadataT = TypeVar("MetadataT")


def step_prefix_with_underscore(step_prefix: str | None) -> str:
    """Return the prefix of the names of steps, with its underscore; nothing for None."""
    return "" if step_prefix is None else f"{step_prefix}_"


def is_standard_name_format(name_format: Any) -> bool:
    """Return whether `standard_name_format` made it."""
    return isinstance(name_format, _Format)


def build_step_path(base_path: Any, name_format: NameFormat[Any], step: int) -> Any:
    """Return the path that a step has, or would have, in a directory of steps."""
    return path_as_given(base_path) / name_format.build_name(step)


def build_step_metadatas(
    step_paths: Iterable[Any], build_metadata: Callable[[Any], MetadataT | None]
) -> Iterator[MetadataT]:
    """Yield the results of a function of each path, without None: for custom `NameFormat`s."""
    return (found for path in step_paths if (found := build_metadata(path)) is not None)


def find_step_path(
    base_path: Any, name_format: NameFormat[Any], *, step: int, include_uncommitted: bool = False
) -> Any:
    """Return the path of a step.

    Args:
        base_path: The directory of steps.
        name_format: How they are named.
        step: The number.
        include_uncommitted: Whether a step that is still being written counts, and before a complete one.

    Raises:
        ValueError: If there is none.
    """
    if include_uncommitted:
        begin = f"{name_format.build_name(step)}{TMP_DIR_SUFFIX}"
        names = [name for name in tmp_checkpoints(base_path) if name.startswith(begin)]
        if names:
            return handler_path(base_path) / min(names)

    return name_format.find_step(base_path, step).path


def maybe_find_step_metadata(base_path: Any, name_format: NameFormat[MetadataT], *, step: int) -> Any:
    """Return the metadata of a step by a name format; None if there is none."""
    try:
        return name_format.find_step(base_path, step)
    except ValueError:
        return None


def latest_step_metadata(root_path: Any, name_format: NameFormat[MetadataT]) -> MetadataT | None:
    """Return the metadata of the last step by a name format; None if there is none."""
    found: list[Any] = sorted(name_format.find_all(root_path), key=lambda one: one.path.name, reverse=True)
    return max(found, key=lambda one: one.step, default=None)


def step_metadata_of_checkpoint_path(checkpoint_path: Any, name_format: NameFormat[MetadataT]) -> MetadataT:
    """Return the metadata of the step at a path by a name format.

    Raises:
        ValueError: If it is none of that format.
    """
    path = handler_path(checkpoint_path)
    found: list[Any] = list(name_format.find_all(path.parent))
    for one in found:
        if one.path.name == path.name:
            return one  # type: ignore[no-any-return]

    names = [one.path.name for one in found]
    raise NotACheckpointError(path_text(path), f"is no step of {name_format}; there are {names[:10]}")


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
        """The time at which its save began, in nanoseconds since the epoch."""
        return self._recorded().init_timestamp_nsecs

    @property
    def commit_timestamp_nsecs(self) -> int | None:
        """The time at which it was complete."""
        return self._recorded().commit_timestamp_nsecs

    @property
    def commit_timestamp(self) -> datetime.datetime:
        """The time at which it was complete; if that is not recorded, of the last change of its directory.

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


MetadataT_co = TypeVar("MetadataT_co", bound=Any, covariant=True)


class NameFormat(Protocol[MetadataT_co]):
    """Names steps and finds them, as a `Metadata` or an object with its attributes."""

    def build_name(self, step: int) -> str:
        """Return the name of a step."""
        ...

    def find_all(self, base_path: Any) -> Iterator[MetadataT_co]:
        """Yield every step in a directory."""
        ...

    def find_step(self, base_path: Any, step: int) -> MetadataT_co:
        """Return one step; raise a ValueError if it does not exist."""
        ...


def _as_it_is(step: Metadata) -> Metadata:
    return step


@final
@dataclass(frozen=True)
class _Format(NameFormat[Any]):
    names: own.NameFormat
    single_host_load_and_broadcast: bool = False
    describe: Callable[[Metadata], Any] = _as_it_is  #: makes of a step what the newer API says of it

    def __str__(self) -> str:
        return f'StandardNameFormat("{self.build_name(1234)}")'

    def build_name(self, step: int) -> str:
        return self.names.name(step)

    def find_all(self, base_path: Any) -> Iterator[Any]:
        """Yield every step, and every empty directory that is named like one, as in Orbax."""
        base, store = place_of(base_path), store_at(base_path)
        listed = step_directory.list_root(store, path_text(base))
        found = {
            name: step
            for step, name in step_directory.find_steps(store, path_text(base), self.names, listed).items()
        }
        for name in listed:
            step = self.names.step(name)
            if step is not None and name not in found and is_empty(store, os.path.join(base, name)):
                found[name] = step

        for name, step in sorted(found.items(), key=itemgetter(1)):
            yield self.describe(Metadata(step, base / name))

    def find_step(self, base_path: Any, step: int) -> Any:
        path, store = place_of(base_path) / self.build_name(step), store_at(base_path)
        there = step_directory.step_at(store, path_text(path)).is_published
        if not (there or is_empty(store, path_text(path))):
            raise NotACheckpointError(path_text(path), f"there is no step {step} of {self}")

        return self.describe(Metadata(step, path))


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


def is_empty(store: kernel.Store, path: str) -> bool:
    """Return whether there is a directory with nothing in it."""
    return store.kind(path) == "directory" and not store.list_directory(path)


def _once(steps: Iterable[Any]) -> Iterator[Any]:
    """Leave out a step at the path of one before it."""
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
        temporary_path_cls: Has no effect, for the same reason as the next.
        atomicity_options: Has no effect: unfinished steps are left out anyway.

    Raises:
        ValueError: If steps cannot have such names.
    """
    chosen_atomicity(temporary_path_cls, atomicity_options)
    names = own.StepNames(step_prefix, step_format_fixed_length or None)
    return _Format(names, single_host_load_and_broadcast)


def names_of(names: NameFormat[Any] | None) -> own.NameFormat | None:
    """Return the names of a format that `standard_name_format` made; None for the usual ones.

    Raises:
        ValueError: If it is another one.
    """
    if names is None or isinstance(names, _Format):
        return None if names is None else names.names

    raise SpecError(f"{names} is no format of standard_name_format, and no other can be used here")


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


def as_name_format(given: Any) -> NameFormat[Any]:
    """Return a format of Orbax's kind from one of that kind or of penstock's."""
    return _Format(given) if isinstance(given, own.NameFormat) else given
