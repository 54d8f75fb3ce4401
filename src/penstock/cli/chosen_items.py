"""The options `--step`, `--item` and `--only`, and what they name."""

from __future__ import annotations

__all__ = ("Chosen", "add_choice", "select", "select_of_both")

import argparse
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

from penstock.cli.completers import completed, item_names, step_numbers
from penstock.cli.terminal import CommandError
from penstock.handlers.stores.publishing.reading import read_unchanged
from penstock.inspection.looking import run_here
from penstock.inspection.stored_leaves import ItemFacts, LeafFacts, read_items
from penstock.kernel.protocols.stores import Store
from penstock.stages.planning.key_patterns import near_leaves, pattern_fits
from penstock.steps.tier_record import find_checkpoint
from penstock.stores.store_finder import store_of

T = TypeVar("T")


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add PATH and both options."""
    parser.add_argument("path", metavar="PATH", help="a directory of steps, a checkpoint, or safetensors")
    step = parser.add_argument("--step", type=int, metavar="N", help="this step (the latest)")
    item = parser.add_argument("--item", metavar="NAME", help="only this item (all)")
    completed(step, step_numbers)
    completed(item, item_names)


@final
@dataclass(frozen=True, slots=True)
class Chosen:
    """A checkpoint that a command line names, or one item of it."""

    store: Store
    path: str
    item: str | None

    @classmethod
    def by(cls, options: argparse.Namespace, *, farthest: bool = False) -> Chosen:
        """Return what the options name; with `farthest` as it is stored in the root, if it is there.

        Raises:
            PenstockError: If there is none.
        """
        store, path = find_checkpoint(*store_of(options.path), options.step, farthest=farthest)
        return cls(store, path, options.item)

    @classmethod
    def at(cls, given: str, step: int | None, item: str | None) -> Chosen:
        """Return the checkpoint at a path, or a step there, which may be in a tier of the run alone."""
        store, path = find_checkpoint(*store_of(given), step)
        return cls(store, path, item)

    def described(self) -> Sequence[ItemFacts]:
        """Describe the items, without an event loop where that is possible.

        Raises:
            PenstockError: If there are none, or a document is damaged.
        """
        return run_here(self.store, lambda threads: read_items(self.store, threads, self.path, self.item))

    async def items(self) -> Sequence[ItemFacts]:
        """Describe the items.

        Raises:
            PenstockError: If there are none, or a document is damaged.
        """
        from penstock.kernel.concurrency.threads import Threads  # only with an event loop

        return await read_items(self.store, Threads(), self.path, self.item)

    async def read(self, read: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `read`, which reads this checkpoint from one of its states."""
        from penstock.kernel.concurrency.threads import Threads  # only with an event loop

        return await read_unchanged(self.store, Threads(), self.path, lambda _: read())


def select(items: Sequence[ItemFacts], only: Sequence[str] | None) -> Sequence[ItemFacts]:
    """Return the items with the leaves that key paths or patterns over dotted names select; all for None.

    Items of which no leaf is selected are left out.

    Raises:
        CommandError: If a pattern selects no leaf of any item; it names what is near.
    """
    return [item for item in _selected(items, only) if item.leaves or only is None]


def select_of_both(
    firsts: Sequence[ItemFacts], seconds: Sequence[ItemFacts], only: Sequence[str] | None
) -> tuple[Sequence[ItemFacts], Sequence[ItemFacts]]:
    """Return the items of two checkpoints with the leaves that `only` selects, which one of them may lack.

    Raises:
        CommandError: As `select`, if neither has such a leaf.
    """
    both = _selected([*firsts, *seconds], only)
    return both[: len(firsts)], both[len(firsts) :]


def _selected(items: Sequence[ItemFacts], only: Sequence[str] | None) -> Sequence[ItemFacts]:
    if only is None:
        return items

    chosen = [replace(item, leaves=[leaf for leaf in item.leaves if _fits(leaf, only)]) for item in items]
    selected = [leaf for item in chosen for leaf in item.leaves]
    for pattern in only:
        if not any(_fits(leaf, [pattern]) for leaf in selected):
            hint = near_leaves(pattern, [leaf.keys for item in items for leaf in item.leaves])
            raise CommandError(f"{items[0].path}: no leaf matches {pattern!r}; {hint}")

    return chosen


def _fits(leaf: LeafFacts, only: Sequence[str]) -> bool:
    # What is the name of a leaf is no pattern, whatever characters it has.
    return any(one == leaf.name or pattern_fits(one, leaf.name, leaf.keys) for one in only)
