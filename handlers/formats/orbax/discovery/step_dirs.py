"""Directories of steps: which entries are steps, and which is the latest finished one.

Source:
    ORBAX_FORMAT.md §3.1 to §3.4.
"""

from __future__ import annotations

__all__ = (
    "is_checkpoint",
    "is_finished_step",
    "is_marked",
    "is_unfinished",
    "latest_step",
    "may_be_finished_step",
    "names_a_step",
    "read_root_metadata",
)

import errno
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from penstock.handlers.formats.common.checked_json import as_object, parse_object
from penstock.handlers.formats.common.temporary_names import TEMPORARY_SUFFIX
from penstock.handlers.formats.orbax.discovery.item_kinds import (
    ROOT_FOLDER,
    USUAL_ITEMS,
    ItemKind,
    holds_arrays,
    is_array,
    items_of,
    kind_of_item,
    kind_of_item_at,
)
from penstock.handlers.formats.orbax.documents import checkpoint_metadata
from penstock.handlers.formats.orbax.documents.checkpoint_metadata import CheckpointMetadata
from penstock.handlers.formats.orbax.documents.file_names import (
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    METADATA,
    OF_A_PROCESS,
    ROOT_METADATA,
    V1_MARK,
)
from penstock.handlers.formats.orbax.documents.sealed_documents import SealedDocuments
from penstock.kernel.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
    UnsupportedFormatError,
)
from penstock.kernel.protocols.store_capabilities import MarkedCheckpoints, OverNetwork, UntrustedFiles
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.paths import is_whole_bucket

_STEP: Final = re.compile(r"(?:(?P<prefix>.*)_)?(?P<number>[0-9]{1,18})", re.DOTALL)
_MARKS: Final = frozenset({METADATA, CHECKPOINT_METADATA, V1_MARK})
_ROOT_FILES: Final = (ROOT_METADATA, "metadata")  # the second one up to Orbax 0.8
_OWN_KEYS: Final = frozenset({"internal_metadata", "custom_metadata", "custom"})


@final
@dataclass(frozen=True, slots=True, order=True)
class _Step:
    """A name such as a checkpoint manager gives to a step: `7`, `0007`, `step_7`."""

    number: int
    name: str
    prefix: str = ""


def is_checkpoint(store: Store, path: str) -> bool:
    """Whether the directory at `path` is itself a checkpoint, and so no directory of steps."""
    if not isinstance(store, OverNetwork):  # a list of many steps takes longer
        has_documents = any(store.kind(os.path.join(path, mark)) is not None for mark in _MARKS)
        return has_documents and is_marked(store, path)

    try:
        names = store.list_directory(path)
    except StorageError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR}:
            return False

        raise

    return _is_marked(names) and is_marked(store, path, names)


def is_marked(store: Store, path: str, names: Collection[str] | None = None) -> bool:
    """Whether `path`, or what it is an item of, was published, in a store where a mark says so.

    In a bucket nothing is renamed. A save that was killed, or a copy that was interrupted, lies there under
    its final name, and only its mark tells that it is whole. Orbax looks for the same one on `gs://`.

    Args:
        store: Where it lies. In one that renames, what has its final name is whole.
        path: A directory.
        names: Of what is in it, if that is known.
    """
    if not isinstance(store, MarkedCheckpoints):
        return True
    above = os.path.dirname(path)
    if names is not None and COMMIT_MARK in names:
        # Each item of a step has a mark, too, which is put before that of the step.
        is_item = CHECKPOINT_METADATA not in names and names_a_step(os.path.basename(above))
        return not is_item or is_marked(store, above)

    at = path if names is None else above
    while (above := os.path.dirname(at)) not in ("", at) and not above.endswith(":"):
        if store.marked_folders(above, [os.path.basename(at)]):
            return True

        at = above

    return names is None and is_whole_bucket(path) and store.kind(os.path.join(path, COMMIT_MARK)) is not None


def latest_step(store: Store, path: str, names: frozenset[str]) -> str | None:
    """Name the latest finished step in `path`; None if it is no directory of steps.

    Raises:
        IncompleteCheckpointError: If there are steps, none of which is finished.
        UnsupportedFormatError: If there are steps of several names, as in `a_1` and `b_2`, or the latest is
            one that penstock does not know.
    """
    steps = _steps_in(names)
    if not steps or _is_marked(names):
        return None
    # The folder of metadata beside the steps looks like JSON if it is damaged.
    if kind_of_item(store, path, names) not in (None, ItemKind.JSON):
        return None
    if any(name in names and kind_of_item_at(store, os.path.join(path, name)) for name in USUAL_ITEMS):
        return None  # a step of early Orbax, which has items and no document

    latest: dict[str, str] = {}
    unfinished: list[str] = []
    unknown: list[str] = []
    for step in steps:
        if step.prefix in latest:
            continue
        match is_finished_step(store, os.path.join(path, step.name)):
            case True:
                latest[step.prefix] = step.name
            case False:
                unfinished.append(step.name)
            case None if not step.prefix and _is_step_of_others(store, path, step.name):
                unknown.append(step.name)
            case None:
                pass  # something else with such a name

    if len(latest) > 1:
        found = ", ".join(sorted(latest.values()))
        raise UnsupportedFormatError(path, f"holds steps of several names; open one of them: {found}")
    if unknown and "" in latest:
        problem = f"holds a later step, {unknown[0]!r}, in which there is nothing that penstock knows"
        raise UnsupportedFormatError(path, f"{problem}; open a step by its own path")
    if unfinished and not latest:
        raise IncompleteCheckpointError(path, f"no step is finished; there is {unfinished[0]!r}")

    return next(iter(latest.values()), None)


