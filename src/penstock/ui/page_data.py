"""The trees of checkpoints and their differences, as JSON values.

Names and texts from a checkpoint have no control characters in them. What is not `async` blocks.
"""

from __future__ import annotations

__all__ = ("At", "differences", "tree_data")

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import anyio

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.handlers.layouts.discovery import find_place
from penstock.handlers.stores.publishing.reading import Reading, read_unchanged
from penstock.inspection.layers import Rectangle, layers_of, treemap
from penstock.inspection.leaf_values import compare_values, read_values
from penstock.inspection.step_listing import paths_by_name
from penstock.inspection.stored_leaves import (
    ItemFacts,
    LeafFacts,
    Pair,
    TreeComparison,
    compare_trees,
    read_items,
)
from penstock.inspection.texts import one_line, shape_text, sharding_text
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import NotACheckpointError
from penstock.kernel.protocols.leaf import KeyPath
from penstock.kernel.protocols.stores import Store
from penstock.kernel.words import counted
from penstock.steps.tier_record import levels_of

_MOST_LEAVES: Final = 2000  # in a table; the page says how many there are
_MOST_ROWS: Final = 200
_GROUP_BYTES: Final = 64 * 2**20

At: TypeAlias = tuple[Store, str, str]
"""A checkpoint: the store, the path of the run, and its name in that."""

Compared: TypeAlias = tuple[ItemFacts, ItemFacts, TreeComparison]
"""An item of each of two checkpoints, and how their trees differ."""


async def tree_data(store: Store, path: str, name: str, width: int, height: int) -> dict[str, Any]:
    """Return the items of one checkpoint with their leaves, and a treemap of so many pixels.

    Raises:
        NotACheckpointError: If the run has no such step.
    """
    threads = Threads()
    there, checkpoint = await threads.run(_place_of, store, path, name)
    items = await read_items(there, threads, checkpoint)

    def drawn() -> list[dict[str, Any]]:
        return [_item(item, width, height) for item in items]

    return {"name": one_line(name), "items": await threads.run(drawn)}


async def differences(first: At, second: At, *, values: bool) -> dict[str, Any]:
    """Return how two checkpoints differ; in structure alone, or in values, too, which reads all of both.

    Raises:
        PenstockError: If one of them is not there, or cannot be read.
    """
    threads = Threads()
    (store, ours), (other_store, theirs) = [await threads.run(_place_of, *each) for each in (first, second)]

    async def compare(_: Reading) -> tuple[list[Compared], list[dict[str, Any]]]:
        items = await read_items(store, threads, ours), await read_items(other_store, threads, theirs)
        trees = [(one, other, compare_trees(one.leaves, other.leaves)) for one, other in _paired(*items)]
        return trees, await _values(trees) if values else []

    async def compare_with_other(_: Reading) -> tuple[list[Compared], list[dict[str, Any]]]:
        return await read_unchanged(other_store, threads, theirs, compare)

    trees, found = await read_unchanged(store, threads, ours, compare_with_other)
    rows = [row for _, _, tree in trees for row in _structure(tree)]
    return {
        "structure": rows[:_MOST_ROWS],
        "n_structure": len(rows),
        "values": found[:_MOST_ROWS] if values else None,
        "n_values": len(found),
        "n_alike": sum(len(tree.alike) for _, _, tree in trees) - len(found),
    }


def _place_of(store: Store, path: str, name: str) -> tuple[Store, str]:
    """Return where a checkpoint of a run is: in the root, or else in the nearest tier that has it."""
    found = paths_by_name(store, find_place(store, path)).get(name)
    if found is not None:
        return store, found

    for level in levels_of(store, path):
        if name in level.steps.values() and level.store is not None:
            return level.store, os.path.join(level.path, name)

    raise NotACheckpointError(path, f"has no checkpoint {name!r}")


def _item(item: ItemFacts, width: int, height: int) -> dict[str, Any]:
    root = layers_of(item.leaves)
    drawn = [_rectangle(shape) for shape in treemap(root, width, height) if shape.depth]
    return {
        "name": one_line(item.name),
        "n_leaves": len(item.leaves),
        "nbytes": item.nbytes,
        "stored_nbytes": item.stored_nbytes,
        "leaves": [_leaf(leaf) for leaf in item.leaves[:_MOST_LEAVES]],
        "rectangles": drawn,
    }


