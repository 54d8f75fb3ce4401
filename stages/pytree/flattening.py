"""Flattens a tree by key path, with the values that each process has; nests leaves back into a tree.

`StructureCache` names the leaves once for each structure: training saves and restores the same tree again
and again. Flattening costs jax a fraction of a microsecond for each leaf, and computing key paths ten. Only
key paths are kept, never a value or anything else that a node holds.
"""

from __future__ import annotations

__all__ = (
    "ALONE",
    "PROCESS_KEY",
    "Divide",
    "FlatLeaf",
    "NodeTypes",
    "PerProcess",
    "StructureCache",
    "check_levels",
    "check_names",
    "flatten_tree",
    "is_empty",
    "nest",
    "nest_columns",
    "step",
    "stored_info",
)

import re
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast, final

from jax import tree_util

from penstock.kernel.errors import DuplicateNameError, InvalidLeafError, SpecError
from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity
from penstock.kernel.protocols.leaf import Children, ContainerNode, KeyKind, KeyPath, LeafInfos, ParamInfo

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

    Stored, the value of process 1 of 4 is below the key `process_1-of-4`. A restore without a target gives
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

    def __post_init__(self) -> None:
        if not (self.divide is None or callable(self.divide)):
            raise SpecError(f"divide is a function, not {self.divide!r}")


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
        InvalidLeafError: If it is below two of them.
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
            is within another one.
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
            node.inner.append(key)
            node.kinds.add(kind)

        node = below

    return node


class _Node:
    __slots__ = ("children", "inner", "kinds")

    def __init__(self) -> None:
        self.children: dict[str, object] = {}
        self.inner: list[str] = []  # the keys of nodes
        self.kinds: set[KeyKind] = set()

    def build(self) -> object:
        built = self.children
        for key in self.inner:
            built[key] = cast("_Node", built[key]).build()
        if len(self.kinds) != 1 or self.kinds == {_MAPPING}:
            return built

        indices = [str(index) for index in range(len(built))]
        if built.keys() != set(indices):
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


_BYTES_OF_A_LEAF: Final = 100  # its key in two lists, and the text where that is not the caller's own
_LEAF: Final = "leaf"
_SORTED: Final = "its keys, sorted"
_ORDERED: Final = "its keys, as they are"
_NUMBERED: Final = "numbers"
_ASK: Final = "what its class says"

# Two equal keys have the same name if they have the same type and it is exactly one of these.
_PLAIN_KEYS: Final[frozenset[type]] = frozenset({str, int, bool})
_ONLY_TEXT: Final[frozenset[type]] = frozenset({str})

_Step: TypeAlias = tuple[str, KeyKind, str]
"""A key as it is stored, its kind, and its text in the printed key path."""

_Steps: TypeAlias = Sequence[_Step]
_Mark: TypeAlias = tuple[int, object, object, object]
"""A container: the number of leaves before it, its class, its keys or length, and the types of its keys."""


_Key: TypeAlias = tuple[int, tuple[_Mark, ...], tuple[int, int]]


@final
class StructureCache:
    """Flattens trees, and remembers the key paths of the last few structures. Thread-safe.

    Two trees share `ParamInfo`s only if they have containers of the same class in the same places, with
    keys of the same types and values, and if each registered class gives its children the same names.
    The names are asked for each time. Whether nodes compare equal does not matter.

    Args:
        kept: The cache, of `RunCaches`.
    """

    __slots__ = ("_known",)

    def __init__(self, kept: BoundedCache[_Key, Sequence[ParamInfo]]) -> None:
        self._known = kept

    def flatten(
        self, tree: object, process: tuple[int, int] = ALONE
    ) -> tuple[Sequence[ParamInfo], list[Any], Any]:
        """Flatten a tree as `flatten_tree` does, with the same result and the same errors.

        Returns:
            The infos of the leaves (the same object as for an earlier tree of this structure, if that is
            still cached), the leaves, and this tree's own treedef.
        """
        walk = _Walk()
        leaves, treedef = walk.flatten(tree)
        if not walk.plain:
            return _by_path(tree, process)

        marks = tuple(walk.marks)
        key = len(leaves), marks, process
        infos = self._known.get(key)
        if infos is None:
            infos = _infos(marks, len(leaves))
            if infos is None:
                return _by_path(tree, process)
            if any(cls is PerProcess for _, cls, _, _ in marks):
                infos = tuple(
                    [stored_info(info, process) if _PROCESS in info.kinds else info for info in infos]
                )

            check_names(infos)
            self._known.put(key, infos, _BYTES_OF_A_LEAF * len(infos))

        return infos, leaves, treedef


def check_levels(tree: object) -> None:
    """Refuse a tree that jax could not take apart without an error that harms what comes after it.

    Raises:
        SpecError: If it has too many levels, or the keys of a dict cannot be sorted.
    """
    _Walk().flatten(tree)