def names_a_step(name: str) -> bool:
    """Whether a manager could have given this name to a step: `7`, `0007`, `step_7`."""
    return TEMPORARY_SUFFIX not in name and _STEP.fullmatch(name) is not None


def is_unfinished(names: Collection[str], found: CheckpointMetadata) -> bool:
    """Whether a directory under its final name is still being written, or its writer died.

    Orbax writes this way on request, for example on object stores: the document then has the start of the
    save but not its end, and there is no commit mark. Finished checkpoints before 0.12.3 have no mark
    either.
    """
    return COMMIT_MARK not in names and found.started_at_ns is not None and found.committed_at_ns is None


def read_root_metadata(store: Store, root: str) -> Mapping[str, Any] | None:
    """Read the caller's own metadata of a directory of steps; None if there is none.

    Raises:
        CorruptCheckpointError: If it is not a JSON object, or not as it was written, or a link leads out of
            `root`.
        MissingFileError: If it was written and is not there.
    """
    folder = os.path.join(root, ROOT_FOLDER)
    kind = store.kind(folder)
    if kind == "file":
        raise CorruptCheckpointError(folder, "is a file, not the directory of the metadata of all steps")
    if kind is None:
        return None
    if isinstance(store, UntrustedFiles):
        store.check_links(root, folder)

    names = store.list_directory(folder)
    sealed = SealedDocuments.open(store, folder, names)
    for name in _ROOT_FILES:
        path = os.path.join(folder, name)
        if name not in names:
            sealed.check_absent(name)
            continue

        document = parse_object(path, sealed.read(name))
        if name != _ROOT_FILES[0] or not _OWN_KEYS.issuperset(document):
            return document

        custom = document.get("custom_metadata", document.get("custom"))
        return None if custom is None else as_object(path, "custom_metadata", custom)

    return None


def is_finished_step(store: Store, directory: str) -> bool | None:
    """Whether the step at `directory` is finished; None if nothing that penstock knows lies there."""
    if store.kind(directory) != "directory":
        return None

    names = frozenset(store.list_directory(directory))
    if isinstance(store, MarkedCheckpoints) and COMMIT_MARK not in names:
        return False
    if names & {CHECKPOINT_METADATA, V1_MARK}:
        return not is_unfinished(names, checkpoint_metadata.read(store, directory, names))
    if kind_of_item(store, directory, names) or items_of(store, directory, names):
        return True
    if not names or any(TEMPORARY_SUFFIX in name for name in names):
        return False

    return True if not is_array(store, directory) and holds_arrays(store, directory, names) else None


def may_be_finished_step(store: Store, directory: str) -> bool:
    """Whether `directory`, which is named like a step, is one that is not known to be unfinished.

    Only a step's own handler may know what lies in it, and Orbax counts every directory of the right name.
    """
    finished = is_finished_step(store, directory)
    if finished is not None:
        return finished
    if store.kind(directory) != "directory":
        return False

    folders = [os.path.join(directory, name) for name in store.list_directory(directory)]
    return not any(store.kind(folder) == "directory" and _is_built_in(store, folder) for folder in folders)


def _is_step_of_others(store: Store, path: str, name: str) -> bool:
    """Whether the directory `name`, in which nothing is known, is likely a step all the same."""
    return not is_array(store, path, name) and may_be_finished_step(store, os.path.join(path, name))


def _is_built_in(store: Store, folder: str) -> bool:
    """Whether somebody still writes an item in `folder`, under its final name, as Orbax can."""
    names = store.list_directory(folder)
    return any(TEMPORARY_SUFFIX in name or name.startswith(OF_A_PROCESS) for name in names)


def _is_marked(names: Collection[str]) -> bool:
    return not _MARKS.isdisjoint(names)


def _steps_in(names: Iterable[str]) -> list[_Step]:
    """Return the entries named like steps, latest first, without looking at their content."""
    steps: list[_Step] = []
    for name in names:
        found = None if TEMPORARY_SUFFIX in name else _STEP.fullmatch(name)
        if found:
            steps.append(_Step(int(found["number"]), name, found["prefix"] or ""))

    return sorted(steps, reverse=True)
