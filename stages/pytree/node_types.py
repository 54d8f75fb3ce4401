"""Which containers of a tree are tuples, and of which class: noted where it is to be recorded."""

from __future__ import annotations

__all__ = ("NodeTypes",)

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, cast, final

from jax import tree_util

from penstock.kernel.protocols.leaf import ParamInfo
from penstock.stages.pytree.flattening import is_empty

_jax: Any = tree_util


@final
@dataclass(frozen=True, slots=True, eq=False)
class NodeTypes:
    """Adds `ParamInfo.nodes`, and remembers that of the last few structures. Thread-safe.

    Args:
        most: Structures to remember.
    """

    most: int = 8
    _known: list[tuple[object, tuple[ParamInfo, ...]]] = field(
        default_factory=list["tuple[object, tuple[ParamInfo, ...]]"], init=False, repr=False
    )
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)

    def of(self, tree: object, infos: tuple[ParamInfo, ...]) -> tuple[ParamInfo, ...]:
        """Return `infos` with the types of all nodes on the way to each leaf.

        Args:
            tree: What was taken apart.
            infos: As `StructureCache.flatten` gave them: the same object stands for the same containers.
        """
        with self._lock:
            known = next((noted for given, noted in self._known if given is infos), None)
        if known is not None:
            return known

        noted = tuple(
            [replace(info, nodes=nodes) for info, nodes in zip(infos, _nodes(tree, ()), strict=True)]
        )
        with self._lock:
            self._known[:] = [*self._known, (infos, noted)][-self.most :]

        return noted


def _nodes(node: object, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield, for each leaf in jax's order, the types of the nodes on the way to it, and its own."""
    on_the_way = (*above, _type_of(node))
    children = None if is_empty(node) else _children(node)
    if children is None:
        yield on_the_way
        return

    for child in children:
        yield from _nodes(child, on_the_way)


def _children(node: object) -> Sequence[object] | None:
    """What is directly in a node; None if it is a leaf."""

    def is_child(inner: object) -> bool:
        return inner is not node

    children = cast("Sequence[object]", _jax.tree_leaves(node, is_leaf=is_child))
    return None if len(children) == 1 and children[0] is node else children


def _type_of(node: object) -> str:
    if not isinstance(node, tuple):
        return ""

    cls = cast("type", type(cast("object", node)))
    return f"{cls.__module__}:{cls.__name__}" if hasattr(cls, "_fields") else "tuple"
