"""The data of the page, as JSON values. Names and texts from a checkpoint have no control characters in them.

What is not `async` blocks.
"""

from __future__ import annotations

__all__ = ("differences", "run_data", "tree_data")

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

import anyio
from msgspec import structs

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.handlers.layouts.discovery import find_place
from penstock.handlers.stores.publishing.reading import Reading, read_unchanged
from penstock.inspection.layers import Rectangle, layers_of, treemap
from penstock.inspection.leaf_values import compare_values, read_values
from penstock.inspection.step_listing import StepFacts, list_checkpoints, paths_by_name
from penstock.inspection.stored_leaves import (
    ItemFacts,
    LeafFacts,
    Pair,
    TreeComparison,
    compare_trees,
    read_items,
)
from penstock.inspection.texts import iso_time, one_line, shape_text, sharding_text
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import NotACheckpointError
from penstock.kernel.protocols.stores import Store
from penstock.reports.kept_reports import KeptReport, KeptRow, read_reports
from penstock.reports.report import counted

_MOST_LEAVES: Final = 2000  # in a table; the page says how many there are
_MOST_ROWS: Final = 200
_MOST_REPORTS: Final = 20

Compared: TypeAlias = tuple[ItemFacts, ItemFacts, TreeComparison]
"""An item of each of two checkpoints, and how their trees differ."""


def run_data(store: Store, path: str) -> dict[str, Any]:
    """Return the steps of a run, or what else is at a path."""
    place = find_place(store, path)
    listed = list_checkpoints(store, place)
    reports = read_reports(store, path).reports if place.kind == "root" else ()
    saves = [report for report in reports if report.kind == "save" and report.rows]
    return {
        "path": one_line(path),
        "kind": place.kind,
        "steps": [_step(step) for step in listed],
        "reports": [_report(report) for report in saves[-_MOST_REPORTS:]],
    }


async def tree_data(store: Store, path: str, name: str, width: int, height: int) -> dict[str, Any]:
    """Return the items of one checkpoint with their leaves, and a treemap of so many pixels.

    Raises:
        NotACheckpointError: If the run has no such step.
    """
    threads = Threads()
    items = await read_items(store, threads, await threads.run(_path_of, store, path, name))

    def drawn() -> list[dict[str, Any]]:
        return [_item(item, width, height) for item in items]

    return {"name": one_line(name), "items": await threads.run(drawn)}


async def differences(store: Store, path: str, first: str, second: str, *, values: bool) -> dict[str, Any]:
    """Return how two steps differ; in structure alone, or in values, too, which reads all of both.

    Raises:
        PenstockError: If one of them is not there, or cannot be read.
    """
    threads = Threads()
    ours = await threads.run(_path_of, store, path, first)
    theirs = await threads.run(_path_of, store, path, second)

    async def compare(_: Reading) -> tuple[list[Compared], list[dict[str, Any]]]:
        pairs = _paired(await read_items(store, threads, ours), await read_items(store, threads, theirs))
        trees = [(one, other, compare_trees(one.leaves, other.leaves)) for one, other in pairs]
        return trees, await _values(trees) if values else []

    async def compare_with_other(_: Reading) -> tuple[list[Compared], list[dict[str, Any]]]:
        return await read_unchanged(store, threads, theirs, compare)

    trees, found = await read_unchanged(store, threads, ours, compare_with_other)
    rows = [row for _, _, tree in trees for row in _structure(tree)]
    return {
        "structure": rows[:_MOST_ROWS],
        "n_structure": len(rows),
        "values": found[:_MOST_ROWS] if values else None,
        "n_values": len(found),
        "n_alike": sum(len(tree.alike) for _, _, tree in trees) - len(found),
    }


def _path_of(store: Store, path: str, name: str) -> str:
    found = paths_by_name(store, find_place(store, path)).get(name)
    if found is None:
        raise NotACheckpointError(path, f"has no checkpoint {name!r}")

    return found


def _step(step: StepFacts) -> dict[str, Any]:
    return {
        "name": step.name,
        "label": one_line(step.name),
        "step": step.step,
        "state": step.state,
        "nbytes": step.sizes.nbytes,
        "own_bytes": step.sizes.own_bytes,
        "started_at": None if step.started_at_ns is None else step.started_at_ns / 1e9,
        "committed_at": None if step.committed_at_ns is None else step.committed_at_ns / 1e9,
        "time": iso_time(step.committed_at_ns)[:19].replace("T", " "),
        "metrics": {one_line(name): value for name, value in _numbers(step.metrics)},
        "problem": one_line(step.problem),
    }


def _report(report: KeptReport) -> dict[str, Any]:
    return {
        "label": one_line(report.name),
        "ended_at": report.ended_at,
        "time": iso_time(int(report.ended_at * 1e9))[:19].replace("T", " "),
        "n_leaves": report.n_leaves,
        "nbytes": report.nbytes,
        "staged_s": report.staged_s,
        "durable_s": report.seconds,
        "explanation": one_line(report.explanation),
        "stages": [{**structs.asdict(stage), "name": one_line(stage.name)} for stage in report.stages],
        "rows": [_row(row) for row in report.rows[:_MOST_ROWS]],
    }


def _row(row: KeptRow) -> dict[str, Any]:
    return {"label": one_line(row.label), "bars": [structs.asdict(bar) for bar in row.bars]}


def _numbers(metrics: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float | None]]:
    """Yield metrics by name; None for one that JSON has no number for."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _numbers(cast("Mapping[str, Any]", value), f"{before}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield before + name, float(value) if math.isfinite(value) else None


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
    rows = [("only in A", leaf, _kind(leaf), "") for leaf in tree.only_first]
    rows += [("only in B", leaf, "", _kind(leaf)) for leaf in tree.only_second]
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
    found: list[tuple[float, dict[str, Any]]] = []
    async with Checkpointer() as checkpointer:
        for ours, theirs, tree in trees:
            for pair in tree.alike:
                first = await _value(checkpointer, ours, pair.first)
                second = await _value(checkpointer, theirs, pair.second)
                difference = await anyio.to_thread.run_sync(compare_values, first, second)
                if difference is not None:
                    rank = math.inf if math.isnan(difference.largest) else difference.largest
                    found.append((rank, _difference(pair, difference)))

    return [row for _, row in sorted(found, key=lambda pair: -pair[0])]


async def _value(checkpointer: Checkpointer, item: ItemFacts, leaf: LeafFacts) -> Any:
    found: list[Any] = []
    async for values in read_values(checkpointer, item.path, item.name or None, [leaf]):
        found += values.values()

    return found[0] if found else None


def _difference(pair: Pair, found: Any) -> dict[str, Any]:
    return {
        "key_path": one_line(pair.first.key_path),
        "at": ",".join(map(str, found.at)),
        "first": one_line(found.values[0]),
        "second": one_line(found.values[1]),
        "largest": f"{found.largest:.6g}",
        "different": f"{found.n_different:,} of {found.n:,}",
    }
