"""PyTrees as plain dicts and lists, and back, and merged: helpers of Orbax's `tree` and `utils`."""

from __future__ import annotations

__all__ = (
    "deserialize_tree",
    "from_flat_dict",
    "from_flattened_with_keypath",
    "get_key_name",
    "get_param_names",
    "is_dict_key",
    "is_empty_node",
    "is_empty_or_leaf",
    "is_flat_dict",
    "is_sequence_key",
    "merge_trees",
    "serialize_tree",
    "str_keypath",
    "to_flat_dict",
    "to_shape_dtype_struct",
    "tuple_path_from_keypath",
)

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from jax import tree_util

from penstock.orbax.arrays import to_shape_dtype_struct

PyTree: TypeAlias = Any

_tree: Any = tree_util  # jax declares no types for it

_level: Any = _tree.default_registry.flatten_one_level  # None for a leaf; far cheaper than to flatten

_NOTHING: Final = object()

_MAPPING_KEYS: Any = (_tree.DictKey, _tree.GetAttrKey)

_SEQUENCE_KEYS: Any = (_tree.SequenceKey, _tree.FlattenedIndexKey)


def get_key_name(key: Any) -> int | str:
    """Return what a key of jax indexes by: a number for sequences, else a text.

    Raises:
        ValueError: If it is none of jax's kinds.
    """
    if isinstance(key, _tree.SequenceKey):
        return cast("int", key.idx)
    if isinstance(key, _tree.DictKey):
        return str(key.key)
    if isinstance(key, _tree.GetAttrKey):
        return cast("str", key.name)
    if isinstance(key, _tree.FlattenedIndexKey):
        return cast("int", key.key)

    raise ValueError(f"{key!r} is no key of jax: {type(key)}")


