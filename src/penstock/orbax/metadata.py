"""Descriptions of stored trees, leaves and steps, made without reading them, under Orbax's names."""

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
    "ValueMetadataEntry",
    "build_default_tree_metadata",
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, cast

from jax import tree_util

from penstock import handlers as built_in
from penstock.embedding import document_files, file_names
from penstock.errors import CorruptCheckpointError, SpecError, StorageError
from penstock.orbax import metadata as tree  # in Orbax, TreeMetadata is in a module of this name
from penstock.orbax import value_metadata as value
from penstock.orbax.installation import Counterpart
from penstock.orbax.item_files import path_text, place_of, store_at
from penstock.orbax.logging import SaveStepStatistics
from penstock.orbax.tree import PyTree, get_key_name
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

_tree: Any = tree_util  # jax declares no types for it


@dataclass
class ValueMetadataEntry:
    """The record of a leaf, as a `legacy_transform_fn` gets it.

    Attributes:
        value_type: What `_METADATA` calls its type.
        skip_deserialize: Whether there is nothing to read.
        write_shape: The shape of the part that one replica wrote, if that was recorded.
    """

    value_type: str
    skip_deserialize: bool = False
    write_shape: tuple[int, ...] | None = None


@_tree.register_pytree_with_keys_class
class TreeMetadata(Counterpart):
    """The metadata of a tree: a PyTree of `Metadata`, and what is known of the tree as a whole.

    It can be mapped over like any tree, indexed like its outermost container, and passed as the target of a
    restore. To map over it together with another tree, use its `tree`.

    Args:
        tree: Of dicts and lists.
        custom_metadata: What was saved with the tree.
        use_zarr3: Whether its arrays are of zarr version 3.

    Raises:
        ValueError: If the tree is not a dict, a list, a tuple or a leaf.
    """

    _ORBAX_CLASS = ("_src.metadata.tree", "TreeMetadata")

    def __init__(
        self, *, tree: PyTree, custom_metadata: PyTree | None = None, use_zarr3: bool = False
    ) -> None:
        if not isinstance(tree, dict | list | tuple) and (tree is None or not _tree.all_leaves([tree])):
            raise ValueError(f"a {type(tree)} cannot be the tree of a TreeMetadata")

        self._tree: Any = cast("Any", tree)
        self._custom_metadata = custom_metadata
        self._use_zarr3 = use_zarr3

    def __repr__(self) -> str:
        return (
            f"TreeMetadata(tree={self._tree!r}, custom_metadata={self._custom_metadata!r}, "
            f"use_zarr3={self._use_zarr3})"
        )

    @property
    def tree(self) -> PyTree:
        """The tree itself, in dicts and lists."""
        return self._tree

    @property
    def custom_metadata(self) -> PyTree | None:
        """The custom metadata that was saved with the tree."""
        return self._custom_metadata

    @property
    def use_zarr3(self) -> bool:
        """Return whether its arrays are stored as zarr version 3."""
        return self._use_zarr3

    def tree_flatten(self) -> Any:
        pairs, aux = self.tree_flatten_with_keys()
        return tuple([child for _, child in pairs]), aux

    def tree_flatten_with_keys(self) -> Any:
        keys, children = _outermost(self._tree)
        # jax compares it, so it must be comparable; custom metadata is any JSON.
        tree: object = self._tree
        aux = (type(tree), tuple(keys), _Custom(self._custom_metadata), self._use_zarr3)
        return list(zip(keys, children, strict=True)), aux

    @classmethod
    def tree_unflatten(cls, aux_data: Any, flat_tree: Any) -> Any:
        kind, keys, custom, use_zarr3 = aux_data
        self = cls.__new__(cls)  # a mapped tree may hold anything, also what no tree begins with
        self._tree = _rebuilt(kind, keys, list(flat_tree))
        self._custom_metadata, self._use_zarr3 = custom.value, use_zarr3
        return self

    def __getitem__(self, key: str | int) -> Any:
        return self._tree[key]

    def __contains__(self, key: str | int) -> bool:
        return key in self._tree

    def __len__(self) -> int:
        return len(self._tree)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tree)

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self._tree[key]
        except (KeyError, IndexError):
            return default

    def keys(self) -> Any:
        return self._tree.keys()

    def values(self) -> Any:
        return self._tree.values()

    def items(self) -> Any:
        return self._tree.items()

    @classmethod
    def build(
        cls, tree: PyTree, *, custom_metadata: PyTree | None = None, use_zarr3: bool = False
    ) -> TreeMetadata:
        return cls(tree=tree, custom_metadata=custom_metadata, use_zarr3=use_zarr3)


def build_default_tree_metadata(
    tree: PyTree, *, custom_metadata: PyTree | None = None, use_zarr3: bool = False
) -> TreeMetadata:
    """Make the metadata of a tree.

    Args:
        tree: Of `Metadata`, or of anything else.
        custom_metadata: What the caller saved with the tree.
        use_zarr3: Whether its arrays are of zarr version 3.

    Raises:
        ValueError: If the tree is not a dict, a list, a tuple or a leaf.
    """
    return TreeMetadata.build(tree, custom_metadata=custom_metadata, use_zarr3=use_zarr3)


class _Custom:
    """Custom metadata next to the leaves of a tree: any JSON, compared and not hashed by its content."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Custom) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(_Custom)


def _outermost(tree: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    if isinstance(tree, dict):
        mapping = cast("Mapping[Any, Any]", tree)
        return [_tree.DictKey(key) for key in mapping], list(mapping.values())
    names: Any = getattr(cast("Any", tree), "_fields", None) if isinstance(tree, tuple) else None
    if names is not None:
        return [_tree.DictKey(name) for name in names], [getattr(cast("Any", tree), name) for name in names]
    if isinstance(tree, list | tuple):
        items = cast("Sequence[Any]", tree)
        return [_tree.SequenceKey(at) for at in range(len(items))], items

    return [_tree.GetAttrKey("tree")], [tree]


def _rebuilt(kind: type, keys: Sequence[Any], children: list[Any]) -> Any:
    make: Any = kind
    if issubclass(kind, dict):
        # By `key.key` and not by its name, so that a key that is no text stays what it is.
        return make(zip([key.key for key in keys], children, strict=True))
    if issubclass(kind, tuple) and hasattr(make, "_fields"):
        return make(**dict(zip(map(str, map(get_key_name, keys)), children, strict=True)))
    if issubclass(kind, list | tuple):
        return make(children)

    return children[0]


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

    def __repr__(self) -> str:
        return f"Composite({dict(self._items)!r})"

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
