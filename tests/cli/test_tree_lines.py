"""Which leaves share a line of a tree, and what such a line says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from tests.cli.conftest import Said

import penstock
from penstock.cli.chosen_items import Chosen
from penstock.inspection.layers import layers_of
from penstock.inspection.tree_lines import TreeLine, tree_lines


def lines_of(tree: Any, folder: Path, *, folds: bool = True) -> list[TreeLine]:
    penstock.sync.save(folder / "c", tree, overwrite=True)
    (item,) = anyio.run(Chosen.at(str(folder / "c"), None, None).items)
    return tree_lines(layers_of(item.leaves), folds=folds)


def drawn(lines: list[TreeLine]) -> list[str]:
    return [f"{line.guide}{line.label}" + f" x{line.n_alike}" * (line.n_alike > 1) for line in lines]


def block(width: int = 3) -> dict[str, Any]:
    return {"attn": {"q": np.ones((4, width)), "k": np.ones((4, width))}, "bias": np.ones(2)}


def test_alike_siblings_share_a_line_with_the_bytes_of_all(tmp_path: Path) -> None:
    lines = lines_of({"blocks": {str(n): block() for n in range(12)}, "head": np.ones(5)}, tmp_path)

    assert drawn(lines) == [
        "blocks[0–11] x12",
        "├ attn",
        "│ ├ k",
        "│ └ q",
        "└ bias",
        "head",
    ]
    assert lines[0].nbytes == 12 * (2 * 96 + 16)
    assert lines[0].n_leaves == 36
    assert [line.nbytes for line in lines[1:]] == [192, 96, 96, 16, 40]  # of one of them
    assert [line.stored_nbytes for line in lines[1:]] == [None] * 4 + [40]


def test_what_differs_in_anything_that_is_shown_is_not_folded(tmp_path: Path) -> None:
    layers = [block(), block(), block(7), block(), {**block(), "more": 1}]
    lines = lines_of({"layers": layers}, tmp_path)

    assert drawn([line for line in lines if line.leaf is None and len(line.guide) == 2]) == [
        "├ [0–1,3] x3",
        "├ [2]",
        "└ [4]",
    ]


@pytest.mark.parametrize(
    ("tree", "first"),
    [
        ({"a": {f"layer_{n:02}": block() for n in range(3)}}, "a.layer_[00–02] x3"),
        ({"mu": block(), "nu": block()}, "{mu,nu} x2"),
        ({name: {"w": np.ones(2)} for name in "abcdef"}, "{a,b,c,…,f}.w x6"),
        ({"w": {"x": {"y": np.ones(3)}}}, "w.x.y"),
        ([np.ones(3)] * 5, "[0–4] x5"),
    ],
)
def test_a_fold_names_what_it_stands_for(tmp_path: Path, tree: Any, first: str) -> None:
    assert drawn(lines_of(tree, tmp_path))[0] == first


@pytest.mark.parametrize(
    "tree",
    [
        {"first": np.ones(3), "second": np.ones(3), "third": np.ones(3)},  # names of leaves say something
        {"ln1": {"scale": np.ones(3)}, "ln2": {"scale": np.ones(3)}},  # it saves one line
        {"one": {"a": np.ones(3), "b": np.ones(3)}, "two": {"a": np.ones(3), "b": np.ones(3, np.int8)}},
    ],
)
def test_what_a_fold_would_only_hide_is_not_folded(tmp_path: Path, tree: Mapping[str, Any]) -> None:
    lines = lines_of(tree, tmp_path)

    assert all(line.n_alike == 1 for line in lines)
    assert sum(line.leaf is not None for line in lines) == sum(
        line.n_leaves for line in lines if not line.guide
    )


def test_unfolded_each_leaf_has_its_line(tmp_path: Path) -> None:
    lines = lines_of({"blocks": [block() for _ in range(12)]}, tmp_path, folds=False)

    assert sum(line.leaf is not None for line in lines) == 36


def test_a_tree_that_is_a_leaf_has_one_line(tmp_path: Path) -> None:
    (line,) = lines_of(np.ones(3), tmp_path)

    assert (line.label, line.nbytes) == ("(the whole)", 24)


def test_show_draws_the_tree_for_people_and_lists_leaves_for_programs(tmp_path: Path, call: Any) -> None:
    tree = {"blocks": [block() for _ in range(3)], "step": 7}
    with penstock.sync.CheckpointManager(tmp_path / "run") as manager:
        manager.save(5, tree, metrics={"loss": 1 / 3})

    shown: Said = call("--table", "show", tmp_path / "run")
    lines = shown.out.splitlines()
    assert lines[0] == f"{tmp_path}/run/5"
    assert lines[2] == "metrics · loss 0.3333"
    assert [line.split() for line in lines[6:8]] == [
        ["blocks[0–2]", "×3", "624", "B"],
        ["├", "attn", "192", "B"],
    ]
    assert lines[-1] == "10 leaves, 10 of them arrays, 632 B"
    assert "no room" not in shown.out

    assert len(call("show", tmp_path / "run").rows) == 11  # with the metric
    unfolded = call("--table", "show", tmp_path / "run", "--unfold").out
    assert unfolded.count("attn") == 3


def test_show_reads_arrays_for_histograms_and_names_what_is_not_finite(tmp_path: Path, call: Any) -> None:
    tree = {"w": np.arange(32.0), "same": np.ones(9), "lost": np.array([1, np.nan, np.inf, 2]), "name": "x"}
    penstock.sync.save(tmp_path / "c", tree)

    said = call("--table", "show", tmp_path / "c", "--histogram").out
    rows = {line.split()[0]: line for line in said.splitlines() if line}

    assert rows["w"].split()[3:6] == ["█" * 16, "0", "31"]
    assert "all 1" in rows["same"]
    assert "1 NaN 1 inf" in rows["lost"]
