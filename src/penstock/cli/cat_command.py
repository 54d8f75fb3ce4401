"""`penstock cat`: prints the statistics or the values of leaves."""

from __future__ import annotations

__all__ = ("configure", "read_leaves", "run")

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import anyio

from penstock.cli.chosen_items import Chosen, add_choice, select
from penstock.cli.terminal import CommandError, Output, Table
from penstock.inspection.leaf_values import Histogram, Statistics, is_array, read_values, statistics_of
from penstock.inspection.stored_leaves import ItemFacts, LeafFacts
from penstock.inspection.texts import shape_text
from penstock.kernel.protocols.leaf import KeyPath

_BARS: Final = " ▁▂▃▄▅▆▇█"


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Read leaves, and print what their values add up to, with a small histogram from the least to the "
        "greatest; or the values themselves, one a line in the order of rows. In a pipe: one line for each "
        "leaf, with tabs between key path, shape, dtype, least, greatest, mean, standard deviation, zeros, "
        "NaNs and infinities."
    )
    add_choice(parser)
    parser.add_argument(
        "leaf", nargs="*", metavar="LEAF", help="a key path, or a pattern (all); before the options"
    )
    parser.add_argument("--values", action="store_true", help="print the values of one leaf")
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace, output: Output) -> int:
    """Print them.

    Raises:
        CommandError: If no leaf has such a name, or --values goes with several.
        PenstockError: What a restore raises.
    """
    place = Chosen.by(options)
    found = anyio.run(place.read, partial(read_leaves, place, options, output))
    if options.json:
        output.say(json.dumps([_document(leaf, value, options.values) for leaf, value in found], indent=2))
    elif options.values:
        _print_values(found[0][1], output)
    else:
        output.table(_table(found))

    return 0


def _holds_value(leaf: LeafFacts) -> bool:
    return leaf.shape is not None or leaf.kind == "string"


def _chosen(
    items: Sequence[ItemFacts], options: argparse.Namespace
) -> Sequence[tuple[ItemFacts, Sequence[LeafFacts]]]:
    """Return the leaves that the command line names, by their items."""
    selected = select(items, options.leaf or None)
    chosen = [(item, [leaf for leaf in item.leaves if _holds_value(leaf)]) for item in selected]
    chosen = [(item, leaves) for item, leaves in chosen if leaves]
    if not chosen:
        raise CommandError(f"{items[0].path}: what was chosen has no value, as an empty list has none")
    if options.values and sum(len(leaves) for _, leaves in chosen) > 1:
        raise CommandError("--values goes with one LEAF")

    return chosen


async def read_leaves(
    place: Chosen, options: argparse.Namespace, output: Output
) -> list[tuple[LeafFacts, Any]]:
    """Return each leaf with its value, or its statistics if there are several."""
    from penstock.checkpointer.checkpointer import Checkpointer

    chosen = _chosen(await place.items(), options)
    n_leaves = sum(len(leaves) for _, leaves in chosen)
    found: list[tuple[LeafFacts, Any]] = []
    with output.bar(n_leaves, "leaves") as bar:
        async with Checkpointer() as checkpointer:
            for item, leaves in chosen:
                by_keys: dict[KeyPath, LeafFacts] = {leaf.keys: leaf for leaf in leaves}
                async for values in read_values(checkpointer, item.path, item.name or None, leaves):
                    for keys, value in values.items():
                        many = n_leaves > 1 and is_array(value)
                        found.append((by_keys[keys], statistics_of(value) if many else value))
                        bar.show(len(found), by_keys[keys].key_path)

    order = {id(leaf): at for at, leaf in enumerate(leaf for _, leaves in chosen for leaf in leaves)}
    return sorted(found, key=lambda pair: order[id(pair[0])])


def _print_values(value: Any, output: Output) -> None:
    if is_array(value):
        for one in value.reshape(-1):
            output.say(str(one))
    else:
        output.say(str(value))


def _statistics(value: Any) -> Statistics | None:
    if is_array(value):
        return statistics_of(value)

    return value if isinstance(value, Statistics) else None


def _table(found: Sequence[tuple[LeafFacts, Any]]) -> Table:
    columns = (
        "leaf",
        "shape",
        "dtype",
        "histogram",
        "least",
        "greatest",
        "mean",
        "std",
        "zeros",
        "NaN",
        "inf",
    )
    rows: list[Sequence[str]] = []
    plain: list[Sequence[str]] = []
    for leaf, value in found:
        about = _statistics(value)
        start = (leaf.key_path or "(the whole)", shape_text(leaf.shape), leaf.dtype or leaf.kind)
        if about is None:
            rows.append((*start, "" if value is None else repr(value), *[""] * 7))
            plain.append((*start, "" if value is None else str(value), *[""] * 6))
            continue

        numbers = (about.least, about.greatest, about.mean, about.std)
        counts = (about.n_zero, about.n_nan, about.n_infinite)
        rows.append(
            (
                *start,
                _bars(about.histogram),
                *[_short(number) for number in numbers],
                *[f"{n:,}" for n in counts],
            )
        )
        plain.append(
            (*start, *["" if number is None else repr(number) for number in numbers], *map(str, counts))
        )

    return Table(columns, rows, n_left=4, plain=plain)


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.5g}"


def _bars(histogram: Histogram | None) -> str:
    if histogram is None or len(histogram.counts) == 1:
        return ""

    most = max(histogram.counts)
    return "".join([_BARS[-(-count * (len(_BARS) - 1) // most)] for count in histogram.counts])


def _document(leaf: LeafFacts, value: Any, with_values: bool) -> dict[str, Any]:
    about = _statistics(value)
    document: dict[str, Any] = {"key_path": leaf.key_path, "shape": leaf.shape, "dtype": leaf.dtype or None}
    if about is None:
        return {**document, "value": value}

    document["statistics"] = asdict(about)
    if with_values:
        plain = value if value.dtype.kind in "biuf" else value.astype(str)
        document["values"] = plain.tolist()

    return document
