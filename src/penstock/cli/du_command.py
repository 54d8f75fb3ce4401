"""`penstock du`: says which part of a checkpoint, or which step of a run, takes how much room."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.chosen_items import Chosen, add_choice
from penstock.cli.terminal import Output, Table, Toned, format_bytes
from penstock.handlers.stores.publishing.reading import Reading, read_unchanged
from penstock.inspection.file_sizes import sizes_below
from penstock.inspection.layers import Layer, layers_of
from penstock.inspection.looking import run_here
from penstock.inspection.stored_leaves import ItemFacts, read_items

if TYPE_CHECKING:
    from penstock.kernel.concurrency.threads import Threads


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Add up the bytes of a checkpoint layer by layer, as they are stored. What lies beside the arrays, "
        "also files of other programs, is a line of its own, so that the sum is what the disk holds. In a "
        "pipe: one line for each, with tabs between stored bytes, bytes, leaves, item and key path. `ls` "
        "compares steps."
    )
    add_choice(parser)
    parser.add_argument(
        "--depth", type=int, default=2, metavar="N", help="how many layers to show (%(default)s)"
    )
    parser.add_argument("--picture", metavar="FILE.svg", help="write a treemap there, too")
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace, output: Output) -> int:
    """Print the sizes.

    Raises:
        PenstockError: If it is no checkpoint, or damaged.
    """
    chosen = Chosen.by(options, farthest=True)
    path = chosen.path
    items, on_medium = run_here(chosen.store, partial(_read, chosen))
    most_depth = None if options.picture is not None else options.depth  # a picture shows each leaf
    layers = [(item, layers_of(item.leaves, most_depth)) for item in items]
    if options.picture is not None:
        from penstock.inspection.layers import treemap_svg

        Path(options.picture).write_text(treemap_svg(_all_of(layers)), encoding="utf-8")
    if options.json:
        output.say(json.dumps(_document(path, layers, on_medium, options.depth), indent=2))
        return 0

    output.note(path, "strong")
    output.table(_table(layers, on_medium, options.depth))
    return 0


async def _read(chosen: Chosen, threads: Threads) -> tuple[Sequence[ItemFacts], int | None]:
    """Return the items, and the bytes of all files; None for those if there is but one item to look at."""

    async def read(_: Reading) -> tuple[Sequence[ItemFacts], int | None]:
        items = await read_items(chosen.store, threads, chosen.path, chosen.item)
        if chosen.item is not None:
            return items, None

        return items, (await threads.run(sizes_below, chosen.store, chosen.path)).nbytes

    return await read_unchanged(chosen.store, threads, chosen.path, read)


def _all_of(layers: Sequence[tuple[ItemFacts, Layer]]) -> Layer:
    """Return one tree whose first layer is that of the items, if there are several."""
    if len(layers) == 1:
        return layers[0][1]

    whole = Layer("")
    for item, layer in layers:
        layer.key_path = layer.key = item.name
        whole.children.append(layer)
        whole.stored_nbytes += layer.stored_nbytes
        whole.n_leaves += layer.n_leaves

    return whole


def _table(layers: Sequence[tuple[ItemFacts, Layer]], on_medium: int | None, depth: int) -> Table:
    rows: list[Sequence[str]] = []
    plain: list[Sequence[str]] = []
    for item, root in layers:
        for level, layer in root.walk(depth):
            name = layer.label if level else item.name or "(all arrays)"
            share = layer.stored_nbytes / (on_medium or root.stored_nbytes or 1)
            plainly = "" if layer.nbytes == layer.stored_nbytes else format_bytes(layer.nbytes)
            stored = format_bytes(layer.stored_nbytes)
            rows.append(("  " * level + name, stored, f"{share:.1%}", plainly, f"{layer.n_leaves:,}"))
            figures = (str(layer.stored_nbytes), str(layer.nbytes), str(layer.n_leaves))
            plain.append((*figures, item.name, layer.key_path))

    if on_medium is not None:
        beside = _other_bytes(layers, on_medium)
        rows.append(("(other files)", format_bytes(beside), f"{beside / (on_medium or 1):.1%}", "", ""))
        rows.append((Toned("(on the medium)", "strong"), format_bytes(on_medium), "", "", ""))
        plain.append((str(beside), "", "", "", "(other files)"))

    return Table(("", "stored", "share", "bytes", "leaves"), rows, plain=plain, spare=("leaves", "bytes"))


def _other_bytes(layers: Sequence[tuple[ItemFacts, Layer]], on_medium: int) -> int:
    return max(0, on_medium - sum(root.stored_nbytes for _, root in layers))


def _document(
    path: str, layers: Sequence[tuple[ItemFacts, Layer]], on_medium: int | None, depth: int
) -> dict[str, Any]:
    return {
        "path": path,
        "on_medium_bytes": on_medium,
        "other_bytes": None if on_medium is None else _other_bytes(layers, on_medium),
        "layers": [entry for item, root in layers for entry in _entries(item, root, depth)],
    }


def _entries(item: ItemFacts, root: Layer, depth: int) -> Iterator[dict[str, Any]]:
    for level, layer in root.walk(depth):
        yield {
            "item": item.name,
            "key_path": layer.key_path,
            "depth": level,
            "stored_nbytes": layer.stored_nbytes,
            "nbytes": layer.nbytes,
            "n_leaves": layer.n_leaves,
        }