def _rectangle(drawn: Rectangle) -> dict[str, Any]:
    layer = drawn.layer
    place = {name: round(getattr(drawn, name), 1) for name in ("x", "y", "width", "height")}
    leaves = counted(layer.n_leaves, "leaf", "leaves")
    title = f"{layer.key_path}: {counted(layer.stored_nbytes, 'byte')} in {leaves}"
    label = one_line(layer.key.strip("[]'"))
    return {**place, "depth": drawn.depth, "colour": drawn.colour, "label": label, "title": one_line(title)}


def _leaf(leaf: LeafFacts) -> dict[str, Any]:
    return {
        "key_path": one_line(leaf.key_path or "(the whole)"),
        "kind": one_line(leaf.kind if leaf.random_key_impl is None else "random key"),
        "shape": shape_text(leaf.shape),
        "dtype": one_line(leaf.dtype),
        "sharding": one_line(sharding_text(leaf.sharding)),
        "nbytes": leaf.nbytes,
        "stored_nbytes": leaf.stored_nbytes,
        "codec": one_line(leaf.codec or ""),
    }


def _paired(ours: Sequence[ItemFacts], theirs: Sequence[ItemFacts]) -> list[tuple[ItemFacts, ItemFacts]]:
    if len(ours) == len(theirs) == 1:
        return [(ours[0], theirs[0])]

    by_name = {item.name: item for item in theirs}
    return [(item, by_name[item.name]) for item in ours if item.name in by_name]


def _structure(tree: TreeComparison) -> list[dict[str, str]]:
    rows = [("first", leaf, _kind(leaf), "") for leaf in tree.only_first]
    rows += [("second", leaf, "", _kind(leaf)) for leaf in tree.only_second]
    rows += [("changed", pair.first, _kind(pair.first), _kind(pair.second)) for pair in tree.changed]
    return [
        {
            "what": what,
            "key_path": one_line(leaf.key_path),
            "first": one_line(ours),
            "second": one_line(theirs),
        }
        for what, leaf, ours, theirs in rows
    ]


def _kind(leaf: LeafFacts) -> str:
    return f"{leaf.dtype or leaf.kind} {shape_text(leaf.shape)}".strip()


async def _values(trees: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return the leaves whose values differ, the largest difference first. Some 100 MB are held."""
    found: list[tuple[float, dict[str, Any]]] = []
    async with Checkpointer() as checkpointer:
        for ours, theirs, tree in trees:
            for pairs in _groups(tree.alike):
                first = await _read(checkpointer, ours, [pair.first for pair in pairs])
                second = await _read(checkpointer, theirs, [pair.second for pair in pairs])
                for pair in pairs:
                    values = first.get(pair.first.keys), second.get(pair.second.keys)
                    difference = await anyio.to_thread.run_sync(compare_values, *values)
                    if difference is not None:
                        rank = math.inf if math.isnan(difference.largest) else difference.largest
                        found.append((rank, _difference(pair, difference)))

    return [row for _, row in sorted(found, key=lambda pair: -pair[0])]


def _groups(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    group: list[Pair] = []
    nbytes = 0
    for pair in pairs:
        if group and nbytes + pair.first.nbytes > _GROUP_BYTES:
            yield group
            group, nbytes = [], 0

        group.append(pair)
        nbytes += pair.first.nbytes

    yield group


async def _read(
    checkpointer: Checkpointer, item: ItemFacts, leaves: Sequence[LeafFacts]
) -> dict[KeyPath, Any]:
    values: dict[KeyPath, Any] = {}
    async for found in read_values(checkpointer, item.path, item.name or None, leaves):
        values.update(found)

    return values


def _difference(pair: Pair, found: Any) -> dict[str, Any]:
    return {
        "key_path": one_line(pair.first.key_path),
        "at": ",".join(map(str, found.at)),
        "first": one_line(found.values[0]),
        "second": one_line(found.values[1]),
        "largest": f"{found.largest:.6g}",
        "different": f"{found.n_different:,} of {found.n:,}",
    }
