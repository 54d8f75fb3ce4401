"""`penstock show`: shows the tree of a checkpoint, without reading its arrays."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import json
from collections.abc import Sequence
from typing import Any

import anyio

from penstock.cli.chosen_items import Chosen, add_choice, select
from penstock.cli.terminal import Output, Table, format_bytes
from penstock.inspection.stored_leaves import ItemFacts, LeafFacts
from penstock.inspection.texts import iso_time, shape_text, sharding_text
from penstock.reports.report import counted


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Show every leaf of a checkpoint: its key path, type, shape, dtype, sharding, bytes, bytes as they "
        "are stored, and codec. In a pipe: one line for each, with tabs between, and the name of the item "
        "first."
    )
    add_choice(parser)
    parser.add_argument(
        "--only", action="append", metavar="PATTERN",
        help="only leaves with such a name, as in 'params.*' or \"['params']\"; repeatable",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace, output: Output) -> int:
    """Print the leaves, as tables or as one JSON document.

    Raises:
        PenstockError: If it is no checkpoint, or damaged.
    """
    items = select(anyio.run(Chosen.by(options).items), options.only)
    if options.json:
        output.say(json.dumps(_document(items), indent=2))
        return 0

    for item in items:
        if item.name:
            output.note(f"\n{item.path}: {item.name}")
        else:
            output.note(item.path)

        output.table(_table(item, item.leaves))
        _sum_up(item, item.leaves, output)

    _add_metadata(items[0], output)
    return 0


def _table(item: ItemFacts, leaves: Sequence[LeafFacts]) -> Table:
    columns = ("leaf", "kind", "shape", "dtype", "sharding", "bytes", "stored", "codec")
    rows = [
        (
            leaf.key_path or "(the whole)",
            _kind(leaf),
            shape_text(leaf.shape),
            leaf.random_key_impl or leaf.dtype,
            sharding_text(leaf.sharding),
            f"{leaf.nbytes:,}" if leaf.shape is not None else "",
            f"{leaf.stored_nbytes:,}" if leaf.shape is not None else "",
            leaf.codec or "",
        )
        for leaf in leaves
    ]
    plain = [
        (
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
        for leaf in leaves
    ]
    return Table(columns, rows, n_left=5, plain=plain)


def _kind(leaf: LeafFacts) -> str:
    return leaf.kind if leaf.random_key_impl is None else "random key"


def _sum_up(item: ItemFacts, leaves: Sequence[LeafFacts], output: Output) -> None:
    n_arrays = sum(leaf.shape is not None for leaf in leaves)
    nbytes, stored = sum(leaf.nbytes for leaf in leaves), sum(leaf.stored_nbytes for leaf in leaves)
    size = format_bytes(nbytes) + (f" ({format_bytes(stored)} as stored)" if stored != nbytes else "")
    arrays = counted(n_arrays, "of them an array", "of them arrays")
    output.note(f"\n{counted(len(leaves), 'leaf', 'leaves')}, {arrays}, {size}")
    if item.tree_custom_metadata is not None:
        output.note(f"metadata of the tree {json.dumps(item.tree_custom_metadata)}")


def _add_metadata(item: ItemFacts, output: Output) -> None:
    if item.committed_at_ns is not None:
        output.note(f"committed {iso_time(item.committed_at_ns)}")
    if item.custom_metadata:
        output.note(f"custom metadata {json.dumps(dict(item.custom_metadata))}")


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
