"""Rules applied to the documents of a checkpoint alone: each leaf of the result, and the way it is made."""

from __future__ import annotations

__all__ = ("PlannedLeaf", "preview")

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

from penstock.checkpointer.checkpointer import Path
from penstock.config.config import Config
from penstock.handlers.formats.npz_archive import is_npz
from penstock.handlers.layouts.discovery import finished_steps
from penstock.handlers.stores.publishing.paths import path_or_url
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.protocols.layouts import StoredCheckpoint
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.stores import Store
from penstock.kernel.rules import Rule, Rules
from penstock.rewriting.stored_items import ItemsReader
from penstock.stages.rules.derived import Derivation
from penstock.stores.store_finder import StoreFinder


@final
@dataclass(frozen=True, slots=True)
class PlannedLeaf:
    """A leaf that rules give.

    Attributes:
        name: Its dotted name, after that of the item that it is in, if there are items.
        shape: Of the array; None of what is no array.
        dtype: Of the array.
        nbytes: Of the array.
        sources: The names of the stored leaves that it is made of.
        rules: The rules that make it, in order; none if it is stored so.
        read_bytes: What is read for it.
        streams: True if it is read in the order in which it is stored. What is not is gathered: read in
            tiles, whose elements are moved to their places in memory.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    nbytes: int
    sources: tuple[str, ...]
    rules: tuple[Rule, ...]
    read_bytes: int
    streams: bool


async def preview(
    source: Path,
    rules: Sequence[Rule],
    *,
    item: str | None = None,
    split: str | None = ".",
    store: Store | None = None,
    config: Config | Path | None = None,
) -> Sequence[PlannedLeaf]:
    """Return what `convert` would make with these rules. Reads no array bytes.

    Args:
        source: As for `convert`; of a directory of steps, the latest is taken.
        rules: As for `convert`, and so are all that follow.
        item: Only this item.
        split: What separates the keys in names.
        store: Where the source is.
        config: Options.

    Raises:
        RulesError: If the rules and the source do not fit; it lists every problem.
        PenstockError: If the source cannot be opened.
    """
    options = config if isinstance(config, Config) else Config.load(config)
    path, given = path_or_url(source), Rules.of(rules)
    there = StoreFinder(store, options.store).at(path)
    return await Threads().run(_planned, there, path, item, split, given)


def _planned(
    store: Store, path: str, item: str | None, split: str | None, rules: Rules
) -> Sequence[PlannedLeaf]:
    steps = None if is_npz(store, path) else finished_steps(store, path)
    if steps:
        path = os.path.join(path, steps[-1])

    found: list[PlannedLeaf] = []
    ItemsReader(store, partial(_note, found, rules), split, rules=rules).read(path, item)
    return found


def _note(
    found: list[PlannedLeaf], rules: Rules, place: str, opened: StoredCheckpoint, leaf: StoredLeaf
) -> object:
    spec, name = leaf.spec, leaf.info.name
    about = leaf.detail if isinstance(leaf.detail, Derivation) else Derivation((name,))
    made = leaf.detail is about and about.number is None
    found.append(
        PlannedLeaf(
            f"{place}.{name}" if place else name,
            spec.shape,
            spec.dtype or spec.typestr,
            spec.nbytes,
            about.sources,
            tuple([rules[number] for number in about.rules]),
            about.read_bytes() if made else spec.nbytes,
            about.streams() if made else True,
        )
    )
    return None
