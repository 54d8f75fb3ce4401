"""The options `--step` and `--item`, and what they name."""

from __future__ import annotations

__all__ = ("add_choice", "chosen_items")

import argparse
from collections.abc import Sequence

from penstock.inspection.places import checkpoint_path, store_of
from penstock.inspection.stored_leaves import ItemFacts, read_items


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
    store, path = store_of(options.path)
    return read_items(store, checkpoint_path(store, path, options.step), options.item)