def _by_path(tree: object, process: tuple[int, int]) -> tuple[Sequence[ParamInfo], list[Any], Any]:
    flat, treedef = flatten_tree(tree, process=process)
    return tuple([found.info for found in flat]), [found.value for found in flat], treedef


_LEVELS_OF_OTHERS: Final = 64
"""How deep calls may go next to the levels of a tree: those above the walk, and those that it makes."""


@final
class _Walk:
    """Visits every node of a tree in jax's order: jax calls `visit` to ask whether a node is a leaf.

    A tree with too many levels is not entered further. jax would raise a RecursionError, and after any error
    that it raises, this thread could call less deeply for as long as it lives: jaxlib does not count its
    levels back, so that the saves that come after it fail, too.
    """

    __slots__ = ("_kinds", "_left", "_most", "_n_before", "_n_leaves", "_too_deep", "marks", "plain")

    def __init__(self) -> None:
        self.marks: list[_Mark] = []
        self.plain = True  #: whether the marks determine the structure
        self._n_leaves = 0
        self._left: list[int] = []  # of each container that is being visited: how many children are to come
        self._n_before = 0  # leaves that are counted there
        self._most = sys.getrecursionlimit() - _LEVELS_OF_OTHERS
        self._too_deep = False
        # Whether a class is a node type is the same for all its instances. But a class may be registered
        # between two walks, so this is not kept from one walk to the next.
        self._kinds: dict[type, str] = {
            dict: _SORTED,
            defaultdict: _SORTED,
            OrderedDict: _ORDERED,
            list: _NUMBERED,
            tuple: _NUMBERED,
            type(None): _LEAF,
        }

    def flatten(self, tree: object) -> tuple[list[Any], Any]:
        """Return the leaves of a tree, and its treedef.

        Raises:
            SpecError: If it has too many levels, or the keys of a dict cannot be sorted.
        """
        try:
            leaves, treedef = _jax.tree_flatten(tree, is_leaf=self.visit)
        except ValueError as error:  # the keys of a dict cannot be sorted
            raise SpecError(f"jax cannot take the tree apart: {error}") from error

        if self._too_deep:
            raise SpecError(
                f"the tree has more than {self._most} levels, or contains itself; put what lies so deep into "
                "lists or stacked arrays, or raise sys.setrecursionlimit"
            )

        return leaves, treedef

    def visit(self, node: Any) -> bool:
        """Record a node. Returns whether penstock treats it as a leaf, as it does empty containers."""
        cls: type = type(cast("object", node))
        kind = self._kinds.get(cls)
        if kind is _LEAF:
            self._n_leaves += 1
            return True
        if kind is None:
            kind = self._kinds[cls] = _LEAF if _jax.all_leaves([node]) else _ASK
        if kind is _LEAF or is_empty(node):
            self._n_leaves += 1
            return True

        if kind is _NUMBERED:
            n_children = len(node)
            self.marks.append((self._n_leaves, cls, n_children, None))
        elif kind is _ASK:
            children = _named(node)
            n_children = len(children)
            self.marks.append((self._n_leaves, cls, children, None))
        else:
            n_children = len(node)
            types: set[type] = set(map(type, node))
            if types <= _ONLY_TEXT:
                self.marks.append((self._n_leaves, cls, tuple(node), None))
            elif types <= _PLAIN_KEYS:
                self.marks.append((self._n_leaves, cls, tuple(node), tuple(map(type, node))))
            else:
                self.plain = False

        return self._ends_at(n_children)

    def _ends_at(self, n_children: int) -> bool:
        """Note a container; return whether it is too deep for its content to be visited."""
        left, n_gone = self._left, self._n_leaves - self._n_before
        self._n_before = self._n_leaves
        while left:  # the leaves since the last container belong to the innermost ones
            taken = min(n_gone, left[-1])
            left[-1] -= taken
            n_gone -= taken
            if left[-1]:
                left[-1] -= 1  # this container
                break

            left.pop()

        left.append(n_children)
        if len(left) > self._most:
            self._too_deep = True

        return self._too_deep


def _named(node: object) -> tuple[_Step, ...]:
    """Return the names of a node's children, as its registered class gives them to jax."""

    def is_child(inner: object) -> bool:
        return inner is not node

    pairs, _ = _jax.tree_flatten_with_path(node, is_leaf=is_child)
    return tuple([(*step(path[0]), _jax.keystr(path)) for path, _ in pairs])