def tuple_path_from_keypath(keypath: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the keys of a path as texts."""
    return tuple([str(get_key_name(key)) for key in keypath])


str_keypath = tuple_path_from_keypath


def is_dict_key(key: Any) -> bool:
    """Return whether a key is of a mapping, or names an attribute."""
    return isinstance(key, _MAPPING_KEYS)


def is_sequence_key(key: Any) -> bool:
    """Return whether a key is an index."""
    return isinstance(key, _SEQUENCE_KEYS)


def is_empty_node(x: Any) -> bool:
    """Return whether this is a node of a tree, not a leaf, and has no children; None is one."""
    level = _level(x)
    return level is not None and next(iter(level[0]), _NOTHING) is _NOTHING


def is_empty_or_leaf(x: Any) -> bool:
    """Return whether this has no children: a leaf, None, or an empty container."""
    return _is_leaf(x) or is_empty_node(x)


def is_flat_dict(tree: PyTree) -> bool:
    """Return whether this is a dict of nothing but leaves."""
    return isinstance(tree, dict) and all(map(_is_leaf, cast("Any", tree).values()))


def get_param_names(item: PyTree, *, include_empty_nodes: bool = True) -> PyTree:
    """Return a tree with each leaf replaced by its stored name: its keys joined by dots."""
    is_leaf = is_empty_or_leaf if include_empty_nodes else None

    def name(path: tuple[Any, ...], _: object) -> str:
        return ".".join(str_keypath(path))

    return _tree.tree_map_with_path(name, item, is_leaf=is_leaf)


def from_flattened_with_keypath(flat_with_keys: list[tuple[tuple[Any, ...], Any]]) -> PyTree:
    """Make a tree of dicts and lists from pairs of key path and value.

    Tuples become lists; what has named fields becomes a dict.

    Raises:
        ValueError: If there are no pairs, a container has keys of both kinds, or an index is missing.
    """
    if not flat_with_keys:
        raise ValueError("nothing tells whether a tree without leaves is {} or []")

    return _nest(flat_with_keys, 0)


def serialize_tree(tree: PyTree, keep_empty_nodes: bool = False) -> PyTree:
    """Return the tree as dicts and lists: what a checkpoint records of its structure.

    Args:
        tree: Any.
        keep_empty_nodes: Whether None and empty containers stay; else they are left out.

    Raises:
        ValueError: If nothing is left.
    """
    is_leaf = is_empty_or_leaf if keep_empty_nodes else None
    return from_flattened_with_keypath(_pairs(tree, is_leaf))


def deserialize_tree(serialized: PyTree, target: PyTree, keep_empty_nodes: bool = False) -> PyTree:
    """Return what `serialize_tree` made, in the node types of `target`.

    Raises:
        KeyError: If `target` has a key that `serialized` has not.
    """

    def find(path: tuple[Any, ...], _: object) -> Any:
        found: Any = serialized
        for key in path:
            found = _child(found, key)

        return found

    return _tree.tree_map_with_path(find, target, is_leaf=is_empty_or_leaf if keep_empty_nodes else None)


def to_flat_dict(
    tree: PyTree,
    sep: str | None = None,
    keep_empty_nodes: bool = False,
    is_leaf: Callable[[Any], bool] | None = None,
) -> dict[Any, Any]:
    """Return the leaves by key path: a tuple of texts, or these joined by `sep`.

    Args:
        tree: Any.
        sep: What joins the keys.
        keep_empty_nodes: Whether None and empty containers count as leaves.
        is_leaf: Says what a leaf is, instead.

    Raises:
        ValueError: If two leaves have one path then; Orbax would drop one of them.
    """
    flat: dict[Any, Any] = {}
    for path, value in _pairs(tree, is_leaf or (is_empty_or_leaf if keep_empty_nodes else None)):
        keys = tuple_path_from_keypath(path)
        key = keys if sep is None else sep.join(keys)
        if key in flat:
            raise ValueError(f"two leaves have the key {key!r}")

        flat[key] = value

    return flat


def from_flat_dict(
    flat_dict: dict[Any, Any], target: PyTree = None, sep: str | None = None, *, inplace: bool = False
) -> PyTree:
    """Make a tree of what `to_flat_dict` returned.

    Args:
        flat_dict: The leaves by key path.
        target: A tree of the structure of the result; without it nested dicts are made.
        sep: What joins the keys.
        inplace: Whether to take the leaves out of `flat_dict`, so that no leaf is held twice.

    Raises:
        KeyError: If `target` has a leaf that is not in `flat_dict`.
        ValueError: If one key is the beginning of another.
    """
    if target is not None:
        keys = to_flat_dict(target, sep)
        values = [flat_dict.pop(key) if inplace else flat_dict[key] for key in keys]
        return _tree.tree_unflatten(_tree.tree_structure(target), values)

    if sep is None and () in flat_dict:
        if len(flat_dict) != 1:
            raise ValueError(f"a leaf at the root is the only one, and there are {list(flat_dict)}")
        return flat_dict.pop(()) if inplace else flat_dict[()]

    root: dict[str, Any] = {}
    made = {id(root)}  # to tell a dict that is a node here from one that is a leaf
    for key in list(flat_dict):
        *outer, last = key if sep is None else key.split(sep)
        node = root
        for step in outer:
            if step not in node:
                node[step] = below = cast("dict[str, Any]", {})
                made.add(id(below))
            node = node[step]
            if id(node) not in made:
                raise ValueError(f"{key!r} is below a leaf")
        if last in node:
            raise ValueError(f"{key!r} is the beginning of another key")

        node[last] = flat_dict.pop(key) if inplace else flat_dict[key]

    return root


def _pairs(tree: PyTree, is_leaf: Callable[[Any], bool] | None) -> list[tuple[tuple[Any, ...], Any]]:
    pairs, _ = _tree.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return cast("list[tuple[tuple[Any, ...], Any]]", pairs)


def _is_leaf(value: object) -> bool:
    return _level(value) is None


def _child(node: object, key: Any) -> Any:
    """The child at a key: by name, even where the target has a sequence or a class instead of a mapping."""
    name = get_key_name(key)
    if isinstance(node, dict):
        named = cast("dict[object, Any]", node)
        return named[name] if name in named else named[str(name)]
    if isinstance(node, list | tuple) and isinstance(name, int):
        items = cast("Sequence[Any]", node)
        if name < len(items):
            return items[name]
    else:
        for path, child in _with_keys(cast("Any", node))[0]:
            if get_key_name(path[0]) == name:
                return child

    raise KeyError(f"there is no {name!r} in {type(cast('Any', node))}")


def _nest(pairs: Sequence[tuple[tuple[Any, ...], Any]], depth: int) -> Any:
    if len(pairs) == 1 and len(pairs[0][0]) == depth:
        return pairs[0][1]

    groups: dict[int | str, list[tuple[tuple[Any, ...], Any]]] = {}
    kinds: set[bool] = set()
    for path, value in pairs:
        if len(path) == depth:
            raise ValueError(f"there are a leaf and others below it at {tuple_path_from_keypath(path)}")
        kinds.add(is_sequence_key(path[depth]))
        groups.setdefault(get_key_name(path[depth]), []).append((path, value))

    if len(kinds) != 1:
        raise ValueError(f"a container has keys and indices: {sorted(map(str, groups))}")
    if kinds == {False}:
        return {name: _nest(group, depth + 1) for name, group in groups.items()}

    if set(groups) != set(range(len(groups))):
        raise ValueError(f"a sequence has the indices {sorted(map(str, groups))}")

    return [_nest(groups[index], depth + 1) for index in range(len(groups))]


IsLeaf: TypeAlias = Callable[[Any], bool]


def _is_leaf_or_none(value: Any) -> bool:
    return value is None or _is_leaf(value)


def merge_trees(*trees: PyTree, overwrite: bool = False, is_leaf: IsLeaf | None = None) -> PyTree:
    """Return one tree with the leaves of all: mappings by key, sequences of one length by position.

    Args:
        *trees: None in one of them leaves the place to the others.
        overwrite: Whether a later leaf replaces an earlier one.
        is_leaf: Says what a leaf is; by default what is one to jax, and None.

    Raises:
        ValueError: If two sequences differ in length; or if `overwrite` is off, and two trees have the same
            leaf, or nodes of different types at one place.
    """
    check = is_leaf or _is_leaf_or_none
    if not trees:
        return {}
    if not overwrite:
        _refuse_common_leaves(trees, check)

    merged: Any = trees[0]
    for tree in trees[1:]:
        merged = _merged(merged, tree, overwrite=overwrite, is_leaf=check)

    return merged


def _merged(old: Any, new: Any, *, overwrite: bool, is_leaf: IsLeaf) -> Any:
    if type(old) is not type(new) and not overwrite:
        raise ValueError(f"Types do not match: {type(new)} and {type(old)}")
    if is_leaf(old) or is_leaf(new) or not _alike(old, new):
        return old if new is None else new

    here, there = _children_by_key(old), _children_by_key(new)
    if _is_sequence(new) and len(here) != len(there):
        raise ValueError(f"Sequence lengths do not match: {len(there)} and {len(here)}")

    both = dict(here)
    for key, child in there.items():
        both[key] = _merged(here[key], child, overwrite=overwrite, is_leaf=is_leaf) if key in here else child

    # What has come to have more names than its type has fields becomes a dict.
    return both if not isinstance(new, Mapping) and both.keys() != there.keys() else _with_children(new, both)


def _alike(a: Any, b: Any) -> bool:
    """Return whether two nodes can be merged: both have names, or indices, or they are of one type."""
    return type(a) is type(b) or (_has_names(a) and _has_names(b)) or (_is_sequence(a) and _is_sequence(b))


def _has_names(node: Any) -> bool:
    return isinstance(node, Mapping) or (isinstance(node, tuple) and not _is_sequence(node))


def _refuse_common_leaves(trees: Sequence[PyTree], is_leaf: IsLeaf) -> None:
    seen: set[tuple[str, ...]] = set()
    for tree in trees:
        pairs = _tree.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
        paths = {tuple([str(_key_of(key)) for key in path]) for path, _ in pairs}
        if seen & paths:
            raise ValueError(f"Found common key paths when overwrite is False: {sorted(seen & paths)}")

        seen |= paths


def _children_by_key(node: Any) -> dict[Any, Any]:
    """The children of a node by key: of a mapping, by index, by field or attribute."""
    if isinstance(node, Mapping):
        return dict(cast("Any", node))

    return {_key_of(path[0]): child for path, child in _with_keys(node)[0]}


def _with_children(node: Any, children: dict[Any, Any]) -> Any:
    """A node of this type with these children; a dict if the type cannot be made of them."""
    if isinstance(node, Mapping):
        make = cast("Any", type)(node)
        try:
            return make(children)
        except (TypeError, ValueError):
            return children

    pairs, treedef = _with_keys(node)
    return _tree.tree_unflatten(treedef, [children[_key_of(path[0])] for path, _ in pairs])


def _with_keys(node: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], Any]:
    def is_child(value: Any) -> bool:
        return value is not node

    found: Any = _tree.tree_flatten_with_path(node, is_leaf=is_child)
    return found[0], found[1]


def _key_of(key: Any) -> Any:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)

    return key


def _is_sequence(node: Any) -> bool:
    return isinstance(node, list) or (isinstance(node, tuple) and not hasattr(cast("Any", node), "_fields"))
