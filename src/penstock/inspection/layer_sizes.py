"""The room that each part of a tree takes: the bytes of leaves, added up layer by layer. Pure."""

from __future__ import annotations

__all__ = ("Layer", "layers_of")

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from penstock.handlers.formats.leaf_table import show_key_path
from penstock.inspection.stored_leaves import LeafFacts
from penstock.kernel.protocols.leaf import KeyPath


@final
@dataclass(slots=True)
class Layer:
    """A node of the tree, with all that is below it."""

    key_path: str  #: empty for the root
    key: str = ""  #: the last part of it, as it is printed in a key path
    nbytes: int = 0  #: uncompressed
    stored_nbytes: int = 0
    n_leaves: int = 0
    children: list[Layer] = field(default_factory=list["Layer"])

    def walk(self, most_depth: int, depth: int = 0) -> Iterator[tuple[int, Layer]]:
        """Yield it and the layers below it with their depths, the largest of siblings first."""
        yield depth, self
        if depth < most_depth:
            for child in sorted(self.children, key=lambda layer: -layer.stored_nbytes):
                yield from child.walk(most_depth, depth + 1)


def layers_of(leaves: Sequence[LeafFacts], most_depth: int | None = None) -> Layer:
    """Return the root of the layers that leaves lie in.

    Args:
        leaves: Of one item.
        most_depth: How deep to go; by default down to each leaf.
    """
    root = Layer("")
    known: dict[KeyPath, Layer] = {(): root}
    for leaf in leaves:
        _add(root, leaf)
        for depth in range(1, min(len(leaf.keys), len(leaf.keys) if most_depth is None else most_depth) + 1):
            keys = leaf.keys[:depth]
            layer = known.get(keys)
            if layer is None:
                above = known[keys[:-1]]
                key = show_key_path(keys[-1:], leaf.kinds[depth - 1 : depth])
                layer = known[keys] = Layer(above.key_path + key, key)
                above.children.append(layer)

            _add(layer, leaf)

    return root


def _add(layer: Layer, leaf: LeafFacts) -> None:
    layer.nbytes += leaf.nbytes
    layer.stored_nbytes += leaf.stored_nbytes
    layer.n_leaves += 1
