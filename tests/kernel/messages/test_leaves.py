"""Leaves in columns: to a stage a sequence of `Leaf`s, and few objects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from penstock.handlers import NumpyHandler
from penstock.kernel import KeyKind, Leaf, LeafSpec, ParamInfo
from penstock.kernel.messages.save import Leaves, in_columns

HANDLER = NumpyHandler()
SPECS = [LeafSpec("np.ndarray", (size,), "int8", 1, (size,)) for size in (1, 2, 3)]
INFOS = [ParamInfo((name,), (KeyKind.MAPPING,), f"['{name}']") for name in "abc"]


def columns() -> Leaves:
    values = [np.zeros(size, np.int8) for size in (1, 2, 3)]
    return Leaves(range(3), SPECS, cast("list[object]", values), INFOS, cast("Any", [HANDLER] * 3))


def test_a_leaf_of_the_columns_has_what_they_have() -> None:
    found = columns()
    leaf = found[1]

    assert (leaf.index, leaf.info, leaf.spec, leaf.handler) == (1, INFOS[1], SPECS[1], HANDLER)
    assert found.values is not None
    assert leaf.value is found.values[1]
    assert found.are_described
    assert [one.index for one in found] == [0, 1, 2]
    assert found.sizes == [1, 2, 3]
    assert found.without_values()[1].value is None


def test_a_part_keeps_the_order_of_the_numbers() -> None:
    assert [leaf.index for leaf in columns().part([2, 0, 1])] == [2, 0, 1]
    assert [leaf.index for leaf in columns()[1:]] == [1, 2]


def test_a_part_without_a_gap_shares_the_columns() -> None:
    """Numbers of a million leaves, each an object, would take 40 MB."""
    assert columns().part([1, 2]).indices == range(1, 3)
    assert columns().part([0, 2]).indices == [0, 2]
    assert columns().part([0, 2, 1]).indices == [0, 2, 1]  # the ends alone do not tell
    assert len(columns().part([])) == 0


def test_what_is_taken_is_no_longer_held() -> None:
    found = columns()
    taken = found.take(1, 3)

    assert taken.values is not None
    assert found.values is not None
    assert [value is None for value in found.values] == [False, True, True]
    assert [value is None for value in taken.values] == [False, False]


def parts(leaf: Leaf) -> tuple[object, ...]:
    return leaf.index, leaf.info, id(leaf.value), leaf.spec, leaf.handler  # arrays have no truth


@pytest.mark.parametrize("changed", [False, True])
def test_leaves_put_into_columns_stay_what_they_are(changed: bool) -> None:
    leaves = list(columns())
    if changed:
        leaves[2] = replace(leaves[2], value=None)

    found = in_columns(leaves)
    assert list(map(parts, found)) == list(map(parts, leaves))
    assert not found.are_described  # nobody compared them
    assert in_columns(found) is found


def test_a_leaf_that_comes_twice_stays_twice() -> None:
    leaf = columns()[1]
    assert [one.index for one in Leaves.of((leaf, leaf))] == [1, 1]


def test_leaves_that_a_stage_passed_on_one_by_one_are_to_be_compared() -> None:
    found = columns()
    assert found.part([2, 0]).are_described
    assert not Leaves.of(found).are_described
    assert not in_columns(tuple(found)).are_described
