"""Directories of steps: which of their children are steps, which is the latest finished one.

Source:
    ORBAX_FORMAT.md §3.1 to §3.4.
"""

from __future__ import annotations

__all__ = ("ROOT_FOLDER", "Step", "find_steps", "is_unfinished", "read_root_metadata")

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from penstock.handlers.json_values import as_object, parse_object
from penstock.handlers.layout.checkpoint_metadata import CheckpointMetadata
from penstock.handlers.layout.names import COMMIT_MARK, TEMPORARY_SUFFIX
from penstock.kernel.protocols import Store

_STEP: Final = re.compile(r"(?:(?P<prefix>.*)_)?(?P<number>[0-9]{1,18})", re.DOTALL)
ROOT_FOLDER: Final = "metadata"
_ROOT_FILES: Final = ("_ROOT_METADATA", "metadata")  # the second one up to Orbax 0.8
_OWN_KEYS: Final = frozenset({"internal_metadata", "custom_metadata", "custom"})


@final
@dataclass(frozen=True, slots=True, order=True)
class Step:
    """A name that a manager would give to a step: `7`, `0007`, `step_7`."""

    number: int
    name: str
    prefix: str = ""


def find_steps(names: Iterable[str]) -> list[Step]:
    """Pick the names of steps, latest first. What lies there is not looked at."""
    steps: list[Step] = []
    for name in names:
        found = None if TEMPORARY_SUFFIX in name else _STEP.fullmatch(name)
        if found:
            steps.append(Step(int(found["number"]), name, found["prefix"] or ""))

    return sorted(steps, reverse=True)


def is_unfinished(names: Collection[str], found: CheckpointMetadata) -> bool:
    """Whether a directory under its final name is still being written, or was when its writer died.

    Orbax does so if told to, as on object stores: its document says when the save began and not when
    it ended, and there is no commit mark. Finished checkpoints before 0.12.3 have no mark either.
    """
    return COMMIT_MARK not in names and found.started_at_ns is not None and found.committed_at_ns is None


def read_root_metadata(store: Store, root: str) -> Mapping[str, Any] | None:
    """Read the caller's own metadata of a directory of steps; None if there is none.

    Raises:
        CorruptCheckpointError: If it is no JSON object.
    """
    for name in _ROOT_FILES:
        path = os.path.join(root, ROOT_FOLDER, name)
        if store.kind(path) is None:
            continue

        document = parse_object(path, store.read_file(path))
        if name != _ROOT_FILES[0] or not _OWN_KEYS.issuperset(document):
            return document

        custom = document.get("custom_metadata", document.get("custom"))
        return None if custom is None else as_object(path, "custom_metadata", custom)

    return None
