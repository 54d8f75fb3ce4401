"""Finds every checkpoint at and below a path: a checkpoint, a directory of steps, a folder of runs."""

from __future__ import annotations

__all__ = ("FoundCheckpoints", "find_checkpoints")

import os
from dataclasses import dataclass, field
from typing import Final, final

from penstock.handlers.formats.inside_paths import EnteredDirectories
from penstock.handlers.formats.orbax.checkpoint_metadata import read_checkpoint_metadata
from penstock.handlers.formats.orbax.discovery import (
    ROOT_FOLDER,
    ItemKind,
    check_there,
    holds_arrays,
    is_marked,
    is_unfinished,
    kind_of_item,
    names_a_step,
)
from penstock.handlers.formats.orbax.file_names import (
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    INTEGRITY,
    MANIFEST,
    METADATA,
    PARTIAL_SUFFIX,
    ROOT_METADATA,
    TEMPORARY_SUFFIX,
    V1_MARK,
)
from penstock.handlers.formats.safetensors.tensor_paths import is_safetensors
from penstock.handlers.formats.verification import Finding, finding_of
from penstock.kernel.errors import IncompleteCheckpointError, NotACheckpointError, PenstockError
from penstock.kernel.protocols.stores import Store

_OF_A_CHECKPOINT: Final = frozenset(
    {CHECKPOINT_METADATA, COMMIT_MARK, INTEGRITY, MANIFEST, METADATA, V1_MARK}
)
_ONE_DOCUMENT: Final = frozenset({ItemKind.JSON, ItemKind.PROTO})


@final
@dataclass(slots=True)
class FoundCheckpoints:
    """The checkpoints at and below a path."""

    checkpoints: list[str] = field(default_factory=list[str])  #: finished ones, in the order of their names
    root_folders: list[str] = field(default_factory=list[str])
    """Folders of metadata that belong to a directory of steps, not to one of them."""
    leftovers: list[str] = field(default_factory=list[str])  #: of interrupted saves and deletions
    findings: list[Finding] = field(default_factory=list[Finding])


def find_checkpoints(store: Store, path: str) -> FoundCheckpoints:
    """Find every checkpoint at and below `path`. Blocking; reads names, and one document of each.

    Nothing is raised for what is found: it is among the findings. Files beside checkpoints, such as logs,
    are left out; a directory named like a step in which nothing is known is not.
    """
    found = FoundCheckpoints()
    try:
        check_there(store, path)
    except (NotACheckpointError, IncompleteCheckpointError) as error:
        if not is_safetensors(store, path):
            found.findings.append(Finding("absent", path, error.problem))
            return found
    except PenstockError as error:
        if not is_safetensors(store, path):
            found.findings.append(finding_of(error, path))
            return found

    _visit(store, path, found, (), EnteredDirectories(store))
    if not found.checkpoints and not found.findings:
        problem = "there is no finished checkpoint" if found.leftovers else "there is no checkpoint"
        found.findings.append(Finding("absent", path, problem))

    return found


def _visit(
    store: Store,
    path: str,
    found: FoundCheckpoints,
    above: tuple[object, ...],
    entered: EnteredDirectories,
) -> None:
    """Visit what lies at `path`, below directories of the identities `above`."""
    try:
        is_tensors = is_safetensors(store, path)
        if is_tensors:
            found.checkpoints.append(path)
        if store.kind(path) == "directory":
            identity = store.identity(path)
            if identity not in above:  # else it is a link to a directory around it
                entered.enter(path)
                around = (*above, identity)
                _visit_directory(store, path, found, around, entered, beside_tensors=is_tensors)
    except PenstockError as error:
        found.findings.append(finding_of(error, path))


def _visit_directory(
    store: Store,
    path: str,
    found: FoundCheckpoints,
    above: tuple[object, ...],
    entered: EnteredDirectories,
    *,
    beside_tensors: bool,
) -> None:
    names = frozenset(store.list_directory(path))
    may_be_document = not beside_tensors and (len(above) == 1 or _in_a_step(path))
    others = names - {COMMIT_MARK} if beside_tensors else names  # a bucket publishes tensors by it, too
    if _is_checkpoint(store, path, others, may_be_document=may_be_document):
        unmarked = COMMIT_MARK not in names
        unfinished = unmarked and (_says_unfinished(store, path, names) or not is_marked(store, path, names))
        (found.leftovers if unfinished else found.checkpoints).append(path)
        return

    for name in sorted(names):
        inner = os.path.join(path, name)
        if TEMPORARY_SUFFIX in name or PARTIAL_SUFFIX in name:
            found.leftovers.append(inner)
            continue
        if name == ROOT_FOLDER and (not _in_a_step(inner) or _holds_root_metadata(store, inner)):
            found.root_folders += [inner] if store.kind(inner) == "directory" else []
            continue
        if beside_tensors and store.kind(inner) == "file":
            continue  # tensors of the one checkpoint, and its index

        before = _count(found)
        _visit(store, inner, found, above, entered)
        if _count(found) == before and names_a_step(name) and store.kind(inner) == "directory":
            problem = "is named like a step, and nothing in it is known to penstock"
            found.findings.append(Finding("unchecked", inner, problem))


def _is_checkpoint(store: Store, path: str, names: frozenset[str], *, may_be_document: bool) -> bool:
    if names & _OF_A_CHECKPOINT:
        return True

    kind = kind_of_item(store, path, names)
    if kind in _ONE_DOCUMENT:
        return may_be_document  # elsewhere it is any folder with a file of JSON in it

    return kind is not None or holds_arrays(store, path, names)


def _holds_root_metadata(store: Store, path: str) -> bool:
    """True if it is the folder of a directory of steps, even one that is named like a step, as `run_3`."""
    return store.kind(os.path.join(path, ROOT_METADATA)) == "file"


def _in_a_step(path: str) -> bool:
    return names_a_step(os.path.basename(os.path.dirname(path)))


def _says_unfinished(store: Store, path: str, names: frozenset[str]) -> bool:
    try:
        return is_unfinished(names, read_checkpoint_metadata(store, path, names))
    except PenstockError:
        return False  # a damaged document is found when the checkpoint is surveyed


def _count(found: FoundCheckpoints) -> int:
    return len(found.checkpoints) + len(found.findings) + len(found.leftovers)
