"""`cat` and `diff` read values, of whatever the path is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from tests.cli.conftest import EVIL, Said, Stored

import penstock
from penstock.inspection.leaf_values import compare_values, statistics_of

Call = Callable[..., Said]


def test_cat_tells_what_values_add_up_to(kept: Stored, call: Call) -> None:
    (weights,) = call("cat", kept.run, "['params']['w']", "--step", "1").rows

    assert weights == [
        "['params']['w']",
        "4x3",
        "float32",
        "1.0",
        "12.0",
        "6.5",
        repr(float(np.arange(12.0).std())),
        "0",
        "0",
        "0",
    ]


def test_cat_counts_what_is_not_finite(kept: Stored, call: Call) -> None:
    (document,) = call("cat", kept.run, EVIL, "--json").document

    assert document["statistics"]["n_nan"] == 3
    assert document["statistics"]["mean"] is None


def test_cat_prints_values_and_texts(kept: Stored, call: Call) -> None:
    assert call("cat", kept.tensors, "w", "--values").out.split() == [str(float(i)) for i in range(12)]
    assert call("cat", kept.step, "name", "--values").out == "\\x1b[31mred\n"
    assert call("cat", kept.items, "['a'][1]", "--item", "about").rows[0][3] == "two"


@pytest.mark.parametrize("at", range(6))
def test_every_kind_of_path_can_be_read(kept: Stored, call: Call, at: int) -> None:
    said = call("cat", kept.each()[at])

    assert (said.status, said.err) == (0, "")
    assert said.rows


def test_cat_reads_random_keys_and_small_floats(tmp_path: Path, call: Call) -> None:
    tree = {"key": jax.random.key(3), "half": jnp.ones(4, jnp.bfloat16)}
    penstock.sync.save(tmp_path / "c", tree)

    rows = {row[0]: row for row in call("cat", tmp_path / "c").rows}

    assert rows["['half']"][3:5] == ["1.0", "1.0"]
    assert rows["['key']"][4] == "3.0"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("absent",), "no leaf matches 'absent'; there are "),
        (("parms.w",), "no leaf matches 'parms.w'; did you mean 'params.w'?"),
        (("params", "--values"), "--values goes with one LEAF"),
    ],
)
def test_cat_says_what_it_cannot_find(
    kept: Stored, call: Call, arguments: tuple[str, ...], said: str
) -> None:
    failed = call("cat", kept.run, *arguments)

    assert (failed.status, failed.out) == (1, "")
    assert said in failed.err


def test_diff_of_the_same_is_nothing(kept: Stored, call: Call) -> None:
    for path in kept.each():
        assert call("diff", path, path).status == 0


def test_diff_finds_the_largest_differences_first(kept: Stored, tmp_path: Path, call: Call) -> None:
    first = {
        "a": np.zeros(4),
        "b": np.zeros((2, 2)),
        "same": np.full(2, np.nan),
        "old": 1,
        "shape": np.zeros(3),
    }
    second = {
        "a": np.array([0, 0, 0.5, 0]),
        "b": np.array([[0, 0], [0, -7.0]]),
        "same": np.full(2, np.nan),
        "new": 1,
    }
    penstock.sync.save(tmp_path / "a", first)
    penstock.sync.save(tmp_path / "b", {**second, "shape": np.zeros(4)})

    said = call("diff", tmp_path / "a", tmp_path / "b")

    assert said.status == 1
    assert said.rows == [
        ["only in A", "['old']", "int64 scalar", ""],
        ["only in B", "['new']", "", "int64 scalar"],
        ["changed", "['shape']", "float64 3", "float64 4"],
        ["values", "['b']", "[1,1]", "0.0", "-7.0", "7", "1", "4"],
        ["values", "['a']", "[2]", "0.0", "0.5", "0.5", "1", "4"],
    ]
    document = call("diff", tmp_path / "a", tmp_path / "b", "--json").document
    assert [entry["key_path"] for entry in document["values"]] == ["['b']", "['a']"]
    assert call("diff", tmp_path / "a", tmp_path / "b", "--structure", "--only", "a").status == 0


def test_diff_begins_with_a_summary_and_what_moved_most(tmp_path: Path, call: Call) -> None:
    penstock.sync.save(tmp_path / "a", {"far": np.full(4, 100.0), "much": np.ones(4), "same": 1, "old": 2})
    penstock.sync.save(
        tmp_path / "b", {"far": np.full(4, 103.0), "much": np.full(4, 2.0), "same": 1, "new": 2}
    )

    lines = call("--table", "diff", tmp_path / "a", tmp_path / "b").out.splitlines()

    assert lines[2] == "1 leaf equal (8 B) · 2 changed (64 B) · 1 added (8 B) · 1 removed (8 B)"
    assert [line.split()[:4] for line in lines[6:8]] == [
        ["much", "100%", "1", "all"],
        ["far", "3%", "3", "all"],
    ]
    assert [line.split()[:2] for line in lines[11:13]] == [["old", "removed"], ["new", "added"]]
    document = call("diff", tmp_path / "a", tmp_path / "b", "--json").document
    assert document["n_equal"] == 1
    assert [entry["moved"] for entry in document["values"]] == [1, pytest.approx(0.03)]


def test_diff_compares_steps_items_and_formats(kept: Stored, call: Call) -> None:
    assert call("diff", kept.run, "1", "--item", "default", "--only", "params.w").status == 1
    assert call("diff", kept.run, "1", "--item", "default", "--only", "['params']['b.c']").status == 0
    assert call("diff", kept.items, kept.tensors, "--item", "state").status == 2  # safetensors have no items
    assert call("diff", kept.items / "state", kept.tensors).status == 0


def test_diff_ends_with_2_if_something_goes_wrong(kept: Stored, call: Call) -> None:
    said = call("diff", kept.run, kept.folder / "nothing")

    assert (said.status, "does not exist" in said.err) == (2, True)
    assert call("diff", kept.items, kept.tensors).status == 2  # of two items, which is meant?
    assert call("diff", kept.run, kept.tensors).status == 1  # metrics are no tree


@pytest.mark.parametrize(
    ("first", "second", "largest"),
    [
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), None),
        (np.array([0.0]), np.array([-0.0]), None),
        (np.array([np.nan, 5.0]), np.array([1.0, 1.0]), np.nan),
        (np.array([2**62, 1]), np.array([2**62, 3]), 2.0),
        (np.array([1 + 1j]), np.array([1 + 1j]), None),
        (np.array([True]), np.array([False]), 1.0),
        (np.array([1], ml_dtypes.int4), np.array([3], ml_dtypes.int4), 2.0),
    ],
)
def test_compare_values_finds_the_largest_difference(
    first: npt.NDArray[Any], second: npt.NDArray[Any], largest: float | None
) -> None:
    found = compare_values(first, second)

    assert (found is None) == (largest is None)
    if found is not None and largest is not None:
        np.testing.assert_equal(found.largest, largest)


def test_statistics_of_extremes() -> None:
    about = statistics_of(np.array([-np.finfo(float).max, np.finfo(float).max, np.inf, np.nan, 0]))

    assert about is not None
    assert (about.n, about.n_infinite, about.n_nan, about.n_zero) == (5, 1, 1, 1)
    assert about.histogram is None
    empty = statistics_of(np.zeros(0))
    assert empty is not None
    assert empty.least is None
    assert statistics_of(np.array(["text"], object)) is None
