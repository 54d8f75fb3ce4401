"""Flattens a tree by key path, with the values that each process has; nests leaves back into a tree."""

from __future__ import annotations

__all__ = (
    "ALONE",
    "PROCESS_KEY",
    "Divide",
    "FlatLeaf",
    "PerProcess",
    "check_names",
    "flatten_tree",
    "is_empty",
    "nest",
    "nest_columns",
    "step",
    "stored_info",
)

import re
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast, final

from jax import tree_util

from penstock.kernel.errors import DuplicateNameError, InvalidLeafError, SpecError
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafInfos, ParamInfo

T = TypeVar("T")
Divide: TypeAlias = Callable[[Sequence[Any], int, int], Any]

PROCESS_KEY: Final = re.compile(r"process_(\d+)-of-(\d+)")
"""The key below which the value of one process is stored: its index, and how many there were."""


@final
@dataclass(frozen=True, slots=True)
class PerProcess(Generic[T]):
    """Marks a value of which each process of a job has its own, such as the state of a data iterator.

    A save by several processes stores it once for each, and a restore gives each process its own. A save by
    one process stores the value as if it were not marked. To jax it is a node with one child.

    Stored, the value of process 1 of 4 lies below the key `process_1-of-4`. A restore without a target gives
    all of them, in one process, too.

    Args:
        value: Any tree of leaves that this process holds whole. Its structure may differ between processes.
        divide: What a restore by another number of processes asks for this process's value. It gets the
            values of all processes that saved, each as a restore without a target gives it, the index of
            this process, and how many there are now. Without it, such a restore is refused. In a target whose
            value is None it says that any structure is right: as many processes get their values as they
            were saved.
    """

    value: T
    divide: Divide | None = None


@final
@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """The key entry of the only child, as jax prints it."""

    def __str__(self) -> str:
        return ".value"


def process_key(index: int, count: int) -> str:
    """Return the key below which the value of a process is stored."""
    return f"process_{index}-of-{count}"


def stored_info(info: ParamInfo, process: tuple[int, int]) -> ParamInfo:
    """Return where a leaf below a `PerProcess` is stored.

    Args:
        info: With a key of the kind `PROCESS`.
        process: The index of this process, and how many there are. If it is alone, there is no such key.

    Raises:
        InvalidLeafError: If it lies below two of them.
    """
    index, count = process
    at = info.kinds.index(KeyKind.PROCESS)
    if KeyKind.PROCESS in info.kinds[at + 1 :]:
        raise InvalidLeafError(info.key_path, "a PerProcess lies within another one")

    keys, kinds = ((process_key(index, count),), (KeyKind.MAPPING,)) if count > 1 else ((), ())
    return replace(
        info,
        keys=(*info.keys[:at], *keys, *info.keys[at + 1 :]),
        kinds=(*info.kinds[:at], *kinds, *info.kinds[at + 1 :]),
        own_from=at,
    )


def _flatten(node: PerProcess[Any]) -> tuple[tuple[Any, ...], Divide | None]:
    return (node.value,), node.divide


def _flatten_with_keys(node: PerProcess[Any]) -> tuple[tuple[tuple[ProcessEntry, Any], ...], Divide | None]:
    return ((ProcessEntry(), node.value),), node.divide


def _unflatten(divide: Divide | None, children: Sequence[Any]) -> PerProcess[Any]:
    return PerProcess(children[0], divide)


cast("Any", tree_util).register_pytree_with_keys(PerProcess, _flatten_with_keys, _unflatten, _flatten)


# Looked up once instead of for each step of each leaf. jax declares no types for them.
_jax: Any = tree_util
_DICT_KEY, _ATTRIBUTE_KEY = _jax.DictKey, _jax.GetAttrKey
_SEQUENCE_KEY, _FLAT_KEY = _jax.SequenceKey, _jax.FlattenedIndexKey
_SEQUENCE, _MAPPING, _PROCESS = KeyKind.SEQUENCE, KeyKind.MAPPING, KeyKind.PROCESS

ALONE: Final = (0, 1)
"""The index of a process, and how many there are."""


@dataclass(frozen=True, slots=True)
class FlatLeaf:
    """A leaf, or an empty container, and its place in the tree."""

    info: ParamInfo
    value: Any


