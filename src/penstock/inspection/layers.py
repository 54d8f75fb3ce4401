"""The bytes of a tree, added up layer by layer, and drawn as a treemap. Pure.

Source:
    Bruls, Huizing, van Wijk: Squarified Treemaps (2000).
"""

from __future__ import annotations

__all__ = (
    "Layer",
    "Rectangle",
    "layers_of",
    "treemap",
    "treemap_svg",
)

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from penstock.handlers.formats.leaf_table import show_key_path
from penstock.inspection.stored_leaves import LeafFacts
from penstock.kernel.protocols.leaf import KeyKind, KeyPath
from penstock.kernel.words import counted


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
    label: str = ""  #: the last part of it in a dotted name; in brackets if it is an index
    leaf: LeafFacts | None = None  #: the leaf that it is; None for a node

    def walk(self, most_depth: int, depth: int = 0) -> Iterator[tuple[int, Layer]]:
        """Yield it and the layers below it with their depths, the largest of siblings first."""
        yield depth, self
        if depth < most_depth:
            for child in sorted(self.children, key=lambda layer: -layer.stored_nbytes):
                yield from child.walk(most_depth, depth + 1)


def layers_of(leaves: Sequence[LeafFacts], most_depth: int | None = None) -> Layer:
    """Return the root of the layers that leaves are in.

    Args:
        leaves: Of one item.
        most_depth: How deep to go; by default down to each leaf.
    """
    root = Layer("", leaf=next((leaf for leaf in leaves if not leaf.keys), None))
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
                layer.label = keys[-1] if leaf.kinds[depth - 1] is KeyKind.MAPPING else f"[{keys[-1]}]"
                layer.leaf = leaf if depth == len(leaf.keys) else None
                above.children.append(layer)

            _add(layer, leaf)

    return root


def _add(layer: Layer, leaf: LeafFacts) -> None:
    layer.nbytes += leaf.nbytes
    layer.stored_nbytes += leaf.stored_nbytes
    layer.n_leaves += 1


_LEAST: Final = 2.0  # a side in pixels; what is smaller is left out, and its room stays blank
_HEAD: Final = 16.0
_COLOURS: Final = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#edc948", "#e15759", "#9c755f")


@final
@dataclass(frozen=True, slots=True)
class Rectangle:
    """The rectangle in which a layer is drawn."""

    layer: Layer
    x: float
    y: float
    width: float
    height: float
    depth: int  #: 0 for the root
    colour: int  #: which child of the root it is in


def treemap(root: Layer, width: float, height: float, most_depth: int = 3) -> list[Rectangle]:
    """Return the rectangles of a tree, a layer before those inside of it.

    Args:
        root: Its children share the area.
        width: In pixels.
        height: In pixels.
        most_depth: How many layers are drawn inside each other.
    """
    return list(_placed(Rectangle(root, 0, 0, width, height, 0, 0), most_depth))


def treemap_svg(root: Layer, width: int = 960, height: int = 540, most_depth: int = 3) -> str:
    """Return the treemap as an SVG document. Names are escaped; each rectangle has its path as a tooltip."""
    shapes = [_shape(drawn) for drawn in treemap(root, width, height, most_depth) if drawn.depth]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Bytes of each part of the tree" font-family="sans-serif" font-size="11">'
        + "".join(shapes)
        + "</svg>\n"
    )


def _placed(around: Rectangle, most_depth: int) -> Iterator[Rectangle]:
    yield around
    head = _HEAD if around.depth else 0.0
    children = [child for child in around.layer.children if child.stored_nbytes > 0]
    width, height = around.width - 4 * bool(head), around.height - head - 2 * bool(head)
    if around.depth == most_depth or not children or width < _LEAST or height < _LEAST:
        return

    children.sort(key=lambda child: -child.stored_nbytes)
    scale = width * height / sum(child.stored_nbytes for child in children)
    areas = [child.stored_nbytes * scale for child in children]
    x, y = around.x + 2 * bool(head), around.y + head
    for at, (child, place) in enumerate(zip(children, _squarified(areas, x, y, width, height), strict=True)):
        if min(place[2], place[3]) >= _LEAST:
            colour = around.colour if around.depth else at
            yield from _placed(Rectangle(child, *place, around.depth + 1, colour), most_depth)


def _squarified(
    areas: Sequence[float], x: float, y: float, width: float, height: float
) -> list[tuple[float, float, float, float]]:
    """Divide a rectangle into areas, given largest first, that are as square as they can be."""
    places: list[tuple[float, float, float, float]] = []
    at = 0
    while at < len(areas):
        side = max(min(width, height), 1e-9)
        end = at + 1
        while end < len(areas) and _worst(areas[at : end + 1], side) <= _worst(areas[at:end], side):
            end += 1

        row = areas[at:end]
        thick = sum(row) / side
        offset = 0.0
        for area in row:
            long = area / max(thick, 1e-9)
            tall = height <= width  # the row is a column at the left
            places.append((x, y + offset, thick, long) if tall else (x + offset, y, long, thick))
            offset += long

        if height <= width:
            x, width = x + thick, width - thick
        else:
            y, height = y + thick, height - thick
        at = end

    return places


def _worst(row: Sequence[float], side: float) -> float:
    """Return the worst ratio of sides in a row of rectangles; 1 for a square."""
    total = sum(row)
    return max(side**2 * max(row) / total**2, total**2 / (side**2 * max(min(row), 1e-9)))


def _shape(drawn: Rectangle) -> str:
    layer, colour = drawn.layer, _COLOURS[drawn.colour % len(_COLOURS)]
    opacity = max(0.35, 1 - 0.2 * (drawn.depth - 1))
    label = layer.key.strip("[]'") or layer.key
    fits = int(drawn.width / 7)
    text = ""
    if drawn.height >= _HEAD and fits >= 3:
        shown = label if len(label) <= fits else label[: fits - 1] + "…"
        text = f'<text x="{drawn.x + 4:.1f}" y="{drawn.y + 12:.1f}">{_escaped(shown)}</text>'

    leaves = counted(layer.n_leaves, "leaf", "leaves")
    title = f"{layer.key_path}: {counted(layer.stored_nbytes, 'byte')} in {leaves}"
    return (
        f'<g><title>{_escaped(title)}</title><rect x="{drawn.x:.1f}" y="{drawn.y:.1f}" '
        f'width="{drawn.width:.1f}" height="{drawn.height:.1f}" fill="{colour}" fill-opacity="{opacity:.2f}" '
        f'stroke="white"/>{text}</g>'
    )


def _escaped(text: str) -> str:
    """Escape a text for XML, which has no control characters at all."""
    from html import escape  # of pictures alone

    shown = "".join([c if c.isprintable() else ascii(c)[1:-1] for c in text])
    return escape(shown)
