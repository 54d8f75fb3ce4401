"""`penstock diff`: says how two checkpoints differ."""

from __future__ import annotations

__all__ = ("compare", "configure", "run")

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import anyio

from penstock.cli.chosen_items import Chosen, select_of_both
from penstock.cli.completers import completed, item_names, leaf_names, step_numbers, steps_and_files
from penstock.cli.terminal import EXPECTED, CommandError, Output, Table, Toned, format_bytes, say_error
from penstock.inspection.leaf_values import Difference, compare_values, read_stored_values
from penstock.inspection.stored_leaves import (
    ItemFacts,
    LeafFacts,
    Pair,
    TreeComparison,
    compare_trees,
)
from penstock.inspection.texts import format_number, shape_text
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.protocols.stores import Store
from penstock.kernel.words import counted
from penstock.steps.step_directory import METRICS

Compared: TypeAlias = tuple[ItemFacts, ItemFacts, TreeComparison]
"""An item of each, and how their trees differ."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Compare two checkpoints: how many leaves are equal, whose values moved most, relative to their norm "
        "in A, which leaves only one has, and which have another shape or dtype. Leaves are matched by "
        "dotted names, so that a safetensors file can be compared with the checkpoint that it was made of. "
        "The exit status is 0 if they are the same, 1 if they differ, and 2 if something went wrong."
    )
    parser.add_argument("first", metavar="A", help="a directory of steps, a checkpoint, or safetensors")
    second = parser.add_argument("second", metavar="B", help="the same; or a number: that step of A's run")
    step = parser.add_argument("--step", type=int, metavar="N", help="the step of A (the latest)")
    item = parser.add_argument("--item", metavar="NAME", help="only this item of both")
    only = parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="only these leaves; repeatable"
    )
    completed(second, steps_and_files)
    completed(step, step_numbers)
    completed(item, item_names)
    completed(only, leaf_names)
    parser.add_argument("--structure", action="store_true", help="compare no values: reads no array")
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace, output: Output) -> int:
    """Print the differences, and return the status of `diff`."""
    try:
        return _run(options, output)
    except EXPECTED as error:
        say_error(error)
        return 2


def _run(options: argparse.Namespace, output: Output) -> int:
    first = Chosen.at(options.first, options.step, options.item)
    is_step = options.second.isdecimal()
    second = Chosen.at(
        options.first if is_step else options.second, int(options.second) if is_step else None, options.item
    )
    comparing = partial(compare, first, second, options, output)
    compared, values = anyio.run(first.read, partial(second.read, comparing))
    if options.json:
        output.say(json.dumps(_document(compared, values), indent=2))
    else:
        _show(first.path, second.path, compared, values, output)

    same = not values and not any(c.only_first or c.only_second or c.changed for _, _, c in compared)
    return 0 if same else 1


async def compare(
    first: Chosen, second: Chosen, options: argparse.Namespace, output: Output
) -> tuple[Sequence[Compared], list[tuple[Pair, Difference]]]:
    """Return how the items of two checkpoints differ, in structure and, unless that is all, in values."""
    firsts, seconds = _paired(await first.items(), await second.items())
    firsts, seconds = select_of_both(firsts, seconds, options.only)
    compared = [
        (ours, theirs, compare_trees(ours.leaves, theirs.leaves))
        for ours, theirs in zip(firsts, seconds, strict=True)
    ]
    stores = first.store, second.store
    return compared, [] if options.structure else await _compare_values(stores, compared, output)


def _paired(
    firsts: Sequence[ItemFacts], seconds: Sequence[ItemFacts]
) -> tuple[Sequence[ItemFacts], Sequence[ItemFacts]]:
    """Pair items by their names; where one side is one tree, with the tree of the other."""
    if len(firsts) == len(seconds) == 1:
        return firsts, seconds

    first, second = _one_tree(firsts), _one_tree(seconds)
    if first is not None and second is not None and not (first.name and second.name):
        return [first], [second]

    theirs = {item.name: item for item in seconds}
    shared = [item for item in firsts if item.name in theirs]
    if not shared:
        names = [sorted(item.name or "(one tree)" for item in items) for items in (firsts, seconds)]
        raise CommandError(f"they have no item in common: {names[0]} and {names[1]}; choose one with --item")

    lone = {item.name for item in (*firsts, *seconds)} - {item.name for item in shared}
    if lone:
        raise CommandError(
            f"only one of them has the items {', '.join(sorted(lone))}; choose one with --item"
        )

    return shared, [theirs[item.name] for item in shared]


def _one_tree(items: Sequence[ItemFacts]) -> ItemFacts | None:
    """Return the one tree of a checkpoint; metrics are none. So a step can be compared with its export."""
    trees = [item for item in items if item.name != METRICS]
    return trees[0] if len(trees) == 1 else None


async def _compare_values(
    stores: tuple[Store, Store], compared: Sequence[Compared], output: Output
) -> list[tuple[Pair, Difference]]:
    found: list[tuple[Pair, Difference]] = []
    done, total = 0, sum(len(tree.alike) for _, _, tree in compared)
    with output.bar(total, "leaves") as bar:
        for first, second, tree in compared:
            for pairs in _batches(tree.alike):
                ours = await _values(stores[0], first, [pair.first for pair in pairs])
                theirs = await _values(stores[1], second, [pair.second for pair in pairs])
                for pair in pairs:
                    difference = compare_values(ours.get(pair.first.keys), theirs.get(pair.second.keys))
                    found += [] if difference is None else [(pair, difference)]

                done += len(pairs)
                bar.show(done, pairs[-1].first.key_path)

    return sorted(found, key=lambda pair: (-pair[1].moved, -_rank(pair[1].largest)))


def _rank(largest: float) -> float:
    return math.inf if math.isnan(largest) else largest


async def _values(store: Store, item: ItemFacts, leaves: Sequence[LeafFacts]) -> dict[Any, Any]:
    values: dict[Any, Any] = {}
    async for found in read_stored_values(store, Threads(), item, leaves):
        values |= found

    return values


def _batches(pairs: Sequence[Pair], most_bytes: int = 2**28) -> list[list[Pair]]:
    """Divide pairs so that the values of a batch fit into memory together."""
    batches: list[list[Pair]] = []
    room = 0
    for pair in pairs:
        if not batches or pair.first.nbytes > room:
            batches.append([])
            room = most_bytes

        batches[-1].append(pair)
        room -= pair.first.nbytes

    return batches


def _show(
    first: str,
    second: str,
    compared: Sequence[Compared],
    values: Sequence[tuple[Pair, Difference]],
    output: Output,
) -> None:
    trees = [tree for _, _, tree in compared]
    n_alike = sum(len(tree.alike) for tree in trees)
    if not values and not any(tree.only_first or tree.only_second or tree.changed for tree in trees):
        output.success(counted(n_alike, "leaf is", "leaves are") + " the same")
        return

    output.note(f"A  {first}\nB  {second}")
    output.note(_summary(trees, values) + "\n")
    structure = _structure(trees)
    # People see first what moved most, programs first what does not fit.
    tables = [table for table in (_movements(values), structure) if table.rows]
    for table in tables if output.is_for_people else reversed(tables):
        output.table(table)
        output.note("")


def _summary(trees: Sequence[TreeComparison], values: Sequence[tuple[Pair, Difference]]) -> str:
    """Return how many leaves are equal and how many are not, with their bytes."""
    moved = [pair.second for pair, _ in values]
    changed = [*moved, *[pair.second for tree in trees for pair in tree.changed]]
    alike = [pair.first for tree in trees for pair in tree.alike]
    n_equal, equal_bytes = len(alike) - len(moved), _bytes_of(alike) - _bytes_of(moved)
    counts = (
        ("leaf equal" if n_equal == 1 else "leaves equal", n_equal, equal_bytes),
        ("changed", len(changed), _bytes_of(changed)),
        *_added_and_removed(trees),
    )
    texts = [f"{n:,} {what}" + (f" ({format_bytes(nbytes)})" if n else "") for what, n, nbytes in counts]
    return " · ".join(texts)


def _added_and_removed(trees: Sequence[TreeComparison]) -> Iterator[tuple[str, int, int]]:
    added = [leaf for tree in trees for leaf in tree.only_second]
    removed = [leaf for tree in trees for leaf in tree.only_first]
    yield "added", len(added), _bytes_of(added)
    yield "removed", len(removed), _bytes_of(removed)


def _bytes_of(leaves: Sequence[LeafFacts]) -> int:
    return sum(leaf.nbytes for leaf in leaves)


def _structure(trees: Sequence[TreeComparison]) -> Table:
    rows: list[Sequence[str]] = []
    plain: list[Sequence[str]] = []
    for tree in trees:
        for leaf in tree.only_first:
            rows.append((leaf.name, Toned("removed", "warning"), _kind(leaf), ""))
            plain.append(("only in A", leaf.key_path, _kind(leaf), ""))
        for leaf in tree.only_second:
            rows.append((leaf.name, Toned("added", "good"), "", _kind(leaf)))
            plain.append(("only in B", leaf.key_path, "", _kind(leaf)))
        for pair in tree.changed:
            kinds = (_kind(pair.first), _kind(pair.second))
            rows.append((pair.first.name, Toned("changed", "busy"), *kinds))
            plain.append(("changed", pair.first.key_path, *kinds))

    return Table(("leaf", "", "in A", "in B"), rows, n_left=4, plain=plain)


def _movements(values: Sequence[tuple[Pair, Difference]]) -> Table:
    columns = ("moved most", "moved", "largest", "different", "at", "in A", "in B")
    rows = [
        (
            pair.first.name or "(the whole)",
            _moved(difference.moved),
            "" if math.isnan(difference.largest) else format_number(difference.largest),
            "all" if difference.n_different == difference.n else f"{difference.n_different:,}",
            _place(difference),
            *map(_short, difference.values),
        )
        for pair, difference in values
    ]
    plain = [_plain_values(pair, difference) for pair, difference in values]
    return Table(columns, rows, plain=plain, spare=("in B", "in A", "at", "different"))


def _moved(moved: float) -> str:
    """Return how far an array moved, in percent of what it was; nothing if it was zero, or is no number."""
    if math.isinf(moved):
        return ""

    return f"{100 * moved:.4g}%" if moved < _MOST_PERCENT else f"×{format_number(moved)}"


_MOST_PERCENT: Final = 10.0


def _short(text: str) -> str:
    """Return a value as it is printed, with four digits if it is a float."""
    try:
        return text if text.lstrip("-").isdecimal() else format_number(float(text))
    except ValueError:
        return text


def _place(difference: Difference) -> str:
    return f"[{','.join(map(str, difference.at))}]" if difference.at else ""


def _plain_values(pair: Pair, difference: Difference) -> Sequence[str]:
    figures = (f"{difference.largest:.6g}", f"{difference.n_different}", f"{difference.n}")
    return ("values", pair.first.key_path, _place(difference), *difference.values, *figures)


def _kind(leaf: LeafFacts) -> str:
    return f"{leaf.dtype or leaf.kind} {shape_text(leaf.shape)}".strip()


def _document(
    compared: Sequence[Compared],
    values: Sequence[tuple[Pair, Difference]],
) -> dict[str, Any]:
    trees = [tree for _, _, tree in compared]
    return {
        "n_equal": sum(len(tree.alike) for tree in trees) - len(values),
        "first": compared[0][0].path,
        "second": compared[0][1].path,
        "only_first": [leaf.key_path for tree in trees for leaf in tree.only_first],
        "only_second": [leaf.key_path for tree in trees for leaf in tree.only_second],
        "changed": [
            {"key_path": pair.first.key_path, "first": _kind(pair.first), "second": _kind(pair.second)}
            for tree in trees
            for pair in tree.changed
        ],
        "values": [
            {
                "key_path": pair.first.key_path,
                "largest": difference.largest
                if math.isfinite(difference.largest)
                else str(difference.largest),
                "at": difference.at,
                "first": difference.values[0],
                "second": difference.values[1],
                "moved": difference.moved if math.isfinite(difference.moved) else None,
                "n_different": difference.n_different,
                "n": difference.n,
            }
            for pair, difference in values
        ],
    }
