"""Discovery: the layout of a checkpoint, the item that holds its tree, and what it records. Blocking."""

from __future__ import annotations

__all__ = (
    "CheckpointMetadata",
    "Kind",
    "PyTreeMetadata",
    "Survey",
    "find",
    "is_orbax_checkpoint",
    "item_names",
    "tree_name",
)

import datetime
import enum
import os
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar, final

from penstock.embedding import (
    checkpoint_metadata,
    document_files,
    file_names,
    find_place,
    kernel,
    paths,
    snapshot_of,
)
from penstock.errors import ChecksumError, MissingFileError
from penstock.orbax.item_files import store_at
from penstock.orbax.v1.errors import InvalidLayoutError
from penstock.orbax.v1.handler_registration import AUTO, RESERVED, STATE
from penstock.orbax.v1.options import CheckpointLayout
from penstock.orbax.v1.path_types import Path, PathLike

_SAFETENSORS: Final = ".safetensors"


class Kind(enum.Enum):
    """The kind of a checkpoint."""

    V1 = 1  #: named items, written by the newer API
    V0 = 0  #: named items, or one tree, written by the established one
    SAFETENSORS = 2


@final
@dataclass(frozen=True, slots=True)
class Survey:
    """A checkpoint, and what it records of itself."""

    path: str
    kind: Kind
    names: frozenset[str]  #: of what is in its directory
    about: checkpoint_metadata.CheckpointMetadata
    store: kernel.Store

    def is_tree(self, name: str | None) -> bool:
        """Return whether an item is a tree; with None, whether the checkpoint itself is."""
        if name is None:
            return file_names.METADATA in self.names

        return self.store.kind(os.path.join(self.path, name, file_names.METADATA)) == "file"

    def recorded(self, name: str | None) -> str | None:
        """Return the recorded handler of an item; None if none is recorded."""
        handlers = self.about.item_handlers
        if isinstance(handlers, str):
            return handlers if name is None else None

        return None if handlers is None or name is None else handlers.get(name)


def is_orbax_checkpoint(path: PathLike) -> bool:
    """Return whether a finished checkpoint of Orbax's layout is at `path`; a damaged one is one, too."""
    try:
        find(path, CheckpointLayout.ORBAX)
    except (ChecksumError, MissingFileError):
        return True
    except InvalidLayoutError:
        return False

    return True


def find(path: PathLike, layout: CheckpointLayout, *, marked: bool = False) -> Survey:
    """Look at the checkpoint at a path.

    Args:
        path: Of the checkpoint.
        layout: What it is to be.
        marked: Whether it is only finished with its commit mark; safetensors have none.

    Raises:
        InvalidLayoutError: If it is not a finished checkpoint of the layout.
        ChecksumError: If what it records of itself is not as it was written.
        MissingFileError: If that was written and is lost.
    """
    place = paths.path_or_url(path)
    try:
        found = _find(place, layout)
    except (ChecksumError, MissingFileError):
        raise  # it is of this layout, and damaged
    except (OSError, ValueError) as error:
        raise InvalidLayoutError(
            f"Could not recognize the checkpoint at {place} as a valid {layout.value.capitalize()} "
            "checkpoint. If it is of another layout, say so with `ctx.checkpoint_layout = ...`."
        ) from error

    if marked and found.kind is not Kind.SAFETENSORS and file_names.COMMIT_MARK not in found.names:
        raise InvalidLayoutError(
            f"Found incomplete checkpoint at {place}: it has no {file_names.COMMIT_MARK}."
        )

    return found


def tree_name(found: Survey, name: str | None) -> str | None:
    """Return the name of the item that holds the tree; None if the checkpoint itself is it.

    Args:
        found: The checkpoint.
        name: The name of the item; `AUTO` for `state`, or else the first tree in alphabetical order.

    Raises:
        InvalidLayoutError: If there is no such tree.
    """
    if name == AUTO:
        for candidate in item_names(found):
            if found.is_tree(candidate):
                return candidate
        if found.kind is Kind.V0 and found.is_tree(None):
            return None

        raise InvalidLayoutError(f"path={found.path!r} has no PyTree checkpointable that could be loaded")

    if name is None and found.kind is Kind.V1:
        raise InvalidLayoutError(
            f"{found.path} has named items, as checkpoints of the newer API have: "
            "`checkpointable_name=None` is only for a V0 checkpoint that is itself a tree."
        )
    if not found.is_tree(name):
        trees = [item for item in item_names(found) if found.is_tree(item)]
        here = " It is itself a tree: load it with checkpointable_name=None." if found.is_tree(None) else ""
        raise InvalidLayoutError(f"{found.path} has no PyTree {name!r}; there are {trees}.{here}")

    return name


def item_names(found: Survey) -> list[str]:
    """Return the names of all items: `state` first, the others in alphabetical order."""
    names = [
        name
        for name in found.names
        if name not in RESERVED
        and file_names.TEMPORARY_SUFFIX not in name  # what a deletion left that was interrupted
        and found.store.kind(os.path.join(found.path, name)) == "directory"
    ]
    return sorted(names, key=lambda name: (name != STATE, name))


