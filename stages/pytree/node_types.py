"""Finds which containers of a tree are tuples, and their classes, for layouts that record it."""

from __future__ import annotations

__all__ = ("NodeTypes",)

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, cast, final

from jax import tree_util

from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity
from penstock.kernel.protocols.leaf import ParamInfo
from penstock.stages.pytree.flattening import is_empty

_jax: Any = tree_util
_BYTES_OF_A_LEAF: Final = 300


@final
class NodeTypes:
    """Adds `ParamInfo.nodes`, and caches the results of the last few structures. Thread-safe.

    Args:
        most: Structures to remember.
    """

    __slots__ = ("_known",)

    def __init__(self, most: int = 8) -> None:
        self._known: BoundedCache[ByIdentity, Sequence[ParamInfo]] = BoundedCache(most)

    @property
    def caches(self) -> Sequence[BoundedCache[Any, Any]]:
        """See `Caching`."""
        return (self._known,)

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

        return self._known.get_or_make(ByIdentity(infos), make, lambda noted: _BYTES_OF_A_LEAF * len(noted))


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
    children = None if is_empty(node) else _children(node)
    if children is None:
        yield on_the_way
        return

    for child in children:
        yield from _nodes(child, on_the_way)


def _children(node: object) -> Sequence[object] | None:
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
