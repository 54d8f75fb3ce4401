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
from penstock.cli.completers import completed, leaf_names
from penstock.cli.read_progress import read_each
from penstock.cli.terminal import CommandError, Output, Table, Toned
from penstock.inspection.leaf_values import Statistics, is_array, statistics_of
from penstock.inspection.stored_leaves import ItemFacts, LeafFacts
from penstock.inspection.texts import bars, format_number, shape_text

_BARS: Final = 16  # columns of a histogram


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Read leaves, and print what their values add up to, with a small histogram from the least to the "
        "greatest; or the values themselves, one a line in the order of rows. In a pipe: one line for each "
        "leaf, with tabs between key path, shape, dtype, least, greatest, mean, standard deviation, zeros, "
        "NaNs and infinities."
    )
    add_choice(parser)
    leaf = parser.add_argument(
        "leaf", nargs="*", metavar="LEAF", help="a key path, or a pattern (all); before the options"
    )
    completed(leaf, leaf_names)
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


def _chosen(items: Sequence[ItemFacts], options: argparse.Namespace) -> Sequence[ItemFacts]:
    """Return the items with the leaves that the command line names."""
    selected = select(items, options.leaf or None)
    n_leaves = sum(leaf.holds_value for item in selected for leaf in item.leaves)
    if not n_leaves:
        raise CommandError(f"{items[0].path}: what was chosen has no value, as an empty list has none")
    if options.values and n_leaves > 1:
        raise CommandError("--values goes with one LEAF")

    return selected


async def read_leaves(
    place: Chosen, options: argparse.Namespace, output: Output
) -> list[tuple[LeafFacts, Any]]:
    """Return each leaf with its value, or its statistics if there are several."""
    items = _chosen(await place.items(), options)
    has_one = sum(leaf.holds_value for item in items for leaf in item.leaves) == 1

    def digest(value: Any) -> Any:
        return statistics_of(value) if not has_one and is_array(value) else value

    return [(leaf, value) for _, leaf, value in await read_each(place.store, items, output, digest)]


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
    columns = ("leaf", "shape", "dtype", "values", "least", "greatest", "mean", "std", "zeros", "NaN", "inf")
    rows: list[Sequence[str]] = []
    plain: list[Sequence[str]] = []
    for leaf, value in found:
        about = _statistics(value)
        rest = (shape_text(leaf.shape), leaf.dtype or leaf.kind)
        name, key_path = leaf.name or "(the whole)", leaf.key_path or "(the whole)"
        if about is None:
            rows.append((name, *rest, "" if value is None else repr(value), *[""] * 7))
            plain.append((key_path, *rest, "" if value is None else str(value), *[""] * 6))
            continue

        numbers = (about.least, about.greatest, about.mean, about.std)
        counts = (about.n_zero, about.n_nan, about.n_infinite)
        histogram = about.histogram
        shape = "" if histogram is None or about.least == about.greatest else bars(histogram.counts, _BARS)
        short = ["" if number is None else format_number(number) for number in numbers]
        lost = [Toned(format_number(n), "bad") if n else "" for n in counts[1:]]
        rows.append((name, *rest, shape, *short, format_number(counts[0]), *lost))
        exact = ["" if number is None else repr(number) for number in numbers]
        plain.append((key_path, *rest, *exact, *map(str, counts)))

    spare = ("zeros", "dtype", "shape", "std", "values", "mean")
    return Table(columns, rows, n_left=4, plain=plain, spare=spare)


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
