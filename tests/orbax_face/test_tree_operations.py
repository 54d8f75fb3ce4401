"""Trees merged, by the same calls to both libraries; markers of empty nodes."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.struct
import orbax.checkpoint
import pytest
from flax.core import FrozenDict
from tests.orbax_face.signatures import signature_difference

import penstock.orbax
import penstock.orbax.v1
from penstock.orbax.restore_tree import with_markers


class Pair(NamedTuple):
    left: Any
    right: Any


@flax.struct.dataclass
class State:
    step: Any
    params: Any


THEIRS: Any = orbax.checkpoint
OURS: Any = penstock.orbax
TREES: list[Any] = [
    {"x": [1, 2, 3], "y": "same", "z": {"p": {}, "q": 4, "r": 6}},
    {"x": [1, 3], "y": "same", "z": {"p": {}, "q": 5, "s": 6}},
    {"x": [1, 2, 3], "y": 1.0},
    {"n": None, "y": 2.0},
    {"n": 1, "z": {"q": None}},
    Pair(1, {"c": 2}),
    Pair(1.5, {"c": "2"}),
    {"left": 1, "right": {"c": 2, "d": 3}},
    State(1, {"w": [2]}),
    State(1, {"w": [2.5], "b": 3}),
    (1, {"c": 2}),
    [1, {"c": 2}],
    {"0": 1, "1": {"c": 2}},
    {},
    None,
    5,
]
PAIRS = [(a, b) for a in TREES for b in TREES]


def outcome(function: Any, *args: Any, **options: Any) -> Any:
    """What a call returns; `Exception` if it refuses."""
    try:
        return function(*args, **options)
    except Exception:
        return Exception


FROZEN: Any = FrozenDict  # not annotated


class Nothing(NamedTuple):
    pass


@flax.struct.dataclass
class Empty:
    pass


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_a_tree_without_empty_classes_needs_no_marker_and_is_not_made_anew(tree: Any) -> None:
    assert with_markers(tree) is tree


@pytest.mark.parametrize("node", [Nothing(), Empty(), FROZEN()], ids=repr)
def test_empty_nodes_of_registered_classes_are_marked_wherever_they_stand(node: Any) -> None:
    marker: Any = {} if isinstance(node, FrozenDict) else None
    assert with_markers(node) == marker
    for tree, marked in (
        ({"a": 1, "b": node}, {"a": 1, "b": marker}),
        ({"a": [1, {"b": (2, [node], {})}]}, {"a": [1, {"b": (2, [marker], {})}]}),
        (Pair(1, [node]), Pair(1, [marker])),
        (State((), {"w": (None, node)}), State((), {"w": (None, marker)})),
    ):
        assert with_markers(tree) == marked


@pytest.mark.parametrize("overwrite", [False, True])
def test_trees_are_merged(overwrite: bool) -> None:
    assert OURS.tree.merge_trees() == THEIRS.tree.merge_trees() == {}
    for a, b in PAIRS:
        mine, other = (outcome(ocp.tree.merge_trees, a, b, overwrite=overwrite) for ocp in (OURS, THEIRS))
        if not overwrite or other is not Exception:  # where types differ, Orbax trips now and then
            assert mine == other, (a, b)


def test_the_signature_is_orbaxs() -> None:
    assert signature_difference(OURS.tree.merge_trees, THEIRS.tree.merge_trees) is None


def test_the_older_and_the_newer_api_merge_alike() -> None:
    assert penstock.orbax.v1.tree.merge is OURS.tree.merge_trees
