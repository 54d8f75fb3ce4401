"""Trees compared, cut to the shape of another, and merged, node by node."""

from __future__ import annotations

__all__ = ("Diff", "merge_trees", "tree_difference", "tree_trim")

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

from jax import tree_util

from penstock.orbax.v0.trees.tree_parts import MISSING, PartsOf

PyTree: TypeAlias = Any
IsLeaf: TypeAlias = Callable[[Any], bool]

_tree: Any = tree_util  # jax declares no types for it


class Diff(NamedTuple):
    """What two trees have at one place: leaves, types, or types with their lengths; None for nothing."""

    lhs: Any
    rhs: Any


def tree_difference(
    a: PyTree,
    b: PyTree,
    *,
    is_leaf: IsLeaf | None = None,
    leaves_equal: Callable[[PyTree, PyTree], bool] | None = None,
) -> PyTree:
    """Return a tree of the `Diff`s of two trees; None if there are none.

    Entries of mappings that do not differ are left out; in other nodes None stands for them.

    Args:
        a: Any tree.
        b: Any tree.
        is_leaf: Says what a leaf is; by default what is one to jax.
        leaves_equal: Compares two leaves; by default their types.
    """
    check, equal = is_leaf or _is_leaf, leaves_equal or _of_one_type
    if check(a) and check(b):
        return None if equal(a, b) else Diff(a, b)
    if type(a) is not type(b):
        return Diff(type(a), type(b))

    here, there = _children(a), _children(b)
    if _is_sequence(a) and len(here) != len(there):
        return Diff((type(a), len(here)), (type(b), len(there)))

    found = {
        key: tree_difference(here[key], there[key], is_leaf=check, leaves_equal=equal)
        for key in here
        if key in there
    }
    found |= {key: Diff(child, None) for key, child in here.items() if key not in there}
    found |= {key: Diff(None, child) for key, child in there.items() if key not in here}
    differing = {key: diff for key, diff in found.items() if diff is not None}
    if not differing:
        return None

    return differing if isinstance(a, Mapping) else _rebuilt(a, {key: differing.get(key) for key in here})


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


def tree_trim(
    template: PyTree,
    structure: PyTree,
    *,
    trimmed_structure_callback: Callable[[tuple[Any, ...], PyTree], None] | None = None,
    strict: bool = True,
    allow_sequence_mapping_alignment: bool = False,
) -> PyTree:
    """Return the part of `structure` that has the shape of `template`, in its types.

    Only entries of mappings and of nodes with names are left out. Sequences must have the same length. Unless
    it is strict, such entries may be missing, too, and the result is a `PartsOf` the tree.

    Args:
        template: The shape. None in it leaves out a leaf, or all below a node.
        structure: The tree to be cut.
        trimmed_structure_callback: Called with the keys and the value of each node that is left out.
        strict: Whether all that `template` has must be in `structure`.
        allow_sequence_mapping_alignment: Whether a mapping in `template` may stand for a sequence, by index.

    Raises:
        TypeError: If two nodes do not fit.
        ValueError: If a key is missing although it is strict, or two sequences differ in length.
    """
    trim = _Trim(trimmed_structure_callback, strict, allow_sequence_mapping_alignment)
    trimmed = trim(template, structure, ())
    return trimmed if strict else PartsOf(template, trimmed)


@dataclass(frozen=True, slots=True)
class _Trim:
    callback: Callable[[tuple[Any, ...], PyTree], None] | None
    strict: bool
    align: bool

    def __call__(self, template: Any, structure: Any, at: tuple[Any, ...]) -> Any:
        if template is None:
            self._none(structure, at)
            return None
        if _is_trimmed_whole(template):
            if structure is None and not self.strict:
                return MISSING
            if not _is_trimmed_whole(structure):
                raise _misfit(template, structure, at)
            return structure
        if _is_sequence(template):
            return self._sequence(template, structure, at)

        wanted = _children(template) if isinstance(template, Mapping) else _by_text(template)
        found = self._named(template, structure, at)
        missing = [key for key in wanted if key not in found]
        if missing and self.strict:
            raise ValueError(f"Missing {len(missing)} keys in structure path {at}, including: {missing[:10]}")

        by_index = isinstance(template, tuple) and not isinstance(structure, Mapping)
        kept = {key: _tree.tree_map(_missing, wanted[key]) for key in missing}
        for n, (key, child) in enumerate(found.items()):
            below = (*at, n if by_index else _shown(structure, key))
            if key in wanted:
                kept[key] = self(wanted[key], child, below)
            else:
                self._left_out(below, child)

        if not isinstance(template, Mapping):
            kept = {key: kept[str(key)] for key in _children(template)}
        return _rebuilt(template, kept)

    def _none(self, structure: Any, at: tuple[Any, ...]) -> None:
        if structure is None or not _is_trimmed_whole(structure):
            self({}, structure, at)
        else:
            self._left_out(at, structure)

    def _sequence(self, template: Any, structure: Any, at: tuple[Any, ...]) -> Any:
        items: Any = () if structure is None else structure
        if not _has_items(items):
            raise _misfit(template, structure, at)
        if len(template) != len(items):
            raise ValueError(
                f"Length mismatch at key path {at}: template has length {len(template)}, but structure has "
                f"length {len(items)}"
            )

        kept = [
            self(one, other, (*at, n)) for n, (one, other) in enumerate(zip(template, items, strict=True))
        ]
        return type(template)(kept)

    def _named(self, template: Any, structure: Any, at: tuple[Any, ...]) -> dict[Any, Any]:
        """The children of a node by name, where that node may stand for the template's."""
        if structure is None and not isinstance(template, tuple):
            return {}
        if isinstance(template, tuple) and (structure is None or isinstance(structure, list | tuple)):
            names, items = list(_by_text(template)), list(cast("Any", structure or ()))
            if len(names) != len(items):
                raise ValueError(
                    f"Length mismatch at key path {at}: template has length {len(names)}, but structure has "
                    f"length {len(items)}"
                )
            return dict(zip(names, items, strict=True))

        allowed = self.align or not _is_sequence(structure)
        if isinstance(template, tuple):
            allowed = isinstance(structure, Mapping)
        if _is_trimmed_whole(structure) or not allowed:
            raise _misfit(template, structure, at)

        return _children(structure) if isinstance(structure, Mapping) else _by_text(structure)

    def _left_out(self, at: tuple[Any, ...], value: Any) -> None:
        if self.callback is not None:
            self.callback(at, value)


