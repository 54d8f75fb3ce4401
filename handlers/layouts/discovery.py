"""Finds out what is at a path, of any format: steps, a checkpoint, safetensors, or a folder of these.

`look_at` says what it is. Nothing at all, a damaged checkpoint and what an interrupted save left are answers,
too: the place then has the error that opening it raises, and `find_place` raises it. The managers, the
tools, `verify`, the command line and the Orbax face ask here, so that they agree. `checkpoint_path` says
which checkpoint is meant. What is not safetensors is in Orbax's layout:
`penstock.handlers.formats.orbax.discovery` goes on inside it. All of it blocks, and reads names and few
documents.
"""

from __future__ import annotations

__all__ = (
    "FoundCheckpoints",
    "Place",
    "PlaceKind",
    "check_deletable",
    "checkpoint_path",
    "find_checkpoints",
    "find_place",
    "finished_steps",
    "look_at",
    "look_inside",
)

import os
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias, final

from penstock.handlers.formats.orbax.checkpoint_documents import read_checkpoint_metadata
from penstock.handlers.formats.orbax.discovery import (
    ROOT_FOLDER,
    USUAL_ITEMS,
    ItemKind,
    check_there,
    contents_of,
    is_checkpoint,
    is_marked,
    is_unfinished,
    latest_step,
    names_a_step,
    nothing_at,
    step_at,
)
from penstock.handlers.formats.orbax.file_names import (
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    INTEGRITY,
    OF_A_PROCESS,
    PARTIAL_SUFFIX,
    ROOT_METADATA,
    TEMPORARY_SUFFIX,
    V1_MARK,
)
from penstock.handlers.formats.safetensors.tensor_paths import (
    SUFFIX,
    are_tensors,
    holds_only_tensors,
    is_safetensors,
)
from penstock.handlers.formats.untrusted import EnteredDirectories
from penstock.handlers.formats.verification import Finding, finding_of
from penstock.kernel.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    PenstockError,
    UnsupportedFormatError,
)
from penstock.kernel.protocols.stores import Store
from penstock.kernel.words import near_steps

PlaceKind: TypeAlias = Literal["root", "checkpoint", "tensors", "folder", "unfinished", "file", "nothing"]
"""`"root"`: a directory of steps. `"checkpoint"`: one of Orbax's layout, or an item of one. `"tensors"`:
safetensors, one file or a folder. `"folder"`: a directory that is none of these, such as one of several runs.
`"unfinished"`: what a save left that was interrupted, or builds now; its name says so. `"file"`: one that is
no checkpoint. `"nothing"`: neither, or an item that is being deleted."""


_RECORDS: Final = frozenset({CHECKPOINT_METADATA, COMMIT_MARK, INTEGRITY, V1_MARK})
"""Any of these in a directory that is no root says that a checkpoint is, or was, in it."""


@final
@dataclass(frozen=True, slots=True)
class Place:
    """The kind of thing that is at a path, and what is wrong with it."""

    path: str  #: absolute, or a URL
    kind: PlaceKind
    steps: tuple[str, ...] = ()  #: of a root: names of its steps, ascending, finished or not
    is_finished: bool = True
    """Of a checkpoint: False if it is being written under its final name, or its writer died. In a bucket,
    one without a mark is such a one."""
    is_document: bool = False  #: of a checkpoint: True if only one document of JSON or text makes it one
    problem: PenstockError | None = None  #: why there is nothing to open at this path


def look_at(store: Store, path: str) -> Place:
    """Find out what is at `path`, by names and few documents. Problems are returned, not raised."""
    kind = store.kind(path)
    names = frozenset(store.list_directory(path)) if kind == "directory" else frozenset[str]()
    is_built = TEMPORARY_SUFFIX in os.path.basename(path)
    if not is_built and (path.endswith(SUFFIX) if kind == "file" else are_tensors(names)):
        return Place(path, "tensors")

    try:
        check_there(store, path)
        return look_inside(store, path, names)
    except NotACheckpointError as error:
        return Place(path, "file" if kind == "file" else "nothing", problem=error)
    except UnsupportedFormatError as error:
        return Place(path, "file", problem=error)
    except IncompleteCheckpointError as error:
        return Place(path, "unfinished", problem=error)
    except CorruptCheckpointError as error:
        return Place(path, "checkpoint", problem=error)


def look_inside(store: Store, path: str, names: frozenset[str]) -> Place:
    """Find out what the directory at `path` is, which has these `names` and is no remains of a save.

    Raises:
        CorruptCheckpointError: If the mark of a deletion does not say of which item.
    """
    if are_tensors(names):
        return Place(path, "tensors")

    steps = tuple(sorted(filter(names_a_step, names), key=_order))
    if steps and _is_root(store, path, names):
        return Place(path, "root", steps)
    if is_checkpoint(store, path):
        return Place(path, "checkpoint", is_finished=_is_finished(store, path, names))

    contents = contents_of(store, path, names)
    if contents.items and _are_checkpoints(store, path, contents.items.keys()):
        return Place(path, "folder")
    if contents.items or contents.whole is not None or not _RECORDS.isdisjoint(names):
        is_document = contents.whole in {ItemKind.JSON, ItemKind.PROTO}
        is_finished = _is_finished(store, path, names)
        return Place(path, "checkpoint", is_finished=is_finished, is_document=is_document)

    # No step is finished yet, if a save of one is being built or was interrupted.
    built = [name.partition(TEMPORARY_SUFFIX)[0] for name in names if TEMPORARY_SUFFIX in name]
    return Place(path, "root" if any(map(names_a_step, built)) else "folder")


