"""The metadata of a stored tree, known without reading its arrays."""

from __future__ import annotations

__all__ = ("TreeMetadata", "ValueMetadataEntry", "build_default_tree_metadata")

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from jax import tree_util

from penstock.orbax.tree import PyTree, get_key_name

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


@runtime_checkable
class TreeMetadata(Protocol):
    """The metadata of a tree: a PyTree of `Metadata`, and what is known of the tree as a whole.

    It can be mapped over like any tree, indexed like its outermost container, and passed as the target of a
    restore. To map over it together with another tree, use its `tree`.
    """

    @property
    def tree(self) -> PyTree:
        """The tree itself, in dicts and lists."""
        ...

    @property
    def custom_metadata(self) -> PyTree | None:
        """The custom metadata that was saved with the tree."""
        ...

    @property
    def use_zarr3(self) -> bool:
        """Return whether its arrays are stored as zarr version 3."""
        ...

    def tree_flatten(self) -> Any: ...
    def tree_flatten_with_keys(self) -> Any: ...
    @classmethod
    def tree_unflatten(cls, aux_data: Any, flat_tree: Any) -> Any: ...
    def __getitem__(self, key: str | int) -> Any: ...
    def __contains__(self, key: str | int) -> bool: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def get(self, key: str, default: Any = None) -> Any: ...
    def keys(self) -> Any: ...
    def values(self) -> Any: ...
    def items(self) -> Any: ...
    @classmethod
    def build(
        cls, tree: PyTree, *, custom_metadata: PyTree | None = None, use_zarr3: bool = False
    ) -> TreeMetadata: ...


@_tree.register_pytree_with_keys_class
class _TreeMetadata(TreeMetadata):
    """The only implementation of `TreeMetadata`.

    Raises:
        ValueError: If the tree is not a dict, a list, a tuple or a leaf.
    """

    def __init__(
        self, *, tree: PyTree, custom_metadata: PyTree | None = None, use_zarr3: bool = False
    ) -> None:
        if not isinstance(tree, dict | list | tuple) and not _is_bare_leaf(tree):
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
        return self._tree

    @property
    def custom_metadata(self) -> PyTree | None:
        return self._custom_metadata

    @property
    def use_zarr3(self) -> bool:
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
    return _TreeMetadata.build(tree, custom_metadata=custom_metadata, use_zarr3=use_zarr3)


class _Custom:
    """Custom metadata next to the leaves of a tree: any JSON, compared and not hashed by its content."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Custom) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(_Custom)


def _is_bare_leaf(tree: object) -> bool:
    return tree is not None and bool(_tree.all_leaves([tree]))


def _outermost(tree: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    if isinstance(tree, dict):
        mapping = cast("Mapping[Any, Any]", tree)
        return [_tree.DictKey(key) for key in mapping], list(mapping.values())
    names = _field_names(cast("object", tree))
    if names is not None:
        return [_tree.DictKey(name) for name in names], [getattr(tree, name) for name in names]
    if isinstance(tree, list | tuple):
        items = cast("Sequence[Any]", tree)
        return [_tree.SequenceKey(at) for at in range(len(items))], items

    return [_tree.GetAttrKey("tree")], [tree]


def _field_names(tree: object) -> tuple[str, ...] | None:
    """Of a namedtuple; None of anything else."""
    return getattr(cast("Any", tree), "_fields", None) if isinstance(tree, tuple) else None


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
