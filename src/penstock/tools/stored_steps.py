"""The steps in a stored directory of steps, all of them."""

from __future__ import annotations

__all__ = ("StoredSteps", "find_stored_steps")

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from penstock.handlers.formats.npz_archive import is_npz
from penstock.handlers.formats.orbax.discovery import (
    checkpoint_at,
    is_finished_step,
    may_be_finished_step,
    names_a_step,
    read_root_metadata,
)
from penstock.handlers.formats.safetensors.tensor_paths import is_safetensors
from penstock.kernel.errors import UnsupportedFormatError
from penstock.kernel.protocols.stores import Store


@final
@dataclass(frozen=True, slots=True)
class StoredSteps:
    """The content of a directory of steps."""

    names: Sequence[str]  #: of the finished steps, ascending; at least one
    root_metadata: Mapping[str, Any] | None


def find_stored_steps(store: Store, path: str) -> StoredSteps | None:
    """Find every finished step in the directory `path`; None if it is no directory of steps. Blocking.

    Raises:
        NotACheckpointError: If there is nothing.
        IncompleteCheckpointError: If a save was interrupted there, or no step is finished.
        UnsupportedFormatError: If penstock knows nothing in a step, or steps have several names.
    """
    if is_npz(store, path) or is_safetensors(store, path) or not checkpoint_at(store, path).is_step:
        return None

    names: list[str] = []
    for name in filter(names_a_step, store.list_directory(path)):
        directory = os.path.join(path, name)
        if is_finished_step(store, directory):
            names.append(name)
        elif is_finished_step(store, directory) is None and may_be_finished_step(store, directory):
            problem = "is named like a step, and nothing in it is known to penstock"
            raise UnsupportedFormatError(directory, problem)

    names.sort(key=lambda name: int(name.rpartition("_")[2]))
    return StoredSteps(names, read_root_metadata(store, path))
