"""Finding steps by how they are named, under the names of Orbax's module `path.step`."""

from __future__ import annotations

__all__ = (
    "build_step_metadatas",
    "build_step_path",
    "find_step_path",
    "is_standard_name_format",
    "latest_step_metadata",
    "maybe_find_step_metadata",
    "step_metadata_of_checkpoint_path",
    "step_prefix_with_underscore",
)

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from penstock.kernel.errors import NotACheckpointError
from penstock.orbax.common.handler_paths import handler_path, path_as_given, path_text
from penstock.orbax.v0.manager.step_name_formats import NameFormat, has_standard_names
from penstock.orbax.v0.manager.step_paths import TMP_DIR_SUFFIX, tmp_checkpoints

MetadataT = TypeVar("MetadataT")


def step_prefix_with_underscore(step_prefix: str | None) -> str:
    """Return the prefix of the names of steps, with its underscore; nothing for None."""
    return "" if step_prefix is None else f"{step_prefix}_"


def is_standard_name_format(name_format: Any) -> bool:
    """Whether `standard_name_format` made it."""
    return has_standard_names(name_format)


def build_step_path(base_path: Any, name_format: NameFormat[Any], step: int) -> Any:
    """Return the path that a step has, or would have, in a directory of steps."""
    return path_as_given(base_path) / name_format.build_name(step)


def build_step_metadatas(
    step_paths: Iterable[Any], build_metadata: Callable[[Any], MetadataT | None]
) -> Iterator[MetadataT]:
    """Yield what a function makes of each path, without None: for a `NameFormat` of one's own."""
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
    """Return what a format finds of a step; None if there is none."""
    try:
        return name_format.find_step(base_path, step)
    except ValueError:
        return None


def latest_step_metadata(root_path: Any, name_format: NameFormat[MetadataT]) -> MetadataT | None:
    """Return what a format finds of the last step; None if there is none."""
    found: list[Any] = sorted(name_format.find_all(root_path), key=lambda one: one.path.name, reverse=True)
    return max(found, key=lambda one: one.step, default=None)


def step_metadata_of_checkpoint_path(checkpoint_path: Any, name_format: NameFormat[MetadataT]) -> MetadataT:
    """Return what a format finds of the step at a path.

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
