"""Descriptions of stored trees and leaves, made without reading them, under Orbax's names."""

from __future__ import annotations

__all__ = (
    "ArrayMetadata",
    "Composite",
    "CompositeItemMetadata",
    "Metadata",
    "MetadataStore",
    "NamedShardingMetadata",
    "RootMetadata",
    "ScalarMetadata",
    "ShardingMetadata",
    "SingleDeviceShardingMetadata",
    "StepMetadata",
    "StorageMetadata",
    "StringMetadata",
    "TreeMetadata",
    "decode_step_metadata",
    "encode_step_metadata",
    "get_step_metadata",
    "metadata_store",
    "step_metadata_file_path",
    "tree",
    "value",
)

import json
import os
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, cast

from penstock.embedding import built_in, document_files, file_names
from penstock.errors import CorruptCheckpointError, SpecError, StorageError
from penstock.orbax import stored_tree_metadata as tree
from penstock.orbax import value_metadata as value
from penstock.orbax.item_files import path_text, place_of, store_at
from penstock.orbax.measurements import SaveStepStatistics
from penstock.orbax.stored_tree_metadata import TreeMetadata
from penstock.orbax.value_metadata import (
    ArrayMetadata,
    Metadata,
    NamedShardingMetadata,
    ScalarMetadata,
    ShardingMetadata,
    SingleDeviceShardingMetadata,
    StorageMetadata,
    StringMetadata,
)


class _NoItemError(KeyError, AttributeError):
    """There is no item of that name. Both errors, for both ways to look it up."""


class Composite(Mapping[str, Any]):
    """A mapping whose values are attributes, too: `Composite(state=tree).state`. Immutable.

    An item with the name of a method (`items`, `keys`) is only found by its key.

    Args:
        **items: By name.

    Raises:
        ValueError: If a name begins with two underscores.
    """

    _items: Mapping[str, Any]

    def __init__(self, **items: Any) -> None:
        reserved = next((name for name in items if name.startswith("__")), None)
        if reserved is not None:
            raise ValueError(f'Composite keys cannot start with "__", as {reserved!r} does')

        object.__setattr__(self, "_items", items)

    def __getitem__(self, key: str) -> Any:
        if key not in self._items:
            raise _NoItemError(f"Unknown key: {key}. Available keys: {list(self._items)}")

        return self._items[key]

    def __getattr__(self, key: str) -> Any:
        if key == "_items":  # while it is copied or unpickled
            raise AttributeError(key)

        return self[key]

    def __setattr__(self, key: str, value: Any) -> None:
        raise ValueError("a Composite cannot be changed; make a new one")

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __repr__(self) -> str:
        return f"Composite({dict(self._items)!r})"

    def keys(self) -> KeysView[str]:
        return self._items.keys()

    def values(self) -> ValuesView[Any]:
        return self._items.values()

    def items(self) -> ItemsView[str, Any]:
        return self._items.items()

    def get(self, key: str, default: Any = None) -> Any:
        return self._items.get(key, default)

    def __and__(self, other: Mapping[str, Any]) -> Composite:
        return Composite(**{key: value for key, value in self._items.items() if key in other})

    def __or__(self, other: Mapping[str, Any]) -> Composite:
        return Composite(**{**self._items, **other})


CompositeItemMetadata = Composite


@dataclass
class StepMetadata:
    """The metadata of a checkpoint, known without restoring it.

    Attributes:
        item_handlers: The recorded handler of each item, or of a checkpoint that is one item.
        item_metadata: What the handlers know of the items.
        metrics: The caller's own, by name.
        performance_metrics: Those of the save.
        init_timestamp_nsecs: When the save began, in nanoseconds since the epoch.
        commit_timestamp_nsecs: When it was complete.
        custom_metadata: The caller's own, JSON.
    """

    item_handlers: dict[str, str] | str | None = None
    item_metadata: Any = None
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    performance_metrics: SaveStepStatistics = field(default_factory=SaveStepStatistics)
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class RootMetadata:
    """The metadata of a directory of steps.

    Attributes:
        internal_metadata: What Orbax records for itself.
        custom_metadata: The caller's own, JSON.
    """

    internal_metadata: dict[str, Any] | None = field(default_factory=dict[str, Any])
    custom_metadata: dict[str, Any] | None = field(default_factory=dict[str, Any])