def _find(path: str, layout: CheckpointLayout) -> Survey:
    store = snapshot_of(store_at(path), path)
    kind = store.kind(path)
    if kind is None:
        raise FileNotFoundError(f"Checkpoint path {path} does not exist.")

    names = frozenset(store.list_directory(path)) if kind == "directory" else frozenset[str]()
    if layout is not CheckpointLayout.ORBAX:
        marks = {file_names.V1_MARK, file_names.CHECKPOINT_METADATA, file_names.METADATA} & names
        if not (marks and layout is CheckpointLayout.AUTO):
            return _safetensors(store, path, kind, names)

    if kind != "directory":
        raise NotADirectoryError(f"Checkpoint path {path} is not a directory.")
    if file_names.TEMPORARY_SUFFIX in os.path.basename(path):
        raise ValueError(f"Found incomplete checkpoint at {path}.")
    if file_names.V1_MARK in names and file_names.CHECKPOINT_METADATA not in names:
        raise FileNotFoundError(
            f"Checkpoint path {path} is missing the file {file_names.CHECKPOINT_METADATA!r}."
        )
    if file_names.V1_MARK not in names:
        _check_v0(store, path, names)

    about = document_files.sealed_documents(store, path).about(names)
    return Survey(path, Kind.V1 if file_names.V1_MARK in names else Kind.V0, names, about, store)


def _check_v0(store: kernel.Store, path: str, names: frozenset[str]) -> None:
    """Refuse an item of a checkpoint, a directory of checkpoints, and any other directory."""
    parent = os.path.dirname(path)
    if store.kind(os.path.join(parent, file_names.CHECKPOINT_METADATA)) is not None:
        raise ValueError(f"{path} is an item of a checkpoint: load it from {parent}, by its name.")
    if {file_names.CHECKPOINT_METADATA, file_names.METADATA} & names:
        return

    place = find_place(store, path)
    if place.kind == "checkpoint":
        return
    if place.steps:
        raise ValueError(f"{path} is a directory of checkpoints, one of which can be loaded: {place.steps}")

    raise ValueError(f"{path} is a folder, and not itself a checkpoint: load one that is in it, if any is.")


def _safetensors(store: kernel.Store, path: str, kind: str, names: frozenset[str]) -> Survey:
    if not (path.endswith(_SAFETENSORS) if kind == "file" else any(n.endswith(_SAFETENSORS) for n in names)):
        raise ValueError(f"{path} is neither a safetensors file nor a directory with one")

    return Survey(path, Kind.SAFETENSORS, names, checkpoint_metadata.CheckpointMetadata(), store)


MetadataT = TypeVar("MetadataT")

PyTreeMetadata: TypeAlias = Any
"""A tree of dicts and lists that holds the metadata of each leaf."""


class CheckpointMetadata(Generic[MetadataT]):
    """The description of a checkpoint. Passed to `load`, it asks for everything as it was saved.

    Args:
        path: The path of the checkpoint.
        metadata: That of the tree, or of each item by name.
        init_timestamp_nsecs: When the save began: nanoseconds since the epoch.
        commit_timestamp_nsecs: When it was done.
        custom_metadata: The caller's own.
    """

    def __init__(
        self,
        path: Path,
        *,
        metadata: MetadataT,
        init_timestamp_nsecs: int | None = None,
        commit_timestamp_nsecs: int | None = None,
        custom_metadata: Any = None,
    ) -> None:
        self._path = path
        self._metadata = metadata
        self._init_timestamp_nsecs = init_timestamp_nsecs
        self._commit_timestamp_nsecs = commit_timestamp_nsecs
        self._custom_metadata = custom_metadata

    @property
    def path(self) -> Path:
        """The path of the checkpoint."""
        return self._path

    @property
    def metadata(self) -> MetadataT:
        """The metadata of the tree, or of each item by name."""
        return self._metadata

    @property
    def init_timestamp_nsecs(self) -> int | None:
        """The time at which the save began, in nanoseconds since the epoch."""
        return self._init_timestamp_nsecs

    @property
    def commit_timestamp_nsecs(self) -> int | None:
        """The time at which it was done, in nanoseconds since the epoch."""
        return self._commit_timestamp_nsecs

    @property
    def init_timestamp(self) -> datetime.datetime | None:
        """The time at which the save began."""
        return _datetime(self._init_timestamp_nsecs)

    @property
    def commit_timestamp(self) -> datetime.datetime | None:
        """The time at which it was done."""
        return _datetime(self._commit_timestamp_nsecs)

    @property
    def custom_metadata(self) -> Any:
        """The caller's own metadata."""
        return self._custom_metadata

    def __repr__(self) -> str:
        return (
            f"CheckpointMetadata(metadata={self._metadata!r}, "
            f"init_timestamp_nsecs={self._init_timestamp_nsecs}, "
            f"commit_timestamp_nsecs={self._commit_timestamp_nsecs}, "
            f"custom_metadata={self._custom_metadata!r})"
        )


def _datetime(nanoseconds: int | None) -> datetime.datetime | None:
    if nanoseconds is None:
        return None

    return datetime.datetime.fromtimestamp(nanoseconds / 1e9, tz=datetime.UTC)
