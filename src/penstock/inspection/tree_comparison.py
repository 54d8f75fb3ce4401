"""Compares the trees of two checkpoints: which leaves only one has, and which have another shape. Pure."""

from __future__ import annotations

__all__ = ("Pair", "TreeComparison", "compare_trees")

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from penstock.inspection.stored_leaves import LeafFacts


@final
@dataclass(frozen=True, slots=True)
class Pair:
    """A leaf that both have, under one name."""

    first: LeafFacts
    second: LeafFacts

    @property
    def is_alike(self) -> bool:
        """True if their values can be compared. A number may be stored as an array of no axes."""
        return (self.first.shape, self.first.dtype) == (self.second.shape, self.second.dtype)


@final
@dataclass(frozen=True, slots=True)
class TreeComparison:
    """The leaves of two trees."""

    only_first: Sequence[LeafFacts]
    only_second: Sequence[LeafFacts]
    changed: Sequence[Pair]  #: of another shape or dtype
    alike: Sequence[Pair]


def compare_trees(first: Sequence[LeafFacts], second: Sequence[LeafFacts]) -> TreeComparison:
    """Compare two trees by dotted names, so that a converted checkpoint has the leaves of its source."""
    theirs = {leaf.name: leaf for leaf in second}
    pairs = [Pair(leaf, theirs[leaf.name]) for leaf in first if leaf.name in theirs]
    shared = {pair.first.name for pair in pairs}
    return TreeComparison(
        [leaf for leaf in first if leaf.name not in shared],
        [leaf for leaf in second if leaf.name not in shared],
        [pair for pair in pairs if not pair.is_alike],
        [pair for pair in pairs if pair.is_alike],
    )
