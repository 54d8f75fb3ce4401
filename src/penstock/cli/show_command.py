"""`penstock show`: shows the tree of a checkpoint, and reads its arrays only for histograms."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from penstock.cli.chosen_items import Chosen, add_choice, select
from penstock.cli.completers import completed, leaf_names
from penstock.cli.terminal import Output, Table, Toned, format_bytes
from penstock.inspection.stored_leaves import ItemFacts, LeafFacts
from penstock.inspection.texts import (
    age,
    bars,
    format_number,
    iso_time,
    metric_text,
    shape_text,
    sharding_text,
)
from penstock.kernel.protocols.leaf import KeyPath
from penstock.kernel.words import counted, in_short
from penstock.steps.step_directory import METRICS, StepReader

if TYPE_CHECKING:
    from penstock.inspection.leaf_values import Statistics
    from penstock.inspection.tree_lines import TreeLine

Values: TypeAlias = "Mapping[tuple[str, KeyPath], Statistics | None]"
"""What the values of leaves add up to, by item and keys; empty if they were not asked for."""

_KINDS: Final = {"None": "None", "Dict": "{}", "List": "[]", "Tuple": "()"}  # of what is empty


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Show the tree of a checkpoint: shapes, dtypes, sizes, and where there are any shardings, codecs and "
        "sizes as stored. Alike siblings are one line, as in 'blocks[0–3] ×4', with the size of all of them; "
        "what is below it is one of them. In a pipe: one line for each leaf, with tabs between item, key "
        "path, type, shape, dtype, sharding, bytes, bytes as stored, and codec."
    )
    add_choice(parser)
    only = parser.add_argument(
        "--only", action="append", metavar="PATTERN",
        help="only leaves with such a name, as in 'params.*' or \"['params']\"; repeatable",
    )  # fmt: skip
    completed(only, leaf_names)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--unfold", action="store_true", help="a line for each of alike siblings, too")
    form.add_argument("--flat", action="store_true", help="no tree: a line for each leaf with its key path")
    form.add_argument(
        "--histogram", action="store_true", help="read the arrays, and show how their values are distributed"
    )
    form.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace, output: Output) -> int:
    """Print the leaves, as a tree, as a table or as one JSON document.

    Raises:
        CommandError: If a pattern matches no leaf.
        PenstockError: If it is no checkpoint, or damaged.
    """
    chosen = Chosen.by(options, farthest=True)
    values: Values = {}
    if options.histogram:
        import anyio  # an event loop is loaded where one is needed

        items, values = anyio.run(chosen.read, partial(_read_values, chosen, options, output))
    else:
        items = select(chosen.described(), options.only)
    if options.json:
        output.say(json.dumps(_document(items), indent=2))
        return 0

    if not output.is_for_people:
        output.table(Table((), [_plain(item, leaf) for item in items for leaf in item.leaves]))
        return 0

    _head(chosen, items, output)
    # The metrics of a step are in the head.
    trees = [item for item in items if item.name != METRICS or len(items) == 1]
    if options.flat:
        output.table(_flat_table(items))
    else:
        output.table(_tree_table(trees, values, folds=not options.unfold and not options.histogram))

    _sum_up(trees, output)
    return 0


async def _read_values(
    chosen: Chosen, options: argparse.Namespace, output: Output
) -> tuple[Sequence[ItemFacts], Values]:
    items = select(await chosen.items(), options.only)

    from penstock.cli.read_progress import read_each
    from penstock.inspection.leaf_values import is_array, statistics_of

    def statistics(value: Any) -> Statistics | None:
        return statistics_of(value) if is_array(value) else None

    found = await read_each(chosen.store, items, output, statistics)
    return items, {(item.name, leaf.keys): value for item, leaf, value in found}


def _head(chosen: Chosen, items: Sequence[ItemFacts], output: Output) -> None:
    from penstock.inspection.step_listing import names_of_metrics  # a program in a pipe is told none

    first = items[0]
    output.note(first.path, "strong")
    if first.committed_at_ns is not None:
        when = iso_time(first.committed_at_ns)[:19].replace("T", " ")
        output.note(f"committed {when} UTC, {age(first.committed_at_ns)} ago")
    if any(item.name == METRICS for item in items):
        metrics = StepReader(chosen.store).metrics(first.path) or {}
        shown = [f"{name} {metric_text(metrics, name)}" for name in names_of_metrics(metrics)]
        output.note(" · ".join(["metrics", *shown]))
    custom = dict(first.custom_metadata or {})
    made: Mapping[str, Any] = {}
    if custom:
        from penstock.kernel.rules import MADE_BY  # many classes, which few checkpoints have use for

        made = _mapping(custom.pop(MADE_BY, None))
    if custom:
        output.note(f"custom metadata {json.dumps(custom)}")
    for line in _made_lines(made) if made else ():
        output.note(line)

    for item in items:
        if item.tree_custom_metadata is not None:
            output.note(f"metadata of the tree {json.dumps(item.tree_custom_metadata)}")

    output.note("")


_MOST_MADE: Final = 12


def _made_lines(made: Mapping[str, Any]) -> Iterator[str]:
    """Say how leaves were made. Anything may be recorded; what is not as it should be is left out."""
    recorded: object = made.get("rules")
    rules = [_mapping(rule) for rule in cast("list[object]", recorded)] if isinstance(recorded, list) else []
    leaves = _mapping(made.get("leaves"))
    yield f"made of {made.get('source')} by {counted(len(rules), 'rule')}"
    for name, about in list(leaves.items())[:_MOST_MADE]:
        sources, numbers = list(_mapping(_mapping(about).get("of"))), _mapping(about).get("rules")
        known = [
            f"{number} {next(iter(rules[number - 1]), '')}"
            for number in (cast("list[object]", numbers) if isinstance(numbers, list) else ())
            if isinstance(number, int) and 0 < number <= len(rules)
        ]
        yield f"  {name}: of {in_short(sources) or 'nothing'}, by {', '.join(known)}"

    if len(leaves) > _MOST_MADE:
        yield f"  and {len(leaves) - _MOST_MADE:,} more, which --json has"


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _tree_table(trees: Sequence[ItemFacts], values: Values, *, folds: bool) -> Table:
    # Here, because a program in a pipe is shown no tree.
    from penstock.inspection.layers import layers_of
    from penstock.inspection.tree_lines import tree_lines

    rows: list[Sequence[str]] = []
    is_named = len(trees) > 1
    for item in trees:
        if is_named:
            sizes = _sizes(item.nbytes, item.stored_nbytes)
            rows.append((Toned(item.name, "strong"), *_NO_ARRAY, *sizes))

        lines = tree_lines(layers_of(item.leaves), folds=folds)
        rows += [_row(line, item.name, values, "  " * is_named) for line in lines]

    columns = ("", "shape", "dtype", "sharding", "codec", "values", "from", "to", "size", "stored")
    return Table(columns, rows, n_left=6, spare=("codec", "sharding", "stored", "dtype", "size"))


_NO_ARRAY: Final = ("",) * 7  # the cells between a label and the sizes
_BARS: Final = 16  # columns of a histogram


def _row(line: TreeLine, item: str, values: Values, indent: str) -> Sequence[str]:
    times = f" ×{line.n_alike}" if line.n_alike > 1 else ""
    label = f"{indent}{line.guide}{line.label}{times}"
    leaf = line.leaf
    sizes = _sizes(line.nbytes, line.stored_nbytes)
    if leaf is None:
        return (label, *_NO_ARRAY, *[Toned(size, "faint") for size in sizes])

    about = values.get((item, leaf.keys))
    sharding = sharding_text(leaf.sharding)
    return (
        label,
        shape_text(leaf.shape).replace("x", "×"),
        _type(leaf),
        sharding if sharding.startswith("(") else "",  # most are on one device
        leaf.codec or "",
        *(("", "", "") if about is None else _values(about)),
        *(("", "") if leaf.shape is None else sizes),
    )


def _type(leaf: LeafFacts) -> str:
    if leaf.random_key_impl is not None:
        return "key"  # of its implementation the pipe and --flat tell

    return leaf.dtype or _KINDS.get(leaf.kind, leaf.kind)


def _sizes(nbytes: int, stored: int | None) -> tuple[str, str]:
    return format_bytes(nbytes), "" if stored is None or stored == nbytes else format_bytes(stored)


def _values(about: Statistics) -> tuple[str, str, str]:
    """Return a histogram, or what is to be said in place of it, the least value and the greatest."""
    least, greatest = about.least, about.greatest
    shape = "" if about.histogram is None else bars(about.histogram.counts, _BARS)
    if about.n_nan or about.n_infinite:
        lost = [f"{n:,} {what}" for n, what in ((about.n_nan, "NaN"), (about.n_infinite, "inf")) if n]
        shown: str = Toned(" ".join([*lost, shape]).rstrip(), "bad")
    elif least == greatest:
        return (Toned(f"all {_short(least)}" if about.n > 1 else _short(least), "faint"), "", "")
    else:
        shown = shape

    return shown, _short(least), _short(greatest)


def _short(number: float | None) -> str:
    return "" if number is None else format_number(float(number))


def _flat_table(items: Sequence[ItemFacts]) -> Table:
    columns = ("leaf", "kind", "shape", "dtype", "sharding", "codec", "bytes", "stored")
    rows = [
        (
            leaf.key_path or "(the whole)",
            _kind(leaf),
            shape_text(leaf.shape),
            leaf.random_key_impl or leaf.dtype,
            sharding_text(leaf.sharding),
            leaf.codec or "",
            f"{leaf.nbytes:,}" if leaf.shape is not None else "",
            f"{leaf.stored_nbytes:,}" if leaf.shape is not None else "",
        )
        for item in items
        for leaf in item.leaves
    ]
    spare = ("codec", "sharding", "stored", "kind", "bytes", "dtype")
    return Table(columns, rows, n_left=6, spare=spare)


def _plain(item: ItemFacts, leaf: LeafFacts) -> Sequence[str]:
    return (
        item.name,
        leaf.key_path,
        _kind(leaf),
        shape_text(leaf.shape),
        leaf.random_key_impl or leaf.dtype,
        sharding_text(leaf.sharding),
        str(leaf.nbytes),
        str(leaf.stored_nbytes),
        leaf.codec or "",
    )


def _kind(leaf: LeafFacts) -> str:
    return leaf.kind if leaf.random_key_impl is None else "random key"


def _sum_up(items: Sequence[ItemFacts], output: Output) -> None:
    leaves = [leaf for item in items for leaf in item.leaves]
    n_arrays = sum(leaf.shape is not None for leaf in leaves)
    nbytes, stored = sum(leaf.nbytes for leaf in leaves), sum(leaf.stored_nbytes for leaf in leaves)
    size = format_bytes(nbytes) + (f" ({format_bytes(stored)} as stored)" if stored != nbytes else "")
    arrays = counted(n_arrays, "of them an array", "of them arrays")
    output.note(f"\n{counted(len(leaves), 'leaf', 'leaves')}, {arrays}, {size}")


def _document(items: Sequence[ItemFacts]) -> dict[str, Any]:
    first = items[0]
    return {
        "path": first.path,
        "committed_at": iso_time(first.committed_at_ns) or None,
        "custom_metadata": first.custom_metadata,
        "nbytes": sum(item.nbytes for item in items),
        "stored_nbytes": sum(item.stored_nbytes for item in items),
        "items": [
            {
                "name": item.name,
                "nbytes": item.nbytes,
                "stored_nbytes": item.stored_nbytes,
                "tree_custom_metadata": item.tree_custom_metadata,
                "leaves": [_leaf(leaf) for leaf in item.leaves],
            }
            for item in items
        ],
    }


def _leaf(leaf: LeafFacts) -> dict[str, Any]:
    return {
        "key_path": leaf.key_path,
        "name": leaf.name,
        "kind": leaf.kind,
        "shape": leaf.shape,
        "dtype": leaf.dtype or None,
        "nbytes": leaf.nbytes,
        "stored_nbytes": leaf.stored_nbytes,
        "codec": leaf.codec,
        "chunk_shape": leaf.chunk_shape or None,
        "sharding": leaf.sharding,
        "random_key_impl": leaf.random_key_impl,
    }