class MetadataStore:
    """Reads and writes documents of JSON objects; every write is durable when it returns.

    Args:
        enable_write: Whether `write` and `update` have an effect.
        blocking_write: What `is_blocking_writer` returns.
    """

    def __init__(self, *, enable_write: bool, blocking_write: bool = True) -> None:
        self.enable_write = enable_write
        self._blocking = blocking_write
        self._store = built_in.LocalStore()
        self._lock = RLock()

    def __reduce__(self) -> Any:
        """A copy in another process has its own lock."""
        return partial(type(self), enable_write=self.enable_write, blocking_write=self._blocking), ()

    def is_blocking_writer(self) -> bool:
        return self._blocking

    def write(self, file_path: str | os.PathLike[str], metadata: Mapping[str, Any]) -> None:
        """Write or replace a document. A digest that was recorded of it is recorded anew.

        Args:
            file_path: The document, in a directory that is named and exists.
            metadata: JSON.

        Raises:
            ValueError: If the path names no directory.
            StorageError: If the medium refuses. It is an OSError.
        """
        if self.enable_write:
            if not Path(file_path).parent.name:
                raise SpecError(f"Metadata parent name not set: {file_path} names no directory")

            with self._lock:
                document_files.rewrite_document(
                    self._store, os.fspath(file_path), json.dumps(dict(metadata)).encode()
                )

    def read(self, file_path: str | os.PathLike[str]) -> dict[str, Any] | None:
        """Return a document; None if there is none or it is not JSON.

        Raises:
            ChecksumError: If a digest was recorded of it, and it is not as it was written.
            MissingFileError: If it was written and is not there.
        """
        directory, name = os.path.split(path_text(file_path))
        directory = directory or os.curdir
        sealed = document_files.sealed_documents(store_at(directory), directory)
        try:
            data = sealed.read(name)
            found: Any = json.loads(data)
        except CorruptCheckpointError:
            raise
        except (StorageError, ValueError):
            return None

        return cast("dict[str, Any]", found)

    def update(self, file_path: str | os.PathLike[str], **kwargs: Any) -> None:
        """Replace some members of a document; create it if there is none."""
        with self._lock:
            self.write(file_path, {**(self.read(file_path) or {}), **kwargs})

    def wait_until_finished(self) -> None:
        """Return at once: every write has finished when it returns."""

    def close(self) -> None:
        """Do nothing: nothing is held."""


def metadata_store(*, enable_write: bool, blocking_write: bool = False) -> MetadataStore:
    """Return a store of documents; see `MetadataStore`."""
    return MetadataStore(enable_write=enable_write, blocking_write=blocking_write)


def step_metadata_file_path(path: str | os.PathLike[str]) -> Any:
    """Return the path of the document of the checkpoint at `path`.

    Raises:
        NotADirectoryError: If `path` is a file.
    """
    directory = place_of(path)
    if store_at(directory).kind(path_text(directory)) == "file":
        raise NotADirectoryError(f"Path is not a directory: {directory}")

    return directory / file_names.CHECKPOINT_METADATA


def get_step_metadata(path: str | os.PathLike[str]) -> StepMetadata:
    """Return the recorded metadata of the checkpoint at `path`.

    Raises:
        ValueError: If there is none.
    """
    file = step_metadata_file_path(path)
    found = MetadataStore(enable_write=False).read(file)
    if found is None:
        raise ValueError(f"Step metadata not found at {file}")

    return decode_step_metadata(found)


def encode_step_metadata(metadata: StepMetadata) -> dict[str, Any]:
    """Encode the document. What handlers know of the items is not part of it.

    Raises:
        ValueError: If a member has the wrong type.
    """
    measured = asdict(metadata.performance_metrics)
    return {
        "item_handlers": _checked("item_handlers", metadata.item_handlers, dict, str),
        "metrics": _checked("metrics", metadata.metrics or {}, dict),
        "performance_metrics": _floats(measured),
        "init_timestamp_nsecs": _checked("init_timestamp_nsecs", metadata.init_timestamp_nsecs, int),
        "commit_timestamp_nsecs": _checked("commit_timestamp_nsecs", metadata.commit_timestamp_nsecs, int),
        "custom_metadata": _checked("custom_metadata", metadata.custom_metadata or {}, dict),
    }


def decode_step_metadata(document: Any) -> StepMetadata:
    """Decode a document. Unknown members become custom metadata if there is none.

    Raises:
        ValueError: If a member has the wrong type, or is unknown although there is custom metadata.
    """
    if not isinstance(document, dict):
        raise ValueError(f"Metadata dict must be a dictionary, but got {type(document).__name__}")

    found = cast("dict[str, Any]", document)
    known = {one.name for one in fields(StepMetadata)} - {"item_metadata"}
    custom = dict(_checked("custom_metadata", found.get("custom_metadata") or {}, dict))
    unknown = [name for name in found if name not in known]
    if unknown and custom:
        raise ValueError(f"Provided metadata contains unknown key {unknown[0]}, and custom_metadata")

    measured: Any = _checked("performance_metrics", found.get("performance_metrics") or {}, dict)
    return StepMetadata(
        item_handlers=_checked("item_handlers", found.get("item_handlers"), dict, str),
        metrics=dict(_checked("metrics", found.get("metrics") or {}, dict)),
        performance_metrics=replace(SaveStepStatistics(), **_floats(measured)),
        init_timestamp_nsecs=_checked("init_timestamp_nsecs", found.get("init_timestamp_nsecs"), int),
        commit_timestamp_nsecs=_checked("commit_timestamp_nsecs", found.get("commit_timestamp_nsecs"), int),
        custom_metadata=custom | {name: found[name] for name in unknown},
    )


def _checked(name: str, value: Any, *types: type) -> Any:
    if value is not None and not isinstance(value, types):
        raise ValueError(f"{name} must be of type {[one.__name__ for one in types]}, got {type(value)}")
    if isinstance(value, dict) and not all(isinstance(key, str) for key in cast("dict[object, Any]", value)):
        raise ValueError(f"the keys of {name} must be texts: {value!r}")

    return cast("Any", value)


def _floats(measured: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in measured.items() if isinstance(value, float)}