def _children(mark: _Mark) -> Children:
    """Return the names of a container's children, in jax's order."""
    _, cls, children, types = mark
    if isinstance(children, int):
        numbers = range(children)
        return Children(list(map(str, numbers)), [_SEQUENCE] * children, lambda at: f"[{at}]")

    keys: Any = children
    if cls is OrderedDict or cls is dict or cls is defaultdict:
        found: list[Any] = list(keys) if cls is OrderedDict else sorted(keys)
        texts = found if types is None else list(map(str, found))
        return Children(texts, [_MAPPING] * len(found), lambda at: f"[{found[at]!r}]")

    steps: _Steps = keys
    shown = [text for _, _, text in steps]
    return Children([key for key, _, _ in steps], [kind for _, kind, _ in steps], shown.__getitem__)


def _is_distinct(mark: _Mark, keys: Sequence[str]) -> bool:
    """Return whether distinct children have distinct names, into which a joined name can be cut again."""
    _, _, children, types = mark
    if isinstance(children, int):
        return True

    text = "".join(keys)
    # Keys of a dict that are all texts differ; those of other types may be spelt alike.
    only_text = types is None and not (keys and isinstance(cast("Sequence[object]", children)[0], tuple))
    return text.isascii() and "." not in text and (only_text or len(set(keys)) == len(keys))


def _infos(marks: Sequence[_Mark], n_leaves: int) -> Sequence[ParamInfo] | None:
    """Compute the places of all leaves from the marks; None if they do not determine it."""
    if not marks:
        return (ParamInfo((), (), ""),) if n_leaves == 1 else None

    runs: list[tuple[int, ContainerNode, int]] = []
    distinct = True
    n_found = 0
    following = iter(marks)
    stack: list[tuple[ContainerNode, int]] = []  # each container, and the number of its next child
    inner = next(following, None)
    opened: ParamInfo | None = ParamInfo((), (), "")
    while inner is not None or stack:
        if inner is not None and opened is not None:
            children = _children(inner)
            distinct = distinct and _is_distinct(inner, children.keys)
            stack.append((ContainerNode(opened.keys, opened.kinds, opened.key_path, children), 0))
            inner, opened = next(following, None), None

        if not stack:
            return None

        node, at = stack.pop()
        left = len(node.children.keys) - at
        count = min(left, (n_leaves if inner is None else inner[0]) - n_found)
        if count:
            runs.append((n_found, node, at))
            n_found += count
        if count < left:  # the next child is a container
            if inner is None:
                return None

            opened = node.info(at + count)
            stack.append((node, at + count + 1))

    return LeafInfos(runs, n_leaves, distinct=distinct) if n_found == n_leaves else None


_TYPES_OF_A_LEAF_BYTES: Final = 300


@final
class NodeTypes:
    """Adds `ParamInfo.nodes`, and caches the results of the last few structures. Thread-safe.

    Args:
        kept: The cache, of `RunCaches`.
    """

    __slots__ = ("_known",)

    def __init__(self, kept: BoundedCache[ByIdentity, Sequence[ParamInfo]]) -> None:
        self._known = kept

    def of(self, tree: object, infos: Sequence[ParamInfo]) -> Sequence[ParamInfo]:
        """Return `infos` with the types of all nodes on the path to each leaf.

        Args:
            tree: The tree that was flattened.
            infos: As returned by `StructureCache.flatten`. The same object means the same containers, so
                it is the key of the cache.
        """

        def make() -> Sequence[ParamInfo]:
            rows = zip(infos, _nodes(tree, ()), strict=True)
            return tuple([replace(info, nodes=_with_keys(nodes, info)) for info, nodes in rows])

        return self._known.get_or_make(
            ByIdentity(infos), make, lambda noted: _TYPES_OF_A_LEAF_BYTES * len(noted)
        )


def _with_keys(nodes: tuple[str, ...], info: ParamInfo) -> tuple[str, ...]:
    """Leave out a `PerProcess` that has no key, because there is one process."""
    absent = len(nodes) - len(info.keys) - 1
    return (
        nodes
        if not absent or info.own_from is None
        else (*nodes[: info.own_from], *nodes[info.own_from + absent :])
    )


def _nodes(node: object, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield for each leaf, in jax's order, the types of the nodes on its path, with its own type last."""
    on_the_way = (*above, _type_of(node))
    children = None if is_empty(node) else _direct_children(node)
    if children is None:
        yield on_the_way
        return

    for child in children:
        yield from _nodes(child, on_the_way)


def _direct_children(node: object) -> Sequence[object] | None:
    """Return the direct children of a node; None for a leaf."""

    def is_child(inner: object) -> bool:
        return inner is not node

    children = cast("Sequence[object]", _jax.tree_leaves(node, is_leaf=is_child))
    return None if len(children) == 1 and children[0] is node else children


def _type_of(node: object) -> str:
    if not isinstance(node, tuple):
        return ""

    cls = cast("type", type(cast("object", node)))
    return f"{cls.__module__}:{cls.__name__}" if hasattr(cls, "_fields") else "tuple"
