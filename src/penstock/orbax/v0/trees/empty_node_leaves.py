"""Trees with each empty node as a leaf, registered classes included, so that each is recorded."""

from __future__ import annotations

__all__ = ("Found", "flatten", "is_empty", "with_markers")

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from jax import tree_util

from penstock.kernel.errors import DuplicateNameError
from penstock.kernel.protocols.leaf import KeyPath
from penstock.stages.pytree.flattening import step

_tree: Any = tree_util  # jax declares no types for it


@dataclass(frozen=True, slots=True)
class Found:
    """A leaf, or an empty node."""

    keys: KeyPath
    path: tuple[Any, ...]  #: as jax has it
    value: Any

    @property
    def key_path(self) -> str:
        """The key path as jax prints it, for messages."""
        shown: str = _tree.keystr(self.path)
        return shown


def flatten(tree: Any) -> tuple[list[Found], Any]:
    """Take a tree apart.

    Returns:
        Its leaves and empty nodes, in jax's order, and the structure to put others together with.

    Raises:
        DuplicateNameError: If two have the same keys.
    """
    pairs, treedef = _tree.tree_flatten_with_path(tree, is_leaf=is_empty())
    found: dict[KeyPath, Found] = {}
    for path, value in pairs:
        one = Found(tuple([step(entry)[0] for entry in path]), path, value)
        if found.setdefault(one.keys, one) is not one:
            raise DuplicateNameError(".".join(one.keys), found[one.keys].key_path, one.key_path)

    return list(found.values()), treedef


def is_empty() -> Callable[[Any], bool]:
    """Return a predicate for None and empty nodes."""
    leaves: dict[type, bool] = {}  # what is a leaf depends on its type alone

    def check(value: object) -> bool:
        is_leaf = leaves.get(type(value))
        if is_leaf is None:
            is_leaf = leaves[type(value)] = bool(_tree.all_leaves([value]))

        def below(node: object) -> bool:
            return node is not value

        return not is_leaf and not _tree.tree_leaves(value, is_leaf=below)

    return check


def with_markers(tree: Any) -> Any:
    """Return the tree with None, or an empty dict, for each empty node of a registered class; as Orbax.

    A tree without such nodes is returned as it is.
    """
    if not _has_unmarked(tree):
        return tree

    check = is_empty()

    def marked(value: Any) -> Any:
        return _marker(value) if check(value) else value

    return _tree.tree_map(marked, tree, is_leaf=check)


def _has_unmarked(tree: Any) -> bool:
    """Whether there is an empty node that is not its own marker. Asks jax about containers alone."""
    one_level = _tree.default_registry.flatten_one_level
    leaves: set[type] = set()  # what is a leaf depends on its type alone
    waiting: list[object] = [tree]
    while waiting:
        node = waiting.pop()
        level: Any = one_level(node)
        if level is None:
            leaves.add(type(node))
            continue

        children: list[object] = list(level[0])
        if not children and _marker(node) is not node:
            return True

        kinds = {type(child): child for child in children if type(child) not in leaves}
        leaves |= {kind for kind, child in kinds.items() if one_level(child) is None}
        waiting += [child for child in children if type(child) not in leaves]

    return False


def _marker(node: Any) -> Any:
    if isinstance(node, dict | list) or type(node) is tuple:
        return cast("Any", node)

    return {} if isinstance(node, Mapping) else None
