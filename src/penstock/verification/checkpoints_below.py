"""Finds every checkpoint at and below a path: a checkpoint, a directory of steps, a folder of runs."""

from __future__ import annotations

__all__ = ("FoundCheckpoints", "find_checkpoints")

import os
from dataclasses import dataclass, field, replace
from typing import final

from penstock.handlers.formats.inside_paths import EnteredDirectories
from penstock.handlers.formats.orbax.discovery import ROOT_FOLDER, names_a_step
from penstock.handlers.formats.orbax.file_names import (
    OF_A_PROCESS,
    PARTIAL_SUFFIX,
    ROOT_METADATA,
    TEMPORARY_SUFFIX,
)
from penstock.handlers.formats.safetensors.tensor_paths import is_safetensors
from penstock.handlers.formats.verification import Finding, finding_of
from penstock.handlers.layouts.discovery import Place, find_place, look_inside
from penstock.kernel.errors import IncompleteCheckpointError, NotACheckpointError, PenstockError
from penstock.kernel.protocols.stores import Store


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
    walk = _Walk(store, FoundCheckpoints(), EnteredDirectories(store))
    found = walk.found
    try:
        walk.visit(find_place(store, path), ())
    except (NotACheckpointError, IncompleteCheckpointError) as error:
        found.findings.append(Finding("absent", path, error.problem))
    except PenstockError as error:
        found.findings.append(finding_of(error, path))
    if not found.checkpoints and not found.findings:
        problem = "there is no finished checkpoint" if found.leftovers else "there is no checkpoint"
        found.findings.append(Finding("absent", path, problem))

    return found


@final
@dataclass(frozen=True, slots=True)
class _Walk:
    """A walk through directories, from a path down."""

    store: Store
    found: FoundCheckpoints
    entered: EnteredDirectories

    def visit(self, place: Place, above: tuple[object, ...]) -> None:
        """Note what is at a place, and visit what is in it, below directories of the identities `above`."""
        if place.kind == "checkpoint":
            (self.found.checkpoints if place.is_finished else self.found.leftovers).append(place.path)
            return
        if place.kind == "tensors":
            self.found.checkpoints.append(place.path)
        if self.store.kind(place.path) != "directory":
            return

        identity = self.store.identity(place.path)
        if identity not in above:  # else it is a link to a directory around it
            self.entered.enter(place.path)
            for name in sorted(self.store.list_directory(place.path)):
                self._enter(place, name, (*above, identity))

    def _enter(self, outer: Place, name: str, above: tuple[object, ...]) -> None:
        path = os.path.join(outer.path, name)
        if TEMPORARY_SUFFIX in name or PARTIAL_SUFFIX in name or name.startswith(OF_A_PROCESS):
            self.found.leftovers.append(path)
            return

        kind = self.store.kind(path)
        in_step = names_a_step(os.path.basename(outer.path))
        if name == ROOT_FOLDER and (not in_step or _holds_root_metadata(self.store, path)):
            self.found.root_folders += [path] if kind == "directory" else []
            return
        if kind != "directory":
            # Beside tensors it is one of them, or their index.
            is_tensors = outer.kind != "tensors" and kind == "file" and is_safetensors(self.store, path)
            self.found.checkpoints += [path] if is_tensors else []
            return

        before = _count(self.found)
        try:
            inner = look_inside(self.store, path, frozenset(self.store.list_directory(path)))
            # Except in a step, any folder with a file of JSON in it looks like an item.
            is_folder = inner.is_document and not in_step
            self.visit(replace(inner, kind="folder") if is_folder else inner, above)
        except PenstockError as error:
            self.found.findings.append(finding_of(error, path))

        if _count(self.found) == before and names_a_step(name):
            problem = "is named like a step, and nothing in it is known to penstock"
            self.found.findings.append(Finding("unchecked", path, problem))


def _holds_root_metadata(store: Store, path: str) -> bool:
    """True if it is the folder of a directory of steps, even one that is named like a step, as `run_3`."""
    return store.kind(os.path.join(path, ROOT_METADATA)) == "file"


def _count(found: FoundCheckpoints) -> int:
    return len(found.checkpoints) + len(found.findings) + len(found.leftovers)
