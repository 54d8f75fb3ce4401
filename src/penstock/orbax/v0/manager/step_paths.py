"""Which paths are steps: complete ones, and those that are still being written."""

from __future__ import annotations

__all__ = (
    "STEP_NAME",
    "TMP_DIR_SUFFIX",
    "any_checkpoint_step",
    "checkpoint_steps",
    "checkpoint_steps_paths",
    "is_checkpoint_finalized",
    "is_gcs_path",
    "is_tmp_checkpoint",
    "step_from_checkpoint_name",
    "tmp_checkpoints",
)

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from penstock.handlers.formats.orbax.file_names import COMMIT_MARK, TEMPORARY_SUFFIX
from penstock.orbax.common.handler_paths import bucket_url, path_text, place_of, store_at

TMP_DIR_SUFFIX: Final = TEMPORARY_SUFFIX
STEP_NAME: Final = re.compile(r"(?:.+_)?(\d+)")
_TEMPORARY_STEP: Final = re.compile(rf"(?:.*_)?(\d+){re.escape(TEMPORARY_SUFFIX)}.*")


def is_gcs_path(path: Any) -> bool:
    """Whether a path is in a Google Cloud Storage bucket."""
    return str(path).startswith("gs://")


def is_tmp_checkpoint(path: Any) -> bool:
    """Whether `path` is a checkpoint that is still being written, or that a crash left unfinished."""
    if bucket_url(path) is not None or _kind(path) != "directory":
        return False  # in a bucket, what is not complete is not there

    path = Path(path)
    return TEMPORARY_SUFFIX in path.name or (is_gcs_path(path) and not (path / COMMIT_MARK).exists())


def is_checkpoint_finalized(path: Any) -> bool:
    """Whether `path` is a complete checkpoint; what is not there is none."""
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