def _missing(_: object) -> object:
    return MISSING


def _merged(old: Any, new: Any, *, overwrite: bool, is_leaf: IsLeaf) -> Any:
    if type(old) is not type(new) and not overwrite:
        raise ValueError(f"Types do not match: {type(new)} and {type(old)}")
    if is_leaf(old) or is_leaf(new) or not _alike(old, new):
        return old if new is None else new

    here, there = _children(old), _children(new)
    if _is_sequence(new) and len(here) != len(there):
        raise ValueError(f"Sequence lengths do not match: {len(there)} and {len(here)}")

    both = dict(here)
    for key, child in there.items():
        both[key] = _merged(here[key], child, overwrite=overwrite, is_leaf=is_leaf) if key in here else child

    # What has come to have more names than its type has fields becomes a dict.
    return both if not isinstance(new, Mapping) and both.keys() != there.keys() else _rebuilt(new, both)


def _alike(a: Any, b: Any) -> bool:
    """Whether two nodes can be merged: both have names, or indices, or they are of one type."""
    return type(a) is type(b) or (_has_names(a) and _has_names(b)) or (_is_sequence(a) and _is_sequence(b))


def _has_names(node: Any) -> bool:
    return isinstance(node, Mapping) or (isinstance(node, tuple) and not _is_sequence(node))


def _refuse_common_leaves(trees: Sequence[PyTree], is_leaf: IsLeaf) -> None:
    seen: set[tuple[str, ...]] = set()
    for tree in trees:
        pairs = _tree.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
        paths = {tuple([str(_name(key)) for key in path]) for path, _ in pairs}
        if seen & paths:
            raise ValueError(f"Found common key paths when overwrite is False: {sorted(seen & paths)}")

        seen |= paths


def _children(node: Any) -> dict[Any, Any]:
    """The children of a node by key: of a mapping, by index, by field or attribute."""
    if isinstance(node, Mapping):
        return dict(cast("Any", node))

    return {_name(path[0]): child for path, child in _one_level(node)[0]}


def _by_text(node: Any) -> dict[str, Any]:
    return {str(key): child for key, child in _children(node).items()}


def _rebuilt(node: Any, children: dict[Any, Any]) -> Any:
    """A node of this type with these children; a dict if the type cannot be made of them."""
    if isinstance(node, Mapping):
        make = cast("Any", type)(node)
        try:
            return make(children)
        except (TypeError, ValueError):
            return children

    pairs, treedef = _one_level(node)
    return _tree.tree_unflatten(treedef, [children[_name(path[0])] for path, _ in pairs])


def _one_level(node: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], Any]:
    def is_child(value: Any) -> bool:
        return value is not node

    found: Any = _tree.tree_flatten_with_path(node, is_leaf=is_child)
    return found[0], found[1]


def _name(key: Any) -> Any:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)

    return key


def _shown(node: Any, key: Any) -> Any:
    """A key as a callback gets it: of a mapping as it is, of other nodes as jax writes it."""
    if isinstance(node, Mapping):
        return key

    return next(
        (_tree.keystr(path) for path, _ in _one_level(node)[0] if str(_name(path[0])) == str(key)), key
    )


def _is_sequence(node: Any) -> bool:
    return isinstance(node, list) or (isinstance(node, tuple) and not hasattr(cast("Any", node), "_fields"))


def _has_items(value: Any) -> bool:
    return isinstance(value, Sequence)


def _is_leaf(value: Any) -> bool:
    return bool(_tree.all_leaves([value]))


def _is_trimmed_whole(value: Any) -> bool:
    """Whether it is a leaf; a mapping is none, also if jax does not know its type."""
    return not isinstance(value, Mapping) and _is_leaf(value)


def _is_leaf_or_none(value: Any) -> bool:
    return value is None or _is_leaf(value)


def _of_one_type(a: Any, b: Any) -> bool:
    return type(a) is type(b)


def _misfit(template: Any, structure: Any, at: tuple[Any, ...]) -> TypeError:
    return TypeError(
        f"Type mismatch at key path {at}: template has type {type(template)}, but structure has type "
        f"{type(structure)}."
    )
