"""A tree and its leaves: flattening by key path, and nesting back when there is no target."""

from __future__ import annotations

__all__ = ("FlatLeaf", "flatten_tree", "is_empty", "nest")

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import tree_util

from penstock.kernel.errors import DuplicateNameError, InvalidLeafError, SpecError
from penstock.kernel.messages import KeyKind, ParamInfo

# Looked up once and not for every step of every leaf. jax declares no types for them.
_jax: Any = tree_util
_DICT_KEY, _ATTRIBUTE_KEY = _jax.DictKey, _jax.GetAttrKey
_SEQUENCE_KEY, _FLAT_KEY = _jax.SequenceKey, _jax.FlattenedIndexKey
_SEQUENCE, _MAPPING = KeyKind.SEQUENCE, KeyKind.MAPPING


@dataclass(frozen=True, slots=True)
class FlatLeaf:
    """A leaf, or an empty container, with where it stands."""

    info: ParamInfo
    value: Any


def flatten_tree(tree: object, directory: str = "") -> tuple[list[FlatLeaf], Any]:
    """Take a tree apart into leaves, in JAX's flatten order, with None and empty containers as leaves.

    Nodes are whatever JAX knows as nodes: dict, list, tuple, namedtuple, registered classes. An
    empty container of a registered class has no leaf and no trace in the result.

    Args:
        tree: Any PyTree; a bare leaf is one.
        directory: Put into every `ParamInfo`.

    Returns:
        The leaves, and the structure that `jax.tree_util.tree_unflatten` makes a tree of them with.

    Raises:
        DuplicateNameError: If two leaves have the same stored name.
        SpecError: If jax cannot flatten it: the keys of a dict cannot be sorted.
        InvalidLeafError: If a key has surrogates in it, which no document can hold.
    """
    try:
        pairs, treedef = _jax.tree_flatten_with_path(tree, is_leaf=is_empty)
    except ValueError as error:  # keys of one dict that cannot be sorted
        raise SpecError(f"jax cannot take the tree apart: {error}") from error

    leaves: list[FlatLeaf] = []
    seen: dict[str, str] = {}
    for path, value in pairs:
        steps = [_step(entry) for entry in path]
        keys = tuple([key for key, _ in steps])
        info = ParamInfo(keys, tuple([kind for _, kind in steps]), _jax.keystr(path), directory)
        name = info.name
        if name in seen:
            raise DuplicateNameError(name, seen[name], info.key_path)

        if not name.isascii():
            _check_unicode(info)

        seen[name] = info.key_path
        leaves.append(FlatLeaf(info, value))

    return leaves, treedef


def nest(infos: Sequence[ParamInfo], values: Sequence[object]) -> object:
    """Put values back into dicts and lists, by their key paths alone.

    Sequence keys make lists, in the order of their indices, or tuples where those are known; all others
    make dicts. A container that mixes kinds, or skips an index, is a dict: nothing is renumbered.
    """
    if len(infos) == 1 and not infos[0].keys:
        return values[0]

    root = _Node()
    for info, value in zip(infos, values, strict=True):
        node = root
        for depth, (key, kind) in enumerate(zip(info.keys, info.kinds, strict=True)):
            node.kinds.add(kind)
            if depth == len(info.keys) - 1:
                node.children[key] = value
            else:
                child = node.children.setdefault(key, _Node())
                assert isinstance(child, _Node), "a leaf has children"
                node = child

    return root.build()


class _Node:
    __slots__ = ("children", "kinds")

    def __init__(self) -> None:
        self.children: dict[str, object] = {}
        self.kinds: set[KeyKind] = set()

    def build(self) -> object:
        built = {
            key: value.build() if isinstance(value, _Node) else value for key, value in self.children.items()
        }
        indices = [str(index) for index in range(len(built))]
        if len(self.kinds) != 1 or self.kinds == {_MAPPING} or built.keys() != set(indices):
            return built

        items = [built[index] for index in indices]
        return items if self.kinds == {_SEQUENCE} else tuple(items)


def is_empty(node: object) -> bool:
    """Whether a node is None or a container of a built-in kind with nothing in it."""
    return node is None or (isinstance(node, dict | list | tuple) and not node)


def _check_unicode(info: ParamInfo) -> None:
    try:
        info.name.encode()
    except UnicodeEncodeError as error:
        raise InvalidLeafError(
            info.key_path, f"a key in its path is no valid Unicode text ({error.reason}); rename it"
        ) from error


def _step(entry: Any) -> tuple[str, KeyKind]:
    """Translate one of JAX's key entries.

    No cache: entries that are equal (of the keys 1, 1.0 and True) have different names, and those
    that classes bring along need not even be hashable.
    """
    if isinstance(entry, _DICT_KEY):
        return str(entry.key), _MAPPING
    if isinstance(entry, _ATTRIBUTE_KEY):
        return entry.name, _MAPPING
    if isinstance(entry, _SEQUENCE_KEY):
        return str(entry.idx), _SEQUENCE
    if isinstance(entry, _FLAT_KEY):
        return str(entry.key), _SEQUENCE

    return str(entry), _MAPPING  # a class registered with key entries of its own