def flatten_tree(
    tree: object,
    directory: str = "",
    process: tuple[int, int] = ALONE,
    whole: AbstractSet[int] = frozenset(),
) -> tuple[list[FlatLeaf], Any]:
    """Flatten a tree in JAX's order, with None and empty containers as leaves.

    The nodes are those of JAX: dict, list, tuple, namedtuple, and registered classes. An empty container
    of a registered class yields no leaf.

    Args:
        tree: Any PyTree, also a bare leaf.
        directory: The `directory` of every `ParamInfo`.
        process: The index of this process and how many there are, for what each has for itself.
        whole: Identities of nodes that are leaves here.

    Returns:
        The leaves, and the treedef for `jax.tree_util.tree_unflatten`.

    Raises:
        DuplicateNameError: If two leaves have the same stored name.
        SpecError: If jax cannot flatten the tree, because the keys of a dict cannot be sorted.
        InvalidLeafError: If a key contains a surrogate, which no document can hold, or a `PerProcess`
            lies within another one.
    """

    def is_whole(node: object) -> bool:
        return id(node) in whole or is_empty(node)

    try:
        pairs, treedef = _jax.tree_flatten_with_path(tree, is_leaf=is_whole if whole else is_empty)
    except (ValueError, RecursionError) as error:  # the keys of a dict cannot be sorted, or it is too deep
        raise SpecError(f"jax cannot take the tree apart: {error}") from error

    leaves: list[FlatLeaf] = []
    for path, value in pairs:
        steps = [step(entry) for entry in path]
        keys = tuple([key for key, _ in steps])
        info = ParamInfo(keys, tuple([kind for _, kind in steps]), _jax.keystr(path), directory)
        leaves.append(FlatLeaf(stored_info(info, process) if _PROCESS in info.kinds else info, value))

    check_names([leaf.info for leaf in leaves])
    return leaves, treedef


def check_names(infos: Sequence[ParamInfo]) -> None:
    """Refuse leaves whose stored names are equal or cannot be written.

    Raises:
        DuplicateNameError: If two leaves have the same stored name.
        InvalidLeafError: If a key contains a surrogate, which no document can hold.
    """
    if isinstance(infos, LeafInfos) and infos.distinct:
        return

    seen: dict[str, str] = {}
    for info in infos:
        name = info.name
        if name in seen:
            raise DuplicateNameError(name, seen[name], info.key_path)
        if not name.isascii():
            _check_unicode(info)

        seen[name] = info.key_path


def nest(infos: Sequence[ParamInfo], values: Sequence[object]) -> object:
    """Build a tree of dicts, lists and tuples from key paths alone.

    Sequence keys make a list in the order of their indices, or a tuple if the kind of the keys says so;
    all other keys make a dict. A container with mixed kinds or a missing index becomes a dict, since
    renumbering would change key paths.
    """
    return nest_columns([info.keys for info in infos], [info.kinds for info in infos], values)


def nest_columns(
    keys: Sequence[KeyPath], kinds: Sequence[tuple[KeyKind, ...]], values: Sequence[object]
) -> object:
    """As `nest`, with the keys of each value and their kinds as columns."""
    if len(keys) == 1 and not keys[0]:
        return values[0]

    nodes: dict[KeyPath, _Node] = {(): _Node()}
    for path, path_kinds, value in zip(keys, kinds, values, strict=True):
        node = nodes.get(path[:-1]) or _inner(nodes, path[:-1], path_kinds)
        node.kinds.add(path_kinds[-1])
        node.children[path[-1]] = value

    try:
        return nodes[()].build()
    except RecursionError as error:
        deepest = max(map(len, keys))
        raise SpecError(
            f"a tree of {deepest} levels cannot be built without a target; pass `like`"
        ) from error


def _inner(nodes: dict[KeyPath, _Node], path: KeyPath, kinds: tuple[KeyKind, ...]) -> _Node:
    """Return the node at `path`; create it and any missing node above it."""
    node = nodes[()]
    for depth, (key, kind) in enumerate(zip(path, kinds, strict=False), 1):
        below = nodes.get(path[:depth])
        if below is None:
            assert key not in node.children, "a leaf has children"
            below = nodes[path[:depth]] = node.children[key] = _Node()
            node.kinds.add(kind)

        node = below

    return node


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
    """Return whether a node is None or an empty dict, list or tuple."""
    return node is None or (isinstance(node, dict | list | tuple) and not node)


def _check_unicode(info: ParamInfo) -> None:
    try:
        info.name.encode()
    except UnicodeEncodeError as error:
        raise InvalidLeafError(
            info.key_path, f"a key in its path is no valid Unicode text ({error.reason}); rename it"
        ) from error


def step(entry: Any) -> tuple[str, KeyKind]:
    """Return the stored key and the kind of one of JAX's key entries.

    This cannot be cached by entry: the keys 1, 1.0 and True make equal entries with different names, and
    the entries of registered classes need not be hashable.
    """
    if isinstance(entry, _DICT_KEY):
        return str(entry.key), _MAPPING
    if isinstance(entry, _ATTRIBUTE_KEY):
        return entry.name, _MAPPING
    if isinstance(entry, _SEQUENCE_KEY):
        return str(entry.idx), _SEQUENCE
    if isinstance(entry, _FLAT_KEY):
        return str(entry.key), _SEQUENCE
    if isinstance(entry, ProcessEntry):
        return "", _PROCESS

    return str(entry), _MAPPING  # a class registered with its own key entries