def _is_root(store: Store, path: str, names: frozenset[str]) -> bool:
    try:
        return latest_step(store, path, names) is not None
    except (IncompleteCheckpointError, UnsupportedFormatError, CorruptCheckpointError):
        return not is_checkpoint(store, path)  # there are steps, and something is wrong with them


def _is_finished(store: Store, path: str, names: frozenset[str]) -> bool:
    if not is_marked(store, path, names):
        return False
    try:
        return COMMIT_MARK in names or not is_unfinished(names, read_checkpoint_metadata(store, path, names))
    except CorruptCheckpointError:
        return True  # it is damaged, as those say who read it


def _are_checkpoints(store: Store, path: str, items: AbstractSet[str]) -> bool:
    """Return whether what look like items of a checkpoint are checkpoints in one folder.

    Items of a step have documents of their own where an early Orbax wrote them. A tree with the name that
    Orbax gives that of a step is one.
    """
    if names_a_step(os.path.basename(path)):
        return False

    inside = [os.path.join(path, name) for name in items]
    if any(store.kind(os.path.join(item, CHECKPOINT_METADATA)) is not None for item in inside):
        return True

    return items.isdisjoint(USUAL_ITEMS) and all(is_checkpoint(store, item) for item in inside)


def _order(name: str) -> tuple[int, str]:
    return int(name.rpartition("_")[2]), name


def find_place(store: Store, path: str) -> Place:
    """Return what is at `path`: a root, a checkpoint, safetensors or a folder.

    Raises:
        NotACheckpointError: If there is nothing, or a file of another kind.
        UnsupportedFormatError: If it is a file of a kind that is read by another way.
        IncompleteCheckpointError: If it is itself what an interrupted save left.
        CorruptCheckpointError: If it is an item of a checkpoint whose mark of a deletion is damaged.
    """
    place = look_at(store, path)
    if place.problem is not None:
        raise place.problem

    return place


def finished_steps(store: Store, path: str) -> list[str] | None:
    """Name all finished steps in the directory of steps at `path`, ascending; None if it is none.

    Raises:
        IncompleteCheckpointError: If no step is finished.
        UnsupportedFormatError: If steps have several names, or nothing in one is known to penstock.
        CorruptCheckpointError: If a document of a step is damaged.
        PenstockError: What `find_place` raises.
    """
    place = find_place(store, path)
    if place.kind != "root":
        return None
    if latest_step(store, path, frozenset(store.list_directory(path))) is None:
        raise IncompleteCheckpointError(path, "no step is finished")

    finished: list[str] = []
    for name in place.steps:
        directory = os.path.join(path, name)
        step = step_at(store, directory)
        if step.problem is not None:
            raise step.problem
        if step.state == "unknown":
            problem = "is named like a step, and nothing in it is known to penstock"
            raise UnsupportedFormatError(directory, problem)
        if step.state == "finished":
            finished.append(name)

    return finished


def check_deletable(store: Store, path: str) -> Literal["file", "directory"]:
    """Return what the checkpoint at `path` is: only a whole one may be deleted, and nothing that is none.

    A folder that only looks like a checkpoint, such as one with a file of JSON in it, is none here.

    Raises:
        NotACheckpointError: If there is nothing, no finished checkpoint, or an item of one.
    """
    kind = store.kind(path)
    if kind is None:
        raise nothing_at(store, path)

    place = look_at(store, path)
    if place.kind == "tensors" and holds_only_tensors(store, path):
        return kind
    if place.kind != "checkpoint" or not place.is_finished or not is_checkpoint(store, path):
        raise NotACheckpointError(path, f"is a {kind} but not a checkpoint; only checkpoints are deleted")

    places = (path, os.path.dirname(path))
    own, outer = [store.kind(os.path.join(place, CHECKPOINT_METADATA)) for place in places]
    if own is None and outer is not None:
        raise NotACheckpointError(path, "is an item of a checkpoint; only whole checkpoints are deleted")

    return kind


def checkpoint_path(store: Store, path: str, step: int | None = None) -> str:
    """Return the path of the checkpoint that is meant: of a root the step asked for, or the latest one.

    Raises:
        NotACheckpointError: If there is no such step, or `path` is no root and a step was asked for.
        PenstockError: What `find_place` raises.
    """
    place = find_place(store, path)
    if step is not None:
        found = [name for name in place.steps if _order(name)[0] == step]
        if not found:
            if not place.steps:
                raise NotACheckpointError(path, f"has no step {step} (it is no directory of steps)")

            near = near_steps(step, [_order(name)[0] for name in place.steps])
            raise NotACheckpointError(path, f"has no step {step} ({near})")

        return os.path.join(path, found[0])
    if place.kind != "root":
        return path

    latest = latest_step(store, path, frozenset(store.list_directory(path)))
    if latest is None:
        raise NotACheckpointError(path, "no step is finished")

    return os.path.join(path, latest)


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

    Nothing is raised for what is found: it is among the findings. Files next to checkpoints, such as logs,
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
        """Note a place and visit its entries, below directories with the identities `above`."""
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
