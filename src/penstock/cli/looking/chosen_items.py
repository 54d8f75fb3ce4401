"""The options `--step`, `--item` and `--only`, and what they name."""

from __future__ import annotations

__all__ = ("add_choice", "chosen_at", "chosen_items", "fitting")

import argparse
from collections.abc import Sequence

from penstock.handlers.layouts.discovery import checkpoint_path
from penstock.inspection.places import store_of
from penstock.inspection.stored_leaves import ItemFacts, LeafFacts, read_items
from penstock.stages.planning.key_patterns import pattern_fits


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add PATH and both options."""
    parser.add_argument("path", metavar="PATH", help="a directory of steps, a checkpoint, or safetensors")
    parser.add_argument("--step", type=int, metavar="N", help="this step (the latest)")
    parser.add_argument("--item", metavar="NAME", help="only this item (all)")


def chosen_items(options: argparse.Namespace) -> Sequence[ItemFacts]:
    """Describe the items that the command line names.

    Raises:
        PenstockError: If there are none, or a document is damaged.
    """
    return chosen_at(options.path, options.step, options.item)


def chosen_at(given: str, step: int | None, item: str | None) -> Sequence[ItemFacts]:
    """Describe the items of the checkpoint at a path, or of a step there; or one of them."""
    store, path = store_of(given)
    return read_items(store, checkpoint_path(store, path, step), item)


def fitting(leaves: Sequence[LeafFacts], only: Sequence[str] | None) -> Sequence[LeafFacts]:
    """Return the leaves that key paths or patterns over dotted names select; all of them for None."""
    if only is None:
        return leaves

    # What is the name of a leaf is no pattern, whatever characters it has.
    return [leaf for leaf in leaves if any(one == leaf.name or _fits(leaf, one) for one in only)]


def _fits(leaf: LeafFacts, pattern: str) -> bool:
    return pattern_fits(pattern, leaf.name, leaf.keys)
