"""A tree of leaves as lines for people: alike siblings share one, and so do only children. Pure.

`blocks[0–3] ×4` stands for four siblings that differ in nothing that is shown, and `{mu,nu} ×2` for two
without numbers. What is below such a line is that of one of them.
"""

from __future__ import annotations

__all__ = ("TreeLine", "tree_lines")

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, final

from penstock.inspection.layers import Layer
from penstock.inspection.stored_leaves import LeafFacts
from penstock.inspection.texts import sharding_text

_NUMBERED: Final = re.compile(r"(\D*)(\d+)(\D*)")
_LEAST_SAVED: Final = 2  # lines; for less a fold only hides names
_MOST_NAMES: Final = 4  # of siblings without numbers, in a fold


@final
@dataclass(frozen=True, slots=True)
class TreeLine:
    """One line of a tree."""

    guide: str  #: what is drawn before the label, to the node above
    label: str  #: the last keys of its path
    n_alike: int  #: the siblings that it stands for; 1 for a line that is no fold
    leaf: LeafFacts | None  #: of a fold that of one of them; None for a node
    n_leaves: int  #: below it, of all that it stands for
    nbytes: int  #: of all that it stands for, but below a fold that of one
    stored_nbytes: int | None  #: as `nbytes`; None below a fold, where each may have another


def tree_lines(root: Layer, *, folds: bool = True) -> list[TreeLine]:
    """Return the lines of what is below a root.

    Args:
        root: Of layers down to each leaf.
        folds: Whether alike siblings share a line.
    """
    nodes = [_node_of(layer, folds) for layer in root.children]
    grouped = _folded(nodes) if folds else nodes
    lines = [line for node in grouped for line in _lines(node, "", "", in_fold=False)]
    whole = root.leaf
    if whole is None:
        return lines

    return [TreeLine("", "(the whole)", 1, whole, 1, whole.nbytes, whole.stored_nbytes), *lines]


@final
@dataclass(frozen=True, slots=True)
class _Node:
    label: str
    leaf: LeafFacts | None
    children: Sequence[_Node]
    n_leaves: int
    nbytes: int
    stored_nbytes: int
    looks: Hashable  #: equal for nodes that look alike but for their labels
    n_lines: int
    n_alike: int = 1


def _node_of(layer: Layer, folds: bool) -> _Node:
    children = [_node_of(child, folds) for child in layer.children]
    if folds:
        children = _folded(children)

    looks = (_looks_of(layer.leaf), tuple((child.label, child.n_alike, child.looks) for child in children))
    n_lines = sum(child.n_lines for child in children) + (len(children) != 1 or layer.leaf is not None)
    figures = (layer.n_leaves, layer.nbytes, layer.stored_nbytes)
    return _Node(layer.label, layer.leaf, children, *figures, looks, n_lines)


def _looks_of(leaf: LeafFacts | None) -> Hashable:
    if leaf is None:
        return None

    sharding = sharding_text(leaf.sharding)
    return leaf.kind, leaf.shape, leaf.dtype, leaf.random_key_impl, leaf.codec, sharding


def _folded(nodes: Sequence[_Node]) -> list[_Node]:
    """Return siblings with those that are alike as one, in the place of the first."""
    alike: dict[Hashable, list[int]] = {}
    for at, node in enumerate(nodes):
        found = _NUMBERED.fullmatch(node.label)
        # Without numbers only nodes are taken together: the names of leaves say what they are.
        family = (found[1], found[3]) if found else ("{", "}") if node.leaf is None else node.label
        alike.setdefault((family, node.looks), []).append(at)

    placed: dict[int, _Node] = {}
    for group in alike.values():
        if (len(group) - 1) * nodes[group[0]].n_lines < _LEAST_SAVED:
            placed |= {at: nodes[at] for at in group}
        else:
            placed[group[0]] = _fold([nodes[at] for at in group])

    return [placed[at] for at in sorted(placed)]


def _fold(group: Sequence[_Node]) -> _Node:
    first = group[0]
    return replace(
        first,
        label=_label_of([one.label for one in group]),
        n_leaves=sum(one.n_leaves for one in group),
        nbytes=sum(one.nbytes for one in group),
        stored_nbytes=sum(one.stored_nbytes for one in group),
        n_alike=len(group),
    )


def _label_of(labels: Sequence[str]) -> str:
    found = [_NUMBERED.fullmatch(label) for label in labels]
    numbered = sorted([(int(one[2]), one[2]) for one in found if one is not None])
    if len(numbered) < len(labels):
        shown = labels if len(labels) <= _MOST_NAMES else [*labels[: _MOST_NAMES - 1], "…", labels[-1]]
        return "{" + ",".join(shown) + "}"

    runs: list[str] = []
    for _, run in groupby(enumerate(numbered), lambda placed: placed[1][0] - placed[0]):
        texts = [text for _, (_, text) in run]
        runs.append(texts[0] if len(texts) == 1 else f"{texts[0]}–{texts[-1]}")

    assert found[0] is not None
    before, after = found[0][1].removesuffix("["), found[0][3].removeprefix("]")
    return f"{before}[{','.join(runs)}]{after}"


def _lines(node: _Node, guide: str, below: str, *, in_fold: bool) -> Iterator[TreeLine]:
    """Yield the line of a node, and those below it.

    Args:
        node: The node.
        guide: What is drawn before its label.
        below: What is drawn before the guides of the lines below it.
        in_fold: Whether it stands for a node below each of several alike ones.
    """
    top, label, n_alike = node, node.label, node.n_alike
    while node.leaf is None and len(node.children) == 1 and min(n_alike, node.children[0].n_alike) == 1:
        (node,) = node.children
        label += node.label if node.label.startswith("[") else f".{node.label}"
        n_alike = max(n_alike, node.n_alike)

    stored = None if in_fold else top.stored_nbytes
    yield TreeLine(guide, label, n_alike, node.leaf, top.n_leaves, top.nbytes, stored)
    for at, child in enumerate(node.children):
        is_last = at == len(node.children) - 1
        drawn, more = ("└ ", "  ") if is_last else ("├ ", "│ ")
        yield from _lines(child, below + drawn, below + more, in_fold=in_fold or n_alike > 1)
