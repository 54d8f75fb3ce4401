"""The options `--step`, `--item` and `--only`, and what they name."""

from __future__ import annotations

__all__ = ("Chosen", "add_choice", "fitting")

import argparse
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

from penstock.handlers.layouts.discovery import checkpoint_path
from penstock.handlers.stores.publishing.reading import read_unchanged
from penstock.inspection.stored_leaves import ItemFacts, LeafFacts, read_items
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.protocols.stores import Store
from penstock.stages.planning.key_patterns import pattern_fits
from penstock.stores.store_finder import store_of

T = TypeVar("T")


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add PATH and both options."""
    parser.add_argument("path", metavar="PATH", help="a directory of steps, a checkpoint, or safetensors")
    parser.add_argument("--step", type=int, metavar="N", help="this step (the latest)")
    parser.add_argument("--item", metavar="NAME", help="only this item (all)")


@final
@dataclass(frozen=True, slots=True)
class Chosen:
    """A checkpoint that a command line names, or one item of it."""

    store: Store
    path: str
    item: str | None

    @classmethod
    def by(cls, options: argparse.Namespace) -> Chosen:
        """Return what the options name.

        Raises:
            PenstockError: If there is none.
        """
        return cls.at(options.path, options.step, options.item)

    @classmethod
    def at(cls, given: str, step: int | None, item: str | None) -> Chosen:
        """Return the checkpoint at a path, or a step there."""
        store, path = store_of(given)
        return cls(store, checkpoint_path(store, path, step), item)

    async def items(self) -> Sequence[ItemFacts]:
        """Describe the items.

        Raises:
            PenstockError: If there are none, or a document is damaged.
        """
        return await read_items(self.store, Threads(), self.path, self.item)

    async def read(self, read: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `read`, which reads this checkpoint from one of its states."""
        return await read_unchanged(self.store, Threads(), self.path, lambda _: read())


def fitting(leaves: Sequence[LeafFacts], only: Sequence[str] | None) -> Sequence[LeafFacts]:
    """Return the leaves that key paths or patterns over dotted names select; all of them for None."""
    if only is None:
        return leaves

    # What is the name of a leaf is no pattern, whatever characters it has.
    return [leaf for leaf in leaves if any(one == leaf.name or _fits(leaf, one) for one in only)]


def _fits(leaf: LeafFacts, pattern: str) -> bool:
    return pattern_fits(pattern, leaf.name, leaf.keys)
